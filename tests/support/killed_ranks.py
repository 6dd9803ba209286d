"""Ranks that write checkpoints until they are killed, for `test_kill.py`: python killed_ranks.py WORK.

Reads a request per line, {"name", "mode", "kills", "seed"}, and answers each with a line that says what was
found; a mode of `killed_writer.py` needs no kills and no seed. A kill is a target and an instant.

TorchRec is imported once: a round forks a launcher, and that forks the ranks, which join each other, load the
newest checkpoint, hold every number of it against its step, and write checkpoints until one of them, all of
them or their launcher gets a SIGKILL, at an instant that the seed chooses, or when a checkpoint was or is
half written.

What the model holds is a function of the step (`planted_model.py`, `planted_rows.py`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from example import make_loss, make_model
from recsuite.checkpoint.chain import chain_at, check_whole
from recsuite.checkpoint.checkpointer import Checkpointer, checkpointing, compact
from recsuite.checkpoint.folder import BEST, LATEST, LEFTOVER, LOCK, NAME, newest_in, step_of
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.host import die_with_parent
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.dynamic_ranks import dynamic_rows
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel, build_train_state
from tests.support.killed_writer import ACTIONS, kill_everywhere
from tests.support.planted_model import differing, mark_step, write_step
from tests.support.planted_rows import differing_rows, write_rows
from tests.support.steps import tell

WORLD_SIZE = 2
# Tables that take in the ids of `planted_rows.py`, and have room for all of them.
DYNAMIC = {"vocabulary": "dynamic", "capacity": "512", "eviction": "none"}
# Histories that are read by the rows of the items.
SEQUENCE = {"task": "sequence", "split": "leave_one_out", "history": 6}
# How the modes differ from a full checkpoint after every step.
MODES: dict[str, dict[str, Any]] = {
    "dump": {"dump": True},
    "async dump": {"dump": True, "async_dump": True},
    "delta": {"dump": True, "inc_dump": True},
    "compaction": {"inc_dump": True},
    "retention": {"dump": True, "keep": 1},
    "dynamic dump": {"dump": True, **DYNAMIC},
    "dynamic delta": {"dump": True, "inc_dump": True, **DYNAMIC},
    "dynamic compaction": {"inc_dump": True, **DYNAMIC},
    "sequence delta": {"dump": True, "inc_dump": True, **SEQUENCE},
}
# From the first moment at which something is written to the latest kill.
LONGEST_DELAY = 0.3
DEADLINE = 300
# What a rank whose peer is gone has to find that out, or to finish what it is about.
SURVIVORS_SECONDS = 2.0
FOREIGN = {
    "notes.txt": b"mine",
    "step-1/best": b"mine too",
    ".making-tea": b"",
    "run-0/step-000000001/a": b"x",
}


# --- a rank ---


class Rank:
    """One rank of a round: joins, checks what it finds, and writes checkpoints until it is killed."""

    def __init__(self, rank: int, columns: Columns, config: Config, store: Path, report: int) -> None:
        torch.set_num_threads(1)
        self.columns, self.config, self.report = columns, config, report
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), WORLD_SIZE),
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=DEADLINE),
        )
        self.context = RuntimeContext(rank, rank, WORLD_SIZE, WORLD_SIZE, torch.device("cpu"), 1)
        self.train_state: ShardedModel = build_train_state(
            columns, config, self.context, make_model, make_loss(columns, config)
        )
        self.tensors = tensors_of(self.train_state)
        self.shares = dynamic_rows(self.train_state.model)

    def write_step(self, step: int) -> None:
        """Make the model what it is after a step."""
        write_step(self.tensors, step)
        write_rows(self.shares, step)

    def differing(self, step: int) -> list[str]:
        """Names of tensors and tables with other values than after a step."""
        return differing(self.tensors, step) + differing_rows(self.shares, step)

    def say(self, **found: Any) -> None:
        """A line to who started the round; short, so that no other rank's comes in between."""
        os.write(self.report, (json.dumps({"rank": self.context.rank, **found}) + "\n").encode())

    def check_newest(self) -> None:
        """Load the newest checkpoint, and hold it against its step."""
        newest = newest_in(Path(self.config.checkpoint.save_dir))
        if newest is None:
            self.write_step(0)
            self.say(loaded=-1, differing=[])
        else:
            progress = restore(chain_at(newest), self.train_state, self.columns, self.context).progress
            self.say(loaded=progress.step, differing=self.differing(progress.step))

    def dump_until_killed(self) -> None:
        """Write a checkpoint after every step; in the mode of compaction merge the deltas again and again."""
        folding = self.config.checkpoint.inc_dump and not self.config.checkpoint.dump
        alone = self.config.replaced(resume=False, inc_dump=False, compact=True)
        while True:
            with checkpointing(self.columns, self.config, self.context) as checkpointer:
                self.say(began=leftovers(Path(self.config.checkpoint.save_dir)))
                checkpointer.begin(self.train_state, checkpointer.start)
                self._dump_steps(checkpointer, 3 if folding else 10**9)
            compact(self.train_state, self.columns, alone, self.context)

    def _dump_steps(self, checkpointer: Checkpointer, count: int) -> None:
        done = checkpointer.start.step
        for step in range(done + 1, done + count + 1):
            self.write_step(step)
            if self.config.checkpoint.inc_dump:
                mark_step(checkpointer, self.tensors, step)
            # Every sixth ends an epoch, and then --dump asks for a full one.
            tell(checkpointer, Progress(step, step // 6, step % 6))
            # One that is written beside the training is there when the next one begins.
            self.say(dumped=step - self.config.checkpoint.async_dump)


def be_rank(rank: int, action: Callable[[Rank], None], *arguments: Any) -> None:
    """In a forked process: act, say what went wrong, and end without C++'s destructors."""
    try:
        die_with_parent()
        # What ranks print is for people.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        action(Rank(rank, *arguments))
    except BaseException:
        os.write(
            arguments[-1],
            (json.dumps({"rank": rank, "failed": traceback.format_exc()[-3000:]}) + "\n").encode(),
        )
    os._exit(0)


# --- a round ---


class Round:
    """A launcher and its ranks, from the fork to the end of all of them."""

    def __init__(self, columns: Columns, config: Config, store: Path, action: Callable[[Rank], None]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._rest = b""
        self._report, report = os.pipe()
        self.launcher = os.fork()
        if self.launcher == 0:
            self._be_launcher(columns, config, store, action, report)
        os.close(report)
        self.ranks: list[int] = self._wait_for(lambda line: "pids" in line)["pids"]

    def _be_launcher(self, *arguments: Any) -> None:
        columns, config, store, action, report = arguments
        pids = []
        for rank in range(WORLD_SIZE):
            pids.append(os.fork())
            if pids[-1] == 0:
                be_rank(rank, action, columns, config, store, report)
        os.write(report, (json.dumps({"pids": pids}) + "\n").encode())
        os.close(report)
        os.wait()
        # Like torchrun it ends what is left when one rank is gone: ranks die with their launcher.
        deadline = time.monotonic() + SURVIVORS_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                os.waitpid(-1, os.WNOHANG)
                time.sleep(0.01)
        os._exit(0)

    def _read(self, deadline: float) -> bool:
        """Read what there is; False at the end of all that could write."""
        if not select.select([self._report], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"nothing more from the ranks after {self.lines}")
        found = os.read(self._report, 2**16)
        *lines, self._rest = (self._rest + found).split(b"\n")
        self.lines += [json.loads(line) for line in lines]
        return bool(found)

    def _wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while not (found := [line for line in self.lines if wanted(line)]):
            if not self._read(deadline):
                raise RuntimeError(f"the ranks ended too early: {self.lines}")
        return found[0]

    def wait_until_it_writes(self) -> None:
        """Until rank 0 is about to write."""
        self._wait_for(lambda line: "began" in line and line["rank"] == 0)

    def wait_until_it_has_written(self) -> None:
        """Until rank 0 has written a checkpoint of a later step than the one that it found."""
        found = max(0, *self.said("loaded"))
        self._wait_for(lambda line: line.get("rank") == 0 and line.get("dumped", 0) > found)

    def wait_until_half_is_written(self, save_dir: Path) -> None:
        """Until something is half done in a folder of checkpoints."""
        deadline = time.monotonic() + DEADLINE
        while not leftovers(save_dir):
            assert time.monotonic() < deadline, f"nothing half done after {self.lines}"
            time.sleep(0.0005)

    def kill(self, target: str) -> None:
        """SIGKILL to a rank, to all ranks, or to their launcher."""
        while select.select([self._report], [], [], 0)[0] and self._read(time.monotonic()):
            pass
        if self.said("failed"):
            raise RuntimeError(f"a rank failed before it was killed: {self.said('failed')[0]}")
        victims = {"launcher": [self.launcher], "all ranks": self.ranks}
        for pid in victims.get(target) or [self.ranks[int(target[-1])]]:
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until all have ended, by themselves."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        os.close(self._report)
        os.waitpid(self.launcher, 0)

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.launcher, signal.SIGKILL)

    def said(self, what: str) -> list[Any]:
        """Values that the ranks reported under a name."""
        return [line[what] for line in self.lines if what in line]


@contextlib.contextmanager
def running(*arguments: Any) -> Iterator[Round]:
    """A round, that is over afterwards."""
    begun = Round(*arguments)
    try:
        yield begun
    except BaseException:
        begun.end()
        raise


# --- a series of rounds ---


def leftovers(save_dir: Path) -> list[str]:
    """Names of unfinished parts in a folder of checkpoints."""
    return sorted(path.name for path in save_dir.iterdir() if LEFTOVER.fullmatch(path.name))


class Series:
    """Kills one after the other in one folder; what must never be is noted as a fault."""

    def __init__(self, work: Path, columns: Columns, request: dict[str, Any]) -> None:
        self.work, self.columns, self.request = work, columns, request
        self.random = random.Random(request["seed"])
        self.save_dir = work / request["name"]
        flags = {"resume": True, "dump_every": 1, "keep": 2, "embedding_dim": 4, "mlp_dims": (4,)}
        self.config = Config.of(save_dir=str(self.save_dir), **{**flags, **MODES[request["mode"]]})
        self.found: dict[str, Any] = {"kills": {}, "left": 0, "faults": [], "step": 0}
        for name, content in FOREIGN.items():
            (self.save_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (self.save_dir / name).write_bytes(content)

    def run(self) -> dict[str, Any]:
        """All kills of the request, and then a look at what they left."""
        for number, (target, instant) in enumerate(self.request["kills"]):
            self._kill_once(number, target, instant)
        with running(self.columns, self.config, self._store(), Rank.check_newest) as last:
            last.wait()
        self._check_load(last, "the end")
        return self.found

    def _store(self) -> Path:
        return self.work / f"store-{self.request['name']}-{self.random.random()}"

    def _kill_once(self, number: int, target: str, instant: str) -> None:
        def act(rank: Rank) -> None:
            rank.check_newest()
            rank.dump_until_killed()

        with running(self.columns, self.config, self._store(), act) as begun:
            begun.wait_until_it_writes()
            self._wait_for_instant(begun, instant)
            begun.kill(target)
            begun.wait()
        where = f"kill {number} of {target}"
        self._check_load(begun, where)
        if any(begun.said("began")[:1]):
            self._fault(where, f"leftovers of the one before were still there: {begun.said('began')[0]}")
        self.found["kills"][target] = self.found["kills"].get(target, 0) + 1
        self.found["left"] += bool(leftovers(self.save_dir))
        self._check_folder(where, max([self.found["step"], *begun.said("dumped")]))

    def _wait_for_instant(self, begun: Round, instant: str) -> None:
        """Until something is half written, until a checkpoint was written, or any time."""
        if instant == "half written":
            begun.wait_until_half_is_written(self.save_dir)
        elif instant == "written":
            begun.wait_until_it_has_written()
        else:
            time.sleep(self.random.uniform(0, LONGEST_DELAY))

    def _check_load(self, begun: Round, where: str) -> None:
        """Check the load of a round: the newest state that the round before left."""
        loaded = begun.said("loaded")
        if loaded != [loaded[0] if loaded else None] * WORLD_SIZE:
            self._fault(where, f"not every rank loaded the newest state: {begun.lines}")
        elif loaded[0] != (self.found["step"] if newest_in(self.save_dir) else -1) and self.found["step"]:
            self._fault(where, f"loaded step {loaded[0]}, and the newest was {self.found['step']}")
        if any(begun.said("differing")):
            self._fault(where, f"the state of step {loaded} is not what it says: {begun.said('differing')}")

    def _check_folder(self, where: str, dumped: int) -> None:
        """The newest checkpoint is whole, not older than what was written, and nothing else was touched."""
        for name, content in FOREIGN.items():
            if (self.save_dir / name).read_bytes() != content:
                self._fault(where, f"{name} was changed")
        known = {BEST, LATEST, LOCK, *(name.split("/")[0] for name in FOREIGN), *leftovers(self.save_dir)}
        unknown = [path.name for path in self.save_dir.iterdir() if path.name not in known]
        if strange := [name for name in unknown if not NAME.fullmatch(name)]:
            self._fault(where, f"found {strange}")
        newest = newest_in(self.save_dir)
        if newest is None:
            if dumped:
                self._fault(where, f"step {dumped} was dumped and no state is left")
            return
        self.found["step"] = step_of(newest)
        if step_of(newest) < dumped:
            self._fault(where, f"step {dumped} was dumped, and the newest state is {newest.name}")
        links = {self.save_dir / name for name in (LATEST, BEST)}
        for folder in {newest, *(link.resolve() for link in links)} - links:
            try:
                check_whole(chain_at(folder))
            except Exception as error:
                self._fault(where, f"{folder} is not whole: {error}")

    def _fault(self, where: str, what: str) -> None:
        self.found["faults"].append(f"{where}: {what}")


def columns_of(data: Path, mode: str) -> Columns:
    """The columns that a mode trains on, made when they are first asked for."""
    flags = {name: value for name, value in MODES[mode].items() if name in ("vocabulary", *SEQUENCE)}
    with contextlib.redirect_stdout(io.StringIO()):
        return open_columns(Config.of(data_path=str(data), **flags))


def main() -> None:
    """Answer requests until there are no more."""
    warnings.filterwarnings("ignore")
    work = Path(sys.argv[1])
    data = work / "data"
    write_synthetic(data, 2_000, seed=0)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["mode"] in ACTIONS:
                found = kill_everywhere(work / request["name"], request["mode"])
            else:
                found = Series(work, columns_of(data, request["mode"]), request).run()
        except Exception:
            found = {"faults": [traceback.format_exc()]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
