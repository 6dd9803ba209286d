"""Copies of a valid schema.toml, each damaged in a way that a seed decides: as people and disks do it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

# Whatever somebody may write behind a "=", or a program put there.
ABSURD = (
    *(
        '""',
        '"\\u0000"',
        '"' + "x" * 20_000 + '"',
        "'''a\nb'''",
        '"\\n\\t\\u001b[31m"',
        '"\U0001f600"',
        '"%"',
    ),
    *("0", "-1", "1e400", "-inf", "nan", "9" * 400, "9" * 5_000, "0x" + "f" * 5_000, "1_0", "0.1e-320"),
    *("true", "[]", "[[]]", "{}", "{a = {b = {}}}", "[" * 40 + "]" * 40, "[" * 3_000 + "]" * 3_000),
    *("2026-11-20", "2026-02-30", "07:32:00", "2026-11-20T08:30:00+25:00", '"../../etc"', '"hour(timestamp"'),
    *('"age_days(item.)"', '"f(g(timestamp))"', '"%Y-%m-%d%Y"', '"%Q"', '"rating\\u00a0"', '"category "'),
)
KEYS = (
    "column",
    "kind",
    "of",
    "input",
    "separator",
    "lowest",
    "liked",
    "format",
    "title",
    "noun",
    "x" * 5_000,
)
LETTERS = "\x00\x7f\t\"'\\=[]{}#.,\n\r\ufeff\u200b\u202e\u00e9\u4e2d\U0001f4a9"


def mutated_schemas(valid: str, number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """So many damaged copies, each with the name of what was done to it; the same for the same seed."""
    for place in range(number):
        change = CHANGES[place % len(CHANGES)]
        yield f"{place}: {change.__name__}", change(valid, random.Random(f"{seed} {place}"))


def flip_bytes(text: str, draw: random.Random) -> bytes:
    """Some bytes with another bit."""
    content = bytearray(text.encode())
    for _ in range(draw.randint(1, 5)):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def truncate(text: str, draw: random.Random) -> bytes:
    """The beginning, as of a full disk."""
    return text.encode()[: draw.randrange(len(text))]


def rename_key(text: str, draw: random.Random) -> bytes:
    """A key under another name, or with a letter changed."""
    lines, place = _drawn(text, draw, "=")
    key, _, value = lines[place].partition(" = ")
    typed = key[:-1] + draw.choice("aeiou")
    lines[place] = f"{draw.choice((typed, typed, key.upper(), draw.choice(KEYS)))} = {value}"
    return _joined(lines)


def remove_lines(text: str, draw: random.Random) -> bytes:
    """A key or the head of a section is gone; or several."""
    for _ in range(draw.randint(1, 3)):
        lines, place = _drawn(text, draw, draw.choice("=["))
        del lines[place]
        text = "\n".join(lines)
    return text.encode()


def duplicate(text: str, draw: random.Random) -> bytes:
    """A key or a section twice."""
    lines, place = _drawn(text, draw, draw.choice("=["))
    lines.insert(draw.choice((place, len(lines))), lines[place])
    return _joined(lines)


def change_value(text: str, draw: random.Random) -> bytes:
    """A value of another type, or an absurd one."""
    lines, place = _drawn(text, draw, "=")
    lines[place] = f"{lines[place].partition(' = ')[0]} = {draw.choice(ABSURD)}"
    return _joined(lines)


def swap_values(text: str, draw: random.Random) -> bytes:
    """Two values in each other's place."""
    lines, first = _drawn(text, draw, "=")
    _, second = _drawn(text, draw, "=")
    (one, _, value), (other, _, another) = (lines[place].partition(" = ") for place in (first, second))
    lines[first], lines[second] = f"{one} = {another}", f"{other} = {value}"
    return _joined(lines)


def swap_sections(text: str, draw: random.Random) -> bytes:
    """Two heads of sections in each other's place."""
    lines, first = _drawn(text, draw, "[")
    _, second = _drawn(text, draw, "[")
    lines[first], lines[second] = lines[second], lines[first]
    return _joined(lines)


def rename_section(text: str, draw: random.Random) -> bytes:
    """A section under another name: one that is taken, quoted, nested deep, or no name at all."""
    lines, place = _drawn(text, draw, "[")
    names = ("features", "features.user", "features.history", "label.x", '""', '"a b"', "a" * 9_000, "[user]")
    deep = ".".join("a" * draw.choice((3, 3_000)))
    lines[place] = f"[{draw.choice((*names, deep, 'features.' + deep, lines[place][1:-2]))}]"
    return _joined(lines)


def insert_letters(text: str, draw: random.Random) -> bytes:
    """Letters that no keyboard writes by intention."""
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(LETTERS) + text[place:]
    return text.encode()


def encode_otherwise(text: str, draw: random.Random) -> bytes:
    """Another encoding, or a mark in front."""
    return (text + "# \u00e9").encode(draw.choice(("utf-16", "utf-8-sig", "latin-1", "utf-32", "utf-7")))


def enlarge(text: str, draw: random.Random) -> bytes:
    """Far more features, comments or spaces than anybody writes."""
    number = draw.choice((999, 5_000, 100_000))
    feature = '[features.f{}]\nof = "item"\ncolumn = "c{}"\nkind = "category"\n'
    features = "".join(feature.format(each, each) for each in range(min(number, 5_000)))
    return (text + draw.choice((features, "# more\n" * number, " " * 20 * number, "\n" * number))).encode()


CHANGES: tuple[Callable[[str, random.Random], bytes], ...] = (
    *(flip_bytes, truncate, rename_key, remove_lines, duplicate, change_value, swap_values, swap_sections),
    *(rename_section, insert_letters, encode_otherwise, change_value, rename_key, enlarge),
)


def _drawn(text: str, draw: random.Random, mark: str) -> tuple[list[str], int]:
    """The lines, and the place of one that is a key ("=") or the head of a section ("[")."""
    lines = text.split("\n")
    places = [
        place for place, line in enumerate(lines) if (line[:1] == "[") == (mark == "[") and line.strip()
    ]
    return lines, draw.choice([place for place in places if lines[place][0] != "#"])


def _joined(lines: list[str]) -> bytes:
    return "\n".join(lines).encode()
