"""Rankings that know of order or time: what is popular of late, a chain that is counted, and the SASRec of
`recbole`, on the events that columns have, each and all.

As the systems of `peers_ranking`, they learn from the training events and are chosen on validation. The first
two then count validation events too; SASRec keeps what it learned when validation was best, as this project's
models do, and finds those events in the sequences that it continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clicks import events_of, judged_cases
from peers_ranking import Ranked, judged
from recbole_parts import LONGEST, sasrec, states_of

from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics, measure_ranks

# How many of the newest events say what is popular of late.
NEWEST = (100, 300, 1_000, 3_000, 10_000, 30_000)
# What is tried of SASRec: the defaults of the package, and less of what they drop.
GRID: tuple[dict[str, float], ...] = ({}, {"hidden_dropout_prob": 0.2, "attn_dropout_prob": 0.2})
# Of events. With the package's 2,048 ml-100k had 0.109 on validation after 12 epochs, and with these 0.115.
# The rate is the package's own.
BATCH_SIZE, LEARNING_RATE = 512, 1e-3
# The SASRec of `rectools`: its defaults, but with the width, the heads and the length of `recbole`'s.
SHIFTED = {"n_factors": 64, "n_heads": 2, "session_max_len": 50, "threads": 1}
# Cases whose sequences are run through the model at once.
SEQUENCES_AT_ONCE = 512


def known_before(columns: Columns, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of the events that are known for a split, int32 [n] both, in the order of time."""
    names = ("train",) if split == "validation" else ("train", "validation")
    users, items = np.concatenate([events_of(columns, name) for name in names], axis=1)
    # Both parts are in order; stable, so that events of one second stay in that of the file.
    order = np.argsort(columns.column("time")[: len(users)], kind="stable")
    return users[order], items[order]


def most_recent(columns: Columns) -> Ranked:
    """Items by their number among the newest events, those that have as many by that among all."""
    tried = [judged(columns, "validation", _recent(columns, "validation", n))["ndcg_at_10"] for n in NEWEST]
    best = NEWEST[int(np.argmax(tried))]
    begin = time.perf_counter()
    scores = _recent(columns, "test", best)
    seconds = time.perf_counter() - begin
    return Ranked(judged(columns, "test", scores), seconds, {"newest": best})


def _recent(columns: Columns, split: str, newest: int) -> np.ndarray:
    """Scores, float64 [users, items], the same for all users."""
    _, items = known_before(columns, split)
    of_all, of_late = (np.bincount(part, minlength=columns.num_items) for part in (items, items[-newest:]))
    return np.broadcast_to(of_late + of_all / (1 + len(items)), (columns.num_users, columns.num_items))


def counted_chain(columns: Columns) -> Ranked:
    """Items by how often they came next after the user's last one, then by their number."""
    begin = time.perf_counter()
    users, items = known_before(columns, "test")
    by_user = np.argsort(users, kind="stable")
    users, items = users[by_user], items[by_user]
    follows = np.diff(users) == 0
    counts = np.zeros((columns.num_items, columns.num_items), np.float32)
    np.add.at(counts, (items[:-1][follows], items[1:][follows]), 1)
    counts += np.bincount(items, minlength=columns.num_items) / (1 + len(items))
    last = np.zeros(columns.num_users, np.int64)
    # Of several values for one place the last one stays.
    last[users] = items
    seconds = time.perf_counter() - begin
    test_users, _ = events_of(columns, "test")
    return Ranked(judged_cases(columns, "test", lambda part: counts[last[test_users[part]]]), seconds, {})


@dataclass
class Sequences:
    """What each user had, one after the other, as columns have it for "validation" or "test".

    items: int32 [events]; offsets: where each user's begin, int64 [users + 1].
    """

    items: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, columns: Columns, split: str) -> Sequences:
        """Those that are known for a split."""
        users, items = known_before(columns, split)
        counts = np.bincount(users, minlength=columns.num_users)
        return cls(items[np.argsort(users, kind="stable")], np.concatenate([[0], np.cumsum(counts)]))

    def nexts(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every event that has one before it, where what is before it begins and ends, int64 [n] both."""
        begins = np.repeat(self.offsets[:-1], np.diff(self.offsets))
        ends = np.arange(len(self.items))
        return begins[ends > begins], ends[ends > begins]

    def windows(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """As `nexts`, of LONGEST events of a user that follow each other, or what is left before and behind:
        where all but the last one begin and end. They are cut anew each time.
        """
        begins, ends = self.nexts()
        shifts = random.integers(LONGEST, size=len(self.items))[begins]
        numbers = (ends - begins - 1 + shifts) // LONGEST
        is_first = (np.diff(begins, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 0)
        is_last = np.append(is_first[1:], True)
        return ends[is_first] - 1, ends[is_last]

    def batch(self, begins: np.ndarray, ends: np.ndarray) -> dict[str, torch.Tensor]:
        """What the model takes of sequences, of which the last items count."""
        places = np.maximum(begins, ends - LONGEST)[:, None] + np.arange(LONGEST)
        items = np.where(places < ends[:, None], self.items[np.minimum(places, len(self.items) - 1)] + 1, 0)
        lengths = np.minimum(ends - begins, LONGEST)
        return {
            "item_id_list": torch.from_numpy(items.astype(np.int64)),
            # One of nothing is one item of padding.
            "item_length": torch.from_numpy(np.maximum(lengths, 1)),
        }


@dataclass
class Peer:
    """A SASRec in training: the seconds of it, and the best of its epochs on validation."""

    columns: Columns
    settings: dict[str, float]
    seed: int
    seconds: float = 0.0
    best: float = -1.0
    best_epoch: int = 0
    best_weights: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = sasrec(self.columns.num_items, **self.settings)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)
        self.sequences = Sequences.of(self.columns, "validation")
        self.random = np.random.default_rng(self.seed)

    def train(self, epochs: int, patience: int) -> Peer:
        """Until so many epochs in a row were no better on validation."""
        for epoch in range(1, epochs + 1):
            begin = time.perf_counter()
            self.learn()
            self.seconds += time.perf_counter() - begin
            value = self.judged("validation")["ndcg_at_10"]
            if value > self.best:
                self.best, self.best_epoch = value, epoch
                self.best_weights = deepcopy(self.model.state_dict())
            if epoch - self.best_epoch >= patience:
                break
        self.model.load_state_dict(self.best_weights)
        return self

    def learn(self) -> None:
        """An epoch: what came next, at every place of sequences, as in the paper. The package foresees one
        event of a sequence and reads it anew for the next, which takes fifty times as long.
        """
        self.model.train()
        begins, ends = self.sequences.windows(self.random)
        order = self.random.permutation(len(ends))
        for part in np.array_split(order, -(-int((ends - begins).sum()) // BATCH_SIZE)):
            self.optimizer.zero_grad()
            items, nexts = (
                self.sequences.batch(begins[part] + later, ends[part] + later)["item_id_list"]
                for later in (0, 1)
            )
            is_real = nexts > 0
            states = states_of(self.model, items)[is_real]
            scores = states @ self.model.item_embedding.weight.T
            self.model.loss_fct(scores, nexts[is_real]).backward()
            self.optimizer.step()

    def losses(self, batch_size: int) -> Iterator[float]:
        """The losses of an epoch as the package trains, each of a step that is taken when it is asked for."""
        self.model.train()
        begins, ends = self.sequences.nexts()
        order = self.random.permutation(len(ends))
        for part in np.array_split(order, -(-len(order) // batch_size)):
            self.optimizer.zero_grad()
            batch = self.sequences.batch(begins[part], ends[part])
            batch["item_id"] = torch.from_numpy(self.sequences.items[ends[part]].astype(np.int64) + 1)
            loss = self.model.calculate_loss(batch)
            loss.backward()
            self.optimizer.step()
            yield float(loss.detach())

    @torch.no_grad()
    def judged(self, split: str) -> Metrics:
        """HR@10 and NDCG@10 of "validation" or "test"."""
        self.model.eval()
        sequences, (users, _) = Sequences.of(self.columns, split), events_of(self.columns, split)
        begins, ends = sequences.offsets[users], self._ends(split, sequences, users)

        def score(part: slice) -> np.ndarray:
            numbers = np.array_split(np.arange(len(users))[part], -(-len(users[part]) // SEQUENCES_AT_ONCE))
            batches = (sequences.batch(begins[few], ends[few]) for few in numbers)
            return torch.cat([self.model.full_sort_predict(batch)[:, 1:] for batch in batches]).numpy()

        return judged_cases(self.columns, split, score)

    def _ends(self, split: str, sequences: Sequences, users: np.ndarray) -> np.ndarray:
        """Where the sequences before the events of a split end: what is newer is not theirs."""
        if split == "test":
            return sequences.offsets[users + 1]
        positions = self.columns.range_of(split)
        times = self.columns.column("time")
        numbers = np.argsort(events_of(self.columns, "train")[0], kind="stable")
        by_user = times[: self.columns.num_train][numbers]
        moments = times[positions.start : positions.stop]
        spans = zip(sequences.offsets[users], sequences.offsets[users + 1], moments, strict=True)
        ends = [begin + by_user[begin:end].searchsorted(moment, "right") for begin, end, moment in spans]
        return np.array(ends, np.int64)


def sasrec_of(columns: Columns, settings: dict[str, float], seed: int, epochs: int, patience: int) -> Ranked:
    """The SASRec of `recbole`, with settings that are chosen."""
    peer = Peer(columns, settings, seed).train(epochs, patience)
    return Ranked(peer.judged("test"), peer.seconds, {**settings, "epochs": peer.best_epoch})


def chosen_settings(columns: Columns, seed: int, epochs: int, patience: int) -> dict[str, float]:
    """Those of GRID that are best on validation."""
    tried = [Peer(columns, settings, seed).train(epochs, patience).best for settings in GRID]
    return GRID[int(np.argmax(tried))]


def shifted_sasrec(columns: Columns, python: Path, seed: int, validations: int, patience: int) -> Ranked:
    """The SASRec of `rectools`, which learns what came next at every place of a sequence at once.

    python: the interpreter of an environment that has the package; it does not install beside this project.
    validations, patience: how often it is looked at at most, and how often in vain.
    """
    settings = {**SHIFTED, "seed": seed, "epochs": validations, "patience": patience, "epochs_between": 5}
    with tempfile.TemporaryDirectory() as folder:
        write_events(columns, Path(folder))
        script = Path(__file__).with_name("sequences_rectools.py")
        command = [str(python), str(script), "train", folder, json.dumps(settings)]
        # Without this project's path: it is another Python's.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, stdout=quiet, stderr=quiet, cwd=folder, env=env)
        found = json.loads((Path(folder) / "found.json").read_text())
    return Ranked(measure_ranks(np.array(found["ranks"])), found["seconds"], {"epochs": found["epochs"]})


def write_events(columns: Columns, folder: Path) -> None:
    """What `sequences_rectools.py` reads: users and items of events, int32 [2, n] each."""
    known = {"train": known_before(columns, "validation"), "known": known_before(columns, "test")}
    cases = {split: events_of(columns, split) for split in ("validation", "test")}
    arrays = {name: np.stack(pair) for name, pair in {**known, **cases}.items()}
    np.savez(folder / "events.npz", allow_pickle=False, **arrays)
