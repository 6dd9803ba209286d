"""The flags of the model and of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.presets import AUTO, NONE, PRESETS
from recsuite.config.section import Section, require

# How many items a ranking is judged by: the K of HR@K and NDCG@K. Here, as
# `datasets.metrics` and `models.tasks`, which both need it, may not import each other.
TOP = 10
# How a task is judged: by predictions held against the labels, by the ranks of the items chosen, or by
# probabilities held against answers of yes and no.
EVALUATIONS = ("predictions", "ranks", "answers")
# Events of a batch whose items compete for each of them, where what is learned is which item is chosen: a
# step costs this times the batch, in time and in memory. A multiple of 8.
COMPETITORS = 256
# Whether items of a history count alike, or by weights that are learned of their place and age.
EQUAL, LEARNED = HISTORY_WEIGHTS = ("equal", "learned")
# What a model of sequences is made of, see `recsuite.models.sequences.blocks`.
SAS, HSTU = BLOCKS = ("sas", "hstu")
# Into how many buckets the time since an item of a history falls, see `recsuite.gaps`: the last one begins at
# 68 years.
NUM_GAPS = 32
# Of --mlp_dims.
WIDEST, DEEPEST = 2**14, 100


@dataclass(frozen=True)
class ModelConfig(Section):
    """Task and size of the model.

    The fields task, embedding_dim, mlp_dims, history_weights, negatives, block, num_blocks, num_heads,
    dropout and preset are flags, see docs/flags.md.

    Raises:
        UserError: from `validate`, for impossible values.

        def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
            return RatingModel(data, args.embedding_dim, args.mlp_dims)
    """

    # Tasks stand in `models/tasks.py`; only their names are here, because that imports torch.
    CHOICES: ClassVar = {
        "task": ("rating", "ranking", "response", "sequence"),
        "preset": (AUTO, *PRESETS, NONE),
        "history_weights": HISTORY_WEIGHTS,
        "block": BLOCKS,
    }
    POSITIVE: ClassVar = ("num_blocks", "num_heads")
    MOST: ClassVar = {"embedding_dim": 2**14, "negatives": 2**20, "num_blocks": 100, "num_heads": 2**10}

    task: str = "rating"
    """What is learned: how many stars a user gives (rating), which item a user rates at all (ranking), which
    one comes next in the order of what the user had (sequence), or whether the answer is yes (response); not
    given, what the labels of --data_path are for."""

    embedding_dim: int = 32
    """Numbers per table row, a multiple of 4: the first is the row's bias, the others its factors."""

    mlp_dims: tuple[int, ...] = (64, 32)
    """Widths of the hidden layers of the MLP, comma-separated, or none."""

    history_weights: str = EQUAL
    """Of --task ranking: how much the items of a --history count, all alike (equal), or by how many came
    later and how long ago it was, as is learned (learned)."""

    negatives: int = 0
    """Of --task ranking and sequence: how many items, drawn anew in each step and the same for every rank,
    compete for each event, for a ranking beside those of its batch; all where there are no more; 0 means
    none, and for a sequence all."""

    block: str = SAS
    """Of --task sequence: what the transformer is made of, attention and layers of the widths --mlp_dims
    (sas), or attention that counts pointwise and a gate (hstu)."""

    num_blocks: int = 2
    """Of --task sequence: how many blocks lie one behind the other."""

    num_heads: int = 2
    """Of --task sequence: heads of the attention; --embedding_dim is a multiple of it."""

    dropout: float = 0.2
    """Of --task sequence: which share of the numbers that a block takes and adds training sets to zero."""

    preset: str = AUTO
    """Values for flags that belong together and are not given: those of the preset of this name, listed in
    docs/flags.md and at the end of --help; auto: the preset that fits task, split and given flags, if one
    does, and it is said; none: no preset. A checkpoint keeps its own."""

    @property
    def competitors(self) -> int:
        """How many events of a batch compete, see `COMPETITORS`; 0 where labels are predicted."""
        # Of a sequence the events of a batch are those of few users, of whom others say nothing.
        return COMPETITORS if self.ranks and not self.reads_order else 0

    def num_negatives(self, num_items: int) -> int:
        """How many of so many items are drawn for a step at most."""
        # A sequence has no other competitors.
        return num_items if self.reads_order and self.negatives == 0 else min(self.negatives, num_items)

    @property
    def ranks(self) -> bool:
        """Whether it is learned which item is chosen, and no label."""
        return self.task not in ("rating", "response")

    @property
    def reads_order(self) -> bool:
        """Whether the order of what a user had counts, and batches are runs of it."""
        return self.task == "sequence"

    @property
    def learns_history_weights(self) -> bool:
        """Whether the model takes how long ago each item of a history was."""
        return self.history_weights == LEARNED

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        widths = ",".join(map(str, self.mlp_dims))
        require(
            self.embedding_dim >= 4 and self.embedding_dim % 4 == 0,
            f"--embedding_dim {self.embedding_dim} does not fit FBGEMM's kernels; give a multiple of 4",
        )
        require(
            min(self.mlp_dims, default=1) >= 1,
            f"--mlp_dims {widths} has a layer without a unit; give widths of at least 1",
        )
        require(
            max(self.mlp_dims, default=1) <= WIDEST and len(self.mlp_dims) <= DEEPEST,
            f"--mlp_dims {widths} is too large; give at most {DEEPEST} layers of {WIDEST:,}",
        )
        self.require_at_least_0("negatives")
        require(
            self.ranks or self.negatives == 0,
            f"--negatives {self.negatives} is for --task ranking and sequence, not {self.task}; leave it out",
        )
        self._check_blocks()

    def _check_blocks(self) -> None:
        for name in ("block", "num_blocks", "num_heads", "dropout"):
            require(
                self.reads_order or self.is_default(name),
                f"--{name} {getattr(self, name)} is for --task sequence, and not for --task {self.task}; "
                "leave it out",
            )
        require(0 <= self.dropout < 1, f"--dropout {self.dropout} leaves nothing; give 0 to 0.9, say")


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Learning rates, and decay of the tables and of the dense part."""

    # Rates, decays and the batch were chosen together, on real ratings and on the synthetic ones; what was
    # tried is in docs/decisions.md.
    lr: float = 0.04
    """Learning rate of the embedding tables (row-wise Adagrad) for a global batch of 4,096 ratings; for
    another one multiplied by the square root of the ratio; falls linearly to zero over the run."""

    dense_lr: float = 0.001
    """Learning rate of the dense part (AdamW), falling like --lr."""

    weight_decay: float = 0.1
    """Decoupled decay of all table rows, looked up or not: in a pass they shrink by the factor
    exp(-weight_decay), less as --lr falls."""

    dense_weight_decay: float = 20.0
    """Decoupled decay of the dense part: times --dense_lr, the share by which it shrinks in a step."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        # --weight_decay is checked in `Config`: what it leaves of a row depends on --epochs.
        for name in ("lr", "dense_lr"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"--{name} {value} cannot learn; give a number above 0")
        require(
            0 <= self.dense_weight_decay * self.dense_lr < 1,
            f"--dense_weight_decay {self.dense_weight_decay} times --dense_lr {self.dense_lr} would shrink "
            "the dense part by more than all of it; give 0 to 1 / --dense_lr",
        )
