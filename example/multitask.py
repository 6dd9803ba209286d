"""Predict purchases and clicks at once, with a mixture of experts for both (MMoE, Ma et al., 2018).

    python multitask.py                                  on a synthetic shop whose best AUC is known
    python multitask.py --data_path FOLDER               on your tables; schema.toml names the labels
    torchrun --standalone --nproc_per_node=2 multitask.py --inc_dump

The model, its loss and the loop are in this file. Further flags are those of example.py.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import criteo_log
import recsuite as rs
import shop_log

DEFAULTS = (
    "--task response --history 0 --embedding_dim 16 --mlp_dims 64,32 --epochs 6 --validation_fraction 0.05 "
    "--lr 0.1 --weight_decay 2 --dense_lr 0.005 --dense_weight_decay 0.1"
)
# Flags of other tasks, and of data without labels of their own.
UNREAD = (
    *(
        "task",
        "preset",
        "initial_rows",
        "l2",
        "negatives",
        "history",
        "history_weights",
        "cutoffs",
        "day_feature",
    ),
    *(
        "block",
        "num_blocks",
        "num_heads",
        "dropout",
        "stream",
        "dataset",
        "synthetic_kind",
        "synthetic_ratings",
    ),
)
EXPERTS = 4
# Initial rows of tables are close to zero, where products of two of them have nearly no gradient.
SCALE = 4.0


class MMoE(nn.Module):
    """Experts shared by all labels. Each label has a tower, and a gate that weights the experts.

    Experts and gates read the rows of all features, the product of a user's and an item's, and numbers.
    """

    def __init__(self, data: rs.ModelData, args: rs.ModelConfig) -> None:
        super().__init__()
        self.names, self.ids = data.names("user", "item", "event"), [*data.schema.ids]
        num_numbers = sum(feature.width for feature in data.features if not feature.has_table)
        width = (len(self.names) + 1) * args.embedding_dim + 2 * num_numbers
        labels, hidden = data.schema.label_names, args.mlp_dims
        self.experts = nn.ModuleList(rs.make_mlp([width, *hidden]) for _ in range(EXPERTS))
        self.gates = nn.ModuleList(nn.Linear(width, EXPERTS) for _ in labels)
        self.towers = nn.ModuleList(rs.make_mlp([(width, *hidden)[-1], 16, 1]) for _ in labels)

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return logits, float32 [B, L] of L labels, or [B] of one."""
        vectors, ids = SCALE * rows.stack(self.names), SCALE * rows.stack(self.ids)
        numbers = torch.cat([batch.numbers.nan_to_num(), batch.numbers.isnan().float()], dim=1)
        x = torch.cat([vectors.flatten(1), ids[:, 0] * ids[:, 1], numbers], dim=1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = (gate(x).softmax(dim=1).unsqueeze(2) * experts).sum(dim=1)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1) if len(logits) > 1 else logits[0].squeeze(1)


class LogLosses(nn.Module):
    """The sum of the binary cross entropies of all labels; a label that an event lacks has the weight 0."""

    def forward(self, logits: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
        """Return the loss, float32 [], of logits float32 [B, L], or [B] of one label."""
        labels, weights = batch.all_labels, batch.all_weights
        logits = logits.view_as(labels)
        # Times L: the mean over events of the sum over labels.
        return labels.shape[1] * nn.functional.binary_cross_entropy_with_logits(logits, labels, weights)


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, validate after each epoch, and test the best weights. Collective: every rank."""
    with rs.session(args, runtime, rs.build_dataloader) as training:
        model = training.shard(MMoE, loss=LogLosses(), tables=rs.RowWiseAdagrad(args.optimizer.lr))

        @training.step
        def step(batch: rs.ModelInput) -> torch.Tensor:
            loss = model(batch)
            loss.backward()
            model.step()
            return loss

        for epoch in training.epochs():
            for batch in epoch:
                step(batch)
            training.save(training.validate())
        result = training.finish()
    training.report(result)
    criteo_log.say_oracle(result.test["auc"], args, runtime)


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Load a checkpoint that any number of ranks wrote, and test it. Collective: every rank."""
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, MMoE)
        rs.report_test(model, progress, data, args, runtime)


MODES = {"train": train, "load": load}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""

    def run() -> int:
        flags = shop_log.with_data(sys.argv[1:] if argv is None else argv)
        return rs.run_modes(flags, MODES, MMoE, DEFAULTS.split(), unread=UNREAD)

    return rs.exit_status(run)


if __name__ == "__main__":
    rs.run_script(main)
