"""What `sequences.py` measured as tables, beside the bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import bar, mean, origin, spread, table
from quality_peers_tables import shown_seconds
from sequences_agree import TOLERANCE

MARKS = {
    name: (f"<!-- {name}: made by benchmarks/sequences.py -->", f"<!-- end of {name} -->")
    for name in ("sequences", "sequences_planted")
}
THIS, ORACLE = "this", "oracle"
# Of what the best of the others reaches, and of what the oracle does.
AS_GOOD, NEAR = 1.0, 0.98
SHOWN = {"leave_one_out": "leave one out", "time": "newest fifth"}


def cases_of(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Runs by set and split, and there by system."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        found.setdefault((run["data"], run["task"]), {}).setdefault(run["system"], []).append(run)
    return found


def ndcg(runs: Sequence[dict[str, Any]]) -> float:
    """The mean over seeds."""
    return mean(run["metrics"]["ndcg_at_10"] for run in runs)


def rival_of(systems: dict[str, list[dict[str, Any]]]) -> str:
    """What this project is held against: the oracle, where it is known, else the best of the others."""
    peers = [name for name in systems if name != THIS]
    return ORACLE if ORACLE in systems else max(peers, key=lambda name: ndcg(systems[name]))


def judge(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    bars = []
    for (data, split), systems in cases_of(runs).items():
        rival = rival_of(systems)
        ratio, least = ndcg(systems[THIS]) / ndcg(systems[rival]), NEAR if rival == ORACLE else AS_GOOD
        if split == "leave_one_out":
            name = f"{data}, {SHOWN[split]}, NDCG@10 / {rival}"
            bars.append(bar(name, ratio, least, f"{ratio:.3f}", f"{least}"))
        differ = [run["recbole differs by"] for run in systems[THIS] if "recbole differs by" in run]
        if differ:
            name = f"{data}, {SHOWN[split]}, recbole's metrics differ by"
            bars.append(
                bar(name, max(differ), TOLERANCE, f"{max(differ):.1e}", f"{TOLERANCE:g}", at_most=True)
            )
    return bars


def render(result: dict[str, Any]) -> str:
    """A line for each system on each test, what was said of the split, and where it comes from."""
    lines: list[tuple[str, ...]] = [
        ("test", "system", "NDCG@10", "HR@10", "NDCG@10 / best other, or oracle", "training")
    ]
    lines.append(("---", "---", *["---:"] * 4))
    for (data, split), systems in cases_of(result["runs"]).items():
        best = ndcg(systems[rival_of(systems)])
        for name, same in systems.items():
            cells = [
                spread([run["metrics"][metric] for run in same]) for metric in ("ndcg_at_10", "hr_at_10")
            ]
            cells = [f"**{cell}**" if name == THIS else cell for cell in cells]
            seconds = "-" if name == ORACLE else shown_seconds(mean(run["seconds"] for run in same))
            ratio = f"{ndcg(same) / best:.3f}"
            seeds = f"{len(same)} seed{'s' * (len(same) > 1)}"
            lines.append((f"{data}, {SHOWN[split]}, {seeds}", name, *cells, ratio, seconds))
    notes = {f"{run['data']}: {note}." for run in result["runs"] for note in run.get("notes", ())}
    about = f"--task {result['task']}. {origin(result)}."
    return "\n\n".join([table(lines), *sorted(notes), about])
