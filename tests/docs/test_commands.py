"""Every command in the README and the other documents does what they say."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pandas
import pytest

from example import make_model
from recsuite.config.parser import parse_args
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.extras import plan
from recsuite.serving.served import ServedModel
from tests.support.documents import CORE, PAGES, README, blocks, commands, short_form
from tests.support.launch import (
    INSTALLED,
    ROOT,
    free_port,
    python,
    read_json,
    run_command,
    started,
    succeeded,
    wait_for,
)
from tests.support.quick_python import quick_python
from tests.support.store import running

Lines = tuple[str, ...]
Check = Callable[[Lines, Path], None]
SERVING, LOADER = ROOT / "docs" / "serving.md", ROOT / "docs" / "loader.md"
PLAN = ROOT / "docs" / "extras" / "plan.md"
KUBERNETES = ROOT / "docs" / "extras" / "kubernetes.md"
YOUR_DATA, EVERY_WEEK = ROOT / "docs" / "your_data.md", ROOT / "docs" / "extras" / "every_week.md"
REAL = Path(os.environ.get("MOVIELENS_DATA", ROOT.parent / "shared" / "data" / "ml-latest-small"))
WALKTHROUGH = (
    "RDZV_ENDPOINT=first-machine:29400 ./run.sh dump --resume --dump_every 100 --save_dir /shared/dumps"
)
FOLLOWED = (
    "--data_path FOLDER --save_dir dumps/stream --stream --follow_data --vocabulary dynamic --capacity 10000"
)
# Where the commands of run.sh write and read.
DUMPS = "dumps/example"
# Added to a training whose claim needs no more.
SHORT = " --epochs 1"
RANKED = re.compile(r"\| rank \| title +\| +\w+ \|")
ROW = re.compile(r"^\| (.+?) +\|((?: +[\d.]+ \|)+)", re.MULTILINE)


@pytest.fixture(scope="module")
def installed(few_ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The repository in another folder, with few ratings as the default data set."""
    if not (INSTALLED / ".installed-dev").is_file():
        pytest.skip(f"needs the installation that `./run.sh test` makes in {INSTALLED.name}")
    folder = tmp_path_factory.mktemp("documents") / "clone"
    unwanted = shutil.ignore_patterns(".venv*", ".git", "data", "runs", "dumps", ".*_cache", "*.pyc")
    shutil.copytree(ROOT, folder, ignore=unwanted)
    shutil.copytree(few_ratings, folder / "data")
    with quick_python(folder):
        yield folder


@pytest.fixture
def clone(installed: Path) -> Iterator[Path]:
    """The clone as it was before any command."""
    before = {path.name for path in installed.iterdir()}
    yield installed
    for path in installed.iterdir():
        if path.name not in before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def shell(lines: Lines, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        ["bash", "-ec", "\n".join(lines)], cwd=folder, env={"VARIANT": "cpu", **env}, timeout=120
    )


def rows(output: str) -> list[tuple[str, list[float]]]:
    """The names and numbers of all tables of results, in order."""
    return [
        (name, [float(value) for value in re.findall(r"[\d.]+", cells)])
        for name, cells in ROW.findall(output)
    ]


def models(output: str) -> list[list[float]]:
    """The numbers of the models in all tables."""
    return [values for name, values in rows(output) if name.startswith("this model")]


# --- checks ---


def trains(lines: Lines, clone: Path) -> None:
    """Better than the mean."""
    output = succeeded(shell((". .venv/bin/activate", *lines), clone))
    # One table for each training of the block.
    assert len(models(output)) == sum(not line.startswith(". ") for line in lines)
    assert all(model[0] < dict(rows(output))["global mean"][0] for model in models(output))


def dumped(clone: Path) -> None:
    """Write the checkpoint that several blocks begin with, which one training makes."""
    kept = clone.parent / "dumps"
    if not kept.exists():
        succeeded(shell((f"NPROC=1 ./run.sh dump{SHORT}",), clone))
        (clone / "dumps").rename(kept)
    shutil.copytree(kept, clone / "dumps", symlinks=True)


def trains_then_tests(lines: Lines, clone: Path) -> None:
    # The second command of the block runs the tests, as test_run_sh.py shows.
    assert lines == ("./run.sh", "./run.sh test")
    trains_shortly(lines[:1], clone)


def trains_shortly(lines: Lines, clone: Path) -> None:
    trains((*lines[:-1], f"{lines[-1]}{SHORT}"), clone)


def follows_a_stream(lines: Lines, clone: Path) -> None:
    output = succeeded(shell(lines, clone))
    assert re.search(r"dynamic tables: user \d+ rows", output)
    assert re.search(r"\| predicted before training, \d+ windows", output)


def learns_and_serves_a_stream(lines: Lines, clone: Path) -> None:
    training, server = lines
    (data,) = (clone / "data").iterdir()
    command = ["bash", "-ec", training.replace("FOLDER", str(data))]
    with started(command, cwd=clone, env={"VARIANT": "cpu"}) as trainer:
        wait_for(trainer, "waiting for more ratings")
        served = [sys.executable, "-u", *server.split()[1:], "--port", str(free_port())]
        with started(served, cwd=clone) as serving:
            wait_for(serving, "serving dumps/stream at http://")


def learns_from_a_topic(lines: Lines, clone: Path) -> None:
    from tests.support.kafka import SCHEMA, MockKafka, as_json, ratings

    # The first line installs what the tests have.
    assert lines[0] == ".venv/bin/pip install confluent-kafka"
    data = clone / "shop"
    data.mkdir()
    (data / "schema.toml").write_text(SCHEMA)
    with contextlib.closing(MockKafka()) as kafka:
        kafka.create("ratings", 2)
        kafka.send("ratings", as_json(ratings(1_500)), 2)
        line = lines[1].replace("kafka://localhost:9092/ratings", kafka.address("ratings"))
        output = succeeded(shell((line.replace("FOLDER", str(data)),), clone))
    assert "a stream of 1,500 ratings" in output
    assert re.search(r"\| predicted before training, \d+ windows", output)


def meets_other_machines(lines: Lines, clone: Path) -> None:
    """The launch is the one that the tests of deploy/ and of tests/cluster wait for."""
    settings = dict(re.findall(r"([A-Z_]+)=(\S+)", lines[0]))
    launch = f"--nnodes={settings['NNODES']} --rdzv_backend=c10d --rdzv_endpoint=first-machine:29400 "
    launch += "--max_restarts=3 " if "MAX_RESTARTS" in settings else ""
    assert f"{launch}--nproc_per_node=2 " in succeeded(shell(lines, clone, PRINT_LAUNCH="1"))


class WithoutFiles(BaseHTTPRequestHandler):
    """A mirror without the file, after which none is asked again."""

    def do_GET(self) -> None:
        """Answer that it is not there."""
        self.send_error(404)


def reaches_the_download(lines: Lines, clone: Path) -> None:
    name = shlex.split(lines[0])[2]
    with HTTPServer(("127.0.0.1", 0), WithoutFiles) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}/"
        # One process, for a second one would wait for seconds whether the mistake is its machine's alone.
        result = shell(lines, clone, MOVIELENS_MIRROR=mirror, NPROC="1")
        server.shutdown()
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert f"{mirror}{name}.zip" in said
    assert "--dataset synthetic" in said
    assert not (clone / "data" / name).exists()


def trains_on_own_tables(lines: Lines, clone: Path) -> None:
    home = clone.parent / "home"
    succeeded(python(clone / "benchmarks" / "shop.py", home / "shop", "--events", "3000", cwd=clone))
    assert models(succeeded(shell((f"{lines[0]}{SHORT}",), clone, HOME=str(home))))
    assert (home / "shop" / "schema.toml").is_file()


def lives(lines: Lines, clone: Path) -> None:
    output = succeeded(shell(lines, clone))
    _, after, loaded = models(output)
    assert "epoch 2/2" in output
    assert "epoch 3/6" in output
    # The best of both trainings, on another number of processes.
    assert loaded == pytest.approx(after, abs=1e-4)
    assert re.search(r"loaded \S*step-\d*[1-9]\d* and \d+ deltas after it", output)


def loads_with_any_number_of_processes(lines: Lines, clone: Path) -> None:
    first, *others = models(succeeded(shell((f"{lines[0]}{SHORT}", *lines[1:]), clone)))
    assert others == [first, first]


def lives_in_a_store(lines: Lines, clone: Path) -> None:
    with running() as store:
        first, second = models(succeeded(shell(lines, clone, **store.env)))
    assert first == second


def begins_where_there_is_no_checkpoint(lines: Lines, clone: Path) -> None:
    trains_shortly(lines, clone)
    newest = (clone / DUMPS / "latest").resolve()
    output = succeeded(shell((f"{lines[0]} --epochs 2",), clone))
    assert f"loaded {newest}" in output
    assert "epoch 2/2" in output


def replays_and_recommends(lines: Lines, clone: Path) -> None:
    train, *others = lines
    output = succeeded(shell((f"{train} --epochs 3 --batch_size 124", *others), clone))
    # 24 steps an epoch: 24, 48, 50 and 72.
    assert len(list((clone / DUMPS).glob("delta-*"))) == 4
    trained, loaded = models(output)
    assert trained == loaded
    assert RANKED.search(output)


def compacts(lines: Lines, clone: Path) -> None:
    train = "NPROC=1 ./run.sh inc_dump --dump_every 50 --epochs 2"
    output = succeeded(shell((train, *lines), clone))
    names = sorted(path.name for path in (clone / DUMPS).iterdir())
    assert "this model, step" in output
    assert not any(name.startswith("delta") for name in names)


def recommends(lines: Lines, clone: Path) -> None:
    dumped(clone)
    assert RANKED.search(succeeded(shell(lines, clone)))
    *_, program = blocks(README, "python")
    (clone / "score.py").write_text(program)
    scores, best = run_python("score.py", clone)
    assert len(scores) == 2
    assert [len(mine) for mine in best] == [3]
    (clone / "shop.py").write_text(blocks(SERVING, "python")[0])
    known, by_events, besides, candidates, similar = run_python("shop.py", clone)
    assert [len(mine) for mine in known] == [2, 2]
    assert [{*dict(mine)} for mine in (*by_events, *besides, *candidates, *similar)] == [
        {2},
        {1},
        {2, 3},
        {2, 3},
    ]


def scores_all_users(lines: Lines, clone: Path) -> None:
    dumped(clone)
    output = succeeded(shell(lines, clone))
    found = pandas.read_parquet(clone / "recs.parquet")
    assert f"scored {found['user_id'].nunique()} users in " in output
    assert found.groupby("user_id")["rank"].apply(list).map(lambda ranks: ranks == [*range(1, 21)]).all()


def scores_elsewhere(lines: Lines, clone: Path) -> None:
    """By the numbers of `ServedModel`."""
    command = lines[1].replace(".venv/bin/python", sys.executable)
    dumped(clone)
    output = succeeded(shell((lines[0], command), clone))
    values = json.loads(shlex.split(command)[-1])
    wanted = ServedModel.open(clone / DUMPS, model=make_model).score(values).tolist()
    found = [float(word) for word in output.splitlines()[-1].strip("[]").split()]
    assert found == pytest.approx(wanted, abs=1e-5)


def promotes_and_serves(lines: Lines, clone: Path) -> None:
    """The second command serves what the first one promoted."""
    make, train, serve = lines
    again, retrain, score = next(other for other in commands(EVERY_WEEK) if other[0] == f"{make[:-1]}2")
    few = [f"{sys.executable} {each.partition(' ')[2]} --users 300" for each in (make, again)]
    small = " --epochs 1 --batch_size 128"
    output = succeeded(shell((few[0], train + small, few[1], retrain + small, score), clone, NPROC="1"))
    assert "promoted models/run-000001: it is the first" in output
    assert re.search(r"promoted? .*run-000002: test NDCG@10 [\d.]+ and [\d.]+, new and promoted", output)
    recommended = pandas.read_parquet(clone / "recs-2.parquet")
    assert recommended.groupby("user_id").size().tolist() == [10] * recommended["user_id"].nunique()
    port = free_port()
    command = shlex.split(f"{serve} --port {port}")
    with started([sys.executable, *command[1:]], cwd=clone) as server:
        wait_for(server, "serving models/promoted at")


def is_a_week_later(lines: Lines, clone: Path) -> None:
    """The check of the first block runs the others too."""
    assert lines == commands(EVERY_WEEK)[1]


def run_python(script: str, clone: Path) -> list[Any]:
    """The value of each line of a script's output."""
    output = succeeded(python(script, cwd=clone, env={"PYTHONPATH": str(clone / "example")}))
    return [ast.literal_eval(line) for line in output.splitlines()]


def publishes_deltas(lines: Lines, clone: Path) -> None:
    train = "NPROC=1 ./run.sh inc_dump --epochs {} --dump_every 10"
    export, *copies = lines
    # Published twice, as by a trainer that continues: what came before the export is in it already.
    more = f"{train.format(2)} --resume"
    succeeded(shell((train.format(1), export, *copies, more, *copies), clone))
    (clone / "server.py").write_text(blocks(SERVING, "python")[1])
    output = succeeded(python("server.py", cwd=clone, env={"PYTHONPATH": str(clone / "example")}))
    newest = sorted(path.name for path in (clone / "published").iterdir())[-1]
    assert len(list((clone / "published").iterdir())) == len(list((clone / DUMPS).glob("delta-*")))
    step, scores = output.split(" ", 1)
    assert int(step) == int(newest.removeprefix("delta-"))
    assert len(json.loads(scores)) == 2


def ranks_and_recommends(lines: Lines, clone: Path) -> None:
    # Who rates what in synthetic ratings is drawn by popularity: there is nothing to learn.
    if not (REAL / "ratings.csv").is_file():
        pytest.skip(f"no ratings.csv in {REAL}; set MOVIELENS_DATA to a folder of ml-latest-small")
    data = clone / "data" / "ml-latest-small"
    shutil.copytree(REAL, data, ignore=shutil.ignore_patterns(".columns"))
    data.chmod(0o755)
    train, recommend = lines
    output = succeeded(shell((f"{train} --epochs 3", recommend), clone))
    # Of HR@10, the first column.
    (model,) = models(output)
    assert model[0] > 1.4 * dict(rows(output))["popularity"][0]
    assert re.search(r"\| rank \| title +\| +score \|", output)


def writes_a_report(lines: Lines, clone: Path) -> None:
    trains(lines, clone)
    assert sorted(path.name for path in (clone / "runs/first").iterdir()) == ["groups.json", "metrics.json"]


def compares_runs(lines: Lines, clone: Path) -> None:
    output = succeeded(shell((f"{lines[0]} --batch_size 124", *lines[1:]), clone))
    # Of the 24 of an epoch, three are warm-up.
    assert "profile of 20 steps" in output
    assert "| runs " not in output
    assert re.search(r"^\| second +\| +\d\.", output, re.MULTILINE)
    names = ["metrics.json", "tensorboard", "trace.json"]
    assert sorted(path.name for path in (clone / "runs/second").iterdir()) == names


def examines_the_machine(lines: Lines, clone: Path) -> None:
    output = succeeded(shell(lines, clone))
    assert "No fault" in output
    assert "for 2 ranks" in output
    # By rank 0 alone.
    assert output.count("versions") == 1


def plans(lines: Lines, clone: Path) -> None:
    """The lines below the command on its page, in their order."""
    *before, command = lines
    wanted = [
        line for line in blocks(PLAN, "text")[commands(PLAN).index(lines)].splitlines() if line != "..."
    ]
    if before or "--dataset" in command:
        found = succeeded(shell(lines, clone))
    else:
        # Without the seconds that imports take in each process.
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = plan.main(shlex.split(command)[2:], make_model)
        found = re.sub(r"^\S+: (?=The tables)", "plan.py: ", output.getvalue())
        assert status == 2 * wanted[0].startswith("plan.py: ")
    printed = iter(found.splitlines())
    assert [line for line in wanted if line not in printed] == []


def is_run_by_the_test_of_the_benchmark(lines: Lines, clone: Path) -> None:
    (benchmark,) = re.findall(r"python benchmarks/(\w+)\.py ", lines[0])
    test = ROOT / "tests" / "benchmarks" / f"test_benchmark_{benchmark}.py"
    assert f'short_form("{benchmark}")' in test.read_text()


def is_run_by_the_test_of_the_script(lines: Lines, clone: Path) -> None:
    for line in lines:
        (script,) = re.findall(r"python example/(\w+)\.py", line)
        (test,) = (ROOT / "tests").glob(f"*/test_{script}.py")
        assert f'ROOT / "example" / "{script}.py"' in test.read_text()


def walks_from_a_table_to_recommendations(lines: Lines, clone: Path) -> None:
    """All blocks of the page, in their order."""
    make, train, change, segments, recommend = commands(YOUR_DATA)
    assert make == lines
    succeeded(shell(make, clone))
    first = succeeded(shell(train, clone))
    assert re.search(r"^not taken +referrer .* it holds long texts", first, re.MULTILINE)
    assert re.search(r"^not taken +device +category +event ", first, re.MULTILINE)
    assert "\n[features.device]\n" in (clone / "shop" / "schema.toml").read_text()
    assert "user_id" in (clone / "shop" / "schema.toml").read_text()
    reached = read_json(clone / "shop" / "oracle.json")
    # With other inputs the same is to be shown, for which fewer epochs do.
    *edit, again = change
    for output in (first, succeeded(shell((*edit, f"{again} --epochs 5"), clone))):
        (model,) = models(output)
        assert reached["all"] < model[0] < reached["without_numbers"] < dict(rows(output))["biases"][0]
    assert 'input = "dense"' in (clone / "shop" / "schema.toml").read_text()
    assert len([*(clone / "shop" / ".columns").glob("time-*")]) == 2
    output = succeeded(shell(segments, clone))
    assert re.search(r"^\| test ratings by country +\|", output, re.MULTILINE)
    assert re.search(r"^\| 20 to 99 +\|", output, re.MULTILINE)
    output = succeeded(shell(recommend, clone))
    assert re.search(r"^user 38aa04f2-\S+ rated \d+ items, and liked most:$", output, re.MULTILINE)
    assert RANKED.search(output)
    fits_a_model_in_a_notebook(clone)


def fits_a_model_in_a_notebook(clone: Path) -> None:
    (clone / "notebook.py").write_text(blocks(YOUR_DATA, "python")[0])
    output = succeeded(python("notebook.py", cwd=clone, env={"PYTHONPATH": str(clone / "example")}))
    rmse, (best,), stars = (ast.literal_eval(line) for line in output.splitlines()[-3:])
    assert rmse < read_json(clone / "shop" / "oracle.json")["without_both"]
    assert [name[:4] for name, _ in best] == ["SKU-"] * 3
    assert [1 <= value <= 5 for value in stars] == [True, True]
    # What was saved is read without the tables, dense numbers and all.
    (clone / "saved.py").write_text(
        "from example import make_model\nfrom recsuite.serving.served import ServedModel\n"
        f"known = {{'item': [{best[0][0]!r}, 'SKU-NONE'], 'price': [9.5, None]}}\n"
        "print(ServedModel.open('served', model=make_model).score({'user': ['x', 'x'], **known}).tolist())\n"
    )
    (scores,) = run_python("saved.py", clone)
    assert [0 < score < 6 for score in scores] == [True, True]


def is_a_step_of_the_walk(lines: Lines, clone: Path) -> None:
    """The check of the first block runs the others too."""
    assert lines in commands(YOUR_DATA)[1:]


def names_what_is_there(lines: Lines, clone: Path) -> None:
    """For a cluster, an image, or the checks of a contributor: files and subcommands."""
    known = re.findall(r"^       \./run\.sh (\w+)", succeeded(shell(("./run.sh help",), clone)), re.MULTILINE)
    for line in lines:
        words = shlex.split(line.partition(" #")[0])
        for word in words:
            assert not re.match(r"(deploy|tests|docs|benchmarks|\.ci)/", word) or (ROOT / word).exists(), word
        if words[0] == "./run.sh":
            assert words[1] in known, words
        if words[0] == "sbatch":
            parse_args(["--dump", *words[2:]])


# By the first line of a block; a block that stands in two documents runs once.
def trains_on_a_disk(lines: Lines, clone: Path) -> None:
    # The tables of few ratings fit the documented budget.
    small = " --batch_size 32 --memory_budget 75kB"
    # One process, which waits for no other in each of its steps.
    output = succeeded(shell((f"{lines[0]}{SHORT}{small}",), clone, NPROC="1"))
    assert models(output)
    shown = r"on disk: .*user.*; .* requested rows were in memory, .* were loaded ahead; .* written back"
    assert re.search(shown, output)


CHECKS: dict[str, Check] = {
    "./run.sh": trains_then_tests,
    ". .venv/bin/activate": trains_shortly,
    "NPROC=3 ./run.sh --epochs 1": trains,
    "NNODES=2 RDZV_ENDPOINT=first-machine:29400 ./run.sh": meets_other_machines,
    "./run.sh --vocabulary dynamic --capacity 10000 --stream --window 30d": follows_a_stream,
    f"./run.sh inc_dump {FOLLOWED}": learns_and_serves_a_stream,
    "./run.sh --dataset ml-1m --num_workers 2": reaches_the_download,
    "./run.sh --data_path ~/shop": trains_on_own_tables,
    "./run.sh dump --epochs 2": lives,
    "./run.sh recommend --user 42": recommends,
    # larger_than_memory.md
    "./run.sh train --storage disk --memory_budget 1.5MB --epochs 2 --embedding_dim 64": trains_on_a_disk,
    # CONTRIBUTING.md
    "./run.sh lint": names_what_is_there,
    # checkpoints.md
    "./run.sh dump": loads_with_any_number_of_processes,
    "./run.sh dump --resume --dump_every 100": begins_where_there_is_no_checkpoint,
    "./run.sh inc_dump --dump_every 50 --move_aside": replays_and_recommends,
    "./run.sh load dumps/example --until 100": compacts,
    # quality.md
    (
        "./run.sh dump --dataset ml-latest-small --task ranking --split leave_one_out --move_aside"
    ): ranks_and_recommends,
    # serving.md
    "./run.sh score --users all --k 20 --output recs.parquet": scores_all_users,
    "./run.sh export served --format onnx": scores_elsewhere,
    "./run.sh export served --checkpoint latest": publishes_deltas,
    # every_week.md
    ".venv/bin/python benchmarks/shop_weeks.py shop --weeks 1": promotes_and_serves,
    ".venv/bin/python benchmarks/shop_weeks.py shop --weeks 2": is_a_week_later,
    # several_machines.md
    f"NNODES=2 {WALKTHROUGH}": meets_other_machines,
    f"NNODES=1:2 MAX_RESTARTS=3 {WALKTHROUGH}": meets_other_machines,
    "sbatch deploy/slurm.sh --dataset ml-1m": names_what_is_there,
    # kubernetes.md
    **{lines[0]: names_what_is_there for lines in commands(KUBERNETES)},
    # object_stores.md
    "./run.sh dump --save_dir s3://bucket/run --epochs 2": lives_in_a_store,
    # ray.md
    "python example/ray_train.py 2 --dataset ml-latest-small": is_run_by_the_test_of_the_script,
    # prepare.md
    (
        "python example/prepare.py --input log --output parts --partitions 64 --user user_id --item item_id "
        "--time time --label stars --users users.parquet --items items.parquet"
    ): is_run_by_the_test_of_the_script,
    # kafka.md
    ".venv/bin/pip install confluent-kafka": learns_from_a_topic,
    # dynamic.md
    "python example/online.py": is_run_by_the_test_of_the_script,
    # retrieval.md
    "python example/retrieval.py": is_run_by_the_test_of_the_script,
    "python example/retrieval.py --epochs 2": is_run_by_the_test_of_the_script,
    # sequential.md
    (
        "python example/sequential.py --dataset synthetic --synthetic_ratings 20000 --epochs 2"
    ): is_run_by_the_test_of_the_script,
    # extras/pipeline.md
    "python example/pipeline.py --epochs 2": is_run_by_the_test_of_the_script,
    # ctr.md
    "python example/ctr.py --model dlrm": is_run_by_the_test_of_the_script,
    # multitask.md
    "python example/multitask.py --epochs 2": is_run_by_the_test_of_the_script,
    # your_data.md
    "./run.sh setup": walks_from_a_table_to_recommendations,
    "./run.sh schema shop": is_a_step_of_the_walk,
    "./run.sh evaluate --data_path shop --by country,history_length": is_a_step_of_the_walk,
    'sed -i \'s/input = "buckets"/input = "dense"/\' shop/schema.toml': is_a_step_of_the_walk,
    (
        "./run.sh recommend --data_path shop --user 38aa04f2-8767-4060-a484-a93f487beb49"
    ): is_a_step_of_the_walk,
    # tools.md
    "./run.sh doctor --num_workers 2": examines_the_machine,
    "./run.sh --epochs 2 --report_dir runs/first": writes_a_report,
    ("./run.sh --epochs 2 --lr 0.02 --report_dir runs/second --profile 20 --tensorboard"): compares_runs,
    # checkpoints.md, loader.md and performance.md
    **{
        " ".join([f"python benchmarks/{name}.py", *short_form(name)]): is_run_by_the_test_of_the_benchmark
        for name in ("checkpoint", "feed", "train", "gpu")
    },
}
CHECKS |= {lines[0]: plans for lines in commands(PLAN)}
BLOCKS = list(dict.fromkeys(lines for page in PAGES for lines in commands(page)))
(LIFE,) = (lines for lines in BLOCKS if CHECKS.get(lines[0]) is lives)
# Blocks of other pages than the README whose trainings take long: they run with the soak.
LONG = (
    "./run.sh dump",
    "./run.sh dump --resume --dump_every 100",
    "./run.sh inc_dump --dump_every 50 --move_aside",
    "./run.sh load dumps/example --until 100",
    f"./run.sh inc_dump {FOLLOWED}",
    "./run.sh dump --dataset ml-latest-small --task ranking --split leave_one_out --move_aside",
    "./run.sh export served --format onnx",
    "./run.sh dump --save_dir s3://bucket/run --epochs 2",
    "./run.sh export served --checkpoint latest",
    "./run.sh setup",
    "./run.sh --epochs 2 --report_dir runs/first",
    "./run.sh --epochs 2 --lr 0.02 --report_dir runs/second --profile 20 --tensorboard",
)


def test_every_command_of_every_document_has_a_check() -> None:
    assert {lines[0] for lines in BLOCKS} == set(CHECKS)
    assert len(BLOCKS) == len(CHECKS)


def marks_of(lines: Lines) -> list[pytest.MarkDecorator]:
    """Markers of a block: those that take long run with the soak, those of extras alone with --all."""
    is_of_core = any(lines in commands(page) for page in CORE)
    return [pytest.mark.soak] * (lines[0] in LONG) + [pytest.mark.beside] * (not is_of_core)


@pytest.mark.parametrize(
    "lines", [pytest.param(lines, id=lines[0], marks=marks_of(lines)) for lines in BLOCKS]
)
def test_a_command_gives_the_documented_output(lines: Lines, clone: Path) -> None:
    CHECKS[lines[0]](lines, clone)


@pytest.mark.soak
def test_enough_ratings_reach_nearly_the_oracle_and_a_second_training_is_better(
    clone: Path, tmp_path: Path
) -> None:
    write_synthetic(tmp_path, 100_000, seed=0)
    training, *life = (f"{line} --data_path {tmp_path}" for line in ("./run.sh", *LIFE))
    output = succeeded(shell((training,), clone))
    (model,) = models(output)
    assert model[0] <= 1.05 * dict(rows(output))["oracle (knows the true parameters)"][0]
    _, after, loaded = models(succeeded(shell((*life,), clone)))
    assert loaded == pytest.approx(after, abs=1e-4)


def test_the_loader_works_in_a_program_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(blocks(LOADER, "python")[0])
    output = succeeded(python(script, env={"PYTHONPATH": str(ROOT / "example")}))
    assert output == "[0, 1, 4, 9, 16]\n"
