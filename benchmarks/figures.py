"""How figures are shown: bars, which are what was asked for beside what was measured, ratios and tables.

Computes and shows; reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
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


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of two figures, round by round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds."""
    # Of ratios, and not the ratio of medians: what slows a machine down for a while slows both in a round.
    return median(ratios(values, others))


def shown_ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """The median over rounds, and the least and the most: of a noisy machine they say that it was one."""
    found = ratios(values, others)
    return f"{median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as a table of Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(about: dict[str, Any]) -> str:
    """Where figures come from, in a line; about: what `environment.describe` says."""
    # The name of the fbgemm wheel says nothing where no kernel of it is measured.
    versions = [f"{name} {version}" for name, version in about["versions"].items() if name != "fbgemm"]
    return f"{about['machine']}; {', '.join(versions)}; {about['date'][:10]}"


def mean(values: Iterable[float]) -> float:
    """The mean of some numbers."""
    return fmean(values)


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there is one."""
    deviation = f" +- {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{deviation}"
