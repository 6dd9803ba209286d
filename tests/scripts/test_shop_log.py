"""The script that draws a synthetic shop: its oracle, its flags, and a training on one of its labels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import recsuite as rs
from tests.support.launch import ROOT, python, read_json, succeeded

sys.path.append(str(ROOT / "example"))
import criteo_log
import shop_log

MULTITASK = ROOT / "example" / "multitask.py"
SHOP = ROOT / "example" / "shop_log.py"


def test_the_shop_records_the_best_auc_of_purchases_with_and_without_taste(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shop_log.write_log(tmp_path / name, rows=20_000)
    for name in ("train.csv", "test.csv", "users.csv", "items.csv", criteo_log.ORACLE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    oracle = read_json(tmp_path / "a" / criteo_log.ORACLE)
    assert 0.6 < oracle["without_taste"] < oracle["auc"] - 0.05 < 0.9
    with pytest.raises(rs.UserError, match=r"--rows must be at least 1,000, got 999"):
        shop_log.write_log(tmp_path / "c", rows=999)


def test_a_schema_with_one_label_trains_the_same_model_on_it_alone(tmp_path: Path) -> None:
    succeeded(python(SHOP, tmp_path / "shop", "--labels", "click", "--rows", 2_000))
    flags = ("--data_path", tmp_path / "shop", "--epochs", 1, "--num_workers", 0)
    succeeded(python(MULTITASK, *flags, "--report_dir", tmp_path / "report"))
    test = read_json(tmp_path / "report" / "metrics.json")["test"]
    assert not {name for name in test if name.startswith(("click_", "purchase_"))}
    assert 0 < test["log_loss"] < 1
