"""Trackers of a training: destinations of its flags and metrics, and the callback that sends them."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from recsuite.errors import UserError, counted
from recsuite.extras.reports.report import epoch_report
from recsuite.files import explained
from recsuite.hooks import require_installed
from recsuite.metrics import finite
from recsuite.training.callbacks import Callback, Epoch, Run, Step, Tracker
from recsuite.training.progress import Progress

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

# After a call a tracker is not called for ten times as long, so that a training waits little for it: windows
# of a stream may come faster than a server answers. After a failure the pause is at least some seconds.
PAUSE, PAUSE_AFTER_FAILURE = 10, 10.0
# Maximum number of steps with metrics kept for a failing tracker; an endless stream must not keep all.
MOST_WAITING = 100_000
# MLflow's limits on a request and on the value of a parameter, and characters that a name may not have.
PARAMS, METRICS, LONGEST_PARAM = 100, 1000, 6000
NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)
# By default a request is repeated for four minutes, in which other ranks time out. Metrics are sent again
# anyway.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# Tag of an MLflow run for the name of the training in its checkpoints.
TAG = "recsuite.run"


class Tracking(Callback):
    """Give a tracker each step's loss and learning rates, each epoch's part of metrics.json, and the test.

    Losses are sent at the end of their epoch, after the device has finished anyway. A tracker that fails then
    does not end the training: its metrics are kept, and a line is printed. say: prints a sentence.
    """

    def __init__(self, tracker: Tracker, flags: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.tracker, self.flags, self.say = tracker, flags, say
        self._rates: dict[int, Mapping[str, float]] = {}
        self._waiting: dict[int, dict[str, float]] = {}
        self._num_dropped, self._paused_until, self._step = 0, 0.0, -1

    @override
    def on_begin(self, progress: Progress, run: str) -> None:
        self.tracker.begin(self.flags, run, progress.step + 1)
        self._step = progress.step

    @override
    def on_step(self, step: Step) -> None:
        """Keep the learning rates of a step."""
        self._rates[step.progress.step] = dict(step.rates)

    @override
    def on_epoch(self, epoch: Epoch) -> None:
        for (step, rates), loss in zip(self._rates.items(), epoch.losses, strict=True):
            self._step = step
            self._add({"loss": float(loss), "learning_rate": rates})
        self._rates = {}
        self._add(epoch_report(epoch))
        if time.monotonic() >= self._paused_until:
            self._give()

    @override
    def on_end(self, run: Run) -> None:
        # A resumed training with nothing left to train may lack its test.
        self._add({"test": finite(run.test.values)})

    def close(self, kind: type[BaseException] | None, *error: object) -> None:
        """Send the kept metrics, and end the tracker, if it was begun. kind: class of the final exception."""
        if self._step < 0:
            return
        if self._waiting:
            self._give()
        if missing := len(self._waiting) + self._num_dropped:
            self.say(f"{self._name} has no metrics of {counted(missing, 'step')}")
        is_signal = kind is not None and not issubclass(kind, Exception)
        status = "finished" if kind is None else "stopped" if is_signal else "failed"
        try:
            self.tracker.end(status)
        except Exception as failure:
            self.say(
                f"{self._name} failed at the end of the training, which has {status} ({_words(failure)})"
            )

    @property
    def _name(self) -> str:
        return type(self.tracker).__name__

    def _add(self, report: Mapping[str, Any]) -> None:
        # Metrics of an epoch are logged by step, not by epoch, so that a resumed training can hide them.
        self._waiting.setdefault(self._step, {}).update(numbers(report))

    def _give(self) -> None:
        begin, least = time.monotonic(), 0.0
        try:
            self.tracker.log(self._waiting)
            self._waiting = {}
        # No exception of a tracker may end the training.
        except Exception as failure:
            least, steps = PAUSE_AFTER_FAILURE, [*self._waiting]
            self.say(
                f"{self._name} did not take the metrics of {counted(len(steps), 'step')} "
                f"({_words(failure)}); they are kept and given again with later ones, and the training "
                "continues"
            )
            for step in steps[:-MOST_WAITING]:
                del self._waiting[step]
                self._num_dropped += 1
        now = time.monotonic()
        self._paused_until = now + max(least, PAUSE * (now - begin))


def numbers(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings by names like a path, "test/rmse"; null is skipped."""
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{name}/")
        # In Python a bool is an int.
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", value


def tag_of(name: str) -> str:
    """Return the name of a metric in TensorBoard; "" for a number that needs no plot.

    TensorBoard sorts groups by name and opens the first two: losses and metrics of each pass, then each step.
    """
    kind, _, rest = name.partition("/")
    if name == "epoch":
        return ""
    if kind == "test":
        return name
    if name == "loss" or kind == "learning_rate":
        return f"steps/{name}"
    return f"metrics/{name}" if rest or name == "train_loss" else f"time/{name}"


class TensorBoardTracker(Tracker):
    """Write files for TensorBoard, with flags as hyperparameters and as a text.

    A resumed training continues its curves.

    Args:
        folder: The folder for `tensorboard --logdir`; each training has a folder in it.

    Raises:
        UserError: When tensorboard is not installed.

    Example:
        rs.session(args, runtime, rs.build_dataloader, trackers=[rs.TensorBoardTracker("runs/first")])
    """

    def __init__(self, folder: str | Path) -> None:
        # Not imported: every rank makes a tracker.
        require_installed("TensorBoardTracker", "tensorboard")
        self.folder = folder

    @override
    def begin(self, params: Mapping[str, Any], run: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        with explained(f"Cannot write TensorBoard's files to {self.folder}", "give another folder"):
            # A folder for each training, as TensorBoard keeps the first hyperparameters of a folder. When a
            # training is resumed, its points from this step on are hidden.
            self._writer: SummaryWriter = SummaryWriter(str(Path(self.folder, run[:8])), purge_step=step)
        # A bool is an int, and would be shown as a number.
        values = {
            name: value if type(value) in (int, float) else str(value) for name, value in params.items()
        }
        # Without the list of their names: TensorBoard makes that of all trainings in a folder.
        _, start, self._finished = hparams(values, {})
        # In torch's annotations it is None.
        self._file = cast(Any, self._writer.file_writer)
        self._file.add_summary(start)
        rows = [f"| --{name} | `{value}` |" for name, value in params.items()]
        self._writer.add_text("config", "\n".join(["| flag | value |", "| --- | --- |", *rows]), step)

    @override
    def log(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        for step, values in metrics.items():
            for name, value in values.items():
                if tag := tag_of(name):
                    self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    @override
    def end(self, status: str) -> None:
        if status == "finished":
            self._file.add_summary(self._finished)
        self._writer.close()


class FileTracker(Tracker):
    """Append one line with a JSON object for each begin, each step with metrics, and each end.

    A begin has the step from which on earlier lines are obsolete, because a resumed training repeats these
    steps.

    Args:
        path: The file. It may be read while it grows: every line with a newline is complete.

    Raises:
        UserError: From `begin`, when the file cannot be written.

    Example:
        rs.session(args, runtime, rs.build_dataloader, trackers=[rs.FileTracker("runs/track.jsonl")])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @override
    def begin(self, params: Mapping[str, Any], run: str, step: int) -> None:
        with explained(f"Cannot write metrics to {self.path}", "give FileTracker another file"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                # A crash of the machine may have left half a line.
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            self._append([{"begin": run, "step": step, "params": params}])

    @override
    def log(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        self._append([{"step": step, **values} for step, values in metrics.items()])

    @override
    def end(self, status: str) -> None:
        self._append([{"end": status}])

    def _append(self, records: list[dict[str, Any]]) -> None:
        lines = "".join(f"{json.dumps(record)}\n" for record in records).encode()
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(lines) < len(lines):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class MLflowTracker(Tracker):
    """Log to MLflow: flags as parameters, metrics by step, and the final status. A resumed training continues
    its run.

    Args:
        uri: The URI of the tracking server, or of a folder; None for MLFLOW_TRACKING_URI.
        experiment: The name of the experiment, which is created if it does not exist.
        name: The name of the run; None for the first letters of that in its checkpoints.

    Raises:
        UserError: When mlflow is not installed, and from `begin`, before the first step, when MLflow refuses.

    Example:
        rs.session(args, runtime, rs.build_dataloader, trackers=[rs.MLflowTracker("http://127.0.0.1:5000")])
    """

    def __init__(self, uri: str | None = None, experiment: str = "recsuite", name: str | None = None) -> None:
        require_installed("MLflowTracker", "mlflow")
        self.uri, self.experiment, self.name = uri, experiment, name

    @override
    def begin(self, params: Mapping[str, Any], run: str, step: int) -> None:
        for variable, value in PATIENCE.items():
            os.environ.setdefault(variable, value)
        try:
            self._begin({name: str(value)[:LONGEST_PARAM] for name, value in params.items()}, run, step)
        # Exceptions of MLflow, of its requests, or of the disk have no common class.
        except Exception as error:
            raise UserError(
                f"Cannot begin a run of MLflow in the experiment {self.experiment}: {_words(error)}. "
                "Fix: give it the uri of a server that runs, or of a folder that MLflow may use."
            ) from error

    def _begin(self, params: dict[str, str], run: str, step: int) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._client: MlflowClient = MlflowClient(self.uri)
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                self._client.create_experiment(self.experiment)
            except MlflowException:
                # Another training may have created it at the same time.
                if self._client.get_experiment_by_name(self.experiment) is None:
                    raise
            experiment = self._client.get_experiment_by_name(self.experiment)
        experiment_id = experiment.experiment_id
        known = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{run}'", max_results=1)
        name = self.name or run[:8]
        this_run = (
            known[0] if known else self._client.create_run(experiment_id, tags={TAG: run}, run_name=name)
        )
        self._id, before = this_run.info.run_id, this_run.data.params
        self._client.update_run(self._id, status="RUNNING")
        # MLflow does not allow a parameter to change.
        for name in params.keys() & before.keys():
            if params[name] != before[name]:
                self._client.set_tag(self._id, f"{name} from step {step}", params[name])
        new = [Param(name, value) for name, value in params.items() if name not in before]
        for first in range(0, len(new), PARAMS):
            self._client.log_batch(self._id, params=new[first : first + PARAMS])

    @override
    def log(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        entries = [
            Metric(NOT_IN_A_NAME.sub("_", name), value, now, step)
            for step, values in metrics.items()
            for name, value in values.items()
        ]
        for first in range(0, len(entries), METRICS):
            self._client.log_batch(self._id, metrics=entries[first : first + METRICS])

    @override
    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, STATES[status])


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
