"""Presets: chosen by name or by fit; they never override a given flag."""

from __future__ import annotations

from typing import Any

import pytest

from recsuite.checkpoint.recorded import MODEL_FLAGS
from recsuite.config.config import Config, flag_names
from recsuite.config.fitting import fitting_preset, preset_flags
from recsuite.config.parser import build_parser, parse_given
from recsuite.config.presets import AUTO, NONE, PRESETS, in_words
from recsuite.errors import UserError
from recsuite.tools import script
from tests.support.launch import EXAMPLE, ROOT

NAMES = [*PRESETS]


def begun(*flags: object) -> Config:
    """The configuration that a training with these flags begins with."""
    return script._begun(*parse_given([*map(str, flags)]))


def without_name(config: Config) -> dict[str, Any]:
    """The flags of a configuration but for --preset."""
    return {name: value for name, value in config.flags.items() if name != "preset"}


@pytest.mark.parametrize("name", NAMES)
def test_a_named_preset_equals_its_flags(name: str) -> None:
    line = in_words(PRESETS[name][1]).split()
    assert without_name(begun("--preset", name)) == without_name(begun("--preset", "none", *line))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "rating"),
        ("--split random", "rating"),
        ("--vocabulary dynamic", "rating"),
        ("--split u1 --lr 0.01", "rating"),
        ("--task ranking", "ranking"),
        ("--task ranking --split random", "ranking"),
        ("--task ranking --split leave_one_out", "ranking"),
        ("--task sequence", "sequence"),
    ],
)
def test_auto_chooses_the_fitting_preset_and_prints_its_flags(
    line: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = begun(*line.split())
    assert found.model.preset == name
    said = capsys.readouterr().out
    assert said.startswith(f"--preset {name} sets ")
    assert said.count("\n") == 1
    assert "--preset none sets nothing" in said
    assert begun(*line.split(), "--preset", name) == found
    assert begun(*line.split(), "--preset", "none") == Config.of(**_values(line), preset="none")


def _values(line: str) -> dict[str, Any]:
    config, given = parse_given([*line.split(), "--preset", "none"])
    return {name: config.flags[name] for name in given if name != "preset"}


@pytest.mark.parametrize(
    "line",
    [
        "--stream",
        *("--task ranking --history 0", "--task ranking --history_weights equal"),
    ],
)
def test_auto_chooses_no_preset_for_streams_or_given_history_flags(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, given = parse_given(line.split())
    assert fitting_preset(config, given) == NONE
    assert begun(*line.split()) == config
    assert "--preset" not in capsys.readouterr().out
    assert fitting_preset(Config.of(task="response", split="random"), ["task", "split"]) == NONE


def test_given_flags_override_those_of_a_preset() -> None:
    found = begun("--preset", "ranking", "--epochs", 3, "--history", 20, "--batch_size", 2048)
    assert (found.training.epochs, found.data.history, found.loader.batch_size) == (3, 20, 2048)
    assert found.model.embedding_dim == 128
    # Also where they say what the preset is not for, as long as it can be.
    assert begun("--preset", "ranking", "--history_weights", "equal").model.embedding_dim == 128


def test_hstu_blocks_ignore_the_mlp_widths_of_a_preset() -> None:
    assert begun("--preset", "sequence", "--block", "hstu").model.mlp_dims == ()
    assert begun("--preset", "sequence").model.mlp_dims == (128,)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--preset best", "--preset must be one of auto, rating, solved, ranking, sequence, none, got best"),
        ("--preset ranking --history 0", "^--preset ranking sets --history_weights learned, but .* none.$"),
        ("--preset solved --stream", "^--preset solved sets --initial_rows gaussian, but .* none.$"),
        ("--preset ranking --task rating", "^--preset ranking sets --history_weights learned, but .* none.$"),
        (
            "--preset ranking --block hstu",
            "^--preset ranking sets --task ranking, but --block requires --task sequence",
        ),
        ("--preset ranking --lr 0", "^--lr must be above 0, got 0.0.$"),
    ],
)
def test_a_preset_that_contradicts_given_flags_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_given(line.split())


def test_help_shows_each_preset_with_its_values() -> None:
    page = " ".join(build_parser(shows_all=True).format_help().split())
    for name, (sentence, flags) in PRESETS.items():
        assert f"--preset {name}: {sentence} {in_words(flags)}" in page


def test_presets_set_existing_flags_and_checkpoints_record_the_preset() -> None:
    assert {flag for _, flags in PRESETS.values() for flag in flags} <= flag_names().keys()
    assert "preset" in MODEL_FLAGS
    assert Config().model.preset == AUTO
    assert preset_flags(Config(), ()) == {}


@pytest.mark.parametrize(("name", "preset"), [("retrieval", "ranking"), ("sequential", "sequence")])
def test_a_script_names_its_preset_in_its_defaults(name: str, preset: str) -> None:
    code = (ROOT / "example" / f"{name}.py").read_text()
    assert f'"--task", "{preset}", "--preset", "{preset}"' in code
    assert "--preset" not in EXAMPLE.read_text()
