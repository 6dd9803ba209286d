"""The wheel that `pip install .` builds: all of the library and nothing else; it works by itself."""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import recsuite
from recsuite import hooks
from recsuite.files import checkout
from tests.support.launch import ROOT, python, run_command, succeeded

# Imported by no statement of the library: torch, serve.py and fsspec do. fbgemm comes with torchrec, cuda
# with the CUDA builds of torch, and typing_extensions is for the type checker alone. tomllib is a part of
# Python itself, from 3.11 on.
HIDDEN, NOT_NAMED = (
    {"tensorboard", "faiss-cpu", "s3fs", "fastapi", "fastapi-offline", "uvicorn", "recsuite"},
    {"fbgemm-gpu-cpu", "fbgemm-gpu", "typing-extensions", "tomllib", "cuda"},
)
# Built from these alone: the lists of packages and the documents are no part of it.
PARTS = (
    "pyproject.toml",
    "run.sh",
    "README.md",
    "LICENSE",
    "example",
    "tests",
    "benchmarks",
    "docs",
    "deploy",
)
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")

USE = """
import sys
from pathlib import Path
import recsuite
from recsuite.files import checkout
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.source import look
from recsuite.runtime import host
print(Path(recsuite.__file__).parent, checkout())
print(look(Config().data, 0)[0])
print(open_columns(Config.of(synthetic_ratings=1000)).folder)
print(host._mend(["fbgemm-gpu-cpu"], everything=True))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the repository, built without a network."""
    copy, built = (tmp_path_factory.mktemp(name) for name in ("repository", "built"))
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, copy / name)
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    succeeded(python("-m", "pip", "wheel", *flags, copy, "-w", built, cwd=copy))
    (found,) = built.iterdir()
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder bin of an environment with the wheel; its requirements are in that of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    succeeded(python("-m", "venv", "--without-pip", folder))
    (site,) = folder.glob("lib/python*/site-packages")
    # A path alone: the .pth file of a library that is installed from the repository is not read.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    pip = ("-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    succeeded(python(*pip, "install", "--no-deps", "--no-index", wheel))
    return folder / "bin"


def test_the_wheel_holds_every_file_of_the_library_and_the_scripts_and_nothing_else(wheel: Path) -> None:
    library = ROOT / "example" / "recsuite"
    files = {path.relative_to(library.parent).as_posix() for path in library.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    shared = ["run.sh", *(f"example/{path.name}" for path in library.parent.glob("*.py"))]
    wanted |= {f"recsuite-{recsuite.__version__}.data/data/share/recsuite/{name}" for name in shared}
    with zipfile.ZipFile(wheel) as held:
        names = {name for name in held.namelist() if ".dist-info/" not in name}
    assert names == wanted
    assert {"recsuite/datasets/movielens/schema.toml", "recsuite/datasets/movielens/synthetic.py"} <= names


def test_the_library_of_the_wheel_works_and_keeps_its_data_below_the_working_directory(
    wheel: Path, tmp_path: Path
) -> None:
    site, work = tmp_path / "lib" / "site-packages", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(wheel) as held:
        held.extractall(site)
    # Whoever installs into a folder of a project may have such a list of their own there.
    (site.parent / "requirements.txt").touch()
    said = succeeded(python("-c", USE, cwd=work, env={"PYTHONPATH": f"{site}"})).splitlines()
    place, data = said[0], work / "data" / "synthetic-1000000-seed0-stationary"
    assert place == f"{site / 'recsuite'} None"
    assert said[1] == str(data)
    assert Path(said[-2]).is_relative_to(work / "data" / "synthetic-1000-seed0-stationary" / ".columns")
    assert "requirements.txt" in said[-1].split()


def test_the_installed_command_runs_the_commands_of_run_sh(environment: Path, tmp_path: Path) -> None:
    def run(*arguments: str, status: int = 0) -> str:
        # Not by the helpers of tests, which name the library of the repository.
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NPROC": "1", "VARIANT": "cpu"}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [str(environment / "recsuite"), *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=env, timeout=300, **pipes)
        assert ended.returncode == status, ended.stdout
        return ended.stdout

    listed, ours = (
        set(re.findall(rf"^(?:usage:)? +{name} (\w+)", text, re.M))
        for name, text in (
            ("recsuite", run("--help")),
            (r"\./run\.sh", succeeded(run_command([str(ROOT / "run.sh"), "help"]))),
        )
    )
    assert ours - listed == {"setup", "test", "smoke", "soak", "lint", "docs"}
    assert listed - ours == set()
    assert {"dump", "load", "serve", "score", "retrain"} <= listed
    assert run("lint", status=2) == "recsuite: lint requires a clone of the repository\n"
    assert "--epochs must be between" in run("train", "--epochs", "0", status=2)
    assert "usage: serve.py" in run("serve", "--help")
    small = ("--synthetic_ratings", "2000", "--epochs", "1", "--embedding_dim", "4", "--preset", "none")
    assert "test rmse" in run("dump", *small).lower()
    # Both below the working folder, so this was not the library of the repository.
    assert {"data", "dumps"} <= {path.name for path in tmp_path.iterdir()}


def test_pip_check_reports_the_name_of_the_cpu_wheel_of_fbgemm_and_packages_of_tests() -> None:
    names = {
        name: set(re.findall(r"^([\w-]+)==", (ROOT / name).read_text(), re.M))
        for name in ("requirements.txt", "requirements-dev.txt")
    }
    of_tests = names["requirements-dev.txt"] - names["requirements.txt"]
    reports = python("-m", "pip", "--disable-pip-version-check", "check").stdout.splitlines()
    others = [line for line in reports if line.split()[0] not in of_tests]
    assert all(re.match(r"torchrec \S+ requires fbgemm-gpu, |No broken", line) for line in others), others


def test_the_version_is_that_of_the_package_and_of_the_newest_changes(wheel: Path) -> None:
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert newest[1] == recsuite.__version__ == wheel.name.split("-")[1]
    assert f"version: {newest[1]}\ndate-released: {newest[2]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_metadata_name_the_licence_and_every_package_that_the_library_imports(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        (place,) = (name for name in held.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(held.read(place))
        assert b"BSD 3-Clause License" in held.read(place.replace("METADATA", "licenses/LICENSE"))
    assert (metadata["Name"], metadata["License-Expression"]) == ("recsuite", "BSD-3-Clause")
    named = {re.split(r"[^\w-]", text)[0] for text in metadata.get_all("Requires-Dist", [])}
    modules = {
        name.partition(".")[0]
        for path in (ROOT / "example" / "recsuite").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    installed = packages_distributions()
    others = modules - {*sys.stdlib_module_names, "recsuite"}
    imported = {name.lower().replace("_", "-") for each in others for name in installed.get(each, [each])}
    assert imported - NOT_NAMED | HIDDEN | {"tomli"} == named


def test_a_package_that_only_extras_use_is_optional_under_the_name_that_its_refusal_gives() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = dict(project["optional-dependencies"])
    (everything,) = optional.pop("all")
    assert everything == f"recsuite[{','.join(optional)}]"
    assert {*hooks.PACKAGES.values()} <= {(name, key) for key, names in optional.items() for name in names}
    named = {name for names in optional.values() for name in names}
    assert named == {package for package, _ in hooks.PACKAGES.values()}
    assert named & {re.split(r"[^\w-]", text)[0] for text in project["dependencies"]} == set()


def test_the_repository_is_found_from_the_library_in_it() -> None:
    assert checkout() == ROOT
