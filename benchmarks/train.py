"""Measure how fast this project trains, beside plain PyTorch with the same model, batch and machine.

    python benchmarks/train.py --write          everything: twenty minutes on two cores, 20 GB of memory
    python benchmarks/train.py --sizes 2000+1000 --batch 256 --large_batch 512 --without DDP,compiled \
        --rounds 1 --seconds 0.02

Prints each figure beside its bar; with --write it also writes docs/train.json, docs/train.png and the part of
docs/log/benchmarks.md between the train marks. With GPUs both sides train on them; with one there is one
process, and none that it could be compared with. All variants of a size are measured in turns, in short
blocks, because other programs slow a machine down for seconds at a time; between them, what the memory and
the cores of the machine do at most. Asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from environment import DOCS, describe, finish, make_parser
from gpu_device import BYTES_COPIED, copy_rate
from train_bounds import BYTES, MEMORY, OPERATIONS, PRODUCTS, work_of
from train_models import MODELS, Model, make_columns, rows_of
from train_tables import DDP, HERE_1, HERE_2, draw, judge, most_processes, render
from train_team import COMPILED, Order, Team, teams

from recsuite.runtime.host import allowed_cores

PAGE = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- train: made by benchmarks/train.py -->", "<!-- end of train -->")
# A step of dense Adam goes over all rows, four times: beyond this many it takes seconds.
MOST_ROWS_DENSE = 2_000_000
# DDP keeps all tables and optimizer states on each rank.
MOST_ROWS_DDP = 2_000_000
STEPS_OF_PARTS = 15


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    device = _device()
    result = {**describe(), "device": device, "models": {}}
    for name in flags.models:
        model = MODELS[name]
        if flags.batch:
            model = dataclasses.replace(model, batch=flags.batch)
        if flags.large_batch:
            model = dataclasses.replace(model, large_batch=flags.large_batch)
        result["models"][name] = {
            **{"title": model.title, "dim": model.dim, "history": model.history, "bars": model.bars},
            **{"batch": model.batch, "large batch": model.large_batch},
            "sizes": [measure_size(model, users, movies, device, flags) for users, movies in flags.sizes],
        }
    result["bars"] = judge(result)
    finish("train", result, render(result), flags, draw, PAGE, MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    sizes = "6040+3952,1000000+100000,10000000+1000000"
    parser.add_argument(
        "--sizes", type=sizes_of, default=sizes_of(sizes), help=f"users+movies (default: {sizes})"
    )
    parser.add_argument("--models", type=_names_of, default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument("--batch", type=int, help="of each of two ranks (default: that of the model)")
    parser.add_argument("--large_batch", type=int, help="the other one of the scaling")
    parser.add_argument(
        "--without", type=_names_of, default=[], help="leave out variants with one of these in their names"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each figure, in turns")
    parser.add_argument("--seconds", type=float, default=0.4, help="about, of one measurement")
    return parser.parse_args()


def sizes_of(text: str) -> list[tuple[int, int]]:
    """What --sizes says: users and movies."""
    return [(int(users), int(movies)) for users, movies in (size.split("+") for size in text.split(","))]


def _names_of(text: str) -> list[str]:
    return text.split(",")


def _device() -> dict[str, Any]:
    """What computes, and of a GPU how many bytes a second its memory moves."""
    import torch

    if not torch.cuda.is_available():
        return {"kind": "cpu"}
    device = torch.device("cuda", 0)
    # Measured: what the data sheet says no program reaches.
    found = {"kind": "cuda", "name": torch.cuda.get_device_name(device), "number": torch.cuda.device_count()}
    found["bytes a second"] = copy_rate(device, BYTES_COPIED)
    torch.cuda.empty_cache()
    return found


def num_processes(device: dict[str, Any]) -> tuple[int, ...]:
    """With how many processes this project trains, the most first: two and one, where each has a GPU or none
    needs one. device: its "kind", and of GPUs their "number".
    """
    return (1,) if device["kind"] == "cuda" and device["number"] < 2 else (2, 1)


def variants_of(
    model: Model, num_rows: int, without: list[str], device: dict[str, Any]
) -> dict[str, tuple[str, Order]]:
    """Name to the team that trains so, and its order but for the steps."""
    is_cpu, numbers = device["kind"] == "cpu", num_processes(device)
    # As many ratings in a step of all ranks, whoever makes it.
    together, large = max(numbers) * model.batch, model.large_batch
    names = {2: HERE_2, 1: HERE_1}
    found = {names[number]: (f"here {number}", Order("here", model.batch, 1, 0)) for number in numbers}
    found |= {f"{names[number]}, large": (f"here {number}", Order("here", large, 1, 0)) for number in numbers}
    # What is compiled is made for one number of threads; on a GPU they change nothing.
    most = min(2, allowed_cores()) if is_cpu else 1
    for optimizer in ("dense Adam", "sparse Adagrad", "SparseAdam"):
        if optimizer == "dense Adam" and num_rows > MOST_ROWS_DENSE:
            continue
        for threads in range(1, most + 1):
            found[f"plain, {optimizer}, {_threads(threads)}"] = (
                "plain 1",
                Order(optimizer, together, threads, 0),
            )
        if optimizer != "SparseAdam":
            order = Order(optimizer + COMPILED, together, most, 0)
            found[f"plain, {optimizer}{COMPILED}, {_threads(most)}"] = ("plain 1", order)
    if num_rows <= MOST_ROWS_DDP and max(numbers) > 1:
        # What DDP adds up in each step is the whole table where gradients are dense.
        optimizer = "dense Adam" if num_rows < 100_000 else "sparse Adagrad"
        found[DDP] = ("plain 2", Order(optimizer, model.batch, 1, 0))
    # On a GPU it is another memory that counts.
    if is_cpu:
        found[MEMORY] = ("machine 2", Order(MEMORY, BYTES, 1, 0))
        found[PRODUCTS] = ("machine 2", Order(PRODUCTS, OPERATIONS, 1, 0))
    return {name: variant for name, variant in found.items() if not any(word in name for word in without)}


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def measure_size(
    model: Model, users: int, movies: int, device: dict[str, Any], flags: argparse.Namespace
) -> dict[str, Any]:
    """Rates of all variants for tables of one size, the parts of our steps, what they and the machine do, and
    the memory of our ranks.
    """
    variants = variants_of(model, users + movies, flags.without, device)
    names = sorted({team for team, _ in variants.values()})
    with tempfile.TemporaryDirectory(prefix="train-") as folder, contextlib.ExitStack() as stack:
        make_columns(Path(folder), users, movies, model.num_ratings, model)
        # All at once, to take turns: a team that has no order sleeps, and its start is in no figure.
        started = {name: Team(f"train_{name[:-2]}.py", int(name[-1]), folder, model.name) for name in names}
        stack.enter_context(teams(started))
        measurement = Measurement(variants, started, flags)
        rates = measurement.rates()
        ours = most_processes(rates)
        parts = {name: measurement.parts(name) for name in (HERE_2, HERE_1) if name in rates}
        peak_bytes = started[variants[ours][0]].peak_bytes()
        work = work_of(Path(folder), model, model.batch)
    return {
        "users": users,
        "movies": movies,
        "optimizer of ddp": variants[DDP][1].variant if DDP in variants else None,
        "machine": {name: rates.pop(name) for name in (MEMORY, PRODUCTS) if name in rates},
        "rates": rates,
        "parts": parts,
        "work": work,
        "peak bytes": peak_bytes,
        "table bytes": rows_of(model, users, movies) * (model.dim + 1) * 4,
    }


class Measurement:
    """The variants of one size, in turns."""

    def __init__(
        self, variants: dict[str, tuple[str, Order]], started: dict[str, Team], flags: argparse.Namespace
    ) -> None:
        self.variants = variants
        self.teams = started
        self.flags = flags
        self.steps = {name: self._steps(name) for name in variants}

    def _steps(self, name: str) -> int:
        """How many steps of a variant take the seconds of one measurement, after some that warm it up."""
        first = self._seconds(name, 1)
        often = self._seconds(name, 5) / 5 if first < 5 * self.flags.seconds else first
        return max(1, round(self.flags.seconds / often))

    def _seconds(self, name: str, steps: int) -> float:
        team, order = self.variants[name]
        order = Order(order.variant, order.batch_size, order.threads, steps)
        return float(self.teams[team].ask("steps", order)["seconds"])

    def rates(self) -> dict[str, list[float]]:
        """Ratings a second of each variant in each round."""
        found: dict[str, list[float]] = {name: [] for name in self.variants}
        for number in range(self.flags.rounds):
            # Whoever comes after a slow one does not always do.
            for name in list(self.variants)[:: 1 if number % 2 else -1]:
                team, order = self.variants[name]
                ratings = order.batch_size * int(team[-1]) * self.steps[name]
                found[name].append(ratings / self._seconds(name, self.steps[name]))
        return found

    def parts(self, name: str) -> dict[str, float]:
        """Seconds of the parts of a step."""
        team, order = self.variants[name]
        found = self.teams[team].ask("parts", Order(order.variant, order.batch_size, 1, STEPS_OF_PARTS))
        assert isinstance(found, dict)
        return found


if __name__ == "__main__":
    main()
