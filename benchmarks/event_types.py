"""Compare what views and carts add to the ranking of purchases with what is planted in a shop.

    python benchmarks/event_types.py [--write]               three shops of 6,000 users: six minutes
    python benchmarks/event_types.py --seeds 1 --users 300   half a minute

Shops of `shop_weeks.py`, with the schema that is guessed. Each is trained with views and carts in the user
histories; without them; with them, but with bought items excluded; and on all events alike, where a view
weighs a tenth of a purchase and a cart three tenths, with the purchases of the same time as a test. The
latter does not know views and carts of the time of the test. For cold items a training includes new ones, of
which the table has those of later weeks too. Beside each stands the oracle, which knows the
planted effects.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
from common import DOCS, ROOT, bar, describe, finish, make_parser, mean, origin, table, train
from shop_weeks import COLD, NUM_ITEMS, NUM_USERS, write_weeks

from recsuite.extras.guess.proposal import propose

PAGE = DOCS / "your_data.md"
SCRIPT = ROOT / "example" / "retrieval.py"
WEIGHTS = {"view": 0.1, "cart": 0.3, "purchase": 1.0}
# Name of a training, and of what its oracle knows; None if there is no oracle.
WAYS = {
    "views and carts in the history": "all",
    "purchases alone": "without_context",
    "bought items excluded": "excluded",
    "all types as events, by weight": None,
    f"views and carts, items with fewer than {COLD} purchases": "cold",
}
# Segments of --by item_events with fewer than COLD events.
OF_COLD = ("0", "1 to 4")
# Least share of a planted difference that is found, and of the oracle of cold items that is reached.
SHARE, SHARE_OF_COLD = 0.5, 0.5


def main() -> None:
    """Train, show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of shops (default: 3)")
    parser.add_argument("--users", type=int, default=NUM_USERS, help="users, with a third as many items")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train (default: 2)")
    finish("event_types", parser.parse_args(), measure, judge, render, PAGE, mark="event types")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    found = []
    for seed in range(flags.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            items = flags.users * NUM_ITEMS // NUM_USERS
            oracle = write_weeks(folder / "shop", seed=seed, num_users=flags.users, num_items=items)
            found.append({"oracle": oracle, "ndcg": _trained(folder, flags.ranks)})
    return {"about": describe(), "users": flags.users, "ranks": flags.ranks, "shops": found}


def _trained(folder: Path, ranks: int) -> dict[str, float]:
    """NDCG@10 of each of the ways on one shop."""
    shop, (whole, alone, excluded, weighted, cold) = folder / "shop", WAYS
    schema = propose(shop).path
    before = schema.read_text()
    report = _train(shop, ranks)
    with_new = _train(shop, ranks, "--by", "item_events", "--new_items", "include")
    of_cold = [part for name, part in with_new["segments"]["item_events"].items() if name in OF_COLD]
    found = {
        whole: report["test"]["ndcg_at_10"],
        excluded: _train(shop, ranks, "--seen", "exclude")["test"]["ndcg_at_10"],
        cold: sum(part["cases"] * part["ndcg_at_10"] for part in of_cold)
        / sum(part["cases"] for part in of_cold),
    }
    schema.write_text(before.replace('context = ["view", "cart"]', "context = []"))
    found[alone] = _train(shop, ranks)["test"]["ndcg_at_10"]
    _weigh(shop, folder / "weighted", before, report["data"]["num_test"])
    found[weighted] = _train(folder / "weighted", ranks, split="files")["test"]["ndcg_at_10"]
    return found


def _train(shop: Path, ranks: int, *flags: object, split: str = "time") -> Any:
    # The oracle is that of the newest purchases.
    given = ("--data_path", shop, "--train", "--preset", "ranking", "--num_workers", 0, "--split", split)
    return train(*given, *flags, ranks=ranks, script=SCRIPT)


def _weigh(shop: Path, folder: Path, schema: str, num_test: int) -> None:
    """Write all events before the newest purchases, with weights, and these as the test."""
    folder.mkdir()
    events = pd.concat([pd.read_parquet(path) for path in sorted(shop.glob("week-*"))])
    events = events.sort_values("timestamp", kind="stable")
    test = events[events["event_type"] == "purchase"].tail(num_test)
    for name, part in (("train", events[events["timestamp"] < test["timestamp"].min()]), ("test", test)):
        weighed = part.assign(weight=part["event_type"].map(WEIGHTS)).drop(columns="event_type")
        weighed.to_parquet(folder / f"{name}.parquet", index=False)
    for name in ("users", "items"):
        shutil.copy(shop / f"{name}.parquet", folder)
    begin, _, rest = schema.partition("[events]")
    (folder / "schema.toml").write_text(f'{begin}[weight]\ncolumn = "weight"\n{rest.partition("]")[2]}')


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Shares of the planted differences, and of the oracle of cold items."""
    whole, alone, excluded, weighted, cold = WAYS
    bars = []
    for name, other in (("views and carts", alone), ("repeats", excluded)):
        planted = _oracle(result, WAYS[whole]) - _oracle(result, WAYS[other])
        share = (_reached(result, whole) - _reached(result, other)) / planted
        bars.append(
            bar(f"{name}: share of the planted difference", share, SHARE, f"{share:.2f}", f"{SHARE:g}")
        )
    gain = _reached(result, whole) - _reached(result, weighted)
    bars.append(bar("views and carts, above all types by weight", gain, 0, f"{gain:.3f}", "0"))
    share = _reached(result, cold) / _oracle(result, WAYS[cold])
    shown = f"{SHARE_OF_COLD:g}"
    return [*bars, bar("cold items: share of the oracle", share, SHARE_OF_COLD, f"{share:.2f}", shown)]


def _oracle(result: dict[str, Any], name: str | None) -> float:
    return mean(shop["oracle"][name] for shop in result["shops"])


def _reached(result: dict[str, Any], way: str) -> float:
    return mean(shop["ndcg"][way] for shop in result["shops"])


def render(result: dict[str, Any]) -> str:
    """Table with a row for each of the ways."""
    rows = [
        (way, f"{_oracle(result, name):.3f}" if name else "", f"{_reached(result, way):.3f}")
        for way, name in WAYS.items()
    ]
    shown = table(("test NDCG@10 of purchases", "oracle", "model"), rows)
    number = len(result["shops"])
    return f"{shown}\n\nMeans of {number} shops; measured on {origin(result['about'])}."


if __name__ == "__main__":
    main()
