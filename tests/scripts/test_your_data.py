"""People's own tables, end to end, on a shop of which it is known what there is to learn."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from recsuite.errors import UserError
from recsuite.extras.guess.proposal import propose
from recsuite.tools.choose_script import fitting_command
from tests.support.launch import EXAMPLE, ROOT, python, read_json, succeeded

sys.path.append(str(ROOT / "example"))
import shop_log

# Of what an effect is worth to whoever knows it, a model that has to learn it from 39,000 ratings finds this.
FOUND = 0.5
# Of the eight that are the default, which the walk of docs/your_data.md trains: what is planted shows sooner.
EPOCHS = ("--epochs", 5)
Shops = Callable[..., Path]


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Shops:
    """Writes a shop, each once: flags of the script -> its folder."""
    written: dict[tuple[str, ...], Path] = {}

    def write(*flags: str) -> Path:
        if flags not in written:
            written[flags] = tmp_path_factory.mktemp("shops") / "shop"
            succeeded(python(ROOT / "benchmarks" / "shop.py", written[flags], *flags))
            schema = propose(written[flags]).path
            # The device is known before the label, which a guess cannot know.
            switched = re.sub(
                r"^# (\[features.device\])((?:\n# .*)+)", _switched, schema.read_text(), flags=re.M
            )
            schema.write_text(switched)
        return written[flags]

    return write


def _switched(section: re.Match[str]) -> str:
    return section[0].removeprefix("# ").replace("\n# ", "\n")


def trained(folder: Path, report: Path, *flags: object) -> Any:
    """Report of a training on a folder of tables."""
    given = ("--data_path", folder, "--batch_size", 1_024, "--report_dir", report)
    succeeded(python(EXAMPLE, *given, *flags, timeout=250))
    return read_json(report / "metrics.json")


# Labels, whether events have times, the script that fits, and what its command line says of them.
FITTING = {
    "rating": ("rating", True, "example.py", "--preset rating --task rating"),
    "rating without times": (
        "rating", False, "example.py", "--preset rating --split random --task rating"
    ),
    "yes_no": ("liked", True, "example.py", "--preset none --task response"),
    "clicks": ("", True, "retrieval.py", "--train --preset ranking"),
    "clicks without times": ("", False, "retrieval.py", "--train --preset ranking --split random"),
    "count": ("plays", True, "retrieval.py", "--train --preset ranking"),
}  # fmt: skip
FEW_EVENTS = ("--epochs", "1", "--batch_size", "512", "--num_workers", "0")


def write_events(folder: Path, label: str, has_times: bool) -> Path:
    """Write a small table of events."""
    draw, folder = np.random.default_rng(0), folder / "data"
    folder.mkdir()
    labels = {"rating": draw.integers(1, 6, 3000), "liked": draw.integers(0, 2, 3000)}
    labels["plays"] = draw.integers(1, 90, 3000) ** 2
    columns = {"user": draw.integers(0, 100, 3000), "item": draw.integers(0, 60, 3000)}
    columns |= {label: labels[label]} if label else {}
    columns |= {"timestamp": 1_700_000_000 + 60 * np.arange(3000)} if has_times else {}
    pd.DataFrame(columns).to_csv(folder / "events.csv", index=False)
    return folder


@pytest.mark.parametrize("kind", FITTING)
def test_each_kind_of_label_has_a_script_and_a_preset_that_fit(kind: str, tmp_path: Path) -> None:
    label, has_times, script, added = FITTING[kind]
    folder = write_events(tmp_path, label, has_times)
    given = ["--data_path", str(folder), "--epochs", "1"]
    assert fitting_command(given) == [script, *given, *added.split()]
    # What is given stays, and a checkpoint says the rest itself.
    # What other commands of run.sh read, whichever script it is.
    folder_of_all = ["--save_dir", "dumps/example"] * (script != "example.py")
    assert fitting_command([*given, "--dump"])[-2:] == folder_of_all or script == "example.py"
    assert "dumps/example" not in fitting_command([*given, "--dump", "--save_dir", "mine"])
    if script == "retrieval.py":
        assert "--train" not in fitting_command([*given, "--dump"])
        ordered = [*given, "--order", "rows"] * (not has_times) or given
        sequence = fitting_command(["--task", "sequence", *ordered])
        assert sequence == ["sequential.py", *ordered, "--train", "--preset", "sequence"]
        with pytest.raises(UserError, match="--stream"):
            fitting_command([*given[:2], "--stream"])
    assert fitting_command([*given, "--load"]) == ["example.py", *given, "--load"]


def test_a_log_without_users_is_for_the_script_of_click_prediction(tmp_path: Path) -> None:
    log = ["--data_path", str(tmp_path)]
    line = "\t".join(["1", *["3"] * 13, *["a1b2c3d4"] * 26])
    with gzip.open(tmp_path / "train.tsv.gz", "wt") as file:
        file.write(f"{line}\n{line}\n")
    assert fitting_command(log) == ["ctr.py", *log]
    assert fitting_command([*log, "--load"]) == ["ctr.py", *log, "--load", "--save_dir", "dumps/example"]
    schema = (
        '[files]\nconstants = ["user=all", "item=all"]\n[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
    )
    (tmp_path / "schema.toml").write_text(f'{schema}[label]\nkind = "yes_no"\ncolumn = "label"\n')
    assert fitting_command(log) == ["ctr.py", *log]


def test_several_answers_of_yes_and_no_are_for_the_script_of_several_labels(tmp_path: Path) -> None:
    shop_log.write_log(tmp_path / "shop", rows=1_000)
    data = ["--data_path", str(tmp_path / "shop")]
    assert fitting_command(data) == ["multitask.py", *data]
    shop_log.write_log(tmp_path / "purchases", ["purchase"], rows=1_000)
    assert fitting_command(["--data_path", str(tmp_path / "purchases")])[0] == "example.py"


@pytest.mark.parametrize("kind", ["rating without times", "clicks"])
def test_the_suggested_command_line_trains_the_same_model_as_the_data_alone(
    kind: str, tmp_path: Path
) -> None:
    label, has_times, _, _ = FITTING[kind]
    folder = write_events(tmp_path, label, has_times)
    given = ["--data_path", str(folder), *FEW_EVENTS]
    script, *flags = fitting_command(given)
    reports = []
    for number, command in enumerate(([EXAMPLE.name, *given], [script, *flags])):
        report = tmp_path / str(number)
        # What the script of retrieval adds to the preset.
        added = ("--task", "ranking", "--negatives", 512, "--split", "leave_one_out")
        more = added if number == 0 and kind == "clicks" else ()
        said = python(EXAMPLE.parent / command[0], *command[1:], *more, "--report_dir", report, cwd=tmp_path)
        succeeded(said)
        reports.append(read_json(report / "metrics.json"))
    assert reports[0]["test"] == reports[1]["test"]
    assert not (tmp_path / "dumps").exists()


@pytest.mark.soak
def test_yes_and_no_are_predicted_as_probabilities_better_than_biases_do(
    shops: Shops, tmp_path: Path
) -> None:
    folder = shops("--label", "yes_no")
    report = trained(folder, tmp_path, *EPOCHS)
    oracle = read_json(folder / "oracle.json")
    found, biases = (each["log_loss"] for each in (report["test"], report["baselines"]["biases"]))
    assert report["config"]["task"] == "response"
    assert oracle["all"] < found < oracle["nothing"] - FOUND * (oracle["nothing"] - oracle["all"])
    assert found < biases - 0.05


@pytest.mark.soak
def test_planted_effects_rank_clicks_better_than_popularity(shops: Shops, tmp_path: Path) -> None:
    folder = shops("--label", "clicks")
    report = trained(folder, tmp_path)
    oracle = read_json(folder / "oracle.json")
    popularity, found = (each["ndcg_at_10"] for each in (report["baselines"]["popularity"], report["test"]))
    assert report["config"]["task"] == "ranking"
    # Popularity is a count of clicks, so it is known to the last digit.
    assert popularity == pytest.approx(oracle["nothing"], abs=2e-6)
    assert FOUND * (oracle["all"] - popularity) < found - popularity < oracle["all"] - popularity


def test_a_dynamic_feature_of_a_schema_keeps_the_preset_of_ratings(tmp_path: Path) -> None:
    folder = write_events(tmp_path, "rating", has_times=True)
    given = ["--data_path", str(folder)]
    assert "--preset rating" in " ".join(fitting_command(given))
    written = folder / "schema.toml"
    written.write_text(written.read_text().replace("[user]\n", '[user]\nids = "dynamic"\n'))
    assert "--preset rating" in " ".join(fitting_command(given))
