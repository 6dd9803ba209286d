"""The version of the code that makes columns: a digest of its source.

It is part of the name of their folder, so nothing trains on what an earlier formula made, and there is no
number that somebody has to remember to raise.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2]
# All modules, and folders of such, that decide what columns hold: from reading the files to the manifest. A
# test walks the imports of these and fails on one that is missing here.
MAKERS = (
    "datasets/columns.py",
    "datasets/metrics.py",
    "datasets/movielens/schema.py",
    "datasets/movielens/source.py",
    "datasets/preparation",
    "datasets/schema.py",
    "datasets/source.py",
    "datasets/streams/past.py",
    "datasets/tables/derived.py",
    "datasets/tables/description",
    "datasets/tables/files.py",
    "datasets/tables/formats.py",
    "datasets/tables/parts",
    "datasets/tables/reading.py",
    "datasets/tables/schema_file.py",
    "datasets/tables/source.py",
    "datasets/tables/sources",
    "datasets/tables/times.py",
    "datasets/tables/values.py",
    "datasets/telling.py",
    "ids.py",
)
# What decides where a statement, a text and a comment begin and end.
PIECES = re.compile(
    r"""
    (?P<comment> \# .*)
    | (?P<text> [bBfFrRuU]{0,2} (?:
        \"{3} (?: [^"\\]+ | \\[\s\S] | "(?!"") )* \"{3}
        | '{3} (?: [^'\\]+ | \\[\s\S] | '(?!'') )* '{3}
        | " (?: [^"\\\n] | \\[\s\S] )* "
        | ' (?: [^'\\\n] | \\[\s\S] )* '
    ))
    | (?P<opening> [(\[{])
    | (?P<closing> [)\]}])
    """,
    re.VERBOSE,
)
REST_OF_LINE = re.compile(r"[ ]*(?:\#.*)?(?:\n|\Z)")
# Stands for the end of a line inside a text, where empty lines count. No source holds it.
END_IN_TEXT = "\0"


# Each mode of a run asks for it.
@functools.cache
def digest_of_program(library: Path = LIBRARY) -> str:
    """A digest, 12 characters, of the code that makes columns, without comments, docstrings and empty lines.

    The same for the same source on every machine and Python. library: the folder of the package.
    """
    digest = hashlib.sha256()
    for path in sources(library):
        digest.update(f"{path.relative_to(library).as_posix()}\n{bare(path)}".encode())
    return digest.hexdigest()[:12]


def sources(library: Path = LIBRARY) -> list[Path]:
    """The files of the code that makes columns, in an order that does not depend on the machine."""
    found: set[Path] = set()
    for path in (library / name for name in MAKERS):
        found |= {path} if path.suffix else {*path.rglob("*.py")}
    return sorted(found, key=Path.as_posix)


def bare(path: Path) -> str:
    """The lines of a source that have an effect, without the comments behind them."""
    # Python's own tokens say the same in ten times the time, which every launch would take, and their form
    # differs between versions of Python, above all for f-strings.
    with tokenize.open(path) as file:
        source = file.read()
    lines = [line.rstrip() for line in "".join(_effective(source)).split("\n")]
    return "".join(f"{line}\n" for line in lines if line).replace(END_IN_TEXT, "\n")


def _effective(source: str) -> Iterator[str]:
    """A source without comments, and without texts that are statements."""
    end = depth = 0
    for piece in PIECES.finditer(source):
        depth += {"opening": 1, "closing": -1}.get(str(piece.lastgroup), 0)
        yield source[end : piece.start()]
        end = piece.end()
        is_left_out = piece.lastgroup == "comment" or (depth == 0 and _is_statement(piece))
        yield "" if is_left_out else piece[0].replace("\n", END_IN_TEXT)
    yield source[end:]


def _is_statement(piece: re.Match[str]) -> bool:
    """Whether a piece outside of brackets is a plain text, and all that its lines hold."""
    begin = piece.string.rfind("\n", 0, piece.start()) + 1
    return (
        piece.lastgroup == "text"
        and piece[0].lstrip("bBrRuU")[0] in "'\""
        and not piece.string[begin : piece.start()].strip()
        # That would continue the line before.
        and not piece.string.endswith("\\\n", 0, begin)
        and REST_OF_LINE.match(piece.string, piece.end()) is not None
    )
