"""The index of items: what it finds, how it follows a model, and its file when that is not what it was."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from example import make_model
from recsuite.checkpoint.format import DynamicRecord, read_manifest
from recsuite.errors import UserError
from recsuite.extras.index import FILE, NOTHING, NearestItems, curve_lines, recall_curve
from recsuite.models.retrieval import InnerProduct, ranked, top_items
from recsuite.serving.export import write_export
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import IdTable, Snapshot
from tests.support.killed_writer import run_until_call
from tests.support.meanwhile import meanwhile
from tests.support.published import flip
from tests.support.random_model import DIM, NAMES, snapshot_of

pytest.importorskip("faiss")
K = 20
USERS = torch.randn(30, DIM, generator=torch.Generator().manual_seed(5))


@dataclasses.dataclass
class World:
    """Items that come, go and change, as deltas bring them."""

    keys: torch.Tensor
    vectors: torch.Tensor

    @classmethod
    def of(cls, number: int, seed: int = 0) -> World:
        draw = torch.Generator().manual_seed(seed)
        # Some below zero, as half of the ids of texts are.
        keys = torch.randperm(10 * number, generator=draw)[:number] - 5 * number
        return cls(keys, torch.randn(number, DIM, generator=draw))

    def after(self, seed: int, share: float = 0.02, length: float = 1) -> World:
        """A delta: a share of the items leaves, one changes, and as many come; in another order."""
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.keys), generator=draw)[round(share * len(self.keys)) :]
        number = round(share * len(order))
        keys, vectors = self.keys[order], self.vectors[order]
        vectors[:number] = length * torch.randn(number, DIM, generator=draw)
        others = 10_000_000 * (seed + 1) + torch.arange(number)
        comes = length * torch.randn(number, DIM, generator=draw)
        return World(torch.cat([keys, others]), torch.cat([vectors, comes]))

    def best(self) -> torch.Tensor:
        return self.keys[top_items(InnerProduct(), USERS, self.vectors, K, NOTHING)]

    def found(self, index: NearestItems, breadth: int | None = None) -> torch.Tensor:
        """The keys of what is best of what an index finds."""
        places = index.search(USERS, K, breadth)
        return self.keys[ranked(InnerProduct(), USERS, self.vectors, places)[0][:, :K]]


def recall(found: torch.Tensor, best: torch.Tensor) -> float:
    pairs = zip(found.tolist(), best.tolist(), strict=True)
    return sum(len({*mine} & {*wanted}) for mine, wanted in pairs) / best.numel()


# --- what it finds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 16, 3_000])
def test_a_search_of_all_lists_finds_the_best_items(number: int) -> None:
    world = World.of(number)
    k = min(K, number)
    assert torch.equal(world.found(NearestItems(world.keys, world.vectors))[:, :k], world.best()[:, :k])


def test_rows_are_found_as_ids_are() -> None:
    vectors = torch.randn(500, DIM, generator=torch.Generator().manual_seed(0))
    rows = torch.randperm(1_000, generator=torch.Generator().manual_seed(1))[:500]
    of_rows, of_ids = NearestItems(rows, vectors), NearestItems(1_000 * rows - 7, vectors)
    assert of_ids._place_of is None
    assert of_rows._place_of is not None
    found = [index.search(USERS, K).sort(dim=1).values for index in (of_rows, of_ids)]
    assert torch.equal(*found)


def test_the_more_lists_the_more_of_the_best_are_found() -> None:
    world = World.of(3_000)
    index = NearestItems(world.keys, world.vectors)
    shares = [recall(world.found(index, breadth), world.best()) for breadth in (1, 8, 32, index.num_lists)]
    assert shares == sorted(shares)
    assert shares[0] < 0.7 < 0.9 < shares[2] <= shares[3] == 1


def test_an_index_of_an_empty_catalogue_accepts_items_later() -> None:
    world = World.of(0)
    index = NearestItems(world.keys, world.vectors)
    assert index.search(USERS, K).shape == (len(USERS), 0)
    later = World.of(40)
    assert torch.equal(later.found(index.after(later.keys, later.vectors)), later.best())


def test_an_index_finds_nine_of_ten_of_the_best_items() -> None:
    model = ServedModel(snapshot_of("ranking", items=5_000))
    users = NAMES["user"]
    recall = model.recall(users, k=10)
    print(f"recall@10 among 5,000 items: {recall:.3f}")
    assert recall >= 0.9
    exact, near = (model.recommend(users, approximate=approximate) for approximate in (False, True))
    for wanted, mine in zip(exact, near, strict=True):
        # The same item has the same score.
        scores = dict(wanted)
        assert all(score == scores.get(item, score) for item, score in mine)
        assert [score for _, score in mine] == sorted((score for _, score in mine), reverse=True)


def test_without_faiss_or_a_model_for_ranking_an_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="requires scores that are products of vectors, as those of --task ranking"
    ):
        ServedModel(snapshot_of("rating")).recommend([1], approximate=True)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        UserError, match=r"requires faiss-cpu, .* pip install faiss-cpu, .* of recsuite\[index\]"
    ):
        ServedModel(snapshot_of("ranking")).recommend([1], approximate=True)


# --- newer models ---------------------------------------------------------------------------------------


def test_an_index_updated_by_deltas_finds_the_same_as_a_new_one() -> None:
    world = World.of(2_000)
    index = NearestItems(world.keys, world.vectors)
    for delta in range(6):
        world = world.after(delta)
        index = index.after(world.keys, world.vectors)
        assert len(index) == index._index.ntotal == len(world.keys)
        assert torch.equal(world.found(index), world.best())
    anew = NearestItems(world.keys, world.vectors)
    assert not index.lists.is_new
    # Also where a search looks at some of the lists alone.
    both = [recall(world.found(each, 16), world.best()) for each in (index, anew)]
    assert both[0] >= both[1] - 0.1


def test_an_index_does_not_change_during_a_search() -> None:
    world = World.of(500)
    index = NearestItems(world.keys, world.vectors)
    before = World(world.keys.clone(), world.vectors.clone())
    later = world.after(1, share=0.2)
    index.after(later.keys, later.vectors)
    assert torch.equal(before.found(index), before.best())


def test_items_that_left_are_never_found() -> None:
    world = World.of(500)
    index = NearestItems(world.keys, world.vectors)
    left = set(world.best().flatten().tolist())
    stays = torch.tensor([key not in left for key in world.keys.tolist()])
    rest = World(world.keys[stays], world.vectors[stays])
    found = rest.found(index.after(rest.keys, rest.vectors))
    assert left.isdisjoint(found.flatten().tolist())
    assert torch.equal(found, rest.best())


def test_items_longer_than_all_before_are_found_in_any_list() -> None:
    world = World.of(3_000)
    index = NearestItems(world.keys, world.vectors)
    longer = world.after(3, share=0.003, length=20)
    index = index.after(longer.keys, longer.vectors)
    assert not index.lists.is_new
    long = set(longer.keys[longer.vectors.norm(dim=1) > index.lists.length].tolist())
    best, found = longer.best().tolist(), longer.found(index, 1).tolist()
    assert long
    for wanted, mine in zip(best, found, strict=True):
        assert long & {*wanted} <= {*mine}


def test_an_index_is_rebuilt_after_too_many_new_items() -> None:
    world = World.of(500)
    index = NearestItems(world.keys, world.vectors)
    # Of 500, 180 are others after the first delta, and more than half after the second.
    first = world.after(1, share=0.25)
    second = first.after(2, share=0.25)
    index = index.after(first.keys, first.vectors)
    assert not index.lists.is_new
    assert index.after(second.keys, second.vectors).lists.is_new
    wider = torch.randn(500, DIM + 4)
    assert index.after(world.keys, wider).lists.is_new


def test_a_decay_that_all_rows_have_in_common_moves_no_item() -> None:
    snapshot = snapshot_of("ranking", items=400)
    model = ServedModel(snapshot)
    first = model.items().nearest
    head = copy.deepcopy(snapshot.head)
    head.row_scale.mul_(0.9)
    model.replace(dataclasses.replace(snapshot, head=head))
    second = model.items().nearest
    assert second is not first
    assert second.lists.came - first.lists.came < 40
    assert model.recommend([1, 2], approximate=True) == model.recommend([1, 2])


def test_a_description_moves_items_with_new_values() -> None:
    model = ServedModel(snapshot_of("ranking", items=400))
    assert model.recommend([1], approximate=True) == model.recommend([1])
    items = list(model.snapshot.vocabulary["movie"])
    model.describe_items({"movie": items[::-1], "year": [None] * 390 + [1990] * 10})
    assert model.recommend([1], approximate=True) == model.recommend([1])
    assert model.items().nearest.lists.came == 10


def test_excluded_items_are_replaced_up_to_k() -> None:
    model = ServedModel(snapshot_of("ranking", items=400))
    users = NAMES["user"][:5]
    had = [[item for item, _ in mine] for mine in model.recommend(users, k=60)]
    exact, near = (model.recommend(users, 10, exclude=had, approximate=way) for way in (False, True))
    assert near == exact
    assert all(len(mine) == 10 for mine in near)


def with_ids(snapshot: Snapshot, ids: list[int], rows: list[int]) -> Snapshot:
    """The same model with a dynamic table of items. ids: ascending."""
    record = DynamicRecord(DIM, 512, 16, "hash", 1, "lru", 0, 0, "steps", False, 0, len(ids))
    places = torch.tensor(rows)

    def table_of(name: str) -> IdTable:
        matrix = snapshot.tables[name].matrix
        return IdTable(matrix, torch.tensor(ids), places, torch.zeros_like(places), record)

    tables = {**snapshot.tables, "movie": table_of("movie"), "history": table_of("history")}
    vocabulary = {name: rows for name, rows in snapshot.vocabulary.items() if name != "movie"}
    return dataclasses.replace(
        snapshot, vocabulary=vocabulary, tables=tables, head=copy.deepcopy(snapshot.head)
    )


def test_the_index_of_a_dynamic_table_has_the_items_that_have_a_row() -> None:
    snapshot = snapshot_of("ranking", items=300)
    model = ServedModel(with_ids(snapshot, [*range(100, 400)], [*range(1, 301)]))
    first = model.recommend([1, 2], k=300, approximate=True)
    assert first == model.recommend([1, 2], k=300)
    gone = {item for mine in first for item, _ in mine[:10]}
    stays = [item for item in range(100, 400) if item not in gone]
    model.replace(with_ids(snapshot, [7, *stays], [3, *(item - 99 for item in stays)]))
    second = model.recommend([1, 2], k=300, approximate=True)
    assert second == model.recommend([1, 2], k=300)
    assert all({item for item, _ in mine} == {7, *stays} for mine in second)
    assert model.items().nearest.lists.came == 1


def test_searches_during_updates_use_one_model() -> None:
    snapshots = [snapshot_of("ranking", seed=seed, items=400) for seed in range(3)]
    answers = [ServedModel(snapshot).recommend([1, 2, 3]) for snapshot in snapshots]
    model = ServedModel(snapshots[0])

    def ask() -> None:
        assert model.recommend([1, 2, 3], approximate=True) in answers

    with meanwhile(ask, 3):
        for number in range(30):
            model.replace(snapshots[number % 3])
            model.recommend([1], approximate=True)


# --- its file -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with an index."""
    folder = tmp_path_factory.mktemp("index") / "export"
    model = ServedModel(snapshot_of("ranking", items=400))
    write_export(model.snapshot, folder, model.items().nearest.lists)
    return folder


@pytest.fixture
def exported(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "export"))


def test_an_export_opens_with_its_index(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, original = (
        ServedModel.open(exported, model=make_model),
        ServedModel(snapshot_of("ranking", items=400)),
    )
    # The index is not made again. The class of the model is not recorded by this snapshot.
    assert [line.partition(" which ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "did not record the class of its model"
    ]
    mine, theirs = model.items().nearest.lists, original.items().nearest.lists
    assert mine.came == 0
    for name in ("centres", "keys", "numbers", "prints"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert model.recommend([1, 2], approximate=True) == original.recommend([1, 2])


def test_without_the_extra_an_export_with_an_index_is_searched_exactly_with_a_warning(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ServedModel.open(exported, model=make_model).recommend([1, 2])
    monkeypatch.setitem(sys.modules, "recsuite.extras.index", None)
    with pytest.warns(UserWarning, match=r"has an index that is not read.* requires recsuite\.extras\.index"):
        model = ServedModel.open(exported, model=make_model)
    assert model.recommend([1, 2]) == expected
    with pytest.raises(UserError, match=r"requires recsuite\.extras\.index, which is not installed"):
        model.recommend([1], approximate=True)


def test_an_export_without_an_index_has_no_trace_of_one(tmp_path: Path) -> None:
    write_export(snapshot_of("ranking"), tmp_path / "export")
    assert not (tmp_path / "export" / FILE).exists()
    assert "index" not in read_manifest(tmp_path / "export").about
    model = ServedModel.open(tmp_path / "export", model=make_model)
    assert model.snapshot.lists is None
    assert model.recommend([1], approximate=True) == model.recommend([1])


def cut(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-1])


def replace(folder: Path) -> None:
    """Replace the index with that of another model."""
    other = ServedModel(snapshot_of("ranking", seed=1, items=400))
    write_export(other.snapshot, folder.parent / "other", other.items().nearest.lists)
    shutil.copyfile(folder.parent / "other" / FILE, folder / FILE)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        replace,
        lambda folder: flip(folder / FILE),
        lambda folder: (folder / FILE).unlink(),
    ],
)
def test_a_damaged_index_is_rebuilt_and_reported(
    exported: Path, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(exported)
    model = ServedModel.open(exported, model=make_model)
    said = capsys.readouterr().out
    assert f"ignoring the index of {exported} (" in said
    assert "; a new one will be made" in said
    assert model.recommend([1, 2], approximate=True) == model.recommend([1, 2])
    assert model.items().nearest.lists.is_new


def test_a_kill_while_an_export_is_written_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    model = ServedModel(snapshot_of("ranking", items=100))
    lists, wanted = model.items().nearest.lists, model.recommend([1, 2])
    # A fork has no threads of torch's, and would wait for them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kills = 0

    def export_into(folder: Path) -> None:
        write_export(model.snapshot, folder / "e", lists)

    try:
        for number in range(1, 200):
            folder = tmp_path / str(number)
            folder.mkdir()
            if run_until_call(number, export_into, folder):
                break
            kills += 1
            if (folder / "e").exists():
                assert (
                    ServedModel.open(folder / "e", model=make_model).recommend([1, 2], approximate=True)
                    == wanted
                )
    finally:
        torch.set_num_threads(threads)
    assert kills >= 5
    assert ServedModel.open(folder / "e", model=make_model).snapshot.lists is not None


# --- what is told of it ---------------------------------------------------------------------------------


def test_a_curve_rises_to_all_of_the_best_items() -> None:
    model = ServedModel(snapshot_of("ranking", items=2_000))
    users, items = model.vectors_of({"user": NAMES["user"]})
    points = recall_curve(users, items, k=10)
    shares = [point.recall for point in points]
    assert points[0].breadth == 1
    assert points[-1].breadth == items.nearest.num_lists
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] == 1
    assert [point.breadth for point in points if point.is_default] == [items.nearest.breadth]
    lines = [*curve_lines(points, k=10)]
    assert len({*map(len, lines)}) == 1
    assert len(lines) == len(points) + 2
    assert json.loads(json.dumps([dataclasses.asdict(point) for point in points]))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Small sets gain nothing from threads, and a machine of two cores loses by them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
