"""What comes next: a transformer over the order of what each user had.

    python sequential.py                                            one process, synthetic ratings
    torchrun --standalone --nproc_per_node=2 sequential.py --dataset ml-1m
    python sequential.py --data_path ml-1m --block hstu --epochs 12
    python sequential.py --recommend --user 42 --save_dir dumps     what is next for somebody

The flags are those of example.py, and so is what it does with them: train, dump, load, deltas. Another thing
is what a model reads, see docs/sequential.md. In the end it shows what the user of the newest event had, and
what comes next.
"""

from __future__ import annotations

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext
from recsuite.tools import life, script

DEFAULTS = ("--task", "sequence")


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status: 2 for a user's mistake."""
    return script.exit_status(lambda: life.start(argv, DEFAULTS, show_next))


def show_next(config: Config, context: RuntimeContext) -> None:
    """Show what somebody had, the newest first, and what comes next. Called by every rank; rank 0 speaks."""
    if context.rank == 0:
        from recsuite.serving.recommend import recommend

        # No user: that of the newest event.
        recommend(config, given=config.flags)


if __name__ == "__main__":
    script.run_script(main)
