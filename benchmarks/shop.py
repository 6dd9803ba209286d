"""Write the events of an invented shop, drawn from planted effects, and the metrics of the best models.

    python benchmarks/shop.py FOLDER                              stars, as Parquet
    python benchmarks/shop.py FOLDER --format csv.gz --label clicks

    FOLDER/events.parquet   user_id (a UUID), product_id (text), timestamp (ISO, with an offset), country and
                            device; stars, 1 to 5, or bought, 0 or 1, or neither: each event is a click; and
                            referrer, a text without information
           items.parquet    product_id, name, price (skewed, some missing), categories (a list; in CSV with
                            | between them)
           oracle.json      the known answer: the metric on the newest fifth of the events of a model that
                            knows every planted effect, and without the price or without event features

The score of a user, an item and a moment is a sum of effects, in stars:

    base      mean + bias of the user + bias of the item + taste of the user for its categories
    numbers   effect of the price in the country of the user; a constant where the price is unknown
    events    demand for its categories at this hour + device + weekday

A label is the score plus noise: rounded to 1..5 stars, or compared with a threshold for yes and no. A click
is an item that the user chooses: the chances grow like exp(LOUDNESS * score), times the fame of the item.

The same flags give the same files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pandas as pd

from recsuite.metrics import measure_ranks

LABELS = ("stars", "yes_no", "clicks")
# Share of the users, hours ahead of UTC, and effect of a price one standard deviation above the mean, of each
# country. The mean effect over all users is about 0, so that the bias of an item does not reveal its price.
COUNTRIES = {
    "US": (0.24, -4, 0.55),
    "DE": (0.18, 2, -0.55),
    "FR": (0.14, 2, 0.45),
    "IN": (0.14, 5.5, -0.6),
    "JP": (0.12, 9, 0.5),
    "BR": (0.10, -3, -0.45),
    "SE": (0.08, 2, 0.0),
}
CATEGORIES = [
    "audio",
    "books",
    "coffee",
    "cycling",
    "garden",
    "kitchen",
    "lighting",
    "office",
    "outdoor",
    "toys",
]
# Share of the events and effect of each device.
DEVICES = {"phone": (0.55, -0.2), "desktop": (0.3, 0.35), "tablet": (0.15, 0.05)}
# Effects of Saturday and Sunday, and of the other days.
WEEKEND, WORKDAY = 0.2, -0.08
# Effect of the best hour of a category; half a day later it is the negative.
HOUR_EFFECT = 0.65
MEAN_SCORE, LIKED_SCORE = 3.4, 3.5
USER_STD, ITEM_STD, TASTE_STD, NOISE_STD = 0.35, 0.3, 0.15, 0.7
# Of the logarithm of a price, in one currency.
PRICE_MEAN, PRICE_STD = 3.2, 0.9
SHARE_OF_NO_PRICE, NO_PRICE = 0.1, -0.4
# Weight of the score in clicks, and standard deviation of the logarithm of fame.
LOUDNESS, FAME_STD = 2.5, 0.7
# Weight of taste in clicks: users choose more by taste than they rate by it.
CLICK_TASTE = 4.0
ACTIVITY_STD = 0.8
# Start, Monday, 2026-08-03, 00:00 UTC.
FIRST_TIME, DAYS = 1_785_715_200, 42
# Bounds the memory: events whose chances for all items exist at once.
EVENTS_AT_ONCE = 2_048
FORMATS = ("parquet", "csv.gz")
NUM_EVENTS, MIN_EVENTS = 50_000, 1_000
EVENTS_PER_USER, EVENTS_PER_ITEM = 20, 25
TEST_SHARE = 0.2
# Oracles, and the effects that each does not know.
UNKNOWN_EFFECTS: dict[str, tuple[str, ...]] = {
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


# --- the planted effects ---


@dataclass(frozen=True)
class ShopUsers:
    """Users of the shop.

    country: place in COUNTRIES, int64 [users]; bias: float64 [users]; taste: float64 [users, categories];
    activity: shares of the events, float64 [users].
    """

    country: np.ndarray
    bias: np.ndarray
    taste: np.ndarray
    activity: np.ndarray


@dataclass(frozen=True)
class ShopItems:
    """Items of the shop.

    is_in: bool [items, categories]; price: float64 [items], NaN for an unknown one; bias: float64 [items];
    fame: shares of the events without choices, float64 [items].
    """

    is_in: np.ndarray
    price: np.ndarray
    bias: np.ndarray
    fame: np.ndarray

    @property
    def mixture(self) -> np.ndarray:
        """Share of each item in each category, float64 [items, categories]."""
        return self.is_in / self.is_in.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class ShopMoments:
    """Users, times in seconds since 1970, and places of devices in DEVICES, of events; int64 [events]."""

    user: np.ndarray
    time: np.ndarray
    device: np.ndarray

    def part(self, events: slice | np.ndarray) -> ShopMoments:
        """Some of the events."""
        return ShopMoments(self.user[events], self.time[events], self.device[events])


@dataclass(frozen=True)
class ShopWorld:
    """Users and items with their planted effects; best_hour: float64 [categories]."""

    users: ShopUsers
    items: ShopItems
    best_hour: np.ndarray

    def effects(self, moments: ShopMoments, item: np.ndarray) -> dict[str, np.ndarray]:
        """Effects whose sum is the score of events, float64 [events] each. item: int64 [events]."""
        users, mixture = self.users, self.items.mixture[item]
        taste = (users.taste[moments.user] * mixture).sum(axis=1)
        at_hour = (hour_effects(self.best_hour, moments.time) * mixture).sum(axis=1)
        return {
            "base": MEAN_SCORE + users.bias[moments.user] + self.items.bias[item] + taste,
            "numbers": price_effects(self.items.price)[users.country[moments.user], item],
            "events": at_hour + device_effects(moments.device) + weekday_effects(moments.time),
        }

    def choices(self, moments: ShopMoments, without: str = "") -> np.ndarray:
        """Logarithm of the chance of each item to be clicked, but for a constant, float64 [events, items].

        without: effects to leave out, "numbers" or "events".
        """
        users, items = self.users, self.items
        liked = CLICK_TASTE * users.taste[moments.user] @ items.mixture.T + items.bias
        if without != "numbers":
            liked = liked + price_effects(items.price)[users.country[moments.user]]
        if without != "events":
            liked = liked + hour_effects(self.best_hour, moments.time) @ items.mixture.T
        return np.log(items.fame) + LOUDNESS * liked


def draw_world(rng: np.random.Generator, num_users: int, num_items: int) -> ShopWorld:
    """Draw users, items, and the best hour of each category."""
    return ShopWorld(
        _draw_users(rng, num_users), _draw_items(rng, num_items), rng.uniform(0, 24, len(CATEGORIES))
    )


def _draw_users(rng: np.random.Generator, number: int) -> ShopUsers:
    shares = [share for share, _, _ in COUNTRIES.values()]
    activity = np.exp(ACTIVITY_STD * rng.standard_normal(number))
    return ShopUsers(
        country=rng.choice(len(COUNTRIES), number, p=shares),
        bias=USER_STD * rng.standard_normal(number),
        taste=TASTE_STD * rng.standard_normal((number, len(CATEGORIES))),
        activity=activity / activity.sum(),
    )


def _draw_items(rng: np.random.Generator, number: int) -> ShopItems:
    is_in = rng.random((number, len(CATEGORIES))) < 0.04
    is_in[np.arange(number), rng.integers(len(CATEGORIES), size=number)] = True
    price = np.round(np.exp(PRICE_MEAN + PRICE_STD * rng.standard_normal(number)), 2)
    price[rng.random(number) < SHARE_OF_NO_PRICE] = np.nan
    fame = np.exp(FAME_STD * rng.standard_normal(number))
    return ShopItems(is_in, price, ITEM_STD * rng.standard_normal(number), fame / fame.sum())


def draw_moments(rng: np.random.Generator, users: ShopUsers, number: int) -> ShopMoments:
    """Draw user, time and device of events, in the order of time."""
    shares = [share for share, _ in DEVICES.values()]
    return ShopMoments(
        user=rng.choice(len(users.activity), number, p=users.activity),
        time=np.sort(FIRST_TIME + rng.integers(DAYS * 86_400, size=number)),
        device=rng.choice(len(DEVICES), number, p=shares),
    )


def draw_items(
    rng: np.random.Generator, world: ShopWorld, moments: ShopMoments, is_chosen: bool
) -> np.ndarray:
    """Draw the item of each event, int64 [events]: by fame alone, or as the user chooses."""
    number = len(moments.user)
    if not is_chosen:
        return rng.choice(len(world.items.fame), number, p=world.items.fame)
    chosen = np.empty(number, np.int64)
    for part in parts(number):
        chances = world.choices(moments.part(part))
        # The largest of the sums with Gumbel noise is a draw by these chances.
        chosen[part] = np.argmax(chances + rng.gumbel(size=chances.shape), axis=1)
    return chosen


def parts(number: int) -> list[slice]:
    """Events in pieces whose choices fit into memory."""
    return [slice(first, first + EVENTS_AT_ONCE) for first in range(0, number, EVENTS_AT_ONCE)]


def price_effects(price: np.ndarray) -> np.ndarray:
    """Effect of the price of each item in each country, float64 [countries, items]."""
    minded = np.array([effect for _, _, effect in COUNTRIES.values()])
    standardized = (np.log(price) - PRICE_MEAN) / PRICE_STD
    return np.where(np.isnan(price), NO_PRICE, minded[:, None] * standardized)


def hour_effects(best_hour: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Effect of the hour, of UTC, on each category, float64 [events, categories]."""
    hour = time // 3600 % 24
    return HOUR_EFFECT * np.cos(2 * np.pi * (hour[:, None] - best_hour) / 24)


def device_effects(device: np.ndarray) -> np.ndarray:
    """Effect of the device, float64 [events]."""
    return np.array([effect for _, effect in DEVICES.values()])[device]


def weekday_effects(time: np.ndarray) -> np.ndarray:
    """Effect of the weekday, of UTC, float64 [events]."""
    # 1970 began on a Thursday, the fourth day of a week.
    return np.where((time // 86_400 + 3) % 7 >= 5, WEEKEND, WORKDAY)


def total(effects: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of effects."""
    return np.sum(list(effects), axis=0)


def expected_stars(score: np.ndarray, std: float) -> np.ndarray:
    """Expected stars of a score plus normal noise, float64 [n]."""
    # Rounded and clipped, they are 1 plus the number of thresholds below the noisy score.
    return 1 + total(chance_above(score, half, std) for half in (1.5, 2.5, 3.5, 4.5))


def chance_above(score: np.ndarray, threshold: float, std: float) -> np.ndarray:
    """Chance of a score plus normal noise to exceed a threshold, float64 [n]."""
    width = std * math.sqrt(2)
    return np.array([math.erfc((threshold - value) / width) / 2 for value in score.tolist()])


# --- the shop and its files ---


@dataclass(frozen=True)
class Shop:
    """World, events in the order of time, and item and label of each, int64 [events].

    Every label of clicks is 1.
    """

    world: ShopWorld
    moments: ShopMoments
    item: np.ndarray
    label: np.ndarray


def main() -> None:
    """Draw and write, and print the oracle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="created if it is missing")
    parser.add_argument(
        "--events", type=int, default=NUM_EVENTS, help=f"number of events (default: {NUM_EVENTS:,})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shop (default: 0)")
    parser.add_argument("--label", choices=LABELS, default=LABELS[0], help="kind of label")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of both files")
    flags = parser.parse_args()
    if flags.events < MIN_EVENTS:
        parser.error(f"--events must be at least {MIN_EVENTS:,}, got {flags.events:,}")
    oracle = write_shop(flags.folder, flags.events, flags.seed, flags.label, flags.format)
    print(f"{flags.folder}: {json.dumps(oracle)}")


def write_shop(
    folder: Path,
    num_events: int = NUM_EVENTS,
    seed: int = 0,
    label: str = LABELS[0],
    file_format: str = FORMATS[0],
) -> dict[str, float | int | str]:
    """Write the shop into a folder and return the content of oracle.json."""
    shop = draw_shop(num_events, seed, label)
    # Generators of their own: ids depend on neither effects nor the number of events.
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
    """Draw users, items and events of a seed. label: one of LABELS."""
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
    """Metric on the newest fifth, by what the oracle knows; "nothing": mean, or popularity."""
    metric = {"stars": "rmse", "yes_no": "log_loss", "clicks": "ndcg_at_10"}[label]
    shop = _one_of_each_pair(shop, keeps_first=label == "clicks")
    reached = _click_oracle(shop) if label == "clicks" else _label_oracle(shop, label)
    return {"metric": metric, **{name: round(value, 6) for name, value in reached.items()}}


def _label_oracle(shop: Shop, label: str) -> dict[str, float]:
    """RMSE of stars, log loss of yes and no."""
    effects = shop.world.effects(shop.moments, shop.item)
    score = total(effects.values())
    test = slice(len(score) - round(len(score) * TEST_SHARE), None)
    # The mean of the other events.
    expected = {"nothing": np.full(len(score), shop.label[: test.start].mean())}
    for name, unknown_effects in UNKNOWN_EFFECTS.items():
        unknown = total([np.zeros_like(score), *(effects[effect] for effect in unknown_effects)])
        # An unknown effect is more noise around its mean.
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
    ways: dict[str, Callable[[ShopMoments], np.ndarray]] = {
        "all": world.choices,
        "without_numbers": lambda moments: world.choices(moments, "numbers"),
        "without_events": lambda moments: world.choices(moments, "events"),
        "nothing": lambda moments: np.broadcast_to(popularity, (len(moments.user), num_items)),
    }
    is_seen = np.zeros((len(world.users.bias), num_items), bool)
    is_seen[shop.moments.user[:first], shop.item[:first]] = True
    moments, item = shop.moments.part(slice(first, None)), shop.item[first:]
    return {name: _ndcg(way, moments, item, is_seen) for name, way in ways.items()}


def _one_of_each_pair(shop: Shop, keeps_first: bool) -> Shop:
    """Return the shop with the first or the last event of each user and item.

    The default of --duplicates keeps the first click and the last label.
    """
    pairs = shop.moments.user * len(shop.world.items.price) + shop.item
    if keeps_first:
        _, places = np.unique(pairs, return_index=True)
    else:
        _, from_end = np.unique(pairs[::-1], return_index=True)
        places = len(pairs) - 1 - from_end
    places = np.sort(places)
    return dataclasses.replace(
        shop, moments=shop.moments.part(places), item=shop.item[places], label=shop.label[places]
    )


def _ndcg(
    way: Callable[[ShopMoments], np.ndarray], moments: ShopMoments, item: np.ndarray, is_seen: np.ndarray
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
    dropped = {"stars": ["bought"], "yes_no": ["stars"], "clicks": ["stars", "bought"]}[label]
    return pd.DataFrame(columns).drop(columns=dropped)


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
    """Local times in the countries of users."""
    zones = [timezone(timedelta(hours=ahead)) for _, ahead, _ in COUNTRIES.values()]
    return [
        datetime.fromtimestamp(seconds, zones[place]).isoformat()
        for seconds, place in zip(time.tolist(), country.tolist(), strict=True)
    ]


def _referrers(rng: np.random.Generator, number: int) -> list[str]:
    """Free texts, hardly any of them twice."""
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
    # Without the time of writing: the same seed gives the same bytes.
    table.to_csv(path, index=False, compression={"method": "gzip", "mtime": 0})


if __name__ == "__main__":
    main()
