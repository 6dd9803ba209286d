"""Train online on the ratings in the order of time, and serve each new model.

    python online.py                           a small drifting synthetic data set
    python online.py --data_path FOLDER        the ratings of a folder, replayed by their times
    python online.py --data_path FOLDER --stream kafka://HOST:PORT/TOPIC    the messages of a topic
    python online.py --window 7d --ttl 180d    further flags are those of example.py

The training is another process: it predicts each window of ratings, trains on it, and writes a delta. This
process serves and loads every delta. At the end it prints the error of a model without further training.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import recsuite as rs
from recsuite.errors import UserError
from recsuite.places import folder_at
from recsuite.runtime.console import say
from recsuite.training.progress import Progress, StreamProgress

TRAINING = Path(__file__).with_name("example.py")
# Capacity for the users and movies of a moderate data set; tables grow if there are more.
TABLES = ("--vocabulary", "dynamic", "--capacity", "10000")
STREAM = ("--stream", *TABLES, "--inc_dump", "--window", "30d")
WORLD = ("--dataset", "synthetic", "--synthetic_kind", "drifting", "--synthetic_ratings", "30000")


def main(argv: list[str] | None = None) -> int:
    """Train, serve and compare; returns the exit status: 2 for a user's mistake."""
    return rs.exit_status(lambda: run(*parse(argv)))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this script, and the others, which are those of example.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data_path", help="a folder of ratings; synthetic ones without it")
    parser.add_argument(
        "--save_dir", type=folder_at, help="keeps the checkpoints here; without one they are removed"
    )
    return parser.parse_known_args(argv)


def run(flags: argparse.Namespace, others: list[str]) -> int:
    """Train and serve in parallel, then compare."""
    from recsuite.extras.trainings import have_ended, started, working_folder

    with working_folder("online-") as folder:
        save_dir = flags.save_dir or folder / "dumps"
        data: tuple[str, ...] = ("--data_path", str(flags.data_path or folder / "ratings"))
        data += () if flags.data_path else WORLD
        command = [str(TRAINING), "--save_dir", str(save_dir), *data]
        with started({"training": [*command, *STREAM, *others]}) as begun:
            served = list(serve(save_dir, begun))
        if len(served) < 2:
            raise UserError(
                "online.py requires at least two windows. Fix: give more ratings, or a smaller --window."
            )
        middle = (len(served) - 1) // 2
        for then in [served[0], served[middle]][: 2 if middle else 1]:
            trained = rmse_since(stream_of(then), stream_of(served[-1]))
            say(
                f"RMSE of later ratings without training after window {then.epoch}, beside {trained:.4f} "
                "with it:"
            )
            with started({"load": [*command, "--load", "--until", str(then.step)]}) as begun:
                begun["load"].wait()
                have_ended(begun)
    return 0


def serve(save_dir: Path, begun: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[Progress]:
    """Serve each newer model of a training until its end; yield the progress of each."""
    from example import make_model
    from recsuite.extras.trainings import newest
    from recsuite.training.stream import day

    for followers in newest(dict.fromkeys(begun, save_dir), begun, make_model):
        (follower,) = followers.values()
        model, stream = follower.model, stream_of(follower.model.progress)
        say(
            f"serving the model after window {model.progress.epoch}, {model.age:.1f} s old, of ratings "
            f"until {day(stream.time)}; progressive RMSE {stream.overall()['rmse']:.4f}"
        )
        yield model.progress


def stream_of(progress: Progress) -> StreamProgress:
    """Return the position of a training in its stream."""
    return progress.stream or StreamProgress()


def rmse_since(before: StreamProgress, now: StreamProgress) -> float:
    """Return the progressive error of a stream between two of its positions."""
    squares, number = now.sums["rmse"] - before.sums["rmse"], now.counts["rmse"] - before.counts["rmse"]
    return float((squares / number) ** 0.5)


if __name__ == "__main__":
    rs.run_script(main)
