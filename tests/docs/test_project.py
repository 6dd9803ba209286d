"""Files of the forge: the workflow tests what the project supports, and the forms are complete."""

from __future__ import annotations

import re
import sys
from typing import Any

import yaml

from recsuite.runtime import host
from tests.support.launch import ROOT, run_command, succeeded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORGE = ROOT / ".github"
COMMANDS = (
    r"\.ci/run",
    r"\./run\.sh test( .*)?",
    r"\.venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist \.",
)


def workflow() -> Any:
    return yaml.safe_load((FORGE / "workflows" / "ci.yml").read_text())


def test_the_workflow_has_the_pythons_of_the_project_and_the_stacks_of_run_sh() -> None:
    jobs = workflow()["jobs"]
    pythons = jobs["python"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    assert pythons == [text.removeprefix(prefix) for text in project["classifiers"] if prefix in text]
    assert project["requires-python"] == f">={pythons[0]}"
    stacks = jobs["stack"]["strategy"]["matrix"]["stack"]
    assert stacks == [*host.STACKS]
    assert f"{', '.join(stacks[:-1])} or {stacks[-1]}" in succeeded(
        run_command([str(ROOT / "run.sh"), "help"])
    )


def test_the_workflow_repeats_no_command_and_can_neither_write_nor_hang() -> None:
    found = workflow()
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 60
        assert "permissions" not in job
        for step in job["steps"]:
            if "run" in step:
                assert any(re.fullmatch(command, step["run"]) for command in COMMANDS), step
            else:
                # By a commit, which cannot be changed as a tag can.
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), step
            assert step.get("with", {}).get("persist-credentials", False) is False


def test_forms_ask_for_what_they_need_and_nothing_names_a_host() -> None:
    for name in ("bug", "feature"):
        form = yaml.safe_load((FORGE / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "id", "attributes"} <= field.keys() for field in form["body"])
        assert any(field.get("validations", {}).get("required") for field in form["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for path in (*FORGE.rglob("*.yml"), ROOT / "CITATION.cff", ROOT / "SECURITY.md"):
        assert "://" not in path.read_text()
