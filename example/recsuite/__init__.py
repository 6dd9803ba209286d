"""Sharded recommenders: the public names, imported when they are asked for. docs/api.md describes them."""

from __future__ import annotations

import importlib
from typing import Any

# A data worker imports this file, so it imports nothing by itself.
PUBLIC = {
    "Callback": "training.callbacks",
    "Config": "config.config",
    "CoOccurrence": "models.co_occurrence",
    "DenseNumbers": "models.two_sided",
    "FeatureRows": "models.rows",
    "FittedModel": "tools.fitted",
    "Follower": "serving.served",
    "Inputs": "models.rows",
    "ModelConfig": "config.sections.model",
    "ModelData": "models.tasks",
    "ModelInput": "sharding.recommender",
    "PairMLP": "models.layers",
    "RowWiseAdagrad": "training.optimizer",
    "RuntimeContext": "runtime.process",
    "SampledSoftmax": "models.losses",
    "ServedModel": "serving.served",
    "SquaredError": "models.losses",
    "TwoSided": "models.two_sided",
    "UserError": "errors",
    "begin_training": "training.trainer",
    "build_dataloader": "datasets.loader",
    "checkpointing": "tools.life",
    "cleanup_runtime": "runtime.process",
    "fit": "tools.fitting",
    "init_runtime": "runtime.process",
    "library_model": "models.tasks",
    "make_mlp": "models.layers",
    "observing": "monitoring.callbacks",
    "open_data": "tools.life",
    "parse_args": "config.parser",
    "report": "tools.life",
    "report_test": "tools.life",
    "restore": "tools.life",
    "run_modes": "tools.life",
    "run_script": "tools.script",
    "exit_status": "tools.script",
}
__all__ = [*PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)
