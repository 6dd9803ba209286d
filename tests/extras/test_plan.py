"""Plans of described clusters: known answers, refusals that name what fits, and figures of real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from example import make_model
from recsuite.config.config import Config
from recsuite.config.sections import MAX_EMBEDDING_DIM
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.extras import plan
from recsuite.sharding.table_rules import RowWiseAdagrad
from tests.support.launch import SUPPORT, read_json, succeeded, torchrun
from tests.support.partition_files import log, partition_of, write_partitions
from tests.support.trained import Trained

GPUS = ("--hosts", "2", "--gpus_per_host", "2")
CPUS = ("--gpus_per_host", "0", "--procs_per_host")
EIGHT = ("--gpus_per_host", "8")
LARGE = "--table=user:1_000_000_000:64"


def planned(*words: str) -> tuple[plan.PlannedTables, plan.Plan, list[np.ndarray]]:
    """The tables of a command, their plan, and what ranks send in each step."""
    cluster, config, given = plan.parse([*words])
    make, batches = plan.tables_of(cluster, config, given, make_model)
    tables = make(cluster, MAX_EMBEDDING_DIM)
    found = plan.find_plan(tables, cluster, {})
    assert found is not None
    return tables, found, [plan.sent(tables, found, step) for step in batches or [[]]]


def described(found: plan.Plan) -> dict[str, list[Any]]:
    """Sharding type and ranks of each table."""
    return {name: [table.sharding_type, table.ranks] for name, table in found.tables.items()}


def refused(*words: str) -> str:
    """The sentence by which a command is refused."""
    with pytest.raises(UserError) as error:
        plan.plan(*plan.parse([*words]), make_model)
    return str(error.value)


def fits(*words: str) -> bool:
    """True if a command prints a plan."""
    try:
        return plan.plan(*plan.parse([*words]), make_model) == 0
    except UserError:
        return False


# --- known answers ---


def test_a_large_table_is_split_and_a_rank_holds_its_share_with_optimizer_state() -> None:
    _, found, _ = planned(*GPUS, "--table=user:1_000_000:64", "--table=country:200:64")
    kind, [owner] = described(found)["country"]
    assert [kind, described(found)["user"]] == ["table_wise", ["row_wise", [0, 1, 2, 3]]]
    # 64 numbers and one of row-wise Adagrad.
    wanted = np.full(4, 250_000 * 65 * 4.0)
    wanted[owner] += 200 * 65 * 4
    assert found.held.tolist() == wanted.tolist()
    # With the planner's buffers, in the memory of the GPUs.
    assert (found.memory[:, 0] > found.held).all()
    assert not found.memory[:, 1:].any()


@pytest.mark.parametrize(("optimizer", "numbers"), [("SGD", 8), ("RowWiseAdagrad", 9), ("Adam", 24)])
def test_the_state_of_the_optimizer_counts(optimizer: str, numbers: int) -> None:
    _, found, _ = planned(*CPUS, "1", "--table=user:1000:8", "--optimizer", optimizer)
    assert found.held.tolist() == [1000 * numbers * 4]


def test_rows_of_16_bits_take_half_in_memory_and_are_sent_and_written_as_32() -> None:
    words = (*GPUS, "--table=user:1_000_000:64", "--optimizer", "Adam")
    (_, whole, sent), (_, half, sent_half) = (
        planned(*words, "--row_precision", precision) for precision in ("fp32", "fp16")
    )
    assert (whole.memory - half.memory).sum(1).tolist() == [250_000 * 64 * 2.0] * 4
    assert half.held.tolist() == whole.held.tolist()
    assert np.array_equal(sent, sent_half)
    comms = ["comms" in part for part in plan.PARTS]
    assert half.parts[:, comms] == pytest.approx(whole.parts[:, comms])


def test_without_data_ranks_send_at_most_the_distinct_ids_spread_over_the_rows() -> None:
    words = ("--batch_size", "200", "--table=user:1000:8", "--table=country:10:8:3")
    _, found, [sent] = planned(*CPUS, "2", *words)
    _, [owner] = described(found)["country"]
    # Each rank requests 100 rows of 500 + 500, half of them from the other; and the 10 of the small table.
    wanted = {owner: [50 * 4, (50 + 10) * 32, 50 * 32], 1 - owner: [60 * 4, 50 * 32, 60 * 32]}
    assert sent.tolist() == [wanted[0], wanted[1]]


def test_a_trillion_parameters_are_planned_in_their_tiers() -> None:
    words = (*EIGHT, "--hosts", "16", "--table=user:16_000_000_000:64", "--table=item:1_000_000:64")
    cluster, config, given = plan.parse([*words])
    tables = plan.tables_of(cluster, config, given, make_model)[0](cluster, MAX_EMBEDDING_DIM)
    kept, uvm, disk = (
        plan.find_plan(tables, cluster, kernels)
        for kernels in ({}, {"user": plan.KERNELS["uvm"]}, {"user": plan.KERNELS["on_disk"]})
    )
    share = 125_000_000 * 65 * 4
    for tier, found in enumerate((kept, uvm, disk)):
        assert found is not None
        assert found.memory[0, tier] >= share
        assert sum(found.memory[0] > share / 2) == 1
    # The planner knows that a disk is slower than host memory, and that slower than the GPU's.
    assert [found.parts.sum(1).max() for found in (kept, uvm, disk) if found] == sorted(
        found.parts.sum(1).max() for found in (kept, uvm, disk) if found
    )


def test_a_file_of_tables_and_flags_give_the_same_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sizes.csv"
    file.write_text("name,rows,dim,ids\nuser,1000000,64,1\nitem,50000,64,20\n")
    assert plan.main([*GPUS, "--tables", str(file)], make_model) == 0
    first = capsys.readouterr().out
    assert plan.main([*GPUS, "--table=user:1000000:64", "--table=item:50_000:64:20"], make_model) == 0
    assert capsys.readouterr().out == first


def test_a_plan_shows_tables_ranks_slowest_rank_and_the_time_of_a_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan.main([*EIGHT, "--hosts", "4", LARGE, "--disk", "1GB/s"], make_model) == 0
    output = capsys.readouterr().out
    assert re.search(
        r"^\| user +\| 1,000,000,000 \| +64 \| +1 \| +row_wise \| +fused \| +0-31 \|", output, re.M
    )
    assert re.search(r"^memory: rank 0 uses most, 12% of 68.0 GB of HBM$", output, re.M)
    shares = re.findall(r"(\d+)%(?=,|$)", output.partition("planner's estimate: ")[2].splitlines()[0])
    assert 97 <= sum(map(int, shares)) <= 103
    assert "checkpoint: 260.0 GB, 65.0 GB of one host, 65.0 s at 1.0 GB/s a host" in output


def test_256_machines_are_planned_on_paper_with_the_partitions_of_their_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--hosts=256", "--gpus_per_host=8", "--table=user:1_000_000_000:64", "--disk_size=4TB")
    assert plan.main([*words, "--partitions=10_000", "--events=1_000_000_000_000"], make_model) == 0
    *_, partitions, disk = capsys.readouterr().out.splitlines()
    # 10,000 partitions of 100 million events on 2,048 ranks: 5 of the first, 91 bytes an event.
    begin = "partitions: 10000, 5 of rank 0: 500,000,000 events, 45.5 GB of columns, "
    assert partitions == f"{begin}made once in 385 s at 1,300,000 events/s"
    assert disk == "disk: 364.0 GB of columns on a machine, 9.1% of 4.0 TB"


@pytest.mark.parametrize(
    ("events", "disk", "hosts"),
    # 8 ranks of 10^9 events of 100 bytes fill the disk; a rank may read 2^31 - 1 events.
    [("32_000_000_000", "800GB", 4), ("120_000_000_000", "100TB", 8)],
)
def test_a_disk_that_is_too_small_is_said_with_the_fewest_machines_that_fit(
    events: str, disk: str, hosts: int
) -> None:
    sizes = ("--partitions=128", f"--events={events}", "--event_bytes=100", f"--disk_size={disk}")
    words = (*EIGHT, "--table=user:1000:8", *sizes)
    assert f"Fix: give --hosts {hosts}." in refused(*words, "--hosts", "2")
    assert [fits(*words, "--hosts", str(number)) for number in (hosts - 1, hosts)] == [False, True]


def test_the_columns_of_a_rank_are_its_share_of_those_of_the_data(
    synthetic_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*CPUS, "2", "--data_path", str(synthetic_folder), "--partitions", "4", "--read_rate", "1000")
    assert plan.main([*words], make_model) == 0
    pattern = r"2 of rank 0: (\S+) events, (\S+) (kB|MB) of columns, made once in (\d+) s at 1,000 events/s"
    found = re.search(pattern, capsys.readouterr().out)
    assert found is not None
    columns = open_columns(Config.of(data_path=str(synthetic_folder)))
    written = sum(file.stat().st_size for file in Path(columns.folder).iterdir())
    number = (columns.num_train + columns.num_validation + columns.num_test) / 2
    assert int(found[1].replace(",", "")) == pytest.approx(number, abs=2)
    assert float(found[2]) * {"kB": 1e3, "MB": 1e6}[found[3]] == pytest.approx(written / 2, rel=0.1)
    assert int(found[4]) == pytest.approx(number / 1000, abs=1)


def write_planned(folder: Path) -> tuple[pandas.DataFrame, np.ndarray]:
    """Write five partitions; return their events and the number of each. Only one partition can be read."""
    events = log()
    write_partitions(folder, 5, events)
    sizes = np.bincount(partition_of(events["user"], 5))
    middle = int(np.argsort(sizes)[2])
    for path in folder.glob("*/part=*/**/*.parquet"):
        if f"part={middle:05d}" not in str(path):
            content = bytearray(path.read_bytes())
            content[4:40] = bytes(36)
            path.write_bytes(content)
    return events, sizes


def test_a_plan_of_partitions_reads_one_of_them_and_the_footers_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LEAST_SAMPLED", 100)
    events, sizes = write_planned(tmp_path / "data")
    words = (*CPUS, "2", "--data_path", str(tmp_path / "data"), "--partitions", "5", "--disk_size", "1MB")
    assert plan.main([*words], make_model) == 0
    output = capsys.readouterr().out
    middle, ranks = int(np.argsort(sizes)[2]), [sizes[0::2].sum(), sizes[1::2].sum()]
    assert f"and 1 partition with {sizes[middle]:,} of {sizes.sum():,} events" in output
    rank = int(np.argmax(ranks))
    found = re.search(rf"{3 - rank} of rank {rank}: ([\d,]+) events, (\S+) kB of columns", output)
    assert found is not None
    assert int(found[1].replace(",", "")) == ranks[rank]
    num_bytes = float(found[2]) * 1e3
    # Of small parts much is headings.
    assert plan.EVENT_BYTES < num_bytes / ranks[rank] < 3 * plan.EVENT_BYTES
    # Users stand for as large a share of all as their events; all items are in their table or in the sample.
    rows = {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"^\| (\w+) +\| +([\d,]+) \|", output, re.M)
    }
    in_sample = events[partition_of(events["user"], 5) == middle]
    assert in_sample["split"].nunique() == 3
    trained = in_sample[in_sample["split"] == "train"].nunique()
    assert rows["user"] == 1 + round(trained["user"] * sizes.sum() / sizes[middle])
    # The table of items lacks three.
    assert rows["item"] == rows["history"] == 1 + max(events["item"].nunique() - 3, trained["item"])
    assert "Fix: give --hosts 2." in refused(*words, "--disk_size", f"{round(1.9 * num_bytes)}B")
    assert not list((tmp_path / "data" / ".columns").glob("*-v*"))
    for number in ("4", "6"):
        assert f"got {number}, and the last one is 4" in refused(*words, "--partitions", number)


# --- refusals ---


def test_a_plan_that_does_not_fit_names_changes_that_fit_and_no_smaller_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables = ("--table=user:10_000_000_000:{}", "--table=item:2_000_000_000:{}", "--table=country:200:{}")

    def command(hosts: int = 4, dim: int = 64, *words: str) -> list[str]:
        return [*EIGHT, "--hosts", str(hosts), *(each.format(dim) for each in tables), *words]

    assert plan.main(command(), make_model) == 2
    said = capsys.readouterr().err
    found = re.search(
        r"--hosts (\d+), or an embedding_dim of (\d+), or --uvm (\S+), or --on_disk (\S+)\.", said
    )
    assert found is not None, said
    hosts, dim = int(found[1]), int(found[2])
    assert [fits(*command(hosts)), fits(*command(hosts - 1))] == [True, False]
    assert [fits(*command(4, dim)), fits(*command(4, dim + 4))] == [True, False]
    assert fits(*command(4, 64, "--uvm", found[3]))
    assert fits(*command(4, 64, "--on_disk", found[4]))


def test_cpu_ranks_are_not_told_to_use_the_memories_of_a_gpu() -> None:
    said = refused(*CPUS, "4", "--host_memory", "100GB", LARGE)
    assert re.search(r"Fix: give --hosts 4, or an embedding_dim of \d+\.$", said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--table=user:10"], "A table must be NAME:ROWS:DIM or NAME:ROWS:DIM:IDS, .*, got user:10"),
        (["--table=user:10:6"], "multiple of 4"),
        (["--table=user:10:8:0"], "got user:10:8:0"),
        ([LARGE, "--lr", "1"], "--lr cannot be used with plan and tables of given sizes"),
        (["--stream"], "--stream cannot be used with plan"),
        ([LARGE, "--hbm", "80gb"], "--hbm must be a size such as 512MB, 8GB or 16GiB, got 80gb"),
        ([LARGE, "--network", "fast"], "--network must be a rate such as 2GB/s or 400Gb/s, got fast"),
        (
            [LARGE, "--hosts", "0"],
            "plan requires --gpus_per_host or --procs_per_host, not both, and at least 1",
        ),
        ([LARGE, "--gpus_per_host", "0"], "plan requires --gpus_per_host or"),
        ([LARGE, "--procs_per_host", "2", "--gpus_per_host", "2"], "not both"),
        ([LARGE, *CPUS, "2", "--uvm", "user"], "--uvm and --on_disk require GPUs"),
        ([LARGE, "--uvm", "users"], "take names of user, got users"),
        (["--tables", "missing.csv"], "Cannot read --tables missing.csv"),
        ([LARGE, "--partitions", "8"], "plan requires --events with --partitions"),
        (
            [LARGE, "--partitions", "4", "--events", "9"],
            "8 ranks require at least as many --partitions, got 4",
        ),
        (["--table=user:10:2048"], "An embedding_dim of 2048 is too large for a GPU"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], sentence: str) -> None:
    assert re.search(sentence, refused(*([] if "_per_host" in str(words) else EIGHT), *words))


# --- against real ranks ---

BY_ID = ("--vocabulary", "dynamic", "--capacity", "4000", "--preset", "none")
BY_TORCHREC = ("--cpu_tables", "torchrec")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ()), (3, ()), (3, BY_ID), (3, BY_TORCHREC), (3, (*BY_ID, *BY_TORCHREC))],
)
def test_the_plan_of_a_training_is_that_of_its_ranks_with_their_memory_and_bytes(
    ranks: int, flags: tuple[str, ...], synthetic_folder: Path, tmp_path: Path
) -> None:
    # Wide rows, and no dense part, so that resident memory is that of the tables.
    steps, width = 3, "16" if flags else "4096"
    flags = ("--embedding_dim", width, "--mlp_dims", "none", "--batch_size", "256", *flags)
    results = tmp_path / "results.json"
    succeeded(torchrun(ranks, SUPPORT / "plan_ranks.py", results, synthetic_folder, steps, *flags))
    measured = read_json(results)
    words = ("--data_path", str(synthetic_folder), "--steps", str(steps))
    tables, found, sent = planned(*CPUS, str(ranks), *words, *flags)
    assert measured[0]["plan"] == described(found)
    for rank, of_rank in enumerate(measured):
        if not tables.specs:
            assert found.held[rank] == of_rank["tensors"]
        if width == "4096":
            assert found.held[rank] == pytest.approx(of_rank["resident"], rel=0.15)
    for step, wanted in enumerate(sent):
        read = np.zeros((ranks, 3))
        for of_rank in measured:
            for place, channel in enumerate(("keys", "rows", "gradients")):
                for owner, num_bytes in of_rank["read"][step].get(channel, ()):
                    read[owner, place] += num_bytes
        # Collectives of TorchRec, or reads of buffers.
        read += [of_rank["sent"][step] for of_rank in measured]
        assert wanted.tolist() == read.tolist()
    assert (sent[0] > 0).all() or ranks == 1


def test_the_size_of_a_checkpoint_is_that_of_its_shard_files(trained: Trained) -> None:
    (cluster, _, _), config = plan.parse([*CPUS, "1"]), trained.config
    ids = {table.name: 1.0 for table in trained.columns.tables}
    make = plan.trained_tables(trained.columns, config, RowWiseAdagrad(1.0), ids, make_model)
    tables = make(cluster, MAX_EMBEDDING_DIM)
    found = plan.find_plan(tables, cluster, {})
    assert found is not None
    (wanted,) = plan.checkpoint_of(tables, found, cluster.hosts)
    files = [file.read_bytes() for file in (trained.folder / "step-000000002").glob("part-*")]
    # A file begins with the length of its heading of names and shapes.
    written = sum(len(each) - 8 - int.from_bytes(each[:8], "little") for each in files)
    assert written == pytest.approx(wanted, rel=0.01)
