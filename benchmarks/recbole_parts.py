"""Two parts of the package `recbole`: its metrics of rankings, and its SASRec (Kang and McAuley,
"Self-attentive sequential recommendation", 2018).

Only these are wanted, and not what the rest of the package needs. What their modules import and neither calls
is stood in for, so that nothing has to be installed besides requirements-dev.txt.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from recsuite.config.sections import TOP
from recsuite.datasets.metrics import Metrics

# Module to the names that are taken from it.
UNCALLED = {
    "colorlog": (),
    "colorama": ("init",),
    "texttable": ("Texttable",),
    "sklearn": (),
    "sklearn.metrics": ("auc", "mean_absolute_error", "mean_squared_error"),
}
# More than a float64 has.
DIGITS = 20


def nothing(*_: Any, **more: Any) -> None:
    """Stands for what is imported and not called."""


@contextmanager
def stood_in() -> Iterator[None]:
    """Modules that are not installed are there meanwhile, and hold nothing that works."""
    made = [
        name for name in UNCALLED if name not in sys.modules and find_spec(name.partition(".")[0]) is None
    ]
    for name in made:
        module = ModuleType(name)
        module.__dict__.update(dict.fromkeys(UNCALLED[name], nothing))
        sys.modules[name] = module
    try:
        yield
    finally:
        # Whoever else looks for one of them must not find these.
        for name in made:
            del sys.modules[name]


def load(name: str) -> ModuleType:
    """A module of recbole 1.2.1."""
    import torch

    # The package gives numpy this name back itself, by one that numpy 2 does not have either.
    if not hasattr(np, "float"):
        np.float = np.float64  # type: ignore[attr-defined]
    with stood_in():
        found = importlib.import_module(f"recbole.{name}")
        # One of its modules asks torch to look for numbers that are none in every backward of this process.
        torch.autograd.set_detect_anomaly(False)
        return found


def metrics_of(recommended: np.ndarray, chosen: np.ndarray) -> Metrics:
    """HR@10 and NDCG@10 by recbole's own code.

    recommended: ids of the first TOP items for each case, the best first, [n, TOP]; chosen: that of the item
    of each case, [n].
    """
    import torch

    hits = recommended == chosen[:, None]
    # Whether each place holds an item of the case, and behind the last place how many items the case has.
    places = np.column_stack([hits, np.ones(len(hits), bool)]).astype(np.int64)
    data = load("evaluator.collector").DataStruct()
    data.set("rec.topk", torch.from_numpy(places))
    metrics, settings = load("evaluator.metrics"), {"topk": [TOP], "metric_decimal_place": DIGITS}
    found = {**metrics.Hit(settings).calculate_metric(data), **metrics.NDCG(settings).calculate_metric(data)}
    return {"hr_at_10": float(found[f"hit@{TOP}"]), "ndcg_at_10": float(found[f"ndcg@{TOP}"])}


# Of a sequence, as the package has it: what lies further back is not read.
LONGEST = 50
# What the package calls the parts of a batch; then the defaults of its SASRec.
SETTINGS: dict[str, Any] = {
    "USER_ID_FIELD": "user_id",
    "ITEM_ID_FIELD": "item_id",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "item_length",
    "NEG_PREFIX": "neg_",
    "MAX_ITEM_LIST_LENGTH": LONGEST,
    "device": "cpu",
    "n_layers": 2,
    "n_heads": 2,
    "hidden_size": 64,
    "inner_size": 256,
    "hidden_dropout_prob": 0.5,
    "attn_dropout_prob": 0.5,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "loss_type": "CE",
}


def sasrec(num_items: int, **settings: Any) -> Any:
    """SASRec for so many items, whose rows begin with 1; settings: what is not as in SETTINGS.

    Its loss takes "item_id_list", int64 [B, MAX_ITEM_LIST_LENGTH], from the left and behind it zeros;
    "item_length", int64 [B]; and what came next, "item_id", int64 [B].
    """
    model = load("model.sequential_recommender.sasrec")
    return model.SASRec({**SETTINGS, **settings}, Items(num_items))


def states_of(model: Any, items: Any) -> Any:
    """What the model's `forward` computes before it keeps the last place of each sequence: float32 [B, L, D].

    items: from the left and behind them zeros, int64 [B, L]. No place sees what comes after it.
    """
    import torch

    places = model.position_embedding(torch.arange(items.size(1)))
    inputs = model.dropout(model.LayerNorm(model.item_embedding(items) + places))
    mask = model.get_attention_mask(items)
    return model.trm_encoder(inputs, mask, output_all_encoded_layers=False)[-1]


class Items:
    """What the model asks a data set of the package: how many items there are, that of padding included."""

    def __init__(self, number: int) -> None:
        self.number = number

    def num(self, field: str) -> int:
        """See above."""
        return self.number + 1
