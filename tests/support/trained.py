"""A train state with checkpoints and deltas, for tests of what becomes of those: the fixture `trained`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from example import make_loss, make_model
from recsuite.checkpoint.chain import chain_at, with_suggestion
from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel, build_train_state
from tests.support.planted_model import differing, mark_step, write_step
from tests.support.steps import tell


@dataclasses.dataclass
class Trained:
    """A train state, and a folder with full checkpoints after steps 1 and 2 and deltas to steps 3 and 4."""

    train_state: ShardedModel
    columns: Columns
    config: Config
    context: RuntimeContext
    folder: Path

    def load(self, path: Path | None = None) -> Progress:
        folder = path or self.folder
        chain = with_suggestion(folder, lambda: chain_at(folder))
        return restore(chain, self.train_state, self.columns, self.context).progress

    def refused(self, *words: str, path: Path | None = None) -> None:
        """Loading is one sentence with these words, and changes nothing in the train state."""
        write_step(tensors_of(self.train_state), 99)
        with pytest.raises(UserError) as caught:
            self.load(path)
        assert [word for word in words if word not in str(caught.value)] == [], caught.value
        assert "\n" not in str(caught.value)
        assert differing(tensors_of(self.train_state), 99) == []


def make_trained(data: Path, context: RuntimeContext, folder: Path) -> Trained:
    """Train in a folder, as `Trained` says."""
    config = Config.of(
        data_path=str(data), save_dir=str(folder), embedding_dim=4, mlp_dims=(4,), dump_every=1
    )
    columns = open_columns(config)
    train_state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    tensors = tensors_of(train_state)
    for increments, steps in ((False, (1, 2)), (True, (3, 4))):
        config = config.replaced(resume=True, inc_dump=increments)
        with checkpointing(columns, config, context) as checkpointer:
            checkpointer.begin(train_state, checkpointer.start)
            for step in steps:
                write_step(tensors, step)
                if config.checkpoint.inc_dump:
                    mark_step(checkpointer, tensors, step)
                tell(checkpointer, Progress(step, 0, step))
    return Trained(train_state, columns, config, context, folder)


def resume(trained: Trained) -> None:
    with checkpointing(trained.columns, trained.config, trained.context) as checkpointer:
        checkpointer.begin(trained.train_state, checkpointer.start)
