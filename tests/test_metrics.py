"""Metrics against answers that can be worked out by hand or by brute force."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from recsuite import metrics
from recsuite.config.sections import MOST_CUTOFF
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.preparation.baselines import (
    Biases,
    Oracle,
    baselines_of,
    fit_biases,
    popularity_ranks,
)
from recsuite.datasets.preparation.histories import StoredEvents, write_histories
from recsuite.datasets.preparation.loops import grouped
from recsuite.metrics import (
    LEAST_CALIBRATED,
    LEAST_OF_EACH,
    NEVER_FOUND,
    Calibration,
    Metrics,
    auc,
    fit_calibration,
    measure,
    measure_probabilities,
    measure_ranks,
    ranks_by_chance,
)

LIKED = 4.0
NO_CALIBRATION = Calibration(float("nan"), float("nan"))


def measured(predictions: np.ndarray, labels: np.ndarray, link: Calibration = NO_CALIBRATION) -> Metrics:
    return measure(predictions, labels, labels >= LIKED, link).values


def test_rmse_and_mae_have_the_values_worked_out_by_hand() -> None:
    metrics = measured(np.array([3.0, 5.0, 1.0, 4.0]), np.array([3.0, 4.0, 3.0, 5.0]))
    assert metrics["rmse"] == pytest.approx(np.sqrt(6 / 4))
    assert metrics["mae"] == pytest.approx(1.0)


def test_auc_equals_counting_every_pair_ties_included() -> None:
    draw = np.random.default_rng(0)
    scores = draw.integers(0, 20, 300).astype(np.float32)
    positive = draw.random(300) < 0.4
    above = scores[positive][:, None] - scores[~positive][None, :]
    assert auc(scores, positive) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean(), abs=1e-12)


def test_auc_of_a_single_class_is_not_a_number() -> None:
    assert np.isnan(measured(np.array([1.0, 2.0]), np.array([LIKED, 5.0]))["auc"])


def fitted(user: np.ndarray, item: np.ndarray, label: np.ndarray, num_users: int, num_items: int) -> Biases:
    """The bias baseline of all these events."""
    return fit_biases(user, item, label, (num_users, num_items), [len(label)])[0]


def test_the_bias_baseline_finds_planted_biases() -> None:
    draw = np.random.default_rng(2)
    users, movies = draw.normal(0, 0.5, 50), draw.normal(0, 0.5, 40)
    users, movies = users - users.mean(), movies - movies.mean()
    # Every user rates every movie a hundred times, so that damping hardly counts.
    user = np.tile(np.repeat(np.arange(50), 40), 100)
    movie = np.tile(np.tile(np.arange(40), 50), 100)
    biases = fitted(user, movie, 3.5 + users[user] + movies[movie], 50, 40)
    assert biases.mean == pytest.approx(3.5)
    np.testing.assert_allclose(biases.user, users, atol=2e-3)
    np.testing.assert_allclose(biases.item, movies, atol=2e-3)


def test_a_user_without_ratings_has_bias_zero() -> None:
    biases = fitted(np.array([0]), np.array([0]), np.array([5.0]), 2, 2)
    assert biases.user[1] == 0
    assert biases.item[1] == 0


def test_the_log_loss_has_the_value_worked_out_by_hand() -> None:
    # A logit of 0, and one of log 3: probabilities of 1/2 and 3/4.
    link = Calibration(slope=np.log(3.0), intercept=-3 * np.log(3.0))
    found = measured(np.array([3.0, 4.0, 4.0]), np.array([5.0, LIKED, 1.0]), link)
    assert found["log_loss"] == pytest.approx((np.log(2) + np.log(4 / 3) + np.log(4)) / 3)


def test_a_fitted_link_finds_the_planted_one() -> None:
    draw = np.random.default_rng(3)
    predictions = draw.normal(3.5, 0.5, 400_000)
    liked = draw.random(400_000) < 1 / (1 + np.exp(-(2.5 * predictions - 9)))
    link = fit_calibration(predictions, liked)
    assert (link.slope, link.intercept) == pytest.approx((2.5, -9), rel=0.02)


@pytest.mark.parametrize("shift", [-9, -12])
def test_a_fit_that_begins_with_a_sample_is_that_of_all_events(
    monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    draw = np.random.default_rng(4)
    predictions = draw.normal(3.5, 0.5, 50_000).astype(np.float32)
    liked, links = draw.random(50_000) < 1 / (1 + np.exp(-(2.5 * predictions + shift))), []
    for sample in (50_000, 1000):
        monkeypatch.setattr(metrics, "CALIBRATION_SAMPLE", sample)
        links.append(fit_calibration(predictions, liked))
    assert (links[1].slope, links[1].intercept) == pytest.approx((links[0].slope, links[0].intercept), 1e-9)


def test_a_fit_does_not_depend_on_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each second event is as predicted; only the others have errors.
    predictions, number = np.linspace(-1, 1, 20_000), np.arange(20_000)
    liked = (predictions > 0) ^ ((number % 2 == 1) & (number % 5 == 0))
    links = []
    for sample in (20_000, 10_000):
        monkeypatch.setattr(metrics, "CALIBRATION_SAMPLE", sample)
        links.append(fit_calibration(predictions, liked))
    assert (links[1].slope, links[1].intercept) == pytest.approx((links[0].slope, links[0].intercept), 1e-9)


def test_a_link_of_constant_predictions_gives_the_share_of_liked_ratings() -> None:
    link = fit_calibration(np.full(1000, 3.5001), np.arange(1000) < 250)
    # Another constant, as a mean of more ratings is, gives nearly the same.
    for constant in (3.5001, 3.52):
        loss = measured(np.full(4, constant), np.array([5.0, 1.0, 1.0, 1.0]), link)["log_loss"]
        assert loss == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), abs=1e-4)


def test_a_link_stays_finite_where_predictions_are_never_wrong() -> None:
    liked = np.arange(100) >= 50
    link = fit_calibration(np.arange(100) / 20, liked)
    assert np.isfinite([link.slope, link.intercept]).all()
    assert link.log_losses(np.arange(100) / 20, liked).mean() < 0.05


@pytest.mark.parametrize(
    ("number", "num_liked"), [(0, 0), (LEAST_CALIBRATED - 1, 20), (1000, LEAST_OF_EACH - 1)]
)
def test_a_calibration_by_few_ratings_has_no_log_loss(number: int, num_liked: int) -> None:
    liked = np.arange(number) >= number - num_liked
    for of_each in (liked, ~liked):
        link = fit_calibration(np.arange(number) / 20, of_each)
        assert np.isnan(measured(np.array([3.0]), np.array([4.0]), link)["log_loss"])


def test_a_calibration_by_as_many_ratings_as_are_stated_has_a_log_loss() -> None:
    link = fit_calibration(np.arange(LEAST_CALIBRATED), np.arange(LEAST_CALIBRATED) < LEAST_OF_EACH)
    assert np.isfinite(measured(np.array([3.0]), np.array([4.0]), link)["log_loss"])


def ranked_by_popularity(
    user: np.ndarray,
    item: np.ndarray,
    num_known: int,
    sizes: tuple[int, int],
    excludes: bool = True,
    least: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks and numbers of candidates of the events after the first `num_known`.

    least: number of known events of an item that a list can hold.
    """
    user, item = user.astype(np.int32), item.astype(np.int32)
    known = grouped(user[:num_known], sizes[0])
    counts = np.bincount(item[:num_known], minlength=sizes[1])
    seen = item[:num_known][known.events]
    tested = user[num_known:], item[num_known:]
    return popularity_ranks(known.offsets, seen, *tested, counts, counts >= least, excludes)


@pytest.mark.parametrize("excludes", [True, False])
@pytest.mark.parametrize("num_items", [1, 5, 40])
def test_a_random_order_has_the_metrics_of_random_orders(num_items: int, excludes: bool) -> None:
    draw = np.random.default_rng(num_items)
    user, item, num_known = draw.integers(0, 8, 60), draw.integers(0, num_items, 60), 40
    _, candidates = ranked_by_popularity(user, item, num_known, (8, num_items), excludes)
    expected = []
    for case in range(num_known, 60):
        seen = {*item[:num_known][user[:num_known] == user[case]]} if excludes else set()
        # A served list has no item that the user had.
        ranks = [] if item[case] in seen else [*range(1, num_items - len(seen) + 1)]
        hits = [rank for rank in ranks if rank <= 10]
        number = max(len(ranks), 1)
        gains = sum(1 / np.log2(1 + rank) for rank in hits), sum(1 / rank for rank in hits)
        expected.append((len(hits) / number, *(gain / number for gain in gains)))
    found = ranks_by_chance(candidates)
    assert [*found.values()] == pytest.approx(np.mean(expected, axis=0), abs=1e-12)
    assert max(found.values()) <= 1


def test_bootstrap_intervals_over_users_cover_the_true_value() -> None:
    draw, held = np.random.default_rng(0), 0
    users = np.repeat(np.arange(300), 4)
    for _ in range(60):
        # All cases of a user are alike, as if there were one.
        ranks = np.repeat(np.where(draw.random(300) < 0.3, 1, 50), 4)
        low, high = measure_ranks(ranks, users).intervals["hr_at_10"]
        held += low <= 0.3 <= high
        assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 300), rel=0.2)
    assert held >= 52


@pytest.mark.parametrize(("num_users", "spread"), [(60, 0.0), (400, 0.0), (400, 1.0), (2_000, 1.5)])
def test_the_interval_of_an_auc_is_as_wide_as_that_of_resampled_users(
    monkeypatch: pytest.MonkeyPatch, num_users: int, spread: float
) -> None:
    draw = np.random.default_rng(num_users)
    counts = 1 + draw.poisson(3 * np.exp(draw.normal(0, spread, num_users)))
    users = np.repeat(np.arange(num_users), counts)
    # Cases of a user are alike: in their answers and, partly, in their scores.
    liking = draw.normal(size=num_users)[users]
    scores = (liking + draw.normal(size=len(users))).astype(np.float32)
    is_yes = liking + scores + draw.normal(size=len(users)) > 1
    found = measure(scores, scores, is_yes, NO_CALIBRATION, users)
    low, high = found.intervals["auc"]
    order = np.argsort(scores)
    of_users, yes, samples = users[order], is_yes[order], []
    for _ in range(1_500):
        times = np.bincount(draw.integers(0, num_users, num_users), minlength=num_users)[of_users]
        below = np.cumsum(times * ~yes)
        samples.append(float((times * yes * below).sum() / ((times * yes).sum() * below[-1])))
    assert high - low == pytest.approx(2 * 1.96 * np.std(samples), rel=0.07)
    assert (low + high) / 2 == pytest.approx(found["auc"], abs=1e-9)
    assert (low, high) == pytest.approx(tuple(np.percentile(samples, [2.5, 97.5])), abs=0.2 * (high - low))
    # Of many cases, each is compared with some of the others.
    monkeypatch.setattr(metrics, "MOST_COMPARED", 400)
    some = measure(scores, scores, is_yes, NO_CALIBRATION, users).intervals["auc"]
    assert some == pytest.approx((low, high), abs=0.06 * (high - low))


def test_a_few_users_give_the_auc_no_interval() -> None:
    draw = np.random.default_rng(0)
    scores, users = draw.normal(size=400), np.arange(400) % 19
    found = measure(scores, scores, scores + draw.normal(size=400) > 0, NO_CALIBRATION, users)
    assert np.isfinite(found["auc"])
    assert np.isnan(found.intervals["auc"]).all()


def test_intervals_change_no_metric_and_are_the_same_again() -> None:
    draw = np.random.default_rng(2)
    labels, predictions = draw.integers(1, 6, 500).astype(np.float32), draw.normal(3, 1, 500)
    link, liked = fit_calibration(predictions, labels >= LIKED), labels >= LIKED
    users = draw.integers(0, 2_000, 500)
    found = [measure(predictions, labels, liked, link, given) for given in (users, users, None)]
    assert found[0].values == found[1].values == found[2].values
    assert found[0].intervals == found[1].intervals
    assert found[0].cases == 500
    for name, (low, high) in found[0].intervals.items():
        assert low < found[0][name] < high


def test_hit_rate_and_ndcg_have_the_values_worked_out_by_hand() -> None:
    found = measure_ranks(np.array([1, 3, 10, 11]))
    assert found["hr_at_10"] == 3 / 4
    assert found["ndcg_at_10"] == pytest.approx((1 + 1 / 2 + 1 / np.log2(11)) / 4)
    others = measure_ranks(np.array([1, 3, 10, 11]), cutoffs=(2, 11))
    assert others["hr_at_2"] == others["mrr_at_2"] == 1 / 4
    assert measure_ranks(np.array([NEVER_FOUND]), cutoffs=(MOST_CUTOFF,))[f"ndcg_at_{MOST_CUTOFF}"] == 0
    assert others["mrr_at_11"] == pytest.approx((1 + 1 / 3 + 1 / 10 + 1 / 11) / 4)


@pytest.mark.parametrize("least", [0, 8])
def test_popularity_ranks_equal_counting_movie_by_movie(least: int) -> None:
    draw = np.random.default_rng(4)
    user, movie, num_known = draw.integers(0, 20, 400), draw.integers(0, 30, 400), 300
    # Two movies more that nobody has rated; and users who rated a movie twice are there too.
    counts = np.bincount(movie[:num_known], minlength=32)
    listed, expected = {*np.flatnonzero(counts >= least).tolist()}, []
    assert len(listed) == 32 if least == 0 else 5 < len(listed) < 30
    for case in range(num_known, 400):
        seen = set(movie[:num_known][user[:num_known] == user[case]]) - {movie[case]}
        others = listed - seen - {movie[case]}
        expected.append(1 + sum(counts[other] >= counts[movie[case]] for other in others))
    ranks, _ = ranked_by_popularity(user, movie, num_known, (20, 32), least=least)
    had = {*zip(user[:num_known].tolist(), movie[:num_known].tolist(), strict=True)}
    # Neither an item that its user had is ranked, nor one that no list holds.
    cases = zip(user[num_known:].tolist(), movie[num_known:].tolist(), expected, strict=True)
    assert ranks.tolist() == [
        rank if (of, what) not in had and what in listed else NEVER_FOUND for of, what, rank in cases
    ]


@pytest.mark.parametrize("num_validation", [0, 4, 200])
def test_the_share_of_yes_is_that_of_all_known_answers_however_few_are_for_validation(
    num_validation: int, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    label = draw.permutation(np.repeat([0.0, 1.0], 500)).astype(np.float32)
    # The few of the validation would say that all answers are yes.
    label[400:404] = 1
    user, item = (draw.integers(0, 20, 1_000).astype(np.int32) for _ in range(2))
    stored = StoredEvents(user, item, label, np.arange(1_000))
    sizes = (400, num_validation, 600 - num_validation)
    schema = dataclasses.replace(SCHEMA, liked_label=0.5)
    write_histories(tmp_path, stored, np.arange(20, dtype=np.int32), sizes, lambda share: None)
    are_listed, oracle = np.ones(20, bool), Oracle(None, None)
    found = baselines_of(tmp_path, stored, are_listed, sizes, oracle, schema, lambda share: None)
    share, is_yes = label[: 400 + num_validation].mean(), label[400 + num_validation :] == 1
    expected = -(is_yes.mean() * np.log(share) + (~is_yes).mean() * np.log(1 - share))
    log_loss = found["answers"]["share of yes"]["log_loss"]
    assert log_loss == pytest.approx(expected)
    assert log_loss == pytest.approx(np.log(2), abs=0.01)


def test_the_calibration_of_probabilities_is_their_mean_over_the_share_of_yes() -> None:
    found = measure_probabilities(np.array([0.2, 0.4, 0.9], np.float32), np.array([False, True, False]))
    assert found["calibration"] == pytest.approx(1.5)
    assert np.isnan(measure_probabilities(np.array([0.5]), np.array([False]))["calibration"])
