"""Former names of flags and values parse to the present settings, with one warning on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.checkpoint.recorded import checked_flags
from recsuite.config.config import flag_names, sections
from recsuite.config.parser import check_read, parse_args, parse_given
from recsuite.config.renamed import REMOVED, RENAMED, renamed_flag
from recsuite.errors import UserError
from tests.support.launch import python

# A former flag on a command line, and the same line with present names.
LINES = [
    ("--ids dynamic --admit 3", "--vocabulary dynamic --admission_threshold 3"),
    ("--ids vocabulary", "--vocabulary fixed"),
    ("--ids=vocabulary", "--vocabulary=fixed"),
    ("--evict lfu --half_life 9", "--eviction lfu --half_life 9"),
    ("--grow 0.5", "--max_load_factor 0.5"),
    ("--split random --days user", "--split random --day_feature user"),
    ("--days none", "--day_feature none"),
    ("--world fixed", "--synthetic_kind stationary"),
    ("--world moving", "--synthetic_kind drifting"),
    ("--world=chain", "--synthetic_kind=markov"),
]


def test_every_former_name_and_value_is_tested_and_has_a_present_one() -> None:
    words = {word for former, _ in LINES for word in former.replace("=", " ").split()}
    choices = {
        name: section.flag(name).choices for section in sections().values() for name in vars(section())
    }
    for name, (present, values) in RENAMED.items():
        assert name not in flag_names()
        assert {f"--{name}", *values} <= words
        assert {*values.values()} <= {*choices[present]}


@pytest.mark.parametrize(("former", "present"), LINES)
def test_former_names_parse_to_the_same_settings_with_a_warning_that_names_the_present_flag(
    former: str, present: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_given(former.split()) == parse_given(present.split())
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        parse_args(former.split())
        warning = capsys.readouterr().err
        assert warning.count("\n") == (rank == "0")
        changed = {word for word in present.split() if word not in former and "--" in word}
        assert rank != "0" or (changed and all(word in warning for word in changed))


def test_a_script_refuses_the_former_name_of_a_flag_that_it_does_not_read() -> None:
    with pytest.raises(UserError, match=r"^--admit is not a flag of this script"):
        check_read(["--admit", "5"], ["admission_threshold"])


def test_flags_of_older_checkpoints_are_read_by_their_former_names(tmp_path: object) -> None:
    found = {"data": {"world": "moving", "days": "user"}, "tables": {"ids": "vocabulary"}}
    assert checked_flags(tmp_path, found) == {  # type: ignore[arg-type]
        "synthetic_kind": "drifting",
        "day_feature": "user",
        "vocabulary": "fixed",
    }
    assert renamed_flag("epochs", 3) == ("epochs", 3)


@pytest.mark.parametrize("name", REMOVED)
def test_a_checkpoint_of_a_removed_model_is_refused_and_one_without_its_features_is_read(
    name: str, tmp_path: Path
) -> None:
    assert checked_flags(tmp_path, {"data": {name: 0, "history": 5}}) == {"history": 5}
    with pytest.raises(
        UserError,
        match=rf"has a model of --{name} 200, and this version has no such models. Fix: load it with",
    ):
        checked_flags(tmp_path, {"data": {name: 200}, "model": {"preset": "co_occurrence"}})


def test_the_check_of_flags_before_a_run_does_not_warn() -> None:
    result = python("-m", "recsuite.config", "--admit", "2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
