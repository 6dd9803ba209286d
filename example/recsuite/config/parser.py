"""The command line, generated from the sections of the configuration."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from recsuite import hooks
from recsuite.config.config import Config, ExtraSection, flag_names, sections
from recsuite.config.fitting import with_preset
from recsuite.config.flag import Section
from recsuite.config.presets import AUTO, PRESETS, as_given, in_words
from recsuite.config.sections import NEWEST, check_given_flags
from recsuite.errors import UserError, script_name
from recsuite.files import PATHS

# Flags that --help shows, in this order; --help_all shows every flag.
FIRST = (
    *("dataset", "data_path", "task", "split", "epochs", "batch_size", "num_workers"),
    *("dump", "inc_dump", "resume", "load", "save_dir"),
)
# Flags that have a second, longer name.
LONG_NAMES = {"inc_dump": "incremental_dump"}
# Names of flags in other programs, and options of the launcher that are not flags here.
SYNONYMS = {"learning_rate": "lr", "lr_rate": "lr"}
OF_LAUNCHER = re.compile(r"gpu|nproc|num_proc|world_size|device|^ranks$|^processes$")
# Minimum similarity of a word and a flag: "device" and "evict" have 0.73.
LEAST_LIKE = 0.75


def parse_args(argv: list[str] | None = None) -> Config:
    """Read a command line into a checked `Config`. Not collective.

    Args:
        argv: The flags; None for those of `sys.argv`.

    Returns:
        The configuration, with the values of its preset.

    Raises:
        UserError: For an unknown flag, a value that does not parse, or one that `Config.validate` refuses.

    Example:
        args = rs.parse_args(["--epochs", "2", "--batch_size", "512"])
    """
    return parse_given(argv)[0]


def parse_given(argv: list[str] | None = None, unread: Collection[str] = ()) -> tuple[Config, frozenset[str]]:
    """Parse as `parse_args`; return also the names of the given flags, even those with their default value.

    unread: unused flags, which the help omits.

    Raises:
        UserError: see `parse_args`.
    """
    # Only the known flags, so that the error for an unknown one can name a similar flag. argparse's own error
    # would not.
    namespace, unknown = build_parser(unread).parse_known_args(argv)
    if unknown:
        raise UserError(
            f"Unrecognized arguments: {' '.join(unknown)}{_meant(unknown)}; see --help_all for every flag."
        )
    values = vars(namespace)
    config = with_preset(Config.of(**values), values)
    # Not in `Config.validate`, which cannot distinguish a given flag from a default.
    check_given_flags(config.stream.stream, values, config.data.duplicates)
    return config, frozenset(values)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing, so that one rank can print for all."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help_all for every flag.")


def unread_flags(names: Collection[str]) -> frozenset[str]:
    """Return the flags with these names. The name of a section stands for all of its flags."""
    known = flag_names()
    strange = {*names} - known.keys() - {*known.values()}
    # An installation without an extra does not know its flags.
    if strange and not hooks.missing_sections():
        raise ValueError(f"unread takes names of flags and of their sections, got {min(strange)!r}.")
    return frozenset(flag for flag, section in known.items() if flag in names or section in names)


def check_read(argv: Sequence[str], unread: Collection[str]) -> None:
    """Refuse flags that a script does not use.

    Raises:
        UserError: names the first one, and the script that has it.
    """
    refused = {*unread, *(LONG_NAMES.get(flag) for flag in unread)}
    for word in argv:
        name = word.partition("=")[0]
        if name[:2] == "--" and name[2:] in refused:
            raise UserError(f"{name} is not a flag of this script. Fix: leave it out, or run example.py.")


class _HelpAll(argparse.Action):
    """Prints the help text with every flag, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        build_parser(self.const, shows_all=True).print_help()
        parser.exit()


def build_parser(unread: Collection[str] = (), shows_all: bool = False) -> argparse.ArgumentParser:
    """Return a parser of all flags.

    unread: see `parse_given`; shows_all: the help text has every flag, by section, those of extras last, and
    the presets; else it has the first ones.
    """
    parser = _Parser(
        prog=script_name(),
        # One line instead of all flags twice.
        usage="%(prog)s [FLAGS...]",
        description="Train a sharded recommender on MovieLens, or on tables of your own.",
        # A prefix that is unique now may fit two flags later.
        allow_abbrev=False,
        # Only given flags are in the result; `Config` has the defaults of the others.
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--help_all", action=_HelpAll, nargs=0, const=unread, help="show every flag, by subject, and exit"
    )
    for name, section in sections().items():
        title = (inspect.getdoc(section) or "").splitlines()[0]
        # A group without flags would print its heading alone.
        is_read = shows_all and not unread_flags([name]) <= {*unread}
        heading = f"{name} (extra)" if issubclass(section, ExtraSection) else name
        group = parser.add_argument_group(heading, title) if is_read else parser
        for field in dataclasses.fields(section):
            _add(group, section, field)
    for name, (sentence, flags) in PRESETS.items() if shows_all and "preset" not in unread else ():
        parser.add_argument_group(f"--preset {name}", f"{sentence} {in_words(flags)}")
    for action in parser._actions:
        if action.dest in unread or not (shows_all or action.dest in (*FIRST, "help", "help_all")):
            action.help = argparse.SUPPRESS
    if not shows_all:
        # In their order there, with the flags that show the help behind them.
        rank_of = {name: place for place, name in enumerate(FIRST)}
        parser._optionals._group_actions.sort(key=lambda action: rank_of.get(action.dest, len(rank_of)))
    return parser


def _add(group: Any, section: type[Section], field: dataclasses.Field[Any]) -> None:
    name, default, limits = field.name, section.default(field.name), section.flag(field.name)
    # argparse fills in percent signs in a help text.
    flag, text = f"--{name}", limits.text.replace("%", "%%")
    if name == "stream":
        # The type of its value is not that of its default.
        group.add_argument(flag, nargs="?", const=True, metavar="TOPIC", help=text)
        return
    if isinstance(default, bool):
        long = [f"--{LONG_NAMES[name]}"] if name in LONG_NAMES else []
        # The default of a switch is False unless set here, independent of the parser's default.
        group.add_argument(flag, *long, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    kind = KINDS.get(name, type(default))
    if name == "load":
        group.add_argument(flag, type=kind, nargs="?", const=NEWEST, metavar="FOLDER", help=text)
        return
    shown = as_given(default)
    metavar = name.split("_")[-1].upper()
    # A number may have a word among its values.
    if limits.choices and limits.least is None:
        metavar = "{" + ",".join(limits.choices) + "}"
    suffix = f" (default: {shown})" if shown else ""
    group.add_argument(flag, type=kind, metavar=metavar, help=text + suffix)


def _meant(unknown: list[str]) -> str:
    """Return a hint for unknown flags: similar flags, and how to choose the number of processes and GPUs."""
    given = [word[2:].partition("=")[0].replace("-", "_") for word in unknown if word.startswith("--")]
    near = {f"--{flag}": None for name in given for flag in [nearest_flag(name)] if flag}
    meant = f" (did you mean {' and '.join(near)}?)" if near else ""
    missing = hooks.missing_sections()
    if missing and not near:
        meant += (
            f" (flags of {', '.join(missing)} require recsuite.extras, which is not installed as a whole)"
        )
    if any(OF_LAUNCHER.search(name) for name in given):
        meant += " (NPROC=2 ./run.sh or torchrun --nproc_per_node 2 starts two processes, one for each GPU)"
    return meant


def nearest_flag(name: str) -> str:
    """Return the flag most similar to a name; "" if none is similar."""
    flags = [*flag_names(), *LONG_NAMES.values()]
    # The shortest flag that has all words of the name, as in --workers.
    longer = [flag for flag in flags if {*name.split("_")} <= {*flag.split("_")}]
    like = difflib.get_close_matches(name, flags, n=1, cutoff=LEAST_LIKE)
    return SYNONYMS.get(name) or next(iter([*like, *sorted(longer, key=len)]), "")


def _or_auto(kind: type[int] | type[float], noun: str) -> Callable[[str], float | str]:
    """Return the conversion of a number or the word auto. noun: for the number, with its article."""

    def convert(text: str) -> float | str:
        if text == AUTO:
            return text
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither {noun} nor auto") from None

    return convert


def _numbers(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither whole numbers separated by commas nor the word none"
        ) from None


def _folder(text: str) -> str:
    """Refuse an empty folder, as from an unset shell variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; name one, or leave the flag out")
    return text


# Conversions from the text of a flag to its value, if the type of its default does not define one.
KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("batch_size", "num_workers"), _or_auto(int, "a whole number")),
    "validation_fraction": _or_auto(float, "a number"),
    **dict.fromkeys(("mlp_dims", "cutoffs"), _numbers),
    **dict.fromkeys(PATHS, _folder),
}
