"""The whole configuration: its sections, and the rules between them.

Does not import torch or read the environment. Reads only the files that a flag names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import commonpath, exists, isdir, realpath
from typing import Any

from recsuite.config.presets import AUTO
from recsuite.config.sections import (
    LARGEST_BATCH,
    LARGEST_BATCH_OF,
    LEAST_BATCH,
    MOST_CUTOFF,
    NEWEST,
    SAS,
    STEPS_OF_AN_EPOCH,
    CheckpointConfig,
    DataConfig,
    LoaderConfig,
    ModelConfig,
    MonitoringConfig,
    OptimizerConfig,
    RuntimeConfig,
    Section,
    ServingConfig,
    StreamConfig,
    TablesConfig,
    TrainingConfig,
)
from recsuite.errors import require
from recsuite.files import local
from recsuite.places import folder_at, is_remote

# Modes that train, and modes that one process runs alone, without a process group.
TRAINING = ("train", "dump", "inc_dump", "resume")
ALONE = ("doctor", "schema", "export", "recommend")


@dataclass(frozen=True)
class Config:
    """Configuration of a run: one section of flags for each subject. A function takes the section it reads.

    data, loader, tables, model, optimizer, training, stream, checkpoint, serving, monitoring, runtime: the
    sections, see docs/flags.md; each flag is a field of one of them.

    Raises:
        UserError: from `validate`, for impossible values.

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
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @classmethod
    def of(cls, **flags: Any) -> Config:
        """Return the defaults with some flags, as in `Config.of(epochs=2, batch_size=512)`; not checked."""
        return cls().replaced(**flags)

    def replaced(self, **flags: Any) -> Config:
        """Return this configuration with other values of some flags; not checked."""
        # Sections are immutable, so each is rebuilt once, with all of its new values.
        changed: dict[str, dict[str, Any]] = {}
        for name, value in flags.items():
            changed.setdefault(flag_names()[name], {})[name] = value
        sections = {
            section: dataclasses.replace(getattr(self, section), **values)
            for section, values in changed.items()
        }
        return dataclasses.replace(self, **sections)

    def global_batch(self, num_events: int, world_size: int) -> int:
        """Return the number of events of a step of all processes.

        num_events: of the training, which decide for --batch_size auto; 0 where they are not known.
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

    def with_global_batch(self, num_events: int, world_size: int) -> Config:
        """Return this configuration with `global_batch` as --batch_size: the one to record."""
        return self.replaced(batch_size=self.global_batch(num_events, world_size), local_batch_size=0)

    @property
    def flags(self) -> dict[str, Any]:
        """The value of every flag, by its name."""
        # No two sections have a flag of the same name; a test checks this.
        return {name: value for section in vars(self).values() for name, value in vars(section).items()}

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
        return any(self.flags[mode] for mode in ALONE)

    def validate(self) -> None:
        """Refuse impossible values, each with its own message.

        Raises:
            UserError: for the first fault found.
        """
        self._check_modes()
        for section in vars(self).values():
            section.validate()
        self._check_required()
        self._check_paths()
        self._check_together()

    def _check_modes(self) -> None:
        """Refuse modes that cannot run together, and flags of a mode that does not run."""
        flags = self.flags
        chosen = [mode for mode in (*ALONE, "compact", *TRAINING, "load") if flags[mode]]
        for other in chosen[1:]:
            if self.is_alone or (flags["compact"] and other in TRAINING):
                require(False, f"--{chosen[0]} and --{other} cannot be used together")
        for mode in ALONE:
            require(not (self.data.rebuild and flags[mode]), f"--rebuild cannot be used with --{mode}")
        serves = bool(flags["export"] or flags["recommend"])
        trains = "train" in self.modes and not serves
        for name in ("follow_data", "profile", "tensorboard"):
            require(trains or not flags[name], f"--{name} requires a training; give --train too")
        for name in ("report_dir", "by", "cutoffs"):
            measures = (trains or flags["load"]) and not serves
            require(measures or not flags[name], f"--{name} requires a training or --load; give one of them")
        section = self.checkpoint
        require(
            bool(section.load) or serves or section.is_default("checkpoint"),
            f"--checkpoint {section.checkpoint} requires --load, --export or --recommend",
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

    def _check_required(self) -> None:
        """Refuse flags without the flag that each requires."""
        flags = self.flags
        for section in vars(self).values():
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
        for name in ("save_dir", "load", "warm_start", "report_dir", "cache_dir"):
            folder_at(flags[name], name)
        for name in ("profile", "tensorboard"):
            require(
                not (flags[name] and is_remote(self.monitoring.report_dir)),
                f"--{name} requires a --report_dir on this machine, got {self.monitoring.report_dir}",
            )
        # A folder without read permission passes here: the code that opens it reports the reason.
        # The user's own tables may be one file; a named data set is a folder of several.
        for name in (*names, "cache_dir", "report_dir", "save_dir"):
            path = flags[name]
            require(not exists(path) or isdir(path), f"--{name} must be a folder, got the file {path}")

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
            require(not self.monitoring.by, "--by cannot be used with --stream, which has no test")
            require(not self.checkpoint.warm_start, "--warm_start is not for --stream; give --resume")
            require(data.is_default("day_feature"), "--day_feature cannot be used with --stream")
            require(
                not self.optimizer.decay_power,
                "--decay_power cannot be used with --stream, which has no passes",
            )
        require(
            not self.stream.topic or (not data.dataset and isdir(data.data_path)),
            "--stream kafka:// requires --data_path, a folder of this machine for a copy of the messages and "
            "for schema.toml",
        )
        cutoffs = self.monitoring.cutoffs
        for cutoff in cutoffs:
            require(
                1 <= cutoff <= MOST_CUTOFF, f"--cutoffs must be between 1 and {MOST_CUTOFF:,}, got {cutoff}"
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


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """The sections by their names, in the order of --help_all."""
    return {name: type(section) for name, section in vars(Config()).items()}


@functools.cache
def flag_names() -> Mapping[str, str]:
    """The section of every flag, by the name of the flag."""
    return {field.name: name for name, section in sections().items() for field in dataclasses.fields(section)}
