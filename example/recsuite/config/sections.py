"""The flags: a section for each subject, with its limits.

An error is one sentence with the flag, its value and a valid alternative.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os.path import exists
from typing import ClassVar

from recsuite.config.presets import AUTO, NONE, PRESETS
from recsuite.errors import UserError


def require(condition: bool, sentence: str) -> None:
    """Check a condition.

    Raises:
        UserError: the sentence.
    """
    if not condition:
        raise UserError(f"{sentence}.")


@dataclass(frozen=True)
class Section:
    """A group of flags. Each is a field, with a help text under it that --help prints.

    CHOICES: the values that a field may have. POSITIVE: fields that are at least 1. NOT_NEGATIVE: fields of
    which 0 means none. MOST: upper limits, because a larger, mistyped number would exhaust the machine.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    POSITIVE: ClassVar[tuple[str, ...]] = ()
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ()
    MOST: ClassVar[Mapping[str, int]] = {}

    def validate(self) -> None:
        """Refuse impossible values, each with its own message.

        Raises:
            UserError: for the first fault found.
        """
        for name, choices in self.CHOICES.items():
            value = getattr(self, name)
            # A default may be none of the choices: an empty one means that none was chosen.
            known = value in choices or self.is_default(name)
            require(known, f"--{name} {value} is not known; choose one of {', '.join(choices)}")
        for name in self.POSITIVE:
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} is too small; give at least 1")
        for name in self.NOT_NEGATIVE:
            value = getattr(self, name)
            require(value >= 0, f"--{name} {value} is negative; give 0 for none")
        for name, most in self.MOST.items():
            value = getattr(self, name)
            # --num_workers has a limit, but may also be a word.
            fits = value == "auto" or value <= most
            require(fits, f"--{name} {value} is too large; give at most {most:,}")

    def is_default(self, name: str) -> bool:
        """True if a field has its default value."""
        # A dataclass keeps the default of a field as an attribute of the class.
        return bool(getattr(self, name) == getattr(type(self), name))


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
# Upper limit of a duration: a hundred years of seconds, and more steps or events than any run has.
MOST_SECONDS, MOST_NUMBER = 36_525 * 86_400, 2**40
PATTERN = re.compile(r"(\d+)([smhdw]?)", re.ASCII)


@dataclass(frozen=True)
class Duration:
    """Seconds of event time, or a number of things such as steps or events."""

    amount: int
    is_time: bool


def duration(flag: str, text: str, things: str) -> Duration:
    """Parse the text of a flag as a duration. things: the unit of a number without one, as in "steps".

    Raises:
        UserError: when it is neither a time nor a number, or beyond what either may be.
    """
    found = PATTERN.fullmatch(text.strip())
    require(
        found is not None and len(found[1]) <= 15,
        f"--{flag} {text} is neither a time nor a number; give a time such as 12h or 90d (s, m, h, d or w), "
        f"or a number of {things}",
    )
    assert found is not None
    amount, is_time = int(found[1]) * SECONDS.get(found[2], 1), bool(found[2])
    most = MOST_SECONDS if is_time else MOST_NUMBER
    require(amount <= most, f"--{flag} {text} is too large; give at most {'36525d' if is_time else most}")
    return Duration(amount, is_time)


OFFICIAL_SPLITS = ("u1", "u2", "u3", "u4", "u5", "ua", "ub")
# Named here too: the configuration is a lower layer than the data sets, and must not import them.
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


@dataclass(frozen=True)
class DataConfig(Section):
    """Ratings to read, and their split into training, validation and test."""

    CHOICES: ClassVar = {
        "dataset": DATASETS,
        "world": ("fixed", "moving", "chain"),
        "split": ("time", "random", "leave_one_out", "files", *OFFICIAL_SPLITS),
        "bad_rows": ("error", "skip"),
        "duplicates": ("auto", "last", "first", "mean", "keep"),
        "seen": ("auto", "exclude", "allow"),
        "days": ("none", "user"),
    }
    NOT_NEGATIVE: ClassVar = ("history", "audience", "others")
    MOST: ClassVar = {"history": 10_000, "audience": 10_000, "others": 10_000}

    dataset: str = ""
    """Which ratings: a MovieLens set, downloaded when absent, or synthetic; empty means what --data_path
    holds, and synthetic without one."""

    data_path: str = ""
    """Folder that holds the files, or is to hold them; or your own tables, a folder, a file or a URL, see
    docs/your_data.md; empty means data/NAME in the repository, or in the
    working directory where the library was installed without it."""

    schema: str = ""
    """Folder, file or URL of tables of your own: write a schema.toml beside them that says what their columns
    mean, for you to correct; trains nothing."""

    cache_dir: str = ""
    """Folder for the columns made from the files; empty means .columns beside the files."""

    rebuild: bool = False
    """Make the columns again, also where they are there and whole: once for a launch, whatever starts again
    in it."""

    synthetic_ratings: int = 1_000_000
    """Number of ratings in the synthetic data set."""

    world: str = "fixed"
    """What synthetic ratings are drawn from: users, items and tastes that stay (fixed), users and items that
    come and go, and tastes that turn (moving), or walks in which the next item follows from the last one
    (chain)."""

    split: str = "time"
    """Which ratings are the test: the newest (time), some drawn by the seed (random), the newest of each user
    (leave_one_out), the files of your own tables that are called so (files), or an official split of
    ml-100k."""

    test_fraction: float = 0.2
    """Share of the ratings that is the test, for --split time and random."""

    # Validation events are not trained on, and a hundredth of them is enough for early stopping.
    validation_fraction: float = 0.01
    """Share of the ratings beside the test that is not trained on but evaluated after every epoch; 0 means
    none, and no early stopping."""

    bad_rows: str = "error"
    """What a row that cannot be read does: error stops, skip counts and reports it."""

    # The data sets of GroupLens have no bad row. A file with more than a few is read in the wrong format.
    max_bad_rows: float = 0.01
    """Share of the rows of a file that --bad_rows skip may leave out; more stop."""

    # Several ratings of one pair would lie on both sides of a random split: leakage of training into the
    # test. The last rating is the one a served model would know. Of clicks the first is kept: with the last,
    # an item would leave the training of a user who had it before, and the model would learn that it is
    # still to come.
    duplicates: str = "auto"
    """Which of several events of one item and one user counts: the last in time, the first, or their mean,
    which has the time of the last; keep counts all of them, also where the split comes between them; auto
    counts the first of clicks and counts where the test is newer than the training, and else the last."""

    seen: str = "auto"
    """Items that a user already had, in a ranking: neither negatives, nor ranked, nor recommended (exclude),
    or like any other item (allow); auto allows them if a tenth of the training events repeat an item of their
    user, which --duplicates keep leaves. Serving follows it."""

    history: int = 30
    """How many of the items that the user rated last, strictly before a rating, the model receives with it,
    each with its rating; 0 means none."""

    audience: int = 0
    """How many of the users who rated the item last, strictly before a rating, the model receives with it;
    0 means none but for what --others adds."""

    others: int = 0
    """With --split random and the official splits, where what came later is no secret, the model receives
    with a rating, instead of what came before, all other items of its user and all other users of its item, a
    sample of so many where there are more; 0 means that --history and --audience count there too."""

    days: str = "none"
    """With --split random and the official splits, what the day of a rating tells: a row of its own for each
    day of each user (user), or nothing (none)."""

    @property
    def lists(self) -> dict[str, int]:
        """Maximum lengths of user histories and item histories; 0 for none."""
        if self.shares_lists:
            return {"history": self.others if self.history else 0, "audience": self.others}
        return {"history": self.history, "audience": self.audience}

    @property
    def shares_lists(self) -> bool:
        """True if all events of one user share a list, and all events of one item too."""
        return self.others > 0 and self.is_unordered

    @property
    def keeps_repeats(self) -> bool:
        """True if all events of a (user, item) pair are kept. --split files keeps test files unchanged."""
        return self.duplicates == "keep" or self.split == "files"

    def duplicates_of(self, label_kind: str) -> str:
        """Return which event of a (user, item) pair to keep, for a kind of label in `schema.LABEL_KINDS`."""
        if self.keeps_repeats:
            return "keep"
        if self.duplicates != "auto":
            return self.duplicates
        return "first" if label_kind in ("clicks", "count") and not self.is_unordered else "last"

    @property
    def is_unordered(self) -> bool:
        """True if later events are no leakage, because the test is not later than the training."""
        return self.split == "random" or self.split in OFFICIAL_SPLITS

    @property
    def is_synthetic(self) -> bool:
        """True if the ratings are synthetic, not read from existing files."""
        return self.dataset == "synthetic" or not (self.dataset or self.data_path)

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            0 < self.test_fraction < 1,
            f"--test_fraction {self.test_fraction} leaves no training or no test; give 0.1, say",
        )
        require(
            0 <= self.max_bad_rows <= 1,
            f"--max_bad_rows {self.max_bad_rows} is not a share; give 0 to 1",
        )
        require(
            self.bad_rows == "skip" or self.is_default("max_bad_rows"),
            f"--max_bad_rows {self.max_bad_rows} says how many rows are left out, and none are; give "
            "--bad_rows skip too",
        )
        require(
            0 <= self.validation_fraction < 1,
            f"--validation_fraction {self.validation_fraction} leaves no training or is negative; give 0.01, "
            "say, or 0 for none",
        )
        require(
            1_000 <= self.synthetic_ratings <= 1_000_000_000,
            f"--synthetic_ratings {self.synthetic_ratings} is out of range; give 1,000 to 1,000,000,000",
        )
        require(
            self.is_synthetic or self.is_default("world"),
            f"--world {self.world} says what synthetic ratings are drawn from, and these are others; leave "
            "it out, or give --dataset synthetic",
        )
        require(
            self.is_default("days") or self.is_unordered,
            f"--days {self.days} learns of days, and with --split {self.split} none of the test is one of "
            "the training; leave it out, or give --split random",
        )
        require(
            self.split != "files" or self.is_default("duplicates") or self.duplicates == "keep",
            f"--duplicates {self.duplicates} takes ratings out of the test, which --split files keeps; "
            "leave it out",
        )
        require(
            self.split not in OFFICIAL_SPLITS or self.dataset in ("", "ml-100k"),
            f"--split {self.split} belongs to ml-100k, not to {self.dataset}; give --split time or random",
        )
        require(
            not self.data_path or bool(self.dataset) or "://" in self.data_path or exists(self.data_path),
            f"--data_path {self.data_path} is not there; give the folder or the file of your data, or "
            "--dataset NAME to download a set there",
        )


@dataclass(frozen=True)
class LoaderConfig(Section):
    """Batches, and the workers that make them."""

    CHOICES: ClassVar = {"mp_context": ("spawn", "forkserver", "fork")}
    POSITIVE: ClassVar = ("batch_size", "prefetch_factor", "worker_timeout")
    MOST: ClassVar = {"batch_size": 2**24, "num_workers": 1024, "prefetch_factor": 64}

    batch_size: int = 2048
    """Ratings per rank and step; the global batch is this times the number of ranks."""

    # With columns in memory one process makes batches faster than the ranks train on them. Workers pay off
    # if a row costs processor time, see docs/loader.md.
    num_workers: int | str = 0
    """Worker processes per rank that make batches; 0 makes them in the main process, auto decides after
    some steps."""

    # A forked worker inherits the locks of the trainer's threads, held or not, and a CUDA context that it
    # cannot use or free.
    mp_context: str = "spawn"
    """How workers start: spawn, forkserver (a second pool starts faster), or fork (refused once CUDA is
    initialised)."""

    prefetch_factor: int = 2
    """Batches that each worker makes ahead."""

    # Below --timeout, so that a silent worker is reported before other ranks give up waiting for this one.
    worker_timeout: int = 120
    """Seconds that a rank waits for a worker's batch."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            self.num_workers == "auto" or (isinstance(self.num_workers, int) and self.num_workers >= 0),
            f"--num_workers {self.num_workers} is negative; give 0 to make batches in the main process",
        )


# One part of --capacity: a number of rows, a share of the memory, or as many rows as the data need.
PLACES = re.compile(r"[0-9]{1,19}", re.ASCII)
SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
MOST_PLACES = 2**40


@dataclass(frozen=True)
class TablesConfig(Section):
    """Rows of raw values: fixed vocabularies and dynamic tables."""

    CHOICES: ClassVar = {
        "ids": ("schema", "vocabulary", "dynamic"),
        "evict": ("lru", "lfu", "ttl", "none"),
        "distribution": ("continuous", "roundrobin", "hash"),
    }
    POSITIVE: ClassVar = ("admit", "max_growth")
    MOST: ClassVar = {"admit": 1_000_000, "max_growth": 1024}

    ids: str = "schema"
    """How users, items and other categories find their rows: by a vocabulary of what the training shows, by
    their own ids, of which a table takes in any (dynamic), or for each feature as its schema says."""

    capacity: str = AUTO
    """How many places for rows a dynamic table has: a number, a share of the memory for tables such as 25%,
    which it takes once it has grown, auto for twice the ids of the data, which a stream does not know, or
    NAME=VALUE for some tables, with commas between them."""

    admit: int = 1
    """In how many training steps an id of a dynamic table must be seen before it gets a row."""

    evict: str = "lru"
    """Whose row is given away where a new id finds no place: that of the id that was not seen for longest
    (lru), that was seen least (lfu), of one that has expired alone (ttl), or nobody's (none)."""

    ttl: str = "0"
    """After how long without being seen a row of a dynamic table expires: a number of steps or, with
    --stream, a time such as 90d; 0 means never."""

    half_life: str = "0"
    """After how long half of what --evict lfu has counted is left, in the unit of --ttl; 0 means never."""

    distribution: str = "continuous"
    """Which rank has which part of a dynamic table: a range each (continuous), one after the other
    (roundrobin), or drawn (hash); changes no result."""

    grow: float = 0.75
    """The share of its places that may be taken before a dynamic table gets twice as many; 0 means never."""

    max_growth: int = 8
    """How many times its first --capacity a dynamic table may grow to; the memory is planned for that, and
    used as rows come."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        self.capacities()
        require(0 <= self.grow <= 1, f"--grow {self.grow} is not a share; give 0 to 1")
        require(
            self.evict != "ttl" or self.expiry.amount > 0,
            "--evict ttl gives away rows that have expired, and --ttl 0 lets none expire; give --ttl too",
        )
        require(
            self.evict == "lfu" or self.halving.amount == 0,
            f"--half_life {self.half_life} ages what --evict lfu counts, and --evict is {self.evict}; give "
            "--evict lfu too",
        )
        units = {part.is_time for part in (self.expiry, self.halving) if part.amount}
        require(
            len(units) < 2,
            f"--ttl {self.ttl} and --half_life {self.half_life} are in different units; give both as times "
            "or both as steps",
        )

    @property
    def expiry(self) -> Duration:
        """Parsed --ttl."""
        return duration("ttl", self.ttl, "steps")

    @property
    def halving(self) -> Duration:
        """Parsed --half_life."""
        return duration("half_life", self.half_life, "steps")

    @property
    def unit(self) -> str:
        """Unit of both: "seconds" of the events' time, or "steps"."""
        return "seconds" if self.expiry.is_time or self.halving.is_time else "steps"

    def capacities(self) -> Mapping[str, str]:
        """Parsed --capacity: by table name, and under the name "" for all other tables.

        Raises:
            UserError: when it is none of what it may be.
        """
        # A comma separates the parts, so numbers have none.
        found = {"": AUTO}
        for part in self.capacity.split(","):
            name, _, value = part.strip().rpartition("=")
            share = SHARE.fullmatch(value)
            is_number = PLACES.fullmatch(value) and 1 <= int(value) <= MOST_PLACES
            require(
                value == AUTO or bool(0 < float(share[1]) <= 100 if share else is_number),
                f"--capacity {self.capacity} asks for {value or 'nothing'}; give a number of places "
                f"from 1 to {MOST_PLACES:,}, a share of the memory such as 25%, or auto",
            )
            found[name] = value
        return found


# The K of HR@K and NDCG@K. It is defined here because `datasets.metrics` and `models.tasks` both need it,
# and may not import each other.
TOP = 10
# Kinds of evaluation: predictions against labels, ranks of the chosen items, or probabilities against
# binary labels.
EVALUATIONS = ("predictions", "ranks", "answers")
# Events of a batch whose items are in-batch negatives for each other, for ranking tasks. A step costs this
# times the batch, in time and in memory. A multiple of 8.
COMPETITORS = 256
# Weights of the items of a history: equal, or learned from their position and age.
EQUAL, LEARNED = HISTORY_WEIGHTS = ("equal", "learned")
# Blocks of a sequence model, see `recsuite.models.sequences`.
SAS, HSTU = BLOCKS = ("sas", "hstu")
# Number of time buckets for the age of an item of a history, see `gaps_of`: the last one begins at 68 years.
NUM_GAPS = 32
# Of --mlp_dims.
WIDEST, DEEPEST = 2**14, 100


@dataclass(frozen=True)
class ModelConfig(Section):
    """Task and size of the model.

    The fields task, embedding_dim, mlp_dims, history_weights, negatives, block, num_blocks, num_heads,
    dropout and preset are flags, see docs/flags.md.

    Raises:
        UserError: from `validate`, for impossible values.

        def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
            return RatingModel(data, args.embedding_dim, args.mlp_dims)
    """

    # Tasks are defined in `models/tasks.py`, which imports torch; only their names are here.
    CHOICES: ClassVar = {
        "task": ("rating", "ranking", "response", "sequence"),
        "preset": (AUTO, *PRESETS, NONE),
        "history_weights": HISTORY_WEIGHTS,
        "block": BLOCKS,
    }
    POSITIVE: ClassVar = ("num_blocks", "num_heads")
    NOT_NEGATIVE: ClassVar = ("negatives",)
    MOST: ClassVar = {"embedding_dim": 2**14, "negatives": 2**20, "num_blocks": 100, "num_heads": 2**10}

    task: str = "rating"
    """What is learned: how many stars a user gives (rating), which item a user rates at all (ranking), which
    one comes next in the order of what the user had (sequence), or whether the answer is yes (response); not
    given, what the labels of --data_path are for."""

    embedding_dim: int = 32
    """Numbers per table row, a multiple of 4: the first is the row's bias, the others its factors."""

    mlp_dims: tuple[int, ...] = (64, 32)
    """Widths of the hidden layers of the MLP, comma-separated, or none."""

    history_weights: str = EQUAL
    """Of --task ranking: how much the items of a --history count, all alike (equal), or by how many came
    later and how long ago it was, as is learned (learned)."""

    negatives: int = 0
    """Of --task ranking and sequence: how many items, drawn anew in each step and the same for every rank,
    compete for each event, for a ranking beside those of its batch; all where there are no more; 0 means
    none, and for a sequence all."""

    block: str = SAS
    """Of --task sequence: what the transformer is made of, attention and layers of the widths --mlp_dims
    (sas), or attention that counts pointwise and a gate (hstu)."""

    num_blocks: int = 2
    """Of --task sequence: how many blocks lie one behind the other."""

    num_heads: int = 2
    """Of --task sequence: heads of the attention; --embedding_dim is a multiple of it."""

    dropout: float = 0.2
    """Of --task sequence: which share of the numbers that a block takes and adds training sets to zero."""

    preset: str = AUTO
    """Values for flags that belong together and are not given: those of the preset of this name, listed in
    docs/flags.md and at the end of --help; auto: the preset that fits task, split and given flags, if one
    does, and it is said; none: no preset. A checkpoint keeps its own."""

    @property
    def competitors(self) -> int:
        """Number of events of a batch that share in-batch negatives, see `COMPETITORS`; 0 for label tasks."""
        # A batch of sequences has events of few users, which make poor negatives for each other.
        return COMPETITORS if self.ranks and not self.reads_order else 0

    def num_negatives(self, num_items: int) -> int:
        """Return the maximum number of negatives drawn for a step from `num_items` items."""
        # A sequence task has no in-batch negatives.
        return num_items if self.reads_order and self.negatives == 0 else min(self.negatives, num_items)

    @property
    def ranks(self) -> bool:
        """True if the model learns which item is chosen, not a label."""
        return self.task not in ("rating", "response")

    @property
    def reads_order(self) -> bool:
        """True if the order of a user history matters, and batches are runs of it."""
        return self.task == "sequence"

    @property
    def learns_history_weights(self) -> bool:
        """True if the model reads the age of each item of a history."""
        return self.history_weights == LEARNED

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        widths = ",".join(map(str, self.mlp_dims))
        require(
            self.embedding_dim >= 4 and self.embedding_dim % 4 == 0,
            f"--embedding_dim {self.embedding_dim} does not fit FBGEMM's kernels; give a multiple of 4",
        )
        require(
            min(self.mlp_dims, default=1) >= 1,
            f"--mlp_dims {widths} has a layer without a unit; give widths of at least 1",
        )
        require(
            max(self.mlp_dims, default=1) <= WIDEST and len(self.mlp_dims) <= DEEPEST,
            f"--mlp_dims {widths} is too large; give at most {DEEPEST} layers of {WIDEST:,}",
        )
        require(
            self.ranks or self.negatives == 0,
            f"--negatives {self.negatives} is for --task ranking and sequence, not {self.task}; leave it out",
        )
        for name in ("block", "num_blocks", "num_heads", "dropout"):
            require(
                self.reads_order or self.is_default(name),
                f"--{name} {getattr(self, name)} is for --task sequence, and not for --task {self.task}; "
                "leave it out",
            )
        require(0 <= self.dropout < 1, f"--dropout {self.dropout} leaves nothing; give 0 to 0.9, say")


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Learning rates and weight decay of the tables and of the dense part."""

    # Rates, decays and batch size were chosen together, on real and on synthetic ratings. docs/decisions.md
    # lists the values that were tried.
    lr: float = 0.04
    """Learning rate of the embedding tables (row-wise Adagrad) for a global batch of 4,096 ratings; for
    another one multiplied by the square root of the ratio; falls linearly to zero over the run."""

    dense_lr: float = 0.001
    """Learning rate of the dense part (AdamW), falling like --lr."""

    weight_decay: float = 0.1
    """Decoupled decay of all table rows, looked up or not: in a pass they shrink by the factor
    exp(-weight_decay), less as --lr falls."""

    dense_weight_decay: float = 20.0
    """Decoupled decay of the dense part: times --dense_lr, the share by which it shrinks in a step."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        # --weight_decay is checked in `Config`: its total effect on a row depends on --epochs.
        for name in ("lr", "dense_lr"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"--{name} {value} cannot learn; give a number above 0")
        require(
            0 <= self.dense_weight_decay * self.dense_lr < 1,
            f"--dense_weight_decay {self.dense_weight_decay} times --dense_lr {self.dense_lr} would shrink "
            "the dense part by more than all of it; give 0 to 1 / --dense_lr",
        )


@dataclass(frozen=True)
class TrainingConfig(Section):
    """Length of the training, and its loop."""

    CHOICES: ClassVar = {
        "pipeline": ("auto", "plain", "sparse_dist"),
        "cpu_tables": ("vectorised", "torchrec"),
    }
    POSITIVE: ClassVar = ("epochs",)
    MOST: ClassVar = {"epochs": 1_000_000}

    train: bool = False
    """Train a model, validate it after every epoch and test it in the end; what happens when no mode is
    named."""

    epochs: int = 8
    """Passes over the training ratings, unless --patience ends the training before."""

    # Not 1: with few validation ratings a single epoch may be worse by chance. A ranking of ml-latest-small
    # would have stopped at an NDCG@10 of 0.052; it later reached 0.066.
    patience: int = 2
    """Epochs in a row without a better validation result after which the training ends; 0 means never."""

    # A CPU has no second stream to overlap with. There TorchRec's loop ran at 0.91 to 1.02 times the rate
    # of the plain one.
    pipeline: str = "auto"
    """Training loop: plain, sparse_dist (TorchRec's TrainPipelineSparseDist), or auto: sparse_dist on
    CUDA, else plain."""

    # On a CPU TorchRec's own step spends its time on exchanges within one rank, on joining outputs and in
    # FBGEMM's backward.
    cpu_tables: str = "vectorised"
    """The tables' step on a CPU: vectorised, this program's own, or torchrec: TorchRec's and FBGEMM's, which
    gives the same but for rounding, and takes longer."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(self.patience >= 0, f"--patience {self.patience} is negative; give 0 to never stop early")


@dataclass(frozen=True)
class RuntimeConfig(Section):
    """Seed and timeout, shared by all processes of a run."""

    POSITIVE: ClassVar = ("timeout",)

    seed: int = 0
    """Seed of everything that is drawn: data, split, order, initial weights."""

    timeout: int = 300
    """Seconds that a rank waits for the others in training; preparing data may take longer."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(self.timeout <= 604_800, f"--timeout {self.timeout} is more than a week; give less")
        require(
            0 <= self.seed < 2**31, f"--seed {self.seed} is out of range; give a number from 0 to 2147483647"
        )


# Flags for passes over a stationary data set, and the reason why a stream does not use each.
NOT_IN_A_STREAM = {
    "epochs": "a stream is learned from once",
    "patience": "a stream has no epoch after which it could stop early",
    "split": "each window of a stream is predicted before it is learned from, which is its test",
    "test_fraction": "each window of a stream is predicted before it is learned from, which is its test",
    "validation_fraction": "each window of a stream is predicted before it is learned from",
}


@dataclass(frozen=True)
class StreamConfig(Section):
    """Training on the events in the order of time, window after window."""

    stream: bool = False
    """Train on the ratings in the order of time: each --window is first predicted, then learned from once."""

    window: str = "1d"
    """What is predicted and then learned from at once with --stream: a span of the ratings' own time, such as
    12h or 1d, counted from 1970 in UTC, or a number of ratings."""

    follow_data: bool = False
    """With --stream, wait at the end of the data for files to grow and for new ones, until told to end."""

    @property
    def span(self) -> Duration:
        """Length of a window, in seconds or in events."""
        return duration("window", self.window, "events")

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        for name in ("window", "follow_data"):
            require(
                self.stream or self.is_default(name),
                f"--{name} says how a stream is followed, and none is; give --stream too",
            )
        require(self.span.amount >= 1, f"--window {self.window} holds nothing; give 1d, say")


def check_given(stream: bool, given: Collection[str], duplicates: str) -> None:
    """Refuse flags that a stream cannot use. given: the flags of the command line.

    Raises:
        UserError: names the first.
    """
    if not stream:
        return
    for name, reason in NOT_IN_A_STREAM.items():
        require(
            name not in given, f"--{name} and --stream exclude each other, because {reason}; leave one out"
        )
    require(
        "duplicates" not in given or duplicates == "keep",
        f"--duplicates {duplicates} would choose among ratings that a stream meets one after the other; give "
        "--duplicates keep, or leave it out",
    )


# Value of --load without a folder.
NEWEST = "newest"


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Writing and loading of checkpoints."""

    CHOICES: ClassVar = {"checkpoint": ("best", "latest")}
    POSITIVE: ClassVar = ("keep",)
    NOT_NEGATIVE: ClassVar = ("dump_every",)

    dump: bool = False
    """Train, and write a full checkpoint to --save_dir at the end of every epoch."""

    inc_dump: bool = False
    """Train, and write deltas to --save_dir: a full checkpoint first, then deltas with the rows that changed
    since the last one; with --dump the end of an epoch gets a full checkpoint too."""

    resume: bool = False
    """Continue from the newest checkpoint in --save_dir, or begin where there is none; writes checkpoints
    like --dump, or deltas with --inc_dump."""

    load: str = ""
    """Evaluate a checkpoint: the folder named, or the --checkpoint in --save_dir where none is named."""

    compact: bool = False
    """Merge the newest deltas in --save_dir and the full checkpoint that they build on into a new one."""

    # Not None, because the parser takes the type of a flag from its default.
    until: int = -1
    """Step after which --load applies no more deltas; -1 means all of them."""

    # The last epoch is often the best, but not always. All serving code has this default, so that all give
    # the same answer.
    checkpoint: str = "best"
    """Which checkpoint in --save_dir --load, --export, --recommend and serve.py take: the best on the
    validation ratings, or the latest. --resume always takes the latest; --until, or a folder after --load,
    names one instead."""

    save_dir: str = "dumps"
    """Folder of the checkpoints, the same one for all ranks."""

    dump_every: int = 0
    """Write a checkpoint after every so many steps too; 0 means at the end of an epoch alone."""

    keep: int = 3
    """How many full checkpoints are kept, the newest; the best, and those that deltas build on, stay too."""

    async_dump: bool = False
    """Write full checkpoints while the training continues, from a copy in memory."""

    @property
    def folder_to_load(self) -> str:
        """Return the folder of --load, or --save_dir if it has none."""
        return self.load if self.load not in ("", NEWEST) else self.save_dir

    @property
    def writes(self) -> bool:
        """True if the training writes checkpoints."""
        return self.dump or self.inc_dump or self.resume

    @property
    def reads(self) -> bool:
        """True if the run begins from a checkpoint. Its flags replace the defaults."""
        return bool(self.load) or self.compact or self.resume

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        # An unused flag would be ignored in silence.
        for name in ("dump_every", "keep", "async_dump"):
            require(
                self.writes or (self.compact and name == "keep") or self.is_default(name),
                f"--{name} says how checkpoints are written, and none are written; give --dump too",
            )
        require(
            self.until == -1 or bool(self.load),
            f"--until {self.until} says where a load stops, and none is asked for; give --load too",
        )
        require(self.until >= -1, f"--until {self.until} is not a step; give the number of one, 0 or more")


@dataclass(frozen=True)
class ServingConfig(Section):
    """Exports and recommendations from a checkpoint."""

    POSITIVE: ClassVar = ("top",)
    MOST: ClassVar = {"top": 10_000}

    export: str = ""
    """New folder that gets the --checkpoint in --save_dir, whole and without its optimizer, for a server."""

    recommend: bool = False
    """Print what the --checkpoint in --save_dir recommends to --user."""

    user: str = ""
    """Raw id of the user that --recommend is for."""

    top: int = 10
    """How many items --recommend prints."""

    follow: bool = False
    """Have --recommend print again whenever the trainer writes another --checkpoint."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        for name in ("user", "top", "follow"):
            require(
                self.recommend or self.is_default(name),
                f"--{name} says what is recommended, and nothing is; give --recommend too",
            )
        require(not self.recommend or bool(self.user), "--recommend needs --user, the raw id of a user")


@dataclass(frozen=True)
class MonitoringConfig(Section):
    """Reports, trackers and profiles of a training, and the check of the machine."""

    NOT_NEGATIVE: ClassVar = ("profile",)
    MOST: ClassVar = {"profile": 10_000}

    doctor: bool = False
    """Check the packages, the device, the memory and the data on this machine; trains nothing."""

    report_dir: str = ""
    """Folder that gets metrics.json; empty means no report."""

    profile: int = 0
    """Training steps that rank 0 records with PyTorch's profiler after a warm-up, for a table of the
    costliest operations and a trace.json in --report_dir or the current folder; 0 means none."""

    tensorboard: bool = False
    """Write losses, learning rates, speed and metrics for TensorBoard into --report_dir/tensorboard."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            bool(self.report_dir) or not self.tensorboard,
            "--tensorboard writes into --report_dir, and there is none; give one",
        )
