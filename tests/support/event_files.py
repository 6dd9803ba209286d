"""Content of the files that a training wrote for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def only_run(folder: Path) -> EventAccumulator:
    """Content of the only training in a folder, as TensorBoard reads it."""
    (run,) = folder.iterdir()
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, as TensorBoard shows them."""
    accumulator = only_run(folder)
    return {
        name: [(found.step, found.value) for found in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
