"""Predict the next item, by a transformer over the order of what each user had.

    python sequential.py                                            one process, synthetic ratings
    torchrun --standalone --nproc_per_node=2 sequential.py --dataset ml-1m
    python sequential.py --data_path ml-1m --block hstu --epochs 12
    python sequential.py --recommend --user 42 --save_dir dumps     what is next for somebody

The flags are those of example.py that sequences have, after --preset sequence, and so is what it does with
them: train, dump, load, deltas. What differs is the model, see docs/sequential.md. In the end it shows what
the user of the newest event had, and what comes next; not with --train alone.
"""

from __future__ import annotations

import recsuite as rs

DEFAULTS = ("--task", "sequence", "--preset", "sequence")
# Of other tasks.
UNREAD = ("task", "audience", "others", "history_weights", "stream")


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, validate after each epoch, and test the best weights. Collective: every rank."""
    with (
        rs.observing(args, runtime) as observers,
        rs.open_data(args, runtime, rs.build_dataloader, observers) as data,
        rs.checkpointing(data, args, runtime, observers) as checkpoints,
        rs.begin_training(data, args, runtime, checkpoints, observers.callbacks) as training,
    ):
        # A transformer, by a softmax over items that are drawn or over all of them: see --negatives.
        model = training.shard(rs.library_model)
        for part in training.passes():
            for batch in part:
                loss = model(batch)
                loss.backward()
                model.step()
            part.end(training.validate())
        result = training.finish()
    rs.report(result, args, runtime, observers)


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Load a checkpoint, and test it. Collective: every rank."""
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, rs.library_model)
        rs.report_test(model, progress, data, args, runtime)


# The flags say which checkpoints are written.
MODES = {"train": train, "dump": train, "inc_dump": train, "load": load}


def show_next(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Show what a user had, the newest first, and what comes next. Called by every rank; rank 0 prints."""
    if runtime.rank == 0:
        from recsuite.serving.recommend import recommend

        # Without --user that of the newest event.
        recommend(args, given=args.flags)


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status: 2 for a user's mistake."""
    return rs.exit_status(
        lambda: rs.run_modes(argv, MODES, defaults=DEFAULTS, after=show_next, unread=UNREAD)
    )


if __name__ == "__main__":
    rs.run_script(main)
