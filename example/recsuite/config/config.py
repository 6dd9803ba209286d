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

from recsuite.config.presets import as_given
from recsuite.config.sections import (
    NEWEST,
    SAS,
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
    require,
)
from recsuite.files import local

# Of --weight_decay in all passes: rows are stored divided by their decay, which must fit a float32.
MOST_DECAY = 60
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
        flags = self.flags
        chosen = [mode for mode in (*ALONE, "compact", *TRAINING, "load") if flags[mode]]
        excluded = [mode for mode in chosen[1:] if self.is_alone or (flags["compact"] and mode in TRAINING)]
        for other in excluded:
            require(False, f"--{chosen[0]} and --{other} exclude each other; give one of them")
        for mode in ALONE:
            require(
                not (self.data.rebuild and flags[mode]),
                f"--rebuild makes columns again, and --{mode} makes none; leave it out",
            )
        reads = bool(flags["load"] or flags["export"] or flags["recommend"])
        require(
            reads or self.checkpoint.is_default("checkpoint"),
            f"--checkpoint {self.checkpoint.checkpoint} says what is read, and nothing is; give --load too",
        )
        trains = "train" in self.modes and not (flags["export"] or flags["recommend"])
        require(
            trains or not self.stream.follow_data,
            "--follow_data waits for more to train on, and no training is asked for; leave it out",
        )
        for name in ("report_dir", "profile", "tensorboard"):
            require(
                trains or self.monitoring.is_default(name),
                f"--{name} looks at a training, and none is asked for; give --train too",
            )
        for part in vars(self).values():
            part.validate()
        section = self.checkpoint
        uses = section.writes or section.load or section.compact or flags["export"] or flags["recommend"]
        require(
            bool(uses) or section.is_default("save_dir"),
            f"--save_dir {section.save_dir} is for checkpoints, and none are written or read; give --dump or "
            "--load too",
        )
        # One folder may be a link into the other.
        save_dir = realpath(section.save_dir)
        require(
            section.load in ("", NEWEST)
            or "train" not in self.modes
            or commonpath((save_dir, realpath(section.load))) == save_dir,
            f"--load {section.load} is outside --save_dir {section.save_dir}, where the requested training "
            "writes; give --load alone, or without a folder",
        )
        # A named data set is downloaded or generated in --data_path; the user's own tables may be a URL.
        names = ("data_path",) if self.data.dataset else ()
        for name in (*names, "cache_dir", "save_dir", "load", "export", "report_dir"):
            local(flags[name], name)
        # A folder without read permission passes here: the code that opens it reports the reason.
        # The user's own tables may be one file; a named data set is a folder of several.
        for name in (*names, "cache_dir", "report_dir", "save_dir"):
            path = flags[name]
            require(not exists(path) or isdir(path), f"--{name} {path} is a file; give a folder")
        loader, timeout = self.loader, self.runtime.timeout
        require(
            # While one rank waits for its worker, the others wait for that rank. Only it knows the reason.
            loader.num_workers == 0 or loader.worker_timeout < timeout,
            f"--worker_timeout {loader.worker_timeout} is not below --timeout {timeout}, so other ranks "
            "would give up before a silent worker is named; give a smaller one",
        )
        require(
            not self.stream.stream or self.model.task != "ranking",
            "--task ranking and --stream exclude each other: a ranking corrects for how often an item is "
            "chosen in all of its training, which a stream does not know; leave one out",
        )
        require(
            not self.stream.stream or not self.model.reads_order,
            "--task sequence and --stream exclude each other: a sequence is read from its begin, and a "
            "stream brings pieces of many; leave one out",
        )
        require(
            not self.model.reads_order or self.data.history > 0,
            "--task sequence reads what a user had, and --history 0 is nothing; leave one out",
        )
        require(
            not self.model.learns_history_weights or self.model.competitors > 0,
            f"--history_weights learned is for --task ranking, not --task {self.model.task}; leave it out",
        )
        require(
            not self.model.learns_history_weights or self.data.history > 0,
            "--history_weights learned weighs items of a history, and --history 0 has none; leave one out",
        )
        require(
            # The default stands for the best known value, which is none.
            self.model.block == SAS or not self.model.mlp_dims or self.model.is_default("mlp_dims"),
            f"--mlp_dims {as_given(self.model.mlp_dims)} are the layers of --block sas, and --block "
            f"{self.model.block} has none; give none",
        )
        for name in ("audience", "others"):
            value = flags[name]
            require(
                value == 0 or self.model.task == "rating",
                f"--{name} {value} is for --task rating, and not for --task {self.model.task}; leave it out",
            )
        require(
            self.data.others == 0 or self.data.is_unordered,
            f"--others {self.data.others} tells of what came later than a rating, which --split "
            f"{self.data.split} does not allow; leave it out, or give --split random",
        )
        require(
            self.data.others == 0 or not self.stream.stream,
            f"--others {self.data.others} and --stream exclude each other: a stream knows what came before "
            "alone; leave one out",
        )
        require(
            self.data.days == "none" or not self.stream.stream,
            f"--days {self.data.days} and --stream exclude each other: to a stream every day is a new one; "
            "leave one out",
        )
        decay, epochs = self.optimizer.weight_decay, self.training.epochs
        require(
            # Half, because the rate falls to zero.
            0 <= decay * epochs / 2 <= MOST_DECAY,
            f"--weight_decay {decay} over --epochs {epochs} leaves nothing of a row; give 0 "
            f"to {2 * MOST_DECAY} / --epochs",
        )


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """The sections by their names, in the order of --help."""
    return {name: type(section) for name, section in vars(Config()).items()}


@functools.cache
def flag_names() -> Mapping[str, str]:
    """The section of every flag, by the name of the flag."""
    return {field.name: name for name, section in sections().items() for field in dataclasses.fields(section)}
