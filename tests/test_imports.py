"""Direction of imports between the parts of the library, without circles."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from example import make_model
from recsuite import hooks
from recsuite.config.sections import ModelConfig
from recsuite.datasets.tables.files import find_tables
from recsuite.errors import UserError
from recsuite.places import folder_at
from recsuite.tools.script import exit_status
from tests.support.launch import ROOT, python, succeeded

SOURCES = ROOT / "example"
# A folder, a file or a module of the core, and what it may import. Scripts and `tools` may import all of it.
MAY_IMPORT = {
    "errors": "",
    "files": "errors",
    "hooks": "errors",
    "places": "errors files hooks",
    "config": "errors files places hooks",
    "runtime": "errors files config",
    "workers": "errors runtime",
    "ids": "errors",
    "compiled": "files",
    "time_buckets": "",
    "metrics": "errors",
    "datasets": "errors files places config runtime workers ids time_buckets metrics compiled hooks",
    "models": "errors config datasets.schema compiled time_buckets",
    "sharding": "errors files config runtime datasets models ids compiled",
    "training.progress": "files datasets.streams",
    "checkpoint.format": "errors files places training.progress",
    "checkpoint.folder": "errors files places runtime.console runtime.process checkpoint.format",
    "checkpoint.chain": "errors files runtime.console checkpoint.format checkpoint.folder training.progress",
    "checkpoint.origin": "errors files checkpoint.format checkpoint.chain",
    "checkpoint.shards": "errors files places ids checkpoint.format",
    "checkpoint.recorded": "errors files places config runtime.console checkpoint.format checkpoint.folder "
    "checkpoint.chain",
    "checkpoint": "errors files places hooks config runtime datasets models sharding training ids",
    "training": "errors config places runtime datasets metrics models sharding compiled time_buckets hooks",
    "serving": "errors files places config models runtime.console ids time_buckets datasets.schema "
    "datasets.source datasets.preparation.vocabulary datasets.preparation.reading checkpoint.format "
    "checkpoint.folder checkpoint.chain checkpoint.origin checkpoint.shards checkpoint.recorded "
    "training.progress hooks",
}


def name_of(path: Path) -> str:
    """The module that a file is."""
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(SOURCES.rglob("*.py"))}


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The modules of this repository that some of a module's nodes import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` and `from module import name` look alike.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {node.module}
    return found & MODULES.keys()


def is_within(module: str, part: str) -> bool:
    """True if a module is a part of the library, or lies in it."""
    return f"{module}.".startswith(f"recsuite.{part}.")


def part_of(module: str) -> str | None:
    """The part of the library that a module belongs to; None where it may import everything."""
    parts = [part for part in MAY_IMPORT if is_within(module, part) and not module.endswith(".__main__")]
    return max(parts, key=len, default=None)


def test_each_class_of_the_scripts_and_the_library_has_a_name_of_its_own() -> None:
    names = [
        node.name
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, number in Counter(names).items() if number > 1] == []


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_folder_imports_only_lower_layers(part: str) -> None:
    allowed = [part, *MAY_IMPORT[part].split()]
    found = {
        (module, other)
        for module, path in MODULES.items()
        if part_of(module) == part
        for other in imported(ast.walk(ast.parse(path.read_text())))
        if not any(is_within(other, each) for each in allowed)
    }
    assert found == set()


def subject_of(module: str) -> str | None:
    """The extra that a module belongs to: a file or a folder of extras; None for the core and scripts."""
    return ".".join(module.split(".")[:3]) if is_within(module, "extras") else None


def test_the_core_names_extras_in_its_table_of_hooks_alone() -> None:
    # An import by a text is none of those above; `__init__` has the public names, of extras too.
    naming = {
        module
        for module, path in MODULES.items()
        if module.startswith("recsuite.") and not is_within(module, "extras")
        # `config.extras` are the sections of extras.
        if re.search(r"(?<!config\.)(?<!self\.)(?<!flags\.)\bextras\.\w", path.read_text())
    }
    assert naming == {"recsuite.hooks"}
    for name in hooks.EXTRAS:
        assert subject_of(hooks.extra(name).__name__) is not None
    for module, _ in hooks.SECTIONS.values():
        assert subject_of(module) is not None
    for name, function in hooks.INITIAL_ROWS.items():
        assert callable(getattr(hooks.extra(name), function))
    for kind, world in hooks.WORLDS.items():
        assert callable(getattr(hooks.extra(kind), world))
    for file_format in hooks.READERS:
        assert callable(hooks.reader_of(file_format))


def test_no_extra_imports_another_one() -> None:
    found = {
        (module, other)
        for module, path in MODULES.items()
        if is_within(module, "extras")
        for other in imported(ast.walk(ast.parse(path.read_text())))
        if is_within(other, "extras") and subject_of(other) != subject_of(module)
    }
    assert found == set()


def test_an_extra_that_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recsuite.extras.kafka", None)
    with pytest.raises(UserError, match=r"recsuite\.extras\.kafka"):
        hooks.extra("kafka")
    monkeypatch.setitem(sys.modules, "recsuite.extras.stores.objects", None)
    with pytest.raises(UserError, match=r"recsuite\.extras\.stores\.objects.* install"):
        folder_at("s3://bucket/run", "save_dir")
    monkeypatch.setitem(sys.modules, "recsuite.extras.stores.urls", None)
    with pytest.raises(UserError, match=r"recsuite\.extras\.stores\.urls.* install"):
        find_tables("https://host/ratings.csv")
    # A package that an extra needs is a matter of the extra.
    monkeypatch.setattr(hooks, "EXTRAS", {"graph": "recsuite.extras.graph.graph"})
    monkeypatch.delitem(sys.modules, "recsuite.extras.graph.graph", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        hooks.extra("graph")


def test_an_installation_without_extras_has_none_of_their_flags(tmp_path: Path) -> None:
    shutil.copytree(SOURCES / "recsuite", tmp_path / "recsuite")
    shutil.rmtree(tmp_path / "recsuite" / "extras")
    bare = {"PYTHONPATH": str(tmp_path)}
    command = ("-m", "recsuite.config", "--epochs", "2")
    succeeded(python(*command, env=bare, cwd=tmp_path))
    refused = python(*command, "--report_dir", "here", env=bare, cwd=tmp_path)
    assert refused.returncode == 2
    assert "Unrecognized arguments: --report_dir here" in refused.stderr
    assert "reports require recsuite.extras, which is not installed" in refused.stderr


# Each script with its flags in turn, by one process without extras: prints its status and its errors.
SCRIPTS = """
import contextlib, importlib, io, json, sys
sys.modules["recsuite.extras"] = None
for line in sys.argv[1:]:
    name, *flags = line.split()
    sys.argv = [f"{name}.py", *flags]
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        try:
            status = importlib.import_module(name).main()
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([line.strip(), status, errors.getvalue()]))
"""
REFUSED = {
    "example --doctor": "recsuite.extras",
    "plan --help": "recsuite.extras.plan",
    "score --users all --output there": "recsuite.extras.scoring",
    "retrieval": "recsuite.extras.index",
    "online": "recsuite.extras.trainings",
    "pipeline": "recsuite.extras.trainings",
    "sequential": "recsuite.extras.recommend",
    "ctr --data_path log.tsv": "recsuite.extras.guess.writer",
}
HELPED = (
    *("example", "retrieval", "sequential", "score", "serve", "online", "pipeline", "ctr", "multitask"),
    *("criteo_log", "shop_log"),
)


def test_each_script_helps_without_extras_and_refuses_the_one_that_it_requires(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("1" + "\t1" * 39 + "\n")
    lines = [*REFUSED, *(f"{name} --help" for name in HELPED)]
    ended = succeeded(python("-c", SCRIPTS, *lines, cwd=tmp_path))
    answers = {line: answer for line, *answer in map(json.loads, ended.splitlines())}
    assert answers.keys() == {*lines}
    assert [line for line in lines if line not in REFUSED and answers[line] != [0, ""]] == []
    for line, name in REFUSED.items():
        status, sentence = answers[line]
        assert (status, sentence.count("\n")) == (2, 1), sentence
        assert re.search(rf"{re.escape(name)}\b.*, which is not installed", sentence), sentence


def test_a_copied_script_names_the_script_that_it_requires(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "retrieval", None)
    wanted = ModelConfig(task="ranking")
    assert exit_status(lambda: bool(make_model(cast(Any, None), wanted))) == 2
    assert "requires retrieval.py, which is not beside" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        exit_status(lambda: bool(importlib.import_module("nothing")))


def test_no_imports_are_circular() -> None:
    graph = {name: imported(iter(ast.parse(path.read_text()).body)) for name, path in MODULES.items()}
    # Raises an exception that names the circle.
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", sorted({module.split(".")[1] for module in MODULES if "." in module}))
def test_modules_of_a_package_do_not_import_each_other(package: str) -> None:
    # Imports inside functions and for annotations count too.
    modules = {name: path for name, path in MODULES.items() if is_within(name, package)}
    graph = {
        name: imported(ast.walk(ast.parse(path.read_text()))) & modules.keys()
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_parts_of_the_data_sets_do_not_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if is_within(name, "datasets"):
            part = ".".join(name.split(".")[:3])
            others = imported(ast.walk(ast.parse(path.read_text())))
            parts = {".".join(other.split(".")[:3]) for other in others if is_within(other, "datasets")}
            graph.setdefault(part, set()).update(parts - {part})
    graphlib.TopologicalSorter(graph).prepare()


def test_only_one_folder_of_the_library_mentions_movies() -> None:
    found = {
        module
        for module, path in MODULES.items()
        if module.startswith("recsuite.")
        and not is_within(module, "datasets.movielens")
        # The words of people's own tables, and a world of movies.
        and module not in ("recsuite.extras.guess.guessing", "recsuite.extras.drifting")
        # The name of the data sets is not a word for an item.
        if re.search(r"movie(?!lens)", path.read_text(), re.IGNORECASE)
    }
    assert found == set()


def test_one_module_chooses_the_family_of_data_sets() -> None:
    found = {
        module
        for module, path in MODULES.items()
        if not is_within(module, "datasets.movielens")
        if any(
            is_within(other, "datasets.movielens")
            for other in imported(ast.walk(ast.parse(path.read_text())))
        )
    }
    assert found == {"recsuite.datasets.source", "recsuite.extras.drifting"}


def test_only_the_sharding_of_tables_knows_the_two_kinds_of_tables() -> None:
    found = {
        module
        for module, path in MODULES.items()
        if not is_within(module, "sharding")
        if re.search(r"\b(DynamicTable|StaticTable)\b", path.read_text())
        or any(
            is_within(other, "sharding.dynamic") for other in imported(ast.walk(ast.parse(path.read_text())))
        )
    }
    assert found == set()


def test_no_test_imports_a_test() -> None:
    found = {
        str(path)
        for path in Path(__file__).parent.rglob("*.py")
        if re.search(r"^from tests\.\S*\btest_|^import tests\.\S*\btest_", path.read_text(), re.MULTILINE)
    }
    assert found == set()
