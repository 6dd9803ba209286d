"""Write the weeks of an invented shop with views, carts and purchases, drawn from planted effects.

    python benchmarks/shop_weeks.py FOLDER                     items, users, and three weeks of events
    python benchmarks/shop_weeks.py FOLDER --weeks 1           the first week; then --weeks 2 adds the second
    python benchmarks/shop_weeks.py FOLDER --weeks 3 --bad     the third week with events of random users

    FOLDER/week-1.parquet ...   user_id, product_id, event_type (view, cart, purchase), timestamp
           users.parquet        user_id, country, age (missing for some)
           items.parquet        product_id, title, category (such as "Home > Kitchen > Coffee"), brand, price,
           and
                                vector: 16 floats, a noisy picture of the style
           _oracle.json          NDCG@10 on the newest fifth of the purchases by what is known: all effects;
           all
                                but views and carts; all, if bought items are excluded; all, of items with
                                fewer than five earlier purchases; and popularity

In a session a user views items, puts some of them into the cart, and may buy. A purchase is an item of the
cart (half of the time, if there is one of the last three days), a repeated purchase of something that is used
up (half of the rest, if there is one), or a new item. Views and new items are chosen by the style of the item
and the taste of the user, the brand and the country, and the fame of the item. Of the items, a tenth is new
in each week.

The same flags give the same files, and a week is the same for any number of weeks.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from recsuite.metrics import NEVER_FOUND, measure_ranks

# Monday, 2026-08-03, 00:00 UTC.
FIRST_TIME, WEEK, DAY = 1_785_715_200, 7 * 86_400, 86_400
NUM_USERS, NUM_ITEMS, NUM_BRANDS = 6_000, 2_000, 40
SESSIONS_PER_WEEK, VIEWS = 2.6, 5.0
# Chance that a viewed item is put into the cart, and that a session has a purchase.
CART, PURCHASE = 0.15, 0.45
FROM_CART, AGAIN, CART_SECONDS = 0.5, 0.5, 3 * DAY
STYLES, VECTOR, VECTOR_NOISE = 6, 16, 0.3
# Weights of taste, of brand and country, and of fame in a choice.
TASTE, BRAND, FAME = 1.0, 0.8, 0.8
COUNTRIES = {"US": 0.3, "DE": 0.25, "FR": 0.2, "JP": 0.15, "BR": 0.1}
# Trees of categories; what is used up is bought again.
CATEGORIES = (
    *("Home > Kitchen > Coffee", "Home > Kitchen > Tea", "Home > Kitchen > Pans", "Home > Bath > Soap"),
    *("Home > Bath > Towels", "Garden > Plants > Seeds", "Garden > Tools > Shears", "Pets > Dogs > Food"),
    *("Pets > Cats > Food", "Pets > Dogs > Leads", "Office > Paper > Notebooks", "Office > Desk > Lamps"),
)
USED_UP = ("Coffee", "Tea", "Soap", "Seeds", "Food")
ADJECTIVES = ("Plain", "Bright", "Quiet", "Sturdy", "Little", "Northern", "Folding", "Golden", "Slow")
NO_AGE = 0.15
# Test share, and number of earlier purchases below which an item is cold.
TEST_SHARE, COLD = 0.2, 5


@dataclass(frozen=True)
class World:
    """Users and items with their planted effects. first_week: of each item, int64 [items]."""

    country: np.ndarray
    taste: np.ndarray
    style: np.ndarray
    category: np.ndarray
    brand: np.ndarray
    fame: np.ndarray
    of_brand: np.ndarray
    first_week: np.ndarray

    def chances(self, users: np.ndarray, week: int) -> np.ndarray:
        """Logarithm of the chance of each item to be chosen, but for a constant, float64 [n, items]."""
        found = (
            TASTE * self.taste[users] @ self.style.T
            + BRAND * self.of_brand[self.country[users]][:, self.brand]
        )
        found += FAME * self.fame
        found[:, self.first_week > week] = -np.inf
        return found


class Purchase(NamedTuple):
    """Purchase with what was known of the user: open items of the cart, and items that are bought again."""

    user: int
    item: int
    time: int
    cart: tuple[int, ...]
    again: tuple[int, ...]


@dataclass
class State:
    """Cart of a user, each item with its time, and items bought so far that are used up."""

    cart: deque[tuple[int, int]] = field(default_factory=deque)
    again: dict[int, None] = field(default_factory=dict)


def draw_world(rng: np.random.Generator, num_users: int, num_items: int) -> World:
    """Draw users and items."""
    style = rng.standard_normal((num_items, STYLES))
    first_week = np.zeros(num_items, np.int64)
    # A tenth is new in each of the weeks 2, 3, ...
    order = rng.permutation(num_items)
    for week in range(1, 6):
        first_week[order[(week - 1) * num_items // 10 : week * num_items // 10]] = week
    return World(
        country=rng.choice(len(COUNTRIES), num_users, p=list(COUNTRIES.values())),
        taste=rng.standard_normal((num_users, STYLES)),
        style=style,
        category=rng.integers(len(CATEGORIES), size=num_items),
        brand=rng.integers(NUM_BRANDS, size=num_items),
        fame=rng.standard_normal(num_items),
        of_brand=rng.standard_normal((len(COUNTRIES), NUM_BRANDS)),
        first_week=first_week,
    )


def draw_week(
    seed: int, week: int, world: World, states: list[State]
) -> tuple[list[tuple[int, int, str, int]], list[Purchase]]:
    """Draw the events of a week in the order of time, and its purchases; states: of the users, changed."""
    rng = np.random.default_rng([seed, 1, week])
    number = round(len(states) * SESSIONS_PER_WEEK)
    users = rng.integers(len(states), size=number)
    begins = np.sort(FIRST_TIME + week * WEEK + rng.integers(WEEK - DAY // 4, size=number))
    views = 1 + rng.poisson(VIEWS - 1, number)
    # One draw more for a new item that is bought.
    drawn = _drawn(rng, world, users.repeat(views + 1), week)
    ends = np.cumsum(views + 1).tolist()
    used_up = np.array([name.endswith(USED_UP) for name in CATEGORIES])[world.category]
    events: list[tuple[int, int, str, int]] = []
    purchases: list[Purchase] = []
    for user, begin, end, count in zip(users.tolist(), begins.tolist(), ends, views.tolist(), strict=True):
        state, time = states[user], begin
        *viewed, new = drawn[end - count - 1 : end].tolist()
        for item in viewed:
            time += int(rng.integers(10, 120))
            events.append((user, item, "view", time))
            if rng.random() < CART:
                time += int(rng.integers(5, 60))
                events.append((user, item, "cart", time))
                state.cart.append((item, time))
        while state.cart and state.cart[0][1] < time - CART_SECONDS:
            state.cart.popleft()
        if rng.random() < PURCHASE:
            time += int(rng.integers(30, 300))
            cart, again = tuple(dict.fromkeys(item for item, _ in state.cart)), tuple(state.again)
            item = new
            if cart and rng.random() < FROM_CART:
                item = cart[rng.integers(len(cart))]
            elif again and rng.random() < AGAIN:
                item = again[rng.integers(len(again))]
            purchases.append(Purchase(user, item, time, cart, again))
            events.append((user, item, "purchase", time))
            state.cart = deque(each for each in state.cart if each[0] != item)
            if used_up[item]:
                state.again[item] = None
    return sorted(events, key=lambda event: event[3]), purchases


def _drawn(rng: np.random.Generator, world: World, users: np.ndarray, week: int) -> np.ndarray:
    """Draw an item for each user, by the chances of a week, int64 [n]."""
    found = np.empty(len(users), np.int64)
    for first in range(0, len(users), 2_048):
        chances = world.chances(users[first : first + 2_048], week)
        # The largest of the sums with Gumbel noise is a draw by these chances.
        found[first : first + 2_048] = np.argmax(chances + rng.gumbel(size=chances.shape), axis=1)
    return found


def oracle_of(world: World, purchases: list[Purchase]) -> dict[str, float]:
    """NDCG@10 on the newest fifth of the purchases, by what is known."""
    purchases = sorted(purchases, key=lambda each: each.time)
    first = len(purchases) - round(TEST_SHARE * len(purchases))
    counts = np.bincount([each.item for each in purchases[:first]], minlength=len(world.fame))
    bought: dict[int, set[int]] = {}
    for each in purchases[:first]:
        bought.setdefault(each.user, set()).add(each.item)
    ranks: dict[str, list[int]] = {}
    for each in purchases[first:]:
        # Both sets are known exactly, as is the chance of each way to an item.
        chances = world.chances(np.array([each.user]), (each.time - FIRST_TIME) // WEEK)[0]
        new = np.exp(chances - chances.max())
        new /= new.sum()
        without = (1 - AGAIN * bool(each.again)) * new
        without[list(each.again)] += AGAIN / max(1, len(each.again))
        known = (1 - FROM_CART * bool(each.cart)) * without
        known[list(each.cart)] += FROM_CART / max(1, len(each.cart))
        mine = list(bought.get(each.user, ()))
        left = known.copy()
        left[mine] = -1
        for name, scores in (
            ("all", known),
            ("without_context", without),
            ("excluded", left),
            ("nothing", counts),
        ):
            rank = int((scores >= scores[each.item]).sum())
            ranks.setdefault(name, []).append(rank if scores[each.item] >= 0 else NEVER_FOUND)
    is_cold = counts[[each.item for each in purchases[first:]]] < COLD
    found = {name: np.array(given) for name, given in ranks.items()} | {
        "cold": np.array(ranks["all"])[is_cold]
    }
    return {name: round(measure_ranks(given)["ndcg_at_10"], 6) for name, given in found.items()}


def write_weeks(
    folder: Path,
    weeks: int = 3,
    seed: int = 0,
    is_bad: bool = False,
    num_users: int = NUM_USERS,
    num_items: int = NUM_ITEMS,
) -> dict[str, float]:
    """Write users, items and weeks of events into a folder; return the content of _oracle.json.

    is_bad: the last week has events of random users.
    """
    rng = np.random.default_rng([seed, 0])
    world, states = draw_world(rng, num_users, num_items), [State() for _ in range(num_users)]
    users, products = _users(rng, world), _items(rng, world)
    folder.mkdir(parents=True, exist_ok=True)
    users.to_parquet(folder / "users.parquet", index=False)
    products.to_parquet(folder / "items.parquet", index=False)
    purchases: list[Purchase] = []
    for week in range(weeks):
        events, bought = draw_week(seed, week, world, states)
        purchases += bought
        user, item, kind, time = (np.array(column) for column in zip(*events, strict=True))
        if is_bad and week == weeks - 1:
            user = np.random.default_rng([seed, 2]).permutation(user)
        table = pd.DataFrame(
            {
                "user_id": users["user_id"].to_numpy()[user],
                "product_id": products["product_id"].to_numpy()[item],
                "event_type": kind,
                "timestamp": pd.to_datetime(time, unit="s", utc=True),
            }
        )
        table.to_parquet(folder / f"week-{week + 1}.parquet", index=False)
    oracle = oracle_of(world, purchases)
    (folder / "_oracle.json").write_text(json.dumps(oracle, indent=2) + "\n")
    return oracle


def _users(rng: np.random.Generator, world: World) -> pd.DataFrame:
    number = len(world.country)
    age = rng.integers(18, 80, number).astype(np.float64)
    age[rng.random(number) < NO_AGE] = np.nan
    names = [f"u{code:06d}" for code in rng.permutation(10 * number)[:number]]
    return pd.DataFrame({"user_id": names, "country": np.array(list(COUNTRIES))[world.country], "age": age})


def _items(rng: np.random.Generator, world: World) -> pd.DataFrame:
    number = len(world.fame)
    picture = world.style @ rng.standard_normal((STYLES, VECTOR)) / np.sqrt(STYLES)
    picture += VECTOR_NOISE * rng.standard_normal(picture.shape)
    categories = np.array(CATEGORIES)[world.category]
    adjectives = rng.choice(ADJECTIVES, number)
    return pd.DataFrame(
        {
            "product_id": [f"SKU-{code:05X}" for code in rng.permutation(16 * number)[:number]],
            "title": [
                f"{adjective} {category.rpartition(' > ')[2]} No. {place}"
                for place, (adjective, category) in enumerate(zip(adjectives, categories, strict=True))
            ],
            "category": categories,
            "brand": [f"brand-{brand:02d}" for brand in world.brand],
            "price": np.round(np.exp(3.0 + 0.8 * rng.standard_normal(number)), 2),
            "vector": list(picture.astype(np.float32)),
        }
    )


def main() -> None:
    """Draw and write, and print the oracle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="created if it is missing")
    parser.add_argument(
        "--weeks", type=int, default=3, choices=range(1, 7), help="number of weeks (default: 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shop (default: 0)")
    parser.add_argument("--bad", action="store_true", help="the last week has events of random users")
    parser.add_argument(
        "--users", type=int, default=NUM_USERS, help="with a third as many items (default: 6,000)"
    )
    flags = parser.parse_args()
    items = flags.users * NUM_ITEMS // NUM_USERS
    oracle = write_weeks(flags.folder, flags.weeks, flags.seed, flags.bad, flags.users, items)
    print(f"{flags.folder}: NDCG@10 {json.dumps(oracle)}")


if __name__ == "__main__":
    main()
