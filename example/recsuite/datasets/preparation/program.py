"""The version of the code that makes columns: a digest of its source.

It is part of the name of their folder, so nothing trains on what an earlier formula made, and there is no
number that somebody has to remember to raise.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2]
# All modules, and folders of such, that decide what columns hold: from reading the files to the manifest. A
# test walks the imports of these and fails on one that is missing here.
MAKERS = (
    "datasets/columns.py",
    "datasets/metrics.py",
    "datasets/movielens/formats.py",
    "datasets/movielens/parsing",
    "datasets/movielens/schema.py",
    "datasets/preparation",
    "datasets/schema.py",
    "datasets/source.py",
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
)
# A string that follows one of these, and then only the end of its line, is a statement without effect.
BEGINNINGS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
# Tokens without a text of their own.
LAYOUT = (*BEGINNINGS, tokenize.ENDMARKER)


# It takes a tenth of a second, and each mode of a run asks for it.
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
    # Lines of the text itself. Python's own trees and tokens would do without spaces too, but their form
    # differs between versions of Python, above all for f-strings; where a comment or a plain string begins
    # and ends does not.
    with tokenize.open(path) as file:
        lines = file.readlines()
    tokens = [*tokenize.generate_tokens(iter(lines).__next__)]
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    rows = sorted({row for token in _effective(tokens) for row in range(token.start[0], token.end[0] + 1)})
    return "".join(
        f"{lines[row - 1][: comments[row]].rstrip()}\n" if row in comments else lines[row - 1] for row in rows
    )


def _effective(tokens: list[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The tokens of statements that have an effect, which a string alone has not."""
    code = [token for token in tokens if token.type not in (tokenize.NL, tokenize.COMMENT)]
    before = tokenize.NEWLINE
    # The last is the end of the file.
    for token, after in itertools.pairwise(code):
        is_alone = before in BEGINNINGS and after.type == tokenize.NEWLINE
        if not (is_alone and _is_text(token)) and token.type not in LAYOUT:
            yield token
        before = token.type


def _is_text(token: tokenize.TokenInfo) -> bool:
    """Whether a token is a plain string: from Python 3.12 on, an f-string is several tokens."""
    return token.type == tokenize.STRING and token.string.lstrip("bBrRuU")[0] in "'\""
