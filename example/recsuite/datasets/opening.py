"""Data of a run: prepared once per machine, compared with those of the other ranks, and served by a loader.

Data of a stream may grow: their files are polled until they have changed and are complete. Does not import
TorchRec, so that the workers start while it is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname
from typing import TYPE_CHECKING, Any, Protocol

from recsuite.config.config import Config, machine_flags
from recsuite.config.presets import AUTO
from recsuite.config.sections import FEW_VALIDATION, SHARE_OF_VALIDATION, DataConfig
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.growing_files import GrowingFiles, StreamFiles
from recsuite.datasets.schema import CLICKS, COUNT, RATING, YES_NO, Schema
from recsuite.datasets.source import FIRST_SCHEMA, PREPARATION_DEADLINE, is_user_tables, locate, look
from recsuite.errors import UserError, counted
from recsuite.hooks import extra
from recsuite.runtime.console import say
from recsuite.runtime.process import (
    RuntimeContext,
    all_gather_object,
    broadcast_from_rank0,
    launch_name,
    once_per_node,
)

if TYPE_CHECKING:
    from recsuite.datasets.preparation.stream_reader import StreamReader
    from recsuite.datasets.tables.source import TableFile, TableSource

# Seconds between two looks at the files.
LOOK_EVERY = 0.25
# Seconds of waiting after which the reason is shown.
SAID_AFTER = 10.0


class Watcher(Protocol):
    """Polling of the events of a stream for new ones."""

    @property
    def known(self) -> Mapping[str, Any]:
        """Ends of the known events, see `StreamFiles.ends`."""

    def has_grown(self) -> bool:
        """True if there is more than `known`, which is updated then. Collective: every rank."""

    def on_unreadable(self, error: UserError) -> None:
        """Report an error of reading the new data, or raise it if waiting does not help."""


class FileWatcher:
    """Polling of the files of a data set for new data. Every rank makes one before it reads the files.

    A file that is new or has grown is new data. A file that changed and kept its size is not.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.known = self._before = {file.name: file.size for file in self._files()}
        # Time since which changed files are incomplete, and the last message.
        self._since: float | None = None
        self._said = ""

    def has_grown(self) -> bool:
        """True if the files differ from the known ones and seem complete. Then they become the known ones.

        Collective: every rank. One rank looks, because a network file system shows changes at different
        moments.

        Raises:
            UserError: when they cannot be read.
        """
        return bool(broadcast_from_rank0(self._has_settled))

    def on_unreadable(self, error: UserError) -> None:
        """Report an error of reading the new data."""
        # Possibly half of a file has come, or an event before its item: the next change brings the rest.
        self.report_once(f"{error} The stream waits until the files change again.")

    def _has_settled(self) -> bool:
        files = self._files()
        now, before = {file.name: file.size for file in files}, self._before
        self._before = now
        if now == self.known:
            self._since = None
            return False
        # A file that is still being written differs at the next look.
        if moving := {name for name, _ in now.items() ^ before.items()}:
            self._report_after_a_while(f"{min(moving)} is still being written; waiting")
            return False
        changed = [file for file in files if self.known.get(file.name) != file.size]
        if unfinished := [file.name for file in changed if not _ends_a_line(file)]:
            self._report_after_a_while(f"{unfinished[0]} does not end with a whole line; waiting for its end")
            return False
        self.known, self._since = now, None
        return True

    def report_once(self, sentence: str) -> None:
        """Show a message, unless it was the last one."""
        if sentence != self._said:
            self.say(sentence)
        self._said = sentence

    def _report_after_a_while(self, sentence: str) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > SAID_AFTER:
            self.report_once(sentence)

    def _files(self) -> list[TableFile]:
        source = look(self.config.data, self.config.runtime.seed)[1]
        # A folder that is moved away for a moment counts as incomplete.
        return [] if source is None else source.files


def _ends_a_line(file: TableFile) -> bool:
    """True if a file is not empty and, for a format of lines, ends with a whole line."""
    # A process that appends to lines may be in the middle of the last one.
    if not file.file.is_of_lines or file.size == 0:
        return file.size != 0
    with file.open() as opened:
        opened.seek(-1, 2)
        return opened.read(1) == b"\n"


# Tasks for each kind of label; the first is used if the default of --task does not fit.
TASKS = {
    RATING: ("rating", "ranking", "sequence"),
    YES_NO: ("response",),
    CLICKS: ("ranking", "sequence"),
    COUNT: ("ranking", "sequence"),
}


@dataclass(frozen=True)
class Data:
    """Data set and loader of a run, in every mode."""

    columns: Columns
    loader: BatchLoader
    # For a stream: its reader on the first rank of each machine, and the polling for new data.
    stream_reader: StreamReader | None = None
    following: Watcher | None = None
    # Makes a loader, also for data that have grown.
    build: Callable[..., BatchLoader] = build_dataloader


@contextlib.contextmanager
def open_data(
    config: Config,
    context: RuntimeContext,
    make_reader: Callable[[StreamFiles], StreamReader | None] = lambda files: None,
    build: Callable[..., BatchLoader] = build_dataloader,
) -> Iterator[Data]:
    """Yield the data set and its loader. The workers end with the context. Collective: every rank.

    make_reader: makes the reader of a stream in files; build: makes the loader, see `build_dataloader`.

    Raises:
        UserError: when the data cannot be obtained, differ between machines, or the workers cannot start.
    """
    with contextlib.ExitStack() as stack:
        stream_reader, following = None, None
        if config.stream.stream:
            # Before the files are read: later changes are new data.
            files, following = _files_of(config, context)
            stack.callback(files.close)
            ends = {} if config.checkpoint.compact else dict(broadcast_from_rank0(files.ends))
            stream_reader = make_reader(files)
            stack.callback(_close, stream_reader)
            first = open_segment(stream_reader, context, None, ends)
            assert first is not None
            columns = first
        else:
            columns = open_same_columns(config, context)
        _report_data(columns, config, context)
        # Before the model is built, so that the workers start and make their first batches meanwhile.
        loader = stack.enter_context(load(columns, config, context, build))
        yield Data(columns, loader, stream_reader, following, build)


def _files_of(config: Config, context: RuntimeContext) -> tuple[StreamFiles, Watcher | None]:
    """Return the files of a stream, or its topic, and the polling of these if they are followed."""
    follows = config.stream.follow_data
    if not config.stream.topic:
        return GrowingFiles(config), FileWatcher(config, context.say) if follows else None
    kafka = extra("kafka")
    topic = kafka.Topic(config)
    return topic, kafka.TopicWatcher(topic) if follows else None


def _report_data(columns: Columns, config: Config, context: RuntimeContext) -> None:
    """Print the source and the sizes of the data, after checking that they fit the task. Not collective."""
    check_task(columns.schema, config.model.task)
    if columns.item_leakage:
        extra("leakage").check_leaks(columns, config.model.task)
    schema = columns.schema
    things = f"{counted(columns.num_users, schema.user)}, {counted(columns.num_items, schema.item)}"
    if config.stream.stream:
        # With --load there are no windows.
        cut = "" if config.checkpoint.load else f" (--window {config.stream.window})"
        first, left = (columns.segment.first, columns.segment.num_left) if columns.segment else (0, 0)
        after = f" after {first:,} that are learned" if first else ""
        sizes = f"a stream of {columns.num_train + left:,} {schema.labels}{after}{cut}"
    else:
        sizes = (
            f"{columns.num_train:,} {schema.labels} for training, {columns.num_validation:,} for validation, "
            f"{columns.num_test:,} for the test (--split {config.data.split})"
        )
    chooses = not (config.stream.stream or config.checkpoint.load)
    of_validation = describe_validation(columns, config.data) if chooses else []
    for line in (f"{columns.source}: {sizes}, {things}", *of_validation, *columns.notes):
        context.say(line)


def describe_validation(columns: Columns, config: DataConfig) -> list[str]:
    """Return a line on the events that choose the epoch, if they are few, or a larger share than of many."""
    left, number = columns.num_train + columns.num_validation, columns.num_validation
    wanted = dataclasses.replace(config, validation_fraction=AUTO).num_validation(left)
    # Not those that the files have.
    if not 0 < number <= config.num_validation(left):
        return []
    flag, is_auto = f"--validation_fraction {config.validation_fraction}", config.validation_fraction == AUTO
    events = counted(number, columns.schema.label)
    line = f"the epoch is chosen by {events} of {left:,} outside the test ({flag})"
    if number < FEW_VALIDATION and (is_auto or number < wanted):
        return [f"{line}, which are few{'' if is_auto else f'; auto takes {wanted:,}'}"]
    return [line] if is_auto and number > round(left * SHARE_OF_VALIDATION) else []


def _close(stream_reader: StreamReader | None) -> None:
    if stream_reader is not None:
        stream_reader.close()


def open_segment(
    stream_reader: StreamReader | None,
    context: RuntimeContext,
    learned: int | None,
    ends: Mapping[str, Any] | None = None,
    group: Any = None,
) -> Columns | None:
    """Return the columns of the next segment of a stream, the same on every machine. Collective: every rank.

    Return None if data were read that have no other window yet: the columns would be made again and again.

    stream_reader: on the first rank of each machine; learned: position of the stream that was learned, None
    for the one at which it began; ends: of the files up to which it is read, None to read nothing; group: see
    `once_per_node`.

    Raises:
        UserError: when the data cannot be read, or differ between machines.
    """

    def opened() -> tuple[str, Columns | None, list[str]]:
        assert stream_reader is not None
        if learned is not None:
            stream_reader.advance(learned)
        notes = [] if ends is None else stream_reader.read(ends)
        is_needed = ends is None or learned is None or stream_reader.is_due
        return gethostname(), stream_reader.columns() if is_needed else None, notes

    everyones = once_per_node(context, opened, PREPARATION_DEADLINE, group=group)
    for note in everyones[0][2]:
        context.say(note)
    is_due = [columns is not None for _, columns, _ in everyones]
    if not any(is_due):
        return None
    if not all(is_due):
        raise UserError(
            f"Ranks {is_due.index(True)} and {is_due.index(False)} have read other events: only the first "
            "has a whole window. Fix: give all machines the same data, and start again with --resume."
        )
    _check_same_data([machine[:2] for machine in everyones])
    columns: Columns = everyones[context.rank][1]
    return columns


def open_same_columns(config: Config, context: RuntimeContext) -> Columns:
    """Return the columns of the configured data set, the same on every machine. Collective: every rank.

    Raises:
        UserError: when the data cannot be obtained, or differ between machines.
    """
    if (reader := config.reader) is not None:
        columns: Columns = reader.open_columns(config, context)
        return columns
    # Every byte is read and digested once on a machine, by its first rank, and not once for each rank.
    # All use the launch of rank 0: machines may share a folder, and only the first of them rebuilds it.
    launch = broadcast_from_rank0(launch_name) if config.data.rebuild else ""
    everyones = once_per_node(
        context, lambda: (gethostname(), open_columns(config, launch)), PREPARATION_DEADLINE
    )
    _check_same_data(everyones)
    return everyones[context.rank][1]


def load(
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    build: Callable[..., BatchLoader] = build_dataloader,
) -> BatchLoader:
    """Return a loader of this rank's batches. Not collective."""
    config = config.with_global_batch(columns.num_train, context.world_size)
    batches = EventBatches if config.reader is None else config.reader.Batches
    dataset = batches(columns, config, context.rank, context.world_size)
    return build(dataset, EpochSampler(dataset), config)


def fitted_to_tables(config: Config, given: Collection[str], is_recorded: bool = False) -> Config:
    """Return the configuration with a task and a split that fit the user's own tables.

    Reads the schema only, or writes it if the tables have none. Not collective.

    given: the flags of the command line. is_recorded: True if the other flags are those of a checkpoint,
    which apply whatever the names of the files are.

    Raises:
        UserError: when a flag asks for what the tables do not say.
    """
    # A named data set has ratings with times, and may have to be downloaded first.
    if not (config.stream.topic or is_user_tables(config.data)):
        _check_order(config, has_times=True)
        return _with_task(config, FIRST_SCHEMA, given)
    from recsuite.datasets.tables.files import has_split, schema_path, unread

    if config.stream.topic:
        with contextlib.closing(extra("kafka").Topic(config)) as topic:
            source: TableSource = topic.source()
    else:
        source = locate(config.data, config.runtime.seed)
    # Show the path: an old schema may be for other files. Tables in memory have a temporary schema.
    if "data_path" in given or config.checkpoint.reads:
        say(f"the tables are read as {schema_path(config.data.data_path)} says")
    if others := unread(source.tables):
        names = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}"
        say(
            f"not read: {names}; called like the events, but not named under [files] of schema.toml, where a "
            'pattern such as "week-*.parquet" names later files too'
        )
    if not source.has_times and config.stream.stream:
        raise UserError("The events have no times, so --stream has no order to follow; remove it.")
    named = {"split", "stream", "duplicates", "test_fraction"} & {*given}
    if not (named or is_recorded) and has_split(file.name for file in source.files):
        # A reader of an extra may know no other split.
        another = "" if config.reader is not None else "; give --split time for another one"
        say(f"--split files, because the files are called train and test{another}")
        config = config.replaced(split="files")
    _check_order(config, source.has_times)
    if config.model.reads_order and not (source.has_order or is_recorded):
        raise UserError(
            f"--task {config.model.task} requires events in order, and these have no times: name their "
            "column under [timestamp] in schema.toml or, if the rows of the files are in order, give "
            "--order rows."
        )
    if not source.has_order and config.data.split == "time":
        if "split" in given:
            raise UserError(
                "--split time requires events in order, and these have no times; give --split random or, if "
                "the rows of the files are in order, --order rows."
            )
        say("--split random, because the events have no times: no [timestamp] is in schema.toml")
        config = config.replaced(split="random")
    return _with_task(config, source.schema, given)


def _check_order(config: Config, has_times: bool) -> None:
    if has_times and config.data.order == "rows":
        raise UserError("--order rows requires events without times, and these have times; leave it out.")


def _with_task(config: Config, schema: Schema, given: Collection[str]) -> Config:
    fitting, task = TASKS[schema.label_kind], config.model.task
    if task not in fitting:
        if "task" in given:
            check_task(schema, task)
        say(f"--task {fitting[0]}, because the labels are of the kind {schema.label_kind}")
        config = config.replaced(task=fitting[0])
    return config


def check_task(schema: Schema, task: str) -> None:
    """Refuse a task that does not fit the labels.

    Raises:
        UserError: names the kind of the labels, and the tasks that there are for it.
    """
    fitting = TASKS[schema.label_kind]
    if task not in fitting:
        raise UserError(
            f"--task {task} does not support labels of the kind {schema.label_kind}; "
            f"give --task {' or '.join(fitting)}."
        )


def check_same_flags(config: Config) -> None:
    """Refuse machines whose flags differ: those of rank 0 would silently apply. Collective: every rank.

    Raises:
        UserError: on every rank, names a flag and both values.
    """
    # Otherwise a flag given on one machine would be lost, because all continue with those of rank 0.
    mine = {name: value for name, value in config.flags.items() if name not in machine_flags()}
    everyones = all_gather_object(lambda: mine)
    for rank, other in enumerate(everyones):
        for name, value in other.items():
            if value != everyones[0][name]:
                raise UserError(
                    f"--{name} is {value!r} on rank {rank} and {everyones[0][name]!r} on rank 0; give the "
                    "same flags on every machine."
                )


def with_machine_flags(mine: Config, decided: Config) -> Config:
    """Return the configuration of rank 0 with the flags of this machine, see `machine_flags`."""
    return decided.replaced(**{name: mine.flags[name] for name in machine_flags()})


def _check_same_data(everyones: Sequence[tuple[str, Columns]]) -> None:
    """Refuse machines whose data differ in any byte; everyones: name of the machine and columns, by rank."""
    # Row 7 of one rank could be row 8 of another.
    machine, ours = everyones[0]
    # Compare the digests of all columns: names and counts may agree while vocabularies differ.
    others = [rank for rank, (_, columns) in enumerate(everyones) if columns.files != ours.files]
    if not others:
        return
    elsewhere, theirs = everyones[others[0]]
    names = sorted({name for name, _ in ours.files.items() ^ theirs.files.items()})
    alike = [rank for rank in others if everyones[rank][1].files == theirs.files]
    raise UserError(
        f"Ranks {', '.join(map(str, alike))} on {elsewhere} have other data than rank 0 on {machine}: "
        f"{theirs.num_train:,} training and {theirs.num_test:,} test {theirs.schema.labels} of "
        f"{theirs.source}, rank 0 has {ours.num_train:,} and {ours.num_test:,} of {ours.source}, and "
        f"{', '.join(names)} differ; give all machines the same files."
    )
