"""The README: every command in it runs, every flag is in it, its figures are those of the committed run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsuite.config.config import sections
from recsuite.config.parser import sentences_of
from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import ROOT, free_port, python, read_json, run_command, started, succeeded

README = (ROOT / "README.md").read_text()
COMMANDS = [
    tuple(block.strip().splitlines()) for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
]

PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The repository in another folder, with this one's installation."""
    if not (ROOT / ".venv" / ".installed-dev").is_file():
        pytest.skip("needs the installation that `./run.sh test` makes in .venv")
    folder = tmp_path / "clone"
    unwanted = shutil.ignore_patterns(".venv", ".git", "data", "runs", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=unwanted)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def draw_few_ratings(clone: Path) -> None:
    """Have the default data set ready, with a tenth of its ratings, so that a command takes seconds."""
    folder = clone / "data" / "synthetic-1000000-seed0"
    write_synthetic(folder, 100_000, seed=0)
    says = read_json(folder / "oracle.json")
    (folder / "oracle.json").write_text(json.dumps({**says, "num_ratings": 1_000_000}))


def shell(lines: tuple[str, ...], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run_command(["bash", "-ec", "\n".join(lines)], cwd=folder, env=env, timeout=280)


def results(output: str) -> dict[str, float]:
    found = re.findall(r"^\| (.+?) +\| +([\d.]+) \|", output, re.MULTILINE)
    return {name: float(rmse) for name, rmse in found}


def trains_close_to_the_oracle(lines: tuple[str, ...], clone: Path) -> None:
    rmse = results(succeeded(shell(("./run.sh",), clone)))
    # The best of eight, by validation.
    (model,) = (value for name, value in rmse.items() if name.startswith("this model, epoch "))
    assert model <= 1.05 * rmse["oracle (knows the planted world)"]
    # The second command of the block runs the tests, of which this is one: a part stands for all.
    assert lines == ("./run.sh", "./run.sh test")
    assert "passed" in succeeded(shell(("./run.sh test tests/test_metrics.py",), clone))


def trains(lines: tuple[str, ...], clone: Path) -> None:
    draw_few_ratings(clone)
    activate = ". .venv/bin/activate"
    output = succeeded(shell((activate, *lines), clone))
    rmse = results(output)
    model = next(value for name, value in rmse.items() if name.startswith("this model"))
    assert model < rmse["global mean"]


def trains_on_two_machines(lines: tuple[str, ...], clone: Path) -> None:
    (command,) = lines
    assert "first-machine:29400" in command
    # Both machines are this one, on a port that is free, with one process and one epoch each.
    draw_few_ratings(clone)
    command = command.replace("first-machine:29400", f"localhost:{free_port()}") + " --epochs 1"
    machine: dict[str, Any] = {"env": {"NPROC": "1"}, "cwd": clone, "stderr": subprocess.STDOUT}
    with (
        started(["bash", "-c", command], **machine) as one,
        started(["bash", "-c", command], **machine) as two,
    ):
        # Together under the deadline of a test: the second ends with the first.
        outputs = [process.communicate(timeout=80)[0] for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), outputs
    assert "[RANK 0] ranks: 2 on cpu, 1 of them on this machine" in "".join(outputs)
    assert "this model, epoch 1" in "".join(outputs)


def reaches_the_download(lines: tuple[str, ...], clone: Path) -> None:
    result = shell(lines, clone, MOVIELENS_MIRROR="http://127.0.0.1:9/")
    assert result.returncode != 0
    assert "http://127.0.0.1:9/ml-1m.zip" in result.stderr
    assert "--dataset synthetic" in result.stderr
    assert not (clone / "data" / "ml-1m").exists()


def trains_on_a_folder_of_files(lines: tuple[str, ...], clone: Path) -> None:
    write_synthetic(clone.parent / "home" / "ml-1m", 20_000, seed=0)
    assert "this model" in succeeded(shell(lines, clone, HOME=str(clone.parent / "home")))


def writes_a_report(lines: tuple[str, ...], clone: Path) -> None:
    trains(lines, clone)
    assert sorted(path.name for path in (clone / "runs/first").iterdir()) == ["curves.png", "metrics.json"]


def draws_a_page_from_runs(lines: tuple[str, ...], clone: Path) -> None:
    draw_few_ratings(clone)
    output = succeeded(shell(lines, clone))
    # Of twenty, three are warm-up.
    assert "profile of 17 steps" in output
    assert output.endswith("report.html shows 1 run\n")
    assert "<title>1 run</title>" in (clone / "report.html").read_text()
    names = ["curves.png", "metrics.json", "tensorboard", "trace.json"]
    assert sorted(path.name for path in (clone / "runs/second").iterdir()) == names


def measures_the_loader(lines: tuple[str, ...], clone: Path) -> None:
    output = succeeded(shell((". .venv/bin/activate", *lines), clone))
    bars = read_json(ROOT / "docs" / "feed.json")["bars"]
    # But for those that name a number of ratings, which are fewer here.
    assert all(bar["name"] in output for bar in bars if " ratings" not in bar["name"])
    assert "Million rows/s, 100,000 ratings" in output
    # It was not asked to write.
    assert (clone / "README.md").read_text() == README


def loads_with_any_number_of_processes(lines: tuple[str, ...], clone: Path) -> None:
    draw_few_ratings(clone)
    output = succeeded(shell(lines, clone))
    rows = re.findall(r"^\| this model, .+? \| (.*) \|$", output, re.MULTILINE)
    assert len(rows) == len(lines) == 3
    assert rows[0] == rows[1] == rows[2]


def ranks_and_recommends(lines: tuple[str, ...], clone: Path) -> None:
    # Who rates what in synthetic ratings is drawn by popularity: there is nothing to learn.
    real = Path(os.environ.get("MOVIELENS_DATA", ROOT.parent / "shared" / "data" / "ml-latest-small"))
    if not (real / "ratings.csv").is_file():
        pytest.skip(f"no ratings.csv in {real}; set MOVIELENS_DATA to a folder of ml-latest-small")
    shutil.copytree(real, clone / "data" / "ml-latest-small", ignore=shutil.ignore_patterns(".columns"))
    (clone / "data" / "ml-latest-small").chmod(0o755)
    train, recommend = lines
    output = succeeded(shell((f"{train} --epochs 3", recommend), clone))
    # Of HR@10, the first column.
    hits = results(output)
    (model,) = (value for name, value in hits.items() if name.startswith("this model, epoch "))
    assert model > 1.4 * hits["popularity"]
    assert re.search(r"\| rank \| title +\| +score \|", output)


def begins_where_there_is_no_dump(lines: tuple[str, ...], clone: Path) -> None:
    trains(lines, clone)
    newest = (clone / "dumps" / "latest").resolve()
    output = succeeded(shell((f"{lines[0]} --epochs 9",), clone))
    assert f"loaded {newest}" in output
    assert "epoch 9/9" in output


def replays_and_recommends(lines: tuple[str, ...], clone: Path) -> None:
    draw_few_ratings(clone)
    output = succeeded(shell(lines, clone))
    rows = re.findall(r"^\| this model, .+? \| (.*) \|$", output, re.MULTILINE)
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert "and 10 increments after it" in output


def publishes_increments(lines: tuple[str, ...], clone: Path) -> None:
    draw_few_ratings(clone)
    train = "NPROC=1 ./run.sh inc_dump --epochs {} --dump_every 10"
    export, *copies = lines
    # Published twice, as a server does that goes on: what came before the export is in it already.
    more = f"{train.format(2)} --resume"
    succeeded(shell((train.format(1), export, *copies, more, *copies), clone))
    (clone / "server.py").write_text(PROGRAMS[0])
    output = succeeded(python("server.py", cwd=clone, env={"PYTHONPATH": str(clone / "example")}))
    newest = sorted(path.name for path in (clone / "published").iterdir())[-1]
    assert len(list((clone / "published").iterdir())) == len(list((clone / "dumps").glob("delta-*")))
    step, scores = output.split(" ", 1)
    assert int(step) == int(newest.removeprefix("delta-"))
    assert len(json.loads(scores)) == 2


def folds_increments(lines: tuple[str, ...], clone: Path) -> None:
    draw_few_ratings(clone)
    output = succeeded(shell(("NPROC=1 ./run.sh inc_dump --epochs 2 --dump_every 50", *lines), clone))
    names = sorted(path.name for path in (clone / "dumps").iterdir())
    assert "this model, step" in output
    assert not any(name.startswith("delta") for name in names)


def examines_the_machine(lines: tuple[str, ...], clone: Path) -> None:
    output = succeeded(shell(lines, clone))
    assert "ok       worker       start method spawn" in output
    assert "for 2 ranks" in output


CHECKS: dict[str, Callable[[tuple[str, ...], Path], None]] = {
    "./run.sh": trains_close_to_the_oracle,
    ". .venv/bin/activate": trains,
    "torchrun --standalone --nproc_per_node=2 example/example.py --num_workers 4": trains,
    "NPROC=3 ./run.sh --epochs 1": trains,
    "NNODES=2 RDZV_ENDPOINT=first-machine:29400 ./run.sh": trains_on_two_machines,
    "./run.sh --dataset ml-1m --num_workers 2": reaches_the_download,
    "./run.sh --data_path ~/ml-1m --split random": trains_on_a_folder_of_files,
    "./run.sh dump --dataset ml-latest-small --task ranking --split leave_one_out": ranks_and_recommends,
    "./run.sh dump": loads_with_any_number_of_processes,
    "./run.sh dump --resume --dump_every 100": begins_where_there_is_no_dump,
    "./run.sh inc_dump --dump_every 50": replays_and_recommends,
    "./run.sh load dumps --until 100": folds_increments,
    "./run.sh export served --checkpoint latest": publishes_increments,
    (
        "python benchmarks/feed.py --ratings 100000 --memory 100000 --trained 20000 --seconds 0.05 --rounds 1"
    ): measures_the_loader,
    "./run.sh doctor --num_workers 2": examines_the_machine,
    "./run.sh --epochs 2 --report_dir runs/first": writes_a_report,
    (
        "./run.sh --epochs 2 --lr 0.02 --report_dir runs/second --profile 20 --tensorboard"
    ): draws_a_page_from_runs,
}


def test_every_command_of_the_readme_has_a_check() -> None:
    assert [lines[0] for lines in COMMANDS] == list(CHECKS)


@pytest.mark.parametrize("lines", COMMANDS, ids=lambda lines: lines[0])
def test_a_command_of_the_readme_does_what_it_says(lines: tuple[str, ...], clone: Path) -> None:
    CHECKS[lines[0]](lines, clone)


def test_the_loader_works_in_a_program_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[1])
    output = succeeded(python(script, env={"PYTHONPATH": str(ROOT / "example")}))
    assert output == "[0, 1, 4, 9, 16]\n"


def test_every_flag_is_in_the_readme_with_its_default_and_sentence() -> None:
    for section in sections().values():
        for field in dataclasses.fields(section):
            default = field.default
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            shown = "" if shown == "False" else shown
            row = f"| `--{field.name}` | {shown} | {' '.join(sentences_of(section)[field.name].split())} |"
            assert row in README, row


def test_the_figures_are_those_of_the_committed_run() -> None:
    for name, run in read_json(ROOT / "docs" / "results.json").items():
        rmse = f"{run['test']['rmse']:.4f}"
        row = next(line for line in README.splitlines() if line.startswith(f"| {name} |"))
        assert f"**{rmse}**" in row
        assert run["date"][:10] in README
    assert (ROOT / "docs" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("benchmark", ["feed", "checkpoint", "train"])
def test_the_figures_of_a_benchmark_are_those_of_the_committed_run(
    monkeypatch: pytest.MonkeyPatch, benchmark: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module(f"{benchmark}_tables")
    result = read_json(ROOT / "docs" / f"{benchmark}.json")
    assert tables.render(result) in README
    assert tables.judge(result) == result["bars"]


def test_the_figures_of_quality_are_those_of_the_committed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    quality = importlib.import_module("quality")
    result = read_json(ROOT / "docs" / "quality.json")
    assert f"{quality.render(result['runs'])}\n\n{quality.in_words(result)}" in quality.PAGE.read_text()
    assert quality.judge(result["runs"]) == result["bars"]
    assert all(bar["reached"] for bar in result["bars"] if bar["name"] != "time 80/20, RMSE under the biases")


def test_the_committed_run_of_the_feed_reached_every_bar() -> None:
    assert all(bar["reached"] for bar in read_json(ROOT / "docs" / "feed.json")["bars"])


def test_every_file_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"\b(?:example|tests|benchmarks|docs)/\w+\.\w+", README):
        assert (ROOT / name).is_file(), name
    tree = README[README.index("example/ ") : README.index("tests/ ")]
    assert set(re.findall(r"(\w+\.py)", tree)) == {path.name for path in (ROOT / "example").glob("*.py")}


def test_every_message_that_the_readme_explains_is_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "example").glob("*.py"))
    explained = README[
        README.index("## When something fails") : README.index("## What this example does not")
    ]
    messages = re.findall(r"^\| `(.+?)` ", explained, re.MULTILINE)
    assert len(messages) >= 5
    for message in messages:
        longest = max(message.split("..."), key=len).strip()
        assert longest in code, message


def test_the_script_that_made_the_table_explains_itself() -> None:
    output = succeeded(python("benchmarks/results.py", "--help"))
    assert "Make the picture and the table" in output


def test_git_sees_nothing_of_what_the_commands_leave() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    left = ["report.html", "trace.json", "data/x", "runs/x", "dumps/x"]
    ignored = subprocess.run(["git", "check-ignore", *left], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout.split() == left
