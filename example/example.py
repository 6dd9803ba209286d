"""Train a sharded recommender on MovieLens, on any number of processes.

    python example.py                                          one process
    torchrun --standalone --nproc_per_node=2 example.py        two, on CPU or GPU alike
    torchrun --standalone --nproc_per_node=8 example.py --dataset ml-1m --num_workers 4

The model, its loss, its optimizers and the loop are in this file; replace any of them with your own.
`python example.py --help` lists the first flags, `--help_all` all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

import recsuite as rs
from recsuite import build_dataloader, cleanup_runtime, init_runtime, parse_args

__all__ = ["build_dataloader", "cleanup_runtime", "init_runtime", "parse_args"]


class RatingModel(rs.TwoSided):
    """Predict a rating: mean + biases + product of the factors + an MLP of both sides.

    A row has D numbers: the first is a bias, the others are factors. The rows of a user's features are summed
    to one vector, those of a movie's to another. The two vectors are separate methods, so the model can also
    recommend. A movie of the user history is weighted by its rating minus the mean.
    """

    # The training of few ratings begins with solved biases, in number 0 of the rows.
    has_biases = True

    def __init__(self, data: rs.ModelData, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.users, self.items = data.names("user", "event", "history"), data.names("item")
        self.numbers = rs.DenseNumbers(data.features, dim)
        self.mlp = rs.PairMLP(dim, hidden)
        self.register_buffer("mean_rating", torch.tensor(data.mean_label))

    @property
    def mean_label(self) -> torch.Tensor:
        """The mean of the labels, float32 []."""
        return self.mean_rating

    def user_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return the vectors of the users of B events, float32 [B, D]."""
        ratings = {"history": batch.history_labels - self.mean_label}
        return rs.with_slow_bias(self.numbers.added(rows.sum(self.users, ratings), batch, "user"))

    def item_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return the vectors of the movies of B events, float32 [B, D]."""
        return rs.with_slow_bias(self.numbers.added(rows.sum(self.items), batch, "item"))

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> rs.WithSquares:
        """Return predicted ratings and the squares of the vectors, float32 [B] both."""
        return self.scores(self.user_vectors(rows, batch), self.item_vectors(rows, batch))

    def predictions(self, output: rs.WithSquares) -> torch.Tensor:
        """Return the predicted ratings of the output for the loss."""
        return output.predictions

    def scores(self, users: torch.Tensor, items: torch.Tensor) -> rs.WithSquares:
        """Return the same of the vectors of users and movies, float32 [B, D] both."""
        # Biases plus the product of the factors; the products of all numbers; the squares of both vectors.
        score, products, squares = rs.biased_products(users, items)
        return rs.WithSquares(self.mean_rating + score + self.mlp(users, items, products), squares)

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return predicted ratings, float32 [B]: what recommendations are sorted by."""
        return self.predictions(self.scores(users, items))

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the same of each user with each movie, float32 [U, N], by one product of matrices."""
        biases = users[:, :1] + items[:, 0]
        return self.mean_rating + biases + users[:, 1:] @ items[:, 1:].t() + self.mlp.for_all(users, items)


class ResponseModel(RatingModel):
    """Predict the probability of a yes: the model above predicts its logit."""

    def __init__(self, data: rs.ModelData, dim: int, hidden: Sequence[int]) -> None:
        super().__init__(data, dim, hidden)
        # If all labels are equal, their logit is infinite.
        self.mean_rating = torch.tensor(data.mean_label).clamp(1e-4, 1 - 1e-4).logit()

    @property
    def mean_label(self) -> torch.Tensor:
        """The share of yes, float32 []."""
        return self.mean_rating.sigmoid()

    def predictions(self, output: rs.WithSquares) -> torch.Tensor:
        """Return probabilities of the logits for the loss."""
        return output.predictions.sigmoid()

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return probabilities of each user with each item, float32 [U, N]."""
        return super().score_all(users, items).sigmoid()


class RatingLoss(nn.Module):
    """The mean squared error, plus a decay in proportion to events; padding has the weight 0."""

    def __init__(self, l2: float) -> None:
        super().__init__()
        self.l2 = l2

    def forward(self, output: rs.WithSquares, batch: rs.ModelInput) -> torch.Tensor:
        """Return the loss, float32 []."""
        errors = (output.predictions - batch.labels) ** 2
        return (batch.weights * (errors + self.l2 * output.squares)).mean()


class ResponseLoss(RatingLoss):
    """The binary cross entropy, plus the same decay."""

    def forward(self, output: rs.WithSquares, batch: rs.ModelInput) -> torch.Tensor:
        """Return the loss, float32 []."""
        entropy = nn.functional.binary_cross_entropy_with_logits
        losses = entropy(output.predictions, batch.labels, weight=batch.weights)
        return losses + self.l2 * (batch.weights * output.squares).mean()


def make_loss(data: rs.TrainingData, args: rs.Config) -> nn.Module:
    """Return a loss above, or for a ranking a softmax over items."""
    if args.model.task in ("rating", "response"):
        kind = RatingLoss if args.model.task == "rating" else ResponseLoss
        return kind(args.optimizer.l2)
    return rs.SampledSoftmax.of(data)


def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    """Return a model above, or for another --task that of its script."""
    if args.task in ("rating", "response"):
        kind = RatingModel if args.task == "rating" else ResponseModel
        return kind(data, args.embedding_dim, args.mlp_dims)
    # A copy of this file needs these scripts only for their tasks.
    if args.task == "ranking":
        from retrieval import make_model as make
    else:
        from sequential import make_model as make
    return make(data, args)


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, validate after each epoch, and test the best weights. Collective: every rank."""

    def dense_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        rate, decay = args.optimizer.dense_lr, args.optimizer.dense_weight_decay
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)

    with rs.session(args, runtime, build_dataloader) as training:
        model = training.shard(
            make_model,
            loss=make_loss(training.columns, args),
            tables=rs.RowWiseAdagrad(args.optimizer.lr),
            dense=dense_optimizer,
        )

        @training.step
        def step(batch: rs.ModelInput) -> torch.Tensor:
            loss = model(batch)
            # This also updates the rows of the tables, each as soon as its gradient is known.
            loss.backward()
            model.step()
            return loss

        # Epochs, or windows of a stream; a resumed training begins where its checkpoint ended.
        for epoch in training.epochs():
            for batch in epoch:
                step(batch)
            training.save(training.validate())
        result = training.finish()
    training.report(result)


def dump(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, and write a full checkpoint after each epoch. Collective: every rank."""
    train(args.replaced(dump=True), runtime)


def inc_dump(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, and write deltas with the changed rows after a full checkpoint. Collective: every rank."""
    train(args.replaced(inc_dump=True), runtime)


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Load a checkpoint that any number of ranks wrote, and test it. Collective: every rank."""
    with rs.open_data(args, runtime, build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, make_model)
        rs.report_test(model, progress, data, args, runtime)


MODES = {"train": train, "dump": dump, "inc_dump": inc_dump, "load": load}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""
    return rs.exit_status(lambda: rs.run_modes(argv, MODES, make_model))


if __name__ == "__main__":
    rs.run_script(main)
