"""What the names of columns say: their words, and the words for users, items, labels, weights and times."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

# The first that fits is taken.
USERS = (
    *("user", "customer", "member", "visitor", "client", "buyer", "reviewer", "shopper", "subscriber"),
    *("listener", "viewer", "reader", "player", "person", "people", "account", "household", "uid"),
    *("username", "profilename", "nickname", "session"),
)
ITEMS = (
    *("item", "product", "sku", "asin", "article", "song", "track", "artist", "book", "isbn", "film"),
    *("movie", "anime", "manga", "episode", "album", "podcast", "beer", "wine", "toy", "joke", "stock"),
    *("video", "game", "recipe", "course", "show", "post", "story", "news", "doc", "document", "listing"),
    *("business", "restaurant", "hotel", "place", "venue", "app", "ad", "offer", "content", "iid", "pid"),
    *("goods", "catalogue", "catalog"),
)
RATINGS = ("rating", "ratings", "star", "stars", "score", "overall", "label", "target", "grade", "vote")
ANSWERS = (
    *("click", "clicked", "clicks", "purchased", "purchase", "bought", "converted", "conversion", "like"),
    *("liked", "watched", "played", "read", "ordered", "response", "interaction", "feedback"),
    *("recommended", "recommends"),
)
COUNTS = ("count", "counts", "plays", "playcount", "listens", "views", "times", "quantity", "qty")
# Those that tell how often something happened whatever their values are, and not how many were bought.
HOW_OFTEN = ("plays", "playcount", "listens", "views")
LABELS = (*RATINGS, *ANSWERS, *COUNTS)
# Columns with such a word could be labels too, or were counted from labels.
OUTCOMES = (
    *LABELS,
    *("review", "reviews", "votes", "likes", "liked", "upvotes", "helpful", "useful", "funny", "cool"),
    *("view", "viewed", "watch", "dwell", "play", "follow", "share", "comment", "forward", "hate", "buy"),
    *("sales", "sold", "returned", "refund", "recommended", "favorites", "favourites", "members", "fans"),
    *("followers", "subscribers", "compliment", "popularity", "conversions", "completion", "rank"),
)
# Labels whose name is a noun for an event.
NOUNS = ("rating", "ratings", "score", "grade", "vote")
WEIGHTS = ("weight", "confidence")
TIMES = (
    *("timestamp", "datetime", "time", "ts", "date", "day", "created", "occurred", "at", "when", "clock"),
)
# The whole name of the time of an event, without what stands between its words.
TIME_OF_EVENT = re.compile(
    r"(event|review|rating|order|purchase|transaction|click|invoice|interaction|created?|creation|updated?|"
    r"unix|epoch|utc|local|server|start|begin|access|log|[a-z]+ed(?=at$))*(timestamp|datetime|time|date|ts|at)+"
    r"(utc|gmt|unix|ms|us|ns|sec|seconds|millis|micros|nanos)*"
)
# Of dates that are properties of users and items.
OTHER_DATES = {"birth", "born", "release", "released", "publication", "published", "expiry", "due"}
# Beside a word for a label: "is_click", "play_count", "user_rating".
OF_LABELS = (
    *("is", "has", "was", "did", "n", "num", "number", "of", "total", "value", "user", "customer", "item"),
    *("product", "play", "listen", "view", "click", "watch", "purchase", "review"),
    *ITEMS,
)
# Beside a word for a thing, these say that the column tells such things apart.
IDS = ("id", "ids", "uuid", "guid", "key", "code", "no", "nr", "num", "number", "hash", "idx", "index")
TITLES = ("title", "name")
BESIDE_IDS = (*IDS, "review")
# An id with such a word tells events apart, and neither users nor items.
EVENTS = (
    *("event", "order", "transaction", "invoice", "basket", "cart", "line", "row", "review", "request"),
    *("impression", "visit", "log", "rating", "session", "record", "message", "index", "parent"),
)
# A thing without a word above, as in "songid"; a word such as "paid" is too short for one.
ID_AT_END = re.compile(r"(?!unpaid|invalid)\w{4,}id")
# Whole numbers under such names are names themselves.
CODES = ("id", "code", "zip", "zipcode", "postal", "postcode", "type", "class", "category", "group", "kind")


# A guess asks for the words of a column many times.
@functools.lru_cache(2**15)
def words_of(name: str) -> list[str]:
    """The words of a column's name, in small letters: "userId", "USER_ID", "userid" are user and id."""
    apart = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3 \2\4", name)
    words = [word for word in re.split(r"[\W_]+", apart.lower()) if word]
    return [part for word in words for part in _without_id(word)]


def _without_id(word: str) -> list[str]:
    for suffix in ("id", "uuid"):
        thing = word.removesuffix(suffix)
        if thing != word and thing in (*USERS, *ITEMS):
            return [thing, "id"]
    return [word]


def is_id(name: str) -> bool:
    """Whether a name says that it is one of an id, in a word of its own or at the end of one."""
    return any(word in ("id", "ids", "uuid", "guid") or ID_AT_END.fullmatch(word) for word in words_of(name))


def is_thing(name: str) -> bool:
    """Whether a name is one of a user or an item alone, such as "sku" or "product_key"."""
    return rank(name, (*USERS, *ITEMS), IDS) is not None


def rank(name: str, known: Sequence[str], beside: Sequence[str] = ()) -> int | None:
    """The place among known words of what a name says; None where it says something else.

    beside: words that may stand there too. A name that is longer than that, such as "user_name", says
    something else.
    """
    words = dict.fromkeys(words_of(name))
    # Of several that are known, such as "stars" of "review_stars", those that stand beside others go first.
    left = [word for word in words if word not in beside] or [word for word in words if word in known]
    return known.index(left[0]) if len(left) == 1 and left[0] in known else None


def says_time(name: str) -> bool:
    """Whether a name is one for times of events: "eventdate" or "visit_date", and not "play_time"."""
    found = words_of(name)
    if OTHER_DATES & {*found}:
        return False
    is_one = TIME_OF_EVENT.fullmatch(re.sub(r"[\W_]", "", name.lower())) is not None
    ends = found[-1:] in (["timestamp"], ["datetime"], ["date"], ["dt"], ["modified"])
    begins = found[:1] in (["date"], ["timestamp"], ["datetime"]) or found[:2] == ["time", "of"]
    is_done = len(found) > 1 and found[-2].endswith("ed") and found[-1] in ("on", "at")
    return is_one or ends or is_done or (begins and found[-1] not in IDS)


def has_word(name: str, known: Sequence[str]) -> bool:
    """Whether one of the words is in a name."""
    return any(word in known for word in words_of(name))


def has_thing(name: str, things: Sequence[str]) -> bool:
    """Whether a name holds a word for such a thing, or for several of it."""
    return has_word(name, (*things, *(f"{thing}s" for thing in things)))


def table_name(name: str, taken: Collection[str]) -> str:
    """A name for a feature: letters, digits and _, none of those taken."""
    plain = re.sub(r"[^a-z0-9]+", "_", "_".join(words_of(name))).strip("_")[:50] or "feature"
    if plain[0].isdigit() or plain.startswith(("history", "audience")):
        plain = f"x_{plain}"
    found, number = plain, 2
    while found in taken:
        found, number = f"{plain}_{number}", number + 1
    return found
