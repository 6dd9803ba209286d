"""Make docs/flags.md from the parser, so that the page and the program cannot differ.

python docs/make_flags.py            print the page
python docs/make_flags.py --write    put it into docs/flags.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from recsuite.config.config import Config, flag_names, sections
from recsuite.config.parser import build_parser
from recsuite.config.presets import PRESETS, as_given
from recsuite.extras.fit import DECIDED

PAGE = Path(__file__).with_name("flags.md")
STUB = PAGE.parents[1] / "example" / "recsuite" / "extras" / "flags.pyi"
# Folders may be a Path too.
FOLDERS, PATHS = ("cache_dir", "save_dir", "report_dir"), " | Path"
STUB_HEAD = (
    '"""Made by docs/make_flags.py."""',
    "",
    "from pathlib import Path",
    "from typing import TypedDict",
    "",
    "class Flags(TypedDict, total=False):",
    '    """The flags of `recsuite.fit`."""',
    "",
)
HEAD = """# Flags

All flags of the scripts, with their defaults and presets. `python example/example.py --help_all` prints the
same. `retrieval.py`, `sequential.py`, `ctr.py` and `multitask.py` have only the flags that they read; they
refuse the others. `python docs/make_flags.py --write` makes this page.
"""
PRESETS_HEAD = """`--preset NAME` sets the flags of its column that are not given, and a training says which.
`--preset auto`, the default of `example.py`, takes the preset that fits `--task`: none for a stream, or
for rankings with `--history 0` or `--history_weights equal`.
`retrieval.py` and `sequential.py` name theirs. A checkpoint keeps the values, and a resume or a load takes
them from there.
[The log](log/2026-11.md#defaults-for-ratings) says how they were chosen."""
# Of the line that names a flag's default, in the help of the parser.
DEFAULT = " (default: "
# The default of --save_dir is that of the script that runs.
OF_SCRIPT, OF_ANY = Config().checkpoint.save_dir, "dumps/SCRIPT"


def main() -> None:
    """Print the page, or write it."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--write", action="store_true", help="into docs/flags.md")
    if flags.parse_args().write:
        PAGE.write_text(page())
        STUB.write_text(stub())
    else:
        print(page(), end="")


def page() -> str:
    """The page: a table for each group of the parser's flags."""
    groups = build_parser(shows_all=True)._action_groups
    return HEAD + _presets() + "".join(_section(group) for group in groups if list(_rows(group)))


def stub() -> str:
    """The types of the flags that `recsuite.fit` takes, for checkers of types and editors."""
    kinds = {
        name: field.type
        for part in sections().values()
        for name, field in part.__dataclass_fields__.items()
        if name in flag_names()
    }
    lines = [
        f"    {name}: {kind}{PATHS * (name in FOLDERS)}"
        for name, kind in kinds.items()
        if name not in DECIDED
    ]
    return "\n".join([*STUB_HEAD, *lines, ""])


def _presets() -> str:
    """The table of presets beside the defaults."""
    defaults = Config().flags
    sentences = [f"- `{name}`: {sentence}" for name, (sentence, _) in PRESETS.items()]
    rows = [
        f"| `--{flag}` | {as_given(defaults[flag])} | "
        f"{' | '.join(as_given(flags[flag]) if flag in flags else '' for _, flags in PRESETS.values())} |"
        for flag in {flag: None for _, flags in PRESETS.values() for flag in flags}
    ]
    names = " | ".join(f"`{name}`" for name in PRESETS)
    head = [f"| flag | default | {names} |", "| --- " * (2 + len(PRESETS)) + "|"]
    return "\n".join(["", "## Presets", "", PRESETS_HEAD, "", *sentences, "", *head, *rows, ""])


def _section(group: argparse._ArgumentGroup) -> str:
    lines = [
        f"## {(group.title or '').capitalize()}",
        "",
        *([group.description, ""] if group.description else []),
    ]
    return "\n".join(["", *lines, "| flag | default | meaning |", "| --- | --- | --- |", *_rows(group), ""])


def _rows(group: argparse._ArgumentGroup) -> Iterator[str]:
    for action in group._group_actions:
        if action.dest != "help":
            names = " or ".join(f"`{name}`" for name in action.option_strings)
            text = " ".join((action.help or "").split()).replace("%%", "%")
            meaning, _, default = text.partition(DEFAULT)
            default = default.removesuffix(")").replace(OF_SCRIPT, OF_ANY)
            yield f"| {names} | {default} | {meaning}{_choices(action)} |"


def _choices(action: argparse.Action) -> str:
    """The values that a flag may have, where they are few."""
    found = str(action.metavar or "")
    if not found.startswith("{"):
        return ""
    return " One of " + ", ".join(f"`{choice}`" for choice in found.strip("{}").split(",")) + "."


if __name__ == "__main__":
    main()
