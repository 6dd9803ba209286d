"""A model of random rows in memory, which no training made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from example import make_model
from recsuite.checkpoint.format import Manifest, ParentLink
from recsuite.config.sections import ModelConfig
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.models.rows import with_row_scale
from recsuite.models.tasks import ModelData
from recsuite.serving.snapshot import Snapshot, VocabularyTable
from recsuite.training.progress import Progress

USERS, ITEMS, DIM = 40, 211, 8
YEARS, GENRES = list(range(1990, 2000)), ["Comedy", "Drama", "War"]
NAMES: dict[str, list[Any]] = {
    "user": list(range(1, USERS + 1)),
    "gender": ["F", "M"],
    "age": [1, 18, 25],
    "occupation": ["0", "1"],
    "movie": [3 * number for number in range(1, ITEMS + 1)],
    "year": YEARS,
    "genres": GENRES,
}


def snapshot_of(task: str, seed: int = 0, items: int = ITEMS) -> Snapshot:
    """A model of random rows; of the items 6 and 9 the same."""
    # Scores of some units, as in training: float32 tells no more of a score of 40 than its fifth digit.
    std = 0.06 if task == "ranking" else 0.3
    generator = torch.Generator().manual_seed(seed)
    features = (*sorted(SCHEMA.features, key=lambda feature: feature.multi), SCHEMA.history)
    names = {**NAMES, "movie": [3 * number for number in range(1, items + 1)]}
    vocabulary = {
        name: {value: row for row, value in enumerate(values, start=1)} for name, values in names.items()
    }
    tables = {
        feature.name: std
        * torch.randn(len(vocabulary[SCHEMA.vocabulary_of(feature.name)]) + 1, DIM, generator=generator)
        for feature in features
    }
    tables["movie"][3] = tables["movie"][2]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        args = ModelConfig(task, DIM, (7, 5))
        about = {"model": json.loads(json.dumps({**dataclasses.asdict(args), "history": 20}))}
        data = ModelData(SCHEMA, features, 3.5, 20)
        head = with_row_scale(make_model(data, args))
    return Snapshot(
        folder=Path("none"),
        schema=SCHEMA,
        features=features,
        tables={
            name: VocabularyTable(matrix, vocabulary[SCHEMA.vocabulary_of(name)])
            for name, matrix in tables.items()
        },
        head=head.eval().requires_grad_(False),
        maker=make_model,
        vocabulary=vocabulary,
        encodings={},
        manifest=Manifest("0123456789ab", Progress(step=7, epoch=1), {}, (), "", "", about),
        follows=ParentLink("step-000000007", "digest", 1, 7),
        trained=Path("none"),
        config={},
        task_name=task,
    )
