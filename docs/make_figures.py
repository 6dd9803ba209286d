"""Put measured figures into the documents, so that pages and measurements cannot differ.

python docs/make_figures.py            print the table of results of the README
python docs/make_figures.py --write    put it there, and bring the excerpts of all pages up to date

The table comes from the JSON in docs/. An excerpt, between `<!-- excerpt of NAME -->` and
`<!-- end of excerpt -->`, has some rows of the table NAME in docs/log/benchmarks.md, written by a benchmark,
and its origin. To show another row, add a line with its first cell, and with its second one if first cells
are equal.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
TABLES = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- summary: made by docs/make_figures.py -->", "<!-- end of summary -->")
EXCERPT = re.compile(r"(<!-- excerpt of ([\w ]+) -->\n)(.*?)(\n<!-- end of excerpt -->)", re.DOTALL)
ORIGIN = re.compile(r"\d+ cores? of [^|\n]*?\d{4}-\d\d-\d\d")


def main() -> None:
    """Print the table, or write all figures."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--write", action="store_true", help="into README.md and docs/")
    if not flags.parse_args().write:
        print(summary())
        return
    for page in (README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("extras/*.md"))):
        text = page.read_text()
        made = with_figures(text)
        if made != text:
            page.write_text(made)


def with_figures(text: str) -> str:
    """Return the text of a page with the figures of today's measurements."""
    first, last = map(re.escape, MARKS)
    if MARKS[0] in text:
        block = f"{MARKS[0]}\n{summary()}\n{MARKS[1]}"
        text = re.sub(f"{first}.*{last}", lambda match: block, text, flags=re.DOTALL)
    return EXCERPT.sub(lambda match: f"{match[1]}{excerpt(match[2], match[3])}{match[4]}", text)


def excerpt(name: str, shown: str) -> str:
    """Return the rows of a table of which `shown` has the first cells, and where they come from.

    Rows with equal first cells are told apart by the second one.

    Raises:
        ValueError: when the table or a row is missing.
    """
    found = re.search(rf"<!-- {name}\b.*?-->\n(.*?)\n<!-- end", TABLES.read_text(), re.DOTALL)
    wanted = [line for line in shown.splitlines() if line.startswith("|")]
    tables = [
        part.splitlines() for part in re.findall(r"(?:^\|.*\n)+", found[1] if found else "", re.MULTILINE)
    ]
    fitting = [table for table in tables if _cells(table[0])[0] == _cells(wanted[0])[0]]
    if found is None or not fitting:
        raise ValueError(f"{TABLES.name} has no table {name} that begins with {wanted[0]}")
    rows = [_row(fitting[0], line) for line in wanted]
    return "\n".join([*rows, "", f"{ORIGIN.findall(found[1])[-1]}."])


def _row(table: Sequence[str], wanted: str) -> str:
    cells = _cells(wanted)
    if set(cells[0]) <= set("-:"):
        return table[1]
    rows = [line for line in table if _cells(line)[0] == cells[0]]
    if len(rows) > 1:
        rows = [line for line in rows if _cells(line)[1] == cells[1]]
    if len(rows) != 1:
        raise ValueError(f"{TABLES.name} has {len(rows)} rows for {wanted}")
    return rows[0]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def summary() -> str:
    """Return the table of results of the README."""
    served = _read("online_serving")
    middle, slowest = median(served["seconds"]), quantiles(served["seconds"], n=100, method="inclusive")[-1]
    rows = [
        *_sequences(),
        *_ratings(),
        _online(),
        _loads(),
        (
            f"seconds from a window of {served['chunk']} events to a served model that learned it: median, "
            "99th percentile",
            f"**{middle:.1f}**, **{slowest:.1f}**",
            served,
        ),
        _speed(),
    ]
    lines = ["| measurement | result, this project in bold | date |", "| --- | --- | --- |"]
    lines += [f"| {what} | {result} | {about['date'][:10]} |" for what, result, about in rows]
    return "\n".join([*lines, "", _origin([about for *_, about in rows])])


def _origin(measured: Sequence[dict[str, Any]]) -> str:
    """Return the machines and the versions of some measurements, in a line."""
    machines = sorted({re.sub(r"\(R\)| Processor", "", about["machine"]) for about in measured})
    versions = [
        f"{name} {' or '.join(sorted({about['versions'][name] for about in measured}))}"
        for name in ("python", "torch", "torchrec", "numpy")
    ]
    return f"{'; '.join(machines)}; no GPU; {', '.join(versions)}."


def _sequences() -> list[tuple[str, str, dict[str, Any]]]:
    """Ranks of the next item beside those of SASRec, one core each."""
    found = _read("sequences")
    rows = []
    for data in ("ml-100k", "ml-latest-small"):
        mine, sasrec = (
            _mean(found["runs"], "metrics", "ndcg_at_10", data=data, task="leave_one_out", system=system)
            for system in ("this", "SASRec, recbole")
        )
        what = f"next item on {data}, NDCG@10 of all items, beside RecBole's SASRec"
        rows.append((what, f"**{mine:.3f}**, {sasrec:.3f}", found))
    return rows


def _ratings() -> list[tuple[str, str, dict[str, Any]]]:
    """Errors of ratings beside those of the better of myFM's two."""
    found = _read("panel")
    rows = []
    for data, what in (
        (
            "ml-latest-small, random",
            "ratings of ml-latest-small, random 90/10, RMSE: drawn rows, `--preset solved`; beside myFM",
        ),
        (
            "shop small, time",
            "17,000 ratings of a planted shop, RMSE: the same, beside Gibbs sampling (myFM)",
        ),
    ):
        drawn, solved, *myfm = (
            _mean(found["runs"], "metrics", "rmse", data=data, system=system)
            for system in ("this", "this, solved", "myFM, ids", "myFM, who rated what")
        )
        rows.append((what, f"**{drawn:.3f}**, **{solved:.3f}**; {min(myfm):.3f}", found))
    return rows


def _online() -> tuple[str, str, dict[str, Any]]:
    """Return the error of a model that is trained online, beside that of a retrained one."""
    found = _read("online_quality")
    (each,) = (each for each in found["sets"] if each["data"] == "ml-100k")
    online = {one["window"]: one["rmse"] for one in each["online"]}
    what = "ratings of ml-100k by time, RMSE: learned online each hour, beside retrained each day"
    return what, f"**{online['1h']:.3f}**, {each['rmse']['retrained']:.3f}", found


def _mean(runs: list[dict[str, Any]], part: str, name: str, **wanted: str) -> float:
    """Return the mean of a number over the runs that have the wanted values."""
    return fmean(run[part][name] for run in runs if wanted.items() <= run.items())


def _loads() -> tuple[str, str, dict[str, Any]]:
    """Loads of a checkpoint of two ranks by others, beside a plain read."""
    found = _read("checkpoint")
    largest = found["sizes"][-1]
    shares = {}
    for load in largest["loads"]:
        times = load["cached"]
        pairs = zip(times["plain"], times["load"], strict=True)
        shares[load["ranks"]] = median(plain / seconds for plain, seconds in pairs)
    result = ", ".join(f"**{shares[ranks]:.2f}**" for ranks in sorted(shares))
    size = f"{largest['dump bytes'] / 1e9:.1f} GB"
    what = f"a checkpoint of 2 ranks ({size}) loaded by 1, 2 and 3, of a plain read's rate"
    return what, result, found


def _speed() -> tuple[str, str, dict[str, Any]]:
    """Rates of the default model with two processes, beside the best plain PyTorch."""
    found = _read("train")
    ratios = []
    for size in found["models"]["default"]["sizes"]:
        rates = size["rates"]
        best = max((name for name in rates if name.startswith("plain")), key=lambda name: median(rates[name]))
        pairs = zip(rates["here, 2 processes"], rates[best], strict=True)
        ratios.append(median(mine / plain for mine, plain in pairs))
    rows = ", ".join(f"{size['users'] + size['movies']:,}" for size in found["models"]["default"]["sizes"])
    what = f"events per second of 2 processes, {rows} rows, of the best plain PyTorch's"
    return what, ", ".join(f"**{ratio:.2f}**" for ratio in ratios), found


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    main()
