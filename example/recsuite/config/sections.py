"""The flags: one section for each subject, with the limits of each flag."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os.path import exists
from pathlib import Path

from recsuite.config.flag import Section, flag
from recsuite.config.presets import AUTO, NONE, PRESETS
from recsuite.config.units import Duration, duration, size_of
from recsuite.errors import require, script_name
from recsuite.hooks import INITIAL_ROWS

# Storage of tables in the host's memory, which a GPU reads.
UVM, UVM_CACHING = "uvm", "uvm_caching"
NO_SPLIT = "none"
OFFICIAL_SPLITS = ("u1", "u2", "u3", "u4", "u5", "ua", "ub")
# Named here too: the configuration is a lower layer than the data sets, and must not import them.
DATASETS = (
    "synthetic",
    "ml-100k",
    "ml-1m",
    "ml-10m",
    "ml-20m",
    "ml-25m",
    "ml-32m",
    "ml-latest-small",
    "ml-latest",
)


# Of --validation_fraction auto. Validation events are not trained on, and a hundredth of many is enough to
# choose an epoch. A hundredth of few chooses one by chance.
SHARE_OF_VALIDATION, LEAST_VALIDATION, MOST_OF_VALIDATION = 0.01, 800, 0.1
# Fewer are said to be few.
FEW_VALIDATION = 500


@dataclass(frozen=True)
class DataConfig(Section):
    """Ratings to read, and their split into training, validation and test."""

    dataset: str = flag(
        "",
        "Data set: a MovieLens set, which is downloaded if it is absent, or synthetic. Without it the files "
        "in --data_path are read; without both the data are synthetic.",
        choices=DATASETS,
    )
    data_path: str = flag(
        "",
        "Folder with the files, or for the downloaded ones; or your own tables: a folder, a file or a URL, "
        "see docs/your_data.md. Default: data/NAME in the repository, or in the working directory of an "
        "installed library.",
        per_machine=True,
    )
    cache_dir: str = flag(
        "",
        "Folder for the columns made from the files. Default: .columns beside the files. With a URL of an "
        "object store they are also copied there, and taken from there.",
        per_machine=True,
    )
    rebuild: bool = flag(
        False,
        "Make the columns again even if they are complete, once for each launch including its restarts.",
    )
    synthetic_ratings: int = flag(
        1_000_000, "Number of ratings in the synthetic data set.", least=1_000, most=1_000_000_000
    )
    synthetic_kind: str = flag(
        "stationary",
        "Kind of synthetic data: users, items and tastes that do not change (stationary), or users and items "
        "that come and go, and tastes that drift (drifting).",
        choices=("stationary", "drifting"),
    )
    split: str = flag(
        "time",
        "Test ratings: the newest (time), a random sample (random), the newest of each user (leave_one_out), "
        "files of your own tables with test in their names (files), an official split of ml-100k, or none: "
        "all ratings are for training.",
        choices=("time", "random", "leave_one_out", "files", NO_SPLIT, *OFFICIAL_SPLITS),
    )
    order: str = flag(
        "time",
        "Order of the events of your own tables: that of their times (time) or, for tables without times, "
        "that of the files and their rows (rows).",
        choices=("time", "rows"),
    )
    test_fraction: float = flag(0.2, "Share of the ratings in the test, for --split time and random.")
    validation_fraction: float | str = flag(
        AUTO,
        "Share of the remaining ratings that is used for validation instead of training, of initial rows and "
        f"after every epoch. auto: {SHARE_OF_VALIDATION:.0%}, but at least {LEAST_VALIDATION} ratings, or "
        f"{MOST_OF_VALIDATION:.0%} of fewer. 0 means no validation and no early stopping.",
        choices=(AUTO,),
        least=0,
        most=1,
    )
    bad_rows: str = flag(
        "error",
        "How to handle unreadable rows: stop with an error (error), or skip and count them (skip).",
        choices=("error", "skip"),
    )
    # The data sets of GroupLens have no bad row. A file with more than a few is read in the wrong format.
    max_bad_rows: float = flag(
        0.01,
        "Largest share of the rows of a file that --bad_rows skip may skip.",
        least=0,
        most=1,
        requires=("bad_rows", "skip"),
    )
    # Several ratings of one pair would lie on both sides of a random split: leakage of training into the
    # test. The last rating is the one a served model would know. Of clicks the first is kept: with the last,
    # an item would leave the training of a user who had it before, and the model would learn that it is
    # still to come.
    duplicates: str = flag(
        "auto",
        "Which of several events of one user and one item to keep: the last, the first, their mean with the "
        "time of the last, or all of them (keep). auto keeps all if the events have several types, the first "
        "for clicks and counts if the test is newer than the training, and otherwise the last.",
        choices=("auto", "last", "first", "mean", "keep"),
    )
    seen: str = flag(
        "auto",
        "Items that a user has had before, in a ranking: exclude them from negatives, rankings and "
        "recommendations (exclude), or treat them like all others (allow). auto allows them if a tenth of "
        "the training events are repeats, which requires --duplicates keep. Serving uses the same rule.",
        choices=("auto", "exclude", "allow"),
    )
    new_items: str = flag(
        "exclude",
        "Items that no training event has: in no list (exclude), or listed by their features (include), and "
        "a ranking then trains these for them. Evaluation, recommendations and servers use the same rule.",
        choices=("exclude", "include"),
    )
    history: int = flag(
        30,
        "Length of the user history: items that the user rated last before a rating, each with its rating; 0 "
        "means none.",
        least=0,
        most=10_000,
    )
    day_feature: str = flag(
        "none",
        "Feature for the day of a rating: a row for each day of each user (user), or none.",
        choices=("none", "user"),
    )

    def num_validation(self, number: int) -> int:
        """Return the number of validation events of `number` events outside the test."""
        if self.split == NO_SPLIT:
            return 0
        if not isinstance(self.validation_fraction, str):
            return round(number * self.validation_fraction)
        few = min(LEAST_VALIDATION, round(number * MOST_OF_VALIDATION))
        return max(few, round(number * SHARE_OF_VALIDATION))

    def duplicates_of(self, label_kind: str, has_types: bool) -> str:
        """Return which event of a (user, item) pair to keep, for a kind of label in `schema.LABEL_KINDS`.

        has_types: True if the events have several types.
        """
        # Test files are kept unchanged.
        if self.split == "files":
            return "keep"
        if self.duplicates != "auto":
            return self.duplicates
        # What was bought after a view is often bought again.
        if has_types:
            return "keep"
        return "first" if label_kind in ("clicks", "count") and not self.is_unordered else "last"

    @property
    def is_unordered(self) -> bool:
        """True if later events are no leakage, because the test is not later than the training."""
        return self.split == "random" or self.split in OFFICIAL_SPLITS

    @property
    def is_synthetic(self) -> bool:
        """True if the ratings are synthetic, not read from existing files."""
        return self.dataset == "synthetic" or not (self.dataset or self.data_path)

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            0 < self.test_fraction < 1,
            f"--test_fraction must be above 0 and below 1, got {self.test_fraction}",
        )
        require(
            self.validation_fraction != 1,
            f"--validation_fraction must be below 1, got {self.validation_fraction}: it leaves nothing "
            "for training",
        )
        require(
            self.is_synthetic or self.is_default("synthetic_kind"),
            f"--synthetic_kind {self.synthetic_kind} requires --dataset synthetic",
        )
        require(
            self.split != "files" or self.is_default("duplicates") or self.duplicates == "keep",
            f"--split files requires --duplicates keep, got {self.duplicates}: the test files stay unchanged",
        )
        require(
            self.split not in OFFICIAL_SPLITS or self.dataset in ("", "ml-100k"),
            f"--split {self.split} requires --dataset ml-100k, got {self.dataset}",
        )
        require(
            not self.data_path or bool(self.dataset) or "://" in self.data_path or exists(self.data_path),
            f"Cannot read --data_path {self.data_path}: no such file or folder. Fix: give the folder or file "
            "of your data, or --dataset NAME to download a set there",
        )


# Limits of --batch_size auto. Fewer, larger steps learn less of small data, and smaller ones take longer.
# Rankings and sequences learn less from large batches than labels do.
STEPS_OF_AN_EPOCH = 50
LEAST_BATCH, LARGEST_BATCH, LARGEST_BATCH_OF = 64, 2048, {"ranking": 512, "sequence": 1024}


@dataclass(frozen=True)
class LoaderConfig(Section):
    """Batches, and the workers that make them."""

    batch_size: int | str = flag(
        AUTO,
        "Events of a step, shared by all processes. auto: the largest power of two with at least "
        f"{STEPS_OF_AN_EPOCH} steps an epoch, from {LEAST_BATCH} to {LARGEST_BATCH:,}, of a ranking to "
        f"{LARGEST_BATCH_OF['ranking']:,}, of sequences to {LARGEST_BATCH_OF['sequence']:,}; for a stream "
        "the largest.",
        choices=(AUTO,),
        least=1,
        most=2**24,
    )
    local_batch_size: int = flag(
        0,
        "Events of a step of each process, instead of --batch_size; 0 means an equal part of that.",
        least=0,
        most=2**24,
    )
    # With columns in memory one process makes batches faster than the ranks train on them. Workers pay off
    # if a row costs processor time, see docs/loader.md.
    num_workers: int | str = flag(
        0,
        "Worker processes per rank that make batches; 0 makes them in the main process, auto measures some "
        "steps and then decides.",
        choices=(AUTO,),
        least=0,
        most=1024,
        per_machine=True,
    )
    # A forked worker inherits the locks of the trainer's threads, held or not, and a CUDA context that it
    # cannot use or free.
    mp_context: str = flag(
        "spawn",
        "Start method of workers: spawn, forkserver (starts a second pool faster), or fork (refused once "
        "CUDA is initialised).",
        choices=("spawn", "forkserver", "fork"),
        per_machine=True,
    )
    prefetch_factor: int = flag(
        2, "Batches that each worker makes ahead.", least=1, most=64, per_machine=True
    )
    # Below --timeout, so that a silent worker is reported before other ranks give up waiting for this one.
    worker_timeout: int = flag(
        120, "Seconds that a rank waits for a worker's batch.", least=1, per_machine=True
    )

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            self.batch_size == AUTO or self.local_batch_size == 0,
            "--batch_size and --local_batch_size cannot be used together",
        )


# One part of --capacity: a number of rows, a share of the memory, or as many rows as the data need.
PLACES = re.compile(r"[0-9]{1,19}", re.ASCII)
SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
MOST_PLACES = 2**40


@dataclass(frozen=True)
class TablesConfig(Section):
    """Embedding tables: fixed vocabularies and dynamic tables."""

    vocabulary: str = flag(
        "schema",
        "Vocabulary of users, items and other categories: the values in the training (fixed), any id, each "
        "inserted when it is first seen (dynamic), or as the schema says for each feature (schema).",
        choices=("schema", "fixed", "dynamic"),
    )
    capacity: str = flag(
        AUTO,
        "Rows of a dynamic table: a number, a share of the memory for tables such as 25%, auto for twice the "
        "ids in the data (not for a stream, whose ids are unknown), or NAME=VALUE for single tables, "
        "separated by commas.",
    )
    admission_threshold: int = flag(
        1,
        "Training steps that must contain an id before a dynamic table inserts it.",
        least=1,
        most=1_000_000,
    )
    eviction: str = flag(
        "lru",
        "Eviction policy for a full bucket of a dynamic table: the least recently used id (lru), the least "
        "frequently used (lfu), expired ids only (ttl), or no eviction (none).",
        choices=("lru", "lfu", "ttl", "none"),
    )
    ttl: str = flag(
        "0",
        "Time to live of a row of a dynamic table since its id was last seen: a number of steps or, with "
        "--stream, a time such as 90d; 0 means forever.",
    )
    half_life: str = flag(
        "0", "Time after which the counts of --eviction lfu are halved, in the unit of --ttl; 0 means never."
    )
    distribution: str = flag(
        "continuous",
        "Distribution of a dynamic table over the ranks: a range each (continuous), in turn (roundrobin), or "
        "by hash; it changes no result.",
        choices=("continuous", "roundrobin", "hash"),
    )
    max_load_factor: float = flag(
        0.75,
        "Share of used rows above which the capacity of a dynamic table is doubled; 0 means never.",
        least=0,
        most=1,
    )
    max_growth: int = flag(
        8,
        "Largest capacity of a dynamic table, as a multiple of --capacity; memory is planned for it, and "
        "used when rows are inserted.",
        least=1,
        most=1024,
    )

    storage: str = flag(
        "memory",
        "Where tables are: in memory (memory). On a CPU also on a disk: those for which --memory_budget has "
        "no room (disk), or those of these names, separated by commas; dynamic tables if any is. On a GPU "
        "also in the memory of the host: those for which the GPU has no room (uvm), or, as the planner "
        "prefers, more of them with a cache on the GPU (uvm_caching). It changes no result.",
    )
    cache_load_factor: float = flag(
        0.2,
        "Share of the rows of a table of --storage uvm_caching in the cache on the GPU.",
        least=0.001,
        most=1,
        requires=("storage", UVM_CACHING),
    )
    row_precision: str = flag(
        "fp32",
        "Precision of the rows of tables: fp16 halves their bytes. A GPU rounds them stochastically, a CPU, "
        "with --cpu_tables torchrec, to the nearest number. Looked-up rows, the state of the optimizer and "
        "checkpoints stay fp32. --load takes its own flag. Not for dynamic tables.",
        choices=("fp32", "fp16"),
    )
    memory_budget: str = flag(
        "",
        "Memory of a rank for tables, and for rows of tables that are elsewhere, such as 512MB or 8GB. "
        "Default: 1GB on a CPU, all of a GPU.",
    )
    storage_dir: str = flag(
        "", "Folder on a local disk for tables, whose files end with the process. Default: TMPDIR or /tmp."
    )

    @property
    def weight_bytes(self) -> int:
        """Bytes of a number in a row."""
        return 2 if self.row_precision == "fp16" else 4

    @property
    def is_on_disk(self) -> bool:
        """True if tables may be on a disk."""
        return self.storage not in ("memory", UVM, UVM_CACHING)

    @property
    def folder(self) -> str:
        """Folder of tables on a disk."""
        return self.storage_dir or tempfile.gettempdir()

    @property
    def tables_on_disk(self) -> list[str]:
        """Names of tables in --storage; empty if the sizes decide."""
        return [] if self.storage in ("memory", "disk") else self.storage.split(",")

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        self.capacities()
        if self.memory_budget:
            size_of(self.memory_budget, "memory_budget")
            require(self.storage != "memory", "--memory_budget requires another --storage than memory")
        require(
            not self.is_on_disk or "%" not in self.capacity,
            f"--capacity {self.capacity} is a share of the memory, and --storage {self.storage} is not in "
            "memory; give numbers of rows",
        )
        require(
            self.is_on_disk or not self.storage_dir,
            f"--storage_dir requires --storage disk, got {self.storage}",
        )
        require(self.eviction != "ttl" or self.expiry.amount > 0, "--eviction ttl requires --ttl above 0")
        require(
            self.eviction == "lfu" or self.halving.amount == 0,
            f"--half_life requires --eviction lfu, got {self.eviction}",
        )
        units = {part.is_time for part in (self.expiry, self.halving) if part.amount}
        require(
            len(units) < 2,
            f"--ttl {self.ttl} and --half_life {self.half_life} must both be times or both be steps",
        )

    @property
    def expiry(self) -> Duration:
        """Parsed --ttl."""
        return duration("ttl", self.ttl, "steps")

    @property
    def halving(self) -> Duration:
        """Parsed --half_life."""
        return duration("half_life", self.half_life, "steps")

    @property
    def unit(self) -> str:
        """Unit of both: "seconds" of the events' time, or "steps"."""
        return "seconds" if self.expiry.is_time or self.halving.is_time else "steps"

    def capacities(self) -> Mapping[str, str]:
        """Parsed --capacity: by table name, and under the name "" for all other tables.

        Raises:
            UserError: for a value that is not a number, a share or auto.
        """
        # A comma separates the parts, so numbers have none.
        capacities = {"": AUTO}
        for part in self.capacity.split(","):
            name, _, value = part.strip().rpartition("=")
            share = SHARE.fullmatch(value)
            is_number = PLACES.fullmatch(value) and 1 <= int(value) <= MOST_PLACES
            require(
                value == AUTO or bool(0 < float(share[1]) <= 100 if share else is_number),
                f"--capacity must be a number between 1 and {MOST_PLACES:,}, a share of the memory such as "
                f"25%, or auto, got {value or 'nothing'} in {self.capacity}",
            )
            capacities[name] = value
        return capacities


MOST_CUTOFF = 1_000_000
# Events of a batch whose items are in-batch negatives for each other, for ranking tasks. A step costs this
# times the batch, in time and in memory. A multiple of 8.
IN_BATCH_NEGATIVES = 256
# Weights of the items of a history: equal, or learned from their position and age.
EQUAL, LEARNED = HISTORY_WEIGHTS = ("equal", "learned")
# Blocks of a sequence model, see `recsuite.models.sequences`.
SAS, HSTU = BLOCKS = ("sas", "hstu")
# Limits of --mlp_dims.
MAX_WIDTH, MAX_LAYERS = 2**14, 100
MAX_EMBEDDING_DIM = 2**14


@dataclass(frozen=True)
class ModelConfig(Section):
    """Task and size of the model.

    The fields task, embedding_dim, mlp_dims, history_weights, negatives, block, num_blocks, num_heads,
    dropout, initial_rows and preset are flags, see docs/flags.md.

    Raises:
        UserError: From `validate`, for impossible values.

    Example:
        def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
            return RatingModel(data, args.embedding_dim, args.mlp_dims)
    """

    # Tasks are defined in `models/tasks.py`, which imports torch; only their names are here.
    task: str = flag(
        "rating",
        "Task: predict the rating (rating), rank the item that a user chooses (ranking), rank the next item "
        "from the order of a user history (sequence), or predict the probability of a yes (response). "
        "Default with --data_path: the task that fits its labels.",
        choices=("rating", "ranking", "response", "sequence"),
    )
    embedding_dim: int = flag(
        32,
        "Width of a table row, a multiple of 4: the first number is a bias, the others are factors.",
        least=4,
        most=MAX_EMBEDDING_DIM,
    )
    mlp_dims: tuple[int, ...] = flag(
        (64, 32), "Widths of the hidden layers of the MLP, separated by commas, or none."
    )
    history_weights: str = flag(
        EQUAL,
        "Weights of the items of a user history, for --task ranking: equal, or learned from their positions "
        "and ages.",
        choices=HISTORY_WEIGHTS,
    )
    negatives: int = flag(
        0,
        "Negatives drawn in each step for --task ranking and sequence, the same for all ranks; a ranking "
        "also has in-batch negatives. 0 means none, for a sequence all items.",
        least=0,
        most=2**20,
    )
    block: str = flag(
        SAS,
        "Block of the transformer of --task sequence: attention and layers of widths --mlp_dims (sas), or "
        "pointwise attention with a gate (hstu).",
        choices=BLOCKS,
        requires=("task", "sequence"),
    )
    num_blocks: int = flag(
        2, "Number of blocks of the transformer.", least=1, most=100, requires=("task", "sequence")
    )
    num_heads: int = flag(
        2,
        "Heads of the attention; --embedding_dim must be a multiple of it.",
        least=1,
        most=2**10,
        requires=("task", "sequence"),
    )
    dropout: float = flag(0.2, "Dropout rate of the transformer.", requires=("task", "sequence"))
    initial_rows: str = flag(
        "random",
        "Initial rows of the tables: drawn (random; with solved biases if --preset rating has few), or "
        "those of a Gaussian model of the training ratings, solved before the first epoch (gaussian), for "
        "models that add up rows.",
        choices=("random", *INITIAL_ROWS),
        requires=("task", "rating"),
    )
    preset: str = flag(
        AUTO,
        "Preset: a named group of values for flags that are not given, listed in docs/flags.md and at the "
        "end of --help_all. auto uses the preset that fits --task and the given flags, if there is one, and "
        "prints it; none uses no preset. A checkpoint keeps its values.",
        choices=(AUTO, *PRESETS, NONE),
    )

    @property
    def in_batch_negatives(self) -> int:
        """Number of events of a batch that share in-batch negatives, see `IN_BATCH_NEGATIVES`; 0 for label
        tasks.
        """
        # A batch of sequences has events of few users, which make poor negatives for each other.
        return IN_BATCH_NEGATIVES if self.ranks and not self.reads_order else 0

    def num_negatives(self, num_items: int) -> int:
        """Return the maximum number of negatives drawn for a step.

        Args:
            num_items: Number of items of the data.
        """
        # A sequence task has no in-batch negatives.
        return num_items if self.reads_order and self.negatives == 0 else min(self.negatives, num_items)

    @property
    def ranks(self) -> bool:
        """True if the model learns which item is chosen, not a label."""
        return self.task not in ("rating", "response")

    @property
    def reads_order(self) -> bool:
        """True if the order of a user history matters, and batches are runs of it."""
        return self.task == "sequence"

    @property
    def learns_history_weights(self) -> bool:
        """True if the model reads the age of each item of a history."""
        return self.history_weights == LEARNED

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: For the first impossible value.
        """
        super().validate()
        widths = ",".join(map(str, self.mlp_dims))
        require(
            self.embedding_dim % 4 == 0,
            f"--embedding_dim must be a multiple of 4 for FBGEMM's kernels, got {self.embedding_dim}",
        )
        require(
            all(1 <= width <= MAX_WIDTH for width in self.mlp_dims) and len(self.mlp_dims) <= MAX_LAYERS,
            f"--mlp_dims must be at most {MAX_LAYERS} widths between 1 and {MAX_WIDTH:,}, got {widths}",
        )
        require(
            self.ranks or self.negatives == 0,
            f"--negatives requires --task ranking or sequence, got {self.task}",
        )
        require(0 <= self.dropout < 1, f"--dropout must be at least 0 and below 1, got {self.dropout}")


# Of --weight_decay in a pass: rows are stored divided by their decay, which must fit a float32 after it, or
# a float16.
MOST_DECAY, MOST_DECAY_OF_FP16 = 20, 5


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Learning rates and weight decay of the tables and of the dense part."""

    # Rates, decays and batch size were chosen together, on real and on synthetic ratings. docs/log/2026-11.md
    # lists the values that were tried.
    lr: float = flag(
        0.04,
        "Learning rate of the embedding tables (row-wise Adagrad) for a global batch of 4,096 ratings; for "
        "another size, from 512 to a fiftieth of the training events, it is multiplied by the square root of "
        "the ratio. It falls linearly to zero over the run.",
    )
    dense_lr: float = flag(0.001, "Learning rate of the dense part (AdamW), falling like --lr.")
    weight_decay: float = flag(
        0.1,
        "Decoupled weight decay of all table rows, looked up or not: one pass shrinks them by the factor "
        "exp(-weight_decay), less as --lr falls.",
    )
    decay_power: float = flag(
        0.0,
        "Divide --weight_decay in the n-th pass by n to this power. The steps of Adagrad become smaller from "
        "pass to pass, and an equal decay, of power 0, may outweigh them.",
    )
    l2: float = flag(
        0.0,
        "Decay in proportion to events, for --task rating and response: the loss of each event includes this "
        "times the squares of the numbers in its two vectors.",
    )
    dense_weight_decay: float = flag(
        20.0, "Decoupled weight decay of the dense part: one step shrinks it by this times --dense_lr."
    )

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        for name in ("lr", "dense_lr"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"--{name} must be above 0, got {value}")
        decay = self.weight_decay
        require(0 <= decay <= MOST_DECAY, f"--weight_decay must be between 0 and {MOST_DECAY}, got {decay}")
        require(
            0 <= self.decay_power < float("inf"), f"--decay_power must be at least 0, got {self.decay_power}"
        )
        require(0 <= self.l2 < float("inf"), f"--l2 must be at least 0, got {self.l2}")
        require(
            0 <= self.dense_weight_decay * self.dense_lr < 1,
            f"--dense_weight_decay must be at least 0 and below 1 / --dense_lr, got "
            f"{self.dense_weight_decay} with --dense_lr {self.dense_lr}",
        )


@dataclass(frozen=True)
class TrainingConfig(Section):
    """Length of the training, and its loop."""

    train: bool = flag(
        False, "Train, validate after every epoch, and test at the end; the default if no mode is given."
    )
    epochs: int = flag(8, "Passes over the training ratings, at most.", least=1, most=1_000_000)
    # Not 1: with few validation ratings a single epoch may be worse by chance. A ranking of ml-latest-small
    # would have stopped at an NDCG@10 of 0.052; it later reached 0.066.
    patience: int = flag(
        2,
        "Epochs in a row without a better validation result after which the training ends, twice as many "
        "from good initial rows; 0 means never.",
        least=0,
    )
    # A CPU has no second stream to overlap with: TorchRec's loop ran at 0.91 to 1.02 times the rate of the
    # plain one. On one GPU there is no exchange to hide: a step of 2,048 events took 10.9 ms with it and
    # 9.5 ms without (H100).
    pipeline: str = flag(
        "auto",
        "Training loop: plain, sparse_dist (TorchRec's TrainPipelineSparseDist), or auto: sparse_dist on "
        "several GPUs, else plain.",
        choices=("auto", "plain", "sparse_dist"),
    )
    # A step of 4,096 events takes an H100 0.3 ms, and Python some milliseconds to launch.
    capture: str = flag(
        "auto",
        "Make each step one CUDA graph: auto where that is possible, on refuses to train where it is not, "
        "off. The result is the same, bit for bit.",
        choices=("auto", "on", "off"),
    )
    precision: str = flag(
        "fp32",
        "Of the products in the dense part: tf32 rounds their inputs to 10 bits on a GPU, bf16 computes the "
        "dense part with 7 bits. Weights, looked-up rows and the loss stay fp32. --load takes its own flag, "
        "and serving has fp32.",
        choices=("fp32", "tf32", "bf16"),
    )
    data_device: str = flag(
        "auto",
        "Where batches are made: cuda copies the columns to the GPU once, cpu uses the loader, auto is cuda "
        "on one GPU if the model allows it and --num_workers is 0.",
        choices=("auto", "cpu", "cuda"),
    )
    # On a CPU TorchRec's own step spends its time on exchanges within one rank, on joining outputs and in
    # FBGEMM's backward.
    cpu_tables: str = flag(
        "vectorised",
        "Kernels for the tables on a CPU: those of this library (vectorised), or the slower ones of TorchRec "
        "and FBGEMM (torchrec), with equal results except for rounding.",
        choices=("vectorised", "torchrec"),
    )


@dataclass(frozen=True)
class RuntimeConfig(Section):
    """Seed and timeout, shared by all processes of a run."""

    seed: int = flag(
        0, "Random seed for the data, the split, the order and the initial weights.", least=0, most=2**31 - 1
    )
    timeout: int = flag(
        300,
        "Seconds that a rank waits for the others in training; data preparation may take longer.",
        least=1,
        most=604_800,
    )


# Flags for passes over a stationary data set, and the reason why a stream does not use each.
NOT_IN_A_STREAM = {
    "epochs": "a stream has one pass",
    "patience": "a stream has no epochs",
    "split": "each window of a stream is predicted before training on it",
    "test_fraction": "each window of a stream is predicted before training on it",
    "validation_fraction": "each window of a stream is predicted before training on it",
}


# Address of a topic: brokers, and a name of up to 249 characters.
TOPIC = re.compile(r"kafka://[^/@?#\s]+/(?!\.\.?$)[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True)
class StreamConfig(Section):
    """Training on the events in the order of time, window after window."""

    stream: bool | str = flag(
        False,
        "Train once on the ratings in the order of time: predict each --window, then train on it. With "
        "kafka://HOST:PORT/TOPIC the ratings are the messages of this topic, see docs/extras/kafka.md.",
    )
    window: str = flag(
        "1d",
        "Length of a window of a stream: a time span such as 12h or 1d, aligned to 1970 in UTC, or a number "
        "of ratings.",
        requires=("stream", True),
    )
    follow_data: bool = flag(
        False,
        "At the end of the data, wait for files to grow and for new files, until the process is ended.",
        requires=("stream", True),
    )
    partition_delay: str = flag(
        "5m",
        "With --follow_data and a topic: a window of time is complete when each partition has events after "
        "it, or one has events that are newer by this time span. Events that come later are late.",
        requires=("follow_data", True),
    )

    @property
    def topic(self) -> str:
        """Address of the Kafka topic with the events; empty for a stream of files."""
        return self.stream if isinstance(self.stream, str) else ""

    @property
    def span(self) -> Duration:
        """Length of a window, in seconds or in events."""
        return duration("window", self.window, "events")

    @property
    def delay(self) -> Duration | None:
        """Time for which a window waits for a late partition; None if the data are no topic."""
        return duration("partition_delay", self.partition_delay, "seconds") if self.topic else None

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(self.span.amount >= 1, f"--window must be longer than 0, got {self.window}")
        is_time = duration("partition_delay", self.partition_delay, "seconds").is_time
        require(is_time, f"--partition_delay must be a time such as 30s or 5m, got {self.partition_delay}")
        require(
            bool(self.topic) or self.is_default("partition_delay"),
            "--partition_delay requires --stream kafka://HOST:PORT/TOPIC",
        )
        # The value is not shown: someone may have written a password into it.
        require(
            not self.topic or TOPIC.fullmatch(self.topic) is not None,
            "--stream must be without a value, or kafka://HOST:PORT/TOPIC, with several HOST:PORT separated "
            "by commas; a login belongs in the file that KAFKA_CONFIG names",
        )


def check_given_flags(stream: bool | str, given: Collection[str], duplicates: str) -> None:
    """Refuse flags that a stream cannot use. given: the flags of the command line.

    Raises:
        UserError: names the first.
    """
    if not stream:
        return
    for name, reason in NOT_IN_A_STREAM.items():
        require(name not in given, f"--{name} cannot be used with --stream: {reason}")
    require(
        "duplicates" not in given or duplicates == "keep",
        f"--stream requires --duplicates keep, got {duplicates}: a stream trains on every rating",
    )


# Value of --load without a folder.
NEWEST = "newest"


def folder_of_script(name: str = "") -> str:
    """Return the default of --save_dir: scripts have other models, so each has a folder of its own.

    name: of the script; "" for the one that this process runs.
    """
    return f"dumps/{Path(name or script_name()).stem}"


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Writing and loading of checkpoints."""

    dump: bool = flag(
        False, "Train, and write a full checkpoint of initial rows and after every epoch to --save_dir."
    )
    inc_dump: bool = flag(
        False,
        "Train, and write deltas to --save_dir: first a full checkpoint, then deltas with the rows that "
        "changed since the last one. With --dump, an epoch ends with a full checkpoint too.",
    )
    resume: bool = flag(
        False,
        "Continue from the newest checkpoint in --save_dir, or start if there is none; writes checkpoints "
        "like --dump, or deltas with --inc_dump.",
    )
    load: str = flag(
        "", "Evaluate a checkpoint: the given folder, or without one the --checkpoint in --save_dir."
    )
    compact: bool = flag(
        False, "Merge the newest deltas in --save_dir with their full checkpoint into a new full checkpoint."
    )
    # Not None, because the parser takes the type of a flag from its default.
    until: int = flag(
        -1, "Last step whose deltas --load applies; -1 means all.", least=0, requires=("load", True)
    )
    # The last epoch is often the best, but not always. All serving code has this default, so that all give
    # the same answer.
    checkpoint: str = flag(
        "best",
        "Checkpoint in --save_dir that --load, --export, --recommend and serve.py use: the best on the "
        "validation ratings, or the latest. --resume always uses the latest.",
        choices=("best", "latest"),
    )
    save_dir: str = flag(
        folder_of_script, "Folder of the checkpoints, the same for all ranks, or a URL of an object store."
    )
    move_aside: bool = flag(
        False,
        "Begin a new training in a --save_dir with checkpoints of an earlier one, which are moved into its "
        "folder run-ID: without this flag or --resume such a folder is refused.",
    )
    warm_start: str = flag(
        "",
        "Checkpoint, or folder of checkpoints, of an earlier training on older data with the same features: "
        "a new training begins with its rows and dense part.",
    )
    other_data: bool = flag(
        False,
        "Evaluate the checkpoint of --load on data other than those of its training, such as newer ones: "
        "rows are found by their raw values, and new values count as unknown.",
        requires=("load", True),
    )
    accept_changed_model: bool = flag(
        False,
        "Use a checkpoint of a model of the same name whose source has changed since: its weights may mean "
        "something else now.",
    )
    dump_every: int = flag(
        0, "Steps between checkpoints within an epoch; 0 means only at the end of an epoch.", least=0
    )
    keep: int = flag(
        3, "Number of full checkpoints to keep, besides the best one and the bases of deltas.", least=1
    )
    async_dump: bool = flag(
        False,
        "Write full checkpoints from a copy in memory while the training continues.",
        requires=("storage", "memory"),
    )

    @property
    def folder_to_load(self) -> str:
        """Return the folder of --load, or --save_dir if it has none."""
        return self.load if self.load not in ("", NEWEST) else self.save_dir

    @property
    def writes(self) -> bool:
        """True if the training writes checkpoints."""
        return self.dump or self.inc_dump or self.resume

    @property
    def reads(self) -> bool:
        """True if the run begins from a checkpoint. Its flags replace the defaults."""
        return bool(self.load) or self.compact or self.resume

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(not (self.resume and self.move_aside), "--move_aside and --resume cannot be used together")
        # An unused flag would be ignored in silence.
        for name in ("dump_every", "keep", "async_dump", "warm_start", "move_aside"):
            require(
                self.writes or (self.compact and name == "keep") or self.is_default(name),
                f"--{name} requires --dump, --inc_dump or --resume",
            )


@dataclass(frozen=True)
class ServingConfig(Section):
    """Exports from a checkpoint."""

    export: str = flag(
        "",
        "New folder for the --checkpoint in --save_dir, complete but without optimizer state, for a server.",
    )


@dataclass(frozen=True)
class EvaluationConfig(Section):
    """Metrics of the test."""

    cutoffs: tuple[int, ...] = flag(
        (),
        "More lengths of lists at which the test of a ranking is measured, such as 5,20,100, or none; "
        "baselines are measured at 10 alone.",
    )

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        for cutoff in self.cutoffs:
            require(
                1 <= cutoff <= MOST_CUTOFF, f"--cutoffs must be between 1 and {MOST_CUTOFF:,}, got {cutoff}"
            )
