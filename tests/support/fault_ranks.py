"""Program of each rank of a launch in `test_dump_faults.py`.

python fault_ranks.py RESULTS DATA SAVE_DIR MODE...

The last rank has a fault while it writes some of its parts: no file of it can grow beyond a few bytes, as on
a disk that is full, or it takes its time, or what it holds is what a diverged training leaves. What the model
holds otherwise is a function of the step, as in `killed_ranks.py`: that of dynamic tables too.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from example import make_loss, make_model
from recsuite.checkpoint import writer
from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.checkpoint.folder import deltas_in, full_checkpoints_in, newest_in
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.writer import Tensors, tensors_of
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime
from recsuite.sharding.dynamic_ranks import dynamic_rows
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel, build_train_state
from tests.support.killed_ranks import DYNAMIC, MODES, leftovers
from tests.support.planted_model import differing, mark_step, tables_of, write_step
from tests.support.planted_rows import Shares, differing_rows, ids_at, learned_at, write_rows
from tests.support.steps import tell

SMALL_FILE = 100
# More than a file takes on a busy machine.
SLOW_SECONDS = 4.0


def on_a_full_disk(write: Callable[[], Any]) -> Any:
    """Write where files cannot grow."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, most))
    try:
        return write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def slowly(write: Callable[[], Any]) -> Any:
    """Write late."""
    time.sleep(SLOW_SECONDS)
    return write()


def diverged(write: Callable[[], Any]) -> Any:
    """Never called: what is to be written is the fault, see `spoil`."""
    return write()


def spoil(tensors: Tensors, shares: Shares, step: int) -> None:
    """Have one number of this rank's rows be what no trained model has; its step looked the row up."""
    for share in shares.values():
        ids = ids_at(share, step)
        share.weights[share.find(ids[learned_at(ids, step) == step][-1:])] = 5e29
    # What is said must be of the tables that a mode is about.
    for _, _, _, tensor in () if shares else tables_of(tensors):
        if tensor.dim() == 2:
            tensor[len(tensor) // 3 * 3 - 3 :] = 5e29


# The faults by step, and the last step.
FAULTS: dict[str, tuple[dict[int, Any], int]] = {
    "full and slow": ({2: on_a_full_disk, 3: on_a_full_disk, 5: slowly}, 5),
    "full at the end": ({2: on_a_full_disk}, 2),
    "diverged": ({2: diverged}, 2),
}


class Faults:
    """Has `write_shard_file` fail on this rank while it is told to."""

    def __init__(self) -> None:
        self.fault: Callable[[Callable[[], Any]], Any] | None = None
        self._write_file = writer.write_shard_file
        setattr(writer, "write_shard_file", self.write_shard_file)  # noqa: B010

    def write_shard_file(self, *arguments: Any) -> Any:
        """Write a part, with the fault that there is."""
        if self.fault is None:
            return self._write_file(*arguments)
        return self.fault(lambda: self._write_file(*arguments))


@dataclasses.dataclass
class Place:
    """Data and train states of all tries, to write and to load; a step sets a state as a whole."""

    columns: Columns
    context: RuntimeContext
    dumped: ShardedModel
    loaded: ShardedModel

    @classmethod
    def of(cls, data: str, ids: str, config: Config, context: RuntimeContext) -> Place:
        """State of tables with or without a vocabulary."""
        columns = open_columns(Config.of(data_path=data, vocabulary=ids))
        dumped, loaded = (
            build_train_state(columns, config, context, make_model, make_loss(columns, config))
            for _ in range(2)
        )
        return cls(columns, context, dumped, loaded)


def write_all(train_state: ShardedModel, step: int) -> None:
    """Make a model what it is after a step."""
    write_step(tensors_of(train_state), step)
    write_rows(dynamic_rows(train_state.model), step)


def dump_with_faults(
    place: Place, config: Config, faults: Faults, fault_of: dict[int, Any], last: int
) -> dict[str, Any]:
    """Write a checkpoint after each step, with a fault on the last rank in some: what is said and left."""
    columns, context, train_state = place.columns, place.context, place.dumped
    is_last = context.rank == context.world_size - 1
    said: list[str] = []
    seconds: list[float] = []
    context = dataclasses.replace(context)
    object.__setattr__(context, "say", lambda text, tagged=True: said.append(text))
    tensors, shares, end = tensors_of(train_state), dynamic_rows(train_state.model), None
    try:
        with checkpointing(columns, config, context) as checkpointer:
            write_all(train_state, 0)
            checkpointer.begin(train_state, checkpointer.start)
            for step in range(1, last + 1):
                faults.fault = fault_of.get(step) if is_last else None
                write_all(train_state, step)
                if faults.fault is diverged:
                    spoil(tensors, shares, step)
                if config.checkpoint.inc_dump:
                    mark_step(checkpointer, tensors, step)
                start = time.monotonic()
                tell(checkpointer, Progress(step, 0, step))
                seconds.append(time.monotonic() - start)
                if config.checkpoint.async_dump:
                    # The fault is this step's alone.
                    checkpointer.writer.finish()
    except UserError as error:
        end = str(error)
    faults.fault = None
    return {"said": said, "seconds": seconds, "end": end, **look(place, Path(config.checkpoint.save_dir))}


def look(place: Place, save_dir: Path) -> dict[str, Any]:
    """The newest checkpoint, every one held against its step after a load, and what is half done."""
    newest = newest_in(save_dir)
    assert newest is not None
    train_state, context = place.loaded, place.context
    mine: list[str] = []
    for folder in (*full_checkpoints_in(save_dir), *deltas_in(save_dir)):
        write_all(train_state, 99)
        step = restore(chain_at(folder), train_state, place.columns, context).progress.step
        found = differing(tensors_of(train_state), step)
        found += differing_rows(dynamic_rows(train_state.model), step)
        mine += [f"{folder.name}: {what}" for what in found]
    everyones: list[list[str]] = [[]] * context.world_size
    dist.all_gather_object(everyones, mine)
    return {"newest": newest.name, "differing": everyones, "leftovers": leftovers(save_dir)}


def main() -> None:
    """Go through all faults; rank 0 writes what came of them."""
    warnings.filterwarnings("ignore")
    # Without this the limit would be told by a signal that ends the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    results, data, save_dir, *modes = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]
    context, config = init_runtime(Config()), Config.of(dump_every=1, embedding_dim=8)
    faults = Faults()
    found: dict[str, Any] = {}
    for mode in modes:
        ids = MODES[mode].get("vocabulary", "schema")
        place = Place.of(data, ids, config.replaced(**(DYNAMIC if ids == "dynamic" else {})), context)
        found[mode] = {}
        for name, (fault_of, last) in FAULTS.items():
            of_mode = config.replaced(save_dir=str(save_dir / mode / name), **MODES[mode])
            found[mode][name] = dump_with_faults(place, of_mode, faults, fault_of, last)
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
