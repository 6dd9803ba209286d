"""Threads that ask while a test changes something."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def meanwhile(ask: Callable[[], object], num_threads: int = 1) -> Iterator[None]:
    """Within this, threads ask again and again; raises the first exception of one of them at the end."""
    end, failures = threading.Event(), list[BaseException]()

    def ask_again() -> None:
        try:
            while not end.is_set():
                ask()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask_again) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
