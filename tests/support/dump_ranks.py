"""Program of each rank of a launch in `test_dumps.py`: dump_ranks.py FOLDER PLACE write|read...

PLACE holds the checkpoints: the folder, or a URL of an object store.

"write" trains small models, each drawn from DUMP_SEED, of which it writes deltas and, at the same steps,
full checkpoints; then it trains one that is ended and resumed. "read" loads every checkpoint of one of the
models that each launch wrote, and resumes what another number of ranks was ended at; "read_all" loads all
models, and resumes what all other numbers of ranks were ended at. "end" and "go_on" do no more than end a
training, and resume it on another number of ranks; "write_cases" and "read_cases" do no more than write the
small models, and load those of 2 ranks. Rank 0 writes what was found: digests of whole tensors, marks of
rows, metrics and losses.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.places import ObjectPath, folder_at
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, end_process, init_runtime
from tests.support.steps import tell
from tests.support.trainings import advance, digests, evaluate, feed_of, gather, train

SEED = int(os.environ.get("DUMP_SEED", "0"))
# The numbers of ranks that write and read.
RANKS = (1, 2, 3)
# The two ways in which every checkpoint is written.
KINDS = ("inc_dump", "dump")
NUM_STEPS_AFTER = 3
# After this step the models are evaluated; no checkpoint is due there.
EVALUATED_AT = 1
# Of the training that is ended: what any number of ranks divides, and what one rank has when others resume.
GLOBAL_BATCH_SIZE = 300
OTHER_BATCH_SIZE = 350
# Rows per rank from which a table is split: the users of the large data on 3 ranks, no table of the small.
ROWS_WORTH_SPLITTING = 110


@dataclass(frozen=True)
class Case:
    """A model, its data, the optimizer of its tables by its public name, whether these have several widths,
    and when it is written: every so many steps, or at the steps of a schedule.
    """

    num_ratings: int
    global_batch_size: int
    last_step: int
    settings: dict[str, Any]
    schedule: tuple[int, ...] = ()
    dump_every: int = 0
    rule: str = "RowWiseAdagrad"
    has_widths: bool = False

    def every_at(self, step: int) -> int:
        """--dump_every, as it is at a step."""
        return self.dump_every or (step if step in self.schedule else 0)

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is due at a step that ends no epoch."""
        return self.every_at(step) > 0 and step % self.every_at(step) == 0


def draw(seed: int) -> tuple[tuple[int, int], dict[str, Case]]:
    """The sizes of two data sets, and a case of each: tables of the small one are split by rows on one rank
    alone.
    """
    chance = random.Random(seed)
    small, large = chance.randrange(2_400, 3_000), chance.randrange(9_000, 10_000)
    cases = {"periodic": _draw_periodic(chance, large), "async": _draw_async(chance, small)}
    return (small, large), {**cases, "sequence": _draw_sequence(chance, small)}


def _draw_periodic(chance: random.Random, num_ratings: int) -> Case:
    """Checkpoints every few steps, over the end of an epoch of 4 to 7 steps."""
    batch_size = 6 * chance.randrange(num_ratings * 8 // 10 // 42 + 1, num_ratings * 8 // 10 // 24)
    settings = {**_draw_settings(chance), "pipeline": "sparse_dist", "history": 0}
    every = chance.choice((2, 3))
    return Case(num_ratings, batch_size, 9, settings, dump_every=every, rule="Adam", has_widths=True)


def _draw_async(chance: random.Random, num_ratings: int) -> Case:
    """Checkpoints that are written beside the training, at any steps."""
    schedule = tuple(sorted(chance.sample(range(EVALUATED_AT + 1, 12), 3)))
    batch_size = 6 * chance.randrange(20, 45)
    of_case = {"pipeline": "plain", "history": chance.randrange(1, 8), "async_dump": True}
    return Case(
        num_ratings, batch_size, schedule[-1], {**_draw_settings(chance), **of_case}, schedule, rule="SGD"
    )


def _draw_sequence(chance: random.Random, num_ratings: int) -> Case:
    """Checkpoints of a model of sequences, in the middle of runs of events."""
    settings = {**_draw_settings(chance), "task": "sequence", "split": "leave_one_out", "negatives": 16}
    of_case = {"pipeline": "sparse_dist", "history": chance.randrange(2, 8), "mlp_dims": (8,)}
    batch_size = 6 * chance.randrange(10, 20)
    return Case(num_ratings, batch_size, 6, {**settings, **of_case}, dump_every=2)


def _draw_settings(chance: random.Random) -> dict[str, Any]:
    return {"seed": chance.randrange(1000), "embedding_dim": chance.choice((4, 8, 12, 20, 32))}


SIZES, CASES = draw(SEED)


def main() -> None:
    """Write and read."""
    folder, place = Path(sys.argv[1]), folder_at(sys.argv[2])
    context = init_runtime(Config())

    from recsuite.sharding import plan

    plan.ROWS_PER_RANK_WORTH_SPLITTING = ROWS_WORTH_SPLITTING
    for action in sys.argv[3:]:
        found = act(action, folder, place, context)
        if context.rank == 0:
            (folder / f"{action}-{context.world_size}.json").write_text(json.dumps(found))
    cleanup_runtime()


def act(action: str, folder: Path, place: Path, context: RuntimeContext) -> dict[str, Any]:
    if action == "write":
        return write_all(folder, place, context)
    if action == "end":
        return resume(place / "resume", ended_config(folder, context), context, adagrad(), several_widths)
    if action == "go_on":
        return go_on(place / "resume", f"resumed-{context.world_size}", folder, context)
    if action == "write_cases":
        return write_cases(folder, place, context)
    if action == "read_cases":
        return {name: read_case_of(2, name, folder, place, True, context) for name in CASES}
    is_all = action == "read_all"
    return {str(writers): read_from(writers, folder, place, is_all, context) for writers in RANKS}


def config_of(folder: Path, case: Case, context: RuntimeContext) -> Config:
    path, batch_size = str(folder / str(case.num_ratings)), case.global_batch_size
    return Config.of(data_path=path, batch_size=batch_size, epochs=2, keep=100, **case.settings)


def write_cases(folder: Path, place: Path, context: RuntimeContext) -> dict[str, Any]:
    by = place / f"by-{context.world_size}"
    return {
        name: write_case(by / name, case, config_of(folder, case, context), context)
        for name, case in CASES.items()
    }


def write_all(folder: Path, place: Path, context: RuntimeContext) -> dict[str, Any]:
    by, ended = place / f"by-{context.world_size}", ended_config(folder, context)
    found: dict[str, Any] = {"cases": write_cases(folder, place, context)}
    found["resume"] = resume(by / "resume", ended, context, adagrad(), several_widths)
    if context.world_size > 1:
        sequence = ended.replaced(task="sequence", history=5, negatives=64, embedding_dim=8)
        found["resume sequence"] = resume(by / "resume-sequence", sequence, context, None, None)
    return found


def write_case(folder: Path, case: Case, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Write deltas and full checkpoints as a training does; what the model was then, and what came after."""
    from example import make_loss
    from recsuite.checkpoint.folder import deltas_in, step_of
    from recsuite.checkpoint.writer import tensors_of
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.training.progress import Progress
    from recsuite.training.state import build_train_state

    columns = open_columns(config)
    train_state = build_train_state(
        columns, config, context, maker_of(case), make_loss(columns, config), tables=rule_of(case)
    )
    checkpointers = [
        begin_checkpointer(folder / kind, kind, train_state, columns, config, context) for kind in KINDS
    ]
    states = {0: digests(tensors_of(train_state), context)}
    epoch_ends = []

    def after_step(progress: Progress, loss: float) -> None:
        for checkpointer in checkpointers:
            checkpointer.config = checkpointer.config.replaced(dump_every=case.every_at(progress.step))
            tell(checkpointer, progress, loss)
        if progress.samples == 0:
            epoch_ends.append(progress.step)
        if progress.samples == 0 or case.is_due(progress.step):
            states[progress.step] = digests(tensors_of(train_state), context)

    trained = (train_state, columns, config, context, after_step)
    _, progress = advance(Progress(), EVALUATED_AT, *trained)
    marks = {"before": marked(checkpointers[0], context)}
    evaluate(train_state, columns, config, context)
    marks |= {"after": marked(checkpointers[0], context), "evaluated": evaluated(columns, config, context)}
    _, progress = advance(progress, case.last_step - progress.step, *trained)
    metrics = evaluate(train_state, columns, config, context)
    losses, _ = advance(progress, NUM_STEPS_AFTER, train_state, columns, config, context)
    for checkpointer in checkpointers:
        checkpointer.close()
    increments = [step_of(path) for path in deltas_in(folder / "inc_dump")]
    return {
        "states": states,
        "epoch_ends": epoch_ends,
        "increments": increments,
        "sharding": sharding_of(train_state),
        "marks": marks,
        "metrics": metrics,
        "losses": losses,
    }


def begin_checkpointer(
    folder: Path, kind: str, train_state: Any, columns: Any, config: Config, context: RuntimeContext
) -> Any:
    """A checkpointer that has written what was there before the first step."""
    from recsuite.checkpoint.checkpointer import Checkpointer
    from recsuite.checkpoint.folder import writing
    from recsuite.training.progress import Progress

    settings: dict[str, Any] = {kind: True, "save_dir": str(folder)}
    if context.rank == 0:
        with writing(folder):
            pass
    checkpointer = Checkpointer(None, "run", columns, config.replaced(**settings), context)
    checkpointer.begin(train_state, checkpointer.start)
    if kind == "dump":
        checkpointer.writer.write_full(Progress())
    return checkpointer


def sharding_of(train_state: Any) -> dict[str, str]:
    plans = train_state.model.plan.plan.values()
    return {table: parameter.sharding_type for plan in plans for table, parameter in plan.items()}


def marked(checkpointer: Any, context: RuntimeContext) -> dict[str, list[int]]:
    """Rows of whole tables that count as changed since the last delta. Collective."""
    mine = {
        name: (table.changed_rows() + table.first).tolist()
        for name, table in checkpointer.writer.tables.items()
    }
    return united(mine, context)


def evaluated(columns: Any, config: Config, context: RuntimeContext) -> dict[str, list[int]]:
    """Rows of whole tables that an evaluation looks up. Collective."""
    mine: dict[str, list[int]] = {}
    for batch in feed_of(columns, config, context).batches("test", 0):
        for table, jagged in batch.features.to_dict().items():
            mine.setdefault(table, []).extend(jagged.values().tolist())
    return united(mine, context)


def united(mine: dict[str, list[int]], context: RuntimeContext) -> dict[str, list[int]]:
    """Of every table the rows of all ranks, each once. Collective."""
    everyones = gather(mine, context)
    tables = {table for rows in everyones for table in rows}
    return {table: sorted({row for rows in everyones for row in rows.get(table, ())}) for table in tables}


def cases_of(writers: int, readers: int, all_of_them: bool) -> list[str]:
    """Cases that `readers` ranks read of those that `writers` wrote.

    All of them, or one that is chosen so that every number of ranks writes and reads each.
    """
    names = list(CASES)
    return names if all_of_them else [names[(writers + readers) % len(names)]]


def is_resumed(writers: int, readers: int, all_of_them: bool) -> bool:
    """True if `readers` ranks resume a training that ended on `writers`.

    On each other number of ranks, or on 2 from 1, on 3 from 2, and on 1 from 3.
    """
    return writers != readers if all_of_them else readers == writers % len(RANKS) + 1


def read_from(
    writers: int, folder: Path, place: Path, all_of_them: bool, context: RuntimeContext
) -> dict[str, Any]:
    """Load what a number of ranks wrote, and resume what it was ended at."""
    by, readers = place / f"by-{writers}", context.world_size
    found: dict[str, Any] = {"cases": {}}
    for name in cases_of(writers, readers, all_of_them):
        found["cases"][name] = read_case_of(writers, name, folder, place, all_of_them, context)
    if is_resumed(writers, readers, all_of_them):
        found["resumed"] = go_on(by / "resume", f"resumed-{readers}", folder, context)
    return found


def go_on(place: Path, name: str, folder: Path, context: RuntimeContext) -> dict[str, Any]:
    """Resume a copy of what another number of ranks was ended at."""
    copy(place / "interrupted", place / name, context)
    config = ended_config(folder, context).replaced(batch_size=OTHER_BATCH_SIZE)
    return train(place / name, config, context, rule=adagrad(), maker=several_widths, resume=True)


def maker_of(case: Case) -> Any:
    from example import make_model

    return several_widths if case.has_widths else make_model


def several_widths(data: Any, args: Any) -> Any:
    # Not at the top: it imports torch.
    from tests.support import several_widths as own

    return own.several_widths(data, args)


def rule_of(case: Case) -> Any:
    import recsuite

    return getattr(recsuite, case.rule)(0.01)


def read_case_of(
    writers: int, name: str, folder: Path, place: Path, all_of_them: bool, context: RuntimeContext
) -> dict[str, Any]:
    config = config_of(folder, CASES[name], context)
    return read_case(place / f"by-{writers}" / name, CASES[name], all_of_them, config, context)


def read_case(
    folder: Path, case: Case, all_of_them: bool, config: Config, context: RuntimeContext
) -> dict[str, Any]:
    """By kind, what loading every checkpoint, or every other one, gave, and the steps after the newest."""
    from example import make_loss
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.training.state import build_train_state

    columns = open_columns(config)
    # Other initial weights, so that nothing right is there by chance; the second kind finds what the steps
    # after the first left.
    other = config.replaced(seed=config.runtime.seed + 1)
    train_state = build_train_state(
        columns, other, context, maker_of(case), make_loss(columns, other), tables=rule_of(case)
    )
    found = {}
    for kind in KINDS:
        states, progress = load_states(folder / kind, all_of_them, train_state, columns, context)
        metrics = evaluate(train_state, columns, config, context)
        losses, _ = advance(progress, NUM_STEPS_AFTER, train_state, columns, config, context)
        found[kind] = {"states": states, "metrics": metrics, "losses": losses}
    return found


def load_states(
    folder: Path, all_of_them: bool, train_state: Any, columns: Any, context: RuntimeContext
) -> tuple[dict[int, dict[str, str]], Any]:
    """Model after the load of each checkpoint of a save_dir, and the progress of the newest.

    Of every checkpoint, or of every other one and the newest.
    """
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.folder import deltas_in, full_checkpoints_in, step_of
    from recsuite.checkpoint.restore import restore
    from recsuite.checkpoint.writer import tensors_of

    states = {}
    # Also backwards and twice: a load depends on nothing that was there before.
    folders = [*full_checkpoints_in(folder), *deltas_in(folder)]
    for path in (*folders[:: -1 if all_of_them else -2], folders[-1]):
        progress = restore(chain_at(path), train_state, columns, context).progress
        states[step_of(path)] = digests(tensors_of(train_state), context)
    return states, progress


def ended_config(folder: Path, context: RuntimeContext) -> Config:
    """Of the training that is ended, on the small data."""
    path = str(folder / str(SIZES[0]))
    return Config.of(data_path=path, batch_size=GLOBAL_BATCH_SIZE, epochs=2, keep=100)


def adagrad() -> Any:
    import recsuite

    return recsuite.Adagrad(0.04)


def resume(folder: Path, config: Config, context: RuntimeContext, rule: Any, maker: Any) -> dict[str, Any]:
    """A training, and the same one, ended by a SIGTERM to one rank and resumed."""
    whole = train(folder / "whole", config, context, rule=rule, maker=maker, dump=True)
    end_at = len(whole["losses"]) // 2 + 3
    before = train(folder / "ended", config, context, end_at, rule, maker, inc_dump=True, dump_every=4)
    copy(folder / "ended", folder / "interrupted", context)
    after = train(folder / "ended", config, context, rule=rule, maker=maker, resume=True)
    return {"whole": whole, "end_at": end_at, "before": before, "after": after}


def copy(source: Path, target: Path, context: RuntimeContext) -> None:
    import torch.distributed as dist

    if context.rank == 0 and isinstance(source, ObjectPath):
        from recsuite.extras.stores.urls import filesystem

        fs, path = filesystem(source.url)
        fs.copy(f"{path}/", filesystem(str(target))[1], recursive=True)
    elif context.rank == 0:
        shutil.copytree(source, target, symlinks=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    end_process(0)
