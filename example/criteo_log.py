"""Criteo's columns, and a synthetic log of clicks with them.

    python criteo_log.py FOLDER                  800,000 impressions
    python criteo_log.py FOLDER --rows 30000

    FOLDER/train.tsv, test.tsv   without a header: the label (1 is a click), the numbers I1 to I13 and the
                                 categories C1 to C26, separated by tabs; a missing value is empty
           _oracle.json           the AUC, on test.tsv, of the probabilities from which the labels were drawn
                                 (auc), and of the same without the effects of pairs (without_crosses)

A click depends on single features, on pairs of categories and on pairs of a category and a number. The mean
effect of a pair over each of its two features is zero, so a sum of features cannot model it. The same flags
give the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from recsuite.config.config import Config
from recsuite.config.parser import check_read, unread_flags
from recsuite.datasets.tables.files import find_tables, schema_path
from recsuite.datasets.tables.formats import TextFile
from recsuite.datasets.tables.sections import (
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TableSchema,
    UserColumn,
)
from recsuite.errors import UserError
from recsuite.files import DATA_ROOT, locked, replacing
from recsuite.hooks import extra
from recsuite.metrics import auc
from recsuite.runtime.process import RuntimeContext, read_launch

T = TypeVar("T")
# Because of the underscore it is not read as a table.
ORACLE = "_oracle.json"
# Flags of users, their histories and recommendations, of other data and other tasks.
UNREAD = [
    *(
        "task",
        "preset",
        "initial_rows",
        "l2",
        "negatives",
        "history",
        "history_weights",
        "cutoffs",
        "day_feature",
        "seen",
        "new_items",
    ),
    *("duplicates", "block", "num_blocks", "num_heads", "dropout", "stream", "dataset", "synthetic_kind"),
    *("synthetic_ratings", "schema", "recommend", "user", "top", "follow"),
]
# Modes that read no data.
WITHOUT_DATA = {"--doctor", "--export", "--help", "--help_all", "-h"}
NUMBERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *NUMBERS, *CATEGORIES)
ROWS, MIN_ROWS, TEST_SHARE = 800_000, 1_000, 0.2
# Number of values of each category.
NUM_VALUES = (8, 6, 8, 5, 10, 3, 12, 6, 6, 8, 6, 4, 12, 8, 6, 3, 10, 5, 8, 6, 8, 4, 8, 10, 6, 5)
# Pairs of categories, and of a category and a number, by their positions, and the weight of each.
PAIRS, NUMBER_PAIRS, WEIGHT = ((0, 1), (2, 7), (4, 13)), ((8, 0), (10, 2)), 0.7
# Standard deviation of the effect of one feature, and the mean logit.
SPREAD, MEAN = 0.2, -1.2
# Seconds to wait for another process that writes the same log or its schema.
DEADLINE = 300.0


def draw(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers, float64 [rows, 13] with NaN for missing ones; categories, int64 [rows, 26]; and the
    logits of a click with and without crosses, float64 [rows] both.
    """
    random = np.random.default_rng(seed)
    logs = random.normal(1.5, 1.0, (rows, len(NUMBERS)))
    numbers = np.floor(np.exp(logs))
    inputs = np.log1p(numbers)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    is_missing = random.random(numbers.shape) < np.linspace(0, 0.3, len(NUMBERS))
    numbers[is_missing], inputs[is_missing] = np.nan, 0.0
    slopes = random.normal(0, SPREAD, len(NUMBERS))
    # Features of a pair also have a single effect, as is common.
    slopes[[number for _, number in NUMBER_PAIRS]] = 2 * SPREAD
    single = MEAN + inputs @ slopes
    categories = np.empty((rows, len(CATEGORIES)), np.int64)
    for column, number in enumerate(NUM_VALUES):
        popularity = 1 / np.arange(4, 4 + number)
        categories[:, column] = random.choice(number, rows, p=popularity / popularity.sum())
        single += random.normal(0, SPREAD, number)[categories[:, column]]

    def effect(column: int) -> np.ndarray:
        """Return the factor of a feature in a pair, of mean 0 and variance 1 over the rows."""
        values = random.normal(0, 1, NUM_VALUES[column])[categories[:, column]]
        return (values - values.mean()) / values.std()

    crosses = sum(effect(first) * effect(second) for first, second in PAIRS)
    crosses = crosses + sum(effect(category) * inputs[:, number] for category, number in NUMBER_PAIRS)
    return numbers, categories, single + WEIGHT * crosses, single


def write_log(folder: Path, rows: int = ROWS, seed: int = 0) -> None:
    """Write a log into a folder atomically.

    Raises:
        UserError: for too few rows.
    """
    if rows < MIN_ROWS:
        raise UserError(f"--rows must be at least {MIN_ROWS:,}, got {rows:,}.")
    check_new(folder)
    numbers, categories, logits, without = draw(rows, seed)
    labels = np.random.default_rng(seed + 1).random(rows) < 1 / (1 + np.exp(-logits))
    test = slice(rows - round(TEST_SHARE * rows), None)
    oracle = {"auc": auc(logits[test], labels[test]), "without_crosses": auc(without[test], labels[test])}
    with replacing(folder) as aside:
        aside.mkdir(parents=True)
        lines = list(_lines(labels, numbers, categories))
        (aside / "train.tsv").write_text("".join(lines[: test.start]))
        (aside / "test.tsv").write_text("".join(lines[test.start :]))
        (aside / ORACLE).write_text(json.dumps(oracle))


def _lines(labels: np.ndarray, numbers: np.ndarray, categories: np.ndarray) -> Iterator[str]:
    columns = [np.where(labels, "1", "0").tolist()]
    for number in numbers.T:
        texts = np.nan_to_num(number).astype(np.int64).astype(str)
        columns.append(np.where(np.isnan(number), "", texts).tolist())
    for column, (category, number) in enumerate(zip(categories.T, NUM_VALUES, strict=True)):
        # Texts of 8 hexadecimal digits, as in Criteo's log. In every third column one value means missing.
        names = [f"{(column * 1_000 + value + 1) * 2_654_435_761 % 2**32:08x}" for value in range(number)]
        names[0] = "" if column % 3 == 2 else names[0]
        columns.append(np.array(names)[category].tolist())
    for row in zip(*columns, strict=True):
        yield "\t".join(row) + "\n"


def synthetic_log(folder: Path, write: Callable[[Path], object] = write_log) -> Path:
    """Return a folder with a log, which is generated if it does not exist; several processes may call it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), "drawing the log", DEADLINE):
        if not folder.exists():
            write(folder)
    return folder


def describe(path: Path) -> None:
    """Write a schema.toml for a log, a file or a folder, unless there is one beside it. Criteo's rows have no
    user and no item, so all rows get the same ones; several processes may call it.

    Raises:
        UserError: for a file without Criteo's 40 columns.
    """
    written = schema_path(path)
    if written.exists():
        return
    name = path.name if path.is_file() else ""
    files = Files(name, delimiter="\t", columns=COLUMNS, constants=("user=all", "item=all"))
    for file in find_tables(str(path), files).events:
        number = len(TextFile(file).head.partition(b"\n")[0].split(b"\t"))
        if number != len(COLUMNS):
            raise UserError(
                f"{file} must have {len(COLUMNS)} columns with tabs between (label, I1 to I13, C1 to C26), "
                f"got {number} in line 1. Fix: give a log of Criteo's; example.py reads other tables."
            )
    numbers = {name: FeatureColumn("event", name, "number", input="dense") for name in NUMBERS}
    categories = {name: FeatureColumn("event", name, "category") for name in CATEGORIES}
    label = LabelColumn("yes_no", "label", noun="impression")
    schema = TableSchema(UserColumn("user"), ItemColumn("item"), label, files, features=numbers | categories)
    written.parent.mkdir(parents=True, exist_ok=True)
    extra("schema").write_schema(schema, written)


def parse(
    argv: Sequence[str] | None, description: str | None, models: Mapping[str, T]
) -> tuple[T, list[str]]:
    """Return the model of --model, and the flags of the library, including the path of the log.

    Raises:
        UserError: see `describe`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter, add_help=False
    )
    parser.add_argument("--model", choices=models, default="dlrm", help="dlrm, unless another is given")
    parser.add_argument("--data_path", type=Path, help="a log of Criteo's; a synthetic one without it")
    flags, others = parser.parse_known_args(argv)
    # Before a log is generated.
    check_read(others, unread_flags(UNREAD))
    if {"-h", "--help", "--help_all"} & {*others} and read_launch().rank == 0:
        parser.print_help()
    if not WITHOUT_DATA & {word.partition("=")[0] for word in others}:
        path = flags.data_path or synthetic_log(DATA_ROOT / "criteo")
        describe(path)
        others += ["--data_path", str(path)]
    return models[flags.model], others


def say_oracle(auc: float, config: Config, context: RuntimeContext) -> None:
    """Print an AUC of the test between two known ones: the best without a part of the data, and the best."""
    from recsuite.training.results import share_of_best

    path = Path(config.data.data_path) / ORACLE
    if path.is_file():
        best, (name, less) = json.loads(path.read_text()).items()
        for sentence in share_of_best("AUC", auc, f"the best {name.replace('_', ' ')}", less, best[1]):
            context.say(sentence)


def check_new(folder: Path) -> None:
    """Refuse a folder that exists already.

    Raises:
        UserError: names it.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already. Fix: give another folder, or remove it.")


def main(argv: Sequence[str] | None = None) -> int:
    """Write a log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"impressions: {ROWS:,}")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    write_log(flags.folder, flags.rows, flags.seed)
    return 0


if __name__ == "__main__":
    from recsuite.tools.script import exit_status, run_script

    run_script(lambda: exit_status(main))
