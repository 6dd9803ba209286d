"""The English of documents, docstrings, comments and messages: words that are no terms of the field.

No document may use them; the code has `LEFT` places, of which there may only be fewer. Docstrings of tests,
benchmarks and documents begin like those of the code.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.documents import ARCHIVE, PAGES, name_of
from tests.support.launch import ROOT

QUESTION_WORDS = {"What", "Whatever", "Whether", "Which", "Who", "Whoever", "Whose", "How", "Where", "Why"}
PRONOUNS = {"That", "Those"}
THINGS = "(?:id|rank|process|table|worker|launcher|row|machine|file|item|model|server|checkpoint)(?:e?s)?"
# What a document may not say, by what it says instead.
INSTEAD = {
    "baseline": r"\bha(?:s|ve) to beat\b",
    "eviction policy": r"\bgiven away\b",
    "cannot bind, open or read": r"\bcannot be had\b",
    "checksum mismatch": r"\bis not what was written\b",
    "initial rows": r"\brows that \w+ begins? with\b",
    "insert": r"\b(?:takes?|took|taken|taking) (?:\w+ )?ids in\b|\b(?:is|are) taken in\b",
    "evict": r"\b(?:lets?|letting) (?:\w+ )?go\b",
    "skip, exclude or omit": r"\bleft out\b|\bleaves (?:it |them )?out\b",
    "unused": r"\bthat nothing reads\b",
    "negatives": r"\bcompetitors?\b",
    "it, no rank, each user": r"\b(?:whoever|nobody|somebody|everybody|anybody)\b",
    "that": rf"\b{THINGS},? who\b",
}
# The most places in the code, which are still to be rewritten. Lower a number when you rewrite one.
LEFT = {
    # A text in the format of exported models.
    "skip, exclude or omit": 1,
}
# Made from code, or written by benchmarks.
MADE = ("docs/api.md", "docs/flags.md", "docs/log/benchmarks.md")


def texts_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings, messages and comments of a file, by line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        # A message has blanks; a name or a pattern has none.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def texts_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """The paragraphs of a page, by line; without blocks of code and links."""
    text = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.DOTALL)
    line = 1
    for part in re.split(r"(\n\n)", text):
        yield line, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", part)
        line += part.count("\n")


@functools.cache
def texts_of(path: Path) -> list[tuple[int, str]]:
    """The texts of a page or of code, by line; a sentence may go on in the next line."""
    found = texts_of_page(path) if path.suffix == ".md" else texts_of_code(path)
    return [(line, " ".join(text.split())) for line, text in found]


def places(pattern: str, paths: Iterable[Path]) -> list[str]:
    """The places with a pattern: file, line and words."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text[max(0, match.start() - 40) : match.end() + 30]}"
        for path in paths
        for line, text in texts_of(path)
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("instead", INSTEAD)
def test_documents_use_the_words_of_the_field(instead: str) -> None:
    pages = [page for page in (*PAGES, *ARCHIVE) if name_of(page) not in MADE]
    assert places(INSTEAD[instead], pages) == []


@pytest.mark.parametrize("instead", INSTEAD)
def test_code_uses_the_words_of_the_field(instead: str) -> None:
    found = places(INSTEAD[instead], sorted((ROOT / "example").rglob("*.py")))
    listed = "\n".join(found)
    assert len(found) <= LEFT.get(instead, 0), f"write {instead!r} in one of these places:\n{listed}"


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for folder in ("example", "tests", "benchmarks", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node)) and text.split()[0].strip(",.:") in QUESTION_WORDS | PRONOUNS
    ]
    assert found == []


@pytest.mark.parametrize("page", [*PAGES, *ARCHIVE], ids=name_of)
def test_a_heading_names_its_subject(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    assert headings
    assert not [heading for heading in headings if heading.split()[0] in QUESTION_WORDS | PRONOUNS]


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("ids that nobody has seen", "it, no rank, each user"),
        ("a rank who waits", "that"),
        ("tables that take ids in", "insert"),
        ("the port cannot be had", "cannot bind, open or read"),
        ("a flag that nothing reads", "unused"),
        ("rows that are left out", "skip, exclude or omit"),
    ],
)
def test_a_forbidden_phrase_is_found(text: str, instead: str) -> None:
    assert re.search(INSTEAD[instead], text)


@pytest.mark.parametrize("text", ["leave one out cross validation", "users who rated it", "leave_one_out"])
def test_a_plain_phrase_is_allowed(text: str) -> None:
    assert not [pattern for pattern in INSTEAD.values() if re.search(pattern, text)]
