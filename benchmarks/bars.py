"""Bars: what was asked for, beside what was measured. Computes and shows; reads and writes nothing."""

from __future__ import annotations

from typing import Any


def bar(
    name: str, measured: float, limit: float, shown: str, shown_limit: str, at_most: bool = False
) -> dict[str, Any]:
    """A bar of at least, or of at most, a limit, as the JSON of a benchmark has it."""
    return {
        "name": name,
        "bar": f"{'at most' if at_most else 'at least'} {shown_limit}",
        "measured": shown,
        "reached": measured <= limit if at_most else measured >= limit,
    }


def bar_lines(bars: list[dict[str, Any]]) -> str:
    """One line a bar."""
    return "\n".join(
        f"{'reached' if bar['reached'] else 'SHORT  '}  {bar['name']}: {bar['measured']} ({bar['bar']})"
        for bar in bars
    )
