"""The version of the code that makes columns: which code counts, and what a change of it does."""

from __future__ import annotations

import ast
import itertools
import shutil
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.program import LIBRARY, bare, digest_of_program, sources
from tests.support.launch import python, succeeded

# What that code takes from modules outside of the digest, and why a change there makes no other columns.
ELSEWHERE = {
    # Read and written, not computed; the digests of files are of a known kind.
    "recsuite.checkout": {"DATA_ROOT", "place_for"},
    "recsuite.errors": {"UserError", "an", "counted", "printable"},
    "recsuite.files": {
        *("FileEntry", "check_file", "digest_of", "explained", "flush", "flushed", "locked", "reason_of"),
        *("flushing", "digest_of_bytes", "remove", "replace_file", "written_aside"),
    },
    "recsuite.records": {"OPTIONAL", "SEAL", "parsed", "plain", "sealed", "typed"},
    "recsuite.runtime.console": {"say"},
    "recsuite.runtime.progress_bar": {"stage"},
    # Their values are in the name of the folder; a manifest without an evaluation is refused.
    "recsuite.config.config": {"Config"},
    "recsuite.config.sections.data": {"DataConfig", "OFFICIAL_SPLITS"},
    "recsuite.config.sections.tables": {"TablesConfig"},
    "recsuite.config.sections.model": {"EVALUATIONS", "TOP"},
    # They make source files, whose bytes are in the name.
    "recsuite.datasets.movielens.download": {"download"},
    "recsuite.datasets.movielens.synthetic": {"WORLDS", "check_synthetic", "write_synthetic"},
    # So is a schema that is guessed.
    "recsuite.datasets.tables.guessing.proposal": {"propose"},
}

PLAIN = """x = 1
def f(a):
    text = '''# a line

and another'''
    return f"{a:#x}# {a}"
"""
COMMENTED = """# A comment.
'''A docstring,
with two lines.'''

x = 1  # Of x.
"Below a field."


def f(a):
    # Above
    r"of f"

    text = '''# a line

and another'''   # Behind it.
    return f"{a:#x}# {a}"
"""


def names_taken(path: Path) -> dict[str, set[str]]:
    """What a source imports from the library, by module."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("recsuite") for alias in node.names), "name what is taken"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if (node.module or "").startswith("recsuite"):
                found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def test_all_code_that_makes_columns_is_in_the_digest_but_for_what_is_known_to_change_none() -> None:
    covered = {".".join(("recsuite", *path.relative_to(LIBRARY).with_suffix("").parts)) for path in sources()}
    assert "recsuite.datasets.preparation.building" in covered
    taken: dict[str, set[str]] = {}
    for path in sources():
        for module, names in names_taken(path).items():
            # Of a package, the modules in it.
            within = {f"{module}.{name}" for name in names}
            if module not in covered and not within <= covered:
                taken.setdefault(module, set()).update(names)
    assert taken == ELSEWHERE


def test_comments_docstrings_and_empty_lines_are_left_out_and_strings_stay(tmp_path: Path) -> None:
    for name, text in (("plain.py", PLAIN), ("commented.py", COMMENTED)):
        (tmp_path / name).write_text(text)
    assert bare(tmp_path / "plain.py") == bare(tmp_path / "commented.py") == PLAIN
    (tmp_path / "crlf.py").write_bytes(COMMENTED.replace("\n", "\r\n").encode())
    assert bare(tmp_path / "crlf.py") == PLAIN


TEXTS = r"""
f"a statement, and evaluated"
b'not evaluated'
x = \
    "continues a line"
'one' "more"
call(
    "in brackets"
    'alone'  # (
)
y = "a \" # no comment", '#', f"{x!r:>{4}} # ("
'''  a "quote" \'''\' and another  '''
class Empty: "on one line"
if x: y = 1; "behind"
"at the end"  # without an end of line"""


def by_tokens(path: Path) -> str:
    """The lines of a source that have an effect, as Python's own tokens say."""
    with tokenize.open(path) as file:
        lines = file.readlines()
    tokens = [*tokenize.generate_tokens(iter(lines).__next__)]
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    code = [token for token in tokens if token.type not in (tokenize.NL, tokenize.COMMENT)]
    layout, before = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT), tokenize.NEWLINE
    rows: set[int] = set()
    for token, after in itertools.pairwise(code):
        is_plain = token.type == tokenize.STRING and token.string.lstrip("bBrRuU")[0] in "'\""
        is_alone = before in layout and after.type == tokenize.NEWLINE
        if not (is_plain and is_alone) and token.type not in layout:
            rows |= {*range(token.start[0], token.end[0] + 1)}
        before = token.type
    return "".join(f"{lines[row - 1][: comments.get(row)].rstrip()}\n" for row in sorted(rows))


def test_what_has_an_effect_is_what_pythons_tokens_say(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text(TEXTS)
    assert 'f"a statement' in bare(tmp_path / "texts.py")
    for path in (tmp_path / "texts.py", *sources()):
        assert bare(path) == by_tokens(path), path


def edited(library: Path, name: str, change: Callable[[str], str]) -> Path:
    """A copy of the library in which one file is another."""
    shutil.copytree(LIBRARY, library, ignore=shutil.ignore_patterns("__pycache__"))
    before = (library / name).read_text()
    assert change(before) != before
    (library / name).write_text(change(before))
    return library


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("datasets/preparation/baselines.py", "DAMPING = 5.0", "DAMPING = 6.0"),
        ("datasets/metrics.py", "errors = predictions[part]", "errors = 2 * predictions[part]"),
        ("datasets/movielens/schema.py", '"Western"', '"western"'),
        ("datasets/tables/schema_file.py", "feature.kind == LIST", "feature.kind == CATEGORY"),
    ],
)
def test_a_formula_that_changed_has_another_digest(
    tmp_path: Path, name: str, before: str, after: str
) -> None:
    changed = edited(tmp_path / "recsuite", name, lambda text: text.replace(before, after))
    assert digest_of_program(changed) != digest_of_program()


def test_other_words_and_other_code_have_the_same_digest(tmp_path: Path) -> None:
    words = edited(
        tmp_path / "words" / "recsuite",
        "datasets/preparation/splits.py",
        lambda text: f"# New.\n{text}".replace('"""Which events are', '"""What events are'),
    )
    assert digest_of_program(words) == digest_of_program()
    other = edited(tmp_path / "other" / "recsuite", "models/layers.py", lambda text: f"{text}\nx = 1\n")
    assert digest_of_program(other) == digest_of_program()


OPEN = """
import sys
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
print("folder:", open_columns(Config.of(data_path=sys.argv[1])).folder)
"""


def opened_by(library: Path, data: Path) -> tuple[str, str]:
    """The folder of the columns that a copy of the library trains on, and all that it said."""
    said = succeeded(python("-c", OPEN, data, env={"PYTHONPATH": str(library.parent)}))
    return said.splitlines()[-1].removeprefix("folder: "), said


def test_a_program_with_another_formula_trains_on_no_columns_of_this_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_synthetic(data, 1_000, seed=0)
    folder, said = opened_by(LIBRARY, data)
    assert "other versions" not in said
    file = "datasets/preparation/baselines.py"
    same = edited(tmp_path / "same" / "recsuite", file, lambda text: f"# Other words.\n{text}")
    assert opened_by(same, data) == (folder, f"folder: {folder}\n")
    changed = edited(tmp_path / "changed" / "recsuite", file, lambda text: text.replace("= 5.0", "= 9.0"))
    other, said = opened_by(changed, data)
    assert other != folder
    # Somebody may train on them: they are left, and named.
    assert f"left in {data / '.columns'} what other versions of the program made: {Path(folder).name}" in said
    assert opened_by(LIBRARY, data) == (folder, f"folder: {folder}\n")
