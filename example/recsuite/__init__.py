"""Sharded recommenders: the public names, imported on first use. docs/api.md describes them."""

from __future__ import annotations

from typing import Any

# pyproject.toml reads it here.
__version__ = "0.1.0"

# A data worker imports this file, so it must not import other modules.
PUBLIC = {
    "Adagrad": "sharding.table_rules",
    "Adam": "sharding.table_rules",
    "Callback": "training.callbacks",
    "Config": "config.config",
    "DenseNumbers": "models.heads",
    "Epoch": "training.callbacks",
    "FeatureRows": "models.rows",
    "FittedModel": "extras.fit",
    "FileTracker": "extras.reports.trackers",
    "Follower": "serving.served",
    "HstuBlock": "models.sequences",
    "Inputs": "models.inputs",
    "MLflowTracker": "extras.reports.trackers",
    "ModelConfig": "config.sections",
    "ModelData": "models.tasks",
    "ModelInput": "sharding.recommender",
    "PairMLP": "models.layers",
    "RowWiseAdagrad": "sharding.table_rules",
    "RowWiseAdam": "sharding.table_rules",
    "Run": "training.callbacks",
    "RuntimeContext": "runtime.process",
    "SGD": "sharding.table_rules",
    "SampledSoftmax": "models.losses",
    "SasBlock": "models.sequences",
    "SequenceHead": "models.sequences",
    "ServedModel": "serving.served",
    "Step": "training.callbacks",
    "TensorBoardTracker": "extras.reports.trackers",
    "TableRule": "sharding.table_rules",
    "Tracker": "training.callbacks",
    "TrainingData": "models.losses",
    "TwoSided": "models.heads",
    "TwoTower": "models.heads",
    "UserError": "errors",
    "WithSquares": "models.losses",
    "biased_products": "models.layers",
    "build_dataloader": "datasets.loader",
    "compact": "tools.script",
    "cleanup_runtime": "runtime.process",
    "fit": "extras.fit",
    "gaussian_rows": "extras.gaussian",
    "init_runtime": "runtime.process",
    "make_mlp": "models.layers",
    "open_data": "tools.script",
    "parse_args": "config.parser",
    "report_test": "tools.script",
    "restore": "tools.script",
    "run_modes": "tools.script",
    "run_script": "tools.script",
    "exit_status": "tools.script",
    "session": "tools.script",
    "with_slow_bias": "models.layers",
}
__all__ = [*PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recsuite.hooks import required

    return getattr(required(f"{__name__}.{PUBLIC[name]}"), name)
