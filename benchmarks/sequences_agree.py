"""Whether another program finds the same metrics: what a served model recommends, judged by `recbole`.

Nothing of the evaluation takes part: a checkpoint is opened as a server would, each user is recommended to
from his ratings but the newest, and the package counts where that one is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recbole_parts import metrics_of

from recsuite.config.config import Config
from recsuite.config.sections import TOP
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.schema import ITEM, USER, RawData, with_columns
from recsuite.serving.recommend import Told, Viewer, ages_in, open_viewer
from recsuite.serving.request import HISTORY_AGES
from recsuite.serving.served import ServedModel

# Apart by no more than the last bits of a sum.
TOLERANCE = 1e-9
# An item that is none, where fewer than TOP are recommended.
NONE = -1


def served_metrics(save_dir: Path, columns: Columns) -> Metrics:
    """HR@10 and NDCG@10 of what the best checkpoint recommends, by recbole's code.

    columns: what it was trained on, with --split leave_one_out.
    """
    test = columns.range_of("test")
    rows, moments = (columns.column(name)[test.start : test.stop] for name in ("rows", "time"))
    users, items = rows["user"].astype(np.int64), rows["item"].astype(np.int64)
    model = ServedModel.open(save_dir)
    # Nobody in particular: what the data are, and how much of a history the model takes.
    config = Config.of(recommend=True, user="0", data_path=columns.source)
    nobody = open_viewer(model, config, ["data_path"])
    known = without(nobody.raw, users, items)
    return metrics_of(recommended(model, known, users, moments, nobody.told.longest), items)


def without(raw: RawData, users: np.ndarray, items: np.ndarray) -> RawData:
    """The data without some events: of these users and items, positions int64 [n]."""
    num_items = len(raw.items)
    pairs = raw.events.user.astype(np.int64) * num_items + raw.events.item
    is_left = ~np.isin(pairs, users * num_items + items)
    return dataclasses.replace(raw, events=with_columns(raw.events, lambda column: column[is_left]))


def recommended(
    model: ServedModel,
    raw: RawData,
    users: np.ndarray,
    moments: np.ndarray,
    longest: Mapping[str, int | None],
) -> np.ndarray:
    """Positions of the TOP items for each user, the best first, int64 [n, TOP].

    raw: what the users had; moments: when they are recommended to, seconds, int64 [n]; longest: see `Told`.
    """
    schema = model.snapshot.schema
    names = raw.users[schema.column_of(USER)].tolist()
    data = Told(raw, schema, longest)
    viewers = [Viewer(raw, schema, str(names[user]), data) for user in users.tolist()]
    told = [told_of(viewer, model, moment) for viewer, moment in zip(viewers, moments.tolist(), strict=True)]
    values = {name: [value for of_user in told for value in of_user[name]] for name in told[0]}
    items = raw.items[schema.column_of(ITEM)].tolist()
    places = {item: place for place, item in enumerate(items)}
    strange = [place for place, item in enumerate(items) if not model.knows(schema.item, item)]
    found = np.empty((len(users), TOP), np.int64)
    best = model.recommend(values, TOP, exclude=[viewer.item_ids.tolist() for viewer in viewers])
    for row, few, viewer, of_user in zip(found, best, viewers, told, strict=True):
        scores = {places[item]: score for item, score in few}
        row[:] = best_of({**scores, **scores_of(model, viewer, of_user, strange)})
    return found


def told_of(viewer: Viewer, model: ServedModel, moment: int) -> dict[str, list[Any]]:
    """What a model takes of a user to whom something comes at this moment."""
    told = viewer.values(model.snapshot)
    if HISTORY_AGES in told:
        # The viewer itself does not know when.
        told[HISTORY_AGES] = [
            ages_in(viewer.times, moment)[-len(told[HISTORY_AGES][0]) or len(viewer.times) :]
        ]
    return told


def scores_of(
    model: ServedModel, viewer: Viewer, told: dict[str, list[Any]], items: Sequence[int]
) -> dict[int, float]:
    """Of items, positions, that the training never saw: no server recommends them, but the evaluation ranks
    all.
    """
    items = [item for item in items if item not in set(viewer.items.tolist())]
    if not items:
        return {}
    described = viewer.told.of_items(model.snapshot)
    of_items = {name: [values[item] for item in items] for name, values in described.items()}
    pairs = {name: [value[0]] * len(items) for name, value in told.items()}
    return dict(zip(items, model.score({**pairs, **of_items}).tolist(), strict=True))


def best_of(scores: dict[int, float]) -> list[int]:
    """The TOP with the highest scores, the best first; NONE where there are fewer."""
    order = sorted(scores, key=lambda item: -scores[item])[:TOP]
    return order + [NONE] * (TOP - len(order))


def differences(ours: Metrics, theirs: Metrics) -> float:
    """The largest one of a metric."""
    return max(abs(ours[name] - theirs[name]) for name in theirs)
