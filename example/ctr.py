"""Predict clicks on Criteo's columns, with DLRM or DCN-v2.

    python ctr.py                                        DLRM, on a synthetic log whose best AUC is known
    python ctr.py --model dcn --data_path train.txt      DCN-v2, on a log of Criteo's
    torchrun --standalone --nproc_per_node=2 ctr.py --inc_dump

The models, their loss and the loop are in this file. `python ctr.py --help` lists the first flags.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

import criteo_log
import recsuite as rs

# Criteo's rows have no user, so there is no history.
DEFAULTS = (
    "--task response --history 0 --embedding_dim 8 --mlp_dims 32 --epochs 2 "
    "--lr 0.1 --weight_decay 0.5 --dense_lr 0.005 --dense_weight_decay 0.2"
)
# Initial rows of tables are close to zero, where products of two of them have nearly no gradient.
SCALE = 4.0


class ClickModel(nn.Module):
    """Base of the models: their inputs, and logits that start at the share of clicks."""

    def __init__(self, data: rs.ModelData, args: rs.ModelConfig) -> None:
        super().__init__()
        self.names = data.names("event")
        self.num_numbers = sum(feature.width for feature in data.features if not feature.has_table)
        self.bias = nn.Parameter(torch.tensor(data.mean_label).clamp(1e-4, 1 - 1e-4).logit())

    def inputs(self, rows: rs.FeatureRows, batch: rs.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers, and which are missing, float32 [B, 2 * numbers], and float32 [B, categories, D]."""
        numbers, is_missing = batch.numbers.nan_to_num(), batch.numbers.isnan()
        return torch.cat([numbers, is_missing.float()], dim=1), SCALE * rows.stack(self.names)


class Linear(ClickModel):
    """A sum of features, without crosses: the baseline."""

    def __init__(self, data: rs.ModelData, args: rs.ModelConfig) -> None:
        super().__init__(data, args)
        self.weights = nn.Linear(2 * self.num_numbers, 1)

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return logits, float32 [B]."""
        numbers, vectors = self.inputs(rows, batch)
        return self.bias + vectors[:, :, 0].sum(1) + self.weights(numbers).squeeze(1)


class DLRM(ClickModel):
    """An MLP of the numbers, products of all pairs of vectors, and an MLP of these (Naumov et al., 2019)."""

    def __init__(self, data: rs.ModelData, args: rs.ModelConfig) -> None:
        super().__init__(data, args)
        dim, others = args.embedding_dim, len(self.names)
        self.bottom = rs.make_mlp([2 * self.num_numbers, *args.mlp_dims, dim])
        self.top = rs.make_mlp([dim + (others + 1) * others // 2, *args.mlp_dims, 1])

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return logits, float32 [B]."""
        numbers, vectors = self.inputs(rows, batch)
        dense = self.bottom(numbers)
        vectors = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        size = products.shape[1]
        first, second = torch.triu_indices(size, size, 1, device=products.device)
        pairs = products.flatten(1).index_select(1, first * size + second)
        return self.bias + self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)


class DCN(ClickModel):
    """Cross layers, x0 * (W x + b) + x with W of a low rank, beside an MLP (Wang et al., "DCN V2", 2021)."""

    def __init__(self, data: rs.ModelData, args: rs.ModelConfig) -> None:
        super().__init__(data, args)
        width = 2 * self.num_numbers + len(self.names) * args.embedding_dim
        self.down = nn.ModuleList(nn.Linear(width, 32, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, width) for _ in range(2))
        self.deep = rs.make_mlp([width, *args.mlp_dims])
        self.top = nn.Linear(width + (width, *args.mlp_dims)[-1], 1)

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return logits, float32 [B]."""
        numbers, vectors = self.inputs(rows, batch)
        x = first = torch.cat([numbers, vectors.flatten(1)], dim=1)
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return self.bias + self.top(torch.cat([x, self.deep(first)], dim=1)).squeeze(1)


class ClickLoss(nn.Module):
    """The binary cross entropy; padding has the weight 0."""

    def forward(self, logits: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
        """Return the loss, float32 [], of logits float32 [B]."""
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights)


MODELS: dict[str, type[ClickModel]] = {"dlrm": DLRM, "dcn": DCN, "linear": Linear}


def train(model: type[ClickModel], args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, validate after each epoch, and test the best weights. Collective: every rank."""
    with rs.session(args, runtime, rs.build_dataloader) as training:
        trained = training.shard(model, loss=ClickLoss(), tables=rs.RowWiseAdagrad(args.optimizer.lr))

        @training.step
        def step(batch: rs.ModelInput) -> torch.Tensor:
            loss = trained(batch)
            loss.backward()
            trained.step()
            return loss

        for epoch in training.epochs():
            for batch in epoch:
                step(batch)
            training.save(training.validate())
        result = training.finish()
    training.report(result)
    criteo_log.say_oracle(result.test["auc"], args, runtime)


def load(model: type[ClickModel], args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Load a checkpoint that any number of ranks wrote, and test it. Collective: every rank."""
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        restored, progress = rs.restore(data, args, runtime, model)
        rs.report_test(restored, progress, data, args, runtime)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""

    def run() -> int:
        model, others = criteo_log.parse(argv, __doc__, MODELS)
        modes = {"train": functools.partial(train, model), "load": functools.partial(load, model)}
        return rs.run_modes(others, modes, model, DEFAULTS.split(), unread=criteo_log.UNREAD)

    return rs.exit_status(run)


if __name__ == "__main__":
    rs.run_script(main)
