"""The parts of a training step, as the loop and the model name them for the profiler."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.profiler import record_function

# The next batch and its copy to the device; ids to the ranks that own their rows; the rows; everything from
# them to the loss; gradients, and the update of the tables; rows to the ranks that asked and their gradients
# back; the update of the dense part.
PARTS = ("feed", "input exchange", "lookup", "dense", "backward", "output exchange", "optimizer")
# The whole, around all of them.
STEP = "step"


def named(part: str) -> contextlib.AbstractContextManager[Any]:
    """A range of this name in a recording. Without one it costs next to nothing, a record_function 6 us."""
    return record_function(part) if torch.autograd._profiler_enabled() else contextlib.nullcontext()
