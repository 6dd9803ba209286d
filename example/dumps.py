"""The life of a model beyond one process: dumps and increments as it trains, and the way back from them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpoint import OPTIMIZER, DumpWriter, check_fit, features_of, read_parts, shapes_of, tensors_of
from columns import Columns
from config import NEWEST, Config
from errors import UserError
from incremental import TouchedRows, Vocabulary, apply_delta, write_delta
from manifest import (
    CONFIG,
    MANIFEST,
    VOCABULARY,
    Link,
    Manifest,
    Position,
    check_files,
    digest_of,
    read_config,
    read_manifest,
)
from runtime import RuntimeContext, together
from save_dir import (
    LOCK,
    State,
    check_chain,
    delta_name,
    deltas_in,
    dump_name,
    dumps_in,
    newest_in,
    prune,
    publish,
    retire,
    set_aside,
    state_at,
    step_of,
    writing,
)
from sharding import describe_plan
from stack import stack_versions
from train import Learner

# The status of a process that a SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM
# What changes the losses that follow, if it is changed at a resume.
LEARNING_FLAGS = ("epochs", "batch_size", "lr", "dense_lr", "weight_decay", "seed")
# Seconds that a rank waits for the parts of the others.
DUMP_DEADLINE = 3600


class DumpKeeper:
    """Dumps a training as it goes: at the end of every epoch, every --dump_every steps, and on SIGTERM.

    With --inc_dump the first is full, and the others hold what changed since the one before. A dump that
    fails for want of space or permission is said in one sentence, and the training goes on; the next one
    tries again. Collective: every rank.
    """

    def __init__(
        self, resumed: State | None, run: str, columns: Columns, config: Config, context: RuntimeContext
    ) -> None:
        self.resumed = resumed
        self.start = Position() if resumed is None else read_manifest(resumed.folder).position
        self.run = run
        self.columns = columns
        self.config = config
        self.context = context
        self.save_dir = Path(config.save_dir)
        self.vocabulary = Path(columns.folder) / VOCABULARY
        self.failure = ""
        # Ranks agree on the CPU, whatever they compute on; and a dump may go on beside the votes.
        deadline = timedelta(seconds=DUMP_DEADLINE)
        self.dump_group, self.vote_group = (
            dist.new_group(backend="gloo", timeout=deadline) for _ in range(2)
        )
        # What the next increment builds on.
        self.link: Link | None = None
        self._terminated = False
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        self._under_way: tuple[Path, Any] | None = None

    def begin(self, learner: Learner) -> None:
        """Load what is resumed, and dump what increments will build on."""
        if self.resumed is not None:
            load_checked(self.resumed, learner, self.columns, self.context)
        self.tensors = tensors_of(learner)
        self.shapes = shapes_of(self.tensors)
        self.plan = describe_plan(learner.model, self.columns, self.config)
        if self.config.inc_dump:
            self.touched = TouchedRows(learner.model, self.tensors)
            self.raw_values = Vocabulary(self.vocabulary)
            if self.resumed is None or self.resumed.deltas:
                self.dump(self.start)
            else:
                self._build_on(self.resumed.base)

    def after_step(self, position: Position) -> None:
        """Dump if it is time to, or if any rank was told to end; then this raises SystemExit."""
        every, stop = self.config.dump_every, self._any_terminated()
        at_end = position.samples == 0
        if stop or at_end or (every and position.step % every == 0):
            self._finish()
            if self.config.inc_dump and self.link is not None and not (at_end and self.config.dump):
                self.dump_increment(position)
            else:
                self.dump(position)
        if stop:
            self._finish()
            raise SystemExit(TERMINATED)

    def dump(self, position: Position) -> None:
        """Dump everything."""
        final = self.save_dir / dump_name(position.step)
        making = _making(final)
        describe = self._describe(position, link=None)
        writer = DumpWriter(
            making,
            describe,
            self.vocabulary,
            self.config,
            lambda: publish(making, final, self.config.keep),
        )
        save = dcp.async_save if self.config.async_dump else dcp.save
        # Should this one fail, the next one must be full again.
        self.link = None
        self._under_way = (final, None)
        try:
            response = save(self.tensors, storage_writer=writer, process_group=self.dump_group)
            self._under_way = (final, response)
        except CheckpointException as error:
            self._note_failure(final, _reason(error))
        if self.config.inc_dump:
            # What changes from here on, while the copy is written, is not in it.
            self.touched.clear()
        if not self.config.async_dump:
            self._finish()

    def close(self) -> None:
        """Wait for the last dump.

        Raises:
            UserError: when it failed.
            SystemExit: when the process was told to end.
        """
        self._finish()
        if self._terminated:
            raise SystemExit(TERMINATED)
        if self.failure:
            raise UserError(self.failure)

    @contextlib.contextmanager
    def obeying_sigterm(self) -> Iterator[None]:
        """Have a SIGTERM end the process after a dump instead of at once."""
        before = signal.signal(signal.SIGTERM, self._note_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _any_terminated(self) -> bool:
        """Whether any rank had been told to end one step ago; the ranks vote while they compute."""
        found = False
        if self._vote is not None:
            vote, work = self._vote
            work.wait()
            found = bool(vote.item())
        vote = torch.tensor(int(self._terminated))
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.vote_group, async_op=True)
        assert work is not None
        self._vote = (vote, work)
        return found

    def dump_increment(self, position: Position) -> None:
        """Dump what changed since the last dump, and the dense part."""
        assert self.link is not None
        final = self.save_dir / delta_name(position.step)
        making = _making(final)
        try:
            write_delta(
                making,
                self.touched.get_unique_ids(),
                self.tensors,
                self._describe(position, self.link),
                self.raw_values,
                self.config,
                lambda: publish(making, final, self.config.keep),
                self.dump_group,
            )
        except UserError as error:
            self._note_failure(final, str(error))
            return
        # Only now: what an increment failed to hold belongs to the next one.
        self.touched.clear()
        link = self.link
        self.link = Link(link.base, link.base_digest, link.sequence + 1, position.step)
        self._note_success(final)

    def _describe(self, position: Position, link: Link | None) -> Manifest:
        about = {
            "world_size": self.context.world_size,
            "plan": self.plan.splitlines(),
            "versions": stack_versions(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "num_train": self.columns.num_train,
        }
        vocabulary = digest_of(self.vocabulary)
        features = features_of(self.columns)
        return Manifest(self.run, position, self.shapes, (), vocabulary, OPTIMIZER, about, link, features)

    def _finish(self) -> None:
        """Wait for the dump that is under way, and say what became of it."""
        if self._under_way is None:
            return
        final, response = self._under_way
        self._under_way = None
        try:
            if isinstance(response, Future):
                response.result()
        except CheckpointException as error:
            self._note_failure(final, _reason(error))
            return
        if self.config.inc_dump:
            self._build_on(final)
        self._note_success(final)

    def _build_on(self, base: Path) -> None:
        self.link = Link(base.name, digest_of(base / MANIFEST), 1, step_of(base))

    def _note_success(self, final: Path) -> None:
        self.failure = ""
        self.context.say(f"dumped {final}")

    def _note_failure(self, final: Path, reason: str) -> None:
        self._under_way = None
        if self.context.rank == 0:
            shutil.rmtree(_making(final), ignore_errors=True)
        self.failure = (
            f"{final} could not be written ({reason}); the dumps before it are whole; make room, or give a "
            "--save_dir that can be written, and --resume."
        )
        self.context.say(self.failure)


def _making(final: Path) -> Path:
    return final.with_name(f".making-{final.name}")


def _reason(error: CheckpointException) -> str:
    """Why a dump failed, if the reason lies outside of the program."""
    reasons = [wrapped[0] for wrapped in error.failures.values()]
    if not all(isinstance(reason, OSError) for reason in reasons):
        raise error
    return str(getattr(reasons[0], "strerror", None) or reasons[0])


@contextlib.contextmanager
def keeping_dumps(columns: Columns, config: Config, context: RuntimeContext) -> Iterator[DumpKeeper]:
    """The only writer of --save_dir, and where it begins. Collective: every rank.

    Raises:
        UserError: when another training writes there, when the ranks do not share the folder, and when the
            last dump failed.
    """
    save_dir = Path(config.save_dir)
    with writing_together(config, context):
        if not config.resume:
            together(lambda: _begin_afresh(save_dir, context) if context.rank == 0 else None)
        resumed, run = together(lambda: _find_start(save_dir))
        runs = [run]
        dist.broadcast_object_list(runs, src=0)
        if resumed is not None:
            together(lambda: _check_continues(resumed, columns, config, context))
        keeper = DumpKeeper(resumed, runs[0], columns, config, context)
        with keeper.obeying_sigterm():
            yield keeper
            keeper.close()


@contextlib.contextmanager
def writing_together(config: Config, context: RuntimeContext) -> Iterator[None]:
    """`writing`, by rank 0 for all ranks. Collective: every rank.

    Raises:
        UserError: as `writing`, and when the ranks do not share the folder.
    """
    save_dir = Path(config.save_dir)
    with contextlib.ExitStack() as stack:
        together(lambda: stack.enter_context(writing(save_dir)) if context.rank == 0 else None)
        together(lambda: _check_shared(save_dir, context))
        yield


def _check_shared(save_dir: Path, context: RuntimeContext) -> None:
    if not (save_dir / LOCK).exists():
        raise UserError(
            f"Rank {context.rank} does not see what rank 0 wrote to --save_dir {save_dir}; give a folder "
            "that all machines share."
        )


def _begin_afresh(save_dir: Path, context: RuntimeContext) -> None:
    newest = newest_in(save_dir)
    if newest is not None:
        context.say(
            f"{save_dir} held {newest.name} of an earlier training, and all of that is now in "
            f"{set_aside(save_dir)}; --resume would have gone on from it"
        )


def _find_start(save_dir: Path) -> tuple[State | None, str]:
    """What to go on from, and the name of the run."""
    newest = newest_in(save_dir)
    if newest is None:
        return None, uuid.uuid4().hex
    return state_at(newest), read_manifest(newest).run


def _check_continues(state: State, columns: Columns, config: Config, context: RuntimeContext) -> None:
    """Refuse other ratings than those of the position, and say which flags have changed."""
    theirs, ours = read_manifest(state.folder).about.get("num_train"), columns.num_train
    if theirs != ours:
        raise UserError(
            f"{state.folder} is of a training on {theirs} ratings, and {columns.source} has {ours} here; "
            f"give the --data_path, --split and --test_fraction that its {CONFIG} names, or no --resume."
        )
    before = read_config(state.folder)
    changed = [
        f"--{name} {getattr(config, name)} (was {before.get(name)})"
        for name in LEARNING_FLAGS
        if getattr(config, name) != before.get(name)
    ]
    if changed:
        context.say(f"goes on with other flags than before: {', '.join(changed)}")


def choose_state(config: Config) -> State:
    """The state that --load and --until name.

    Raises:
        UserError: when there is none.
    """
    return state_at(Path(config.save_dir if config.load == NEWEST else config.load), config.until)


def load_checked(state: State, learner: Learner, columns: Columns, context: RuntimeContext) -> Manifest:
    """`load_state`, whose refusal names the newest good dump beside the one that is refused. Collective.

    Raises:
        UserError: see `load_state`.
    """
    try:
        return load_state(state, learner, columns, context)
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; {_suggestion(state)}.") from None


def load_state(state: State, learner: Learner, columns: Columns, context: RuntimeContext) -> Manifest:
    """Put a learner into a state, after all of it was checked. Collective: every rank.

    Raises:
        UserError: on every rank, when anything is missing, damaged, or made for another model; the learner is
            as it was.
    """
    tensors = tensors_of(learner)
    shapes = shapes_of(tensors)
    manifest: Manifest = together(lambda: _checked(state, shapes, columns, context))
    read_parts(state.base, tensors)
    for delta in state.deltas:
        apply_delta(delta, read_manifest(delta), tensors)
    context.say(_describe_load(state, manifest))
    return manifest


def _checked(
    state: State, shapes: dict[str, tuple[list[int], str]], columns: Columns, context: RuntimeContext
) -> Manifest:
    """The manifest of the state, after everything was held against it, this model and these data."""
    last = check_chain(state)
    check_fit(state.folder, last, shapes, columns)
    # The ranks share the work of reading every byte.
    for folder in (state.base, *state.deltas):
        check_files(folder, read_manifest(folder), context.rank, context.world_size)
    return last


def _describe_load(state: State, manifest: Manifest) -> str:
    tables = {name: shape for name, (shape, _) in manifest.tensors.items() if name.startswith("tables.")}
    rows = [shape[0] for name, shape in tables.items() if name.endswith(".weight")]
    states = [shape[0] for name, shape in tables.items() if name.endswith(".momentum1")]
    replayed = f" and {len(state.deltas)} increments after it" if state.deltas else ""
    return (
        f"loaded {state.base}{replayed}: {len(rows)} tables with {sum(rows):,} rows and {sum(states):,} "
        f"optimizer rows, {len(manifest.tensors)} tensors, missing 0, unexpected 0; step "
        f"{manifest.position.step:,}, written by {manifest.about['world_size']} ranks"
    )


def _suggestion(state: State) -> str:
    """The newest state of the same folder, older or not, that is whole."""
    save_dir = state.base.parent
    for folder in sorted([*dumps_in(save_dir), *deltas_in(save_dir)], key=step_of, reverse=True):
        with contextlib.suppress(UserError):
            other = state_at(folder)
            check_chain(other)
            for path in (other.base, *other.deltas):
                check_files(path, read_manifest(path))
            return f"the newest good one there is {folder}"
    return f"there is no good one in {save_dir}"


def compact(learner: Learner, columns: Columns, config: Config, context: RuntimeContext) -> None:
    """Fold the newest increments into a full dump, and remove what it replaces. Collective: every rank.

    Raises:
        UserError: when there is no state, when it is not whole, or when the new dump cannot be written.
    """
    save_dir = Path(config.save_dir)
    with writing_together(config, context):
        state = together(lambda: state_at(save_dir))
        if state.deltas:
            keeper = DumpKeeper(state, read_manifest(state.base).run, columns, config, context)
            keeper.begin(learner)
            keeper.dump(keeper.start)
            keeper.close()
        if context.rank == 0:
            _retire_folded(save_dir, config.keep)
        dist.barrier()
    context.say(f"folded {len(state.deltas)} increments into {save_dir / dump_name(step_of(state.folder))}")


def _retire_folded(save_dir: Path, keep: int) -> None:
    """Remove the increments up to the newest dump, and the dumps that only they kept."""
    newest = dumps_in(save_dir)[-1]
    # The newest first: what is left of a chain, if this is cut short, has no gap.
    for delta in reversed(deltas_in(save_dir)):
        if step_of(delta) <= step_of(newest):
            retire(delta)
    prune(save_dir, keep)
