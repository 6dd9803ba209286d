"""First rows by the Gaussian model: every posterior is exact, and lists are used only where they help."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from example import make_model
from recsuite.checkpoint.folder import full_checkpoints_in
from recsuite.config.parser import parse_args
from recsuite.config.sections import ModelConfig
from recsuite.datasets.opening import open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.extras import gaussian
from recsuite.extras.gaussian import GaussianModel, Rows, Unknowns, gaussian_rows
from recsuite.extras.reports.compare import read_report
from recsuite.runtime.process import RuntimeContext
from recsuite.training.loop import Training
from tests.support.csv_ratings import write_ratings
from tests.support.launch import EXAMPLE, python, read_json, succeeded, torchrun
from tests.support.published import tensors_of

D, NOISE = 4, 0.7


def write_planted(
    folder: Path, users: int, items: int, number: int, by_choice: bool = False, rank: int = 2
) -> list[str]:
    """Write ratings of a planted rank, and return the flags that read them.

    by_choice: a user's rating of any item depends instead on the taste by which the user chooses items.
    """
    draw = np.random.default_rng(5)
    taste = draw.random((users, 1))
    chance = np.ones((users, items))
    if by_choice:
        chance = np.where(np.arange(items) < items // 2, taste, 1 - taste)
    pairs = draw.choice(users * items, number, replace=False, p=(chance / chance.sum()).ravel())
    user, item = np.divmod(pairs, items)
    u, v = draw.normal(size=(users, rank)), draw.normal(size=(items, rank))
    score = 2 + 2 * taste[user, 0] if by_choice else 3 + (u[user] * v[item]).sum(axis=1) / math.sqrt(2 * rank)
    score = (score + 0.4 * draw.normal(size=number)).clip(0.5, 5).round(2)
    # Two days, so that users have days with several ratings.
    times = 10**9 + 86_400 * (np.arange(number) % 2) + draw.permutation(number)
    write_ratings(folder / "ratings", zip(user + 1, item + 1, score, times, strict=True))
    flags = {"data_path": folder / "ratings", "split": "random", "cache_dir": folder / "columns"}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def model(tmp_path: Path) -> GaussianModel:
    """A model with lists, genres, years and days, in the middle of its sweeps."""
    flags = [*write_planted(tmp_path, 12, 8, 60), "--day_feature", "user"]
    found = GaussianModel(open_columns(parse_args(flags)), D, seed=0)
    for side in (found.users, found.items):
        side.side.roots[:] = side.shares_of_events
    # With weights of 1 a missing one would not show.
    found.weights[:] = np.random.default_rng(1).uniform(0.5, 2, len(found.weights))
    for _ in range(3):
        found.sweep()
    found.noise = NOISE
    return found


def vectors(unknowns: Unknowns) -> np.ndarray:
    """The vector of a side of each event, float64 [n, d], from the definition of the model."""
    side = unknowns.side
    found = np.zeros((len(side.labels), D))
    for part in unknowns.of_owners.values():
        for owner, row, share in zip(part.members, part.rows(), part.shares, strict=True):
            found[side.own == owner] += share * part.means[row]
    for part in unknowns.of_events.values():
        found[part.members] += part.means[part.rows()]
    for event, owner in enumerate(side.own):
        others = (side.own == owner) & (np.arange(len(side.own)) != event)
        found[event] += unknowns.side.roots[owner] * unknowns.of_lists.means[side.other[others]].sum(axis=0)
    return found


def coefficients(unknowns: Unknowns, kind: str, part: Rows, row: int) -> np.ndarray:
    """The factor of a row in the vector of each event, float64 [n], from the definition of the model."""
    side = unknowns.side
    found = np.zeros(len(side.labels))
    members = slice(part.offsets[row], part.offsets[row + 1])
    if kind == "owners":
        for owner, share in zip(part.members[members], part.shares[members], strict=True):
            found[side.own == owner] = share
    elif kind == "events":
        found[part.members[members]] = 1
    else:
        has_it = np.isin(side.own, side.own[part.members[members]])
        found[has_it & (side.other != row)] = side.roots[side.own[has_it & (side.other != row)]]
    return found


def posterior(model: GaussianModel, unknowns: Unknowns, kind: str, part: Rows, row: int) -> Any:
    """Mean and covariance of a row given all others: a Bayesian linear regression on its events."""
    mine, other = (model.users, model.items) if unknowns is model.users else (model.items, model.users)
    x, y, factors = vectors(mine), vectors(other), coefficients(unknowns, kind, part, row)
    precision, sums = np.diag(1 / part.variances), np.zeros(D)
    for event, factor in enumerate(factors):
        covariance = other.side.covariances[other.side.own[event]]
        w = np.concatenate([[1.0], y[event, 1:]])
        moment = np.outer(w, w)
        moment[1:, 1:] += covariance[1:, 1:]
        target = w * (model.labels[event] - y[event, 0]) - np.concatenate([[0.0], covariance[0, 1:]])
        weight = model.weights[event] / NOISE
        precision += weight * factor**2 * moment
        sums += weight * factor * (target - moment @ (x[event] - factor * part.means[row]))
    return np.linalg.solve(precision, sums), np.linalg.inv(precision)


@pytest.mark.parametrize(
    ("side", "kind", "name"),
    [
        ("users", "owners", "user"),
        ("items", "owners", "movie"),
        ("items", "owners", "genres"),
        ("users", "events", "user_day"),
        ("users", "lists", ""),
        ("items", "lists", ""),
    ],
)
def test_the_last_row_of_a_sweep_has_the_posterior_of_linear_regression(
    model: GaussianModel, side: str, kind: str, name: str
) -> None:
    mine, other = (model.users, model.items) if side == "users" else (model.items, model.users)
    part = mine.of_lists if kind == "lists" else {**mine.of_owners, **mine.of_events}[name]
    rests, moments = np.empty((len(mine.shares_of_events), D)), np.empty((len(mine.shares_of_events), D, D))
    gaussian.collect(0, len(rests), mine.side, other.side, rests, moments)
    if kind == "events":
        gaussian.solve_events(0, len(part.means), mine.side, other.side, part, NOISE)
    elif kind == "lists":
        gaussian.solve_lists(mine.side, other.side, part, NOISE, rests, moments)
    else:
        gaussian.solve_shared(mine.side, part, NOISE, rests, moments)
    # All rows before it have their new values, so the sums that the loops update must be right too.
    last = np.flatnonzero(np.diff(part.offsets))[-1]
    mean, covariance = posterior(model, mine, kind, part, int(last))
    np.testing.assert_allclose(part.means[last], mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(part.covariances[last], covariance, rtol=1e-8, atol=1e-10)


def test_the_noise_is_the_mean_squared_error_of_drawn_vectors(model: GaussianModel) -> None:
    draw, x, y = np.random.default_rng(0), vectors(model.users), vectors(model.items)
    errors = []
    for event in range(len(model.labels)):
        u, v = (
            draw.multivariate_normal(means[event], side.side.covariances[side.side.own[event]], 20_000)
            for means, side in ((x, model.users), (y, model.items))
        )
        predicted = u[:, 0] + v[:, 0] + (u[:, 1:] * v[:, 1:]).sum(axis=1)
        errors.append(((model.labels[event] - predicted) ** 2).mean())
    expected = np.average(errors, weights=model.weights)
    assert model.expected_error() == pytest.approx(expected, rel=0.01)


def test_any_number_of_threads_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*write_planted(tmp_path, 60, 20, 600), "--day_feature", "user"]
    columns, found = open_columns(parse_args(flags)), []
    for cores in (1, 3):
        monkeypatch.setattr(gaussian, "allowed_cores", lambda cores=cores: cores)
        found.append(gaussian_rows(columns, ModelConfig(embedding_dim=D), seed=0))
    for name, rows in found[0].items():
        np.testing.assert_array_equal(rows, found[1][name], err_msg=name)


def test_planted_factors_are_found_almost_to_the_noise(tmp_path: Path) -> None:
    columns = open_columns(parse_args(write_planted(tmp_path, 300, 80, 9_000)))
    rows = gaussian_rows(columns, ModelConfig(embedding_dim=8), seed=0)
    # 0.4 is the noise; a fifth more is what 30 ratings of each user leave open. The biases reach 0.78.
    assert predicted_error(columns, rows) < 0.5
    assert columns.baselines["predictions"]["biases"]["rmse"] > 0.75


def test_ten_factors_of_equal_size_do_not_vanish_in_the_first_sweeps(tmp_path: Path) -> None:
    columns = open_columns(parse_args(write_planted(tmp_path, 400, 100, 16_000, rank=10)))
    rows = gaussian_rows(columns, ModelConfig(), seed=0)
    # Without any factor it is that of the biases.
    assert predicted_error(columns, rows) < 0.75 * columns.baselines["predictions"]["biases"]["rmse"]


def test_lists_are_used_where_choices_tell_about_labels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = write_planted(tmp_path, 400, 40, 2_400, by_choice=True)
    columns = open_columns(parse_args([*flags, "--validation_fraction", "0.2"]))
    rows = gaussian_rows(columns, ModelConfig(embedding_dim=4), seed=0)
    assert "with all items of each user: " in capfd.readouterr().out
    assert predicted_error(columns, rows) < 0.97 * columns.baselines["predictions"]["biases"]["rmse"]


def predicted_error(columns: Any, rows: dict[str, np.ndarray]) -> float:
    """RMSE of the test events by the sums of rows."""
    events, schema = columns.column("rows")[-columns.num_test :], columns.schema
    user, item = (columns.column(f"{schema.name_of(each)}_features") for each in ("user", "item"))
    u = rows["user"][user["features"][events["user"], 0]]
    v = rows["movie"][item["features"][events["item"], 0]]
    for table in columns.tables:
        # All movies have one genre and one year, which are the last rows.
        if table.feature.entity == "item" and table.name != "movie":
            v = v + rows[table.name][-1]
    predicted = columns.mean_label + u[:, 0] + v[:, 0] + (u[:, 1:] * v[:, 1:]).sum(axis=1)
    return float(np.sqrt(np.mean((predicted - events["label"]) ** 2)))


@pytest.mark.parametrize("duplicates", ["last", "keep"])
def test_lists_are_not_tried_where_users_have_items_more_than_once(tmp_path: Path, duplicates: str) -> None:
    ratings = [(1 + k % 30, 1 + k % 7, 1 + k % 5, 10**9 + k) for k in range(1000)]
    write_ratings(tmp_path / "ratings", ratings)
    flags = {"data_path": tmp_path / "ratings", "duplicates": duplicates, "split": "random"}
    columns = open_columns(
        parse_args([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    )
    assert GaussianModel(columns, D, seed=0).may_have_lists == (duplicates == "last")


def test_unknown_users_and_items_begin_with_zero_rows(tmp_path: Path) -> None:
    columns = open_columns(parse_args(write_planted(tmp_path, 40, 20, 200)))
    rows = gaussian_rows(columns, ModelConfig(), seed=0)
    sizes = {table.name: (table.rows, 12) for table in columns.tables}
    assert {name: each.shape for name, each in rows.items()} == sizes
    assert not rows["user"][0].any()
    assert np.abs(rows["user"][1:]).sum(axis=1).min() > 0


def test_dynamic_tables_and_too_little_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = write_planted(tmp_path, 40, 20, 200)
    dynamic = open_columns(parse_args([*flags, "--vocabulary", "dynamic"]))
    with pytest.raises(UserError, match="requires tables of a fixed size, and user is dynamic"):
        gaussian_rows(dynamic, ModelConfig(), seed=0)
    monkeypatch.setattr(gaussian, "free_memory", lambda: 10_000)
    with pytest.raises(UserError, match=r"KiB of memory for 144 ratings, 60 users and items and \d+ rows"):
        gaussian_rows(open_columns(parse_args(flags)), ModelConfig(), seed=0)


def begun(flags: list[str], context: RuntimeContext, **arguments: Any) -> dict[str, torch.Tensor]:
    """The rows of all tables before the first step."""
    config = parse_args(flags)
    with open_data(config, context) as data, Training(data, config, context) as training:
        tables = training.shard(make_model, **arguments).tables
        return {name: table.export()["weight"].clone() for name, table in tables.items()}


def test_a_function_gives_initial_rows_and_the_others_stay_as_drawn(
    tmp_path: Path, context: RuntimeContext
) -> None:
    mine = np.arange(41 * 3, dtype=np.float64).reshape(41, 3)
    flags = [*write_planted(tmp_path, 40, 20, 600), "--preset", "none", "--embedding_dim", "4"]
    drawn = begun(flags, context)
    rows = begun(flags, context, initial_rows=lambda columns, config, seed: {"user": mine})
    np.testing.assert_array_equal(rows["user"][:, :3], mine)
    assert torch.equal(rows["user"][:, 3], drawn["user"][:, 3])
    assert all(torch.equal(rows[name], drawn[name]) for name in drawn if name != "user")
    wide, bad = np.zeros((41, 5)), np.full((41, 3), np.nan)
    for wrong in ({"user": mine[:-1]}, {"nobody": mine}, {"user": wide}, {"user": mine[:, 0]}):
        with pytest.raises(UserError, match="initial_rows must return all rows of a table, got"):
            begun(flags, context, initial_rows=lambda columns, config, seed, wrong=wrong: wrong)
    with pytest.raises(UserError, match="initial_rows must return finite numbers, got others for user"):
        begun(flags, context, initial_rows=lambda columns, config, seed: {"user": bad})


def test_one_and_three_processes_begin_with_the_same_rows_and_a_resumed_one_with_its_own(
    tmp_path: Path,
) -> None:
    flags, found = [*write_planted(tmp_path, 60, 30, 900), "--preset", "solved"], {}
    for number in (1, 3):
        folder = tmp_path / str(number)
        steps = ("--epochs", "1", "--inc_dump", "--dump_every", "2", "--save_dir", folder)
        launch = python if number == 1 else functools.partial(torchrun, number)
        succeeded(launch(EXAMPLE, *flags, *steps, timeout=120))
        first = full_checkpoints_in(folder)[0]
        assert first.name.endswith("-000000000")
        # A table lies on one process, or each has some of its rows, in order.
        parts: dict[str, list[np.ndarray]] = {}
        for name, rows in sorted(tensors_of(first).items()):
            parts.setdefault(name.partition("/")[2], []).append(rows)
        found[number] = {name: np.concatenate(rows) for name, rows in parts.items() if "weight" in name}
    for name, rows in found[1].items():
        if name.startswith("tables."):
            np.testing.assert_array_equal(rows, found[3][name], err_msg=name)
    assert np.abs(found[1]["tables.user.weight"][1:]).sum(axis=1).min() > 0
    again = ("--epochs", "2", "--resume", "--dump", "--save_dir", tmp_path / "1")
    assert "Gaussian model" not in succeeded(python(EXAMPLE, *flags, *again, timeout=120))


def test_the_test_and_a_load_use_the_initial_rows_if_no_epoch_is_better(tmp_path: Path) -> None:
    flags = [*write_planted(tmp_path, 60, 30, 900), "--preset", "solved", "--lr", "5", "--epochs", "2"]
    reports = {}
    # In memory, in a folder of checkpoints, and resumed from the initial rows after a kill.
    for name, more in (
        ("memory", ()),
        ("folder", ("--dump", "--save_dir", tmp_path / "folder")),
        ("resumed", ("--dump", "--resume", "--save_dir", tmp_path / "resumed")),
    ):
        if name == "resumed":
            first = full_checkpoints_in(tmp_path / "folder")[0]
            shutil.copytree(first, tmp_path / "resumed" / first.name)
        folder = tmp_path / f"report-{name}"
        output = succeeded(python(EXAMPLE, *flags, *more, "--report_dir", folder, timeout=120))
        assert "the test uses the initial rows, the best on the validation ratings" in output
        reports[name] = read_json(folder / "metrics.json")
    memory = reports["memory"]
    assert all(report["test"] == memory["test"] for report in reports.values())
    assert memory["test_epoch"] == 0
    assert memory["initial"]["rmse"] < min(epoch["validation"]["rmse"] for epoch in memory["epochs"])
    assert reports["resumed"]["initial"] == reports["folder"]["initial"] == memory["initial"]
    run = read_report(tmp_path / "report-memory" / "metrics.json", "memory")
    assert run.validation == memory["initial"]["rmse"]
    data = ("--data_path", tmp_path / "ratings", "--split", "random")
    loaded = succeeded(torchrun(2, EXAMPLE, "--load", "--save_dir", tmp_path / "folder", *data))
    assert f"{memory['test']['rmse']:.4f}" in loaded


def test_a_stream_refuses_the_start() -> None:
    with pytest.raises(UserError, match="--initial_rows gaussian cannot be used with --stream"):
        parse_args(["--stream", "--initial_rows", "gaussian"])
