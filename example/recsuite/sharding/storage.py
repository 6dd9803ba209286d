"""Rows of tables on a CPU, in memory or in files on a local disk: `--storage`.

    step -> rows in memory, `--memory_budget`: row -> slot        read and changed in place
                 ^ rows of the next batches, before their step
                 v changed rows, when another row takes the slot, in the order of the file
            mapped files: weights, state of the optimizer         what checkpoints read and write

A step computes with the slots as it computes with a whole table, so results are the same to the last bit. The
files have no names: they end with the process, and a training continues from its checkpoints.

n: rows; D: numbers in a row.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from recsuite.errors import UserError
from recsuite.files import explained
from recsuite.runtime.host import shown_bytes
from recsuite.sharding.table_rules import TableRule

# Reads of a disk at the same time: they wait for it, and use no core.
READERS = 16
# Fewer rows are not worth another reader.
ROWS_PER_READER = 32
# Memory of a slot besides the row: see the arrays of `RowsOnDisk`.
BYTES_BESIDE_A_SLOT = 4 + 8 + 8 + 1 + 1
# Changed rows of the same pages that are written back with those that leave: at most so many for each.
MOST_BESIDE = 4
# Rows to copy at once, so that copies need little memory.
CHUNK = 2**16


class TableRows:
    """Rows in memory, with the state of their optimizer.

    weights: float32 [n, D]; state: by slot, float32 [n] or [n, D]; storage: of what is not in memory.
    """

    storage: DiskStorage | None = None

    def __init__(self, weights: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        self.weights, self.state = weights, state

    @property
    def on_disk(self) -> RowsOnDisk | None:
        """The rows of the group, if they are on a disk."""
        return None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and state by slot."""
        return {"weight": self.weights, **self.state}

    def look_up(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the weights of some rows, int64 [k], to `out`, float32 [k, D]."""
        torch.index_select(self.weights, 0, rows, out=out)

    def update(
        self, rule: TableRule, rows: torch.Tensor, gradients: torch.Tensor, rate: torch.Tensor, number: int
    ) -> None:
        """Make a step of an optimizer, see `TableRule.update`."""
        rule.update(self.weights, self.state, rows, gradients, rate, number)

    def insert(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Replace distinct rows, int64 [k], by weights, float32 [k, D], with a state of zero."""
        self.weights.index_copy_(0, rows, weights)
        for state in self.state.values():
            state.index_fill_(0, rows, 0)

    def flush(self) -> None:
        """Bring the tensors up to date, before they are read."""

    def forget(self) -> None:
        """Bring the tensors up to date, before they are changed."""

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that may be as large as the table, in the host's memory or a file."""
        # In the memory of the host: another device has less to spare.
        return tensor.to("cpu", copy=True)

    def taken(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of some rows, int64 [k], of a tensor; call `flush` before."""
        return values.index_select(0, rows)


class RowsInHostMemory(TableRows):
    """Rows in the host's memory with a cache on a GPU. kernel: FBGEMM's, which has both.

    TorchRec brings the tables up to date only in `state_dict`.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__(torch.empty(0), {})
        self.kernel = kernel

    @override
    def flush(self) -> None:
        self.kernel.flush()

    @override
    def forget(self) -> None:
        self.kernel.flush()
        self.kernel.reset_cache_states()


@dataclass(frozen=True)
class DiskStorage:
    """Storage of tables on a disk.

    folder: on a local disk; tables: the names of those on the disk; shares: the part of `budget` for the
    tables of each width; budget: bytes of this rank for rows in memory.
    """

    folder: str
    tables: frozenset[str]
    shares: Mapping[int, float]
    budget: int

    def full(self, shape: Sequence[int], value: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in a file, of which single pages are read, see `zeros`."""
        filled = self.zeros(shape, dtype).fill_(value)
        if filled.numel():
            advise(filled, mmap.MADV_RANDOM)
        return filled

    def zeros(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return zeros in a mapped file without a name.

        Raises:
            UserError: when the disk has no room.
        """
        number = math.prod(shape)
        size = max(1, number) * dtype.itemsize
        with (
            explained(
                f"Cannot make a file of {shown_bytes(size)} in --storage_dir {self.folder}",
                "make room, or give another folder",
            ),
            tempfile.TemporaryFile(dir=self.folder, buffering=0) as file,
        ):
            # Reserved, because a write to a mapped page on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, size)
            path = f"/proc/self/fd/{file.fileno()}"
            return torch.from_file(path, shared=True, size=number, dtype=dtype).view(*shape)


class FilesForTables(TorchFunctionMode):
    """While it is active, FBGEMM's tables are made in files: `torch.zeros` with a number of elements."""

    def __init__(self, storage: DiskStorage, sizes: Sequence[int]) -> None:
        super().__init__()
        self.storage, self.sizes = storage, [size for size in sizes if size]
        self._made: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args and args[0] in self.sizes:
            self._made.append(self.storage.zeros([args[0]]))
            return self._made[-1]
        # TorchRec's initial rows would be overwritten by `plan.fill_tables`.
        if func is torch.Tensor.uniform_ and any(_is_part(args[0], whole) for whole in self._made):
            return args[0]
        return func(*args, **kwargs)


def _is_part(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@dataclass
class StorageCounts:
    """Counts of rows: requested, loaded from the disk, of these that a step waited for, written back."""

    requested: int = 0
    loaded: int = 0
    late: int = 0
    written: int = 0


class RowsOnDisk(TableRows):
    """Rows in mapped files, with some of them in memory. One thread calls it.

    The newest batches' rows stay in memory; among the others a clock evicts those that were requested least
    ("GCLOCK", after Smith, "Sequentiality and Prefetching in Database Systems", 1978).

    slot_of: row to slot or -1, int32 [n]. For each slot, row_of: its row or -1,
    int32; called: the number of the call that used it last, int64; loaded: the number of the transfer that
    fills it, int64; heat: how often it was requested, up to 3, uint8; dirty: True if changed.

    Raises:
        UserError: when the budget is too small.
    """

    def __init__(
        self,
        storage: DiskStorage,
        weights: torch.Tensor,
        state: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(weights, state)
        self.storage: DiskStorage = storage
        number, budget = len(weights), int(storage.budget * storage.shares[weights.size(1)])
        bytes_of_row = sum(value[:1].nbytes for value in self.tensors.values())
        slots = (budget - 4 * number) // (bytes_of_row + BYTES_BESIDE_A_SLOT)
        if slots < 1:
            raise UserError(
                f"--memory_budget has {shown_bytes(budget)} for {number:,} rows on the disk; their index "
                f"alone takes {shown_bytes(4 * number)}. Fix: give a larger budget, or start more processes."
            )
        slots = min(slots, number)
        self.held = {slot: torch.empty(slots, *value.shape[1:]) for slot, value in self.tensors.items()}
        self.slot_of = torch.full([number], -1, dtype=torch.int32)
        self.row_of = torch.full([slots], -1, dtype=torch.int32)
        self.called = torch.zeros(slots, dtype=torch.int64)
        self.loaded = torch.zeros(slots, dtype=torch.int64)
        self.heat = torch.zeros(slots, dtype=torch.uint8)
        self.dirty = torch.zeros(slots, dtype=torch.bool)
        self.counts = StorageCounts()
        self._call = self._hand = self._started = self._done = 0
        # Rows used since this call stay in memory, if there is room.
        self._since = 1
        self._transfers: list[tuple[Future[None], int]] = []
        # One transfer after the other: a row may be written and read again.
        self._queue, self._readers = ThreadPoolExecutor(1), ThreadPoolExecutor(READERS)
        self._is_random = False
        self._rows_of_page = max(1, mmap.PAGESIZE // (4 * weights.size(1)))

    def expect(self, rows: torch.Tensor) -> None:
        """Begin to load rows, int64 [k], that a later step requests."""
        self.counts.loaded += self._place(rows, must=False)[1]

    @property
    @override
    def on_disk(self) -> RowsOnDisk | None:
        return self

    @property
    def next_call(self) -> int:
        """Number of the next call."""
        return self._call + 1

    def begin(self, expected: int) -> None:
        """Begin the lookups of a step. expected: the number of the first call that expected its rows."""
        self._since = expected

    @override
    def look_up(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self.counts.requested += len(rows)
        slots, loaded, newest = self._place(rows)
        self.counts.loaded += loaded
        self.counts.late += loaded + self._wait(newest)
        if loaded:
            self._wait(self._started)
        torch.index_select(self.held["weight"], 0, slots, out=out)

    @override
    def update(
        self, rule: TableRule, rows: torch.Tensor, gradients: torch.Tensor, rate: torch.Tensor, number: int
    ) -> None:
        slots = self._slots(rows)
        self.dirty.index_fill_(0, slots, True)
        state = {slot: value for slot, value in self.held.items() if slot != "weight"}
        rule.update(self.held["weight"], state, slots, gradients, rate, number)

    @override
    def insert(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        slots = self._slots(rows, is_new=True)
        self.dirty.index_fill_(0, slots, True)
        for slot, value in self.held.items():
            if slot == "weight":
                value.index_copy_(0, slots, weights)
            else:
                value.index_fill_(0, slots, 0)

    @override
    def flush(self) -> None:
        self._wait(self._started)
        changed = self.dirty.nonzero().view(-1)
        rows = self.row_of[changed].long()
        order = rows.argsort()
        self._advise(is_random=False)
        self._copy(rows[order], changed[order], is_load=False)
        self.dirty.zero_()

    @override
    def forget(self) -> None:
        self.flush()
        self.slot_of.fill_(-1)
        self.row_of.fill_(-1)
        self.heat.zero_()

    @override
    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.storage.zeros(tensor.shape, tensor.dtype).copy_(tensor)

    @override
    def taken(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) <= CHUNK:
            return values.index_select(0, rows)
        # Many rows are copied to a file.
        copy = self.storage.zeros([len(rows), *values.shape[1:]])
        for part, target in zip(rows.split(CHUNK), copy.split(CHUNK), strict=True):
            torch.index_select(values, 0, part, out=target)
        return copy

    def _slots(self, rows: torch.Tensor, is_new: bool = False) -> torch.Tensor:
        """Return the slots of distinct rows, which are in memory until the next call."""
        slots, loaded, newest = self._place(rows, is_new=is_new)
        self._wait(self._started if loaded else newest)
        return slots

    def _place(
        self, rows: torch.Tensor, must: bool = True, is_new: bool = False
    ) -> tuple[torch.Tensor, int, int]:
        """Begin to load rows; return slots, rows in this transfer, and the last earlier one to wait for."""
        # `must`: evict rows of the newest batches if no others are left; otherwise skip rows without room.
        # Not at the top: numba takes 60 MiB, and this module is imported on a GPU too.
        from recsuite.sharding.kernels import evict, find_slots

        self._call += 1
        slots, missing = torch.empty_like(rows), torch.empty_like(rows)
        of_slots = (self.called.numpy(), self.heat.numpy(), self.loaded.numpy())
        number, newest = find_slots(
            rows.numpy(), self.slot_of.numpy(), *of_slots, self._call, slots.numpy(), missing.numpy()
        )
        if not number:
            return slots, 0, newest
        wanted, before = missing[:number], torch.full([number], -1, dtype=torch.int64)
        done = 0
        for least in (self._since, self._call) if must else (self._since,):
            done, self._hand = evict(
                *(rows.numpy(), wanted.numpy(), self.slot_of.numpy(), self.row_of.numpy(), *of_slots),
                *(least, self._call, self._started + 1, self._hand, done, slots.numpy(), before.numpy()),
            )
            if done == number:
                break
        if must and done < number:
            raise UserError(
                f"A step needs {len(rows):,} rows at once; --memory_budget has room for "
                f"{len(self.row_of):,}. Fix: give a larger budget, or a smaller --batch_size."
            )
        self._transfer(rows[wanted[:done]], slots[wanted[:done]], before[:done], is_new)
        return slots, done, newest

    def _transfer(self, rows: torch.Tensor, slots: torch.Tensor, before: torch.Tensor, is_new: bool) -> None:
        """Begin to write back changed rows that lost their slots, and to load others into these."""
        from recsuite.sharding.kernels import clean_pages

        self._started += 1
        leaving = (before >= 0) & self.dirty[slots]
        old, from_slots = before[leaving], slots[leaving]
        self.dirty[from_slots] = False
        if len(old):
            # With the changed rows in the same pages, which then lose their slots at no cost. A step may
            # change one of them meanwhile: then it is written again.
            room = MOST_BESIDE * len(old)
            others, of_slots = torch.empty(room, dtype=torch.int64), torch.empty(room, dtype=torch.int64)
            arrays = (value.numpy() for value in (self.slot_of, self.dirty, others, of_slots))
            number = clean_pages(old.numpy(), self._rows_of_page, *arrays)
            old, from_slots = torch.cat([old, others[:number]]), torch.cat([from_slots, of_slots[:number]])
            order = old.argsort()
            old, from_slots = old[order], from_slots[order]
        self.counts.written += len(old)
        self._advise(is_random=True)

        def run() -> None:
            self._copy(old, from_slots, is_load=False)
            if not is_new:
                self._copy(rows, slots, is_load=True)

        self._transfers.append((self._queue.submit(run), len(rows)))

    def _copy(self, rows: torch.Tensor, slots: torch.Tensor, is_load: bool) -> None:
        """Copy rows between files and memory, each part in its own thread."""
        from recsuite.sharding.kernels import copy_rows

        def copy(part: tuple[torch.Tensor, torch.Tensor]) -> None:
            for name, held in self.held.items():
                there = self.tensors[name]
                sides = [(there, part[0]), (held, part[1])]
                (source, of_source), (target, of_target) = sides if is_load else sides[::-1]
                flat = (
                    value.view(len(value), math.prod(value.shape[1:])).numpy() for value in (source, target)
                )
                copy_rows(next(flat), of_source.numpy(), next(flat), of_target.numpy())

        parts = max(1, min(READERS, len(rows) // ROWS_PER_READER))
        pieces = zip(rows.tensor_split(parts), slots.tensor_split(parts), strict=True)
        for _ in map(copy, pieces) if parts == 1 else self._readers.map(copy, pieces):
            pass

    def _wait(self, number: int) -> int:
        """Wait until a transfer has ended; return the number of rows that were waited for."""
        waited = 0
        while self._done < number:
            transfer, rows = self._transfers.pop(0)
            waited += 0 if transfer.done() else rows
            transfer.result()
            self._done += 1
        return waited

    def _advise(self, is_random: bool) -> None:
        """Advise the kernel to read single pages, or whole files ahead."""
        if self._is_random == is_random:
            return
        self._is_random = is_random
        for value in self.tensors.values():
            if value.numel():
                advise(value, mmap.MADV_RANDOM if is_random else mmap.MADV_NORMAL)


def advise(tensor: torch.Tensor, advice: int) -> None:
    """Advise the kernel on the use of the pages of a mapped tensor."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
