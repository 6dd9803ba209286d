"""The script of several labels: clicks help to predict purchases; test_ctr.py has the rest of its life."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, python, read_json, succeeded

sys.path.append(str(ROOT / "example"))
import criteo_log
import shop_log

MULTITASK = ROOT / "example" / "multitask.py"


# The figures of docs/multitask.md, on shops that no setting was chosen on.
@pytest.mark.soak
def test_the_click_label_improves_the_purchase_predictions(tmp_path: Path) -> None:
    found = {}
    for labels in (("purchase", "click"), ("purchase",)):
        shop, report = tmp_path / f"shop-{len(labels)}", tmp_path / f"report-{len(labels)}"
        shop_log.write_log(shop, labels, seed=1)
        succeeded(python(MULTITASK, "--data_path", shop, "--report_dir", report, timeout=250))
        found[len(labels)] = read_json(report / "metrics.json")["test"]["auc"]
    oracle = read_json(tmp_path / "shop-2" / criteo_log.ORACLE)
    planted = oracle["auc"] - oracle["without_taste"]
    assert found[2] - found[1] > planted / 2
    assert found[2] < oracle["auc"] + 0.001
