"""The planted world behind the events of a shop: what each of them is drawn from, and the best predictions.

The score of a user, an item and a moment is a sum of known effects, in stars:

    base      mean + how kind the user is + how good the item is + how much the user likes its categories
    numbers   how much the users' country minds the price, times the price; less where the price is not known
    events    how much its categories are wanted at this hour + the device + the weekday

A label is the score plus noise: rounded to 1..5 stars, or held against a threshold for yes and no. A click is
an item that the user chooses: the chances grow like exp(LOUDNESS * score), times how well known the item is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

LABELS = ("stars", "yes_no", "clicks")
# Of each country: the share of the users, the hours that its clocks are ahead of UTC, and what a price of one
# standard deviation above the mean adds to the score. Over all users that is about 0, so that no bias of an
# item tells what its price means.
COUNTRIES = {
    "US": (0.24, -4, 0.55),
    "DE": (0.18, 2, -0.55),
    "FR": (0.14, 2, 0.45),
    "IN": (0.14, 5.5, -0.6),
    "JP": (0.12, 9, 0.5),
    "BR": (0.10, -3, -0.45),
    "SE": (0.08, 2, 0.0),
}
CATEGORIES = (
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
)
# Of each device: its share of the events, and what it adds to the score.
DEVICES = {"phone": (0.55, -0.2), "desktop": (0.3, 0.35), "tablet": (0.15, 0.05)}
# What Saturday and Sunday add to the score, and the other days take away.
WEEKEND, WORKDAY = 0.2, -0.08
# What an hour adds to a category that has its best time then, and takes away half a day later.
HOUR_EFFECT = 0.65
MEAN_SCORE, LIKED_SCORE = 3.4, 3.5
USER_STD, ITEM_STD, TASTE_STD, NOISE_STD = 0.35, 0.3, 0.15, 0.7
# The logarithm of a price, whose currency is the same everywhere.
PRICE_MEAN, PRICE_STD = 3.2, 0.9
SHARE_OF_NO_PRICE, NO_PRICE = 0.1, -0.4
# How many items of a chosen kind a click is drawn by, and how unequal the items' fame is.
LOUDNESS, FAME_STD = 2.5, 0.7
# Of a user's taste, for clicks: people choose more by taste than they judge.
CLICK_TASTE = 4.0
ACTIVITY_STD = 0.8
# From Monday, 2026-08-03, 00:00 UTC on.
FIRST_TIME, DAYS = 1_785_715_200, 42
# Bounds the memory of choices: events whose chances for all items are there at once.
EVENTS_AT_ONCE = 2_048


@dataclass(frozen=True)
class Users:
    """country: int64 [users], a place in COUNTRIES; bias: float64 [users]; taste: float64 [users,
    categories]; activity: their shares of the events, float64 [users].
    """

    country: np.ndarray
    bias: np.ndarray
    taste: np.ndarray
    activity: np.ndarray


@dataclass(frozen=True)
class Items:
    """is_in: bool [items, categories]; price: float64 [items], NaN where it is not known; bias: float64
    [items]; fame: their shares of the events where nobody chooses, float64 [items].
    """

    is_in: np.ndarray
    price: np.ndarray
    bias: np.ndarray
    fame: np.ndarray

    @property
    def mixture(self) -> np.ndarray:
        """Each item's share in each category, float64 [items, categories]."""
        return self.is_in / self.is_in.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Moments:
    """user: int64 [events]; time: int64, seconds since 1970; device: int64, a place in DEVICES."""

    user: np.ndarray
    time: np.ndarray
    device: np.ndarray

    def part(self, events: slice | np.ndarray) -> Moments:
        """Some of them."""
        return Moments(self.user[events], self.time[events], self.device[events])


@dataclass(frozen=True)
class World:
    """Users and items with their planted effects; best_hour: float64 [categories]."""

    users: Users
    items: Items
    best_hour: np.ndarray

    def effects(self, moments: Moments, item: np.ndarray) -> dict[str, np.ndarray]:
        """What makes the score of events, float64 [events] each. item: int64 [events]."""
        users, mixture = self.users, self.items.mixture[item]
        taste = (users.taste[moments.user] * mixture).sum(axis=1)
        at_hour = (hour_effects(self.best_hour, moments.time) * mixture).sum(axis=1)
        return {
            "base": MEAN_SCORE + users.bias[moments.user] + self.items.bias[item] + taste,
            "numbers": price_effects(self.items.price)[users.country[moments.user], item],
            "events": at_hour + device_effects(moments.device) + weekday_effects(moments.time),
        }

    def choices(self, moments: Moments, without: str = "") -> np.ndarray:
        """The logarithm of how likely each item is clicked, but for a constant, float64 [events, items].

        without: "numbers" or "events", which are left out.
        """
        users, items = self.users, self.items
        liked = CLICK_TASTE * users.taste[moments.user] @ items.mixture.T + items.bias
        if without != "numbers":
            liked = liked + price_effects(items.price)[users.country[moments.user]]
        if without != "events":
            liked = liked + hour_effects(self.best_hour, moments.time) @ items.mixture.T
        return np.log(items.fame) + LOUDNESS * liked


def draw_world(rng: np.random.Generator, num_users: int, num_items: int) -> World:
    """Users, items, and when which category is wanted."""
    return World(
        _draw_users(rng, num_users), _draw_items(rng, num_items), rng.uniform(0, 24, len(CATEGORIES))
    )


def _draw_users(rng: np.random.Generator, number: int) -> Users:
    shares = [share for share, _, _ in COUNTRIES.values()]
    activity = np.exp(ACTIVITY_STD * rng.standard_normal(number))
    return Users(
        country=rng.choice(len(COUNTRIES), number, p=shares),
        bias=USER_STD * rng.standard_normal(number),
        taste=TASTE_STD * rng.standard_normal((number, len(CATEGORIES))),
        activity=activity / activity.sum(),
    )


def _draw_items(rng: np.random.Generator, number: int) -> Items:
    is_in = rng.random((number, len(CATEGORIES))) < 0.04
    is_in[np.arange(number), rng.integers(len(CATEGORIES), size=number)] = True
    price = np.round(np.exp(PRICE_MEAN + PRICE_STD * rng.standard_normal(number)), 2)
    price[rng.random(number) < SHARE_OF_NO_PRICE] = np.nan
    fame = np.exp(FAME_STD * rng.standard_normal(number))
    return Items(is_in, price, ITEM_STD * rng.standard_normal(number), fame / fame.sum())


def draw_moments(rng: np.random.Generator, users: Users, number: int) -> Moments:
    """Who comes when and with what, in the order of time."""
    shares = [share for share, _ in DEVICES.values()]
    return Moments(
        user=rng.choice(len(users.activity), number, p=users.activity),
        time=np.sort(FIRST_TIME + rng.integers(DAYS * 86_400, size=number)),
        device=rng.choice(len(DEVICES), number, p=shares),
    )


def draw_items(rng: np.random.Generator, world: World, moments: Moments, is_chosen: bool) -> np.ndarray:
    """The item of each event, int64 [events]: by its fame alone, or the one that the user chooses."""
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
    """So many events in pieces whose choices fit into memory."""
    return [slice(first, first + EVENTS_AT_ONCE) for first in range(0, number, EVENTS_AT_ONCE)]


def price_effects(price: np.ndarray) -> np.ndarray:
    """What the price of each item adds to the score in each country, float64 [countries, items]."""
    minded = np.array([effect for _, _, effect in COUNTRIES.values()])
    standardized = (np.log(price) - PRICE_MEAN) / PRICE_STD
    return np.where(np.isnan(price), NO_PRICE, minded[:, None] * standardized)


def hour_effects(best_hour: np.ndarray, time: np.ndarray) -> np.ndarray:
    """What the hour, of UTC, adds to each category, float64 [events, categories]."""
    hour = time // 3600 % 24
    return HOUR_EFFECT * np.cos(2 * np.pi * (hour[:, None] - best_hour) / 24)


def device_effects(device: np.ndarray) -> np.ndarray:
    """What the device adds to the score, float64 [events]."""
    return np.array([effect for _, effect in DEVICES.values()])[device]


def weekday_effects(time: np.ndarray) -> np.ndarray:
    """What the weekday, of UTC, adds to the score, float64 [events]."""
    # 1970 began on a Thursday, the fourth day of a week.
    return np.where((time // 86_400 + 3) % 7 >= 5, WEEKEND, WORKDAY)


def total(effects: Iterable[np.ndarray]) -> np.ndarray:
    """Their sum."""
    return np.sum(list(effects), axis=0)


def expected_stars(score: np.ndarray, std: float) -> np.ndarray:
    """The expected stars of a score plus normal noise, float64 [n]."""
    # Rounded and clipped, they are 1 plus the number of thresholds below the noisy score.
    return 1 + total(chance_above(score, half, std) for half in (1.5, 2.5, 3.5, 4.5))


def chance_above(score: np.ndarray, threshold: float, std: float) -> np.ndarray:
    """The chance that a score plus normal noise exceeds a threshold, float64 [n]."""
    width = std * math.sqrt(2)
    return np.array([math.erfc((threshold - value) / width) / 2 for value in score.tolist()])
