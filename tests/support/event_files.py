"""What the files say that a training wrote for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show: by name, steps and values."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        name: [(found.step, found.value) for found in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
