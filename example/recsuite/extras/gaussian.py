"""Initial rows of the tables of a rating model: those of a Gaussian model of the labels, which is solved.

    label of an event = mean + u[0] + v[0] + sum over k > 0 of u[k] v[k] + noise
    u = rows of the features of user and event + sum over the user's other items of l / sqrt(n)
    v = rows of the features of the item + sum over the item's other users of m / sqrt(n)

n is the number of training events of the user or item; l and m are rows of lists. Each row has a normal prior
around 0, with a variance for each feature and number. The posterior of a row, given those of all other rows,
is normal too: its precision is the sum of E[w w'] over its events, divided by the noise, plus the prior's,
where w = (1, v[1], ...) for a row of a user. A sweep computes each row once, and then the variances and the
noise. Few events thus leave a row near 0, superfluous numbers vanish, and no setting depends on the data
(variational Bayes: Lim and Teh, KDD Cup 2007; the sums over lists: Koren, "Factorization meets the
neighborhood", KDD 2008).

The sums over lists are added to the rows of ids, so the trained model needs no lists. Where choices say
nothing about labels, lists only add noise: they are used if they lower the error on the validation events.
They are not tried if a user has an item more than once (`--duplicates keep`).

Threads, one for each core that the process may use, compute the sums over events and the rows of the features
of events, while the other ranks wait; one thread computes the other rows, of which each depends on those
before it. The result has the same bits with any number of threads.

Shapes: n events, d numbers in a row; owners are users or items; number 0 of a row is its bias.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from recsuite.compiled import compiled, inlined
from recsuite.config.sections import ModelConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.loops import grouped
from recsuite.datasets.schema import EVENT, HISTORY, ITEM, USER, Table
from recsuite.errors import UserError, counted
from recsuite.runtime.console import stage
from recsuite.runtime.host import allowed_cores, free_memory, shown_bytes

# Most numbers in a row. With 12 a factor more or less changed the error by less than 0.3 % on five sets.
MOST_NUMBERS = 12
# First sweeps, in which the variances stay: those of factors that are still small would keep them small.
SWEEPS_TO_GROW = 5
# Sweeps before lists are tried, and sweeps with and without them until they are compared.
SWEEPS_ALONE, SWEEPS_OF_TRIAL = 10, 5
# Sweeps end where one changes the noise by a smaller share than this, and after so many at the latest. More
# lower the error on small sets by 1 %, and raise it by 0.2 % where most rows are rare: their variances fall.
LEAST_CHANGE, MOST_SWEEPS = 0.001, 40
# Standard deviation of the first factors, which break the symmetry.
FIRST_STD = 0.1
# First variance of each number of a vector: without it, each side would take the other for certain.
FIRST_VARIANCE = 0.1
# First variances of a bias and of a factor, for labels of variance 1; each sweep estimates them again.
OF_IDS, OF_FEATURES, OF_EVENTS, OF_LISTS = (0.3, 0.3), (0.25, 0.05), (0.1, 0.015), (0.05, 0.03)
# Memory for each training event: labels, weights, owners, rows, and orders by owner and by row.
BYTES_OF_EVENT = 160
# Smaller variances count as this: a precision must be finite.
LEAST_VARIANCE = 1e-8


class Side(NamedTuple):
    """Users, or items, with the means and covariances of their vectors; the loops change them in place.

    labels, weights: of the events, float64 [n]; own, other: the owner on this side and on the other side of
    each event, int32 [n]; shared: the sum of the rows that all events of an owner share, float64 [owners, d];
    covariances: of the whole vector, float64 [owners, d, d]; feature_rows: of the event, int64 [n, T], in
    event_rows, float64 [rows, d]; list_rows: float64 [owners of the other side, d]; roots: 1 / sqrt(n)
    of each owner, 0 while lists are not used, float64 [owners].
    """

    labels: np.ndarray
    weights: np.ndarray
    own: np.ndarray
    other: np.ndarray
    shared: np.ndarray
    covariances: np.ndarray
    feature_rows: np.ndarray
    event_rows: np.ndarray
    list_rows: np.ndarray
    roots: np.ndarray


class Rows(NamedTuple):
    """Posterior of the rows of one feature, and the members, events or owners, that have each row.

    offsets: int64 [rows + 1], the begins of each row's members; shares: the factor of the row in the vector
    of each member; means: float64 [rows, d]; covariances: float64 [rows, d, d]; variances: of the prior,
    float64 [d].
    """

    offsets: np.ndarray
    members: np.ndarray
    shares: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    variances: np.ndarray

    def learn_variances(self) -> None:
        """Estimate the variances of the prior by the rows that have members."""
        known = np.diff(self.offsets) > 0
        if known.sum() > 1:
            spread = np.diagonal(self.covariances, axis1=1, axis2=2)
            estimated = (self.means[known] ** 2 + spread[known]).mean(axis=0)
            self.variances[:] = np.maximum(estimated, LEAST_VARIANCE)

    def rows(self) -> np.ndarray:
        """Return the row of each member, int64."""
        return np.repeat(np.arange(len(self.means)), np.diff(self.offsets))


@inlined
def vector(side: Side, event: int, mean: np.ndarray) -> None:
    """Write the mean vector of a side of an event, float64 [d]; the event itself is not in its list."""
    owner, other = side.own[event], side.other[event]
    root = side.roots[owner]
    for a in range(len(mean)):
        mean[a] = side.shared[owner, a] - root * side.list_rows[other, a]
    for row in side.feature_rows[event]:
        for a in range(len(mean)):
            mean[a] += side.event_rows[row, a]


@inlined
def residual(mine: Side, theirs: Side, event: int, x: np.ndarray, w: np.ndarray) -> float:
    """Return the label of an event minus its prediction, and write (1, factors) of both sides to x and w."""
    vector(mine, event, x)
    vector(theirs, event, w)
    rest = mine.labels[event] - x[0] - w[0]
    for a in range(1, len(x)):
        rest -= x[a] * w[a]
    x[0], w[0] = 1.0, 1.0
    return rest


@inlined
def gradient(mine: Side, theirs: Side, event: int, x: np.ndarray, w: np.ndarray, result: np.ndarray) -> None:
    """Write E[w (label - prediction)] of an event, float64 [d], and w, see the module.

    x: float64 [d], is overwritten.
    """
    d = len(result)
    rest = residual(mine, theirs, event, x, w)
    covariance = theirs.covariances[theirs.own[event]]
    for a in range(d):
        result[a] = rest * w[a]
    # Column by column: the compiler may then use vectors without a change of any rounding.
    for b in range(d):
        for a in range(1, d):
            result[a] -= covariance[b, a] * x[b]


@inlined
def add_moment(w: np.ndarray, covariance: np.ndarray, weight: float, moment: np.ndarray) -> None:
    """Add E[w w'] times a weight; w: the mean, float64 [d], with w[0] = 1; moment: float64 [d, d]."""
    moment[0, 0] += weight
    for a in range(1, len(w)):
        scaled = weight * w[a]
        moment[a, 0] += scaled
        moment[0, a] += scaled
        for b in range(1, len(w)):
            moment[a, b] += scaled * w[b] + weight * covariance[a, b]


@compiled
def collect(begin: int, end: int, mine: Side, theirs: Side, rests: np.ndarray, moments: np.ndarray) -> None:
    """Write the sums over the events of some owners: of `gradient` [owners, d], of E[w w'] [owners, d, d]."""
    d = rests.shape[1]
    x, w, of_event = np.empty(d), np.empty(d), np.empty(d)
    rests[begin:end], moments[begin:end] = 0.0, 0.0
    # Successive events mostly have the same user, so what is read of it is in the cache.
    for event in range(len(mine.labels)):
        owner = mine.own[event]
        if begin <= owner < end:
            gradient(mine, theirs, event, x, w, of_event)
            for a in range(d):
                rests[owner, a] += mine.weights[event] * of_event[a]
            add_moment(w, theirs.covariances[theirs.own[event]], mine.weights[event], moments[owner])


@inlined
def invert(matrix: np.ndarray, inverse: np.ndarray) -> None:
    """Write the inverse of a positive definite matrix, float64 [d, d], which is overwritten (Gauss-Jordan).

    numba's own `inv` requires scipy.
    """
    d = len(matrix)
    for a in range(d):
        for b in range(d):
            inverse[a, b] = 1.0 if a == b else 0.0
    for pivot in range(d):
        scale = 1 / matrix[pivot, pivot]
        for b in range(d):
            matrix[pivot, b] *= scale
            inverse[pivot, b] *= scale
        for a in range(d):
            factor = matrix[a, pivot]
            if a != pivot:
                for b in range(d):
                    matrix[a, b] -= factor * matrix[pivot, b]
                    inverse[a, b] -= factor * inverse[pivot, b]


@compiled
def solve(
    moment: np.ndarray,
    rest: np.ndarray,
    noise: float,
    variances: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
) -> np.ndarray:
    """Replace mean and covariance of a row by those of its posterior; return the change of the mean, [d].

    moment, rest: sums over its events, float64 [d, d] and [d], overwritten; variances: of its prior, float64
    [d].
    """
    d = len(rest)
    precision, change = np.empty((d, d)), np.empty(d)
    for a in range(d):
        for b in range(d):
            precision[a, b] = moment[a, b] / noise
            rest[a] += moment[a, b] * mean[b]
        precision[a, a] += 1 / variances[a]
    invert(precision, covariance)
    for a in range(d):
        change[a] = -mean[a]
        for b in range(d):
            change[a] += covariance[a, b] * rest[b] / noise
    for a in range(d):
        mean[a] += change[a]
    return change


@compiled
def solve_shared(mine: Side, part: Rows, noise: float, rests: np.ndarray, moments: np.ndarray) -> None:
    """Solve for the rows of a feature of owners, one after the other, and update what depends on them.

    rests, moments: see `collect`.
    """
    d = part.means.shape[1]
    moment, rest = np.empty((d, d)), np.empty(d)
    for row in range(len(part.means)):
        moment[:], rest[:] = 0.0, 0.0
        for place in range(part.offsets[row], part.offsets[row + 1]):
            owner, share = part.members[place], part.shares[place]
            for a in range(d):
                rest[a] += share * rests[owner, a]
                for b in range(d):
                    moment[a, b] += share * share * moments[owner, a, b]
        # No training event has the row: it stays at its prior.
        if moment[0, 0] == 0:
            continue
        change = solve(moment, rest, noise, part.variances, part.means[row], part.covariances[row])
        for place in range(part.offsets[row], part.offsets[row + 1]):
            owner, share = part.members[place], part.shares[place]
            for a in range(d):
                mine.shared[owner, a] += share * change[a]
            for b in range(d):
                for a in range(d):
                    rests[owner, a] -= share * moments[owner, b, a] * change[b]


@compiled
def solve_events(begin: int, end: int, mine: Side, theirs: Side, part: Rows, noise: float) -> None:
    """Solve for some rows of a feature of events; their means lie in `event_rows`."""
    d = len(part.variances)
    x, w, of_event = np.empty(d), np.empty(d), np.empty(d)
    moment, rest = np.empty((d, d)), np.empty(d)
    for row in range(begin, end):
        moment[:], rest[:] = 0.0, 0.0
        for event in part.members[part.offsets[row] : part.offsets[row + 1]]:
            gradient(mine, theirs, event, x, w, of_event)
            for a in range(d):
                rest[a] += mine.weights[event] * of_event[a]
            add_moment(w, theirs.covariances[theirs.own[event]], mine.weights[event], moment)
        if moment[0, 0] > 0:
            solve(moment, rest, noise, part.variances, part.means[row], part.covariances[row])


@compiled
def solve_lists(
    mine: Side, theirs: Side, part: Rows, noise: float, rests: np.ndarray, moments: np.ndarray
) -> None:
    """Solve for the rows of lists, one after the other.

    Row j is in the list of each owner with an event of j, and acts on all other events of this owner.
    """
    d = len(part.variances)
    x, w, of_event, inside = np.empty(d), np.empty(d), np.empty(d), np.empty(d)
    moment, rest = np.empty((d, d)), np.empty(d)
    for row in range(len(part.means)):
        moment[:], rest[:] = 0.0, 0.0
        for event in part.members[part.offsets[row] : part.offsets[row + 1]]:
            owner = mine.own[event]
            root = mine.roots[owner]
            gradient(mine, theirs, event, x, w, of_event)
            for a in range(d):
                rest[a] += root * (rests[owner, a] - mine.weights[event] * of_event[a])
                for b in range(d):
                    moment[a, b] += root * root * moments[owner, a, b]
            add_moment(w, theirs.covariances[row], -mine.weights[event] * root * root, moment)
        if moment[0, 0] <= 0:
            continue
        change = solve(moment, rest, noise, part.variances, part.means[row], part.covariances[row])
        # Without the own event of row j, whose covariance is that of the vector of j.
        for a in range(d):
            inside[a] = 0.0
            for b in range(1, d):
                inside[a] += theirs.covariances[row, a, b] * change[b] if a else 0.0
        for event in part.members[part.offsets[row] : part.offsets[row + 1]]:
            owner = mine.own[event]
            root, weight = mine.roots[owner], mine.weights[event]
            vector(theirs, event, w)
            w[0] = 1.0
            product = 0.0
            for a in range(d):
                product += w[a] * change[a]
            for a in range(d):
                mine.shared[owner, a] += root * change[a]
                rests[owner, a] += root * weight * (w[a] * product + inside[a])
            for b in range(d):
                scaled = root * change[b]
                for a in range(d):
                    rests[owner, a] -= scaled * moments[owner, b, a]


@compiled
def add_covariances(part: Rows, owners: np.ndarray, shares: np.ndarray, covariances: np.ndarray) -> None:
    """Add the covariances of rows times the squares of shares to those of their owners, [number, d, d].

    owners, shares: of the members of all rows.
    """
    d = covariances.shape[1]
    for row in range(len(part.means)):
        for place in range(part.offsets[row], part.offsets[row + 1]):
            owner, square = owners[place], shares[place] * shares[place]
            for a in range(d):
                for b in range(d):
                    covariances[owner, a, b] += square * part.covariances[row, a, b]


@compiled
def add_errors(begin: int, end: int, mine: Side, theirs: Side, errors: np.ndarray) -> None:
    """Write the weighted sum of the expected squared errors of some owners' events.

    They include the variances of both vectors.
    """
    d = mine.shared.shape[1]
    x, w = np.empty(d), np.empty(d)
    errors[begin:end] = 0.0
    for event in range(len(mine.labels)):
        owner = mine.own[event]
        if begin <= owner < end:
            rest = residual(mine, theirs, event, x, w)
            ours, others = mine.covariances[owner], theirs.covariances[theirs.own[event]]
            variance = 0.0
            for a in range(d):
                for b in range(d):
                    variance += ours[a, b] * w[a] * w[b] + others[a, b] * x[a] * x[b]
            for a in range(1, d):
                for b in range(1, d):
                    variance += ours[a, b] * others[a, b]
            errors[owner] += mine.weights[event] * (rest * rest + variance)


class Threads:
    """Threads that call a loop for parts of its owners or rows, with about as many events each."""

    def __init__(self) -> None:
        self.number = allowed_cores()
        self._pool = ThreadPoolExecutor(self.number)

    def run(self, loop: Callable[..., None], offsets: np.ndarray, *arguments: Any) -> None:
        """Call a loop of (begin, end, *arguments) until all owners or rows are done.

        offsets: of the events of each, int64 [owners or rows + 1].
        """
        # No more parts than threads: some loops look at all events for each part.
        targets = np.linspace(0, offsets[-1], self.number + 1)
        ends = np.searchsorted(offsets, targets)
        ends[0], ends[-1] = 0, len(offsets) - 1
        parts = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for part in [self._pool.submit(loop, begin, end, *arguments) for begin, end in parts if begin < end]:
            part.result()


def make_rows(
    members: np.ndarray,
    rows: np.ndarray,
    shares: np.ndarray,
    means: np.ndarray,
    variances: tuple[float, float],
) -> Rows:
    """Return the rows of a feature before the first sweep.

    members, rows, shares: int [m], int [m], float64 [m], members with their rows; means: first ones;
    variances: first ones of a bias and of a factor.
    """
    number, d = means.shape
    by_row = grouped(rows, number)
    first_variances = np.array([variances[0], *[variances[1]] * (d - 1)])
    members, shares = members[by_row.events], shares[by_row.events]
    return Rows(by_row.offsets, members, shares, means, np.zeros((number, d, d)), first_variances)


def features_of(columns: Columns, entity: str) -> Iterator[tuple[Table, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the features of users or items, with owners, rows and shares as members of `make_rows`.

    A list adds the mean of its rows.
    """
    record = columns.column(f"{columns.schema.name_of(entity)}_features")
    owners, singles, lists = np.arange(len(record)), 0, 0
    for table in columns.tables:
        if table.feature.entity != entity:
            continue
        if table.feature.multi:
            begins, lengths = record["lists"][:, lists].astype(np.int64).T
            members = np.repeat(owners, lengths)
            positions = np.arange(len(members)) + np.repeat(begins - lengths.cumsum() + lengths, lengths)
            yield table, members, columns.column(f"{table.name}_values")[positions], 1 / lengths[members]
            lists += 1
        else:
            yield table, owners, record["features"][:, singles], np.ones(len(owners))
            singles += 1


class Unknowns:
    """All rows of one side.

    events: records of the training events; labels, weights: see `Side`; feature_rows: see
    `GaussianModel.feature_rows`; d: numbers in a row; random: of the first factors.
    """

    def __init__(
        self,
        columns: Columns,
        entity: str,
        events: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray,
        feature_rows: np.ndarray,
        d: int,
        random: np.random.Generator,
    ) -> None:
        own = np.ascontiguousarray(events[entity])
        other = np.ascontiguousarray(events[ITEM if entity == USER else USER])
        sizes = (columns.num_users, columns.num_items)
        count, others = sizes if entity == USER else sizes[::-1]
        counts = np.bincount(own, minlength=count)
        # Begins of the events of each owner, if they were sorted by it.
        self.offsets = np.concatenate([[0], counts.cumsum()])
        # 1 / sqrt(events) of each owner; those of `side` are 0 while lists are not used.
        self.shares_of_events = 1 / np.sqrt(np.maximum(counts, 1))
        self.of_owners: dict[str, Rows] = {}
        self.ids = columns.schema.name_of(entity)
        for table, owners, rows, shares in features_of(columns, entity):
            means, known, first = np.zeros((table.rows, d)), counts[owners] > 0, OF_FEATURES
            if table.name == self.ids:
                means[:, 1:] = random.normal(scale=FIRST_STD, size=(table.rows, d - 1))
                self.id_rows, first = rows, OF_IDS
            # Rows of owners without training events stay at their prior.
            self.of_owners[table.name] = make_rows(owners[known], rows[known], shares[known], means, first)
        tables = event_tables(columns) if entity == USER else []
        event_rows = np.zeros((sum(table.rows for table in tables), d))
        members, ones, first_row = np.arange(len(own)), np.ones(len(own)), 0
        self.of_events: dict[str, Rows] = {}
        for number, table in enumerate(tables):
            rows, means = feature_rows[:, number] - first_row, event_rows[first_row : first_row + table.rows]
            self.of_events[table.name] = make_rows(members, rows, ones, means, OF_EVENTS)
            first_row += table.rows
        self.of_lists = make_rows(members, other, ones, np.zeros((others, d)), OF_LISTS)
        self.side = Side(
            labels,
            weights,
            own,
            other,
            np.zeros((count, d)),
            np.zeros((count, d, d)),
            feature_rows[:, : len(tables)],
            event_rows,
            self.of_lists.means,
            np.zeros(count),
        )
        for part in self.of_owners.values():
            np.add.at(self.side.shared, part.members, part.shares[:, None] * part.means[part.rows()])

    def arrays(self) -> list[np.ndarray]:
        """Return the arrays that a sweep changes, and those that say if lists are used."""
        parts = [*self.of_owners.values(), *self.of_events.values(), self.of_lists]
        posteriors = [each for part in parts for each in (part.means, part.covariances, part.variances)]
        return [*posteriors, self.side.shared, self.side.covariances, self.side.roots]

    def sweep(self, theirs: Side, noise: float, learns: bool, threads: Threads) -> None:
        """Solve for each row of this side once. learns: True to estimate the variances too."""
        mine, parts = self.side, [*self.of_owners.values(), *self.of_events.values()]
        count, d = mine.shared.shape
        rests, moments = np.empty((count, d)), np.empty((count, d, d))
        threads.run(collect, self.offsets, mine, theirs, rests, moments)
        for part in self.of_owners.values():
            solve_shared(mine, part, noise, rests, moments)
        if mine.roots.any():
            parts.append(self.of_lists)
            solve_lists(mine, theirs, self.of_lists, noise, rests, moments)
        for part in self.of_events.values():
            threads.run(solve_events, part.offsets, mine, theirs, part, noise)
        for part in parts if learns else ():
            part.learn_variances()
        mine.covariances[:] = 0
        for number, part in enumerate(parts):
            owners, shares = part.members, part.shares
            if number >= len(self.of_owners):
                # The events of an owner have different rows: their mean covariance stands for each.
                owners = mine.own[part.members]
                shares = self.shares_of_events[owners]
            add_covariances(part, owners, shares, mine.covariances)

    def rows(self, scales: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of all features, float32 [rows, d], times scales, [d].

        The rows of ids have the sums over lists in addition.
        """
        mine, of_all = self.side, {**self.of_owners, **self.of_events}
        means = {name: part.means for name, part in of_all.items()}
        ids = means[self.ids] = means[self.ids].copy()
        if mine.roots.any():
            sums = np.zeros_like(mine.shared)
            # One number of the rows at a time: all of them would be as large as the events many times over.
            for number in range(sums.shape[1]):
                np.add.at(sums[:, number], mine.own, mine.list_rows[mine.other, number])
            # Owners without a training event have no row of their own; there the sum is 0.
            np.add.at(ids, self.id_rows, mine.roots[:, None] * sums)
        # Only rows that were solved for: the others hold what was drawn.
        ids[self.of_owners[self.ids].covariances[:, 0, 0] == 0] = 0
        return {name: (mean * scales).astype(np.float32) for name, mean in means.items()}


def restore(arrays: Sequence[np.ndarray], contents: Sequence[np.ndarray]) -> None:
    """Replace the contents of arrays; some of them are views of one array."""
    for array, content in zip(arrays, contents, strict=True):
        array[:] = content


def event_tables(columns: Columns) -> list[Table]:
    """Return the features of events with one value, in the order of their records."""
    return [table for table in columns.tables if table.feature.entity == EVENT and not table.feature.multi]


class GaussianModel:
    """The model of the module for the training events of a data set, before its first sweep.

    d: numbers in a row. Labels are on the scale where their variance is 1.
    """

    def __init__(self, columns: Columns, d: int, seed: int) -> None:
        self.columns, random = columns, np.random.default_rng(seed)
        self.mean = columns.mean_label
        events = columns.events("train")
        self.weights = self._weights(events)
        self.std = math.sqrt(np.average((events["label"] - self.mean) ** 2, weights=self.weights)) or 1.0
        self.labels = (events["label"] - self.mean) / self.std
        feature_rows = self.feature_rows(events)
        self.users = Unknowns(columns, USER, events, self.labels, self.weights, feature_rows, d, random)
        self.items = Unknowns(columns, ITEM, events, self.labels, self.weights, feature_rows, d, random)
        for unknowns in (self.users, self.items):
            unknowns.side.covariances[:, range(d), range(d)] = FIRST_VARIANCE
        self.noise, self.sweeps, self.threads = 1.0, 0, Threads()
        pairs = events[USER].astype(np.int64) * columns.num_items + events[ITEM]
        # `solve_lists` requires that a list has an item once; with repeated ones it would diverge.
        self.may_have_lists = columns.num_validation > 0 and len(np.unique(pairs)) == len(pairs)

    def feature_rows(self, events: np.ndarray) -> np.ndarray:
        """Return the rows of the features of events in one array of all of these, int64 [n, T]."""
        sizes = [0, *(table.rows for table in event_tables(self.columns))]
        return np.ascontiguousarray(events["features"] + np.cumsum(sizes)[:-1])

    @staticmethod
    def _weights(events: np.ndarray) -> np.ndarray:
        has_weights = "weight" in (events.dtype.names or ())
        return events["weight"].astype(np.float64) if has_weights else np.ones(len(events))

    def sweep(self) -> float:
        """Solve for each row once, and estimate the noise; return the share by which it changed."""
        before = self.noise
        for mine, theirs in ((self.items, self.users), (self.users, self.items)):
            mine.sweep(theirs.side, self.noise, self.sweeps >= SWEEPS_TO_GROW, self.threads)
        self.sweeps += 1
        self.noise = self.expected_error()
        return abs(1 - self.noise / before)

    def expected_error(self) -> float:
        """Return the weighted mean of the expected squared errors of the training events."""
        mine, theirs = self.users.side, self.items.side
        errors = np.empty(len(mine.shared))
        self.threads.run(add_errors, self.users.offsets, mine, theirs, errors)
        return float(errors.sum() / self.weights.sum())

    def try_lists(self) -> bool:
        """Make some sweeps with or without lists, by the error on validation; return True if with them."""
        held = [array for side in (self.users, self.items) for array in side.arrays()]
        before, noise = [array.copy() for array in held], self.noise
        for _ in range(SWEEPS_OF_TRIAL):
            self.sweep()
        error, alone, noise_alone = self.validation_error(), [array.copy() for array in held], self.noise
        restore(held, before)
        self.noise, self.sweeps = noise, SWEEPS_ALONE
        for side in (self.users, self.items):
            side.side.roots[:] = side.shares_of_events
        for _ in range(SWEEPS_OF_TRIAL):
            self.sweep()
        if self.validation_error() < error:
            return True
        restore(held, alone)
        self.noise = noise_alone
        return False

    def validation_error(self) -> float:
        """Return the weighted mean squared error of the validation events, in units of the labels."""
        events = self.columns.events("validation")
        of_events = self.users.side.event_rows[self.feature_rows(events)].sum(axis=1)
        users = self.users.side.shared[events[USER]] + of_events
        items = self.items.side.shared[events[ITEM]]
        products = (users[:, 1:] * items[:, 1:]).sum(axis=1)
        predicted = self.mean + self.std * (users[:, 0] + items[:, 0] + products)
        return float(np.average((predicted - events["label"]) ** 2, weights=self._weights(events)))

    def rows(self) -> dict[str, np.ndarray]:
        """Return the rows of all tables, float32 [rows, d], by their names, for labels on their own scale."""
        d = self.users.side.shared.shape[1]
        scales = np.array([self.std, *[math.sqrt(self.std)] * (d - 1)])
        # A history adds nothing at first.
        lists = [table for table in self.columns.tables if table.feature.entity == HISTORY and table.rows]
        zeros = {table.name: np.zeros((table.rows, d), np.float32) for table in lists}
        return {**self.users.rows(scales), **self.items.rows(scales), **zeros}


def gaussian_rows(columns: Columns, config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Solve a Gaussian model of the labels for initial rows. Called on one process.

    Args:
        columns: The prepared data.
        config: Flags of the model; --embedding_dim limits the numbers of a row.
        seed: Seed of the first factors.

    Returns:
        The rows by the name of their table, float32 [rows, numbers].

    Raises:
        UserError: When a table is dynamic, or the covariances do not fit into memory.

    Example:
        model = training.shard(make_model, loss=MyLoss(), initial_rows=rs.gaussian_rows)
    """
    d = min(config.embedding_dim, MOST_NUMBERS)
    check_size(columns, d)
    begun = time.perf_counter()
    with stage("solving for the rows", MOST_SWEEPS, "sweeps") as done:
        model, lists, change = GaussianModel(columns, d, seed), "", 1.0
        while model.sweeps < MOST_SWEEPS and (model.sweeps <= SWEEPS_ALONE or change > LEAST_CHANGE):
            if model.sweeps == SWEEPS_ALONE and model.may_have_lists:
                lists = " with all items of each user" if model.try_lists() else ""
            change = model.sweep()
            done(model.sweeps)
    error = f", validation RMSE {math.sqrt(model.validation_error()):.4f}" if columns.num_validation else ""
    # Said, because rows that still change are not the solution yet.
    most = "" if change <= LEAST_CHANGE else " (the limit; rows still change)"
    print(
        f"the initial rows are those of a Gaussian model{lists}: {model.sweeps} sweeps{most} over "
        f"{len(model.labels):,} {columns.schema.labels} on {counted(model.threads.number, 'core')}, "
        f"{time.perf_counter() - begun:.1f} s{error}"
    )
    return model.rows()


def check_size(columns: Columns, d: int) -> None:
    """Refuse data for which the rows cannot be solved for.

    Raises:
        UserError: names the table, or the memory.
    """
    dynamic = next((table.name for table in columns.tables if table.feature.is_dynamic), None)
    if dynamic is not None:
        raise UserError(
            f"--initial_rows gaussian requires tables of a fixed size, and {dynamic} is dynamic; give "
            "--initial_rows random."
        )
    # Moments, and covariances of vectors, of rows and of rows of lists, of which the trial of lists keeps two
    # copies.
    owners = columns.num_users + columns.num_items
    rows = sum(table.rows for table in columns.tables)
    needed = 8 * d * d * (4 * owners + 3 * (rows + owners)) + BYTES_OF_EVENT * columns.num_train
    free = free_memory()
    if needed > free:
        raise UserError(
            f"--initial_rows gaussian requires {shown_bytes(needed)} of memory for {columns.num_train:,} "
            f"{columns.schema.labels}, {owners:,} users and items and {rows:,} rows with {d} numbers each, "
            f"and {shown_bytes(free)} are free; give a smaller --embedding_dim, or --initial_rows random."
        )
