"""The data of a run: made once per machine, checked against the other ranks', and served by a loader.

Imports no TorchRec, so that the workers start while it is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from socket import gethostname

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import CLICKS, COUNT, RATING, YES_NO, Schema
from recsuite.datasets.source import FIRST_SCHEMA, PREPARATION_DEADLINE, is_own, locate
from recsuite.datasets.streams.following import Following
from recsuite.datasets.streams.past import BEGINNING, Past
from recsuite.datasets.telling import MOST_TOLD
from recsuite.errors import UserError, counted
from recsuite.runtime.collectives import all_gather_object, broadcast_from_rank0, once_per_node
from recsuite.runtime.console import say
from recsuite.runtime.launch import launch_name
from recsuite.runtime.process import RuntimeContext

# Flags that may differ between machines: where data lie, what makes batches, what looks at a training.
OF_A_MACHINE = (
    "data_path",
    "cache_dir",
    "num_workers",
    "mp_context",
    "prefetch_factor",
    "worker_timeout",
    "report_dir",
    "profile",
    "tensorboard",
)


# What can be learned of each kind of label; the first is what is learned where --task does not fit.
TASKS = {
    RATING: ("rating", "ranking", "sequence"),
    YES_NO: ("response",),
    CLICKS: ("ranking", "sequence"),
    COUNT: ("ranking", "sequence"),
}


@dataclass(frozen=True)
class Data:
    """What every mode needs of the data set."""

    columns: Columns
    loader: BatchLoader
    # Of a stream: what it remembers of its data, and what looks whether there are more of them.
    past: Past = BEGINNING
    following: Following | None = None
    # Makes a loader, also of data that have grown.
    build: Callable[..., BatchLoader] = build_dataloader


@contextlib.contextmanager
def open_data(
    config: Config,
    context: RuntimeContext,
    past: Past = BEGINNING,
    build: Callable[..., BatchLoader] = build_dataloader,
) -> Iterator[Data]:
    """The data set and its loader; the workers end with the context. Collective: every rank.

    past: of a stream that goes on; build: makes the loader, see `build_dataloader`.

    Raises:
        UserError: when the data cannot be had, differ between machines, or the workers cannot start.
    """
    # Before they are read: what comes meanwhile is new.
    following = Following(config, context.say) if config.stream.follow_data else None
    columns = find_same(config, context, past)
    check_task(columns.schema, config.model.task)
    check_leaks(columns, config.model.task)
    for line in describe_data(columns, config):
        context.say(line)
    # Before the model is built: workers start, and make their first batches, meanwhile.
    with load(columns, config, context, build) as loader:
        yield Data(columns, loader, past, following, build)


def find_same(config: Config, context: RuntimeContext, past: Past = BEGINNING) -> Columns:
    """The columns of the configured data set, the same on every machine. Collective: every rank.

    Raises:
        UserError: when the data cannot be had, or differ between machines.
    """
    # Every byte is read and digested once on a machine, by its first rank, and not once for each rank.
    # That of rank 0: machines may share a folder, and only the first of them is to make it again.
    launch = broadcast_from_rank0(launch_name) if config.data.rebuild else ""
    everyones = once_per_node(
        context, lambda: (gethostname(), open_columns(config, launch, past)), PREPARATION_DEADLINE
    )
    _check_same_data(everyones)
    return everyones[context.rank][1]


def load(
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    build: Callable[..., BatchLoader] = build_dataloader,
) -> BatchLoader:
    """A loader of this rank's batches. Not collective."""
    dataset = EventBatches(columns, config, context.rank, context.world_size)
    return build(dataset, EpochSampler(dataset), config)


def describe_data(columns: Columns, config: Config) -> list[str]:
    """Lines on what is trained on, and whatever was left out of it."""
    schema, split = columns.schema, config.data.split
    if config.stream.stream:
        # A load cuts no windows.
        cut = "" if config.checkpoint.load else f" (--window {config.stream.window})"
        sizes = (
            f"{columns.source}: a stream of {columns.num_train:,} {schema.labels}{cut}, "
            f"{counted(columns.num_users, schema.user)}, "
            f"{counted(columns.num_items, schema.item)}"
        )
        return [sizes, *columns.notes]
    sizes = (
        f"{columns.source}: {columns.num_train:,} {schema.labels} for training, "
        f"{columns.num_validation:,} for validation, {columns.num_test:,} for the test "
        f"(--split {split}), {counted(columns.num_users, schema.user)}, "
        f"{counted(columns.num_items, schema.item)}"
    )
    return [sizes, *columns.notes]


def fitted_to_tables(config: Config, given: Collection[str], is_recorded: bool = False) -> Config:
    """The configuration with a task that the labels of own tables are for, and a split that their events
    allow. Looks at the schema alone, and where the tables have none, writes it. Not collective.

    given: the flags of the command line. is_recorded: whether the others are those of a checkpoint, which
    hold whatever the files are called.

    Raises:
        UserError: when a flag asks for what the tables do not say.
    """
    # The labels of a set of a known name are ratings with times, and it may have to be downloaded first.
    if not is_own(config.data):
        return _with_task(config, FIRST_SCHEMA, given)
    from recsuite.datasets.tables.files import has_split
    from recsuite.datasets.tables.schema_file import schema_path

    source = locate(config.data, config.runtime.seed)
    # It may be an older one, and of other files. Tables in memory have one that does not stay.
    if "data_path" in given or config.checkpoint.reads:
        say(f"the tables are read as {schema_path(config.data.data_path)} says")
    if not source.has_times and config.stream.stream:
        raise UserError("The events have no times, so --stream has no order to follow; leave it out.")
    named = {"split", "stream", "duplicates", "test_fraction"} & {*given}
    if (
        config.data.is_default("split")
        and not (named or is_recorded)
        and has_split(file.name for file in source.files)
    ):
        say("--split files, because the files are called train and test; give --split time for another one")
        config = config.replaced(split="files")
    if not source.has_times and config.data.split == "time":
        if "split" in given:
            raise UserError("The events have no times, so --split time cannot be; give --split random.")
        say("--split random, because the events have no times: no [timestamp] is in schema.toml")
        config = config.replaced(split="random")
    return _with_task(config, source.schema, given)


def _with_task(config: Config, schema: Schema, given: Collection[str]) -> Config:
    fitting, task = TASKS[schema.label_kind], config.model.task
    if task in fitting:
        return config
    if "task" in given:
        check_task(schema, task)
    say(f"--task {fitting[0]}, because the labels are of the kind {schema.label_kind}")
    return config.replaced(task=fitting[0])


def check_task(schema: Schema, task: str) -> None:
    """Refuse a task that the labels are not for.

    Raises:
        UserError: names the kind of the labels, and the tasks that there are for it.
    """
    fitting = TASKS[schema.label_kind]
    if task not in fitting:
        raise UserError(
            f"--task {task} cannot be learned of {schema.labels}, which are of the kind {schema.label_kind}; "
            f"give --task {' or '.join(fitting)}."
        )


def check_leaks(columns: Columns, task: str) -> None:
    """Refuse to rank items for events of which something is known that says too much of the item.

    Raises:
        UserError: names the feature, how much it says, and how much it may.
    """
    # Whatever wrote the schema, and whatever the labels are: predictions of a label may have such features.
    if task not in ("ranking", "sequence"):
        return
    item, user = columns.schema.item, columns.schema.user
    for name, share in columns.told.items():
        if share > MOST_TOLD:
            raise UserError(
                f"--task {task} cannot have the feature {name} of the event: it says {share:.0%} of what it "
                f"could of which {item} the event is of, and at most {MOST_TOLD:.0%} are allowed, because "
                f"the {item} is what is looked for; in schema.toml, take [features.{name}] out, or let it be "
                f'of = "item", or of = "user" if it is the same in all events of a {user}.'
            )


def check_same_flags(config: Config) -> None:
    """Refuse machines whose flags differ: rank 0's alone would decide in silence. Collective: every rank.

    Raises:
        UserError: on every rank, names a flag and both values.
    """
    # Else a flag given on one machine would be lost, for all continue with those of rank 0.
    mine = {name: value for name, value in config.flags.items() if name not in OF_A_MACHINE}
    everyones = all_gather_object(lambda: mine)
    for rank, other in enumerate(everyones):
        for name, value in other.items():
            if value != everyones[0][name]:
                raise UserError(
                    f"--{name} is {value!r} on rank {rank} and {everyones[0][name]!r} on rank 0; give the "
                    "same flags on every machine."
                )


def of_this_machine(mine: Config, decided: Config) -> Config:
    """What rank 0 decided for all, with what this machine was given for itself."""
    return decided.replaced(**{name: mine.flags[name] for name in OF_A_MACHINE})


def _check_same_data(everyones: Sequence[tuple[str, Columns]]) -> None:
    """Refuse machines whose data differ in any byte: what one rank calls row 7 would be another's row 8.

    everyones: of each rank, the name of its machine and the columns there.
    """
    machine, ours = everyones[0]
    # By the digests of all columns: names and counts may agree where vocabularies differ.
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
