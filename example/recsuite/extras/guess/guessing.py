"""Guess the schema of tables from the names and the values of their columns."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import CLICKS, COUNT, ENTITIES, EVENT, HISTORY, ITEM, RATING, USER, YES_NO
from recsuite.datasets.tables.derived import AGE_DAYS, LEVELS
from recsuite.datasets.tables.schema_file import toml_of
from recsuite.datasets.tables.sections import (
    CATEGORY,
    EVENTS,
    ISO,
    ITEMS,
    LIKED_SHARE,
    LIST,
    NUMBER,
    USERS,
    VECTOR,
    EventTypes,
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
)
from recsuite.datasets.tables.validation import LARGEST_END, MOST_FEATURES, can_be_named
from recsuite.datasets.tables.values import (
    COMMAS,
    MOST_UNREAD,
    NO_VALUE,
    forms_with_commas,
    indices_of,
    plain,
    shortest,
    times,
    with_points,
)
from recsuite.errors import UserError, counted, printable
from recsuite.extras.guess.overview import first_values
from recsuite.extras.guess.times import forms_of
from recsuite.extras.guess.writer import SkippedColumn

# The first match is taken.
USER_WORDS = (
    *("user", "customer", "member", "visitor", "client", "buyer", "reviewer", "shopper", "subscriber"),
    *("listener", "viewer", "reader", "player", "person", "people", "account", "household", "uid"),
    *("username", "profilename", "nickname", "session"),
)
ITEM_WORDS = (
    *("item", "product", "sku", "asin", "article", "song", "track", "artist", "book", "isbn", "film"),
    *("movie", "anime", "manga", "episode", "album", "podcast", "beer", "wine", "toy", "joke", "stock"),
    *("video", "game", "recipe", "course", "show", "post", "story", "news", "doc", "document", "listing"),
    *("business", "restaurant", "hotel", "place", "venue", "app", "ad", "offer", "content", "iid"),
    *("goods", "catalogue", "catalog", "adgroup", "creative", "banner", "pid"),
)
RATINGS = ("rating", "ratings", "star", "stars", "score", "overall", "label", "target", "grade", "vote")
ANSWERS = (
    *("click", "clicked", "clicks", "purchased", "purchase", "bought", "converted", "conversion", "like"),
    *("liked", "watched", "played", "read", "ordered", "response", "interaction", "feedback"),
    *("recommended", "recommends", "clk"),
)
COUNTS = ("count", "counts", "plays", "playcount", "listens", "views", "times", "quantity", "qty")
# Names that are always counts of events, never quantities bought.
HOW_OFTEN = ("plays", "playcount", "listens", "views")
LABELS = (*RATINGS, *ANSWERS, *COUNTS)
# Columns with such a word may be labels too, or aggregates of labels.
OUTCOMES = (
    *LABELS,
    *("review", "reviews", "votes", "likes", "liked", "upvotes", "helpful", "useful", "funny", "cool"),
    *("view", "viewed", "watch", "dwell", "play", "follow", "share", "comment", "forward", "hate", "buy"),
    *("sales", "sold", "returned", "refund", "recommended", "favorites", "favourites", "members", "fans"),
    *("followers", "subscribers", "compliment", "popularity", "conversions", "completion", "rank", "nonclk"),
)
# Labels whose name is also the noun for an event.
NOUNS = ("rating", "ratings", "score", "grade", "vote")
WEIGHTS = ("weight", "confidence")
# Amounts of an event, such as what was bought or paid: with types of events they may be its weight.
AMOUNTS = (
    *COUNTS,
    *("amount", "price", "revenue", "value", "total", "sum", "cost", "paid", "spend"),
    *("menge", "anzahl", "preis", "betrag", "umsatz"),
)
TIMES = (
    *("timestamp", "datetime", "time", "ts", "date", "day", "created", "occurred", "at", "when", "clock"),
)
# Whole names for the time of an event, without separators between the words.
TIME_OF_EVENT = re.compile(
    r"(event|review|rating|order|purchase|transaction|click|invoice|interaction|created?|creation|updated?|"
    r"unix|epoch|utc|local|server|start|begin|access|log|[a-z]+ed(?=at$))*(timestamp|datetime|time|date|ts|at)+"
    r"(utc|gmt|unix|ms|us|ns|sec|seconds|millis|micros|nanos)*"
)
# The beginning of the name of a time that events of one user may share.
DATE_OF_EVENT = re.compile(
    r"(event|review|rating|order|purchase|transaction|click|invoice|interaction|visit|session)(time|date|ts|day)"
)
# Columns with the types of events, and words for the predicted type, the first match first. Types that undo
# others, such as a refund, are no context.
TYPES = (
    *("type", "event", "action", "behavior", "behaviour", "interaction", "activity"),
    *("typ", "ereignis", "aktion"),
)
TARGETS = (
    *("purchase", "buy", "order", "sale", "transaction", "checkout", "conversion", "kauf", "bestellung"),
    *("book", "play", "like", "click"),
)
TAKES_BACK = (
    *("remove", "removed", "refund", "refunded", "return", "returned", "cancel", "canceled", "cancelled"),
    *("delete", "deleted", "dislike", "unlike", "undo"),
)
MOST_TYPES = 12
# Words for dates that are properties of users and items.
OTHER_DATES = {"birth", "born", "release", "released", "publication", "published", "expiry", "due"}
# Words that may stand beside a word for a label: "is_click", "play_count", "user_rating".
OF_LABELS = (
    *("is", "has", "was", "did", "n", "num", "number", "of", "total", "value", "user", "customer", "item"),
    *("product", "play", "listen", "view", "click", "watch", "purchase", "review"),
    *ITEM_WORDS,
)
# Words that mark a column of ids beside a word for a user or an item.
IDS = ("id", "ids", "uuid", "guid", "key", "code", "no", "nr", "num", "number", "hash", "idx", "index")
TITLES = ("title", "name")
BESIDE_IDS = (*IDS, "review")
# An id with such a word identifies events, not users or items.
EVENT_ID_WORDS = (
    *("event", "order", "transaction", "invoice", "basket", "cart", "line", "row", "review", "request"),
    *("impression", "visit", "log", "rating", "session", "record", "message", "index", "parent"),
)
# An id of another thing, such as "songid"; a word such as "paid" is too short.
ID_AT_END = re.compile(r"(?!unpaid|invalid)\w{4,}id")
# Whole numbers under such names are categories.
CODES = ("id", "code", "zip", "zipcode", "postal", "postcode", "type", "class", "category", "group", "kind")


# Cached: a guess needs the words of a column many times.
@functools.lru_cache(2**15)
def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case: "userId", "USER_ID" and "userid" are user and id."""
    apart = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3 \2\4", name)
    words = [word for word in re.split(r"[\W_]+", apart.lower()) if word]
    return [part for word in words for part in _without_id(word)]


def _without_id(word: str) -> list[str]:
    for suffix in ("id", "uuid"):
        thing = word.removesuffix(suffix)
        if thing != word and thing in (*USER_WORDS, *ITEM_WORDS):
            return [thing, "id"]
    return [word]


def is_id(name: str) -> bool:
    """True if a name has "id" or the like as a word or at the end of a word."""
    return any(word in ("id", "ids", "uuid", "guid") or ID_AT_END.fullmatch(word) for word in words_of(name))


def is_thing(name: str) -> bool:
    """True if a name stands only for a user or an item, such as "sku" or "product_key"."""
    return rank(name, (*USER_WORDS, *ITEM_WORDS), IDS) is not None


def rank(name: str, known: Sequence[str], beside: Sequence[str] = ()) -> int | None:
    """Return the position of a name among known words; None if it means something else.

    beside: additional words that the name may have. A name with other words, such as "user_name", means
    something else.
    """
    words = dict.fromkeys(words_of(name))
    # Additional words are removed first: of "review_stars", "stars" stays.
    left = [word for word in words if word not in beside] or [word for word in words if word in known]
    return known.index(left[0]) if len(left) == 1 and left[0] in known else None


def names_time(name: str) -> bool:
    """True if a name stands for times of events, such as "eventdate" or "visit_date", but not "play_time"."""
    words = words_of(name)
    if OTHER_DATES & {*words}:
        return False
    is_one = TIME_OF_EVENT.fullmatch(re.sub(r"[\W_]", "", name.lower())) is not None
    ends = words[-1:] in (["timestamp"], ["datetime"], ["date"], ["dt"], ["modified"])
    begins = words[:1] in (["date"], ["timestamp"], ["datetime"]) or words[:2] == ["time", "of"]
    is_done = len(words) > 1 and words[-2].endswith("ed") and words[-1] in ("on", "at")
    return is_one or ends or is_done or (begins and words[-1] not in IDS)


def has_word(name: str, known: Sequence[str]) -> bool:
    """True if a name has one of the words."""
    return any(word in known for word in words_of(name))


def has_thing(name: str, things: Sequence[str]) -> bool:
    """True if a name has a word for such a thing, in singular or plural."""
    return has_word(name, (*things, *(f"{thing}s" for thing in things)))


def table_name(name: str, taken: Collection[str]) -> str:
    """Return an unused name for a feature, of letters, digits and _."""
    plain = re.sub(r"[^a-z0-9]+", "_", "_".join(words_of(name))).strip("_")[:50] or "feature"
    if plain[0].isdigit() or plain.startswith(HISTORY):
        plain = f"x_{plain}"
    unused, number = plain, 2
    while unused in taken:
        unused, number = f"{plain}_{number}", number + 1
    return unused


TRUE, FALSE = ("true", "yes", "t", "y"), ("false", "no", "f", "n")
NUMBER_FORM = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
# Numbers with commas that may also be lists of numbers.
LIST_OR_NUMBER = r"^\d{3}(,\d{3})*$"
COMMA_OR_POINTS = r"[-+]?\d[\d.]*(,|\.\d+\.)"
SEPARATORS = ("|", ";", ",")
NOTHING = {*NO_VALUE}
# Share of a column's values that may be damaged; least share of lists with several entries.
MOST_DAMAGED, LEAST_SEVERAL = 0.01, 0.05
# Least share of values with a decimal comma; with fewer they may be lists.
LEAST_COMMAS = 0.9
# Form of texts that are numbers with commas of either meaning, or lists.
UNCLEAR = "unclear"
# Texts with more characters on average, and entries of a list with more words, are sentences.
LONG_TEXT, LONG_ENTRY = 40, 3
# Number of first values that are tried before all; a column of yes and no has fewer distinct values than the
# second number.
LOOKED_AT, MOST_ANSWERS = 5, 20
# Longest call that a column of dates is written into.
LONGEST_CALL = "age_days(user.)"
# Values on which time formats are tried; least share of times in a column whose name stands for times.
TRIED, LEAST_TIMES = 200, 0.5


@dataclass(frozen=True)
class Content:
    """Content of a column.

    kind: "number", "flag" (true and false), "text", "time", "list", "vector" (lists of floats, whose lengths
    are its numbers) or "other". size: number of values that are not missing. distinct: number of distinct
    values. numbers: float64, the finite ones of numbers and flags. values: the distinct values, in order of
    appearance. time_format: format of a timestamp, empty if it is none; numbers may have one too. separator:
    between entries of lists in texts. codes: of a column of texts or numbers, see `encoded`. commas: of
    numbers in texts, one of COMMAS, or UNCLEAR for a text; else empty. is_amount: true if the file says that
    it holds numbers.
    """

    name: str
    kind: str
    size: int
    distinct: int
    numbers: np.ndarray
    values: Sequence[object] = ()
    time_format: str = ""
    separator: str = ""
    codes: np.ndarray | None = None
    commas: str = ""
    is_amount: bool = False

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """Its distinct values as texts, in order of appearance."""
        return tuple(map(str, self.values))

    @functools.cached_property
    def is_whole(self) -> bool:
        """True if all its numbers are whole."""
        return bool(self.numbers.size and np.all(self.numbers == np.floor(self.numbers)))

    @property
    def is_long(self) -> bool:
        """True if its texts are sentences rather than names."""
        return self.kind == "text" and sum(map(len, self.texts)) > LONG_TEXT * max(1, len(self.texts))

    @property
    def is_time(self) -> bool:
        """True if its values are times, independent of the column's name."""
        return self.kind == "time"


def contents_of(table: pa.Table, files: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Content]:
    """Return the content of each column of a sample whose name a schema can hold.

    files: as written there. The metadata of the sample may have types of columns, as RecBole writes them into
    the header.
    """
    types = {name.decode(): kind.decode() for name, kind in (table.schema.metadata or {}).items()}
    return {
        name: _typed(content_of(name, table[name], files), types.get(name, ""))
        for name in table.column_names
        if can_be_named(f"{name}{LONGEST_CALL}") and name
    }


def _typed(content: Content, kind: str) -> Content:
    """Return the content of a column whose file names its type; a label stays a number."""
    if kind == "token_seq":
        return replace(content, kind="list", separator=" ")
    if kind == "float_seq":
        lengths = {float(len(text.split())) for text in content.texts}
        return replace(content, kind="vector", numbers=np.array(sorted(lengths)))
    is_code = kind == "token" and content.kind == "number" and place_of_label(content) is None
    return replace(content, kind="text" if is_code else content.kind, is_amount=kind == "float")


def plain_table(table: pa.Table) -> pa.Table:
    """Return a sample whose texts, numbers and UUIDs have plain types, independent of their storage."""
    columns = [_plain(name, column) for name, column in zip(table.column_names, table.columns, strict=True)]
    return pa.table(columns, names=table.column_names, metadata=table.schema.metadata)


def _plain(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        chunks = [plain(chunk, name) for chunk in column.chunks]
        # As training reads them: pandas writes 10 as 10.0 in a file with a missing value.
        chunks = [shortest(each) if pa.types.is_string(each.type) else each for each in chunks]
    # Bytes and structures stay unchanged: they are not features.
    except UserError:
        return column
    return pa.chunked_array(chunks) if chunks else column


def content_of(
    name: str, column: pa.ChunkedArray, files: Mapping[str, Any] = MappingProxyType({})
) -> Content:
    """Return the content of a column of a sample."""
    kind = column.type
    if pa.types.is_string(kind):
        return _of_texts(name, column, files)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _of_numbers(name, "number", column)
    column = column.drop_null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_floating(kind.value_type):
            # Its numbers are the lengths.
            lengths = pc.unique(pc.list_value_length(column)).to_numpy(zero_copy_only=False)
            return Content(name, "vector", len(column), len(column), lengths[lengths > 0])
        return Content(name, "list", len(column), len(column), np.empty(0))
    if pa.types.is_boolean(kind):
        return _of_numbers(name, "flag", column)
    if pa.types.is_temporal(kind) and not (pa.types.is_time(kind) or pa.types.is_duration(kind)):
        texts = tuple(str(value) for value in pc.unique(column).to_pylist())
        return Content(name, "time", len(column), len(texts), np.empty(0), texts, "iso")
    return Content(name, "other", len(column), len(column), np.empty(0))


def encoded(column: pa.DictionaryArray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a column of texts as codes, int32 [n], -1 for a missing value, and the texts of the codes."""
    codes: dict[str, int] = {}
    table = [
        -1 if (text := value.strip()) in NOTHING else codes.setdefault(text, len(codes))
        for value in column.dictionary.to_pylist()
    ]
    # The last entry is for code -1.
    return np.array([*table, -1], np.int32)[indices_of(column)], tuple(codes)


def _of_numbers(name: str, kind: str, column: pa.ChunkedArray) -> Content:
    # The distinct values of 64-bit integers are counted before they become floats.
    values = column.combine_chunks().dictionary_encode()
    numbers = values.dictionary.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return _numeric(name, kind, numbers, values.dictionary.to_pylist(), indices_of(values))


def _numeric(
    name: str, kind: str, numbers: np.ndarray, values: Sequence[object], codes: np.ndarray, commas: str = ""
) -> Content:
    """Return the content of a column of numbers. numbers: float64, one for each distinct value."""
    numbers = numbers[codes[codes >= 0]]
    finite, form = numbers[np.isfinite(numbers)], _time_format(name, values)
    return Content(name, kind, len(numbers), len(values), finite, values, form, codes=codes, commas=commas)


def _of_texts(name: str, column: pa.ChunkedArray, files: Mapping[str, Any]) -> Content:
    # Each distinct value is examined only once: there may be very many columns.
    values = column.combine_chunks().dictionary_encode()
    with contextlib.suppress(pa.ArrowInvalid):
        numbers = values.dictionary.cast(pa.float64()).to_numpy(zero_copy_only=False)
        # Most columns of numbers hold only numbers; NaN is a missing value.
        if len(numbers) and np.isfinite(numbers).all():
            return _numeric(name, "number", numbers, values.dictionary.to_pylist(), indices_of(values))
    codes, texts = encoded(values)
    size = int((codes >= 0).sum())
    counts, column = np.bincount(codes[codes >= 0], minlength=len(texts)), pa.array(texts, pa.string())
    commas = _commas_of(name, column, texts, counts, files)
    plain_numbers = column if commas in ("", UNCLEAR) else with_points(column, commas)
    if commas != UNCLEAR and _may_be(plain_numbers.slice(0, LOOKED_AT).to_pylist(), NUMBER_FORM):
        is_number = pc.match_substring_regex(plain_numbers, NUMBER_FORM)
        words = ~is_number.to_numpy(zero_copy_only=False)
        damaged = float(np.average(words, weights=counts))
        # A single word among numbers, such as "unknown", stands for a missing number.
        if damaged <= (MOST_UNREAD if words.sum() == 1 else MOST_DAMAGED):
            numbers = pc.utf8_ltrim(pc.if_else(is_number, plain_numbers, None), "+ ").cast(pa.float64())
            numbers = numbers.to_numpy(zero_copy_only=False)
            return _numeric(name, "number", numbers, texts, codes, commas)
    if 0 < len(texts) < MOST_ANSWERS and {text.lower() for text in texts} <= {*TRUE, *FALSE}:
        numbers = np.array([text.lower() in TRUE for text in texts], np.float64)[codes[codes >= 0]]
        return Content(name, "flag", size, len(texts), numbers, texts, codes=codes)
    if form := _time_format(name, texts):
        return Content(name, "time", size, len(texts), np.empty(0), texts, form, codes=codes)
    if commas:
        return Content(name, "text", size, len(texts), np.empty(0), texts, codes=codes, commas=UNCLEAR)
    separator = _separator_of(column, texts, counts)
    kind = "list" if separator else "text"
    return Content(name, kind, size, len(texts), np.empty(0), texts, "", separator, codes)


def _commas_of(
    name: str, column: pa.Array, texts: Sequence[str], counts: np.ndarray, files: Mapping[str, Any]
) -> str:
    """Return the form of numbers with commas, UNCLEAR if only the user knows it, empty for other texts."""
    for form in COMMAS:
        if name in files.get(form, ()):
            return form
    fitting = [
        form
        for form, pattern in COMMAS.items()
        if _may_be(texts, pattern) and _share(column, pattern, counts) >= 1 - MOST_UNREAD
    ]
    if not fitting or not any(re.match(COMMA_OR_POINTS, text) for text in texts):
        return ""
    # A list of codes has no sign, and entries of one length. A label is no list.
    is_list = _share(column, LIST_OR_NUMBER, counts) >= 1 - MOST_DAMAGED
    is_list |= fitting == ["decimal_commas"] and _share(column, ",", counts) < LEAST_COMMAS
    is_list &= rank(name, LABELS, OF_LABELS) is None
    return UNCLEAR if is_list or len(fitting) > 1 or fitting[0] in files else fitting[0]


def _may_be(texts: Sequence[str], pattern: str) -> bool:
    """True if one of the first values matches a pattern: a quick check before trying all values."""
    return any(re.match(pattern, text) for text in texts[:LOOKED_AT])


def _share(column: pa.Array, pattern: str, counts: np.ndarray | None = None) -> float:
    """Return the share of values that match a pattern. counts: number of rows of each value, int64 [n]."""
    matches = pc.match_substring_regex(column, pattern).to_numpy(zero_copy_only=False)
    return float(np.average(matches, weights=counts)) if len(matches) else 0.0


def _time_format(name: str, values: Sequence[object]) -> str:
    """Return the time format of most values of a column; empty if they are no times."""
    is_called = names_time(name)
    if not values or not (is_called or forms_of([*map(str, values[:2])])[0].name):
        return ""
    tried, least = [*map(str, some_of(values))], LEAST_TIMES if is_called else 1 - MOST_DAMAGED
    most = forms_of(tried)[0]
    return most.name if most.number >= least * len(tried) else ""


def some_of(values: Sequence[Any]) -> Sequence[Any]:
    """Return about `TRIED` values, evenly spaced, on which time formats are tried."""
    return values[:: 1 + len(values) // TRIED]


def _separator_of(column: pa.Array, texts: Sequence[str], counts: np.ndarray) -> str:
    """Return the separator of lists, whose entries are short and repeat; empty if there are no lists."""
    for separator in SEPARATORS:
        if not any(separator in text for text in texts):
            continue
        several = _share(column, re.escape(separator), counts)
        entries = [entry.strip() for text in texts for entry in text.split(separator)]
        is_short = sum(len(entry.split()) for entry in entries) <= LONG_ENTRY * len(entries)
        # Parts of a sentence hardly ever repeat.
        if several >= LEAST_SEVERAL and is_short and len({*entries}) <= len(entries) / 2:
            return separator
    return ""


def has_time_of_day(content: Content) -> bool:
    """True if times have a time of the day, not only a date."""
    hours = np.unique(hours_of(content))
    num_days = len(np.unique(hours // 24))
    # A busy log may cover a single hour, and a few of its days may be damaged.
    return len(hours) > num_days or content.distinct > 2 * num_days > 0


def hours_of(content: Content) -> np.ndarray:
    """Return the whole hours since 1970, int64, of the distinct values of a column of times."""
    seconds, faults = times(pa.array(content.texts, pa.string()), content.name, content.time_format)
    return seconds[faults == 0] // 3_600


def _share_read(content: Content) -> float:
    """Return the share of a column's times that are read."""
    faults = times(pa.array(content.texts, pa.string()), content.name, content.time_format).faults
    codes = np.arange(len(faults)) if content.codes is None else content.codes[content.codes >= 0]
    return float(np.mean(faults[codes] == 0))


# With fewer distinct whole numbers than this, they are classes.
FEW_NUMBERS = 10
# Separator in a path of categories, such as Home > Kitchen.
PATH = " > "
# Names of pandas' index in a written table.
INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")
# A property that differs for nearly every user or item carries no more information than the id. With fewer
# values than LEAST_KNOWN, this cannot be judged.
NEARLY_ALL, LEAST_KNOWN = 0.9, 20
NO_ISO = "it holds dates of another form than 2026-11-20, which are not read"
AGE_TELLS = "its age at an event reveals the item, which is unknown while items are ranked"
OF_WEIGHT = (
    "as [weight], an event where it is 3 counts three times as much in the training as one where it is 1"
)
LACKING = "; first write a number for the {:,} of the first {:,} events that lack one"
OF_DATES = "a user has one; if it is the time of the events, name it as the column of [timestamp]"
# Reasons in place of OF_EVENT, where the owner is unknown.
FEW_REPEATS = 'too few {0}s come twice to tell whether it is of the {0}; if so, write of = "{0}"'
FEW_VALUES = 'its values do not tell whether it is of the {0}; if so, write of = "{0}"'
OF_EVENT = "it differs from event to event; use it only if it is known before the label"
OUTCOME = "by its name it could be a label itself, or be counted from labels"
ASKED = (
    "{} may be a number of two kinds, or a list; for a number name its column in decimal_commas or "
    "grouping_commas under [files]"
)


def feature_of(
    content: Content, of: str, num_owners: int, has_times: bool, is_ranked: bool
) -> tuple[FeatureColumn, str]:
    """Return the section of a column, and the reason not to use it; the reason is empty if it is a feature.

    num_owners: number of users, items or events in the sample. has_times: true if events have times.
    is_ranked: true if items are ranked by the label.
    """
    why = _reason(content, of, num_owners, has_times)
    if content.is_time and of == ITEM and is_ranked:
        why = why or AGE_TELLS
    if content.is_time and not why:
        return FeatureColumn(EVENT, f"{AGE_DAYS}({of}.{content.name})", NUMBER), ""
    kind = kind_of(content)
    # A list of an event cannot be a list feature, but its text can be a category.
    kind = CATEGORY if of == EVENT and kind == LIST else kind
    if kind == VECTOR:
        return FeatureColumn(of, content.name, kind, length=int(content.numbers.max(initial=0))), why
    is_path = content.kind == "text" and content.size > 0 and all(PATH in text for text in content.texts)
    if is_path and of in ENTITIES:
        return FeatureColumn(of, f"{LEVELS}({content.name})", LIST), why
    return FeatureColumn(of, content.name, kind, separator=content.separator or "|"), why


def kind_of(content: Content) -> str:
    """Return the kind of a column's values: category, list or number."""
    if content.kind == "list":
        return LIST
    if content.kind == "vector":
        return VECTOR
    if content.commas == UNCLEAR:
        return NUMBER
    if content.kind != "number" or (has_word(content.name, CODES) and not content.is_amount):
        return CATEGORY
    if content.is_amount:
        return NUMBER
    return CATEGORY if content.is_whole and content.distinct <= FEW_NUMBERS else NUMBER


def _reason(content: Content, of: str, num_owners: int, has_times: bool) -> str:
    """Return the reason why a column is not a feature; empty if it is one."""
    if content.size == 0:
        return "it is empty"
    if INDEX.fullmatch(content.name):
        return "it is the index that pandas wrote, and numbers the rows"
    if content.commas == UNCLEAR:
        return ASKED.format(content.texts[0])
    if content.kind == "other" or (content.kind == "vector" and of == EVENT):
        return "values of its type are not read"
    if content.kind == "vector":
        return "" if len(content.numbers) == 1 else "its lists of numbers have several lengths"
    # Also the day of a partition: the first rows may be of one day, which then looks like a user property.
    if content.distinct == 1 and content.kind != "list":
        return "it has one value"
    if content.is_time:
        is_read = content.time_format == ISO and _share_read(content) >= 1 - MOST_UNREAD
        return _reason_of_dates(of, has_times) or NO_ISO * (not is_read)
    if content.is_long:
        return "it holds long texts, and nothing reads texts yet"
    if has_word(content.name, OUTCOMES):
        return OUTCOME
    if of == EVENT:
        return OF_EVENT
    # Only owners with a value count.
    num_known = min(num_owners, content.size)
    is_id = kind_of(content) == CATEGORY and num_known >= LEAST_KNOWN
    if is_id and content.distinct > NEARLY_ALL * num_known:
        return "nearly all of its values differ, as those of an id do"
    return ""


def _reason_of_dates(of: str, has_times: bool) -> str:
    if of == EVENT:
        return "it holds times, and the events have others"
    if has_times:
        return ""
    return OF_DATES if of == USER else "it holds dates, and without times of the events these tell no age"


def is_title(name: str) -> bool:
    """True if a column of items holds titles, such as "title", "name" or "product_name"."""
    return rank(name, TITLES, ITEM_WORDS) is not None


def title_of(contents: Mapping[str, Content]) -> str:
    """Return the column with the titles of items; empty if there is none."""
    titles = [
        name for name, content in contents.items() if content.kind in ("text", "list") and is_title(name)
    ]
    return min(titles, key=lambda name: not has_word(name, TITLES[:1])) if titles else ""


# The ends of common scales: the first that contains all values is taken.
SCALES = ((1.0, 5.0), (0.5, 5.0), (0.0, 5.0), (1.0, 10.0), (0.0, 10.0), (1.0, 100.0), (0.0, 100.0))
# A scale is not guessed if its values reach at most this share of it.
LEAST_REACH = 0.6
# Highest value of whole numbers that may be a scale. A column is asked about if its most frequent value is
# above the first share of the scale or, with the name of a label, above the second.
LONGEST_SCALE, UPPER_HALF, ABOVE_COUNTS = 10, 0.5, 0.25
# Counts, unlike scales, have a few values that are many times the median.
HEAVY = 5
# Likeness of a column to a label: its name is one of a label; its values are yes or no; its name is one of a
# count and its values are small, such as a purchased quantity of 1 to 4.
NAMED, UNNAMED, FEW = range(3)
# Ids of users and items repeat; ids of events do not.
MOST_DISTINCT = 0.9
# For a property of an id: least number of contradicting rows expected by chance; most contradicting rows as a
# share of those expected, and of all rows.
LEAST_BY_CHANCE, OF_CHANCE, MOST_CONTRADICTING = 5, 0.1, 0.01
# Largest share of returns (values below 0) among counts.
MOST_RETURNED = 0.5
# Values for a missing answer; least ratio to the largest other value; least number of values of the scale.
FILLERS, FAR, LEAST_SCALE = (99, 999, 9999), 3, 4
# Zeros of a scale are noted if they are this many times as frequent as its next value.
MOST_OF_ZERO = 2
# Zeros of a count are noted above this share: a few hardly change what is learned.
MOST_ZEROS = 0.02
# Columns that are listed if no role is recognised.
MOST_LISTED = 12
# Characters of a value in a message.
MOST_CHARACTERS = 40


@dataclass(frozen=True)
class ColumnRoles:
    """Columns of the events with a role, and the label. Empty: there is none.

    types: types of the events, if there are several; notes: sentences on unusual labels.
    """

    user: str
    item: str
    label: LabelColumn
    weight: str = ""
    timestamp: str = ""
    notes: tuple[str, ...] = ()
    of_labels: frozenset[str] = frozenset()
    types: EventTypes | None = None

    @property
    def has_label(self) -> bool:
        """True if the events differ in a label or in their types."""
        return self.label.kind != CLICKS or self.types is not None

    @property
    def columns(self) -> set[str]:
        """Set of all columns with a role."""
        types = self.types.type if self.types else ""
        roles = {self.user, self.item, self.label.column, self.weight, self.timestamp, types}
        return (roles | self.of_labels) - {""}


def roles_of(
    events: pa.Table,
    contents: Mapping[str, Content],
    own_tables: Mapping[str, Sequence[str]],
    given: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ColumnRoles:
    """Guess the roles of the columns of the events from their names.

    contents: of the columns. own_tables: the columns of the "users" and "items" tables, if they exist: an id
    is in both tables. given: the sections of a schema that were written by hand; they have priority.

    Raises:
        UserError: when no name says which column has the users or the items; names the columns, and says
            what to write.
    """
    roles = "user", "item", "label", "weight", "timestamp"
    user, item, label, weight, timestamp = (str(given.get(role, {}).get("column", "")) for role in roles)
    user = user or _id_column(contents, USER_WORDS, own_tables.get("users", ()), (item, label))
    item = item or _id_column(contents, ITEM_WORDS, own_tables.get("items", ()), (user, label))
    user = user or _only_id(contents, item)
    item = item or _only_id(contents, user) or _named_item(contents, user)
    if not (user and item):
        raise _unrecognised(contents, user, item)
    more: Any = given.get("more_labels", ())
    of_labels = frozenset(more_label.get(key, "") for more_label in more for key in ("column", "weight"))
    taken = {user, item, label, weight, *of_labels}
    rest = {name: content for name, content in contents.items() if name not in taken}
    if "timestamp" not in given:
        timestamp = _timestamp(events, rest, user, item)
    else:
        timestamp = timestamp or _named_time(rest)
        if timestamp in contents and "format" not in given["timestamp"]:
            _check_form(contents[timestamp])
    rest.pop(timestamp, None)
    by_hand = given.get("label", {})
    if by_hand.get("kind") == CLICKS:
        label_column = LabelColumn(CLICKS)
    elif label:
        label_column = _label_of(contents[label], by_hand)
    else:
        label_column = _label(events, rest, (user, item), by_hand)
    of_types = _types_among(events, rest, (user, item))
    types, notes = _event_types(of_types, rest, given.get("events", {}))
    if types and timestamp and not (label or by_hand.get("kind")):
        label_column = _label_beside(events, label_column, types)
    if not timestamp or label_column.kind != CLICKS:
        types, notes = None, ()
    if not (types or by_hand):
        notes = _asked_scale(events, label_column, rest, (user, item))
        notes += _asked_types(of_types, label_column, bool(timestamp))
    if label_column.column:
        # A scale or drop written by hand already defines the valid labels.
        is_given = bool({"drop", "lowest", "highest"} & by_hand.keys())
        label_column, of_drop = _drop_off_scale(label_column, contents[label_column.column], is_given)
        notes = (*of_drop, *notes)
    if types and not label_column.noun:
        noun = "_".join(words_of(types.target))
        label_column = replace(label_column, noun="event" if noun.isdigit() else noun)
    return ColumnRoles(user, item, label_column, weight, timestamp, notes, of_labels, types)


def _types_among(
    events: pa.Table, contents: Mapping[str, Content], owners: Sequence[str]
) -> dict[str, Content]:
    """Return the columns with few texts or codes that are no property of users or items."""
    groups = [groups_of(events[of]) for of in owners]
    return {
        name: content
        for name, content in contents.items()
        if 2 <= content.distinct <= MOST_TYPES
        if content.kind == "text" or (content.kind == "number" and content.is_whole and is_of_types(name))
        if content.codes is not None and not any(is_property(content.codes, each) for each in groups)
    }


def is_of_types(name: str) -> bool:
    """True if a name stands only for types of events, such as "event_type", but not "device_type"."""
    return has_word(name, TYPES) and all(word in (*TYPES, *IDS, "name") for word in words_of(name))


def _event_types(
    columns: Mapping[str, Content], contents: Mapping[str, Content], given: Mapping[str, Any]
) -> tuple[EventTypes | None, tuple[str, ...]]:
    """Return the types of events and notes on them: those given, else those with a known target.

    columns: see `_types_among`. The target is a word for one, or the only type with amounts.
    """
    if given:
        return EventTypes(**given) if {"type", "target"} <= given.keys() else None, ()
    for name, content in columns.items():
        texts = [text for text in content.texts if not has_word(text, TAKES_BACK)]
        for target in TARGETS if has_word(name, TYPES) else ():
            words = target, f"{target}d", f"{target}ed"
            if chosen := min((text for text in texts if has_word(text, words)), key=len, default=""):
                return EventTypes(name, chosen, tuple(text for text in texts if text != chosen)), ()
    for name in sorted(columns, key=is_of_types, reverse=True):
        for amount in (content for content in contents.values() if has_word(content.name, AMOUNTS)):
            if name != amount.name and (chosen := _type_with_amounts(columns[name], amount)):
                others = tuple(text for text in columns[name].texts if text != chosen)
                note = (
                    f"predicted are the events whose {printable(name[:40])} is {printable(chosen)}, because "
                    f"{printable(amount.name[:40])} is above 0 there alone; correct it under [events]"
                )
                return EventTypes(name, chosen, others), (note,)
    return None, ()


def _type_with_amounts(types: Content, amount: Content) -> str:
    """Return the only type whose events have an amount above 0; empty if there is no such type."""
    if types.codes is None or amount.codes is None or amount.kind not in ("number", "flag"):
        return ""
    has_amount = amount.codes >= 0
    if amount.numbers.size != has_amount.sum():
        return ""
    has_amount[has_amount] = amount.numbers > 0
    known = types.codes >= 0
    counts, all_counts = (
        np.bincount(types.codes[rows], minlength=types.distinct) for rows in (known & has_amount, known)
    )
    most = int(counts.argmax())
    is_only = counts.sum() - counts[most] <= MOST_CONTRADICTING * counts.sum()
    is_all = counts[most] >= NEARLY_ALL * all_counts[most]
    return types.texts[most] if is_only and is_all and counts[most] >= LEAST_KNOWN else ""


def _label_beside(events: pa.Table, label: LabelColumn, types: EventTypes) -> LabelColumn:
    """Return the label beside types of events: no count, and no answer that only repeats the type."""
    # The quantity of a view and of a purchase mean different things.
    is_count = label.kind == COUNT or has_word(label.column, COUNTS)
    repeats = label.kind == YES_NO and is_constant(events, label.column, types.type)
    return LabelColumn(CLICKS) if is_count or repeats else label


def _asked_types(columns: Mapping[str, Content], label: LabelColumn, has_times: bool) -> tuple[str, ...]:
    """Return a note on a column that may have types of events, of which the target is unknown."""
    name = next(filter(is_of_types, columns), "")
    if not name or label.kind not in RANKED:
        return ()
    kind = f'kind = "{CLICKS}" under [label] and ' * (label.kind != CLICKS)
    times = "" if has_times else "; types require times, so name their column under [timestamp] too"
    listed = ", ".join(toml_of(text[:MOST_CHARACTERS]) for text in columns[name].texts)
    return (
        f"the column {printable(name[:40])} may have types of events: to predict those of one type, and have "
        f"the others in histories, write {kind}under [events] type = {toml_of(name)}, target = the one, and "
        f"context = [the others] of {listed}{times}",
    )


def _id_column(
    contents: Mapping[str, Content], known: Sequence[str], own: Sequence[str], taken: Sequence[str]
) -> str:
    """Return the column whose name stands for the ids of users or items; empty if there is none."""
    ranks = {
        name: (name not in own, position)
        for name, content in contents.items()
        if name not in taken and _may_be_ids(content)
        if (position := rank(name, known, BESIDE_IDS)) is not None
    }
    return min(ranks, key=lambda name: ranks[name]) if ranks else ""


def _may_be_ids(content: Content) -> bool:
    return content.kind == "text" or (content.kind == "number" and content.is_whole)


def _only_id(contents: Mapping[str, Content], taken: str) -> str:
    """Return the only other column with an id's name, but not an event's, whose values repeat."""
    ids = [
        name
        for name, content in contents.items()
        if taken and name != taken and _may_be_ids(content)
        if is_id(name) and not has_word(name, EVENT_ID_WORDS)
        if content.distinct <= MOST_DISTINCT * content.size
    ]
    return ids[0] if len(ids) == 1 else ""


def _named_item(contents: Mapping[str, Content], user: str) -> str:
    """Return the column with the titles of items, such as "game-title", if they have no other id."""
    titles = [
        name
        for name, content in contents.items()
        if user and content.kind == "text" and not content.is_long
        if rank(name, ITEM_WORDS, TITLES) is not None
    ]
    return titles[0] if len(titles) == 1 else ""


def _named_time(contents: Mapping[str, Content]) -> str:
    """Return the column whose name fits times best, independent of its values."""
    fitting = [name for name in contents if has_word(name, TIMES)]
    if not fitting:
        raise UserError(
            "The section [timestamp] has no column, and no column of the events is called as times are; "
            'write column = "NAME" there.'
        )
    return min(fitting, key=_place_of_time)


def _unrecognised(contents: Mapping[str, Content], user: str, item: str) -> UserError:
    names = [printable(name[:40]) for name in contents]
    listed = ", ".join(names[:MOST_LISTED]) + ", ..." * (len(names) > MOST_LISTED)
    lacking = [role for role, column in (("user", user), ("item", item)) if not column]
    is_value = any(name in content.texts for name, content in contents.items())
    values = "; if the first line holds values, as it seems, add one with names before it" * is_value
    written = ", then ".join(f'[{role}] and column = "NAME"' for role in lacking)
    return UserError(
        f"Cannot find the ids of {' and '.join(f'{role}s' for role in lacking)} among "
        f"{counted(len(names), 'column')}: {listed}; write a schema.toml beside the data with the lines "
        f"{written}; what it does not say is guessed{values}."
    )


def _timestamp(events: pa.Table, contents: Mapping[str, Content], user: str, item: str) -> str:
    """Return the column with the times of the events; empty if there is none."""
    has_sessions = any(has_word(name, ("session",)) for name in (user, *contents))

    def may_be(name: str) -> bool:
        # A date of release or birth is constant for an item or a user. So is that of a session or of an order
        # for a user with one of them.
        is_event = has_sessions or DATE_OF_EVENT.match(re.sub(r"[\W_]", "", name.lower()))
        owners = (item,) if is_event else (user, item)
        return rank(name, TIMES) is not None or not any(is_constant(events, name, owner) for owner in owners)

    # A name for times counts most; then a time of the day, which dates of partitions lack; then the name.
    ranks = {
        name: (
            not _is_called_time(name),
            not has_time_of_day(content),
            _place_of_time(name),
            "%" in content.time_format,
        )
        for name, content in contents.items()
        if content.is_time or (content.time_format and _is_called_time(name))
        if may_be(name)
    }
    called = (name for name, content in contents.items() if content.texts and names_time(name))
    chosen = min(ranks, key=lambda name: ranks[name]) if ranks else next(filter(may_be, called), "")
    if chosen:
        _check_form(contents[chosen])
    return chosen


def _is_called_time(name: str) -> bool:
    return names_time(name) or has_word(name, TIMES)


def _check_form(content: Content) -> None:
    """Refuse a column of times whose values have no format, two formats, or an unknown one."""
    tried, name = some_of(content.texts), printable(content.name)
    forms = {form.name: form for form in forms_of(tried)}
    values = {form_name: repr(printable(form.example[:MOST_CHARACTERS])) for form_name, form in forms.items()}
    first, *others = [form_name for form_name in forms if form_name] or [""]
    advice = f"write into schema.toml, each on a line: [timestamp] column = {toml_of(content.name)} format = "
    if others and forms[others[0]].number > max(1, MOST_DAMAGED * len(tried)):
        raise UserError(
            f"The column {name} has times of two forms: {values[first]} ({first}) and {values[others[0]]} "
            f"({others[0]}); write all of them in one."
        )
    if not content.time_format:
        raise UserError(
            f"The column {name} is called a time, but its value {values['']} is no time of a known form; "
            f'{advice}a pattern of strptime such as "%d.%m.%Y %H:%M", or "unix" for numbers that rise with '
            "time; where it holds no times of events, write [user], [item] and [label] and no [timestamp]."
        )
    if forms[first].other:
        raise UserError(
            f"The column {name} has times such as {values[first]}, and all fit the forms {first} and "
            f"{forms[first].other}; {advice}{toml_of(first)} or format = {toml_of(forms[first].other)}."
        )


def _place_of_time(name: str) -> int:
    place = rank(name, TIMES)
    return len(TIMES) + (not _is_called_time(name)) if place is None else place


def _label(
    events: pa.Table, contents: Mapping[str, Content], owners: Sequence[str], given: Mapping[str, Any]
) -> LabelColumn:
    """Return the label: the column that is most like one, or the only column left."""
    ranks = {
        name: likeness
        for name, content in contents.items()
        if content.kind in ("number", "flag") and content.distinct > 1 and content.numbers.size
        if np.abs(content.numbers).max() <= LARGEST_END
        if (likeness := place_of_label(content)) is not None
        # The mean rating of an item, or its number of views, is a property of the item.
        if not is_constant(events, name, owners[1])
        # A yes/no column without a label's name may be a property of the user.
        if likeness[0] != UNNAMED or not is_constant(events, name, owners[0])
    }
    # Yes/no values alone are a weak reason to predict a column, but better than a small quantity.
    if all(likeness == UNNAMED for likeness, _ in ranks.values()):
        return LabelColumn(CLICKS)
    return _label_of(contents[min(ranks, key=lambda name: ranks[name])], given)


def place_of_label(content: Content) -> tuple[int, int] | None:
    """Return the likeness of a column to a label by name, then by values, best first; None: not a label."""
    place = rank(content.name, LABELS, OF_LABELS)
    if place is None:
        return (UNNAMED, 0) if _is_answer(content.numbers) else None
    is_count = has_word(content.name, COUNTS) and not _is_answer(content.numbers)
    is_few = is_count and not (_is_heavy(content.numbers) or has_word(content.name, HOW_OFTEN))
    return (FEW if is_few else NAMED, place)


def _is_answer(numbers: np.ndarray) -> bool:
    return bool(np.all((numbers == 0) | (numbers == 1)))


def _label_of(content: Content, given: Mapping[str, Any]) -> LabelColumn:
    """Return the label of a column. given: the keys of its section written by hand; they have priority."""
    numbers, name, kind = content.numbers, content.name, given.get("kind")
    if content.kind not in ("number", "flag") or not numbers.size:
        return LabelColumn(YES_NO, name, noun="event")
    sorted_out = numbers[~np.isin(numbers, values_off_scale(numbers))]
    if kind == YES_NO or (kind is None and _is_answer(numbers)):
        return LabelColumn(YES_NO, name, noun="event")
    words = COUNTS if _place_of_mode(content) > UPPER_HALF else (*COUNTS, *ANSWERS)
    is_count = content.is_whole and (_is_heavy(sorted_out) or has_word(name, words))
    if kind == COUNT or (kind is None and is_count and np.mean(numbers < 0) < MOST_RETURNED):
        noun = "" if name in ("plays", "listens", "views", "clicks") else "event"
        return LabelColumn(COUNT, name, liked=1.0, noun=noun)
    return _rating_of(name, sorted_out)


def _rating_of(name: str, numbers: np.ndarray) -> LabelColumn:
    lowest, highest = _scale_of(numbers)
    noun = "" if name in NOUNS else "rating"
    return LabelColumn(RATING, name, lowest, highest, lowest + LIKED_SHARE * (highest - lowest), noun)


def _is_heavy(numbers: np.ndarray) -> bool:
    """True if whole numbers are counts: a few are many times the median."""
    return bool(numbers.min() >= 1 and numbers.max() > max(10, HEAVY * np.median(numbers)))


def _place_of_mode(content: Content) -> float:
    """Return the place of the most frequent value on its scale, from 0 to 1; 0 for no small wholes."""
    if content.kind != "number" or not content.is_whole or not 2 < content.distinct <= LONGEST_SCALE + 1:
        return 0.0
    values, counts = np.unique(content.numbers, return_counts=True)
    lowest, highest = _scale_of(values)
    share = (values[counts.argmax()] - lowest) / (highest - lowest)
    return float(share) if values[0] >= 0 and values[-1] <= LONGEST_SCALE else 0.0


def _asked_scale(
    events: pa.Table, label: LabelColumn, contents: Mapping[str, Content], owners: Sequence[str]
) -> tuple[str, ...]:
    """Return a note on a column that may be a scale, though its name does not say so, with what to write."""
    least = {label.column: ABOVE_COUNTS} if label.column else dict.fromkeys(contents, UPPER_HALF)
    for name, place in least.items():
        if has_word(name, (*RATINGS, *COUNTS, *CODES)) or _place_of_mode(contents[name]) <= place:
            continue
        if not any(is_constant(events, name, of) for of in owners):
            scale = _rating_of(name, contents[name].numbers)
            lines = f"lowest = {scale.lowest:g}, highest = {scale.highest:g} and liked = {scale.liked:g}"
            column = f"column = {toml_of(name)}"
            return (
                f"the column {printable(name[:40])} may be a scale, or count events: write instead under "
                f'[label] kind = "rating", {column}, {lines}, or else kind = "count", {column} and liked = 1',
            )
    return ()


def values_off_scale(numbers: np.ndarray) -> list[float]:
    """Return the values apart from a scale, such as -1 and 99 for a missing answer."""
    values = np.unique(numbers)
    if len(values) < LEAST_SCALE:
        return []
    low, high = values[values < 0], values[-1]
    rest = values[np.abs(values) < FAR * np.abs(values[-2])] if high in FILLERS else values
    off_scale = [float(high)] if high in FILLERS and len(rest) == len(values) - 1 else []
    # A scale may have negative values, but hardly a single one.
    return off_scale + ([float(low[0])] if len(low) == 1 and low[0] in (-1, *(-f for f in FILLERS)) else [])


def _drop_off_scale(
    label: LabelColumn, content: Content, is_given: bool
) -> tuple[LabelColumn, tuple[str, ...]]:
    """Return a label that drops the values for missing answers, and notes on them."""
    numbers = content.numbers
    if is_given or not numbers.size:
        return label, ()
    column, total = f"the column {printable(label.column[:40])}", f"of {len(numbers):,} values"
    if label.kind == COUNT:
        return _of_count(label, numbers, column)
    off_scale = values_off_scale(numbers) if label.kind == RATING else []
    if off_scale:
        shown = ", ".join(f"{value:g}" for value in sorted(off_scale))
        number = int(np.isin(numbers, off_scale).sum())
        note = (
            f"{column}: {number:,} {total} are {shown}, apart from the scale from {label.lowest:g} to "
            f'{label.highest:g}: drop = "{shown}", written under [label], leaves their events out; take '
            "it out, and widen lowest and highest, where they are answers"
        )
        return replace(label, drop=shown), (note,)
    least, counts = np.unique(numbers, return_counts=True)
    is_asked = label.kind == RATING and label.lowest == 0 and content.is_whole and least[0] == 0
    if is_asked and len(least) > 2 and counts[0] > MOST_OF_ZERO * counts[1]:
        note = (
            f"{column}: {counts[0]:,} {total} are 0 ({counts[0] / len(numbers):.0%}), and {counts[1]:,} are "
            f"{least[1]:g}: a 0 is learned as the worst rating; where 0 means that there is no answer, "
            'write drop = "0" and lowest = 1 under [label], which leaves their events out'
        )
        return label, (note,)
    return label, ()


def _of_count(label: LabelColumn, numbers: np.ndarray, column: str) -> tuple[LabelColumn, tuple[str, ...]]:
    """Return a count without its returns, and notes on these and on zeros. column: its name in a note."""
    notes, drops = [], []
    if below := int((numbers < 0).sum()):
        drops.append("<0")
        notes.append(
            f'{column}: {below:,} of {len(numbers):,} values are below 0, as those of returns: drop = "<0", '
            "written under [label], leaves their events out"
        )
    zeros = int((numbers == 0).sum())
    if zeros > MOST_ZEROS * len(numbers):
        notes.append(
            f"{column}: {zeros:,} of {len(numbers):,} values are 0 ({zeros / len(numbers):.0%}): their items "
            "are learned and tested as chosen, with a weight of 1 (of 1.7 for a count of 1); where 0 means "
            f"that nothing was chosen, write drop = {toml_of(', '.join([*drops, '0']))} under [label], which "
            "leaves their events out"
        )
    return replace(label, drop=", ".join(drops)), tuple(notes)


def _scale_of(values: np.ndarray) -> tuple[float, float]:
    least, most = float(values.min()), float(values.max())
    for lowest, highest in SCALES:
        if lowest <= least and LEAST_REACH * highest <= most <= highest:
            return lowest, highest
    if least >= 0 and most <= 1:
        return 0.0, 1.0
    return float(np.floor(least)), float(np.ceil(most))


class IdGroups(NamedTuple):
    """Rows of a sample grouped by an id: their order, int [n], and the codes of the ids in that order."""

    order: np.ndarray
    ids: np.ndarray


def groups_of(column: pa.ChunkedArray) -> IdGroups:
    """Group the rows of a column of ids."""
    codes = codes_of(column)
    order = codes.argsort(kind="stable")
    return IdGroups(order, codes[order])


def is_constant(table: pa.Table, column: str, within: str) -> bool:
    """True if a column has one value for each value of another column, with few contradictions."""
    return is_property(codes_of(table[column]), groups_of(table[within]))


def is_property(values: np.ndarray, groups: IdGroups) -> bool:
    """True if `contradictions` finds a property of the id."""
    number = contradictions(values, groups)
    return number is not None and number < math.inf


def contradictions(values: np.ndarray, groups: IdGroups) -> float | None:
    """Count the rows whose value differs from most rows of their id; infinity if it is no property of the id.

    It is a property if enough rows confirm it: at most a tenth as many contradict it as expected by chance.
    None: too few could contradict it.

    values: codes, int [n], -1 for a missing value.
    """
    codes = values[groups.order]
    known = (codes >= 0) & (groups.ids >= 0)
    ids, codes = groups.ids[known], codes[known]
    is_again = ids[1:] == ids[:-1]
    shares = np.bincount(codes) / max(1, len(codes))
    by_chance = is_again.sum() * (1 - np.dot(shares, shares))
    if by_chance < LEAST_BY_CHANCE:
        return None
    most = min(MOST_CONTRADICTING * len(codes), OF_CHANCE * by_chance)
    num_changes = int((is_again & (codes[1:] != codes[:-1])).sum())
    # Each contradiction makes at most two changes.
    if num_changes == 0 or num_changes > 2 * most:
        return math.inf if num_changes else 0
    pairs, counts = np.unique(ids.astype(np.int64) * len(shares) + codes, return_counts=True)
    owners = pairs // len(shares)
    most_frequent = np.maximum.reduceat(counts, np.flatnonzero(np.diff(owners, prepend=-1)))
    number = len(codes) - int(most_frequent.sum())
    return number if number <= most else math.inf


def codes_of(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column of any type as integer codes, equal for equal values; -1 for a missing value."""
    array = column.combine_chunks()
    if pa.types.is_nested(array.type):
        array = pa.array([None if value is None else repr(value) for value in array.to_pylist()], pa.string())
    dictionary = array.dictionary_encode()
    return encoded(dictionary)[0] if pa.types.is_string(column.type) else indices_of(dictionary)


# Without a matching name, least share of the ids in the events' first rows that a table's first rows contain.
LEAST_SHARED = 0.5


def own_column(contents: Mapping[str, Content], ids: Content, other: str, least: float = LEAST_SHARED) -> str:
    """Return the column of a users' or items' table with these ids of the events, each once; empty if none.

    It has the same name; else it has an id's name and the most values in common with them. least: the least
    share of the ids in the first rows that it has. other: the id column of the other entity.
    """
    shared = {
        name: len({*content.texts} & {*ids.texts})
        for name, content in contents.items()
        if content.distinct == content.size > 0 and name != other
        if is_same_name(name, ids.name) or is_id(name) or is_thing(name)
    }
    same = [name for name in shared if is_same_name(name, ids.name)]
    if same:
        return min(same, key=lambda name: name != ids.name)
    best = max(shared, key=lambda name: shared[name], default="")
    return best if best and shared[best] >= least * min(ids.distinct, contents[best].distinct) else ""


def is_same_name(name: str, other: str) -> bool:
    """True for names of the same words, such as toy_ids and Toy_ID."""
    first, second = ([word.removesuffix("s") for word in words_of(each)] for each in (name, other))
    return first == second


# Kinds of labels by which all items are ranked.
RANKED = (CLICKS, COUNT)
# Most values of a table that are examined; least rows, for any number of columns.
MOST_VALUES, LEAST_ROWS = 2_000_000, 200
# Names of the embedding tables of ids.
TAKEN = (USER, ITEM, EVENT)
TABLES = {USER: USERS, ITEM: ITEMS, EVENT: EVENTS}
SAME_NAME = "the events have a column with a role under this name; give it another one in its file"
TOO_MANY = f"a schema has {MOST_FEATURES:,} features at most"


class Guess(NamedTuple):
    """Schema, the columns that it does not use, and sentences on unusual events."""

    schema: TableSchema
    left_out: list[SkippedColumn]
    notes: list[str]


def guess(
    samples: Mapping[str, pa.Table], given: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Guess:
    """Guess the schema of tables; also return the unused columns, each with the reason.

    samples: the first rows of the "events", and of the "users" and "items" if they have tables of their own;
    all columns of text files are texts. given: sections of a schema that were written by hand. The guess
    takes them into account; the caller has to write them over it.

    Raises:
        UserError: when no column is recognised as that of the users or the items, or there are no rows.
    """
    # With very many columns, fewer rows are examined, to limit the time.
    samples = {
        role: plain_table(table.slice(0, max(LEAST_ROWS, MOST_VALUES // max(1, table.num_columns))))
        for role, table in samples.items()
    }
    events = samples[EVENTS]
    if not len(events):
        raise UserError("The events have no rows, so nothing can be told about their columns.")
    written_files = given.get("files", {})
    contents = {role: contents_of(table, written_files) for role, table in samples.items()}
    own = {role: tuple(of_role) for role, of_role in contents.items() if role != EVENTS}
    roles = roles_of(events, contents[EVENTS], own, given)
    _check_label(events, contents[EVENTS], roles, given.get("label", {}))
    named = {of: _table_column(contents, roles, of) for of in ENTITIES}
    owned, notes, unclear = _owned(samples, contents, roles, named)
    title = title_of(owned[ITEM])
    owned[ITEM].pop(title, None)
    features, left_out = _features(owned, roles, samples, contents[EVENTS], given, unclear)
    time = contents[EVENTS].get(roles.timestamp)
    if time:
        by_hand = given.get("features", {})
        written = {feature.get("column") for feature in by_hand.values()}
        of_times = _of_times(time, {**features, **by_hand})
        features |= {name: feature for name, feature in of_times.items() if feature.column not in written}
    columns = [content for of_table in contents.values() for content in of_table.values()]
    with_commas: dict[str, Any] = {
        form: tuple(
            dict.fromkeys([*written_files.get(form, ()), *(c.name for c in columns if c.commas == form)])
        )
        for form in COMMAS
    }
    schema = TableSchema(
        user=UserColumn(roles.user, table_column=named[USER]),
        item=ItemColumn(roles.item, title, table_column=named[ITEM]),
        label=roles.label,
        weight=WeightColumn(roles.weight) if roles.weight else None,
        timestamp=TimestampColumn(roles.timestamp, time.time_format or "iso") if time else None,
        events=roles.types,
        features=features,
        files=replace(Files(), **with_commas),
    )
    other = _other_user(contents[EVENTS], roles, len(events))
    missing = [
        _of_missing(contents[EVENTS][column], len(events), other * (column == roles.user))
        for column in (roles.user, roles.item)
    ]
    unnamed = sum(not can_be_named(name) for table in samples.values() for name in table.column_names)
    odd = [f"skipped {counted(unnamed, 'column')} without a name that a schema can hold"] if unnamed else []
    return Guess(schema, left_out, [*filter(None, missing), *roles.notes, *notes, *odd])


def _check_label(
    events: pa.Table, contents: Mapping[str, Content], roles: ColumnRoles, given: Mapping[str, Any]
) -> None:
    """Refuse a column that is named as the label, but has neither numbers nor booleans."""
    named = [given["column"]] if given.get("column") else []
    if not named and roles.label.kind == CLICKS and "kind" not in given:
        named = [
            name
            for name in contents
            if name not in roles.columns and not has_word(name, TYPES)
            if rank(name, LABELS, OF_LABELS) is not None and not is_constant(events, name, roles.item)
        ]
    for content in (contents[name] for name in named if name in contents):
        if content.kind not in ("text", "list") or content.is_long or content.distinct < 2:
            continue
        odd = (t for t in content.texts if not re.match(NUMBER_FORM, t) and t.lower() not in (*TRUE, *FALSE))
        value = next(odd, content.texts[0])
        forms = [f"[files] {form} = [{toml_of(content.name)}]" for form in forms_with_commas(value)]
        lines = " or ".join(forms) or f"[label] kind = {toml_of(CLICKS)}, to predict events alone"
        raise UserError(
            f"The column {printable(content.name)} is called a label, and its value "
            f"{printable(value[:MOST_CHARACTERS])!r} is not a number; write numbers, or write into "
            f"schema.toml, each on a line: {lines}."
        )


def _other_user(contents: Mapping[str, Content], roles: ColumnRoles, num_rows: int) -> str:
    """Return a column, such as of sessions, that has ids where most events have no user; else empty."""
    other, size = _id_column(contents, USER_WORDS, (), (*roles.columns,)), contents[roles.user].size
    is_better = other and 2 * size < num_rows and contents[other].size > NEARLY_ALL * num_rows
    return other if is_better and contents[other].distinct < contents[other].size else ""


def _of_missing(ids: Content, num_rows: int, other: str) -> str:
    """Return a note on events without a user or an item. other: a column that has ids where they lack."""
    number = num_rows - ids.size
    if not number:
        return ""
    share, allowed = number / num_rows, DataConfig.max_bad_rows
    most = "" if share <= allowed / 2 else f" --max_bad_rows {min(1, math.ceil(20 * share + 1) / 20):g}"
    told = f"training stops at such a row, and with --bad_rows skip{most} skips them"
    if other:
        told = f"to learn from all, write into schema.toml instead: [user] column = {toml_of(other)}"
    return (
        f"the column {printable(ids.name[:40])} has no id in {number:,} of {num_rows:,} events (empty, NA, "
        f"null and the like): {told}"
    )


def _table_column(contents: Mapping[str, Mapping[str, Content]], roles: ColumnRoles, of: str) -> str:
    """Return the id column of the users' or items' table; empty if it has the same name as in the events."""
    column, other = (roles.user, roles.item) if of == USER else (roles.item, roles.user)
    own = contents.get(TABLES[of], {})
    # The first rows of both tables may have different ids.
    return "" if column in own else own_column(own, contents[EVENTS][column], other, least=0)


def _owned(
    samples: Mapping[str, pa.Table],
    contents: Mapping[str, Mapping[str, Content]],
    roles: ColumnRoles,
    named: Mapping[str, str],
) -> tuple[dict[str, dict[str, Content]], list[str], dict[str, str]]:
    """Return columns without a role by owner, notes on contradictions, and reasons for unknown owners."""
    ids = {USER: roles.user, ITEM: roles.item}
    # Columns of the tables of users and items come first.
    owned: dict[str, dict[str, Content]] = {
        of: {
            name: each for name, each in contents.get(TABLES[of], {}).items() if name != (named[of] or column)
        }
        for of, column in ids.items()
    }
    owned[EVENT] = {}
    events, notes, unclear = samples[EVENTS], [], {}
    groups = {of: groups_of(events[column]) for of, column in ids.items()}
    for name, content in contents[EVENTS].items():
        if name in roles.columns:
            continue
        values = codes_of(events[name]) if content.codes is None else content.codes
        numbers = {of: contradictions(values, groups[of]) for of in groups}
        counts = {
            of: int(number) for of, number in numbers.items() if number is not None and number < math.inf
        }
        owner = min(counts, key=lambda of: counts[of], default=EVENT)
        if not counts and None in numbers.values():
            of = next(of for of in numbers if numbers[of] is None)
            is_few = contents[EVENTS][ids[of]].distinct > MOST_DISTINCT * contents[EVENTS][ids[of]].size
            unclear[name] = (FEW_REPEATS if is_few else FEW_VALUES).format(of)
        if counts.get(owner) and name not in owned[owner]:
            notes.append(
                f"the column {printable(name[:40])} of the {owner}s: in {counted(counts[owner], 'event')} of "
                f"{len(events):,} it differs from most of the same {owner}, whose value counts"
            )
        owned[owner].setdefault(name, content)
    return owned, notes, unclear


def _features(
    owned: Mapping[str, Mapping[str, Content]],
    roles: ColumnRoles,
    samples: Mapping[str, pa.Table],
    contents: Mapping[str, Content],
    given: Mapping[str, Mapping[str, Any]],
    unclear: Mapping[str, str],
) -> tuple[dict[str, FeatureColumn], list[SkippedColumn]]:
    features: dict[str, FeatureColumn] = {}
    left_out: list[SkippedColumn] = []
    is_ranked = roles.label.kind in RANKED
    numbers = _numbers(samples, contents, roles)
    by_hand = given.get("features", {})
    written = {(section.get("of"), section.get("column")) for section in by_hand.values()}
    columns_written = {column for _, column in written}
    names = {*TAKEN, *by_hand, *(given.get(of, {}).get("noun", of) for of in ENTITIES)}
    for of, columns in owned.items():
        for column, content in columns.items():
            feature, why = feature_of(content, of, numbers[of], bool(roles.timestamp), is_ranked)
            if (feature.of, feature.column) in written or (why and column in columns_written):
                continue
            # A column of users or items with the label's name would be confused with it.
            why = SAME_NAME if column in roles.columns else why
            why = unclear.get(column, why) if why == OF_EVENT else why
            # Two places are reserved for the hour and the weekday.
            why = why or TOO_MANY * (len(features) + len(by_hand) >= MOST_FEATURES - 2)
            if is_weight := of == EVENT and not roles.weight and may_be_weight(content, roles.types):
                lacking = numbers[of] - content.size
                why = OF_WEIGHT + LACKING.format(lacking, numbers[of]) * (lacking > 0)
            name = table_name(column + "_age" * feature.column.startswith(f"{AGE_DAYS}("), names)
            names.add(name)
            if why:
                values = first_values(samples, of, column)
                left_out.append(SkippedColumn(name, feature, why, values, is_weight))
            else:
                features[name] = feature
    return features, left_out


def may_be_weight(content: Content, types: EventTypes | None) -> bool:
    """True for a column that may say how much an event counts: by its name, or an amount beside types."""
    is_called = rank(content.name, WEIGHTS) is not None or (types and has_word(content.name, AMOUNTS))
    return bool(
        is_called and content.kind == "number" and content.distinct > 1 and content.numbers.min() >= 0
    )


def _numbers(
    samples: Mapping[str, pa.Table], contents: Mapping[str, Content], roles: ColumnRoles
) -> dict[str, int]:
    """Count the users, items and events in the samples."""
    users, items = (len(samples.get(role, ())) for role in (USERS, ITEMS))
    return {
        USER: max(contents[roles.user].distinct, users),
        ITEM: max(contents[roles.item].distinct, items),
        EVENT: len(samples[EVENTS]),
    }


def _of_times(time: Content, features: Mapping[str, object]) -> dict[str, FeatureColumn]:
    """Return the features weekday and hour, if the times of the events differ in them."""
    hours = hours_of(time)
    num_days, num_hours = (len(np.unique(values)) for values in (hours // 24, hours % 24))
    # The first rows of a busy log may be of one day or hour, so they cannot show the differences.
    is_busy = num_days == 1 and time.distinct > 1
    names = {*TAKEN, *features}
    of_times = {}
    if num_days > 1 or is_busy:
        of_times[table_name("weekday", names)] = FeatureColumn(EVENT, "weekday(timestamp)", CATEGORY)
    if num_hours > 1 or is_busy:
        of_times[table_name("hour", names)] = FeatureColumn(EVENT, "hour(timestamp)", CATEGORY)
    return of_times
