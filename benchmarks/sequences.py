"""Measure how well the next item is ranked, beside other systems on the same events.

    python benchmarks/sequences.py                               ml-100k
    python benchmarks/sequences.py --real FOLDER... [--write]    and the MovieLens sets in these folders
    python benchmarks/sequences.py --planted [--write]           a synthetic world whose order is known
    python benchmarks/sequences.py --also sequences.json         joins the results of a run of other sets
    python benchmarks/sequences.py --only_this --also FILE       measures this project again, and nothing else

The newest rating of each user is the test (leave_one_out), or the newest fifth of all (time); ratings of one
second have the order of the file. Each test item is ranked among all items that its user has not had, and
others with the same score count as ranked before it. This project has two processes and the defaults of its
task.

Popularity, popularity among the newest events, EASE, least squares and SASRec (Kang and McAuley,
"Self-attentive sequential recommendation", 2018) are chosen on validation, in their grids; the settings of
SASRec with the first seed of each set, and its batch by hand, see BATCH_SIZE. The first ones then count
validation events too; SASRec keeps its weights of the best validation, as this project does, and finds those
events in the sequences that it continues. SASRec is that of the package `recbole`. Where the newest rating is
the test, `recbole` computes the metrics once more, from recommendations of the served model. Needs
requirements-dev.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from common import (
    DOCS,
    bar,
    describe,
    finish,
    make_parser,
    mean,
    measured_before,
    origin,
    spread,
    table,
    timed,
    training_seconds,
)
from peers import (
    PeerCase,
    Ranked,
    add_sets,
    best_ease,
    data_sets,
    events_of,
    judged,
    judged_cases,
    least_squares,
    popularity,
)

from example import make_model
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.schema import ITEM, USER, RawData, with_columns
from recsuite.extras.recommend.recommend import Viewer, open_viewer
from recsuite.metrics import TOP, Metrics
from recsuite.serving.request import HISTORY_AGES
from recsuite.serving.served import ServedModel
from recsuite.serving.training_data import TrainingFeatures, ages_in

SPLITS = ("leave_one_out", "time")
PAGE = DOCS / "log" / "benchmarks.md"
OTHERS = ("implicit", "recbole")
PLANTED = "synthetic"
THIS, ORACLE = "this", "oracle"
# Least NDCG@10 as a share of that of the best other system, and of the oracle.
AS_GOOD, NEAR = 1.0, 0.98
SHOWN = {"leave_one_out": "leave one out", "time": "newest fifth"}
# Numbers of newest events by which recent popularity is counted.
NEWEST = (100, 300, 1_000, 3_000, 10_000, 30_000)
# Settings of SASRec that are tried: the defaults of the package, and less dropout.
GRID: tuple[dict[str, float], ...] = ({}, {"hidden_dropout_prob": 0.2, "attn_dropout_prob": 0.2})
# Events in a batch: with the 2,048 of the package ml-100k had 0.109 on validation after 12 epochs, with 512
# it had 0.115. The rate is that of the package.
BATCH_SIZE, LEARNING_RATE = 512, 1e-3
# Cases whose sequences are run through the model at once.
SEQUENCES_AT_ONCE = 512
# Differences of the last bits of a sum.
TOLERANCE = 1e-9
# Position of a missing item, where fewer than TOP are recommended.
NONE = -1
# Modules that recbole imports and does not call here, with the imported names.
UNCALLED = {
    "colorlog": (),
    "colorama": ("init",),
    "texttable": ("Texttable",),
    "sklearn": (),
    "sklearn.metrics": ("auc", "mean_absolute_error", "mean_squared_error"),
}
# More than a float64 has.
DIGITS = 20
# Longest sequence in the package; earlier items are not read.
LONGEST = 50
# Names of the parts of a batch in the package, and the defaults of its SASRec.
SETTINGS: dict[str, Any] = {
    "USER_ID_FIELD": "user_id",
    "ITEM_ID_FIELD": "item_id",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "item_length",
    "NEG_PREFIX": "neg_",
    "MAX_ITEM_LIST_LENGTH": LONGEST,
    "device": "cpu",
    "n_layers": 2,
    "n_heads": 2,
    "hidden_size": 64,
    "inner_size": 256,
    "hidden_dropout_prob": 0.5,
    "attn_dropout_prob": 0.5,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "loss_type": "CE",
}


class SequenceCase(PeerCase):
    """Set, seed, and the split as the task."""

    def ours(self, columns: Columns) -> dict[str, Any]:
        """Run of this project, with the largest difference to the metrics of `recbole` if there is one."""
        save_dir = self.folder / f"{self.data.name}-{self.task}-{self.seed}-dumps"
        report = self.report(columns, "--dump", "--save_dir", save_dir)
        more: dict[str, Any] = {"epochs": len(report["epochs"])}
        if self.task == "leave_one_out":
            more["recbole differs by"] = differences(report["test"], served_metrics(save_dir, columns))
        return self.run(THIS, report["test"], training_seconds(report), **more)


def main() -> None:
    """Train all and show, and write if that is asked for."""
    parser = make_parser(__doc__, *OTHERS, "scipy", "threadpoolctl")
    add_sets(parser)
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="files of --report, to be joined")
    parser.add_argument("--only_this", action="store_true", help="skip the others; see --also")
    parser.add_argument("--planted", action="store_true", help="only a synthetic world")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of that world")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS, help="default: both")
    parser.add_argument("--task", default="sequence", help="of this project (default: sequence)")
    parser.add_argument("--epochs", type=int, default=50, help="of SASRec, at most")
    parser.add_argument("--patience", type=int, default=5, help="of SASRec")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], help="flags of the example, the last"
    )
    flags = parser.parse_args()
    name = "sequences_planted" if flags.planted else "sequences"
    finish(name, flags, measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run, joined with those of --also."""
    about = {**describe(), "task": flags.task, "flags": flags.train}
    about["versions"] |= {name: version(name) for name in OTHERS}
    runs = [run for file in flags.also for run in measured_before(file, about)]
    # The oracle ranks the items after all others of a user.
    splits = SPLITS[:1] if flags.planted else flags.splits
    with tempfile.TemporaryDirectory() as folder:
        trained = ("--task", flags.task, *flags.train)
        sets = planted_set(flags, Path(folder)) if flags.planted else data_sets(flags, Path(folder))
        for data in sets:
            for split in splits:
                cases = [
                    SequenceCase(data, split, seed, Path(folder), (*trained, "--split", split))
                    for seed in range(flags.seeds)
                ]
                runs += planted(cases) if flags.planted else compared(cases, flags)
    # Of a case that was measured again, the new result.
    again = {(run["data"], run["task"], run["system"], run["seed"]): run for run in runs}
    return {**about, "runs": [*again.values()]}


def planted_set(flags: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """Folder of the synthetic world, which is drawn into it."""
    write_synthetic(folder / PLANTED, flags.ratings, seed=0)
    yield folder / PLANTED


def planted(cases: Sequence[SequenceCase]) -> Iterator[dict[str, Any]]:
    """Compare this project with popularity, a counted chain, and the oracle."""
    for case in cases:
        columns = case.columns
        for name, metrics in columns.baselines["ranks"].items():
            yield case.run(name, metrics, 0.0)
        yield shown(case, "counted chain", counted_chain(columns))
        yield case.ours(columns)


def compared(cases: Sequence[SequenceCase], flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare every system on the test, for each seed."""
    if flags.only_this:
        yield from ({**case.ours(case.columns), "notes": case.columns.notes} for case in cases)
        return
    settings = chosen_settings(cases[0].columns, cases[0].seed, flags.epochs, flags.patience)
    for case in cases:
        columns, seed = case.columns, case.seed
        found = {
            "popularity": popularity(columns),
            "most recent": most_recent(columns),
            "EASE": best_ease(columns),
            "least squares": least_squares(columns, seed),
            "counted chain": counted_chain(columns),
            "SASRec, recbole": sasrec_of(columns, settings, seed, flags.epochs, flags.patience),
        }
        for name, ranked in found.items():
            yield shown(case, name, ranked)
        yield {**case.ours(columns), "notes": columns.notes}


def shown(case: SequenceCase, system: str, ranked: Ranked) -> dict[str, Any]:
    """Result of another system, as the tables need it."""
    return case.run(system, ranked.metrics, ranked.seconds, settings=ranked.settings)


# --- other systems that know order or time ---


def known_before(columns: Columns, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of the events that are known for a split, int32 [n] both, in the order of time."""
    names = ("train",) if split == "validation" else ("train", "validation")
    users, items = np.concatenate([events_of(columns, name) for name in names], axis=1)
    # Both parts are in order; stable, so that events of one second stay in that of the file.
    order = np.argsort(columns.column("time")[: len(users)], kind="stable")
    return users[order], items[order]


def most_recent(columns: Columns) -> Ranked:
    """Rank items by their number among the newest events, then by their number among all."""
    tried = [judged(columns, "validation", _recent(columns, "validation", n))["ndcg_at_10"] for n in NEWEST]
    best = NEWEST[int(np.argmax(tried))]
    seconds, scores = timed(_recent, columns, "test", best)
    return Ranked(judged(columns, "test", scores), seconds, {"newest": best})


def _recent(columns: Columns, split: str, newest: int) -> np.ndarray:
    """Scores, float64 [users, items], the same for all users."""
    _, items = known_before(columns, split)
    of_all, of_late = (np.bincount(part, minlength=columns.num_items) for part in (items, items[-newest:]))
    return np.broadcast_to(of_late + of_all / (1 + len(items)), (columns.num_users, columns.num_items))


def counted_chain(columns: Columns) -> Ranked:
    """Rank items by how often they followed the last item of the user, then by their number."""
    begin = time.perf_counter()
    users, items = known_before(columns, "test")
    by_user = np.argsort(users, kind="stable")
    users, items = users[by_user], items[by_user]
    follows = np.diff(users) == 0
    counts = np.zeros((columns.num_items, columns.num_items), np.float32)
    np.add.at(counts, (items[:-1][follows], items[1:][follows]), 1)
    counts += np.bincount(items, minlength=columns.num_items) / (1 + len(items))
    last = np.zeros(columns.num_users, np.int64)
    # The last one of several values for a place stays.
    last[users] = items
    seconds = time.perf_counter() - begin
    test_users, _ = events_of(columns, "test")
    return Ranked(judged_cases(columns, "test", lambda part: counts[last[test_users[part]]]), seconds, {})


@dataclass
class Sequences:
    """Items of each user in order, known before "validation" or "test".

    items: int32 [events]; offsets: start of each user, int64 [users + 1].
    """

    items: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, columns: Columns, split: str) -> Sequences:
        """Sequences that are known before a split."""
        users, items = known_before(columns, split)
        counts = np.bincount(users, minlength=columns.num_users)
        return cls(items[np.argsort(users, kind="stable")], np.concatenate([[0], np.cumsum(counts)]))

    def nexts(self) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of the items before each event that is not the first of its user, int64 [n] both."""
        begins = np.repeat(self.offsets[:-1], np.diff(self.offsets))
        ends = np.arange(len(self.items))
        return begins[ends > begins], ends[ends > begins]

    def windows(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of windows of up to LONGEST targets, cut at new places each time, int64 [n] both."""
        begins, ends = self.nexts()
        shifts = random.integers(LONGEST, size=len(self.items))[begins]
        numbers = (ends - begins - 1 + shifts) // LONGEST
        is_first = (np.diff(begins, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 0)
        is_last = np.append(is_first[1:], True)
        return ends[is_first] - 1, ends[is_last]

    def batch(self, begins: np.ndarray, ends: np.ndarray) -> dict[str, torch.Tensor]:
        """Input of the model: the last LONGEST items of sequences."""
        places = np.maximum(begins, ends - LONGEST)[:, None] + np.arange(LONGEST)
        items = np.where(places < ends[:, None], self.items[np.minimum(places, len(self.items) - 1)] + 1, 0)
        lengths = np.minimum(ends - begins, LONGEST)
        return {
            "item_id_list": torch.from_numpy(items.astype(np.int64)),
            # An empty sequence is one item of padding.
            "item_length": torch.from_numpy(np.maximum(lengths, 1)),
        }


@dataclass
class SasrecTraining:
    """Training of SASRec: its seconds, and the best of its epochs on validation."""

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

    def train(self, epochs: int, patience: int) -> SasrecTraining:
        """Train until `patience` epochs in a row were no better on validation."""
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
        """Train an epoch on the next item at every place of sequences, as in the paper.

        The package predicts one event of a sequence and reads it again for the next, which takes fifty times
        as long.
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
        """Train an epoch as the package does, a step for each loss that is read."""
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
        """Ends of the sequences before the events of a split."""
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
    """Train and test the SASRec of `recbole` with the chosen settings."""
    peer = SasrecTraining(columns, settings, seed).train(epochs, patience)
    return Ranked(peer.judged("test"), peer.seconds, {**settings, "epochs": peer.best_epoch})


def chosen_settings(columns: Columns, seed: int, epochs: int, patience: int) -> dict[str, float]:
    """Settings of GRID that are best on validation."""
    tried = [SasrecTraining(columns, settings, seed).train(epochs, patience).best for settings in GRID]
    return GRID[int(np.argmax(tried))]


# --- metrics of recbole, from recommendations of a served model ---


def served_metrics(save_dir: Path, columns: Columns) -> Metrics:
    """HR@10 and NDCG@10 of the recommendations of the best checkpoint, by the code of recbole.

    Nothing of the evaluation takes part: a checkpoint is opened as in a server, and recommends to each user
    from all ratings but the newest.

    columns: of the training, with --split leave_one_out.
    """
    test = columns.range_of("test")
    rows, moments = (columns.column(name)[test.start : test.stop] for name in ("rows", "time"))
    users, items = rows["user"].astype(np.int64), rows["item"].astype(np.int64)
    model = ServedModel.open(save_dir, model=make_model)
    # For any user: the data, and the length of a history in the model.
    config = Config.of(recommend=True, user="0", data_path=columns.source)
    viewer = open_viewer(model, config, ["data_path"])
    known = without(viewer.raw, users, items)
    return metrics_of(recommended(model, known, users, moments, viewer.features.longest), items)


def without(raw: RawData, users: np.ndarray, items: np.ndarray) -> RawData:
    """Data without the events of pairs; users, items: positions, int64 [n]."""
    num_items = len(raw.items)
    pairs = raw.events.user.astype(np.int64) * num_items + raw.events.item
    is_left = ~np.isin(pairs, users * num_items + items)
    return dataclasses.replace(raw, events=with_columns(raw.events, lambda column: column[is_left]))


def recommended(
    model: ServedModel,
    raw: RawData,
    users: np.ndarray,
    moments: np.ndarray,
    longest: int,
) -> np.ndarray:
    """Positions of the TOP items for each user, the best first, NONE where there are fewer, int64 [n, TOP].

    raw: known events; moments: time of each recommendation in seconds, int64 [n]; longest: see
    `TrainingFeatures`.
    """
    schema = model.snapshot.schema
    names = raw.users[schema.column_of(USER)].tolist()
    data = TrainingFeatures(raw, schema, longest)
    viewers = [Viewer(raw, schema, str(names[user]), data) for user in users.tolist()]
    told = [told_of(viewer, model, moment) for viewer, moment in zip(viewers, moments.tolist(), strict=True)]
    values = {name: [value for of_user in told for value in of_user[name]] for name in told[0]}
    items = raw.items[schema.column_of(ITEM)].tolist()
    places = {item: place for place, item in enumerate(items)}
    found = np.full((len(users), TOP), NONE, np.int64)
    best = model.recommend(values, TOP, exclude=[viewer.item_ids.tolist() for viewer in viewers])
    for row, listed in zip(found, best, strict=True):
        row[: len(listed)] = [places[item] for item, _ in listed]
    return found


def told_of(viewer: Viewer, model: ServedModel, moment: int) -> dict[str, list[Any]]:
    """Values of a user that the model reads for a recommendation at this moment."""
    told = viewer.values(model.snapshot)
    if HISTORY_AGES in told:
        # The viewer does not know the moment.
        told[HISTORY_AGES] = [
            ages_in(viewer.times, moment)[-len(told[HISTORY_AGES][0]) or len(viewer.times) :]
        ]
    return told


def differences(ours: Metrics, theirs: Metrics) -> float:
    """Largest difference of a metric."""
    return max(abs(ours[name] - theirs[name]) for name in theirs)


# --- parts of the package recbole ---


def nothing(*_: Any, **more: Any) -> None:
    """Stand-in for an imported function that is not called."""


@contextmanager
def stood_in() -> Iterator[None]:
    """Provide stand-ins for the UNCALLED modules, so that requirements-dev.txt suffices."""
    made = [
        name for name in UNCALLED if name not in sys.modules and find_spec(name.partition(".")[0]) is None
    ]
    for name in made:
        module = ModuleType(name)
        module.__dict__.update(dict.fromkeys(UNCALLED[name], nothing))
        sys.modules[name] = module
    try:
        yield
    finally:
        # No other code may find a stand-in.
        for name in made:
            del sys.modules[name]


def load(name: str) -> ModuleType:
    """Import a module of recbole 1.2.1."""
    import torch

    # The package restores this name of numpy itself, by one that numpy 2 lacks too.
    if not hasattr(np, "float"):
        np.float = np.float64  # type: ignore[attr-defined]
    with stood_in():
        found = importlib.import_module(f"recbole.{name}")
        # One of its modules switches anomaly detection on for this process.
        torch.autograd.set_detect_anomaly(False)
        return found


def metrics_of(recommended: np.ndarray, chosen: np.ndarray) -> Metrics:
    """HR@10 and NDCG@10 by the code of recbole.

    recommended: ids of the first TOP items for each case, the best first, [n, TOP]; chosen: id of the item of
    each case, [n].
    """
    import torch

    hits = recommended == chosen[:, None]
    # A hit or none at each place, and behind the last place the number of items of the case.
    places = np.column_stack([hits, np.ones(len(hits), bool)]).astype(np.int64)
    data = load("evaluator.collector").DataStruct()
    data.set("rec.topk", torch.from_numpy(places))
    metrics, settings = load("evaluator.metrics"), {"topk": [TOP], "metric_decimal_place": DIGITS}
    found = {**metrics.Hit(settings).calculate_metric(data), **metrics.NDCG(settings).calculate_metric(data)}
    return {"hr_at_10": float(found[f"hit@{TOP}"]), "ndcg_at_10": float(found[f"ndcg@{TOP}"])}


def sasrec(num_items: int, **settings: Any) -> Any:
    """SASRec for a number of items, whose rows begin with 1; settings: that differ from SETTINGS.

    Its loss reads "item_id_list", int64 [B, MAX_ITEM_LIST_LENGTH], padded with zeros on the right;
    "item_length", int64 [B]; and the next item, "item_id", int64 [B].
    """
    model = load("model.sequential_recommender.sasrec")
    return model.SASRec({**SETTINGS, **settings}, NumberOfItems(num_items))


def states_of(model: Any, items: Any) -> Any:
    """States of all places, of which `forward` keeps the last one of each sequence: float32 [B, L, D].

    items: int64 [B, L], padded with zeros on the right. No place sees later ones.
    """
    import torch

    places = model.position_embedding(torch.arange(items.size(1)))
    inputs = model.dropout(model.LayerNorm(model.item_embedding(items) + places))
    mask = model.get_attention_mask(items)
    return model.trm_encoder(inputs, mask, output_all_encoded_layers=False)[-1]


class NumberOfItems:
    """Data set of the package, as far as the model reads it: the number of items, with that of padding."""

    def __init__(self, number: int) -> None:
        self.number = number

    def num(self, field: str) -> int:
        """Number of values of the items."""
        return self.number + 1


# --- bars and tables; computed from the JSON alone ---


def cases_of(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Runs by set and split, and then by system."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        found.setdefault((run["data"], run["task"]), {}).setdefault(run["system"], []).append(run)
    return found


def ndcg(runs: Sequence[dict[str, Any]]) -> float:
    """Mean NDCG@10 over seeds."""
    return mean(run["metrics"]["ndcg_at_10"] for run in runs)


def rival_of(systems: dict[str, list[dict[str, Any]]]) -> str:
    """System of the bar: the oracle if it is known, else the best of the others."""
    peers = [name for name in systems if name != THIS]
    return ORACLE if ORACLE in systems else max(peers, key=lambda name: ndcg(systems[name]))


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    bars = []
    for (data, split), systems in cases_of(result["runs"]).items():
        rival = rival_of(systems)
        ratio, least = ndcg(systems[THIS]) / ndcg(systems[rival]), NEAR if rival == ORACLE else AS_GOOD
        if split == "leave_one_out":
            name = f"{data}, {SHOWN[split]}, NDCG@10 / {rival}"
            bars.append(bar(name, ratio, least, f"{ratio:.3f}", f"{least}"))
        differ = [run["recbole differs by"] for run in systems[THIS] if "recbole differs by" in run]
        if differ:
            name = f"{data}, {SHOWN[split]}, recbole's metrics differ by"
            bars.append(
                bar(name, max(differ), TOLERANCE, f"{max(differ):.1e}", f"{TOLERANCE:g}", at_most=True)
            )
    return bars


def render(result: dict[str, Any]) -> str:
    """Table with a row for each system on each test, notes on the splits, and origin."""
    heads = ("test", "system", "NDCG@10", "HR@10", "NDCG@10 / best other, or oracle", "training")
    lines: list[tuple[str, ...]] = []
    for (data, split), systems in cases_of(result["runs"]).items():
        best = ndcg(systems[rival_of(systems)])
        for name, same in systems.items():
            cells = [
                spread([run["metrics"][metric] for run in same]) for metric in ("ndcg_at_10", "hr_at_10")
            ]
            cells = [f"**{cell}**" if name == THIS else cell for cell in cells]
            seconds = "-" if name == ORACLE else shown_seconds(mean(run["seconds"] for run in same))
            ratio = f"{ndcg(same) / best:.3f}"
            seeds = f"{len(same)} seed{'s' * (len(same) > 1)}"
            lines.append((f"{data}, {SHOWN[split]}, {seeds}", name, *cells, ratio, seconds))
    notes = {f"{run['data']}: {note}." for run in result["runs"] for note in run.get("notes", ())}
    about = f"--task {result['task']}. {origin(result)}."
    return "\n\n".join([table(heads, lines, left=(0, 1)), *sorted(notes), about])


def shown_seconds(seconds: float) -> str:
    """Seconds with one decimal."""
    return f"{seconds:.1f} s" if seconds >= 0.05 else "under 0.1 s"


if __name__ == "__main__":
    main()
