"""The command line: what it reads, and the one sentence for each thing it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import online
import pipeline
import recsuite
import serve
from recsuite.config.config import Config, flag_names, sections
from recsuite.config.parser import parse_args, sentences_of
from recsuite.config.sections import Section
from recsuite.errors import UserError
from recsuite.monitoring import results
from recsuite.serving.served import Follower, ServedModel
from tests.support.launch import ROOT, python, succeeded


def test_no_flag_gives_the_defaults_and_trains() -> None:
    config = parse_args([])
    assert config == Config()
    assert config.modes == ("train",)
    assert parse_args(["--train"]).modes == ("train",)


def test_every_field_is_a_flag_with_a_sentence() -> None:
    text = python("-m", "recsuite.config", "--help").stdout
    for name in flag_names():
        assert f"--{name}" in text
    for name in sections():
        assert f"\n{name}:\n" in text
    assert "Ratings per rank and step" in text


def test_values_become_their_fields_types() -> None:
    config = parse_args(["--mlp_dims", "128,64,1", "--lr", "0.5", "--epochs", "3", "--dataset", "ml-1m"])
    assert parse_args(["--num_workers", "3"]).loader.num_workers == 3
    assert parse_args(["--num_workers", "auto"]).loader.num_workers == "auto"
    assert config.model.mlp_dims == (128, 64, 1)
    assert config.optimizer.lr == 0.5
    assert config.training.epochs == 3
    assert config.data.dataset == "ml-1m"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--num_workers -1", "--num_workers -1 is negative; give 0"),
        ("--num_workers some", "--num_workers: 'some' is neither a whole number nor auto"),
        ("--prefetch_factor 0", "--prefetch_factor 0 is too small; give at least 1"),
        ("--worker_timeout 0", "--worker_timeout 0 is too small; give at least 1"),
        ("--num_workers 1 --timeout 60", "--worker_timeout 120 is not below --timeout 60"),
        ("--mp_context threads", "--mp_context threads is not known; choose one of spawn, forkserver, fork"),
        ("--history -1", "--history -1 is negative; give 0 for none"),
        ("--batch_size 0", "--batch_size 0 is too small; give at least 1"),
        ("--epochs 0", "--epochs 0 is too small"),
        (f"--epochs {10**400}", "is too large; give at most 1,000,000"),
        ("--epochs x", "--epochs: invalid int value: 'x'"),
        ("--timeout 0", "--timeout 0 is too small"),
        ("--mlp_dims 128,x", "'128,x' is not a list of whole numbers like 128,64"),
        ("--mlp_dims 99999", "--mlp_dims 99999 is too large; give at most 100 layers of 16,384"),
        ("--embedding_dim 1000000", "--embedding_dim 1000000 is too large; give at most 16,384"),
        ("--mlp_dims 128,0", "--mlp_dims 128,0 has a layer without a unit"),
        ("--unknown 3", "Unrecognized arguments: --unknown 3"),
        ("--epoch 3", "Unrecognized arguments: --epoch 3 (did you mean --epochs?); see --help"),
        ("--batch-size=3 --lrr 1", "--lrr 1 (did you mean --batch_size and --lr?); see"),
        ("--incremental-dump", "(did you mean --incremental_dump?)"),
        ("--workers 2 --batch 8", "(did you mean --num_workers and --batch_size?)"),
        ("--learning_rate 1", "(did you mean --lr?)"),
        # What is near no flag gets none.
        ("--optimizer adam", "Unrecognized arguments: --optimizer adam; see --help"),
        *(
            (flag, f"Unrecognized arguments: {flag} (NPROC=2 ./run.sh or torchrun --nproc_per_node 2 ")
            for flag in ("--gpus 2", "--gpu 0", "--num_gpus=2", "--nproc 2", "--world_size 2")
        ),
        ("3", "Unrecognized arguments: 3; see --help"),
        ("--dataset ml-2m", "--dataset ml-2m is not known; choose one of synthetic, ml-100k"),
        ("--split newest", "--split newest is not known; choose one of time, random"),
        ("--split u1 --dataset ml-1m", "--split u1 belongs to ml-100k, not to ml-1m"),
        ("--bad_rows keep", "--bad_rows keep is not known"),
        ("--bad_rows skip --max_bad_rows 2", "--max_bad_rows 2.0 is not a share; give 0 to 1"),
        ("--bad_rows skip --max_bad_rows nan", "--max_bad_rows nan is not a share; give 0 to 1"),
        ("--max_bad_rows 0.1", "--max_bad_rows 0.1 says how many rows are left out, and none are"),
        ("--pipeline fast", "--pipeline fast is not known"),
        ("--lr 0", "--lr 0.0 cannot learn"),
        ("--lr nan", "--lr nan cannot learn"),
        ("--dense_lr -1", "--dense_lr -1.0 cannot learn"),
        (
            "--weight_decay 30",
            "--weight_decay 30.0 over --epochs 8 leaves nothing of a row; give 0 to 120 / --epochs",
        ),
        ("--embedding_dim 30", "--embedding_dim 30 does not fit FBGEMM's kernels; give a multiple of 4"),
        ("--test_fraction 1", "--test_fraction 1.0 leaves no training or no test"),
        ("--synthetic_ratings 10", "--synthetic_ratings 10 is out of range"),
        ("--profile 5 --load", "--profile looks at a training, and none is asked for; give --train too"),
        ("--tensorboard --recommend --user 5", "--tensorboard looks at a training, and none is asked for"),
        ("--profile -1", "--profile -1 is negative; give 0 for none"),
        ("--profile 10001", "--profile 10001 is too large; give at most 10,000"),
        ("--tensorboard", "--tensorboard writes into --report_dir, and there is none; give one"),
        ("--history 10001", "--history 10001 is too large; give at most 10,000"),
        ("--prefetch_factor 65", "--prefetch_factor 65 is too large; give at most 64"),
        ("--batch_size 99999999999", "--batch_size 99999999999 is too large; give at most 16,777,216"),
        ("--num_workers 100000", "--num_workers 100000 is too large; give at most 1,024"),
        ("--seed -1", "--seed -1 is out of range"),
        ("--keep 0 --dump", "--keep 0 is too small; give at least 1"),
        ("--dump_every -1 --dump", "--dump_every -1 is negative; give 0 for none"),
        (
            "--dump_every 5",
            "--dump_every says how checkpoints are written, and none are written; give --dump too",
        ),
        (
            "--async_dump --load",
            "--async_dump says how checkpoints are written, and none are written; give --dump too",
        ),
        ("--compact --dump_every 5", "--dump_every says how checkpoints are written, and none are written"),
        (
            "--save_dir here",
            "--save_dir here is for checkpoints, and none are written or read; give --dump or",
        ),
        ("--until 5", "--until 5 says where a load stops, and none is asked for; give --load too"),
        ("--checkpoint latest", "--checkpoint latest says what is read, and nothing is; give --load too"),
        (
            "--load elsewhere --resume",
            "--load elsewhere is outside --save_dir dumps, where the requested training writes; "
            "give --load alone, or without a folder",
        ),
        ("--load --checkpoint newest", "--checkpoint newest is not known; choose one of best, latest"),
        ("--until -2 --load", "--until -2 is not a step; give the number of one, 0 or more"),
        ("--user 5", "--user says what is recommended, and nothing is; give --recommend too"),
        ("--recommend", "--recommend needs --user, the raw id of a user"),
        ("--recommend --user 5 --top 0", "--top 0 is too small; give at least 1"),
        ("--task sequence --stream", "--task sequence and --stream exclude each other"),
        ("--negatives 5", "--negatives 5 is for --task ranking and sequence, not rating"),
        ("--task ranking --block hstu", "--block hstu is for --task sequence, and not for --task ranking"),
        ("--doctor --dump", "--doctor and --dump exclude each other; give one of them"),
        ("--schema shop --load", "--schema and --load exclude each other; give one of them"),
        ("--schema shop --rebuild", "--rebuild makes columns again, and --schema makes none; leave it out"),
        ("--export served --load", "--export and --load exclude each other; give one of them"),
        ("--compact --inc_dump", "--compact and --inc_dump exclude each other; give one of them"),
        ("--export", "--export: expected one argument"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_args(arguments.split())
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_flags_are_set_by_name_whatever_section_they_are_in() -> None:
    config = Config.of(epochs=2, batch_size=512, save_dir="here")
    assert (config.training.epochs, config.loader.batch_size) == (2, 512)
    other = config.replaced(epochs=3, seed=7)
    assert (other.training.epochs, other.loader.batch_size, other.runtime.seed) == (3, 512, 7)
    # It is another one; the first stays as it was.
    assert (config.training.epochs, config.runtime.seed) == (2, 0)
    assert Config.of() == Config()
    with pytest.raises(KeyError, match="epoch"):
        Config.of(epoch=2)


def test_the_flags_of_a_configuration_make_it_again() -> None:
    config = Config.of(epochs=2, mlp_dims=(8, 4), num_workers="auto", load="newest", until=3)
    assert list(config.flags) == list(flag_names())
    assert Config.of(**config.flags) == config


@pytest.mark.parametrize("section", sections().values(), ids=lambda section: section.__name__)
def test_the_defaults_of_a_section_are_valid_and_each_flag_has_a_sentence(section: type[Section]) -> None:
    section().validate()
    names = [field.name for field in dataclasses.fields(section)]
    assert all(section().is_default(name) for name in names)
    sentences = sentences_of(section)
    assert list(sentences) == names
    assert all(sentence.endswith(".") for sentence in sentences.values())


@pytest.mark.parametrize("section", sections().values(), ids=lambda section: section.__name__)
def test_a_section_refuses_its_own_values_by_the_flag(section: type[Section]) -> None:
    wrong = {
        **dict.fromkeys(section.CHOICES, "other"),
        **dict.fromkeys(section.POSITIVE, 0),
        **{name: most + 1 for name, most in section.MOST.items()},
    }
    for name, value in wrong.items():
        with pytest.raises(UserError, match=rf"^--{name} {value} is "):
            section(**{name: value}).validate()


def test_no_two_sections_have_a_flag_of_the_same_name() -> None:
    names = [field.name for section in sections().values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names)) == len(flag_names())


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ratings.dat"
    file.write_text("")
    for name in ("data_path", "cache_dir", "report_dir", "save_dir"):
        with pytest.raises(UserError, match=f"--{name} .*ratings.dat is a file; give a folder"):
            parse_args(["--dump", "--dataset", "ml-1m", f"--{name}", str(file)])
    # Tables of one's own may be one file.
    assert parse_args(["--data_path", str(file)]).data.data_path == str(file)


def test_a_folder_that_cannot_be_looked_at_is_left_to_who_opens_it() -> None:
    name = "a" * 1000
    assert parse_args(["--dump", "--save_dir", name]).checkpoint.save_dir == name
    with pytest.raises(UserError, match=f"--data_path {name} is not there; give the folder"):
        parse_args(["--data_path", name])


@pytest.mark.parametrize("name", ["data_path", "cache_dir", "report_dir", "save_dir", "load", "export"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_folder_is_refused_for_it_would_mean_another_one(name: str, empty: str) -> None:
    with pytest.raises(
        UserError, match=f"--{name}: '{empty}' is not a folder; name one, or leave the flag out"
    ):
        parse_args(["--dump", f"--{name}", empty])


@pytest.mark.parametrize(
    ("arguments", "modes"),
    [
        ("--dump", ("train",)),
        ("--incremental_dump", ("train",)),
        ("--resume --load", ("train", "load")),
        ("--load", ("load",)),
        ("--load dumps/latest --train", ("train", "load")),
        ("--compact --load", ("compact", "load")),
    ],
)
def test_modes_run_in_the_order_of_a_models_life(arguments: str, modes: tuple[str, ...]) -> None:
    assert parse_args(arguments.split()).modes == modes


def test_every_choice_passes() -> None:
    choices = {name: found for section in sections().values() for name, found in section.CHOICES.items()}
    assert {"task", "split", "mp_context"} <= choices.keys()
    for name, found in choices.items():
        for choice in found:
            # --checkpoint is for what reads, --evict ttl needs a time to live, weights of histories are
            # learned by rankings alone, blocks are those of sequences, and only a random split has the same
            # days on both sides.
            needed = {
                "load": "newest",
                "ttl": "9",
                "task": {"learned": "ranking", "hstu": "sequence"}.get(choice, "rating"),
                "split": "random" if name == "days" else "time",
            }
            Config.of(**{**needed, name: choice}).validate()


def test_the_check_alone_exits_with_status_2_and_the_sentence() -> None:
    result = python("-m", "recsuite.config", "--num_workers", "-1")
    assert result.returncode == 2
    assert result.stderr.startswith("example.py: --num_workers -1 is negative")
    assert result.stderr.count("\n") == 1
    assert python("-m", "recsuite.config", "--epochs", "2").returncode == 0


def test_flags_are_checked_with_the_standard_library_alone() -> None:
    # The first command in a fresh clone checks its flags before it installs a package; -S hides all of them.
    bare = {"PYTHONPATH": str(ROOT / "example")}
    assert "--epochs" in succeeded(python("-S", "-m", "recsuite.config", "--help", env=bare))
    assert python("-S", "-m", "recsuite.config", "--epochs", "0", env=bare).returncode == 2


@pytest.mark.parametrize("name", ["save_dir", "cache_dir", "report_dir"])
def test_a_url_where_a_folder_is_needed_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name} s3://bucket/a is a URL"):
        Config.of(dump=True, **{name: "s3://bucket/a"}).validate()
    # `str` of a `Path`, as `fit` takes it; a password stays secret.
    with pytest.raises(UserError, match=f"--{name} gs:/bucket/a is a URL"):
        Config.of(dump=True, **{name: str(Path("gs://me:secret@bucket/a"))}).validate()


def test_a_set_with_a_name_is_not_written_into_a_url() -> None:
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
        lambda url: ServedModel.open(url),
        lambda url: ServedModel.open(Path(url)),
        lambda url: Follower(".", start=url),
        lambda url: Follower(url, start="."),
        lambda url: recsuite.FittedModel.save(SimpleNamespace(snapshot=None), url),
        lambda url: recsuite.fit(url, save_dir=Path(url)),
    ],
)
@pytest.mark.parametrize("url", ["s3://bucket/a", "hdfs://host:9000/a", "file:///tmp/a"])
def test_a_url_is_no_path_for_any_script_or_call(url: str, given: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match="is a URL and must be a path of this machine; give such a path"):
        given(url)


def test_a_folder_whose_name_is_not_utf_8_is_refused() -> None:
    with pytest.raises(UserError, match=r"The name a\\udcff is not UTF-8; rename it"):
        Config.of(cache_dir="a\udcff").validate()


def test_tables_at_a_url_reach_the_trainings_as_they_were_given() -> None:
    for script in (online, pipeline):
        assert script.parse(["--data_path", "s3://bucket/a"])[0].data_path == "s3://bucket/a"
