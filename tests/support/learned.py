"""Check of a training on synthetic data: it learns from epoch to epoch, and more than its baseline."""

from __future__ import annotations

import itertools
import re
from typing import Any


def check_learned(report: dict[str, Any], least: float) -> None:
    """Fail unless validation improves in each epoch, and the test is near the best possible.

    report: metrics.json of a ranking; least: share of the way from popularity to the best possible NDCG@10.
    """
    values = [epoch["validation"]["ndcg_at_10"] for epoch in report["epochs"]]
    assert len(values) > 1
    assert all(before < after for before, after in itertools.pairwise(values)), values
    baselines = report["baselines"]
    test, low, high = (
        metrics["ndcg_at_10"] for metrics in (report["test"], baselines["popularity"], baselines["oracle"])
    )
    assert least < (test - low) / (high - low) < 1


def share_in(output: str) -> float:
    """The printed share of the way from popularity to the best possible NDCG@10, the last one."""
    return float(re.findall(r" is ([\d.]+) of the way from popularity \([\d.]+\) to the best ", output)[-1])
