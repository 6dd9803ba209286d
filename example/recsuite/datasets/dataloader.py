"""Batches as a pure function of position, and the loader that gets them from a pool of workers.

An item of the data set is a whole batch, asked for by (split, epoch, step): nothing is drawn, nothing is
remembered, so any number of workers of any start method gives the same batches, bit for bit. A worker reads
memory-mapped columns and fills numpy arrays in shared memory; they become tensors in the main process. What
this module imports, a worker imports: no torch, no TorchRec, no pandas.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.features import ENTITIES, UNKNOWN_ROW
from recsuite.datasets.mapped import MappedColumn
from recsuite.datasets.shuffle import shuffled
from recsuite.errors import UserError, counted
from recsuite.runtime.host import allowed_cores, spare_cores
from recsuite.runtime.launch import Launch, read_launch

if TYPE_CHECKING:
    import torch

    from recsuite.workers.pool import WorkerPool


SPLITS = ("train", "validation", "test", "catalogue")
# Small batches are shuffled together: numpy's overhead for each would be more than the work.
POSITIONS_AT_ONCE = 32_768
# Of so many training ratings one counts as that of an unknown user.
FORGOTTEN_EVERY = 64
# What --num_workers auto measures, and the share of time below which waiting is not worth a process.
WARM_UP_STEPS = 5
TIMED_STEPS = 20
WAIT_WORTH_A_WORKER = 0.02


class Request(NamedTuple):
    """Which batch: step `step` of pass `epoch` over the split "train", "validation" or "test", both counted
    from 0; or over the "catalogue", where each movie has a row.

    first: the place in the pass at which step 0 begins; a pass that was interrupted goes on from there, on
    any number of ranks.
    """

    split: str
    epoch: int
    step: int
    first: int = 0

    def __str__(self) -> str:
        begin = f", counted from rating {self.first:,}" if self.first else ""
        what = "movies" if self.split == "catalogue" else f"{self.split} ratings"
        return f"step {self.step + 1} of epoch {self.epoch + 1} over the {what}{begin}"


class Batch(NamedTuple):
    """One rank's part of a global batch, B rows, as plain tensors.

    `values` (int64) and `lengths` (int32 [features * B]) are those of a KeyedJaggedTensor whose keys are the
    data set's features in order. `ratings` is float32 [B]. `weights` is float32 [B]: 0 for the rows that pad
    the last batch, and for real rows global batch size / real rows in the global batch, so that the mean
    over ranks of the weighted mean over B is the mean over real rows. `history_ratings` is float32, one for
    each value of the feature "history".
    """

    values: torch.Tensor
    lengths: torch.Tensor
    ratings: torch.Tensor
    weights: torch.Tensor
    history_ratings: torch.Tensor


class Lists(NamedTuple):
    """A feature with lists for n ratings: the values, list after list, and how many are each rating's, [n].

    padding: how many unknown rows stand for a row that pads the batch.
    """

    values: np.ndarray
    counts: np.ndarray
    padding: int


class RatingBatches:
    """The batches of one rank. Pickles to paths and numbers; columns are mapped where they are first read."""

    def __init__(self, columns: Columns, config: Config, rank: int, world_size: int) -> None:
        self.folder = columns.folder
        self.tables = columns.tables
        self.ranges = {split: columns.range_of(split) for split in SPLITS}
        self.batch_size = config.loader.batch_size
        self.history = config.data.history
        self.seed = config.runtime.seed
        self.rank = rank
        self.world_size = world_size
        self._with_lists = {
            entity: [
                table.name for table in self.tables if table.feature.multi and table.feature.entity == entity
            ]
            for entity in ENTITIES
        }
        self._place_of_user = columns.place_of("user")
        self._columns: dict[str, MappedColumn] = {}
        # The positions of the last steps asked for, and which steps those are.
        self._block: tuple[tuple[str, int, int, int], np.ndarray] | None = None

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch can take: the longest list of every feature in every row."""
        values = sum(table.longest for table in self.tables)
        row = 8 * values + 4 * len(self.tables) + 4 + 4 + 4 * self.history
        # Each array begins on a cache line.
        return self.batch_size * row + 64 * len(Batch._fields)

    def num_steps(self, split: str, first: int = 0) -> int:
        """Batches in the pass over a split from place `first` on: the same number on every rank."""
        return -(-(len(self.ranges[split]) - first) // (self.batch_size * self.world_size))

    def step_sizes(self, split: str, first: int = 0) -> list[int]:
        """Ratings in each global batch of a pass: all are alike but the last."""
        return [self._step_size(split, step, first) for step in range(self.num_steps(split, first))]

    def __getitem__(self, request: Request) -> Batch:
        """The batch of a request, as tensors in memory of this process."""
        return to_tensors(self.make(request))

    def make(self, request: Request, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[np.ndarray]:
        """The arrays of a `Batch`, in its order, allocated by `empty`.

        Training ratings come in an order shuffled anew each epoch, each once. Padding has the unknown row of
        every feature, once, and no history: with weight 0 it gets no gradient.
        """
        for column in self._columns.values():
            column.check()
        rows = self._rows(request)
        num_real = len(rows)
        single, lists = self._find(rows)
        if request.split == "train":
            self._forget_users(single, request)
        history_ratings = np.zeros(0, np.float32)
        if self.history:
            told, counts = self._find_history(rows, "test_" if request.split == "test" else "")
            lists.append(Lists(told[:, 0], counts, padding=0))
            history_ratings = empty(len(told), np.float32)
            history_ratings[:] = told[:, 1].view(np.float32)
        values, lengths = self._join(single, lists, empty)
        ratings, weights = empty(self.batch_size, np.float32), empty(self.batch_size, np.float32)
        ratings[:num_real], ratings[num_real:] = rows[:, 2].view(np.float32), 0
        step_size = self._step_size(request.split, request.step, request.first)
        weights[:num_real] = self.batch_size * self.world_size / step_size
        weights[num_real:] = 0
        return values, lengths, ratings, weights, history_ratings

    def _forget_users(self, single: list[np.ndarray], request: Request) -> None:
        """Let a few ratings be of an unknown user, so that training learns what a new one is like."""
        begin = request.first + (request.step * self.world_size + self.rank) * self.batch_size
        # The order is another one in each pass, so these are others too.
        of_user = single[ENTITIES.index("user")]
        of_user[self._place_of_user, -begin % FORGOTTEN_EVERY :: FORGOTTEN_EVERY] = UNKNOWN_ROW

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}, "_block": None}

    def _step_size(self, split: str, step: int, first: int) -> int:
        full = self.batch_size * self.world_size
        return min(full, len(self.ranges[split]) - first - step * full)

    def _positions(self, request: Request) -> np.ndarray:
        """Positions in the rating columns, int64 [at most batch_size]: this rank's slice of the step."""
        num_steps = max(1, POSITIONS_AT_ONCE // self.batch_size)
        block, place = divmod(request.step, num_steps)
        wanted = (request.split, request.epoch, request.first, block)
        if self._block is None or self._block[0] != wanted:
            self._block = (
                wanted,
                self._block_positions(request, range(num_steps * block, num_steps * (block + 1))),
            )
        return self._block[1][place * self.batch_size : (place + 1) * self.batch_size]

    def _block_positions(self, request: Request, steps: range) -> np.ndarray:
        split = self.ranges[request.split]
        begins = (np.arange(steps.start, steps.stop) * self.world_size + self.rank) * self.batch_size
        positions = (request.first + begins[:, None] + np.arange(self.batch_size)).reshape(-1)
        positions = positions[: np.searchsorted(positions, len(split))]
        if request.split == "train":
            positions = shuffled(positions, len(split), self.seed, request.epoch)
        positions += split.start
        return positions

    def _rows(self, request: Request) -> np.ndarray:
        """What `rows.npy` holds of the ratings of a request, int32 [n, 4]."""
        positions = self._positions(request)
        if request.split != "catalogue":
            return self._column("rows").take(positions, axis=0)
        # As if the first user had rated each movie, before any other: who asks looks at the movies alone.
        rows = np.zeros((len(positions), 4), np.int32)
        rows[:, 1] = positions
        return rows

    def _find(self, rows: np.ndarray) -> tuple[list[np.ndarray], list[Lists]]:
        """Table rows of the features with one value, [features, n] for each entity; and those with lists."""
        single, lists = [], []
        for entity, ids in zip(ENTITIES, rows.T, strict=False):
            features = self._column(f"{entity}_features").take(ids, axis=0).T
            names = self._with_lists[entity]
            num_single = len(features) - 2 * len(names)
            single.append(features[:num_single])
            pairs = zip(features[num_single::2], features[num_single + 1 :: 2], strict=True)
            for name, (starts, counts) in zip(names, pairs, strict=True):
                known = self._column(f"{name}_values").take(places_of(starts, counts))
                lists.append(Lists(known, counts, padding=1))
        return single, lists

    def _find_history(self, rows: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """What the users rated before, rating after rating: table rows and the bits of ratings, [sum, 2]; and
        how many each rating has of them, [n]. prefix: of the columns that hold it.
        """
        begins, ends = self._column(f"{prefix}history_offsets").take(rows[:, 0]), rows[:, 3]
        starts = np.maximum(begins, ends - self.history)
        counts = ends - starts
        return self._column(f"{prefix}history").take(places_of(starts, counts), axis=0), counts

    def _join(
        self, single: list[np.ndarray], lists: list[Lists], empty: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The values and lengths of a `Batch`, of what was found for its real rows."""
        num_real, num_single = single[0].shape[1], sum(map(len, single))
        num_padding = self.batch_size - num_real
        lengths = empty((len(self.tables), self.batch_size), np.int32)
        last = num_single * self.batch_size
        values = empty(last + sum(len(part.values) + part.padding * num_padding for part in lists), np.int64)
        lengths[:num_single] = 1
        columns = values[:last].reshape(num_single, self.batch_size)
        np.concatenate(single, out=columns[:, :num_real])
        columns[:, num_real:] = UNKNOWN_ROW
        for place, part in enumerate(lists, start=num_single):
            lengths[place, :num_real], lengths[place, num_real:] = part.counts, part.padding
            first, last = last, last + len(part.values)
            values[first:last] = part.values
            first, last = last, last + part.padding * num_padding
            values[first:last] = UNKNOWN_ROW
        return values, lengths.reshape(-1)

    def _column(self, name: str) -> np.ndarray:
        folder = Path(self.folder)
        if not self._columns:
            # All at once: a training goes on when the files are removed, and comes to the test at its end.
            self._columns = {path.stem: MappedColumn(path) for path in sorted(folder.glob("*.npy"))}
        if name not in self._columns:
            self._columns[name] = MappedColumn(folder / f"{name}.npy")
        return self._columns[name].values


def places_of(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places start, start + 1, ... of every list, list after list, int64 [sum of counts]."""
    # They may be columns of a table of int32: numpy is slow where types differ and numbers lie apart.
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    ends = counts.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    # The n-th value of a list lies n places after its start.
    places += (starts - (ends - counts)).repeat(counts)
    return places


def to_tensors(arrays: Sequence[np.ndarray]) -> Batch:
    """The arrays of a batch as tensors that share their memory."""
    import torch

    return Batch(*map(torch.from_numpy, arrays))


class EpochSampler:
    """The requests of one pass, in order. Lives in the main process, which chooses the pass."""

    def __init__(self, dataset: RatingBatches) -> None:
        self.dataset = dataset
        self.split = "train"
        self.epoch = 0
        self.first = 0

    def __iter__(self) -> Iterator[Request]:
        # Bound now: workers ask ahead, and must not be asked for another pass in the middle of this one.
        split, epoch, first = self.split, self.epoch, self.first
        return (Request(split, epoch, step, first) for step in range(len(self)))

    def __len__(self) -> int:
        return self.dataset.num_steps(self.split, self.first)


class BatchLoader:
    """An iterable of batches, and the workers that make them; ends them as a context manager.

    Each `iter` is one pass over what the sampler names. A batch is the consumer's for as long as it holds it.
    """

    def __init__(self, dataset: RatingBatches, sampler: EpochSampler, config: Config) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.config = config
        self.pool: WorkerPool | None = None
        self._pin = _has_cuda()
        self._undecided = config.loader.num_workers == "auto"
        if config.loader.num_workers != 0:
            check_start_method(config.loader.mp_context)
            _warn(config, read_launch())
        if isinstance(config.loader.num_workers, int) and config.loader.num_workers > 0:
            self.pool = self._start_pool(config.loader.num_workers)

    def __len__(self) -> int:
        """Batches in a pass."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """One pass. The workers begin with it now, before its first batch is asked for.

        Raises:
            UserError: when the data cannot be read any more.
            WorkerError: when a worker raises, dies or is silent for --worker_timeout seconds.
        """
        requests = iter(self.sampler)
        if self._undecided:
            return self._try_out(requests)
        return self._rest(requests)

    def _rest(self, requests: Iterator[Request]) -> Iterator[Batch]:
        arrays = self.pool.batches(requests) if self.pool else map(self.dataset.make, requests)
        return map(self._finished, arrays)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, within seconds; harmless twice, and done at the exit of the interpreter too."""
        if self.pool is not None:
            self.pool.close()

    def _start_pool(self, num_workers: int) -> WorkerPool:
        from recsuite.workers.pool import WorkerPool

        config, launch = self.config, read_launch()
        return WorkerPool(
            self.dataset,
            num_workers=num_workers,
            prefetch_factor=config.loader.prefetch_factor,
            timeout=config.loader.worker_timeout,
            mp_context=config.loader.mp_context,
            rank=launch.rank,
            local_world_size=launch.local_world_size,
        )

    def _finished(self, arrays: Sequence[np.ndarray]) -> Batch:
        batch = to_tensors(arrays)
        if self._pin:
            # The copy keeps the ring's slots free of the device's pace: torch knows when it is done with
            # page-locked memory of its own.
            return Batch(*(tensor.pin_memory() for tensor in batch))
        return batch

    def _try_out(self, requests: Iterator[Request]) -> Iterator[Batch]:
        """The first steps without workers, timed; then the number of workers is decided.

        A batch does not depend on who makes it, so the pool may start in the middle of a pass.
        """
        start, making = time.perf_counter(), 0.0
        for steps, request in enumerate(requests, start=1):
            begin = time.perf_counter()
            batch = self._finished(self.dataset.make(request))
            making += time.perf_counter() - begin
            yield batch
            if steps == WARM_UP_STEPS:
                _synchronize()
                start, making = time.perf_counter(), 0.0
            if steps == WARM_UP_STEPS + TIMED_STEPS:
                break
        else:
            # A shorter pass tells too little; the next one goes on trying.
            return
        _synchronize()
        batch_seconds = making / TIMED_STEPS
        step_seconds = (time.perf_counter() - start) / TIMED_STEPS - batch_seconds
        num_workers, why = choose_num_workers(
            batch_seconds, step_seconds, allowed_cores(), read_launch().local_world_size
        )
        print(f"--num_workers auto: {why}")
        self._undecided = False
        if num_workers > 0:
            self.pool = self._start_pool(num_workers)
        yield from self._rest(requests)


def choose_num_workers(
    batch_seconds: float, step_seconds: float, num_cores: int, local_world_size: int
) -> tuple[int, str]:
    """How many workers a rank needs so that its steps do not wait, and the arithmetic in words."""
    share = batch_seconds / (batch_seconds + step_seconds)
    spare = spare_cores(local_world_size, num_cores)
    # A consumer that only receives has steps of no time.
    needed = math.ceil(batch_seconds / max(step_seconds, 1e-9))
    facts = (
        f"a batch takes {batch_seconds * 1e3:.2f} ms and a step {step_seconds * 1e3:.2f} ms; "
        f"{counted(num_cores, 'core')} for {counted(local_world_size, 'rank')} leave {spare} beside each"
    )
    if share <= WAIT_WORTH_A_WORKER:
        return 0, f"0, as waiting {share:.1%} of the time is worth no process ({facts})"
    if spare == 0:
        return 0, f"0, as there is no core for one ({facts})"
    if needed <= spare:
        return needed, f"{needed}, as {needed} keep pace ({facts})"
    return spare, f"{spare}, as {needed} would keep pace but there is no core for more ({facts})"


def check_start_method(mp_context: str) -> None:
    """Refuse to fork a process that uses CUDA.

    Raises:
        UserError: for fork, when CUDA is initialised.
    """
    if mp_context == "fork" and "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            raise UserError(
                "--mp_context fork cannot be used once CUDA is initialised, as a forked worker can neither "
                "use nor free what it inherits of it; give spawn or forkserver."
            )


def _warn(config: Config, launch: Launch) -> None:
    """Say, once on a machine, what is allowed and seldom wise."""
    if launch.local_rank != 0:
        return
    if config.loader.mp_context == "fork":
        print("--mp_context fork: workers inherit the locks of all threads, and may hang; spawn does not")
    num_workers = (
        0 if config.loader.num_workers == "auto" else int(config.loader.num_workers) * launch.local_world_size
    )
    if num_workers > allowed_cores():
        workers, cores = counted(num_workers, "data worker"), counted(allowed_cores(), "core")
        print(f"{workers} on this machine share {cores} with the ranks")


def build_dataloader(dataset: RatingBatches, sampler: EpochSampler, config: Config) -> BatchLoader:
    """A loader of whole batches: in this process for --num_workers 0, else from a persistent pool.

    Spawned, unless --mp_context says otherwise, because a forked worker inherits the CUDA context and the
    locks of every thread. Persistent, and one pool for training and evaluation: the sampler's requests say
    which. The workers start at once, while the caller goes on. Batches come out pinned where there is a CUDA
    device; the copy to the device is the main process's, after `init_runtime` has set it. Not collective.

    Raises:
        UserError: when the data set cannot be sent to a worker, or the machine cannot start that many.
    """
    return BatchLoader(dataset, sampler, config)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
