"""SASRec of the package `rectools`, in an environment of its own: it requires another numpy.

    PYTHON sequences_rectools.py FOLDER SETTINGS    a rank of a team of benchmarks/sequences_speed.py

Reads events.npz in FOLDER. SETTINGS: JSON with "seed", "threads" and arguments of the model. Imports nothing
of the library.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from teams import arguments, serve, take_answers

if TYPE_CHECKING:
    from rectools.dataset import Dataset


def data_set(users: np.ndarray, items: np.ndarray) -> Dataset:
    """Data set of events in the order of time, each later than the one before."""
    from rectools.dataset import Dataset

    times = pd.to_datetime(np.arange(len(users)), unit="s")
    events = {"user_id": users, "item_id": items, "weight": 1.0, "datetime": times}
    return Dataset.construct(pd.DataFrame(events))


def main() -> None:
    """Serve the jobs of a team."""
    folder, given = arguments(__doc__, "FOLDER", "SETTINGS")
    from lightning_fabric import seed_everything

    settings = json.loads(given)
    torch.set_num_threads(settings.pop("threads"))
    seed_everything(settings.pop("seed"))
    events = np.load(Path(folder) / "events.npz")
    serve(take_answers(), lambda name: Shifted(events, settings), lambda: None, torch.set_num_threads)


class Shifted:
    """Training that makes steps on request, without the loops around it in the package."""

    def __init__(self, events: Any, settings: dict[str, Any]) -> None:
        from rectools.models import SASRecModel

        self.model = SASRecModel(**settings, verbose=0)
        # As `fit` does before the first epoch.
        self.model._build_model_from_dataset(data_set(*events["train"]))
        self.module = self.model.lightning_model
        self.optimizer = self.module.configure_optimizers()
        self.module.train()
        self.batches = self._batches()

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.model.data_preparator.get_dataloader_train()

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the mean targets of a step: sequences differ in length."""
        targets = 0
        for batch in itertools.islice(self.batches, number):
            self.optimizer.zero_grad()
            logits = self.module.get_batch_logits(batch)
            loss = self.module.loss_calculator(logits, batch["y"], batch["yw"])
            loss.backward()
            self.optimizer.step()
            targets += int((batch["y"] != 0).sum())
        return targets / number


if __name__ == "__main__":
    main()
