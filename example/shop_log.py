"""A synthetic shop: impressions with clicks and purchases.

    python shop_log.py FOLDER                        300,000 impressions with both labels
    python shop_log.py FOLDER --labels purchase      the same, described with one label

    FOLDER/train.csv, test.csv   user, item, purchase, click
           users.csv, items.csv  city and age of each user; brand, category and price of each item
           schema.toml           purchase and click as two labels, or the one that --labels names
           _oracle.json          the AUC, on test.csv, of the probabilities from which the first label was
                                 drawn (auc), and of the same without the taste of users (without_taste)

A click depends on features and on taste, the product of four hidden factors of user and item. So does a
purchase, which is ten times rarer: clicks reveal the taste, and purchases alone are too few. The same flags
give the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas

import criteo_log
from recsuite.errors import UserError
from recsuite.files import DATA_ROOT, replacing
from recsuite.metrics import auc

ROWS, MIN_ROWS, TEST_SHARE = 300_000, 1_000, 0.2
LABELS = ("purchase", "click")
USERS, ITEMS, FACTORS = 1_000, 400, 4
# Mean logits, and the weights of taste and features in them.
MEAN = {"click": -1.4, "purchase": -5.4}
TASTE = 1.2
FEATURES = {"click": 0.3, "purchase": 0.5}
SCHEMA = """\
[user]
column = "user"

[item]
column = "item"

[features.city]
of = "user"
column = "city"
kind = "category"

[features.age]
of = "user"
column = "age"
kind = "category"

[features.brand]
of = "item"
column = "brand"
kind = "category"

[features.category]
of = "item"
column = "category"
kind = "category"

[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"
"""
LABEL = """
[[label]]
kind = "yes_no"
column = "{column}"
noun = "{noun}"
"""
COLUMNS = {"user": {"city": 20, "age": 6}, "item": {"brand": 40, "category": 15}}


def draw(rows: int, seed: int) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return the tables "user" and "item", column to values; and of the impressions "user", "item", the
    logits of each label, and those without taste, such as "click without".
    """
    random = np.random.default_rng(seed)
    tables: dict[str, dict[str, np.ndarray]] = {}
    sizes = {"user": USERS, "item": ITEMS}
    popularity = 1 / np.arange(10, 10 + ITEMS)
    events = {
        "user": random.integers(0, USERS, rows),
        "item": random.choice(ITEMS, rows, p=popularity / popularity.sum()),
    }
    effects = {label: np.full(rows, MEAN[label]) for label in LABELS}
    for entity, columns in COLUMNS.items():
        tables[entity] = {entity: np.arange(sizes[entity])}
        for name, number in columns.items():
            values = random.integers(0, number, sizes[entity])
            tables[entity][name] = values
            for label in LABELS:
                effects[label] += FEATURES[label] * random.normal(0, 1, number)[values[events[entity]]]
    price = np.exp(random.normal(3, 1, ITEMS))
    tables["item"]["price"] = np.round(price, 2)
    # A high price reduces purchases, not clicks.
    effects["purchase"] -= 0.5 * (np.log(price) - 3)[events["item"]]
    factors = [random.normal(0, FACTORS**-0.25, (number, FACTORS)) for number in sizes.values()]
    taste = (factors[0][events["user"]] * factors[1][events["item"]]).sum(axis=1)
    for label in LABELS:
        events |= {label: effects[label] + TASTE * taste, f"{label} without": effects[label]}
    return tables, events


def write_log(folder: Path, labels: Sequence[str] = LABELS, rows: int = ROWS, seed: int = 0) -> None:
    """Write a shop into a folder atomically.

    Raises:
        UserError: for too few rows, and when there is such a folder.
    """
    if rows < MIN_ROWS:
        raise UserError(f"--rows must be at least {MIN_ROWS:,}, got {rows:,}.")
    criteo_log.check_new(folder)
    tables, events = draw(rows, seed)
    random = np.random.default_rng(seed + 1)
    drawn = {label: random.random(rows) < 1 / (1 + np.exp(-events[label])) for label in LABELS}
    test = slice(rows - round(TEST_SHARE * rows), None)
    first = labels[0]
    oracle = {
        "auc": auc(events[first][test], drawn[first][test]),
        "without_taste": auc(events[f"{first} without"][test], drawn[first][test]),
    }
    with replacing(folder) as aside:
        aside.mkdir(parents=True)
        frame = pandas.DataFrame({**{name: events[name] for name in tables}, **drawn})
        frame.iloc[: test.start].to_csv(aside / "train.csv", index=False)
        frame.iloc[test].to_csv(aside / "test.csv", index=False)
        for entity, table in tables.items():
            pandas.DataFrame(table).to_csv(aside / f"{entity}s.csv", index=False)
        (aside / "schema.toml").write_text(schema_of(labels))
        (aside / criteo_log.ORACLE).write_text(json.dumps(oracle))


def schema_of(labels: Sequence[str]) -> str:
    """Return a schema.toml with these labels."""
    # The noun of the first label is the name of an event.
    nouns = ["impression", *labels[1:]]
    written = (LABEL.format(column=column, noun=noun) for column, noun in zip(labels, nouns, strict=True))
    return SCHEMA + "".join(written)


def with_data(flags: Sequence[str]) -> list[str]:
    """Return flags of the library, with a generated shop if they name no tables."""
    named = {word.partition("=")[0] for word in flags}
    if criteo_log.WITHOUT_DATA & named or "--data_path" in named:
        return [*flags]
    return [*flags, "--data_path", str(criteo_log.synthetic_log(DATA_ROOT / "shop", write_log))]


def main(argv: Sequence[str] | None = None) -> int:
    """Write a shop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labels", nargs="+", choices=LABELS, default=LABELS, help="the first one leads")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"impressions: {ROWS:,}")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    write_log(flags.folder, flags.labels, flags.rows, flags.seed)
    return 0


if __name__ == "__main__":
    from recsuite.tools.script import exit_status, run_script

    run_script(lambda: exit_status(main))
