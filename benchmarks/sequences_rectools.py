"""The SASRec of `rectools`, in an environment of its own: it does not install beside this project's numpy.

    PYTHON sequences_rectools.py train FOLDER SETTINGS
    PYTHON sequences_rectools.py serve FOLDER SETTINGS    a rank of a team of benchmarks/sequences_speed.py

Reads events.npz and, after a training, writes found.json, both in FOLDER: see `sequences_peers.py`, which
calls it. Imports nothing of the library. SETTINGS: JSON, with "seed" and "threads", and for a training
"epochs" and "patience", both of these counted in validations, and "epochs_between" two of them; the others
are those of the model.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning_fabric import seed_everything
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from train_team import serve, take_answers

TOP = 10
# Below the first TOP.
NOT_FOUND = 10**6


def data_set(users: np.ndarray, items: np.ndarray) -> Dataset:
    """Events in the order of time, each later than the one before."""
    times = pd.to_datetime(np.arange(len(users)), unit="s")
    events = {"user_id": users, "item_id": items, "weight": 1.0, "datetime": times}
    return Dataset.construct(pd.DataFrame(events))


def ranks_of(model: SASRecModel, data: Dataset, known: np.ndarray, cases: np.ndarray) -> np.ndarray:
    """The ranks of the cases' items, int64 [n], NOT_FOUND behind the first TOP; cases: users and items."""
    users, items = cases
    asked = np.intersect1d(users, known)
    found = model.recommend(asked, data, k=TOP, filter_viewed=True)
    places = found.set_index(["user_id", "item_id"])["rank"]
    wanted = places.reindex(pd.MultiIndex.from_arrays([users, items]))
    return wanted.fillna(NOT_FOUND).to_numpy(np.int64)


def ndcg(ranks: np.ndarray) -> float:
    """NDCG@10 of cases with one relevant item."""
    return float(np.where(ranks <= TOP, 1 / np.log2(1 + ranks), 0).mean())


def main() -> None:
    """Train and recommend, or train for some steps whenever that is asked for."""
    what, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    # As each process of this project has.
    torch.set_num_threads(settings.pop("threads"))
    seed_everything(settings.pop("seed"))
    events = np.load(folder / "events.npz")
    if what == "serve":
        # Orders name no other variant.
        serve(take_answers(), lambda name: Shifted(events, settings), lambda: None, torch.set_num_threads)
    else:
        (folder / "found.json").write_text(json.dumps(trained(events, settings)))


class Shifted:
    """A training of which each step can be asked for, without what surrounds it in that package."""

    def __init__(self, events: Any, settings: dict[str, Any]) -> None:
        self.model = SASRecModel(**settings, verbose=0)
        # What its `fit` does before the first epoch.
        self.model._build_model_from_dataset(data_set(*events["train"]))
        self.module = self.model.lightning_model
        self.optimizer = self.module.configure_optimizers()
        self.module.train()
        self.batches = self._batches()

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.model.data_preparator.get_dataloader_train()

    def steps(self, number: int, batch_size: int) -> float:
        """See `train_team.Trained`; but the targets of a step, in the mean: sequences differ in length."""
        targets = 0
        for batch in itertools.islice(self.batches, number):
            self.optimizer.zero_grad()
            logits = self.module.get_batch_logits(batch)
            loss = self.module.loss_calculator(logits, batch["y"], batch["yw"])
            loss.backward()
            self.optimizer.step()
            targets += int((batch["y"] != 0).sum())
        return targets / number

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Not known."""
        return {}


def trained(events: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What came of it."""
    most, patience, step = (settings.pop(name) for name in ("epochs", "patience", "epochs_between"))
    known, later = data_set(*events["train"]), data_set(*events["known"])
    model = SASRecModel(**settings, epochs=1, verbose=0)
    best, best_step, seconds, ranks = -1.0, 0, 0.0, np.zeros(0)
    for number in range(1, most + 1):
        begin = time.perf_counter()
        model.fit_partial(known, min_epochs=step, max_epochs=step)
        seconds += time.perf_counter() - begin
        value = ndcg(ranks_of(model, known, events["train"][0], events["validation"]))
        if value > best:
            best, best_step = value, number
            # The test of the step that validation names; it chooses nothing.
            ranks = ranks_of(model, later, events["known"][0], events["test"])
        if number - best_step >= patience:
            break
    return {"ranks": ranks.tolist(), "seconds": seconds, "best": best, "epochs": best_step * step}


if __name__ == "__main__":
    main()
