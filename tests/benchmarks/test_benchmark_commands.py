"""Command lines of the benchmarks: --help, missing packages, and runs that are smaller than the default."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarks import BENCHMARKS, benchmark
from tests.support.launch import ROOT, python, succeeded

# Modules of other benchmarks, without a command.
MODULES = {"common", "peers", "plain_factors", "teams", "train_clicks", "train_limit"}
# In one process, which imports torch once.
HELP = """
import contextlib, io, json, runpy, sys
folder, scripts, *missing = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing))
sys.path.insert(0, folder)
found = {}
for name in scripts.split(","):
    sys.argv = [f"{folder}/{name}.py", "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            found[name] = [str(error), out.getvalue()]
print(json.dumps(found))
"""


def names_in(requirements: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", (ROOT / requirements).read_text(), re.MULTILINE))


def test_each_benchmark_has_a_help_text_without_packages_beyond_those_of_run_sh() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    missing = {
        name.replace("-", "_") for name in names_in("requirements-dev.txt") - names_in("requirements.txt")
    }
    asked = ",".join(sorted(scripts - MODULES))
    found = json.loads(succeeded(python("-c", HELP, BENCHMARKS, asked, *sorted(missing))))
    assert found.keys() == scripts - MODULES
    assert {name: how for name, (how, text) in found.items() if how != "0" or "usage: " not in text} == {}


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = benchmark("common").make_parser("Measure.", "numpy", "no-such-package")
    monkeypatch.setattr("sys.argv", ["speed.py"])
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([])
    assert ended.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("speed.py requires no-such-package; install with: ")
    assert sentence.endswith(f" -m pip install --no-deps -r {ROOT / 'requirements-dev.txt'}\n")
    # It measures nothing.
    parser.parse_args(["--figures", "speed.json"])
    assert "Requires numpy, no-such-package, of requirements-dev.txt." in parser.format_help()


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("", ""),
        ("--rows 100,1000 --rounds 9 --seconds 2 --only a", ""),
        ("--rows 100", "a short form, see --rows"),
        ("--rounds 2 --seconds 0.1", "a short form, see --rounds, --seconds"),
        ("--quick", "a short form, see --quick"),
    ],
)
def test_a_run_smaller_than_the_default_judges_no_bar_and_is_not_written(
    given: str,
    short: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = benchmark("common")
    monkeypatch.setattr(common, "DOCS", tmp_path / "docs")
    parser = common.make_parser("Measure.")
    parser.add_argument("--rows", type=common.comma_separated(int), default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--only", nargs="+", default=["a", "b"])
    parser.add_argument("--quick", action="store_true")
    measured: list[argparse.Namespace] = []

    def measure(flags: argparse.Namespace) -> dict[str, Any]:
        measured.append(flags)
        return {"ratio": 2.0}

    def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
        return [common.bar("this / that", result["ratio"], 1.5, "2.0", "1.5")]

    def run(*flags: str) -> str:
        common.finish("speed", parser.parse_args(flags), measure, judge, str)
        return capsys.readouterr().out

    written = run(*given.split(), "--report", str(tmp_path))
    verdict = "reached" if not short else "       "
    assert f"\n{verdict}  this / that: 2.0 (at least 1.5)\n" in written
    assert written.endswith(f"not judged: {short}\n" if short else "(at least 1.5)\n")
    result = json.loads((tmp_path / "speed.json").read_text())
    assert result["bars"][0]["reached"] is (None if short else True)
    if not short:
        run(*given.split(), "--write")
        assert (tmp_path / "docs" / "speed.json").exists()
        return
    measured.clear()
    for flags in (given.split(), ["--figures", str(tmp_path / "speed.json")]):
        with pytest.raises(SystemExit) as ended:
            run(*flags, "--write")
        assert ended.value.code == 2
        sentence = f"speed.py: --write requires a run of the default size, got {short}\n"
        assert capsys.readouterr().err == sentence
    assert not measured
    assert not (tmp_path / "docs").exists()
