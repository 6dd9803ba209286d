"""Programs that follow a training: the wait for its first model and newer ones, and chains of two models."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from recsuite.checkpoint.storage.directory import newest_in, step_of
from recsuite.datasets.schema import EVENT, HISTORY, USER
from recsuite.errors import UserError, printable, signed
from recsuite.runtime.console import say
from recsuite.serving.request import AS_TRAINED, check_k
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import Snapshot

POLL_SECONDS, LONGEST_PAUSE = 1.0, 10.0
Answer = TypeVar("Answer")


def wait_for_first(save_dir: Path) -> None:
    """Wait for the first checkpoint of a training that has begun, or will; SIGINT ends it."""
    if not _has_learned(save_dir):
        say(f"waiting for the first checkpoint in {save_dir}")
    while not _has_learned(save_dir):
        time.sleep(POLL_SECONDS)


def _has_learned(save_dir: Path) -> bool:
    """Whether there is a checkpoint after a step."""
    newest = newest_in(save_dir)
    return newest is not None and step_of(newest) > 0


def follow(follower: Follower, stop: threading.Event, show: Callable[[], None] = lambda: None) -> None:
    """Look for a newer checkpoint every second, until `stop` is set. Call it from one thread.

    Goes on after any exception: prints it once, keeps it in `follower.failure`, and looks again after pauses
    that double up to LONGEST_PAUSE.

    show: called after each newer checkpoint, and again where it failed.
    """
    pause, is_newer = POLL_SECONDS, False
    while not stop.wait(pause):
        try:
            is_newer |= follower.refresh()
            if is_newer:
                show()
            follower.failure, follower.looked, pause, is_newer = "", time.monotonic(), POLL_SECONDS, False
        except Exception as error:
            # The model before is still good.
            is_mistake = isinstance(error, UserError)
            said = printable(error if is_mistake else f"{type(error).__name__}: {error}")
            is_new, follower.failure = said != follower.failure, said
            pause = min(2 * pause, LONGEST_PAUSE)
            # Where nobody reads stderr any more, or no memory is left for the text, following goes on.
            with contextlib.suppress(Exception):
                if is_new:
                    shown = error if is_mistake else traceback.format_exc()
                    print(signed(shown), file=sys.stderr, flush=True)


def unknown_of(snapshot: Snapshot, users: Iterable[Any], items: Iterable[Any]) -> dict[str, list[Any]]:
    """Ids of a request that have no row in a model, each once, under the names of users and of items.

    Raises:
        UserError: when one cannot be an id.
    """
    found = {}
    for name, ids in ((snapshot.schema.user, users), (snapshot.schema.item, items)):
        # Of nobody, such as None, nothing can be unknown.
        given = [*dict.fromkeys(each for each in ids if isinstance(each, (int, str)) or _is_finite(each))]
        known = snapshot.known(name, given).tolist()
        found[name] = [each for each, is_known in zip(given, known, strict=True) if not is_known]
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def of_one_moment(follower: Follower, ask: Callable[[], Answer]) -> tuple[Answer, Snapshot]:
    """What `ask` gets from the model of a follower, and the snapshot that all of it comes from.

    ask: asks the model, once or several times, and is called again where a delta or another model came in
    between, also where it failed; the second time these wait for it, for a long request would never end where
    one comes every second.
    """
    model = follower.model
    before = model.snapshot
    try:
        answer = ask()
    except Exception:
        # Of another model than the one whose features it was made of it says nothing.
        if model.snapshot is before:
            raise
    else:
        # Every delta makes another snapshot, under the lock under which rows are read.
        if model.snapshot is before:
            return answer, before
    with follower.changing:
        return ask(), model.snapshot


# How many items are ranked, and how much the score of the ranker counts beside that of the retriever.
CANDIDATES, WEIGHT = 300, 1.0


class Chain:
    """See the module. num_candidates: of each user; weight: see `WEIGHT`.

    Raises:
        UserError: when a model predicts labels: a sum of a label and a score says nothing.
    """

    def __init__(
        self,
        retriever: ServedModel,
        ranker: ServedModel,
        num_candidates: int = CANDIDATES,
        weight: float = WEIGHT,
    ) -> None:
        for name, model in (("retriever", retriever), ("ranker", ranker)):
            if not getattr(model.snapshot.head, "scores_are_products", False):
                raise UserError(
                    f"The {name} {model.snapshot.folder} predicts labels, and a chain ranks by scores; give "
                    "one of --task ranking or sequence."
                )
        self.retriever, self.ranker = retriever, ranker
        self.num_candidates, self.weight = num_candidates, weight

    @torch.inference_mode()
    def recommend(
        self,
        users: Mapping[str, Sequence[Any]],
        k: int = 10,
        *,
        exclude: str | Sequence[Any] | None = AS_TRAINED,
        approximate: bool = False,
    ) -> list[list[tuple[Any, float]]]:
        """For each of U users the k of the candidates with the highest sums of scores; fewer where there are
        fewer.

        users: the values of their features and histories, see `ServedModel.score`: each model takes of them
        what it has. exclude, approximate: see `ServedModel.recommend`, of the candidates. A candidate of
        which the ranker has no row is left out.
        """
        check_k(k, self.retriever.snapshot.schema)
        self._check(users)
        number = max(k, self.num_candidates)
        found = self.retriever.recommend(
            told(self.retriever, users), number, exclude=exclude, approximate=approximate
        )
        vectors, items = self.ranker.vectors_of(told(self.ranker, users))
        answers = []
        for vector, candidates in zip(vectors, found, strict=True):
            known = [(items.places[item], item, score) for item, score in candidates if item in items.places]
            places = torch.tensor([place for place, _, _ in known], dtype=torch.int64)
            of_retriever = torch.tensor([score for _, _, score in known])
            of_ranker = items.head.score_pairs(vector.expand(len(places), -1), items.vectors[places])
            sums = of_retriever + self.weight * of_ranker
            # Stable: of equal sums the one comes first that the retriever has first.
            order = sums.sort(descending=True, stable=True).indices[:k]
            answers.append([(known[each][1], float(sums[each])) for each in order.tolist()])
        return answers

    def _check(self, users: Mapping[str, Sequence[Any]]) -> None:
        """Refuse what neither model takes."""
        names = {name for model in (self.retriever, self.ranker) for name in names_of(model)}
        if not isinstance(users, Mapping) or not users or not users.keys() <= names:
            odd = ", ".join(sorted(map(str, users.keys() - names))) if isinstance(users, Mapping) else ""
            raise UserError(
                f"A chain takes the values of users by their names, and got {printable(odd) or 'none'}; its "
                f"models have {', '.join(sorted(names))}."
            )


def names_of(model: ServedModel) -> list[str]:
    """What a model may be told of users."""
    return model.snapshot.names_of((USER, EVENT, HISTORY))


def told(model: ServedModel, users: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Of what is known of users that which a model takes."""
    names = names_of(model)
    return {name: values for name, values in users.items() if name in names}
