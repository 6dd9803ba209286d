"""Former names of flags and of their values, which work for one release, and flags that were removed.

Tests hold that each former name still parses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Former name of a flag: its name, and the new values by the former ones.
RENAMED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "admit": ("admission_threshold", {}),
    "days": ("day_feature", {}),
    "evict": ("eviction", {}),
    "grow": ("max_load_factor", {}),
    "ids": ("vocabulary", {"vocabulary": "fixed"}),
    "world": ("synthetic_kind", {"fixed": "stationary", "moving": "drifting", "chain": "markov"}),
}
# Removed flags of recorded configurations, by all of their names; 0 stands for none.
REMOVED = ("audience", "co_occurrence", "item_history", "others")


def renamed_flag(name: str, value: Any) -> tuple[str, Any]:
    """Return the present name and value of a flag."""
    present, values = RENAMED.get(name, (name, {}))
    return present, values.get(value, value) if isinstance(value, str) else value


def renamed_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags by their present names, with their present values."""
    return dict(renamed_flag(name, value) for name, value in flags.items())


def renamed_words(argv: Iterable[str]) -> list[str]:
    """Return the words of a command line with the present names and values of flags."""
    words: list[str] = []
    former = ""
    for word in argv:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            # The value of the flag before.
            words.append(str(renamed_flag(former, word)[1]))
            former = ""
            continue
        former = name[2:]
        present, value = renamed_flag(former, value)
        words.append(f"--{present}{equals}{value}")
    return words


def describe_renamed(argv: Sequence[str]) -> str:
    """Return a warning that names the former flags of a command line and the present ones; "" if none."""
    changes = {
        f"{' '.join(before)} is now {' '.join(after)}": None
        for before, after in zip(_flags_in(argv), _flags_in(renamed_words(argv)), strict=True)
        if before != after
    }
    return f"Warning: {', '.join(changes)}; the former names end with the next release." if changes else ""


def _flags_in(argv: Sequence[str]) -> list[list[str]]:
    """Return each flag of a command line with its values."""
    flags: list[list[str]] = []
    for word in argv:
        if word.startswith("--"):
            flags.append([word])
        elif flags:
            flags[-1].append(word)
    return flags
