"""The flags of the data set and of the loader that makes batches of it."""

from __future__ import annotations

from dataclasses import dataclass

# Not that of pathlib, which raises where a folder forbids to look, or a name is too long.
from os.path import exists
from typing import ClassVar

from recsuite.config.section import Section, require

OFFICIAL_SPLITS = ("u1", "u2", "u3", "u4", "u5", "ua", "ub")
# Named here too: the configuration is below the data sets, and must not import them.
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


@dataclass(frozen=True)
class DataConfig(Section):
    """Which ratings are read, and which of them are for training, validation and test."""

    CHOICES: ClassVar = {
        "dataset": DATASETS,
        "world": ("fixed", "moving", "chain"),
        "split": ("time", "random", "leave_one_out", "files", *OFFICIAL_SPLITS),
        "bad_rows": ("error", "skip"),
        "duplicates": ("auto", "last", "first", "mean", "keep"),
        "seen": ("auto", "exclude", "allow"),
        "days": ("none", "user"),
    }
    MOST: ClassVar = {"history": 10_000, "audience": 10_000, "others": 10_000}

    dataset: str = ""
    """Which ratings: a MovieLens set, downloaded when absent, or synthetic; empty means what --data_path
    holds, and synthetic without one."""

    data_path: str = ""
    """Folder that holds the files, or is to hold them; or your own tables, a folder, a file or a URL, see
    docs/your_data.md; empty means data/NAME in the repository, or in the
    working directory where the library was installed without it."""

    schema: str = ""
    """Folder, file or URL of tables of your own: write a schema.toml beside them that says what their columns
    mean, for you to correct; trains nothing."""

    cache_dir: str = ""
    """Folder for the columns made from the files; empty means .columns beside the files."""

    rebuild: bool = False
    """Make the columns again, also where they are there and whole: once for a launch, whatever starts again
    in it."""

    synthetic_ratings: int = 1_000_000
    """Number of ratings in the synthetic data set."""

    world: str = "fixed"
    """What synthetic ratings are drawn from: users, items and tastes that stay (fixed), users and items that
    come and go, and tastes that turn (moving), or walks in which the next item follows from the last one
    (chain)."""

    split: str = "time"
    """Which ratings are the test: the newest (time), some drawn by the seed (random), the newest of each user
    (leave_one_out), the files of your own tables that are called so (files), or an official split of
    ml-100k."""

    test_fraction: float = 0.2
    """Share of the ratings that is the test, for --split time and random."""

    # What is for validation is not learned from, and a hundredth is enough to stop early by.
    validation_fraction: float = 0.01
    """Share of the ratings beside the test that is not trained on but evaluated after every epoch; 0 means
    none, and no early stopping."""

    bad_rows: str = "error"
    """What a row that cannot be read does: error stops, skip counts and reports it."""

    # The sets of GroupLens have no bad row, and a file with more than a few is read in the wrong way.
    max_bad_rows: float = 0.01
    """Share of the rows of a file that --bad_rows skip may leave out; more stop."""

    # Several ratings of one pair would lie on both sides of a random split, which then tests on what it
    # trained on. The last rating is what a model in use would know. Of clicks the last would take an item out
    # of the training of a user who had it before, and the model would learn that it is still to come.
    duplicates: str = "auto"
    """Which of several events of one item and one user counts: the last in time, the first, or their mean,
    which has the time of the last; keep counts all of them, also where the split comes between them; auto
    counts the first of clicks and counts where the test is newer than the training, and else the last."""

    seen: str = "auto"
    """Items that a user already had, in a ranking: neither negatives, nor ranked, nor recommended (exclude),
    or like any other item (allow); auto allows them if a tenth of the training events repeat an item of their
    user, which --duplicates keep leaves. Serving follows it."""

    history: int = 30
    """How many of the items that the user rated last, strictly before a rating, the model receives with it,
    each with its rating; 0 means none."""

    audience: int = 0
    """How many of the users who rated the item last, strictly before a rating, the model receives with it;
    0 means none but for what --others adds."""

    others: int = 0
    """With --split random and the official splits, where what came later is no secret, the model receives
    with a rating, instead of what came before, all other items of its user and all other users of its item, a
    sample of so many where there are more; 0 means that --history and --audience count there too."""

    days: str = "none"
    """With --split random and the official splits, what the day of a rating tells: a row of its own for each
    day of each user (user), or nothing (none)."""

    @property
    def lists(self) -> dict[str, int]:
        """How long the lists of what users had, and of who had items, are at most; 0 for none."""
        if self.shares_lists:
            return {"history": self.others if self.history else 0, "audience": self.others}
        return {"history": self.history, "audience": self.audience}

    @property
    def shares_lists(self) -> bool:
        """Whether events of one user, and of one item, have a list in common."""
        return self.others > 0 and self.is_unordered

    @property
    def keeps_repeats(self) -> bool:
        """Whether all events of one user and one item count: what the files have for the test is the test."""
        return self.duplicates == "keep" or self.split == "files"

    def duplicates_of(self, label_kind: str) -> str:
        """Return which of several events of one pair counts, of labels of one of `schema.LABEL_KINDS`."""
        if self.keeps_repeats:
            return "keep"
        if self.duplicates != "auto":
            return self.duplicates
        return "first" if label_kind in ("clicks", "count") and not self.is_unordered else "last"

    @property
    def is_unordered(self) -> bool:
        """Whether what came later than a rating is no secret, because the test is no later than training."""
        return self.split == "random" or self.split in OFFICIAL_SPLITS

    @property
    def is_synthetic(self) -> bool:
        """Whether the ratings are drawn instead of read from files that were there."""
        return self.dataset == "synthetic" or not (self.dataset or self.data_path)

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        self._check_shares()
        require(
            1_000 <= self.synthetic_ratings <= 1_000_000_000,
            f"--synthetic_ratings {self.synthetic_ratings} is out of range; give 1,000 to 1,000,000,000",
        )
        require(
            self.is_synthetic or self.is_default("world"),
            f"--world {self.world} says what synthetic ratings are drawn from, and these are others; leave "
            "it out, or give --dataset synthetic",
        )
        require(
            self.is_default("days") or self.is_unordered,
            f"--days {self.days} learns of days, and with --split {self.split} none of the test is one of "
            "the training; leave it out, or give --split random",
        )
        for name in ("history", "audience", "others"):
            self.require_at_least_0(name)
        require(
            self.split != "files" or self.is_default("duplicates") or self.duplicates == "keep",
            f"--duplicates {self.duplicates} takes ratings out of the test, which --split files keeps; "
            "leave it out",
        )
        require(
            self.split not in OFFICIAL_SPLITS or self.dataset in ("", "ml-100k"),
            f"--split {self.split} belongs to ml-100k, not to {self.dataset}; give --split time or random",
        )
        require(
            not self.data_path or bool(self.dataset) or "://" in self.data_path or exists(self.data_path),
            f"--data_path {self.data_path} is not there; give the folder or the file of your data, or "
            "--dataset NAME to download a set there",
        )

    def _check_shares(self) -> None:
        require(
            0 < self.test_fraction < 1,
            f"--test_fraction {self.test_fraction} leaves no training or no test; give 0.1, say",
        )
        require(
            0 <= self.max_bad_rows <= 1,
            f"--max_bad_rows {self.max_bad_rows} is not a share; give 0 to 1",
        )
        require(
            self.bad_rows == "skip" or self.is_default("max_bad_rows"),
            f"--max_bad_rows {self.max_bad_rows} says how many rows are left out, and none are; give "
            "--bad_rows skip too",
        )
        require(
            0 <= self.validation_fraction < 1,
            f"--validation_fraction {self.validation_fraction} leaves no training or is negative; give 0.01, "
            "say, or 0 for none",
        )


@dataclass(frozen=True)
class LoaderConfig(Section):
    """How ratings become batches."""

    CHOICES: ClassVar = {"mp_context": ("spawn", "forkserver", "fork")}
    POSITIVE: ClassVar = ("batch_size", "prefetch_factor", "worker_timeout")
    MOST: ClassVar = {"batch_size": 2**24, "num_workers": 1024, "prefetch_factor": 64}

    batch_size: int = 2048
    """Ratings per rank and step; the global batch is this times the number of ranks."""

    # For columns in memory one process makes batches faster than the ranks train on them; workers pay where a
    # row costs processor time, see docs/loader.md.
    num_workers: int | str = 0
    """Worker processes per rank that make batches; 0 makes them in the main process, auto decides after
    some steps."""

    # A forked worker inherits the locks of the trainer's threads, held or not, and a CUDA context that it can
    # neither use nor free.
    mp_context: str = "spawn"
    """How workers start: spawn, forkserver (a second pool starts faster), or fork (refused once CUDA is
    initialised)."""

    prefetch_factor: int = 2
    """Batches that each worker makes ahead."""

    # Below --timeout, so that a silent worker is named before other ranks give up waiting for this one.
    worker_timeout: int = 120
    """Seconds that a rank waits for a worker's batch."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            self.num_workers == "auto" or (isinstance(self.num_workers, int) and self.num_workers >= 0),
            f"--num_workers {self.num_workers} is negative; give 0 to make batches in the main process",
        )
