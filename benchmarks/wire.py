"""Measure the cost of a network between two ranks, beside the same two ranks on one machine.

    python benchmarks/wire.py --write       docs/wire.json: three minutes on two cores, as root
    python benchmarks/wire.py --rounds 1 --steps 2 --ratings 20000 --without crowded

It makes machines as the tests do (tests/cluster/machines.py), which requires root. The machines are network
namespaces joined by a switch, so gloo sends through TCP instead of shared memory.
Each gets half of the cores; a "crowded" one takes all of them, as a namespace does by default. Layouts are
measured in turns, in short blocks. The bytes received by the network are counted too, beside those that any
layout of the same step has to send. Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

from common import ROOT, bar, describe, finish, in_turns, make_parser, ratio, shown_ratio
from teams import Job, take_answers
from train_here import Here, serve_rank

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns

if TYPE_CHECKING:
    from tests.cluster.machines import Machine

ONE, TWO, CROWDED = "one machine", "two machines", "two crowded machines"
RANKS = 2
# Least ratio to the rate of one machine.
BAR = 0.6
STEPS_OF_PARTS = 15
SECONDS = 120.0
# A key of 4 bytes is the shortest that a table of any size can have.
BYTES_OF_A_KEY = 4


def main() -> None:
    """Measure and show, and write if that is asked for; or be a rank."""
    if sys.argv[1:2] == ["rank"]:
        serve_wired(sys.argv[2])
    parser = make_parser(__doc__)
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of the synthetic data set")
    parser.add_argument("--batch", type=int, default=2048, help="of each of the two ranks")
    parser.add_argument("--without", default="-", help="skip layouts with this word in their names")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each layout, in turns")
    parser.add_argument("--steps", type=int, default=30, help="of one measurement")
    flags = parser.parse_args()
    if not flags.figures:
        # A rank cannot import the tests.
        sys.path.append(str(ROOT))
        from tests.cluster.machines import why_not

        if reason := why_not():
            print(f"wire.py: {reason}", file=sys.stderr)
            sys.exit(2)
    finish("wire", flags, measure, judge, render)


class PlacedRanks:
    """Two ranks that wait for jobs; cores: of the machine of each rank."""

    def __init__(self, machines: list[Machine], cores: list[list[int]], port: int, folder: Path) -> None:
        from tests.support.launch import on_cores

        self.machines, self.asked = machines, 0
        self.commands = []
        for rank, (machine, allowed) in enumerate(zip(machines, cores, strict=True)):
            of_this = machines[: rank + 1].count(machine)
            env = {
                **{"RANK": rank, "LOCAL_RANK": of_this - 1, "WORLD_SIZE": RANKS, "PYTHONWARNINGS": "ignore"},
                **{"LOCAL_WORLD_SIZE": machines.count(machine), "MASTER_PORT": port},
                "MASTER_ADDR": machines[0].address,
            }
            # A namespace has no cores of its own; without this each machine would use all of them.
            with on_cores(allowed):
                self.commands.append(
                    machine.start([sys.executable, Path(__file__).resolve(), "rank", folder], env)
                )

    def ask(self, what: str, job: Job) -> list[dict[str, float]]:
        """Have all ranks do a job and return their answers."""
        self.asked += 1
        for command in self.commands:
            command.write(json.dumps({"what": what, **dataclasses.asdict(job)}))
        deadline = time.monotonic() + SECONDS
        return [self._answer(command, deadline) for command in self.commands]

    def _answer(self, command: Any, deadline: float) -> dict[str, float]:
        while (
            len(answers := [line for line in command.text().splitlines() if line.startswith("{")])
            < self.asked
        ):
            if command.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a rank does not answer:\n{command.text()}")
            time.sleep(0.02)
        answer: dict[str, float] = json.loads(answers[-1])
        return answer


@contextlib.contextmanager
def layouts(flags: argparse.Namespace) -> Iterator[dict[str, PlacedRanks]]:
    """Ranks of every layout, which train on the same data."""
    from tests.cluster.machines import Cluster

    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    halves = [cores[:half], cores[-half:]]
    with tempfile.TemporaryDirectory(prefix="wire-") as name, Cluster(Path(name) / "machines", 2) as cluster:
        data = Path(name) / "data"
        write_synthetic(data, flags.ratings, seed=0)
        open_columns(Config.of(data_path=str(data)))
        first, second = cluster.machines
        placed = {
            ONE: ([first, first], [cores, cores]),
            TWO: ([first, second], halves),
            CROWDED: ([first, second], [cores, cores]),
        }
        yield {
            layout: PlacedRanks(machines, allowed, 29500 + number, data)
            for number, (layout, (machines, allowed)) in enumerate(placed.items())
            if flags.without not in layout
        }


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Rates of all layouts, received and necessary bytes, and parts of a step."""
    job = Job("wire", flags.batch, 0, flags.steps)
    with layouts(flags) as started:
        for ranks in started.values():
            ranks.ask("steps", dataclasses.replace(job, steps=3))
        measures = {layout: partial(measure_round, ranks, job) for layout, ranks in started.items()}
        rounds = in_turns(measures, flags.rounds)
        job = dataclasses.replace(job, steps=STEPS_OF_PARTS)
        parts = {layout: ranks.ask("parts", job) for layout, ranks in started.items()}
    return {
        **describe(),
        "batch": flags.batch,
        "ratings": flags.ratings,
        "rates": {layout: [one.rate for one in found] for layout, found in rounds.items()},
        "bytes a rating": {
            layout: median(one.bytes_a_rating for one in found) for layout, found in rounds.items()
        },
        "bytes a rating that must travel": _needed(parts[TWO], flags.batch),
        "parts": {layout: _seconds(found[0]) for layout, found in parts.items()},
        # A faster exchange that loses a row would show here.
        "equal losses": [one.loss for one in rounds[ONE]] == [one.loss for one in rounds[TWO]],
    }


@dataclasses.dataclass(frozen=True)
class LayoutRound:
    """Measurement of a layout: ratings a second, received bytes a rating, and the last loss."""

    rate: float
    bytes_a_rating: float
    loss: float


def measure_round(ranks: PlacedRanks, job: Job) -> LayoutRound:
    """Train for the steps of a job."""
    before = _received(ranks)
    answer = ranks.ask("steps", job)[0]
    ratings = RANKS * job.batch_size * job.steps
    return LayoutRound(ratings / answer["seconds"], (_received(ranks) - before) / ratings, answer["loss"])


def _seconds(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if "bytes" not in name}


def _received(ranks: PlacedRanks) -> int:
    return sum(machine.received() for machine in set(ranks.machines))


def _needed(parts: list[dict[str, float]], batch: int) -> dict[str, float]:
    """Necessary bytes a rating by kind, from those of each rank in a step."""
    names = [name for name in parts[0] if "bytes" in name]
    return {
        name.removeprefix("bytes, "): sum(part[name] for part in parts) / (RANKS * batch) for name in names
    }


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    rates, bars = result["rates"], []
    for layout in rates:
        if layout != ONE:
            found = ratio(rates[layout], rates[ONE])
            bars.append(bar(f"{layout} / {ONE}", found, BAR, f"{found:.2f}", f"{BAR}"))
    equal = result["equal losses"]
    bars.append(
        bar("losses on two machines and on one", float(equal), 1, "equal" if equal else "not equal", "equal")
    )
    return bars


def render(result: dict[str, Any]) -> str:
    """Figures of each layout, and necessary bytes."""
    lines = []
    for layout, rates in result["rates"].items():
        lines.append(
            f"{layout:<22}{median(rates):>10,.0f} ratings/s, {shown_ratio(rates, result['rates'][ONE])} "
            f"of one machine; {result['bytes a rating'][layout]:.0f} bytes a rating came in"
        )
        lines.append(
            "  ms: "
            + ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in result["parts"][layout].items())
        )
    needed = result["bytes a rating that must travel"]
    shown = ", ".join(f"{name} {size:.1f}" for name, size in needed.items())
    lines.append(f"{'must travel':<22}{sum(needed.values()):>10.0f} bytes a rating: {shown}")
    return "\n".join(lines)


class Wired(Here):
    """Training of the example that also counts what it has to send."""

    def bytes_needed(self, number: int, batch_size: int) -> dict[str, float]:
        """Bytes that this rank has to send in a step: keys, rows, gradients of rows and of the dense part."""
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        from recsuite.sharding.cpu_tables import CpuTables, RowLookup

        (tables,) = (module for module in self.state.model.modules() if isinstance(module, CpuTables))
        rank, ranks = self.context.rank, self.context.world_size
        row_bytes = 4 * tables._embedding_dim
        sent = dict.fromkeys(("keys", "rows", "gradients of rows", "dense gradients"), 0.0)
        looked_up = RowLookup.apply

        def look_up(anchor: Any, owner: Any, request: Any) -> Any:
            wanted = sum(request.num_sent) - request.num_sent[rank]
            given = sum(request.received) - request.received[rank]
            sent["keys"] += wanted * BYTES_OF_A_KEY
            sent["rows"] += given * row_bytes
            sent["gradients of rows"] += wanted * row_bytes
            return looked_up(anchor, owner, request)

        with mock.patch.object(RowLookup, "apply", look_up):
            self.steps(number, batch_size)
        dense = [value for _, value in in_backward_optimizer_filter(self.state.model.named_parameters())]
        # Each number of a sum has to leave all ranks but one, and to come back to them.
        sent["dense gradients"] = number * 2 * (ranks - 1) / ranks * 4 * sum(value.numel() for value in dense)
        return {name: size / number for name, size in sent.items()}

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Median seconds of the parts of a step, and necessary bytes of a rank in a step, by kind."""
        needed = {f"bytes, {name}": size for name, size in self.bytes_needed(number, batch_size).items()}
        return {**super().parts(number, batch_size), **needed}


def serve_wired(folder: str) -> None:
    """Serve the jobs of a rank; the number of threads stays as `init_runtime` has set it."""
    answers = take_answers()
    config = Config.of(data_path=folder)
    columns = open_columns(config)
    serve_rank(answers, config, lambda context, name: Wired(columns, context, config), own_threads=True)


if __name__ == "__main__":
    main()
