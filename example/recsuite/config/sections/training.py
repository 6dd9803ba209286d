"""The flags of the training, and of the processes that run together in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.section import Section, require


@dataclass(frozen=True)
class TrainingConfig(Section):
    """How long the model learns."""

    CHOICES: ClassVar = {
        "pipeline": ("auto", "plain", "sparse_dist"),
        "cpu_tables": ("vectorised", "torchrec"),
    }
    POSITIVE: ClassVar = ("epochs",)
    MOST: ClassVar = {"epochs": 1_000_000}

    train: bool = False
    """Train a model, validate it after every epoch and test it in the end; what happens when no mode is
    named."""

    epochs: int = 8
    """Passes over the training ratings, unless --patience ends the training before."""

    # Not 1: on few validation ratings a single epoch may be worse by chance. A ranking of ml-latest-small
    # would have ended at an NDCG@10 of 0.052 that later reached 0.066.
    patience: int = 2
    """Epochs in a row without a better validation result after which the training ends; 0 means never."""

    # A CPU has no second stream to overlap with: there TorchRec's loop made 0.91 to 1.02 times the plain
    # one's rate.
    pipeline: str = "auto"
    """Training loop: plain, sparse_dist (TorchRec's TrainPipelineSparseDist), or auto: sparse_dist on
    CUDA, else plain."""

    # On a CPU TorchRec's own step spends its time on exchanges with itself, on joining outputs and in
    # FBGEMM's backward.
    cpu_tables: str = "vectorised"
    """The tables' step on a CPU: vectorised, this program's own, or torchrec: TorchRec's and FBGEMM's, which
    gives the same but for rounding, and takes longer."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(self.patience >= 0, f"--patience {self.patience} is negative; give 0 to never stop early")


@dataclass(frozen=True)
class RuntimeConfig(Section):
    """What all processes of a run share."""

    POSITIVE: ClassVar = ("timeout",)

    seed: int = 0
    """Seed of everything that is drawn: data, split, order, initial weights."""

    timeout: int = 300
    """Seconds that a rank waits for the others in training; preparing data may take longer."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(self.timeout <= 604_800, f"--timeout {self.timeout} is more than a week; give less")
        require(
            0 <= self.seed < 2**31, f"--seed {self.seed} is out of range; give a number from 0 to 2147483647"
        )
