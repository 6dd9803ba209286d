"""Each script has only the flags that it reads: --help leaves the others out, and they are refused."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recsuite.config import parser
from recsuite.config.config import Config, flag_names
from recsuite.config.parser import build_parser, parse_given, unread_flags
from recsuite.errors import UserError
from tests.support.launch import ROOT, SUPPORT, python, succeeded

sys.path.append(str(ROOT / "example"))
SCRIPTS = ("example", "retrieval", "sequential", "ctr", "multitask")
# Of flags of which half the default, one more or another choice is not allowed; and what a flag needs.
FOLDERS = ("data_path", "schema", "cache_dir", "report_dir", "export", "save_dir", "warm_start")
VALUES: dict[str, str] = {
    **dict.fromkeys(FOLDERS, "data"),
    **dict.fromkeys(("capacity", "ttl", "half_life", "until", "user", "num_workers"), "9"),
    **{"dataset": "ml-100k", "load": "newest", "window": "2d", "mlp_dims": "8", "embedding_dim": "16"},
    **{"eviction": "lfu", "split": "random", "checkpoint": "latest", "task": "response", "preset": "none"},
    **{"batch_size": "100", "synthetic_ratings": "5000", "max_bad_rows": "0.5", "cutoffs": "5"},
    **{"storage": "disk", "memory_budget": "2GB", "storage_dir": "data", "validation_fraction": "0.1"},
    "partition_delay": "9m",
}
WITH = {
    **dict.fromkeys(("window", "follow_data"), "--stream"),
    "partition_delay": "--stream kafka://a/b --data_path data --follow_data",
    **dict.fromkeys(("checkpoint", "until", "other_data", "accept_changed_model"), "--load"),
    **dict.fromkeys(("save_dir", "dump_every", "keep", "async_dump", "move_aside", "warm_start"), "--dump"),
    **dict.fromkeys(("top", "follow"), "--recommend --user 1"),
    **dict.fromkeys(("history_weights", "negatives"), "--task ranking"),
    **{"format": "--export there", "row_type": "--export there --format onnx"},
    "day_feature": "--split random",
    **dict.fromkeys(("memory_budget", "storage_dir"), "--storage disk"),
    "cache_load_factor": "--storage uvm_caching",
    **dict.fromkeys(("num_blocks", "num_heads", "dropout"), "--task sequence"),
    **{"half_life": "--eviction lfu", "max_bad_rows": "--bad_rows skip", "tensorboard": "--report_dir data"},
    **{"user": "--recommend", "recommend": "--user 1", "synthetic_kind": "--dataset synthetic"},
    "block": "--task sequence --mlp_dims none",
    **{"partitions": "--data_path data", "min_count": "--data_path data --partitions 2"},
}
# Read in modes that a training is not, and with data and a split that it does not have.
MODES = {"train", "load", "compact", "resume", "export", "recommend", "doctor", "schema"}
OF_MODES = {
    *("user", "top", "follow", "until", "checkpoint", "test_fraction", "other_data", "format", "row_type"),
    "min_count",
}
# Of dynamic tables, and of tables elsewhere than in memory.
OF_TABLES = {
    *("admission_threshold", "eviction", "distribution", "max_load_factor", "max_growth"),
    *("cache_load_factor", "memory_budget", "storage_dir"),
}
OF_WORKERS = {"mp_context", "prefetch_factor", "worker_timeout"}
SMALL = ("--num_workers", 0, "--epochs", 1, "--dump", "--save_dir", "dumps")


def module_of(script: str) -> ModuleType:
    return importlib.import_module(script)


def unread_of(script: str) -> frozenset[str]:
    """The flags that a script does not read, as it says."""
    if script == "ctr":
        return unread_flags(importlib.import_module("criteo_log").UNREAD)
    return unread_flags(getattr(module_of(script), "UNREAD", ()))


def defaults_of(script: str) -> Sequence[str]:
    found = getattr(module_of(script), "DEFAULTS", ())
    return found.split() if isinstance(found, str) else found


def given(flag: str) -> list[str]:
    """A flag with a value that is not the default one, and what it needs."""
    section = Config().sections[flag_names()[flag]]
    default = getattr(section, flag)
    words = WITH.get(flag, "").split()
    if isinstance(default, bool):
        return [*words, f"--{flag}"]
    choices = [choice for choice in section.flag(flag).choices if choice != default]
    number = default + 1 if isinstance(default, int) else default / 2 if isinstance(default, float) else ""
    return [*words, f"--{flag}", str(VALUES.get(flag, choices[0] if choices else number))]


def is_accepted(script: str, flag: str) -> bool:
    """True if a script's defaults allow another value of a flag, with or without its preset."""
    for more in ((), ("--preset", "none"), ("--preset", "none", "--split", "random", "--history", "5")):
        defaults = [*defaults_of(script)]
        try:
            parse_given([*defaults, *more, *given(flag)])
        except UserError:
            continue
        return True
    return False


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_offers_no_flag_that_its_task_refuses(script: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    # Most of the time of a command line is that of its parser.
    monkeypatch.setattr(parser, "build_parser", functools.cache(parser.build_parser))
    (tmp_path / "data").mkdir()
    offered = flag_names().keys() - unread_of(script)
    # Their own task is what the scripts are for.
    refused = [flag for flag in offered if not is_accepted(script, flag)]
    assert refused == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_that_a_script_does_not_use_are_not_in_its_help_and_refused(script: str, capsys: Any) -> None:
    unread = unread_of(script)
    assert module_of(script).main(["--help_all"]) == 0
    made = build_parser(unread, shows_all=True)
    assert made.format_help() in capsys.readouterr().out
    shown = {action.dest for action in made._actions if action.help != argparse.SUPPRESS}
    assert shown - {"help", "help_all"} == flag_names().keys() - unread
    for flag in unread:
        assert module_of(script).main([f"--{flag}=1"]) == 2
        sentence = f"--{flag} is not a flag of this script. Fix: leave it out, or run example.py."
        assert sentence in capsys.readouterr().err


def test_only_flags_and_sections_can_be_excluded() -> None:
    with pytest.raises(ValueError, match=r"names of flags and of their sections, got 'straem'"):
        unread_flags(["straem"])


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_script_offers_no_flag_that_its_training_does_not_read(script: str, tmp_path: Path) -> None:
    if script == "ctr":
        importlib.import_module("criteo_log").write_log(tmp_path / "log", 2_000)
        data: tuple[object, ...] = ("--data_path", "log")
    elif script == "multitask":
        importlib.import_module("shop_log").write_log(tmp_path / "shop", rows=2_000)
        data = ("--data_path", "shop")
    else:
        data = ("--dataset", "synthetic", "--synthetic_ratings", 2_000, "--data_path", "ratings")
    run = python(SUPPORT / "recorded_reads.py", script, *data, *SMALL, cwd=tmp_path)
    read = set(ast.literal_eval(succeeded(run).splitlines()[-1]))
    assert flag_names().keys() - unread_of(script) - read - MODES - OF_MODES - OF_TABLES - OF_WORKERS == set()
