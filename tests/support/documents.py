"""Pages of the documents, and the commands and programs in them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import ROOT, read_json

README = ROOT / "README.md"
CORE = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*CORE, *sorted((ROOT / "docs" / "extras").glob("*.md"))]
# Measurements and history: their links must work, but they may name what is gone.
ARCHIVE = sorted((ROOT / "docs" / "log").glob("*.md"))


def name_of(page: Path) -> str:
    """Name of a page in tests."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[tuple[str, ...]]:
    """The commands of each block of a page, in order; one that is continued is one line."""
    texts = [re.sub(r" *\\\n *", " ", block) for block in blocks(page, "bash")]
    return [tuple(text.strip().splitlines()) for text in texts]


def short_form(benchmark: str) -> list[str]:
    """The flags of the short form of a benchmark, as its page has it."""
    start = f"python benchmarks/{benchmark}.py "
    (found,) = (lines[0] for page in PAGES for lines in commands(page) if lines[0].startswith(start))
    return shlex.split(found.removeprefix(start))


def write_default_data(data: Path, num_ratings: int) -> None:
    """Put the default data set into the folder `data` of a clone, with fewer ratings than it says."""
    folder = data / "synthetic-1000000-seed0-stationary"
    write_synthetic(folder, num_ratings, seed=0)
    says = read_json(folder / "oracle.json")
    (folder / "oracle.json").write_text(json.dumps({**says, "num_ratings": 1_000_000}))
