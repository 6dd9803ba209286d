"""The pool: batches in order for any worker, a screen for every end of a worker, no resources left."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.sections import LoaderConfig
from recsuite.errors import UserError
from recsuite.workers import pool as pool_module
from recsuite.workers.pool import (
    CLOSE_SECONDS,
    MAX_PREFETCH_FACTOR,
    SLOTS_BEYOND_PREFETCH,
    WorkerDiedError,
    WorkerError,
    WorkerPool,
    WorkerRaisedError,
    WorkerSilentError,
)
from tests.support import shared_memory
from tests.support.launch import PATIENCE, is_alive, python, succeeded
from tests.support.pools import make_pool, numbers
from tests.support.sources import FAILING_STEP, SIZE, Numbers
from tests.support.starting import REAL_WORKERS

METHODS = ("spawn", "forkserver", "fork")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = make_pool(Numbers())
    yield pool
    pool.close()


@pytest.mark.parametrize(("method", "num_workers"), [("spawn", 3), ("forkserver", 1), ("fork", 3)])
def test_batches_arrive_in_the_order_of_the_requests(method: str, num_workers: int) -> None:
    pool = make_pool(Numbers(), num_workers, mp_context=method)
    try:
        for steps in (range(20), range(1), range(0), range(7)):
            assert numbers(pool.batches(steps)) == list(steps)
    finally:
        pool.close()


def test_a_slow_worker_changes_no_order() -> None:
    pool = make_pool(Numbers("slow"), 3, mp_context="forkserver")
    assert numbers(pool.batches(range(12))) == list(range(12))
    pool.close()


def test_a_batch_that_is_kept_is_never_written_to_again(pool: WorkerPool) -> None:
    before = pool.num_copied
    kept = list(pool.batches(range(50)))
    assert numbers(kept) == list(range(50))
    # More than the slots can hold: the others were copied out of them.
    assert pool.num_copied - before >= 50 - 2 * pool.slots_per_worker
    again = list(pool.batches(range(50, 100)))
    assert numbers(kept) == list(range(50))
    assert numbers(again) == list(range(50, 100))


def test_a_view_of_a_batch_keeps_its_slot(pool: WorkerPool) -> None:
    views: list[np.ndarray] = []
    for values, _ in pool.batches(range(30)):
        if len(views) < 2:
            views.append(values[10:20])
    for step, view in enumerate(views):
        assert (view == step).all()


def test_released_batches_are_not_copied(pool: WorkerPool) -> None:
    before = pool.num_copied
    assert numbers(pool.batches(range(200))) == list(range(200))
    assert pool.num_copied == before


def test_the_ring_uses_the_memory_that_it_reports(pool: WorkerPool) -> None:
    assert pool.slots_per_worker == 2 + SLOTS_BEYOND_PREFETCH
    assert pool.ring.num_bytes == 2 * pool.slots_per_worker * pool.ring.slot_bytes
    assert Numbers.batch_bytes <= pool.ring.slot_bytes < Numbers.batch_bytes + 4096
    numbers(pool.batches(range(100)))
    slots = [slot for worker in pool._workers for slot in worker.free_slots]
    assert sorted(slots) == list(range(2 * pool.slots_per_worker))


def test_a_pass_after_an_abandoned_one_is_complete(pool: WorkerPool) -> None:
    for values, _ in pool.batches(range(100)):
        if values[0] == 3:
            break
    assert numbers(pool.batches(range(40, 60))) == list(range(40, 60))


def test_two_passes_at_once_are_refused(pool: WorkerPool) -> None:
    first = pool.batches(range(100))
    next(first)
    second = pool.batches(range(100))
    with pytest.raises(RuntimeError, match="another pass over the same loader has begun"):
        next(first)
    assert numbers(second) == list(range(100))


def test_workers_begin_before_the_first_request(pool: WorkerPool) -> None:
    numbers(pool.batches(range(4)))
    batches = pool.batches(range(4))
    deadline = time.monotonic() + 50
    while not all(worker.connection.poll() for worker in pool._workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert numbers(batches) == list(range(4))


SCRIPT = """
import multiprocessing.forkserver, os, signal, sys
from recsuite.workers.pool import WorkerPool
from recsuite.workers.pool import WorkerError
from tests.support.sources import Numbers

def main(method, number):
    pool = WorkerPool(Numbers(), num_workers=2, prefetch_factor=2, timeout=60, mp_context=method)
    server = [] if method == "spawn" else [multiprocessing.forkserver._forkserver._forkserver_pid]
    # The workers are not more than born.
    for pid in server if number == signal.SIGKILL else [*server, *pool.pids]:
        os.kill(pid, number)
    try:
        print([int(values[0]) for values, _ in pool.batches(range(6))])
    except WorkerError as error:
        print(error)
    pool.close()

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
"""


def first_pool(tmp_path: Path, method: str, number: signal.Signals) -> str:
    """Error of the first pool of a process, whose workers or their server get a signal at their start."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # A file of this name is not to be taken for the worker's.
    (tmp_path / "worker.py").write_text("raise SystemError('this is another worker')")
    return succeeded(python(script, method, int(number), cwd=tmp_path, env=REAL_WORKERS))


@pytest.mark.parametrize(
    ("method", "number"),
    [("spawn", signal.SIGINT), ("forkserver", signal.SIGTERM), ("forkserver", signal.SIGUSR2)],
)
def test_a_signal_to_the_whole_group_harms_no_worker_however_young(
    tmp_path: Path, method: str, number: signal.Signals
) -> None:
    assert first_pool(tmp_path, method, number) == "[0, 1, 2, 3, 4, 5]\n"


def test_a_server_of_forks_that_is_gone_is_named(tmp_path: Path) -> None:
    assert "The server that forks workers has ended" in first_pool(tmp_path, "forkserver", signal.SIGKILL)


def test_a_closed_pool_refuses_a_pass() -> None:
    pool = make_pool(Numbers(), mp_context="forkserver")
    batches = pool.batches(range(10))
    pool.close()
    for use in (lambda: next(batches), lambda: pool.batches(range(10))):
        with pytest.raises(RuntimeError, match="the pool is closed"):
            use()


def test_the_memory_of_the_ring_is_freed_with_the_last_batch() -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:batches")

    before = num_mappings()
    pool = make_pool(Numbers(), mp_context="forkserver")
    values, _ = next(pool.batches(range(4)))
    pool.close()
    assert num_mappings() == before + 1
    assert (values == 0).all()
    del values, _
    assert num_mappings() == before


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_workers .*got 0"):
        make_pool(Numbers(), 0)


def test_more_tasks_than_a_pipe_holds_are_refused() -> None:
    assert LoaderConfig.flag("prefetch_factor").most == MAX_PREFETCH_FACTOR
    with pytest.raises(ValueError, match=r"prefetch_factor .* 64, got 65"):
        make_pool(Numbers(), prefetch_factor=MAX_PREFETCH_FACTOR + 1)
    pool = make_pool(Numbers(), prefetch_factor=MAX_PREFETCH_FACTOR, mp_context="forkserver")
    assert numbers(pool.batches(range(300))) == list(range(300))
    pool.close()


# --- failures ----------------------------------------------------------------------------------------


def fail(fault: str, **options: Any) -> tuple[WorkerError, float]:
    """Error of a failing pool, and the seconds until it; checks that the pool leaves nothing behind."""
    pool = make_pool(Numbers(fault), **options)
    pids = pool.pids
    batches = pool.batches(range(100))
    seen: list[int] = []
    while True:
        start = time.monotonic()
        try:
            seen.append(int(next(batches)[0][0]))
        except WorkerError as error:
            seconds = time.monotonic() - start
            assert seen == list(range(len(seen)))
            assert len(seen) <= FAILING_STEP
            pool.close()
            assert not any(map(is_alive, pids))
            return error, seconds


@pytest.mark.parametrize(
    ("fault", "method", "kind", "words"),
    [
        (
            *("raise", "forkserver", WorkerRaisedError),
            ["NeedsTwoError: 7: seven is too many", "sources.py", "--num_workers 0"],
        ),
        (
            *("unpicklable", "spawn", WorkerRaisedError),
            ["TypeError", "lock", "which is not an array of numbers"],
        ),
        (
            *("kill 9", "forkserver", WorkerDiedError),
            ["killed by signal 9 (SIGKILL)", "memory limit", "Memory now:", "dmesg"],
        ),
        (
            *("bus error", "forkserver", WorkerDiedError),
            ["signal 7 (SIGBUS)", "Memory now:", "batches take at most", "_bus_error"],
        ),
        (
            *("crash", "spawn", WorkerDiedError),
            ["signal 11 (SIGSEGV)", "native code", "Where it was:", "string_at"],
        ),
        ("sys.exit", "forkserver", WorkerDiedError, ["exited with code 4"]),
    ],
)
def test_a_failing_worker_is_shown_on_one_screen(
    fault: str, method: str, kind: type[WorkerError], words: list[str]
) -> None:
    error, seconds = fail(fault, mp_context=method)
    screen = str(error)
    assert isinstance(error, kind)
    assert f"data worker {FAILING_STEP % 2} of rank 3 (pid " in screen
    assert f"with {FAILING_STEP}" in screen
    assert "What to do:" in screen
    for word in words:
        assert word in screen
    assert len(screen.splitlines()) < 40
    assert seconds < 10 * PATIENCE


def test_a_silent_worker_is_named_with_its_stack() -> None:
    error, seconds = fail("sleep", timeout=1, mp_context="forkserver")
    assert isinstance(error, WorkerSilentError)
    assert f"Nothing for 1 s from data worker {FAILING_STEP % 2} of rank 3 (pid " in str(error)
    assert "sources.py" in str(error)
    assert "--worker_timeout" in str(error)
    assert 1 <= seconds < 5 * PATIENCE


@pytest.mark.parametrize("fault", ["interrupt", "terminate"])
def test_a_worker_leaves_the_trainers_signals_to_the_trainer(fault: str) -> None:
    pool = make_pool(Numbers(fault), mp_context="forkserver")
    assert numbers(pool.batches(range(20))) == list(range(20))
    pool.close()


def test_a_worker_answers_a_signal_with_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    pool = make_pool(Numbers("sleep"))
    batches = pool.batches(range(100))
    for _ in range(FAILING_STEP):
        next(batches)
    said, deadline = "", time.monotonic() + 10 * PATIENCE
    # It may not have reached the step yet at which it sleeps.
    while "sources.py" not in said:
        assert time.monotonic() < deadline, said
        os.kill(pool.pids[FAILING_STEP % 2], signal.SIGUSR1)
        time.sleep(0.1)
        said += capfd.readouterr().err
    pool.close()


def test_an_idle_worker_that_dies_is_noticed() -> None:
    pool = make_pool(Numbers(), mp_context="forkserver")
    numbers(pool.batches(range(4)))
    os.kill(pool.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"(?s)data worker 1 of rank 3 .* killed by signal 9"):
        numbers(pool.batches(range(100)))
    pool.close()


class Unpicklable(Numbers):
    """Holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.callback = lambda: None


class Heavy(Numbers):
    """Holds its data itself."""

    def __init__(self) -> None:
        super().__init__()
        self.data = np.zeros(10_000)


def test_a_data_set_that_cannot_be_sent_is_refused() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(UserError, match=r"Cannot send Unpicklable to a data worker: .* Fix: "):
        make_pool(Unpicklable())
    with pytest.raises(UserError, match=r"Heavy .* 65,536 bytes.* got 80,\d+"):
        make_pool(Heavy())
    assert set(multiprocessing.active_children()) == before


def test_a_batch_larger_than_its_slot_is_refused() -> None:
    pool = make_pool(Numbers(size=SIZE + 1000), mp_context="forkserver")
    with pytest.raises(WorkerRaisedError, match="does not fit its slot"):
        next(pool.batches(range(3)))
    pool.close()


def test_too_few_file_descriptors_are_reported_with_one_message() -> None:
    before = set(multiprocessing.active_children())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What earlier tests left open must not be closed between the count and the pool.
    gc.collect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (shared_memory.num_descriptors() + 10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"Cannot start 8 data workers: a process may have \d+ files"):
            make_pool(Numbers(), 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize(
    ("number", "sentence", "refused"),
    [
        (
            *(errno.EMFILE, r"a process may have \d+ files open, .* Fix: .* a smaller --num_workers"),
            "multiprocessing.context.BaseContext.Pipe",
        ),
        (
            *(errno.EAGAIN, r"this user may have -?\d+ processes, .* Fix: .* a smaller --num_workers"),
            "multiprocessing.context.BaseContext.Pipe",
        ),
        (
            *(errno.ENOMEM, r"their batches take up to .* a smaller --batch_size"),
            "recsuite.workers.pool.Ring",
        ),
    ],
)
def test_errors_of_the_system_are_reported_with_one_message(
    monkeypatch: pytest.MonkeyPatch, number: int, sentence: str, refused: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(refused, refuse)
    # What tests before this one left to the collector is none of ours.
    gc.collect()
    before = shared_memory.num_descriptors()
    with pytest.raises(UserError, match=rf"Cannot start 2 data workers: {sentence}"):
        make_pool(Numbers())
    gc.collect()
    assert shared_memory.num_descriptors() == before


def test_a_mistake_that_a_worker_finds_names_the_worker() -> None:
    pool = make_pool(Numbers("mistake"), mp_context="forkserver")
    with pytest.raises(UserError, match=r"a row is bad\. \(Found by data worker 1 of rank 3 .* with 5\.\)"):
        numbers(pool.batches(range(10)))
    pool.close()


# --- the end -----------------------------------------------------------------------------------------


def test_closing_is_quick_and_complete_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CLOSE_SECONDS", CLOSE_SECONDS * PATIENCE)
    pool = make_pool(Numbers(), 4, mp_context="forkserver")
    next(pool.batches(range(1000)))
    pids, start = pool.pids, time.monotonic()
    pool.close()
    pool.close()
    # Nobody had to be killed at the deadline.
    assert time.monotonic() - start < CLOSE_SECONDS * PATIENCE
    assert not any(map(is_alive, pids))


def test_a_stuck_worker_is_ended_within_the_deadline() -> None:
    pool = make_pool(Numbers("sleep"), mp_context="forkserver")
    batches = pool.batches(range(100))
    for _ in range(FAILING_STEP):
        next(batches)
    pids, start = pool.pids, time.monotonic()
    pool.close()
    assert time.monotonic() - start < (CLOSE_SECONDS + 1) * PATIENCE
    assert not any(map(is_alive, pids))


def test_an_unreferenced_pool_ends_its_workers() -> None:
    pool = make_pool(Numbers(), mp_context="forkserver")
    pids = pool.pids
    del pool
    gc.collect()
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("method", METHODS)
def test_pools_leave_no_descriptor_and_no_shared_memory(method: str) -> None:
    def use() -> None:
        pool = make_pool(Numbers(), mp_context=method)
        numbers(pool.batches(range(10)))
        pool.close()
        gc.collect()

    # The first starts what Python keeps: its resource tracker, its fork server.
    use()
    descriptors, names = shared_memory.num_descriptors(), shared_memory.names()
    use()
    assert shared_memory.num_descriptors() == descriptors
    shared_memory.check_nothing_stays(names)
