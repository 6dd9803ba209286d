"""The configuration: one frozen dataclass, the command line made from it, and the check of its values.

Knows no torch, no environment and no file but the ones a flag names. Run as a script it checks a command
line and exits: `python config.py --epochs 0`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

# Not those of pathlib, which raise where a folder forbids to look, or a name is too long.
from os.path import commonpath, exists, isdir, realpath
from typing import Any, NoReturn

from errors import UserError
from output import end_when_unread

DATASETS = (
    "synthetic",
    "ml-100k",
    "ml-1m",
    "ml-10m",
    "ml-20m",
    "ml-25m",
    "ml-32m",
    "ml-latest-small",
    "ml-latest",
)
OFFICIAL_SPLITS = ("u1", "u2", "u3", "u4", "u5", "ua", "ub")
CHOICES = {
    "dataset": DATASETS,
    "checkpoint": ("best", "latest"),
    "task": ("rating", "ranking"),
    "split": ("time", "random", "leave_one_out", *OFFICIAL_SPLITS),
    "bad_rows": ("error", "skip"),
    "duplicates": ("last", "first", "mean", "keep"),
    "pipeline": ("auto", "plain", "sparse_dist"),
    "mp_context": ("spawn", "forkserver", "fork"),
}

# The most that anything could use: beyond these a mistyped number would end as an exhausted machine.
LIMITS = {
    "batch_size": 2**24,
    "embedding_dim": 2**14,
    "epochs": 1_000_000,
    "history": 10_000,
    "num_workers": 1024,
    "prefetch_factor": 64,
    "profile": 10_000,
    "top": 10_000,
}
# Of --mlp_dims.
WIDEST, DEEPEST = 2**14, 100

# Of --weight_decay in all passes: rows are held divided by what they decayed to, which has to be a float32.
MOST_DECAY = 60

# Flags that have a second, longer name.
LONG_NAMES = {"inc_dump": "incremental_dump"}
# What --load without a folder means.
NEWEST = "newest"
# Modes that train, and modes that one process runs alone, without a process group.
TRAINING = ("train", "dump", "inc_dump", "resume")
ALONE = ("doctor", "export", "recommend")


@dataclass(frozen=True)
class Config:
    """Everything a run depends on, besides the machine it runs on."""

    train: bool = False
    """Train a model, validate it after every epoch and test it in the end; what happens when no mode is
    named."""

    doctor: bool = False
    """Examine this machine and print one page: versions, devices, cores, memory, workers, data; trains
    nothing."""

    dump: bool = False
    """Train, and dump the model to --save_dir at the end of every epoch."""

    inc_dump: bool = False
    """Train, and dump increments to --save_dir: a full dump first, then at every moment to dump the rows that
    changed since the last one; with --dump the end of an epoch gets a full dump too."""

    resume: bool = False
    """Go on from the newest state in --save_dir, or begin where there is none; dumps like --dump, or with
    --inc_dump increments."""

    load: str = ""
    """Evaluate a dump or increment: the folder named, or the --checkpoint in --save_dir where none is
    named."""

    compact: bool = False
    """Fold the newest increments in --save_dir and the dump that they build on into one new dump."""

    export: str = ""
    """New folder that gets the --checkpoint in --save_dir, whole and without its optimizer, for a server."""

    recommend: bool = False
    """Print what the --checkpoint in --save_dir recommends to --user."""

    user: str = ""
    """Raw id of the user that --recommend is for."""

    top: int = 10
    """How many movies --recommend prints."""

    follow: bool = False
    """Have --recommend take the newest state, and go on: it prints again whenever there is a newer one."""

    until: int = -1
    """Step after which --load replays no more increments; -1 means all of them."""

    checkpoint: str = "best"
    """Which state in --save_dir is loaded, exported or asked: the best on the validation ratings, or the
    latest. --resume and --follow take the latest, --until and a folder that is named say it themselves."""

    task: str = "rating"
    """What is learned: how many stars a user gives (rating), or which movie a user rates at all (ranking)."""

    dataset: str = ""
    """Which ratings: a MovieLens set, downloaded when absent, or synthetic; empty means what --data_path
    holds, and synthetic without one."""

    data_path: str = ""
    """Folder that holds the files, or is to hold them; empty means data/NAME in the repository."""

    cache_dir: str = ""
    """Folder for the columns made from the files; empty means .columns beside the files."""

    synthetic_ratings: int = 1_000_000
    """Number of ratings in the synthetic data set."""

    split: str = "time"
    """Which ratings are the test: the newest (time), some drawn by the seed (random), the newest of each user
    (leave_one_out), or an official split of ml-100k."""

    test_fraction: float = 0.2
    """Share of the ratings that is the test, for --split time and random."""

    validation_fraction: float = 0.01
    """Share of the ratings beside the test that is not trained on but evaluated after every epoch; 0 means
    none, and no early stopping."""

    bad_rows: str = "error"
    """What a row that cannot be read does: error stops, skip counts and reports it."""

    max_bad_rows: float = 0.01
    """Share of the rows of a file that --bad_rows skip may leave out; more stop."""

    duplicates: str = "last"
    """Which of several ratings of one movie by one user counts: the last in time, the first, or their mean,
    which has the time of the last; or keep, all of them, also where the split comes between them."""

    epochs: int = 8
    """Passes over the training ratings, unless --patience ends the training before."""

    patience: int = 2
    """Epochs in a row without a better validation result after which the training ends; 0 means never."""

    batch_size: int = 2048
    """Ratings per rank and step; the global batch is this times the number of ranks."""

    lr: float = 0.04
    """Learning rate of the embedding tables (row-wise Adagrad) for a global batch of 4,096 ratings; for
    others times the root of the ratio; falls linearly to zero over the run."""

    dense_lr: float = 0.001
    """Learning rate of the dense part (AdamW), falling like --lr."""

    weight_decay: float = 0.1
    """Decoupled decay of all table rows, looked up or not: in a pass they shrink by the factor
    exp(-weight_decay), less as --lr falls."""

    dense_weight_decay: float = 20.0
    """Decoupled decay of the dense part: times --dense_lr, the share by which it shrinks in a step."""

    embedding_dim: int = 32
    """Numbers per table row, a multiple of 4: the first is the row's bias, the others its factors."""

    mlp_dims: tuple[int, ...] = (64, 32)
    """Widths of the hidden layers of the MLP, comma-separated."""

    pipeline: str = "auto"
    """Training loop: plain, sparse_dist (TorchRec's TrainPipelineSparseDist), or auto: sparse_dist on
    CUDA, else plain."""

    history: int = 30
    """How many of the last movies that the user rated strictly before a rating the model is told of, each
    with its rating."""

    num_workers: int | str = 0
    """Worker processes per rank that make batches; 0 makes them in the main process, auto decides after
    some steps."""

    mp_context: str = "spawn"
    """How workers start: spawn, forkserver (a second pool starts faster), or fork (refused once CUDA is
    initialised)."""

    prefetch_factor: int = 2
    """Batches that each worker makes ahead."""

    worker_timeout: int = 120
    """Seconds that a rank waits for a worker's batch."""

    save_dir: str = "dumps"
    """Folder of the dumps, the same one for all ranks."""

    dump_every: int = 0
    """Dump after every so many steps too; 0 means at the end of an epoch alone."""

    keep: int = 3
    """How many full dumps are kept: the newest; the best, and those that increments build on, stay too."""

    async_dump: bool = False
    """Write full dumps while the training goes on, from a copy in memory."""

    seed: int = 0
    """Seed of everything that is drawn: data, split, order, initial weights."""

    timeout: int = 300
    """Seconds that a rank waits for the others in training; preparing data may take longer."""

    report_dir: str = ""
    """Folder that gets metrics.json and curves.png; empty means no report."""

    profile: int = 0
    """Training steps that rank 0 records with PyTorch's profiler after a warm-up, for a table of the
    costliest parts and a trace.json in --report_dir or the current folder; 0 means none."""

    tensorboard: bool = False
    """Write losses, learning rates, speed and metrics for TensorBoard into --report_dir/tensorboard."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to run, in the order of a model's life."""
        chosen = [mode for mode in ("compact", "load") if getattr(self, mode)]
        trains = not chosen or any(getattr(self, mode) for mode in TRAINING)
        return (*(["train"] if trains else []), *chosen)

    @property
    def is_alone(self) -> bool:
        """Whether one process does all of it, without a process group."""
        return any(getattr(self, mode) for mode in ALONE)

    @property
    def dumps(self) -> bool:
        """Whether the training is dumped."""
        return self.dump or self.inc_dump or self.resume

    @property
    def is_synthetic(self) -> bool:
        """Whether the ratings are drawn instead of read from files that were there."""
        return self.dataset == "synthetic" or not (self.dataset or self.data_path)


def parse_args(argv: list[str] | None = None) -> Config:
    """Read a command line (`sys.argv` when None) into a checked `Config`.

    Raises:
        UserError: on an unknown flag, a value that does not parse, or one that `validate` refuses.
    """
    return parse_given(argv)[0]


def parse_given(argv: list[str] | None = None) -> tuple[Config, frozenset[str]]:
    """`parse_args`, and the names of the flags that were given, also of those with their default value.

    Raises:
        UserError: see `parse_args`.
    """
    found, unknown = _build_parser().parse_known_args(argv)
    if unknown:
        raise UserError(
            f"Unrecognized arguments: {' '.join(unknown)}{_meant(unknown)}; see --help for every flag."
        )
    values = vars(found)
    config = Config(**values)
    validate(config)
    _require(
        not config.follow or "checkpoint" not in values or config.checkpoint == "latest",
        f"--follow takes the latest state, not the {config.checkpoint}; leave out --checkpoint",
    )
    return config, frozenset(values)


def validate(config: Config) -> None:
    """Refuse impossible values, each with its own sentence.

    Raises:
        UserError: for the first fault found.
    """
    _check_modes(config)
    _check_run(config)
    _check_learning(config)
    _check_data(config)


def _check_modes(config: Config) -> None:
    chosen = [mode for mode in (*ALONE, "compact", *TRAINING, "load") if getattr(config, mode)]
    excluded = (
        chosen[1:]
        if config.is_alone
        else [mode for mode in chosen[1:] if config.compact and mode in TRAINING]
    )
    for other in excluded:
        _require(False, f"--{chosen[0]} and --{other} exclude each other; give one of them")
    for name in ("dump_every", "keep", "async_dump"):
        _require(
            config.dumps or (config.compact and name == "keep") or _is_default(config, name),
            f"--{name} says how dumps are made, and none are made; give --dump too",
        )
    _require(
        bool(config.dumps or config.load or config.compact or config.export or config.recommend)
        or _is_default(config, "save_dir"),
        f"--save_dir {config.save_dir} is for dumps, and none are made or read; give --dump or --load too",
    )
    _require(
        config.until == -1 or bool(config.load),
        f"--until {config.until} says where a load stops, and none is asked for; give --load too",
    )
    save_dir = realpath(config.save_dir)
    _require(
        config.load in ("", NEWEST)
        or "train" not in config.modes
        or commonpath((save_dir, realpath(config.load))) == save_dir,
        f"--load {config.load} is not in --save_dir {config.save_dir}, to which the training asked for too "
        "writes; give --load alone, or without a folder",
    )
    _require(config.until >= -1, f"--until {config.until} is no step; give the number of one, 0 or more")
    _require(
        bool(config.load or config.export or config.recommend) or _is_default(config, "checkpoint"),
        f"--checkpoint {config.checkpoint} says what is read, and nothing is; give --load too",
    )
    for name in ("user", "top", "follow"):
        _require(
            config.recommend or _is_default(config, name),
            f"--{name} says what is recommended, and nothing is; give --recommend too",
        )
    trains = "train" in config.modes and not (config.export or config.recommend)
    for name in ("profile", "tensorboard"):
        _require(
            trains or _is_default(config, name),
            f"--{name} looks at a training, and none is asked for; give --train too",
        )
    _require(not config.recommend or bool(config.user), "--recommend needs --user, the raw id of a user")


def _is_default(config: Config, name: str) -> bool:
    return bool(getattr(config, name) == getattr(Config, name))


def _check_run(config: Config) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        _require(
            value in choices or _is_default(config, name),
            f"--{name} {value} is not known; choose one of {', '.join(choices)}",
        )
    for name in ("epochs", "batch_size", "timeout", "worker_timeout", "prefetch_factor", "keep", "top"):
        value = getattr(config, name)
        _require(value >= 1, f"--{name} {value} is too small; give at least 1")
    for name, most in LIMITS.items():
        value = getattr(config, name)
        _require(value == "auto" or value <= most, f"--{name} {value} is too large; give at most {most:,}")
    _require(config.timeout <= 604_800, f"--timeout {config.timeout} is more than a week; give less")
    _require(
        config.num_workers == "auto" or (isinstance(config.num_workers, int) and config.num_workers >= 0),
        f"--num_workers {config.num_workers} is negative; give 0 to make batches in the main process",
    )
    _require(
        config.num_workers == 0 or config.worker_timeout < config.timeout,
        f"--worker_timeout {config.worker_timeout} is not below --timeout {config.timeout}, so other ranks "
        "would give up before a silent worker is named; give a smaller one",
    )
    _require(config.dump_every >= 0, f"--dump_every {config.dump_every} is negative; give 0 for none")
    _require(
        bool(config.report_dir) or not config.tensorboard,
        "--tensorboard writes into --report_dir, and there is none; give one",
    )
    _require(config.profile >= 0, f"--profile {config.profile} is negative; give 0 for none")
    _require(config.history >= 0, f"--history {config.history} is negative; give 0 for none")
    _require(config.patience >= 0, f"--patience {config.patience} is negative; give 0 to never stop early")


def _check_learning(config: Config) -> None:
    for name in ("lr", "dense_lr"):
        value = getattr(config, name)
        _require(0 < value < float("inf"), f"--{name} {value} cannot learn; give a number above 0")
    _require(
        # Half, for the rate falls to zero.
        0 <= config.weight_decay * config.epochs / 2 <= MOST_DECAY,
        f"--weight_decay {config.weight_decay} over --epochs {config.epochs} leaves nothing of a row; give 0 "
        f"to {2 * MOST_DECAY} / --epochs",
    )
    _require(
        0 <= config.dense_weight_decay * config.dense_lr < 1,
        f"--dense_weight_decay {config.dense_weight_decay} times --dense_lr {config.dense_lr} would shrink "
        "the dense part by more than all of it; give 0 to 1 / --dense_lr",
    )
    _require(
        config.embedding_dim >= 4 and config.embedding_dim % 4 == 0,
        f"--embedding_dim {config.embedding_dim} does not fit FBGEMM's kernels; give a multiple of 4",
    )
    _require(
        len(config.mlp_dims) > 0 and min(config.mlp_dims) >= 1,
        f"--mlp_dims {_comma(config.mlp_dims)} has a layer without a unit; give widths of at least 1",
    )
    _require(
        max(config.mlp_dims) <= WIDEST and len(config.mlp_dims) <= DEEPEST,
        f"--mlp_dims {_comma(config.mlp_dims)} is too large; give at most {DEEPEST} layers of {WIDEST:,}",
    )
    _require(
        0 <= config.seed < 2**31, f"--seed {config.seed} is out of range; give a number from 0 to 2147483647"
    )


def _check_data(config: Config) -> None:
    _require(
        1_000 <= config.synthetic_ratings <= 1_000_000_000,
        f"--synthetic_ratings {config.synthetic_ratings} is out of range; give 1,000 to 1,000,000,000",
    )
    _require(
        0 < config.test_fraction < 1,
        f"--test_fraction {config.test_fraction} leaves no training or no test; give 0.1, say",
    )
    _require(
        0 <= config.max_bad_rows <= 1,
        f"--max_bad_rows {config.max_bad_rows} is no share; give 0 to 1",
    )
    _require(
        config.bad_rows == "skip" or _is_default(config, "max_bad_rows"),
        f"--max_bad_rows {config.max_bad_rows} says how many rows are left out, and none are; give "
        "--bad_rows skip too",
    )
    _require(
        0 <= config.validation_fraction < 1,
        f"--validation_fraction {config.validation_fraction} leaves no training or is negative; give 0.01, "
        "say, or 0 for none",
    )
    _require(
        config.split not in OFFICIAL_SPLITS or config.dataset in ("", "ml-100k"),
        f"--split {config.split} belongs to ml-100k, not to {config.dataset}; give --split time or random",
    )
    _require(
        not config.data_path or bool(config.dataset) or exists(config.data_path),
        f"--data_path {config.data_path} is not there; give the folder of the unpacked files, or --dataset "
        "NAME to download a set there",
    )
    for name in ("data_path", "cache_dir", "report_dir", "save_dir"):
        path = getattr(config, name)
        _require(not exists(path) or isdir(path), f"--{name} {path} is a file; give a folder")


def _comma(widths: tuple[int, ...]) -> str:
    return ",".join(map(str, widths))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(f"{sentence}.")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing, so that one rank can speak for all."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help for every flag.")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="example.py",
        description="Train a sharded recommender on MovieLens.",
        # A prefix that fits today may fit two flags tomorrow.
        allow_abbrev=False,
        # What is found was given; the rest has the defaults of `Config`.
        argument_default=argparse.SUPPRESS,
    )
    sentences = _field_sentences()
    for field in dataclasses.fields(Config):
        flag, text, default = f"--{field.name}", sentences[field.name], field.default
        if isinstance(default, bool):
            long = [f"--{LONG_NAMES[field.name]}"] if field.name in LONG_NAMES else []
            parser.add_argument(flag, *long, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        shown = _comma(default) if isinstance(default, tuple) else default
        suffix = "" if shown == "" else f" (default: {shown})"
        kind = KINDS.get(field.name, type(default))
        if field.name == "load":
            parser.add_argument(flag, type=kind, nargs="?", const=NEWEST, metavar="FOLDER", help=text)
            continue
        text = text.replace("%", "%%") + suffix
        parser.add_argument(flag, type=kind, metavar=_metavar(field.name), help=text)
    return parser


def _meant(unknown: list[str]) -> str:
    """The flags that others look like, as a question in brackets."""
    names = [*(field.name for field in dataclasses.fields(Config)), *LONG_NAMES.values()]
    flags = [f"--{name}" for name in names]
    given = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    meant = [flag for word in given for flag in difflib.get_close_matches(word, flags, n=1)]
    return f" (did you mean {' and '.join(dict.fromkeys(meant))}?)" if meant else ""


def _metavar(name: str) -> str:
    return "{" + ",".join(CHOICES[name]) + "}" if name in CHOICES else name.split("_")[-1].upper()


def _workers(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 128,64") from None


def _folder(text: str) -> str:
    """Refuses what a variable of a shell that was never set becomes."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; name one, or leave the flag out")
    return text


# Flags that name a folder.
FOLDERS = ("data_path", "cache_dir", "save_dir", "report_dir", "load", "export")
# How the text after a flag becomes a value, where the type of its default does not say it.
KINDS: dict[str, Callable[[str], Any]] = {
    "num_workers": _workers,
    "mlp_dims": _widths,
    **dict.fromkeys(FOLDERS, _folder),
}


def _field_sentences() -> dict[str, str]:
    """The sentence under each field of `Config`, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(Config))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(below, ast.Expr)
            assert isinstance(below.value, ast.Constant)
            sentences[statement.target.id] = inspect.cleandoc(str(below.value.value))
    return sentences


if __name__ == "__main__":
    end_when_unread()
    try:
        parse_args()
    except UserError as error:
        print(f"example.py: {error}", file=sys.stderr)
        sys.exit(2)
