"""The command line: parsing, and the message for each value that is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import online
import pipeline
import recsuite
import serve
from example import make_loss, make_model
from recsuite import hooks
from recsuite.config.config import Config, flag_names, sections
from recsuite.config.flag import Section
from recsuite.config.parser import FIRST, build_parser, parse_args
from recsuite.config.presets import AUTO
from recsuite.errors import UserError
from recsuite.extras.reports import compare as results
from recsuite.serving.served import Follower, ServedModel
from tests.support.launch import ROOT, python, succeeded


def test_no_flag_gives_the_defaults_and_trains() -> None:
    config = parse_args([])
    assert config == Config()
    assert config.modes == ("train",)
    assert parse_args(["--train"]).modes == ("train",)


def test_help_shows_the_first_flags_in_their_order_and_those_of_a_script_alone() -> None:
    shown = re.findall(r"^  (?:-h, )?--(\w+)", build_parser(unread=["task"]).format_help(), re.MULTILINE)
    assert shown == [*(name for name in FIRST if name != "task"), "help", "help_all"]


def test_help_all_lists_every_flag_and_section() -> None:
    text = succeeded(python("-m", "recsuite.config", "--help_all"))
    for name in flag_names():
        assert f"--{name}" in text
    for name in sections():
        assert f"\n{name}{' (extra)' * (name in hooks.SECTIONS)}:\n" in text
    assert "Events of a step, shared by all processes" in text


def test_parsed_values_have_the_types_of_their_fields() -> None:
    config = parse_args(["--mlp_dims", "128,64,1", "--lr", "0.5", "--epochs", "3", "--dataset", "ml-1m"])
    assert parse_args(["--num_workers", "3"]).loader.num_workers == 3
    assert parse_args(["--num_workers", "auto"]).loader.num_workers == "auto"
    assert config.model.mlp_dims == (128, 64, 1)
    assert config.optimizer.lr == 0.5
    assert config.training.epochs == 3
    assert config.data.dataset == "ml-1m"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_workers -1", "--num_workers must be between 0 and 1,024, or auto, got -1"),
        ("--num_workers some", "--num_workers: 'some' is neither a whole number nor auto"),
        ("--num_workers 1 --timeout 60", "--worker_timeout must be below --timeout 60, got 120"),
        (f"--epochs {10**400}", "--epochs must be between 1 and 1,000,000, got 1000"),
        ("--epochs x", "--epochs: invalid int value: 'x'"),
        ("--mlp_dims 128,x", "'128,x' is neither whole numbers separated by commas nor the word none"),
        ("--mlp_dims 99999", "--mlp_dims must be at most 100 widths between 1 and 16,384, got 99999"),
        ("--embedding_dim 30", "--embedding_dim must be a multiple of 4 for FBGEMM's kernels, got 30"),
        ("--unknown 3", "Unrecognized arguments: --unknown 3"),
        ("--epoch 3", "Unrecognized arguments: --epoch 3 (did you mean --epochs?); see --help"),
        ("--batch-size=3 --lrr 1", "--lrr 1 (did you mean --batch_size and --lr?); see"),
        ("--incremental-dump", "(did you mean --incremental_dump?)"),
        ("--workers 2 --batch 8", "(did you mean --num_workers and --batch_size?)"),
        ("--learning_rate 1", "(did you mean --lr?)"),
        # A name that is similar to no flag gets no suggestion.
        ("--optimizer adam", "Unrecognized arguments: --optimizer adam; see --help"),
        *(
            (flag, f"Unrecognized arguments: {flag} (NPROC=2 ./run.sh or torchrun --nproc_per_node 2 ")
            for flag in ("--gpus 2", "--num_gpus=2", "--world_size 2")
        ),
        ("--dataset ml-2m", "--dataset must be one of synthetic, ml-100k, "),
        ("--split u1 --dataset ml-1m", "--split u1 requires --dataset ml-100k, got ml-1m"),
        ("--bad_rows skip --max_bad_rows nan", "--max_bad_rows must be between 0 and 1, got nan"),
        ("--max_bad_rows 0.1", "--max_bad_rows requires --bad_rows skip"),
        ("--lr nan", "--lr must be above 0, got nan"),
        ("--dense_lr -1", "--dense_lr must be above 0, got -1.0"),
        ("--task ranking --l2 0.1", "--l2 requires --task rating or response, got ranking"),
        ("--weight_decay 21", "--weight_decay must be between 0 and 20, got 21.0"),
        ("--decay_power -1", "--decay_power must be at least 0, got -1.0"),
        ("--stream --decay_power 1", "--decay_power cannot be used with --stream, which has no passes"),
        ("--test_fraction 1", "--test_fraction must be above 0 and below 1, got 1.0"),
        ("--validation_fraction 1", "--validation_fraction must be below 1, got 1.0: it leaves nothing"),
        ("--validation_fraction 2", "--validation_fraction must be between 0 and 1, or auto, got 2.0"),
        ("--validation_fraction few", "--validation_fraction: 'few' is neither a number nor auto"),
        ("--profile 5 --load", "--profile requires a training; give --train too"),
        ("--tensorboard --recommend --user 5", "--tensorboard requires a training; give --train too"),
        ("--tensorboard", "--tensorboard requires --report_dir"),
        ("--dump_every 5", "--dump_every requires --dump, --inc_dump or --resume"),
        ("--async_dump --load", "--async_dump requires --dump, --inc_dump or --resume"),
        ("--move_aside", "--move_aside requires --dump, --inc_dump or --resume"),
        ("--move_aside --resume", "--move_aside and --resume cannot be used together"),
        ("--save_dir here", "--save_dir requires a mode that writes or reads checkpoints, such as --dump"),
        ("--until 5", "--until requires --load"),
        ("--checkpoint latest", "--checkpoint latest requires a mode that reads it, such as --load"),
        (
            "--load elsewhere --resume",
            "--load elsewhere must be in --save_dir dumps/example, where the requested training writes; "
            "give --load alone, or without a folder",
        ),
        ("--user 5", "--user requires --recommend"),
        ("--recommend", "--recommend requires --user, the raw id of a user"),
        ("--task sequence --stream", "--task sequence cannot be used with --stream"),
        ("--task sequence --history 0", "--task sequence requires --history above 0"),
        ("--negatives 5", "--negatives requires --task ranking or sequence, got rating"),
        ("--task ranking --block hstu", "--block requires --task sequence"),
        ("--doctor --dump", "--doctor and --dump cannot be used together"),
        ("--schema shop --load", "--schema and --load cannot be used together"),
        ("--schema shop --rebuild", "--rebuild cannot be used with --schema"),
        ("--compact --inc_dump", "--compact and --inc_dump cannot be used together"),
        ("--export", "--export: expected one argument"),
    ],
)
def test_an_invalid_value_is_refused_with_one_message(arguments: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_args(arguments.split())
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_replaced_sets_flags_of_any_section_by_name() -> None:
    config = Config.of(epochs=2, batch_size=512, save_dir="here")
    assert (config.training.epochs, config.loader.batch_size) == (2, 512)
    other = config.replaced(epochs=3, seed=7)
    assert (other.training.epochs, other.loader.batch_size, other.runtime.seed) == (3, 512, 7)
    # The first configuration is unchanged.
    assert (config.training.epochs, config.runtime.seed) == (2, 0)
    assert Config.of() == Config()
    with pytest.raises(KeyError, match="epoch"):
        Config.of(epoch=2)


def test_the_flags_of_a_configuration_recreate_it() -> None:
    config = Config.of(epochs=2, mlp_dims=(8, 4), num_workers="auto", load="newest", until=3)
    assert list(config.flags) == list(flag_names())
    assert Config.of(**config.flags) == config


@pytest.mark.parametrize("section", sections().values(), ids=lambda section: section.__name__)
def test_the_defaults_of_a_section_are_valid_and_each_flag_has_a_help_text(section: type[Section]) -> None:
    section().validate()
    for field in dataclasses.fields(section):
        assert section().is_default(field.name)
        assert section.flag(field.name).text.endswith(".")


@pytest.mark.parametrize("section", sections().values(), ids=lambda section: section.__name__)
def test_a_section_refuses_values_beyond_the_limits_of_a_flag(section: type[Section]) -> None:
    for name, limits in ((field.name, section.flag(field.name)) for field in dataclasses.fields(section)):
        wrong = [] if limits.least is None else [limits.least - 1]
        # The default of --until is below its limit.
        wrong = [value for value in wrong if value != getattr(section, name)] or [-9] * len(wrong)
        wrong += [] if limits.most is None else [limits.most + 1]
        for value in [*wrong, *["other"] * (limits.least is None and bool(limits.choices))]:
            with pytest.raises(UserError, match=rf"^--{name} must be .*, got {value}\.$"):
                section(**{name: value}).validate()


def test_no_two_sections_have_a_flag_of_the_same_name() -> None:
    names = [field.name for section in sections().values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names)) == len(flag_names())


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ratings.dat"
    file.write_text("")
    for name in ("data_path", "cache_dir", "report_dir", "save_dir"):
        with pytest.raises(UserError, match=f"--{name} must be a folder, got the file .*ratings.dat"):
            parse_args(["--dump", "--dataset", "ml-1m", f"--{name}", str(file)])
    # The user's own tables may be one file.
    assert parse_args(["--data_path", str(file)]).data.data_path == str(file)


def test_an_unreadable_folder_passes_the_check_of_flags() -> None:
    name = "a" * 1000
    assert parse_args(["--dump", "--save_dir", name]).checkpoint.save_dir == name
    with pytest.raises(UserError, match=f"Cannot read --data_path {name}: no such file or folder"):
        parse_args(["--data_path", name])


@pytest.mark.parametrize("name", ["data_path", "cache_dir", "report_dir", "save_dir", "load", "export"])
def test_an_empty_folder_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name}: '  ' is not a folder; name one, or leave the flag out"):
        parse_args(["--dump", f"--{name}", "  "])


@pytest.mark.parametrize(
    ("arguments", "modes"),
    [
        ("--dump", ("train",)),
        ("--incremental_dump", ("train",)),
        ("--resume --load", ("train", "load")),
        ("--load", ("load",)),
        ("--load dumps/example/latest --train", ("train", "load")),
        ("--compact --load", ("compact", "load")),
    ],
)
def test_modes_run_in_the_order_of_a_models_life(arguments: str, modes: tuple[str, ...]) -> None:
    assert parse_args(arguments.split()).modes == modes


@pytest.mark.parametrize(
    ("program", "folder"),
    [
        ("example/retrieval.py", "dumps/retrieval"),
        ("/home/me/deepfm.py", "dumps/deepfm"),
        # As with `python -m` and `python -c`.
        ("recsuite/config/__main__.py", "dumps/example"),
        ("-c", "dumps/example"),
    ],
)
def test_each_script_has_a_folder_of_checkpoints_of_its_own(
    program: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert parse_args(["--dump"]).checkpoint.save_dir == folder
    assert f"(default: {folder})" in " ".join(build_parser().format_help().split())
    # As if it was not given.
    Config.of(save_dir=folder).validate()


def test_every_choice_passes() -> None:
    choices = {
        name: section.flag(name).choices
        for section in sections().values()
        for name in vars(section())
        if section.flag(name).choices
    }
    assert {"task", "split", "mp_context"} <= choices.keys()
    for name, found in choices.items():
        for choice in found:
            # Flags that some of the choices require.
            exports = name in ("format", "row_type")
            needed = {
                **({"export": "there", "format": "onnx"} if exports else {"load": "newest"}),
                "ttl": "9",
                "task": {"learned": "ranking", "hstu": "sequence"}.get(choice, "rating"),
                "split": "random" if name == "day_feature" else "time",
            }
            Config.of(**{**needed, name: choice}).validate()


def test_the_check_of_flags_exits_with_status_2_and_the_message() -> None:
    result = python("-m", "recsuite.config", "--num_workers", "-1")
    assert result.returncode == 2
    assert result.stderr.startswith("example.py: --num_workers must be between 0 and 1,024")
    assert result.stderr.count("\n") == 1
    assert python("-m", "recsuite.config", "--epochs", "2").returncode == 0


def test_flags_are_checked_with_the_standard_library_alone() -> None:
    # The first command in a fresh clone checks its flags before it installs a package; -S hides all of them.
    bare = {"PYTHONPATH": str(ROOT / "example")}
    assert "--epochs" in succeeded(python("-S", "-m", "recsuite.config", "--help", env=bare))
    assert python("-S", "-m", "recsuite.config", "--epochs", "0", env=bare).returncode == 2


@pytest.mark.parametrize("name", ["save_dir", "cache_dir", "report_dir"])
def test_a_url_where_a_folder_is_needed_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name} https://host/a is a URL"):
        Config.of(dump=True, **{name: "https://host/a"}).validate()
    # `str` of a `Path`, as `fit` takes it; a password stays secret.
    with pytest.raises(UserError, match=f"--{name} gs:/bucket/a is a URL"):
        Config.of(dump=True, **{name: str(Path("gs://me:secret@bucket/a"))}).validate()


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/a", "s3://bucket/a?token=secret"])
def test_a_store_is_refused_whose_url_has_a_login_and_the_sentence_does_not_show_it(url: str) -> None:
    with pytest.raises(UserError, match="--save_dir s3://bucket/a must not hold a login or a query") as found:
        Config.of(dump=True, save_dir=url).validate()
    assert "secret" not in str(found.value)
    Config.of(dump=True, save_dir="s3://bucket/a").validate()


def test_what_is_written_bit_by_bit_needs_a_folder_of_this_machine() -> None:
    with pytest.raises(
        UserError, match="--tensorboard requires a --report_dir on this machine, got s3://b/a"
    ):
        Config.of(tensorboard=True, report_dir="s3://b/a").validate()


def test_a_named_data_set_cannot_be_written_to_a_url() -> None:
    with pytest.raises(UserError, match="--data_path s3://bucket/a is a URL"):
        Config.of(dataset="ml-1m", data_path="s3://bucket/a").validate()
    Config.of(data_path="s3://bucket/a").validate()


@pytest.mark.parametrize(
    "given",
    [
        lambda url: serve.parse(["--save_dir", url]),
        lambda url: pipeline.parse(["--save_dir", url]),
        lambda url: online.parse(["--save_dir", url]),
        lambda url: results.main([url]),
        lambda url: ServedModel.open(url, model=make_model),
        lambda url: ServedModel.open(Path(url), model=make_model),
        lambda url: Follower(".", model=make_model, start=url),
        lambda url: Follower(url, model=make_model, start="."),
        lambda url: recsuite.FittedModel.save(SimpleNamespace(snapshot=None), url),
        lambda url: recsuite.fit(url, model=make_model, loss=make_loss, save_dir=Path(url)),
    ],
)
def test_every_script_and_call_refuses_a_url_as_a_folder(given: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match="is a URL and must be a path of this machine; give such a path"):
        given("hdfs://host:9000/a")


def test_a_folder_with_a_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(UserError, match=r"The name a\\udcff is not UTF-8; rename it"):
        Config.of(cache_dir="a\udcff").validate()


def test_scripts_pass_the_url_of_tables_to_their_trainings() -> None:
    for script in (online, pipeline):
        assert script.parse(["--data_path", "s3://bucket/a"])[0].data_path == "s3://bucket/a"


@pytest.mark.parametrize(
    ("fraction", "number", "expected"),
    [
        (AUTO, 0, 0),
        (AUTO, 800, 80),
        (AUTO, 8_000, 800),
        (AUTO, 80_000, 800),
        # A hundredth, as it was for any number.
        (AUTO, 80_669, 807),
        (AUTO, 10**9, 10**7),
        (0.01, 800, 8),
        (0, 800, 0),
    ],
)
def test_validation_takes_a_hundredth_of_many_events_and_a_tenth_of_few(
    fraction: float | str, number: int, expected: int
) -> None:
    assert Config.of(validation_fraction=fraction).data.num_validation(number) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("flags", "num_events", "batch_size"),
    [
        ({}, 16_723, 256),
        ({"task": "ranking"}, 16_723, 256),
        # 50 steps of 512, and one event less.
        ({}, 50 * 512, 512),
        ({}, 50 * 512 - 1, 256),
        # At least 64, and at most as many as the task takes.
        ({}, 1, 64),
        ({}, 10**9, 2048),
        ({"task": "response"}, 10**9, 2048),
        ({"task": "ranking"}, 10**9, 512),
        ({"task": "sequence"}, 10**9, 1024),
        # The length of a stream is unknown.
        ({"stream": True}, 1, 2048),
        ({"batch_size": 7}, 10**9, 7),
    ],
)
def test_the_batch_depends_on_the_events_and_not_on_the_processes(
    flags: dict[str, Any], num_events: int, batch_size: int, world_size: int
) -> None:
    config = Config.of(**flags)
    assert config.global_batch(num_events, world_size) == batch_size
    recorded = config.with_global_batch(num_events, world_size)
    assert recorded == config.replaced(batch_size=batch_size)
    assert recorded.with_global_batch(1, 5) == recorded


@pytest.mark.parametrize(
    ("flags", "num_events", "batch_size"),
    [
        ({"batch_size": 2048}, 50 * 2048, 2048),
        # With fewer than 50 steps an epoch the batch that would have 50, if that is not below the least one.
        ({"batch_size": 2048}, 50 * 2048 - 1, 2047),
        ({"batch_size": 65_536}, 150_000, 3000),
        ({"batch_size": 2048}, 100, 64),
        ({"batch_size": 2048, "stream": True}, 100, 2048),
        ({"batch_size": 2048}, 0, 2048),
    ],
)
def test_the_rate_grows_with_the_batch_up_to_a_fiftieth_of_an_epoch(
    flags: dict[str, Any], num_events: int, batch_size: int
) -> None:
    assert Config.of(**flags).rated_batch(num_events) == batch_size


def test_a_batch_of_one_process_is_multiplied_by_the_processes() -> None:
    recorded = Config.of(local_batch_size=100).with_global_batch(10_000, 3)
    assert (recorded.loader.batch_size, recorded.loader.local_batch_size) == (300, 0)


def test_a_batch_of_all_processes_and_one_of_each_cannot_both_be_given() -> None:
    sentence = "^--batch_size and --local_batch_size cannot be used together.$"
    with pytest.raises(UserError, match=sentence):
        parse_args(["--batch_size", "512", "--local_batch_size", "256"])
