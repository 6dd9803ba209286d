"""The documents: what they name is there, and their figures are those of the committed runs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

import recsuite
from recsuite.config.parser import build_parser
from tests.support.documents import ARCHIVE, CORE, PAGES, README, blocks, name_of
from tests.support.launch import EXAMPLE, ROOT, python, succeeded

DOCS = ROOT / "docs"
MOST_WORDS_OF_THE_README = 1_050
# Of README, changelog and docs/, without extras, the archive and generated pages; and of the extras.
MOST_WORDS, MOST_WORDS_OF_EXTRAS = 17_750, 5_270
GENERATED = ("docs/api.md", "docs/flags.md")
# Of other programs: run.sh, torchrun, pip, docker, the benchmarks.
OTHER_FLAGS = [
    *(
        "--standalone",
        "--nproc_per_node",
        "--max-restarts",
        "--no-deps",
        "--no-build-isolation",
        "--build-arg",
        "--host",
    ),
    *(
        "--write",
        "--data",
        "--real",
        "--output",
        "--help",
        "--all",
        "--rebuild",
        "--logdir",
        "--format",
        "--label",
    ),
    *(
        "--candidates",
        "--planted",
        "--model",
        "--users",
        "--pairs",
        "--margin",
        "--keep_runs",
        "--warm",
        "--no_final_fit",
    ),
    *("--ntasks-per-node", "--url", "--allowed_hosts"),
    # Of prepare.py.
    *("--address", "--duplicates", "--test_fraction", "--validation_fraction"),
    # Of ./run.sh plan.
    *("--hosts", "--gpus_per_host", "--network", "--disk", "--table", "--uvm", "--on_disk", "--steps"),
    *("--events", "--event_bytes", "--read_rate"),
]


def in_prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that a link into a page may name."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_documents_are_short() -> None:
    # Neither bars of tables nor what a benchmark wrote are words.
    written = r"<!-- ([\w ]+): made by .*?<!-- end of \1 -->|<!-- excerpt of .*?<!-- end of excerpt -->"
    texts = {name_of(page): re.sub(written, "", page.read_text(), flags=re.DOTALL) for page in PAGES}
    words = {name: len(re.findall(r"\S*\w\S*", text)) for name, text in texts.items()}
    assert words["README.md"] <= MOST_WORDS_OF_THE_README
    core = {name_of(page) for page in CORE}
    assert sum(words[name] for name in core - {"CONTRIBUTING.md", *GENERATED}) <= MOST_WORDS
    assert sum(words[name] for name in words.keys() - core) <= MOST_WORDS_OF_EXTRAS


# decisions.md has no command.
@pytest.mark.parametrize(
    "page", sorted({*DOCS.glob("*.md"), *DOCS.glob("extras/*.md")} - {DOCS / "decisions.md"}), ids=name_of
)
def test_a_page_opens_with_its_purpose_and_a_command(page: Path) -> None:
    title, purpose, *_ = page.read_text().split("\n\n")
    assert title.startswith("# ")
    assert re.match(r"[A-Z`][^\n|]", purpose)
    opening = page.read_text().partition("\n## ")[0]
    assert re.search(r"^```|`[^`]*(?:\./run\.sh|python|import recsuite)[^`]*`", opening, re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *ARCHIVE], ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_named_in_a_document_exists(page: Path) -> None:
    for name in re.findall(
        r"\b(?:example|tests|benchmarks|docs|deploy)/[\w/-]*\w(?:\.\w+)?", page.read_text()
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_named_in_a_document_exists(page: Path) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w{11,})`", page.read_text()))
    assert all(f"def {name}(" in code for name in names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_that_a_document_names_is_one(page: Path) -> None:
    known = {*build_parser()._option_string_actions, *OTHER_FLAGS}
    named = {
        flag for code in re.findall(r"`([^`]+)`", in_prose(page)) for flag in re.findall(r"--[\w-]+", code)
    }
    assert named <= known


def test_every_document_is_named_by_the_readme() -> None:
    linked = set(re.findall(r"\]\(([\w/]+\.md)", README.read_text()))
    assert linked == {name_of(page) for page in PAGES} - {"README.md"}


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- [^:\n]+: ([\w/-]+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)
    of_the_root = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
    }
    pages = [name_of(page) for page in (*PAGES, *ARCHIVE)]
    assert sorted(listed) == sorted(of_the_root.get(name, name.removeprefix("docs/")) for name in pages)


def test_the_site_is_built_without_a_warning_and_asks_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which `./run.sh docs` installs")
    command = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site")
    succeeded(python(*command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}))
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > len(PAGES)
    loaded = {
        address
        for text in pages
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
        for address in re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", tag)
    }
    assert not [address for address in loaded if re.match(r"(https?:)?//", address)]
    # As a table, not as text.
    assert not re.search(r"<p>\|", "".join(pages))
    start = (tmp_path / "site" / "index.html").read_text()
    assert re.findall(r'<img [^>]*src="([^"]+)"', start) == ["curves.png", "gpu.png"]
    # The class by which site.css wraps long commands, and not diagrams.
    assert 'class="language-bash highlight"' in start


def test_the_tree_of_the_repository_names_every_folder() -> None:
    (tree,) = (block for block in blocks(ROOT / "CONTRIBUTING.md", "") if block.startswith("example/"))
    named: set[str] = set()
    above: list[str] = []
    for indent, name in re.findall(r"^( *)([\w.]+/?)", tree, re.MULTILINE):
        above = [*above[: len(indent) // 2], name]
        named.add("".join(above))
    folders = [
        path for path in (ROOT / "example").rglob("*") if path.is_dir() and "__pycache__" not in path.parts
    ]
    tops = [ROOT / name for name in ("example", "tests", "benchmarks", "docs", "deploy", ".github")]
    files = (ROOT / "example").glob("*.py")
    there = {f"{folder.relative_to(ROOT).as_posix()}/" for folder in (*tops, *folders)}
    assert named == there | {file.relative_to(ROOT).as_posix() for file in files}


@pytest.mark.parametrize(("script", "name"), [("make_flags", "flags.md"), ("make_api", "api.md")])
def test_a_generated_page_is_that_of_its_script(
    monkeypatch: pytest.MonkeyPatch, script: str, name: str
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    made = importlib.import_module(script)
    assert (DOCS / name).read_text() == made.page(), f"run python docs/{script}.py --write"
    if script == "make_flags":
        assert made.STUB.read_text() == made.stub(), "run python docs/make_flags.py --write"
        for flag in build_parser()._option_string_actions:
            assert flag in ("-h", "--help", "--help_all") or f"`{flag}`" in made.page()


@functools.cache
def functions_that_raise() -> set[str]:
    """The names of functions of the library that all raise a `UserError`, as their docstrings say."""
    raises: dict[str, bool] = {"UserError": True, "require": True}
    for path in (ROOT / "example" / "recsuite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                is_said = "UserError: " in (ast.get_docstring(node) or "")
                raises[node.name] = raises.get(node.name, True) and is_said
    return {name for name, always in raises.items() if always}


@pytest.mark.parametrize("name", recsuite.PUBLIC)
def test_public_docstrings_have_arguments_results_errors_and_an_example(name: str) -> None:
    found = getattr(recsuite, name)
    text = inspect.getdoc(found) or ""
    assert re.match(r"(?!What|Whether|Which|Who|How|That|Where|Those)[A-Z].*?\.(\s|$)", text, re.DOTALL)
    parameters = inspect.signature(found).parameters.values() if found is not recsuite.UserError else ()
    for each in parameters:
        assert (
            each.kind is each.VAR_POSITIONAL or each.name == "kwargs" or re.search(rf"\b{each.name}\b", text)
        )
    own = {key: each for key, each in vars(found).items() if key[0] != "_"} if inspect.isclass(found) else {}
    # An override without a docstring of its own is explained by its base.
    methods = [
        each for each in own.values() if inspect.isfunction(each) and not hasattr(each, "__override__")
    ]
    for method in methods:
        if "torch.Tensor" in str(method.__annotations__.get("return")):
            assert re.search(r"float32 \[|As `ServedModel", method.__doc__ or "")
    tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "UserError: " in text or not called & functions_that_raise() or found is recsuite.UserError
    if any("RuntimeContext" in str(each.annotation) for each in parameters):
        assert "ollective" in text
    (*_, example) = re.findall(r"\n(?:\n|Example:\n)((?: {4}.*(?:\n|$)|\n)+)", text)
    ast.parse(textwrap.dedent(example))
    assert {*re.findall(r"\brs\.(\w+)", example)} <= recsuite.PUBLIC.keys()


def test_the_loop_in_the_readme_is_that_of_the_script() -> None:
    loop = blocks(README, "python")[0]
    assert "loss.backward()" in loop
    assert loop in textwrap.dedent("\n".join(line[8:] for line in EXAMPLE.read_text().splitlines()) + "\n")


def test_every_message_that_a_document_explains_is_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "example").rglob("*.py"))
    text = (DOCS / "extras" / "tools.md").read_text()
    messages = re.findall(r"^\| `(.+?)` ", text[text.index("## Messages") :], re.MULTILINE)
    assert len(messages) >= 5
    for message in messages:
        longest = max(message.split("..."), key=len).strip()
        assert longest in code, message


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_excerpts_of_tables_are_those_of_the_committed_runs(
    monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    make_figures = importlib.import_module("make_figures")
    assert make_figures.with_figures(page.read_text()) == page.read_text(), (
        "run python docs/make_figures.py --write"
    )


def test_files_written_by_the_commands_are_ignored_by_git() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    left = ["trace.json", "data/x", "runs/x", "dumps/x"]
    ignored = subprocess.run(["git", "check-ignore", *left], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout.split() == left
