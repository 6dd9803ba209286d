"""The order of a pass where the order of events counts: pieces of what users had, each event once, and what
each event reads of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import Batch, EventBatches, Request
from recsuite.datasets.batching import Pieces, pieces_of
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from tests.support.batches import lists_of
from tests.support.csv_ratings import write_ratings

LONGEST, NUM_MOVIES, NEGATIVES = 6, 60, 20
SPLITS = ("leave_one_out", "time", "random")


def write_shuffled_ratings(folder: Path) -> None:
    """40 users with 3 to 42 ratings, most of a time with others of theirs, in a file in no order."""
    rng = np.random.default_rng(0)
    ratings = []
    for user in range(40):
        movies = rng.permutation(NUM_MOVIES)[: 3 + user].tolist()
        times = 1000 + rng.integers(0, 4 + user // 2, len(movies))
        ratings += [(user, movie, 4.0, time) for movie, time in zip(movies, times.tolist(), strict=True)]
    write_ratings(folder, [ratings[place] for place in rng.permutation(len(ratings))])


@pytest.fixture(scope="module", params=SPLITS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("ratings")
    write_shuffled_ratings(folder)
    flags = {"split": request.param, "validation_fraction": 0.05, "batch_size": 60, "history": LONGEST}
    return Config.of(data_path=str(folder), task="sequence", negatives=NEGATIVES, **flags)


class Read(NamedTuple):
    """An event: its position in the columns, and the table rows of the items that it reads, in order."""

    position: int
    items: tuple[int, ...]


def read_in(dataset: EventBatches, request: Request) -> Iterator[Read]:
    """Return the history of each event of a batch."""
    batch: Batch = dataset[request]
    found = lists_of(dataset.tables, batch)
    lists = found["history"]
    first = len(lists) - dataset.local_batch_size
    positions = dataset._positions_of_step(request)[0]
    items = movie_rows(dataset)[dataset.features.column("rows")["item"][positions]]
    for place, (position, item) in enumerate(zip(positions.tolist(), items, strict=True), start=first):
        source, number = int(batch.sources[place]), int(batch.reads[place])
        assert len(lists[source]) >= number
        assert found["movie"][place] == [item]
        yield Read(position, tuple(lists[source][:number].tolist()))


def movie_rows(dataset: EventBatches) -> np.ndarray:
    rows: np.ndarray = dataset.features.column("movie_features")["features"][:, 0]
    return rows


def read_all(dataset: EventBatches, split: str, epoch: int = 0, first: int = 0) -> list[Read]:
    """Return the history of each event of a pass, in the order of the pass."""
    steps = range(dataset.num_steps(split, first))
    return [each for step in steps for each in read_in(dataset, Request(split, epoch, step, first))]


class Event(NamedTuple):
    """An event in the order of its user: by its time, among those of one time by the split, then by the file.
    What is trained on is known of a time before what is predicted of it.
    """

    time: int
    part: int
    place_in_file: int
    position: int
    item: int


def orders(columns: Columns, config: Config) -> dict[int, list[Event]]:
    """By brute force from the file: user to events."""
    rows, parts = columns.column("rows"), ("train", "validation", "test")
    position_of = {(int(each["user"]), int(each["item"])): place for place, each in enumerate(rows)}
    found: dict[int, list[Event]] = {}
    lines = (Path(config.data.data_path) / "ratings.csv").read_text().splitlines()[1:]
    for place, line in enumerate(lines):
        user, item, _, time = (int(float(each)) for each in line.split(","))
        position = position_of[user, item]
        part = next(number for number, name in enumerate(parts) if position in columns.range_of(name))
        found.setdefault(user, []).append(Event(time, part, place, position, item))
    return {user: sorted(events) for user, events in found.items()}


def pieces(columns: Columns, config: Config, epoch: int) -> Pieces:
    return pieces_of(columns.column("history_offsets"), LONGEST, config.runtime.seed, epoch)


def expected(columns: Columns, config: Config, split: str, epoch: int) -> dict[int, tuple[int, ...]]:
    """Position to the table rows that are to be read."""
    rows = columns.column("movie_features")["features"][:, 0]
    begins = np.sort(pieces(columns, config, epoch).begins)
    offsets = columns.column("history_offsets")
    found = {}
    for user, events in orders(columns, config).items():
        for event in events:
            if event.position not in columns.range_of(split):
                continue
            before = [other for other in events if other < event and other.part < max(event.part, 1)]
            if split == "train":
                place = offsets[user] + len(before)
                before = before[begins[begins <= place].max() - offsets[user] :]
            found[event.position] = tuple(int(rows[other.item]) for other in before[-LONGEST:])
    return found


# --- pieces ---


def test_pieces_partition_the_events_into_short_runs_of_one_user() -> None:
    counts = np.array([0, 1, LONGEST, LONGEST + 1, 0, 50, 3 * LONGEST, 2])
    offsets = np.concatenate([[0], counts.cumsum()])
    cuts = []
    for epoch in range(3):
        found = pieces_of(offsets, LONGEST, seed=0, epoch=epoch)
        lengths = np.diff(found.ends, prepend=0)
        spans = sorted(zip(found.begins.tolist(), lengths.tolist(), strict=True))
        assert [place for begin, length in spans for place in range(begin, begin + length)] == [
            *range(counts.sum())
        ]
        for user, count in enumerate(counts):
            mine = [length for begin, length in spans if offsets[user] <= begin < offsets[user + 1]]
            # None goes over the end of its user.
            assert sum(mine) == count
            assert max(mine, default=0) <= LONGEST
            assert set(mine[1:-1]) <= {LONGEST}
            if 0 < count <= LONGEST:
                assert mine == [count]
        cuts.append((spans, found.begins.tolist()))
    # Elsewhere in another pass, and in another order.
    assert cuts[0][0] != cuts[1][0] != cuts[2][0]
    assert [begins for _, begins in cuts] != [sorted(begins) for _, begins in cuts]


def test_a_long_history_is_cut_at_each_place_in_some_pass() -> None:
    first = {int(np.sort(pieces_of(np.array([0, 100]), LONGEST, 0, epoch).begins)[1]) for epoch in range(60)}
    assert first == {*range(1, LONGEST + 1)}


# --- what is read ---


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_an_event_reads_the_earlier_items_of_its_user(config: Config, split: str) -> None:
    columns = open_columns(config)
    # That each user has several of one time, and that some have more than is read, is planted.
    assert columns.num_train > 500
    for epoch in (0, 1):
        found = read_all(EventBatches(columns, config, 0, 1), split, epoch)
        # Each event once in a pass.
        assert sorted(each.position for each in found) == [*columns.range_of(split)]
        assert dict(found) == expected(columns, config, split, epoch)
    lengths = {len(each.items) for each in found}
    # A piece is as long as what is read, with its last event.
    assert max(lengths) == LONGEST - (split == "train")
    assert split != "train" or lengths == {*range(LONGEST)}


def test_a_pass_reads_users_piece_by_piece(config: Config) -> None:
    columns = open_columns(config)
    position_of = columns.column("history_event")
    found = pieces(columns, config, epoch=1)
    lengths = np.diff(found.ends, prepend=0)
    places = np.concatenate(
        [np.arange(begin, begin + length) for begin, length in zip(found.begins, lengths, strict=True)]
    )
    reads = read_all(EventBatches(columns, config, 0, 1), "train", epoch=1)
    assert [each.position for each in reads] == position_of[places].tolist()


def test_a_list_is_in_a_batch_once_however_many_events_read_it(config: Config) -> None:
    columns = open_columns(config)
    dataset = EventBatches(columns, config.replaced(negatives=0), 0, 1)
    steps = dataset.num_steps("train")
    for step in range(steps):
        batch = dataset[Request("train", 0, step)]
        # No row pads a batch but the last one.
        assert bool((batch.weights > 0).all()) == (step < steps - 1)
        runs = batch.sources.unique()
        lengths = batch.lengths.view(len(dataset.tables), -1)[-1]
        assert lengths[[row for row in range(len(lengths)) if row not in runs]].sum() == 0
        # As long as the last event of its run reads.
        assert all(lengths[row] == batch.reads[batch.sources == row].max() for row in runs)
        assert len(batch.ages) == len(batch.draws) == lengths.sum()


def test_ages_are_the_seconds_to_the_last_event_of_a_run_and_draws_differ_by_pass(config: Config) -> None:
    columns = open_columns(config)
    dataset, times = EventBatches(columns, config, 0, 1), columns.column("time")
    by_position = {event.position: event for events in orders(columns, config).values() for event in events}
    of_user = orders(columns, config)
    users = columns.column("rows")["user"]
    number = 0
    for split in ("train", "test"):
        for step in range(dataset.num_steps(split)):
            request = Request(split, 0, step)
            batch, positions = dataset[request], dataset._positions_of_step(request)[0]
            first = len(batch.reads) - dataset.local_batch_size
            lengths = batch.lengths.view(len(dataset.tables), -1)[-1].tolist()
            ends = np.cumsum(lengths)
            for row in set(batch.sources[first : first + len(positions)].tolist()):
                # The last that reads the list of this row.
                last = positions[np.flatnonzero(batch.sources[first:] == row)[-1]]
                event = by_position[int(last)]
                known = [
                    each
                    for each in of_user[int(users[last])]
                    if each < event and each.part < max(event.part, 1)
                ]
                own = known[len(known) - lengths[row] :]
                wanted = [int(times[last]) - each.time for each in own]
                assert batch.ages[ends[row] - lengths[row] : ends[row]].tolist() == wanted
                number += len(own)
    assert number > 500
    again = dataset[Request("train", 1, 0)]
    assert not np.isin(again.draws, dataset[Request("train", 0, 0)].draws).all()


# --- ranks, resumed passes, room ---


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_ranks_share_the_events_of_one_rank_step_by_step(config: Config, split: str) -> None:
    columns = open_columns(config)
    whole = EventBatches(columns, config, 0, 1)
    # 7 and 100 do not divide a batch, and of 100 ranks most have none of its events.
    last = whole.num_steps(split) - 1
    for world_size, steps in (
        (2, range(last + 1)),
        (3, range(last + 1)),
        (7, range(last + 1)),
        (100, {0, last}),
    ):
        parts = [EventBatches(columns, config, rank, world_size) for rank in range(world_size)]
        assert {part.num_steps(split) for part in parts} == {whole.num_steps(split)}
        for step in steps:
            request = Request(split, 1, step)
            joined = [each for part in parts for each in read_in(part, request)]
            assert joined == [*read_in(whole, request)]


@pytest.mark.parametrize("first", [1, 127])
def test_a_resumed_pass_reads_the_same_events_as_an_uninterrupted_one(config: Config, first: int) -> None:
    columns = open_columns(config)
    whole = read_all(EventBatches(columns, config, 0, 1), "train", epoch=2)
    for world_size in (1, 2, 3):
        parts = [EventBatches(columns, config, rank, world_size) for rank in range(world_size)]
        steps = range(parts[0].num_steps("train", first))
        requests = [Request("train", 2, step, first) for step in steps]
        joined = [each for request in requests for part in parts for each in read_in(part, request)]
        assert joined == whole[first:]


def test_a_batch_does_not_depend_on_earlier_requests(config: Config) -> None:
    columns = open_columns(config)
    dataset, steps = EventBatches(columns, config, 0, 1), (3, 0, 5, 3)
    for epoch, step in zip((0, 1, 0, 2), steps, strict=True):
        request = Request("train", epoch, step)
        fresh = EventBatches(columns, config, 0, 1)
        assert [*read_in(dataset, request)] == [*read_in(fresh, request)]
