"""Write the events of a shop that does not exist, drawn from planted effects, and what the best models reach.

    python benchmarks/shop.py FOLDER                              stars, as Parquet
    python benchmarks/shop.py FOLDER --format csv.gz --label clicks

    FOLDER/events.parquet   user_id (a UUID), product_id (text), timestamp (ISO, with an offset), country and
                            device; stars, 1 to 5, or bought, 0 or 1, or neither: each event is a click; and
                            referrer, a text that tells nothing
           items.parquet    product_id, name, price (skewed, some missing), categories (a list; in CSV with
                            | between them)
           oracle.json      the known answer: the metric on the newest fifth of the events that a model
                            reaches which knows every planted effect, and without the price or without what
                            changes from event to event; `shop_world.py` has the effects

The same flags give the same files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pandas as pd
from shop_world import (
    CATEGORIES,
    COUNTRIES,
    DEVICES,
    LABELS,
    LIKED_SCORE,
    NOISE_STD,
    Moments,
    World,
    chance_above,
    draw_items,
    draw_moments,
    draw_world,
    expected_stars,
    parts,
    total,
)

from recsuite.datasets.metrics import measure_ranks

FORMATS = ("parquet", "csv.gz")
NUM_EVENTS, MIN_EVENTS = 50_000, 1_000
EVENTS_PER_USER, EVENTS_PER_ITEM = 20, 25
TEST_SHARE = 0.2
# The oracles, and the effects that they do not know.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "all": (),
    "without_numbers": ("numbers",),
    "without_events": ("events",),
    "without_both": ("numbers", "events"),
}
ADJECTIVES = ("Plain", "Bright", "Quiet", "Sturdy", "Little", "Northern", "Folding", "Golden", "Slow")
NOUNS = ("Set", "Kit", "Companion", "Classic", "Box", "Basket", "Edition", "Helper", "Pair", "Starter")
REFERRERS = (
    "https://search.example/?q={word}+for+{other}&visit={number}",
    "newsletter {number}: more {word}",
    "a friend wrote of {word}, number {number}",
    "",
)


@dataclass(frozen=True)
class Shop:
    """What was drawn: the world, the events in the order of time, and the item and label of each, int64
    [events]; of clicks every label is 1.
    """

    world: World
    moments: Moments
    item: np.ndarray
    label: np.ndarray


def main() -> None:
    """Draw, write, and say what can be reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="is made if it is not there")
    parser.add_argument("--events", type=int, default=NUM_EVENTS, help=f"how many (default: {NUM_EVENTS:,})")
    parser.add_argument("--seed", type=int, default=0, help="another one, another shop (default: 0)")
    parser.add_argument("--label", choices=LABELS, default=LABELS[0], help="what users leave behind")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of both files")
    flags = parser.parse_args()
    if flags.events < MIN_EVENTS:
        parser.error(f"--events {flags.events} is too few; give at least {MIN_EVENTS:,}")
    oracle = write_shop(flags.folder, flags.events, flags.seed, flags.label, flags.format)
    print(f"{flags.folder}: {json.dumps(oracle)}")


def write_shop(
    folder: Path,
    num_events: int = NUM_EVENTS,
    seed: int = 0,
    label: str = LABELS[0],
    file_format: str = FORMATS[0],
) -> dict[str, float | int | str]:
    """Write the shop into a folder; returns what oracle.json says."""
    shop = draw_shop(num_events, seed, label)
    # Of their own, so that neither the effects nor a number of events change whose id comes first.
    users = _user_ids(np.random.default_rng([seed, 2]), len(shop.world.users.bias))
    rng = np.random.default_rng([seed, 3])
    products = _product_ids(rng, len(shop.world.items.price))
    folder.mkdir(parents=True, exist_ok=True)
    _write(_events_table(rng, shop, users, products, label), folder / f"events.{file_format}")
    _write(_items_table(rng, shop, products), folder / f"items.{file_format}")
    oracle = {"seed": seed, "num_events": num_events, **oracle_of(shop, label)}
    (folder / "oracle.json").write_text(json.dumps(oracle, indent=2) + "\n")
    return oracle


def draw_shop(num_events: int, seed: int, label: str) -> Shop:
    """Users, items and events of a seed, with labels of a kind of LABELS."""
    rng = np.random.default_rng([seed, 1])
    world = draw_world(rng, num_events // EVENTS_PER_USER, num_events // EVENTS_PER_ITEM)
    moments = draw_moments(rng, world.users, num_events)
    item = draw_items(rng, world, moments, is_chosen=label == "clicks")
    noisy = total(world.effects(moments, item).values()) + NOISE_STD * rng.standard_normal(num_events)
    labels = {
        "stars": np.rint(np.clip(noisy, 1, 5)),
        "yes_no": noisy > LIKED_SCORE,
        "clicks": np.ones(num_events),
    }
    return Shop(world, moments, item, labels[label].astype(np.int64))


def oracle_of(shop: Shop, label: str) -> dict[str, float | str]:
    """The metric on the newest fifth, by what the oracle knows; "nothing": mean, or popularity."""
    metric = {"stars": "rmse", "yes_no": "log_loss", "clicks": "ndcg_at_10"}[label]
    shop = _last_of_each_pair(shop)
    reached = _click_oracle(shop) if label == "clicks" else _label_oracle(shop, label)
    return {"metric": metric, **{name: round(value, 6) for name, value in reached.items()}}


def _label_oracle(shop: Shop, label: str) -> dict[str, float]:
    """RMSE of stars, log loss of yes and no."""
    effects = shop.world.effects(shop.moments, shop.item)
    score = total(effects.values())
    test = slice(len(score) - round(len(score) * TEST_SHARE), None)
    # The mean of the others, whoever and whatever it is.
    expected = {"nothing": np.full(len(score), shop.label[: test.start].mean())}
    for name, left_out in LEFT_OUT.items():
        unknown = total([np.zeros_like(score), *(effects[effect] for effect in left_out)])
        # To whoever does not know an effect it is more noise around its mean.
        known, std = score - unknown + unknown.mean(), math.hypot(NOISE_STD, unknown.std())
        is_stars = label == "stars"
        expected[name] = expected_stars(known, std) if is_stars else chance_above(known, LIKED_SCORE, std)
    error = _rmse if label == "stars" else _log_loss
    return {name: error(values[test], shop.label[test]) for name, values in expected.items()}


def _rmse(expected: np.ndarray, stars: np.ndarray) -> float:
    return float(np.sqrt(np.square(stars - expected).mean()))


def _log_loss(chance: np.ndarray, is_yes: np.ndarray) -> float:
    return -float(np.log(np.where(is_yes, chance, 1 - chance)).mean())


def _click_oracle(shop: Shop) -> dict[str, float]:
    """NDCG@10 among the items that the user has not clicked before the newest fifth."""
    number, num_items = len(shop.item), len(shop.world.items.price)
    first = number - round(number * TEST_SHARE)
    popularity = np.bincount(shop.item[:first], minlength=num_items)
    world = shop.world
    ways: dict[str, Callable[[Moments], np.ndarray]] = {
        "all": world.choices,
        "without_numbers": lambda moments: world.choices(moments, "numbers"),
        "without_events": lambda moments: world.choices(moments, "events"),
        "nothing": lambda moments: np.broadcast_to(popularity, (len(moments.user), num_items)),
    }
    is_seen = np.zeros((len(world.users.bias), num_items), bool)
    is_seen[shop.moments.user[:first], shop.item[:first]] = True
    moments, item = shop.moments.part(slice(first, None)), shop.item[first:]
    return {name: _ndcg(way, moments, item, is_seen) for name, way in ways.items()}


def _last_of_each_pair(shop: Shop) -> Shop:
    """With one event of a user and an item, the last: what the default of --duplicates leaves."""
    pairs = shop.moments.user * len(shop.world.items.price) + shop.item
    _, from_end = np.unique(pairs[::-1], return_index=True)
    places = np.sort(len(pairs) - 1 - from_end)
    return dataclasses.replace(
        shop, moments=shop.moments.part(places), item=shop.item[places], label=shop.label[places]
    )


def _ndcg(
    way: Callable[[Moments], np.ndarray], moments: Moments, item: np.ndarray, is_seen: np.ndarray
) -> float:
    """NDCG@10 of events, as training measures it: ties count against the item."""
    ranks = []
    for part in parts(len(item)):
        some = moments.part(part)
        scores = way(some)
        own = scores[np.arange(len(scores)), item[part]]
        is_above = (scores >= own[:, None]) & ~is_seen[some.user]
        is_above[np.arange(len(scores)), item[part]] = True
        ranks.append(is_above.sum(axis=1))
    return measure_ranks(np.concatenate(ranks))["ndcg_at_10"]


def _events_table(
    rng: np.random.Generator, shop: Shop, users: np.ndarray, products: np.ndarray, label: str
) -> pd.DataFrame:
    moments, country = shop.moments, shop.world.users.country[shop.moments.user]
    columns = {
        "user_id": users[moments.user],
        "product_id": products[shop.item],
        "timestamp": _iso_times(moments.time, country),
        "country": np.array(list(COUNTRIES))[country],
        "device": np.array(list(DEVICES))[moments.device],
        "stars": shop.label,
        "bought": shop.label,
        "referrer": _referrers(rng, len(country)),
    }
    left_out = {"stars": ["bought"], "yes_no": ["stars"], "clicks": ["stars", "bought"]}[label]
    return pd.DataFrame(columns).drop(columns=left_out)


def _items_table(rng: np.random.Generator, shop: Shop, products: np.ndarray) -> pd.DataFrame:
    categories = [[CATEGORIES[place] for place in np.flatnonzero(row)] for row in shop.world.items.is_in]
    adjectives, nouns = rng.choice(ADJECTIVES, len(products)), rng.choice(NOUNS, len(products))
    names = [
        f"{adjective} {its[0].title()} {noun}"
        for adjective, its, noun in zip(adjectives, categories, nouns, strict=True)
    ]
    price = shop.world.items.price
    return pd.DataFrame({"product_id": products, "name": names, "price": price, "categories": categories})


def _user_ids(rng: np.random.Generator, number: int) -> np.ndarray:
    """UUIDs, str [number]."""
    return np.array([str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(number)])


def _product_ids(rng: np.random.Generator, number: int) -> np.ndarray:
    """Texts without an order, str [number]."""
    return np.array([f"SKU-{code:05X}" for code in rng.permutation(16 * number)[:number]])


def _iso_times(time: np.ndarray, country: np.ndarray) -> list[str]:
    """Times as clocks in the users' countries show them."""
    zones = [timezone(timedelta(hours=ahead)) for _, ahead, _ in COUNTRIES.values()]
    return [
        datetime.fromtimestamp(seconds, zones[place]).isoformat()
        for seconds, place in zip(time.tolist(), country.tolist(), strict=True)
    ]


def _referrers(rng: np.random.Generator, number: int) -> list[str]:
    """Free text, of which nearly none repeats."""
    words = rng.choice(CATEGORIES, (number, 2))
    numbers, forms = rng.integers(1_000_000, size=number), rng.integers(len(REFERRERS), size=number)
    return [
        REFERRERS[form].format(word=word, other=other, number=n)
        for form, (word, other), n in zip(forms, words, numbers, strict=True)
    ]


def _write(table: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
        return
    if "categories" in table:
        table = table.assign(categories=table["categories"].map("|".join))
    # Without the time of writing, which gzip would keep.
    table.to_csv(path, index=False, compression={"method": "gzip", "mtime": 0})


if __name__ == "__main__":
    main()
