"""The command line, made from the sections of the configuration."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from recsuite.config.config import Config, flag_names, sections
from recsuite.config.presets import PRESETS, as_given, in_words, with_preset
from recsuite.config.sections import NEWEST, Section, check_given
from recsuite.errors import UserError, script_name
from recsuite.files import PATHS

# Flags that have a second, longer name.
LONG_NAMES = {"inc_dump": "incremental_dump"}
# What others call a flag, and what is no flag because it is said to whatever starts the processes.
SYNONYMS = {"learning_rate": "lr", "lr_rate": "lr"}
OF_LAUNCHER = re.compile(r"gpu|nproc|num_proc|world_size|device|^ranks$|^processes$")
# How like a flag a word must be: "device" and "evict" are so by 0.73.
LEAST_LIKE = 0.75


def parse_args(argv: list[str] | None = None) -> Config:
    """Read a command line into a checked `Config`. Not collective.

    argv: the flags, those of `sys.argv` when None.

    Raises:
        UserError: on an unknown flag, a value that does not parse, or one that `Config.validate` refuses.

        args = rs.parse_args(["--epochs", "2", "--batch_size", "512"])
    """
    return parse_given(argv)[0]


def parse_given(
    argv: list[str] | None = None, world_size: int = 1, unread: Collection[str] = ()
) -> tuple[Config, frozenset[str]]:
    """`parse_args`, and the names of the flags that were given, also of those with their default value.

    world_size: the number of processes, among which a preset may divide a number; unread: flags that --help
    leaves out.

    Raises:
        UserError: see `parse_args`.
    """
    # The known ones, so that an unknown flag is answered with the one that was meant; `parse_args` would
    # refuse it in its own words.
    found, unknown = build_parser(unread).parse_known_args(argv)
    if unknown:
        raise UserError(
            f"Unrecognized arguments: {' '.join(unknown)}{_meant(unknown)}; see --help for every flag."
        )
    values = vars(found)
    config = with_preset(Config.of(**values), values, world_size)
    # Not in `Config.validate`, which cannot tell a flag that was given from its default.
    check_given(config.stream.stream, values, config.data.duplicates)
    return config, frozenset(values)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing, so that one rank can speak for all."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help for every flag.")


def unread_flags(names: Collection[str]) -> frozenset[str]:
    """Return the flags that names stand for: each is that of a flag, or of a section for all of its flags."""
    known = flag_names()
    if strange := {*names} - known.keys() - {*known.values()}:
        raise ValueError(f"unread takes names of flags and of their sections, got {min(strange)!r}.")
    return frozenset(flag for flag, section in known.items() if flag in names or section in names)


def check_read(argv: Sequence[str], unread: Collection[str]) -> None:
    """Refuse flags that a script does not read.

    Raises:
        UserError: names the first one, and the script that has it.
    """
    for word in argv:
        name = word.partition("=")[0]
        if name[:2] == "--" and name[2:] in {*unread, *(LONG_NAMES.get(flag) for flag in unread)}:
            raise UserError(f"{name} is not a flag of this script. Fix: leave it out, or run example.py.")


def build_parser(unread: Collection[str] = ()) -> argparse.ArgumentParser:
    """A parser with a group of flags for each section, and its sentence above them; unread: see
    `parse_given`.
    """
    parser = _Parser(
        prog=script_name(),
        # One line instead of all flags twice.
        usage="%(prog)s [FLAGS...]",
        description="Train a sharded recommender on MovieLens, or on tables of your own.",
        # A prefix that fits today may fit two flags tomorrow.
        allow_abbrev=False,
        # What is found was given; the rest has the defaults of `Config`.
        argument_default=argparse.SUPPRESS,
    )
    for name, section in sections().items():
        title = (inspect.getdoc(section) or "").splitlines()[0]
        # A group without a flag would leave its heading.
        is_read = not unread_flags([name]) <= {*unread}
        group = parser.add_argument_group(name, title) if is_read else parser
        sentences = sentences_of(section)
        for field in dataclasses.fields(section):
            _add(group, section, field, sentences[field.name])
    for name, (sentence, flags) in () if "preset" in unread else PRESETS.items():
        parser.add_argument_group(f"--preset {name}", f"{sentence} {in_words(flags)}")
    for action in parser._actions:
        if action.dest in unread:
            action.help = argparse.SUPPRESS
    return parser


def _add(group: Any, section: type[Section], field: dataclasses.Field[Any], sentence: str) -> None:
    name, default = field.name, field.default
    # argparse fills in percent signs in a help text.
    flag, text = f"--{name}", sentence.replace("%", "%%")
    if isinstance(default, bool):
        long = [f"--{LONG_NAMES[name]}"] if name in LONG_NAMES else []
        # A switch has the default False unless it is told otherwise, whatever the parser's default is.
        group.add_argument(flag, *long, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    kind = KINDS.get(name, type(default))
    if name == "load":
        group.add_argument(flag, type=kind, nargs="?", const=NEWEST, metavar="FOLDER", help=text)
        return
    shown = as_given(default)
    choices = section.CHOICES.get(name)
    metavar = "{" + ",".join(choices) + "}" if choices else name.split("_")[-1].upper()
    suffix = f" (default: {shown})" if shown else ""
    group.add_argument(flag, type=kind, metavar=metavar, help=text + suffix)


def _meant(unknown: list[str]) -> str:
    """The flags that others look like, as a question in brackets, and how processes and GPUs are chosen."""
    given = [word[2:].partition("=")[0].replace("-", "_") for word in unknown if word.startswith("--")]
    near = {f"--{flag}": None for name in given for flag in [nearest_flag(name)] if flag}
    meant = f" (did you mean {' and '.join(near)}?)" if near else ""
    if any(OF_LAUNCHER.search(name) for name in given):
        meant += " (NPROC=2 ./run.sh or torchrun --nproc_per_node 2 starts two processes, one for each GPU)"
    return meant


def nearest_flag(name: str) -> str:
    """The flag that a name was meant for; empty where none is near."""
    flags = [*flag_names(), *LONG_NAMES.values()]
    # All of its words, as in --workers: the shortest such flag.
    longer = [flag for flag in flags if {*name.split("_")} <= {*flag.split("_")}]
    like = difflib.get_close_matches(name, flags, n=1, cutoff=LEAST_LIKE)
    return SYNONYMS.get(name) or next(iter([*like, *sorted(longer, key=len)]), "")


def _workers(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def _widths(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers like 128,64, nor the word none"
        ) from None


def _folder(text: str) -> str:
    """Refuses what a variable of a shell that was never set becomes."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; name one, or leave the flag out")
    return text


# How the text after a flag becomes a value, where the type of its default does not say it.
KINDS: dict[str, Callable[[str], Any]] = {
    "num_workers": _workers,
    "mlp_dims": _widths,
    **dict.fromkeys(PATHS, _folder),
}


def sentences_of(section: type[Section]) -> dict[str, str]:
    """The sentence under each field of a section, which Python itself does not keep."""
    # From the source, for a text under a field is compiled to nothing.
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            sentences[statement.target.id] = inspect.cleandoc(str(below.value.value))
    return sentences
