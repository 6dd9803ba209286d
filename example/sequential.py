"""Predict the next item with a transformer over the user history.

    python sequential.py                                            one process, synthetic ratings
    torchrun --standalone --nproc_per_node=2 sequential.py --dataset ml-1m
    python sequential.py --data_path ml-1m --block hstu --epochs 12
    python sequential.py --recommend --user 42                      next items of one user

The flags and modes are those of example.py for sequences, after --preset sequence: train, dump, load, deltas.
Only the model differs, see docs/sequential.md. At the end it prints the history of the user of the newest
event, and the predicted next items; not with --train alone.
"""

from __future__ import annotations

import torch
from torch import nn

import recsuite as rs

# So many synthetic ratings take a minute.
DEFAULTS = ("--task", "sequence", "--preset", "sequence", "--synthetic_ratings", "100000")
# Flags of other tasks.
UNREAD = ("task", "history_weights", "initial_rows", "l2", "stream")
# Checked before a training whose end would fail.
NEEDS = ("recsuite.extras.recommend",)


def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    """Return a transformer, whose blocks are those of SASRec or of HSTU."""
    dim, heads, width = args.embedding_dim, args.num_heads, data.history
    # Checked here, because the default of --embedding_dim is known only now.
    if dim % heads:
        raise rs.UserError(f"--embedding_dim must be a multiple of --num_heads {heads}, got {dim}.")
    blocks: list[nn.Module] = []
    for number in range(args.num_blocks):
        if args.block == "hstu":
            blocks.append(rs.HstuBlock(dim, heads, width, args.dropout, number))
        else:
            blocks.append(rs.SasBlock(dim, heads, width, args.mlp_dims, args.dropout, number))
    return rs.SequenceHead(data.features, dim, data.schema.ids, blocks, width, args.dropout)


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, validate after each epoch, and test the best weights. Collective: every rank."""
    with rs.session(args, runtime, rs.build_dataloader) as training:
        # A softmax over sampled items or over all of them, see --negatives.
        model = training.shard(make_model, loss=rs.SampledSoftmax.of(training.columns))

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


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Load a checkpoint, and test it. Collective: every rank."""
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, make_model)
        rs.report_test(model, progress, data, args, runtime)


MODES = {"train": train, "load": load}


def show_next(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Print a user history, newest first, and the next items. Called by every rank; rank 0 prints."""
    if runtime.rank == 0:
        from recsuite.extras.recommend.recommend import recommend

        # Without --user, the user of the newest event.
        recommend(args, args.flags, make_model)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""
    return rs.exit_status(
        lambda: rs.run_modes(argv, MODES, make_model, DEFAULTS, show_next, unread=UNREAD, needs=NEEDS)
    )


if __name__ == "__main__":
    rs.run_script(main)
