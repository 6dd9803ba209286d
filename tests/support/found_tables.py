"""Small tables in the forms in which people have them: `write_case(NAME, FOLDER)` writes one."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

ROWS, USERS, ITEMS = 1_500, 120, 90
START = datetime(2019, 3, 12, 10, 15, tzinfo=timezone.utc)
HEADLINES = {1: "One star", 2: "Two stars", 3: "So so", 4: "Good", 5: "Great"}
# How the times of events are written in each case of times.
TIME_FORMS: dict[str, Callable[[datetime], str]] = {
    "utc": lambda time: f"{time:%Y-%m-%d %H:%M:%S} UTC",
    "ampm": lambda time: f"{time:%m/%d/%Y %I:%M:%S %p}",
    "yyyymmdd": lambda time: f"{time:%Y%m%d}",
    "compact": lambda time: f"{time:%Y%m%dT%H%M%S}Z",
    "month": lambda time: f"{time:%d %b %Y %H:%M}",
    "short_year": lambda time: f"{time:%m/%d/%y}",
    "microseconds": lambda time: str(int(time.timestamp() * 1e6)),
    "nanoseconds": lambda time: str(int(time.timestamp()) * 10**9),
    "float": lambda time: f"{time.timestamp():.1f}",
}


def write_case(name: str, folder: Path) -> Path:
    """Write the tables of a case into a folder, the same ones each time; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    form = TIME_FORMS.get(name.removeprefix("time_"))
    if form is not None:
        _csv(folder / "events.csv", _timed(form))
    else:
        CASES[name](folder)
    return folder


def _events(rows: int = ROWS, seed: int = 0) -> Iterable[tuple[int, int, int, datetime]]:
    """Users, items, ratings from 1 to 5 and times; a few items have most events."""
    random = np.random.default_rng(seed)
    users = random.integers(1, USERS + 1, rows)
    items = np.minimum((random.pareto(0.8, rows) + 1).astype(int), ITEMS)
    tastes = 3 + 0.4 * (users % 5 - 2) + 0.4 * (items % 7 - 3) + random.normal(0, 0.6, rows)
    ratings = np.clip(np.rint(tastes), 1, 5).astype(int)
    for number, (user, item, rating) in enumerate(zip(users, items, ratings, strict=True)):
        yield int(user), int(item), int(rating), START + timedelta(seconds=3_607 * number)


def _csv(path: Path, rows: Iterable[Sequence[object]], encoding: str = "utf-8", **dialect: Any) -> None:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, **dialect).writerows(rows)


def _timed(form: Callable[[datetime], str]) -> list[list[object]]:
    rows = [[user, f"m{item}", rating, form(time)] for user, item, rating, time in _events()]
    return [["user_id", "movie", "score", "time"], *rows]


def _headline(folder: Path) -> None:
    """Reviews whose ratings are random, and whose headlines tell the rating."""
    random = np.random.default_rng(1)
    rows = [
        {
            "rating": float(stars),
            "title": HEADLINES[int(stars)],
            "asin": f"B{item:04}",
            "user_id": f"AE{user}",
            "timestamp": int(time.timestamp() * 1_000),
        }
        for (user, item, _, time), stars in zip(_events(), random.integers(1, 6, ROWS), strict=True)
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _outcomes(folder: Path) -> None:
    """Impressions with several outcomes, one of which follows from another."""
    random = np.random.default_rng(2)
    head = ["user_id", "video_id", "time_ms", "is_click", "is_like", "long_view", "play_time_ms", "tab"]
    rows: list[list[object]] = [[*head, "duration_ms"]]
    for user, item, rating, time in _events():
        click = int(random.random() < 0.15 * rating)
        like, long = int(click and random.random() < 0.1), int(click and random.random() < 0.6)
        played = click * 9_000 * rating
        unix_ms = int(time.timestamp() * 1_000)
        rows.append([user, item, unix_ms, click, like, long, played, user % 3, 1_000 * (10 + item)])
    _csv(folder / "events.csv", rows)


def _hyphen(folder: Path) -> None:
    """Ratings from 2 to 10 of which half are 0: not rated."""
    rows = [[user, f"0{item:05}X", stars * 2 * (place % 2)] for place, (user, item, stars, _) in _numbered()]
    _csv(folder / "events.csv", [["User-ID", "ISBN", "Book-Rating"], *rows])


def _numbered() -> Iterable[tuple[int, tuple[int, int, int, datetime]]]:
    return enumerate(_events())


def _latin(folder: Path) -> None:
    towns = ("München", "Málaga", "Oslo")
    rows = [[user, f"P{item}", stars, towns[user % 3]] for user, item, stars, _ in _events()]
    head = ["User-ID", "Product", "Rating", "Town"]
    _csv(folder / "events.csv", [head, *rows], "latin-1", delimiter=";", quoting=csv.QUOTE_ALL)


def _noheader(folder: Path) -> None:
    _csv(
        folder / "events.csv",
        [[f"U{user}", f"I{item}", stars, int(time.timestamp())] for user, item, stars, time in _events()],
    )


def _spaces(folder: Path) -> None:
    rows = [[user, item, stars] for user, item, stars, _ in _events()]
    _csv(folder / "events.dat", [["user", "item", "rating"], *rows], delimiter=" ")


def _recbole(folder: Path) -> None:
    head = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]
    rows = [[user, item, stars, time.timestamp()] for user, item, stars, time in _events()]
    _csv(folder / "shop.inter", [head, *rows], delimiter="\t")
    names = [[item, f"thing number {item}"] for item in range(1, ITEMS + 1)]
    _csv(folder / "shop.item", [["item_id:token", "name:token_seq"], *names], delimiter="\t")


def _same_columns(folder: Path) -> None:
    """Write items, and the events of users in two files of the same columns: with ratings and without."""
    for name in ("history", "ratings"):
        rows = [[user, item, 1 if name == "history" else stars] for user, item, stars, _ in _events()]
        _csv(folder / f"toy_{name}.dat", [["User_ID", "Toy_ID", "Feedback"], *rows], delimiter="\t")
    toys = [[item, f"Toy {item}", item % 9] for item in range(1, ITEMS + 1)]
    _csv(folder / "toy_info.dat", [["toy_ids", "name", "price"], *toys], delimiter="\t")


def _own_splits(folder: Path) -> None:
    for seed, name in enumerate(("train", "valid", "test")):
        rows = [[user, item, stars, int(time.timestamp())] for user, item, stars, time in _events(400, seed)]
        _csv(folder / f"{name}.csv", [["user_id", "item_id", "rating", "timestamp"], *rows])


def _one_contradiction(folder: Path) -> None:
    rows = [
        [user, item, stars, int(time.timestamp()), "other" if place == 50 else "abcdefg"[item % 7]]
        for place, (user, item, stars, time) in _numbered()
    ]
    _csv(folder / "events.csv", [["user", "item", "label", "time", "genre"], *rows])


def _trailing(folder: Path) -> None:
    """A comma at the end of the header, and one value below it."""
    rows = [
        [user, f"Game {item}", f"{stars * 3.1:.1f}", "1" if place == 0 else ""]
        for place, (user, item, stars, _) in _numbered()
    ]
    _csv(folder / "events.csv", [["user-id", "game-title", "hours", ""], *rows])


def _na_user(folder: Path) -> None:
    """Sessions of which two thirds have no user."""
    rows = [
        [place // 6, "NA" if place // 6 % 3 else user, item, place % 6 * 1_000, f"{time:%Y-%m-%d}"]
        for place, (user, item, _, time) in _numbered()
    ]
    head = ["sessionId", "userId", "itemId", "timeframe", "eventdate"]
    _csv(folder / "events.csv", [head, *rows], delimiter=";")


def _few_items(folder: Path) -> None:
    pairs = [[user, item] for user in range(1, 200) for item in {user % 5 + 1, user * 3 % 5 + 1}]
    _csv(folder / "events.csv", [["user_id", "item_id"], *pairs])


def _float_ids(folder: Path) -> None:
    rows = [
        [f"{user}.0", "" if place % 500 == 499 else f"{item}.0", stars, int(time.timestamp())]
        for place, (user, item, stars, time) in _numbered()
    ]
    _csv(folder / "events.csv", [["user_id", "item_id", "rating", "timestamp"], *rows])


def _jsonl(folder: Path) -> None:
    """Reviews with the columns of Amazon's."""
    rows = [
        {
            "rating": float(stars),
            "title": "Fine",
            "text": "It does what it should. " * 3,
            "images": [],
            "asin": f"B{item:05}",
            "parent_asin": f"B{item:05}",
            "user_id": f"AE{user:04}",
            "timestamp": int(time.timestamp() * 1_000) + 7,
            "helpful_vote": user * item % 3,
            "verified_purchase": (user + item) % 10 > 0,
        }
        for user, item, stars, time in _events()
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _minus_one(folder: Path) -> None:
    rows = [
        [user, item, -1 if place % 5 == 0 else stars * 2] for place, (user, item, stars, _) in _numbered()
    ]
    _csv(folder / "rating.csv", [["user_id", "anime_id", "rating"], *rows])


def _movie_word(folder: Path) -> None:
    """A sample in which nearly every movie is another one."""
    rows = [
        [place * 37 % 150, place if place < 195 else 5, place % 5 + 1, 10**9 + place, f"Film {place}", "A|B"]
        for place in range(200)
    ]
    _csv(folder / "events.csv", [["user_id", "movie_id", "rating", "timestamp", "title", "genres"], *rows])


CASES: dict[str, Callable[[Path], None]] = {
    "headline": _headline,
    "outcomes": _outcomes,
    "hyphen": _hyphen,
    "latin": _latin,
    "noheader": _noheader,
    "spaces": _spaces,
    "recbole": _recbole,
    "same_columns": _same_columns,
    "own_splits": _own_splits,
    "one_contradiction": _one_contradiction,
    "trailing": _trailing,
    "na_user": _na_user,
    "few_items": _few_items,
    "float_ids": _float_ids,
    "jsonl": _jsonl,
    "minus_one": _minus_one,
    "movie_word": _movie_word,
}
