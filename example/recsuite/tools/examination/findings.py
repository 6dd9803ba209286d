"""The lines of the doctor's page: what a check found, in which state, and what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from recsuite.errors import counted
from recsuite.runtime.host import gib, mib

State = Literal["ok", "warning", "fault"]

# Characters in a line of the page.
PAGE_WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    name: str
    state: State
    text: str
    remedy: str = ""


def judge(name: str, text: str, *problems: tuple[object, State, str]) -> Finding:
    """The first problem (whether it is there, how bad it is, its remedy) that is there, or ok."""
    for there, state, remedy in problems:
        if there:
            return Finding(name, state, text, remedy)
    return Finding(name, "ok", text)


def has_fault(findings: Sequence[Finding]) -> bool:
    """Whether a run would fail."""
    return any(finding.state == "fault" for finding in findings)


def page(findings: Sequence[Finding]) -> str:
    """The findings as text, states first; a remedy stays one line, as it may be a command to copy."""
    width = max(len(finding.name) for finding in findings)
    indent = " " * (len("warning") + width + 4)
    # No word is broken: half of a path or a flag could not be copied.
    fold = textwrap.TextWrapper(PAGE_WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    lines = []
    for finding in findings:
        texts = [part for line in finding.text.splitlines() for part in fold.wrap(line)]
        texts += [f"-> {finding.remedy}"] if finding.remedy else []
        lines.append(f"{finding.state:<7}  {finding.name:<{width}}  " + f"\n{indent}".join(texts))
    states = [finding.state for finding in findings]
    counts = [counted(states.count(state), state) for state in ("fault", "warning") if state in states]
    return "\n".join([*lines, " and ".join(counts) or "All is well."])


def human_size(num_bytes: int) -> str:
    """As MiB, from 1 GiB on as GiB."""
    return gib(num_bytes) if num_bytes >= 2**30 else mib(num_bytes)
