"""A model that knows the tables it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import EVENT, ITEM, RATING, USER, Feature, RawData
from recsuite.datasets.tables.derived import (
    AGE_DAYS,
    HOUR,
    USER_DAY,
    age_days,
    dates_name,
    derived,
    hour,
    user_days,
    weekday,
)
from recsuite.datasets.tables.parts import ID, TIME, Wanted, frame_of, parsed, raw_values
from recsuite.datasets.tables.schema_file import CATEGORY, NUMBER
from recsuite.errors import UserError, printable
from recsuite.files import local
from recsuite.serving.display.events import Told
from recsuite.serving.export import write_export
from recsuite.serving.request import check_values, length_of, type_of
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas
    import torch

    from recsuite.datasets.metrics import Metrics
    from recsuite.datasets.tables.schema_file import TableSchema


class FittedModel(ServedModel):
    """A `ServedModel` with the tables that it was trained on: features and histories of users and items.

    snapshot: the weights; raw, tables: the tables and their schema; lists: the flags of the lists of the
    model; metrics: on the test, by name. `fit` returns one.

    Raises:
        UserError: from its methods, for values of a wrong type and for features that the model lacks.

        model = rs.fit(events, epochs=5)
        model.recommend(["8d1f"], k=5)              # [[(item, score), ...]]: 5 pairs for one user
        model.save("served")
    """

    _data: Told

    def __init__(
        self,
        snapshot: Snapshot,
        raw: RawData,
        tables: TableSchema,
        lists: DataConfig,
        metrics: Metrics,
    ) -> None:
        super().__init__(snapshot)
        self._tables = tables
        self.metrics = metrics
        # Where events share lists all counts, whenever it was.
        self._shares = lists.shares_lists
        self._days = {
            entity: {str(name): frame[name].to_numpy() for name in frame if derived(str(name))}
            for entity, frame in ((USER, raw.users), (ITEM, raw.items))
        }
        self._data = Told(raw, snapshot.schema, lists.lists)
        self.tell(self._data)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        users, items = len(self._data.users.ids), len(self._data.items.ids)
        return f"FittedModel({users:,} users, {items:,} items, test: {shown})"

    def recommend(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        k: int = 10,
        *,
        event: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[list[tuple[Any, float]]]:
        """As `ServedModel.recommend`; of users given by their ids all is known that the tables say.

        event: features of the event that is to come, such as {"device": "phone"}, the same for all users.
        """
        coming = self._coming(event)
        if users is not None and not isinstance(users, Mapping):
            length_of(self.snapshot.schema.user, users, self.snapshot.schema)
            users = {self.snapshot.schema.user: self._ids([*users], USER)}
        return super().recommend(_with(users, coming, options), k, **options)

    def score(self, values: Any) -> torch.Tensor:
        """As `ServedModel.score`; or of a table of events as `fit` takes it, with its columns.

        Of users and items all is known that the tables say, and of the event what the frame says. Where it
        has the column of times, a user's history ends strictly before the row's own; without it, all that
        the user had counts, the row's own event too if it is in the tables, and what is computed of times is
        missing. To the reported metrics nothing of the test was known; here what a user had of the test
        before a row is. Where events share lists (--others) all that a user had counts, whenever it was, but
        never the row's own item, and likewise all who had the item. Predicted ratings lie on the scale of the
        labels.
        """
        if isinstance(values, Mapping):
            return super().score(values)
        schema, frame = self.snapshot.schema, frame_of(values, "values")
        users, items = (self._ids(self._column(frame, entity), entity) for entity in (USER, ITEM))
        time = self._times(frame)
        ends = None if time is None or self._shares else time.tolist()
        own = items if self._shares else None
        told = self._data.of_users(users, self.snapshot, ends, own)
        told |= self._data.of_items(self.snapshot, items, ends, users)
        for feature in schema.features:
            if feature.entity == EVENT and feature.column in frame:
                told[feature.name] = self._event_values(feature, frame[feature.column])
            elif feature.entity == EVENT and time is not None and derived(feature.column):
                told[feature.name] = self._computed(feature, time, {USER: users, ITEM: items})
        scores, is_rated = self._score(told), schema.label_kind == RATING
        return scores.clamp(schema.lowest_label, schema.highest_label) if is_rated else scores

    def _times(self, frame: pandas.DataFrame) -> np.ndarray | None:
        """When each event was, int64 [n] in seconds since 1970; None where the frame does not say."""
        timestamp = self._tables.timestamp
        if timestamp is None or timestamp.column not in frame:
            return None
        found: np.ndarray = parsed(
            frame[timestamp.column], Wanted(timestamp.column, TIME, EVENT, timestamp.format)
        )
        return found

    def _computed(self, feature: Feature, time: np.ndarray, ids: Mapping[str, list[Any]]) -> list[Any]:
        """A feature that is computed of the times of events, and of whose users and items they are."""
        call = derived(feature.column)
        assert call is not None
        if feature.column == USER_DAY:
            return list(user_days(ids[USER], time))
        if call.function != AGE_DAYS:
            return list((hour if call.function == HOUR else weekday)(time).tolist())
        known = self._data.users if call.of == USER else self._data.items
        # Of one that is not in the tables there is no date.
        days = np.append(self._days[call.of][dates_name(call.of, call.column)], np.nan)
        ages = age_days(time, days[[known.places.get(each, -1) for each in ids[call.of]]])
        return [None if np.isnan(age) else age for age in ages.tolist()]

    def _coming(self, event: Any) -> dict[str, Any]:
        """The features of the event that is to come, as the training has such values."""
        if event is not None and not isinstance(event, Mapping):
            raise UserError(
                'event takes features of the coming event by their names, such as {"device": "phone"}, and '
                f"got {printable(repr(event))}."
            )
        features = {each.name: each for each in self.snapshot.schema.features if each.entity == EVENT}
        return {
            name: self._event_values(features[name], [value])[0] if name in features else value
            for name, value in (event or {}).items()
        }

    def _event_values(self, feature: Feature, values: Any) -> list[Any]:
        kind = NUMBER if feature.number else CATEGORY
        is_held = feature in self.snapshot.features and not feature.number
        known = self.snapshot.kind_of(feature.name) if is_held else None
        return raw_values(values, Wanted(feature.column, kind, EVENT), known)

    def save(self, folder: str | Path) -> None:
        """Write the model into a new folder, which `ServedModel.open` reads without the tables.

        Raises:
            UserError: when the folder is taken, or cannot be written.
        """
        write_export(self.snapshot, local(folder))

    def _column(self, frame: pandas.DataFrame, entity: str) -> Any:
        column = self.snapshot.schema.column_of(entity)
        if column not in frame:
            raise UserError(f"The events to score have no column {printable(column)}; add it.")
        return frame[column]

    def _ids(self, values: Any, entity: str) -> list[Any]:
        """Ids as the training has them."""
        schema, data = self.snapshot.schema, self._data
        known = (data.users if entity == USER else data.items).places
        # Arrow would call them a column of lists.
        nested = [each for each in values if isinstance(each, (list, tuple, set, dict))]
        check_values(schema.name_of(entity), nested, type_of(known))
        return raw_values(values, Wanted(schema.column_of(entity), ID, entity), type_of(known))


def _with(
    users: Mapping[str, Sequence[Any]] | None, coming: Mapping[str, Any], options: Mapping[str, Any]
) -> Mapping[str, Sequence[Any]] | None:
    """Users by their features, or by the `events` of the options, with the event that is to come."""
    given = next(iter((users or {}).values()), options.get("events"))
    if not coming or given is None:
        return users
    return {**(users or {}), **{name: [value] * len(given) for name, value in coming.items()}}
