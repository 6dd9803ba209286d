"""Events of a split as requests to a served model: the user, the user history, and the chosen item."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recsuite.checkpoint.recorded import checked_flags
from recsuite.config.config import Config
from recsuite.datasets.batching import history_prefix
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import HISTORY, ITEM, USER, RawData
from recsuite.errors import UserError
from recsuite.metrics import TOP, Metrics, measure_ranks
from recsuite.serving.request import HISTORY_AGES, HISTORY_RATINGS
from recsuite.serving.served import ServedModel
from recsuite.serving.training_data import KnownFeatures, data_at

# A recommender: from values of users and a number of items to lists of raw ids with scores.
Recommender = Callable[..., Sequence[Sequence[tuple[Any, float]]]]
# Number of users in a request.
AT_ONCE = 256


@dataclass(frozen=True)
class RequestCases:
    """Events as requests.

    values: of the features of their users, and of the user histories, see `ServedModel.score`; seen: the raw
    ids of the items that must not be recommended; items: the raw ids of the chosen items; baselines: of
    rankings, if the events are the test.
    """

    values: dict[str, list[Any]]
    seen: list[list[Any]]
    items: list[Any]
    baselines: Mapping[str, Metrics] = field(default_factory=dict)

    def one(self, number: int) -> dict[str, list[Any]]:
        """Return the values of one event."""
        return {name: [values[number]] for name, values in self.values.items()}

    def metrics(self, recommend: Recommender) -> Metrics:
        """Return HR@10 and NDCG@10 of the chosen item, among all items new to the user."""
        ranks: list[int] = []
        for begin in range(0, len(self.items), AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            values = {name: column[part] for name, column in self.values.items()}
            recommended = recommend(values, TOP, exclude=self.seen[part])
            for best, item in zip(recommended, self.items[part], strict=True):
                ids = [key for key, _ in best]
                # A missing item gets a rank outside of the top items.
                ranks.append(1 + ids.index(item) if item in ids else 1 + TOP)
        return measure_ranks(np.array(ranks)).values


def latencies(cases: RequestCases, recommend: Recommender, clients: int, answers: int) -> list[float]:
    """Return the seconds of each answer, ascending, for parallel clients that ask for one user at a time."""
    seconds: list[float] = []

    def ask(client: int) -> None:
        for answer in range(answers):
            number = (client + answer * clients) % len(cases.items)
            begin = time.perf_counter()
            recommend(cases.one(number), TOP, exclude=[cases.seen[number]])
            seconds.append(time.perf_counter() - begin)

    with ThreadPoolExecutor(clients) as pool:
        for asked in [pool.submit(ask, client) for client in range(clients)]:
            # Raises the exception of the thread.
            asked.result()
    return sorted(seconds)


def cases_of_models(models: Sequence[ServedModel], data_path: str) -> Iterator[RequestCases]:
    """Yield the validation events and the test events that the trainings of all models share.

    Also gives the models the features of their items. data_path: of the data of the trainings.

    Raises:
        UserError: when the data are not those of the models, or their trainings had different splits.
    """
    all_flags = [checked_flags(model.snapshot.trained, model.snapshot.config) for model in models]
    configs = [Config.of(**{**flags, "data_path": data_path}) for flags in all_flags]
    columns = [open_columns(config.replaced(dataset="", synthetic_kind="stationary")) for config in configs]
    if len({part.digest for part in columns}) > 1:
        raise UserError("The models were trained on different events; train them with the same --split.")
    for model in models:
        data = data_at(model.snapshot, data_path, str(model.snapshot.trained.parent))
        model.tell(data.features)
    for split, part in (("validation", columns[0].num_validation), ("test", columns[0].num_test)):
        if part == 0:
            raise UserError(f"There are no {split} events; give --validation_fraction 0.1, for example.")
        yield cases_of(columns[0], data.raw, split, max(config.data.history for config in configs))


def cases_of(columns: Columns, raw: RawData, split: str, longest: int) -> RequestCases:
    """Return the events of "validation" or "test". raw: the data of the columns; longest: of a history.

    Features of the events themselves are omitted: a model treats them as unknown.
    """
    schema, prefix = columns.schema, history_prefix(split)
    positions = np.asarray(columns.range_of(split))
    rows, times = columns.column("rows")[positions], columns.column("time")[positions]
    names = "seen", "history", "history_time"
    seen, history, history_time = (columns.column(f"{prefix}{name}") for name in names)
    offsets = columns.column(f"{prefix}history_offsets")
    before = columns.column("history_before")[positions].astype(np.int64)
    begins, ends = offsets[rows["user"]], offsets[rows["user"] + 1]
    starts = np.maximum(begins, before - longest)
    ids, items = raw.items[schema.column_of(ITEM)].to_numpy(), np.where(seen < 0, ~seen, seen)
    read = [slice(start, end) for start, end in zip(starts.tolist(), before.tolist(), strict=True)]
    users = KnownFeatures(raw.users, schema, USER).values
    values = {name: [column[user] for user in rows["user"].tolist()] for name, column in users.items()}
    values[HISTORY] = [ids[items[part]].tolist() for part in read]
    labels = [np.ascontiguousarray(history[part, 1]).view(np.float32) for part in read]
    values[HISTORY_RATINGS] = [[schema.shown(label) for label in of_event.tolist()] for of_event in labels]
    values[HISTORY_AGES] = [
        np.maximum(time - history_time[part], 0).tolist() for time, part in zip(times, read, strict=True)
    ]
    ends = ends if schema.excludes_seen else begins
    lists = (seen[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True))
    # Those of the context are below 0.
    excluded = [ids[seen_items[seen_items >= 0]].tolist() for seen_items in lists]
    baselines = columns.baselines["ranks"] if split == "test" else {}
    return RequestCases(values, excluded, ids[rows["item"]].tolist(), baselines)
