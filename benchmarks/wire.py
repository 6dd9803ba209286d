"""Measure what a network between two ranks costs a training, beside the same two ranks on one machine.

    PYTHONPATH=. python benchmarks/wire.py --write       docs/wire.json: three minutes on two cores, as root
    PYTHONPATH=. python benchmarks/wire.py --rounds 1 --steps 2 --ratings 20000 --without crowded

Start it in the root of the repository, with that in PYTHONPATH: it makes its machines as the tests do
(tests/cluster/machines.py), and tests are not installed. `python -m benchmarks.wire` would find those, but
not the modules beside this file, which all benchmarks import by their own names.

The machines are namespaces of this one, joined by a switch (tests/cluster), so they share no memory and gloo
sends through TCP. Each gets half of the cores; "crowded" ones each take all of them for their own, as
machines made of namespaces do unless they are told. Layouts are measured in turns, in short blocks, because
other programs slow a machine down for seconds at a time. Also counts the bytes that come in by the network,
beside those that have to. Prints each figure beside its bar; asserts nothing.
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
from pathlib import Path
from statistics import median
from typing import Any

from environment import describe, finish, make_parser
from figures import bar, ratio, shown_ratio
from train_team import Order

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from tests.cluster.machines import Cluster, Machine, why_not
from tests.support.launch import on_cores

ONE, TWO, CROWDED = "one machine", "two machines", "two crowded machines"
RANKS = 2
# Of one machine's rate.
BAR = 0.6
STEPS_OF_PARTS = 15
SECONDS = 120.0


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    if reason := why_not():
        sys.exit(reason)
    result = {**describe(), "batch": flags.batch, "ratings": flags.ratings, **measure(flags)}
    result["bars"] = judge(result)
    finish("wire", result, render(result), flags)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of the synthetic data set")
    parser.add_argument(
        "--batch", type=int, default=Config().loader.batch_size, help="of each of the two ranks"
    )
    parser.add_argument("--without", default="-", help="leave out layouts with this word in their names")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each layout, in turns")
    parser.add_argument("--steps", type=int, default=30, help="of one measurement")
    return parser.parse_args()


class Ranks:
    """Two ranks of wire_ranks.py that wait for orders; cores: those that each rank's machine counts on."""

    def __init__(self, machines: list[Machine], cores: list[list[int]], port: int, folder: Path) -> None:
        self.machines, self.asked = machines, 0
        self.commands = []
        for rank, (machine, allowed) in enumerate(zip(machines, cores, strict=True)):
            of_this = machines[: rank + 1].count(machine)
            env = {
                **{"RANK": rank, "LOCAL_RANK": of_this - 1, "WORLD_SIZE": RANKS, "PYTHONWARNINGS": "ignore"},
                **{"LOCAL_WORLD_SIZE": machines.count(machine), "MASTER_PORT": port},
                "MASTER_ADDR": machines[0].address,
            }
            script = Path(__file__).with_name("wire_ranks.py")
            # A namespace has no cores of its own; without this each machine would count on all of them.
            with on_cores(allowed):
                self.commands.append(machine.start([sys.executable, script, folder], env))

    def ask(self, what: str, order: Order) -> list[dict[str, float]]:
        """What each rank answers when all have done it."""
        self.asked += 1
        for command in self.commands:
            command.write(json.dumps({"what": what, **dataclasses.asdict(order)}))
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
def layouts(flags: argparse.Namespace) -> Iterator[dict[str, Ranks]]:
    """The ranks of every layout, which train on the same data."""
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
            layout: Ranks(machines, allowed, 29500 + number, data)
            for number, (layout, (machines, allowed)) in enumerate(placed.items())
            if flags.without not in layout
        }


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Rates of all layouts round by round, what came in by the network and had to, and parts of a step."""
    order = Order("wire", flags.batch, 0, flags.steps)
    rounds: dict[str, list[Round]] = {}
    with layouts(flags) as started:
        for layout, ranks in started.items():
            ranks.ask("steps", dataclasses.replace(order, steps=3))
            rounds[layout] = []
        for number in range(flags.rounds):
            # Whoever comes after a slow one does not always do.
            for layout in list(started)[:: 1 if number % 2 else -1]:
                rounds[layout].append(a_round(started[layout], order))
        order = dataclasses.replace(order, steps=STEPS_OF_PARTS)
        parts = {layout: ranks.ask("parts", order) for layout, ranks in started.items()}
    return {
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
class Round:
    """One measurement of a layout: ratings a second, bytes that came in, and the last loss."""

    rate: float
    bytes_a_rating: float
    loss: float


def a_round(ranks: Ranks, order: Order) -> Round:
    """Train for the steps of an order."""
    before = _received(ranks)
    answer = ranks.ask("steps", order)[0]
    ratings = RANKS * order.batch_size * order.steps
    return Round(ratings / answer["seconds"], (_received(ranks) - before) / ratings, answer["loss"])


def _seconds(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if "bytes" not in name}


def _received(ranks: Ranks) -> int:
    return sum(machine.received() for machine in set(ranks.machines))


def _needed(parts: list[dict[str, float]], batch: int) -> dict[str, float]:
    """Bytes a rating by what they are, from those that each rank has to send in a step."""
    names = [name for name in parts[0] if "bytes" in name]
    return {
        name.removeprefix("bytes, "): sum(part[name] for part in parts) / (RANKS * batch) for name in names
    }


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
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
    """The figures, a line a layout, and what travels."""
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


if __name__ == "__main__":
    main()
