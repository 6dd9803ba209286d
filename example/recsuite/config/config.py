"""The whole configuration: its sections, the rules between them, and the base of sections of extras.

Does not import torch or read the environment. Reads only the files that a flag names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonpath, exists, isdir, realpath
from typing import Any, ClassVar

from recsuite import hooks
from recsuite.config.flag import Section
from recsuite.config.presets import AUTO
from recsuite.config.sections import (
    LARGEST_BATCH,
    LARGEST_BATCH_OF,
    LEAST_BATCH,
    MOST_DECAY_OF_FP16,
    NEWEST,
    SAS,
    STEPS_OF_AN_EPOCH,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoaderConfig,
    ModelConfig,
    OptimizerConfig,
    RuntimeConfig,
    ServingConfig,
    StreamConfig,
    TablesConfig,
    TrainingConfig,
)
from recsuite.errors import require
from recsuite.files import local
from recsuite.places import folder_at

# Modes that train.
TRAINING = ("train", "dump", "inc_dump", "resume")


@dataclass(frozen=True)
class Config:
    """Configuration of a run: one section of flags for each subject. A function takes the section it reads.

    Args:
        data, loader, tables, model, optimizer, training, stream, checkpoint, serving, evaluation, runtime:
            The sections, see docs/flags.md; each flag is a field of one of them.
        extras: The sections of extras by name.

    Raises:
        UserError: From `validate`, for impossible values.

    Example:
        args = rs.Config.of(epochs=2, batch_size=512)
        args.training.epochs                                  # 2
        args = args.replaced(embedding_dim=16)
    """

    data: DataConfig = field(default_factory=DataConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    extras: Mapping[str, ExtraSection] = field(
        default_factory=lambda: {name: kind() for name, kind in hooks.sections().items()}, hash=False
    )

    @classmethod
    def of(cls, **flags: Any) -> Config:
        """Return the defaults with some flags; not checked.

        Args:
            flags: Values by the names of the flags.

        Example:
            rs.Config.of(epochs=2, batch_size=512)
        """
        return cls().replaced(**flags)

    def replaced(self, **flags: Any) -> Config:
        """Return this configuration with other values of some flags; not checked.

        Args:
            flags: Values by the names of the flags.

        Example:
            args.replaced(embedding_dim=16)
        """
        # Sections are immutable, so each is rebuilt once, with all of its new values.
        changed: dict[str, dict[str, Any]] = {}
        for name, value in flags.items():
            changed.setdefault(flag_names()[name], {})[name] = value
        sections: dict[str, Any] = {
            name: dataclasses.replace(section, **changed.get(name, {}))
            for name, section in self.sections.items()
        }
        extras = {name: sections.pop(name) for name in self.extras}
        return dataclasses.replace(self, **sections, extras=extras)

    @property
    def sections(self) -> dict[str, Section]:
        """All sections by name, those of extras last."""
        core = {name: section for name, section in vars(self).items() if name != "extras"}
        return {**core, **self.extras}

    def global_batch(self, num_events: int, world_size: int) -> int:
        """Return the number of events of a step of all processes.

        Args:
            num_events: Events of the training, which decide for --batch_size auto; 0 if not known.
            world_size: Number of processes.
        """
        loader = self.loader
        if loader.local_batch_size:
            return loader.local_batch_size * world_size
        if loader.batch_size != AUTO:
            return int(loader.batch_size)
        largest = LARGEST_BATCH_OF.get(self.model.task, LARGEST_BATCH)
        if self.stream.stream or not num_events:
            # A stream has no end that is known.
            return largest
        wanted = max(LEAST_BATCH, min(largest, num_events // STEPS_OF_AN_EPOCH))
        # The largest power of two up to it.
        return 1 << (wanted.bit_length() - 1)

    def rated_batch(self, num_events: int) -> int:
        """Return the batch that gives the tables their rate: --batch_size, and on few events a smaller one.

        In a step each row moves as if the others stayed. So with few large steps an epoch, and a rate that
        grows with the batch, predictions go too far: of 150,000 ratings in five steps, to an RMSE of 7.6.

        Args:
            num_events: As for `global_batch`.
        """
        batch = int(self.loader.batch_size)
        if self.stream.stream or not num_events:
            return batch
        return min(batch, max(LEAST_BATCH, num_events // STEPS_OF_AN_EPOCH))

    def with_global_batch(self, num_events: int, world_size: int) -> Config:
        """Return this configuration with `global_batch` as --batch_size: the one to record.

        Args:
            num_events: As for `global_batch`.
            world_size: As for `global_batch`.
        """
        return self.replaced(batch_size=self.global_batch(num_events, world_size), local_batch_size=0)

    @property
    def flags(self) -> dict[str, Any]:
        """The value of every flag, by its name."""
        # No two sections have a flag of the same name; a test checks this.
        return {name: value for section in self.sections.values() for name, value in vars(section).items()}

    @property
    def recorded(self) -> dict[str, dict[str, Any]]:
        """The value of every flag, by section, for a file; see `checked_flags`."""
        return {name: vars(section) for name, section in self.sections.items()}

    @property
    def reader(self) -> Any:
        """The module of an extra that reads the data, see `ExtraSection.reader`; None without one."""
        readers = (section.reader() for section in self.extras.values())
        return next((reader for reader in readers if reader is not None), None)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to run, in the order of a model's life."""
        flags = self.flags
        chosen = [mode for mode in ("compact", "load") if flags[mode]]
        # A --load beside a training runs after it, and evaluates the checkpoint it wrote.
        trains = not chosen or any(flags[mode] for mode in TRAINING)
        return (*(["train"] if trains else []), *chosen)

    @property
    def is_alone(self) -> bool:
        """True if one process does all the work, without a process group."""
        return any(self.flags[mode] for mode in alone_modes())

    @property
    def serves(self) -> bool:
        """True if the run uses the --checkpoint in --save_dir as a server does."""
        return any(self.flags[mode] for mode in serving_modes())

    def validate(self) -> None:
        """Refuse impossible values, each with its own message.

        Raises:
            UserError: For the first impossible value.
        """
        self._check_modes()
        for section in self.sections.values():
            section.validate()
        self._check_required()
        self._check_paths()
        self._check_together()

    def _check_modes(self) -> None:
        """Refuse modes that cannot run together, and flags of a mode that does not run."""
        flags = self.flags
        chosen = [mode for mode in (*alone_modes(), "compact", *TRAINING, "load") if flags[mode]]
        for other in chosen[1:]:
            if self.is_alone or (flags["compact"] and other in TRAINING):
                require(False, f"--{chosen[0]} and --{other} cannot be used together")
        for mode in alone_modes():
            require(not (self.data.rebuild and flags[mode]), f"--rebuild cannot be used with --{mode}")
        self.check_purpose(of_training=["follow_data"], of_results=["cutoffs"])
        for of_extra in self.extras.values():
            of_extra.check(self)
        section, serves = self.checkpoint, self.serves
        require(
            bool(section.load) or serves or section.is_default("checkpoint"),
            f"--checkpoint {section.checkpoint} requires a mode that reads it, such as --load or --export",
        )
        require(
            section.reads or serves or bool(section.warm_start) or not section.accept_changed_model,
            "--accept_changed_model requires a mode that reads a checkpoint, such as --load or --resume",
        )
        uses = section.writes or section.load or section.compact or serves
        require(
            bool(uses) or section.is_default("save_dir"),
            "--save_dir requires a mode that writes or reads checkpoints, such as --dump or --load",
        )

    def check_purpose(self, of_training: Iterable[str], of_results: Iterable[str]) -> None:
        """Refuse flags that a run does not use.

        Args:
            of_training: Flags of a training.
            of_results: Flags of a training or of --load.

        Raises:
            UserError: For the first such flag.
        """
        flags, trains = self.flags, "train" in self.modes and not self.serves
        for name in of_training:
            require(trains or not flags[name], f"--{name} requires a training; give --train too")
        measures = trains or (flags["load"] and not self.serves)
        for name in of_results:
            require(measures or not flags[name], f"--{name} requires a training or --load; give one of them")

    def _check_required(self) -> None:
        """Refuse flags without the flag that each requires."""
        flags = self.flags
        for section in self.sections.values():
            for name in vars(section):
                required = section.flag(name).requires
                if required is None or section.is_default(name):
                    continue
                other, value = required
                if value is True:
                    require(bool(flags[other]), f"--{name} requires --{other}")
                require(value in (True, flags[other]), f"--{name} requires --{other} {value}")

    def _check_paths(self) -> None:
        """Refuse URLs and files in place of folders."""
        flags, section = self.flags, self.checkpoint
        # One folder may be a link into the other.
        save_dir = realpath(section.save_dir)
        require(
            section.load in ("", NEWEST)
            or "train" not in self.modes
            or commonpath((save_dir, realpath(section.load))) == save_dir,
            f"--load {section.load} must be in --save_dir {section.save_dir}, where the requested training "
            "writes; give --load alone, or without a folder",
        )
        # A named data set is downloaded or generated in --data_path; the user's own tables may be a URL.
        names = ("data_path",) if self.data.dataset else ()
        for name in (*names, "export"):
            local(flags[name], name)
        for name in ("save_dir", "load", "warm_start", "cache_dir"):
            folder_at(flags[name], name)
        # The user's own tables may be one file; a named data set is a folder of several.
        for name in (*names, "cache_dir", "save_dir"):
            check_is_folder(flags[name], name)

    def _check_together(self) -> None:
        """Refuse flags of different sections that contradict each other."""
        data, model, loader = self.data, self.model, self.loader
        require(
            # While one rank waits for its worker, the others wait for that rank. Only it knows the reason.
            loader.num_workers == 0 or loader.worker_timeout < self.runtime.timeout,
            f"--worker_timeout must be below --timeout {self.runtime.timeout}, got {loader.worker_timeout}: "
            "otherwise other ranks give up before the silent worker is reported",
        )
        if self.stream.stream:
            require(
                not model.ranks,
                f"--task {model.task} cannot be used with --stream, which does not hold all training events",
            )
            require(model.initial_rows == "random", "--initial_rows gaussian cannot be used with --stream")
            require(not self.checkpoint.warm_start, "--warm_start is not for --stream; give --resume")
            require(data.is_default("day_feature"), "--day_feature cannot be used with --stream")
            require(
                not self.optimizer.decay_power,
                "--decay_power cannot be used with --stream, which has no passes",
            )
        require(
            not self.stream.topic or (not data.dataset and isdir(data.data_path)),
            "--stream kafka:// requires --data_path, a folder of this machine for schema.toml and for the "
            "tables of users and items",
        )
        decay = self.optimizer.weight_decay
        require(
            self.tables.row_precision == "fp32" or decay <= MOST_DECAY_OF_FP16,
            f"--row_precision fp16 requires --weight_decay of at most {MOST_DECAY_OF_FP16}, got {decay}",
        )
        require(
            not model.ranks or self.optimizer.l2 == 0,
            f"--l2 requires --task rating or response, got {model.task}",
        )
        require(not model.reads_order or data.history > 0, "--task sequence requires --history above 0")
        if model.learns_history_weights:
            require(
                model.ranks and not model.reads_order,
                f"--history_weights learned requires --task ranking, got {model.task}",
            )
            require(data.history > 0, "--history_weights learned requires --history above 0")
        require(
            # The default stands for the best known value, which is none.
            model.block == SAS or not model.mlp_dims or model.is_default("mlp_dims"),
            f"--mlp_dims requires --block sas, got {model.block}",
        )


@dataclass(frozen=True)
class ExtraSection(Section):
    """Flags of an extra, and what the core asks of it: by default nothing.

    Its module is in `hooks.SECTIONS`. Every command line imports it, so its methods import the heavy modules.
    The types of higher layers are `Any` here.
    """

    # Flags that are modes: one process runs them alone, without a process group, see `run_alone`.
    modes: ClassVar[tuple[str, ...]] = ()
    # True if these modes use the --checkpoint in --save_dir.
    serves: ClassVar[bool] = False
    # Flags that decide the events, which a checkpoint keeps.
    data_flags: ClassVar[tuple[str, ...]] = ()

    def check(self, config: Config) -> None:
        """Refuse flags that contradict those of other sections.

        Raises:
            UserError: for the first fault found.
        """

    def run_alone(self, config: Config, given: Collection[str], model: Any) -> int:
        """Run a mode of `modes`, and return the exit status. Not collective.

        given: the flags of the command line; model: makes the model of the script.
        """
        raise NotImplementedError

    def reader(self) -> Any:
        """Return a module that reads the data instead of the core; None to leave it to the core.

        It has `open_columns(config, context)`, collective, and a subclass `Batches` of `EventBatches`.
        """
        return None

    def observers(self, config: Config, context: Any) -> Iterable[Any]:
        """Yield callbacks and trackers of a training, on rank 0."""
        return ()

    def segments(self, columns: Any) -> Sequence[Any]:
        """Return segments of the test events: each has a name, and `masks()` by value."""
        return ()

    def report_training(self, run: Any, seconds: Mapping[str, float], config: Config, context: Any) -> None:
        """Write the results of a training, on rank 0. seconds: of its parts."""

    def report_test(self, test: Any, columns: Any, config: Config) -> None:
        """Write the test of a loaded checkpoint, on rank 0."""

    def add_to_export(self, folder: Any, snapshot: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Return more files of an export, and more fields of its manifest; may replace the arrays."""
        return (), {}


def check_is_folder(path: str, name: str) -> None:
    """Refuse a file where a flag needs a folder, which need not exist. name: of the flag.

    Raises:
        UserError: with the path.
    """
    # A folder without read permission passes here: the code that opens it reports the reason.
    require(not exists(path) or isdir(path), f"--{name} must be a folder, got the file {path}")


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """The sections by their names, in the order of --help_all."""
    return {name: type(section) for name, section in Config().sections.items()}


@functools.cache
def flag_names() -> Mapping[str, str]:
    """The section of every flag, by the name of the flag."""
    return {field.name: name for name, section in sections().items() for field in dataclasses.fields(section)}


@functools.cache
def alone_modes() -> tuple[str, ...]:
    """Modes that one process runs alone, without a process group."""
    return (*(mode for kind in hooks.sections().values() for mode in kind.modes), "export")


@functools.cache
def serving_modes() -> tuple[str, ...]:
    """Modes that use the --checkpoint in --save_dir as a server does."""
    return ("export", *(mode for kind in hooks.sections().values() if kind.serves for mode in kind.modes))


@functools.cache
def extra_data_flags() -> tuple[str, ...]:
    """Flags of extras that decide the events, which a checkpoint keeps."""
    return tuple(name for kind in hooks.sections().values() for name in kind.data_flags)


@functools.cache
def machine_flags() -> tuple[str, ...]:
    """Flags that may differ between machines: paths of data, workers, and reports."""
    return tuple(name for name, section in flag_names().items() if sections()[section].flag(name).per_machine)
