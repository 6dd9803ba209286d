"""Score with an exported model without torch, as a program of your own would do.

    ./run.sh export served --format onnx
    python example/onnx_client.py served '{"user": [42, 42], "movie": [1, 3]}'

Copy it: it imports numpy, onnxruntime, safetensors and xxhash, and not this library.
recsuite/extras/graph/graph.py describes the graph's inputs.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import xxhash
from safetensors.numpy import load_file

DIGEST = "xxh3_128"


class Client:
    """Model of an export; `score` takes the same values as `ServedModel.score`.

    Raises:
        ValueError: for tables with a dynamic vocabulary, which it cannot look up; and for files that are
            missing or damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        def read(name: str) -> Any:
            return json.loads((Path(folder) / name).read_text())

        manifest, schema, vocabulary = checked(folder), read("schema.json"), read("vocabulary.json")
        if manifest.get("dynamic"):
            raise ValueError(
                f"{folder} has tables with a dynamic vocabulary, which this client does not know"
            )
        self.run, self.follows = manifest["run"], manifest["about"]["follows"]
        self.tensors = load_file(Path(folder) / "model.safetensors")
        self.tables = read("features.json")["tables"]
        self.numbers = [each for each in schema["features"] if each["number"] == "dense"]
        self.types, self.is_count = schema.get("event_types", []), schema["label_kind"] == "count"
        # A categorical feature has its values in the order of their rows, a number its encoding.
        self.encodings = {name: known for name, known in vocabulary.items() if isinstance(known, dict)}
        self.rows = {
            name: {value: row for row, value in enumerate(known, start=1)}
            for name, known in vocabulary.items()
            if isinstance(known, list)
        }
        self.item = schema["item"]
        self.rows["history"] = self.rows[self.item]
        self.session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"))
        self.inputs = [each.name for each in self.session.get_inputs()]

    def score(self, values: dict[str, list[Any]]) -> np.ndarray:
        """Return a score for each event, float32 [B], or [B, L]. values: feature to B values or lists.

        Raises:
            ValueError: for a name that the model lacks, and for other numbers of values.
        """
        size = self.check(values)
        if not size:
            return np.zeros(0, np.float32)
        given = {name: self.tensors[name] for name in self.inputs if name.startswith("dense.")}
        for table in self.tables:
            name, is_list = table["name"], table["multi"]
            lists = values.get(name, [[] if is_list else None] * size)
            if not is_list:
                lists = [[value] for value in lists]
            elif name != "history":
                # An empty list counts as one unknown value.
                lists = [each or [None] for each in lists]
            rows = self.row_numbers(name, [each for one in lists for each in one])
            given[f"{name}.rows" if f"{name}.rows" in self.inputs else name] = self.looked_up(name, rows)
            if is_list:
                given[f"{name}.lengths"] = np.array([len(each) for each in lists], np.int64)
        if "history.labels" in self.inputs:
            labels = [each for one in values.get("history_ratings", []) for each in one]
            if self.types:
                # The label is the position of the type.
                labels = [self.types.index(each) + 1 for each in labels]
            given["history.labels"] = (
                np.log1p(labels, dtype=np.float32) if self.is_count else np.array(labels, np.float32)
            )
        if "history.places" in self.inputs:
            lengths = given["history.lengths"]
            num_after = [number for length in lengths for number in reversed(range(length))]
            ages = values.get("history_ages", [[0] * length for length in lengths])
            seconds = np.floor([each for one in ages for each in one])
            given["history.places"] = np.array(num_after, np.int32)
            # 0 for 0 seconds, 1 for 1 and 2, 2 for 3 to 6, and so on.
            given["history.gaps"] = np.minimum(np.frexp(1.0 + seconds)[1] - 1, 31).astype(np.int32)
        if "history.own" in self.inputs:
            items = values.get(self.item, [None] * size)
            pairs = zip(items, values.get("history", [[]] * size), strict=True)
            own = [item is not None and each == item for item, history in pairs for each in history]
            given["history.own"] = np.array(own, np.float32)
        if "numbers" in self.inputs:
            columns = [self.scaled(each, values.get(each["name"], [None] * size)) for each in self.numbers]
            given["numbers"] = np.concatenate(columns, axis=1)
        return self.session.run(["score"], {name: given[name] for name in self.inputs})[0]

    def check(self, values: dict[str, list[Any]]) -> int:
        """Return the number of events, after a check of names and lengths."""
        names = {each["name"] for each in [*self.tables, *self.numbers]}
        names |= {"history_ratings", "history_ages"} if "history" in names else set()
        if not values or not values.keys() <= names:
            raise ValueError(f"the model has the features {sorted(names)}, got {sorted(values)}")
        sizes = {len(given) for given in values.values()}
        lengths = [[*map(len, given)] for name, given in values.items() if name.startswith("history")]
        if (
            len(sizes) > 1
            or any(each != lengths[0] for each in lengths)
            or ("history" in values) != ("history_ratings" in values)
            or ("history_ages" in values) > ("history" in values)
        ):
            raise ValueError(
                "give each feature as many values, and each item of a history a rating and an age"
            )
        return sizes.pop()

    def row_numbers(self, name: str, values: list[Any]) -> np.ndarray:
        """Return the row of each value; row 0 is that of unknown ones."""
        if name in self.rows:
            return np.array([self.rows[name].get(each, 0) for each in values], np.int64)
        numbers = single(values)
        rows = np.searchsorted(self.encodings[name]["edges"], numbers, side="right") + 1
        return np.where(np.isnan(numbers), 0, rows)

    def looked_up(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return rows of a table, float32 [n, D]."""
        weights = self.tensors[f"tables.{name}.weight"][rows].astype(np.float32)
        scale = self.tensors.get(f"tables.{name}.scale")
        return weights if scale is None else weights * scale[rows, None]

    def scaled(self, feature: dict[str, Any], values: list[Any]) -> np.ndarray:
        """Return a dense number or vector as the model takes it, float32 [B, width]; NaN for none."""
        missing, scale = [np.nan] * feature.get("width", 1), self.encodings[feature["name"]]
        lists = [missing if value is None else np.atleast_1d(value) for value in values]
        numbers = single(lists).reshape(len(values), len(missing))
        numbers = np.log1p(np.maximum(numbers, 0)) if scale["is_log"] else numbers
        return ((numbers - scale["mean"]) / scale["spread"]).astype(np.float32)

    def apply(self, delta: Path | str) -> None:
        """Change rows and the dense part to those after the next delta of the training.

        Raises:
            ValueError: for any other delta, and for one of which a file is missing or damaged; nothing has
                changed then.
        """
        manifest = checked(delta)
        if manifest["run"] != self.run or manifest.get("link") != self.follows:
            raise ValueError(f"{delta} is not the next delta of this model")
        # Those of the manifest alone: others were not checked.
        files = sorted(entry["name"] for entry in manifest["files"])
        for file in (file for file in files if file.endswith(".safetensors")):
            changes = load_file(Path(delta) / file)
            self.tensors |= {name: value for name, value in changes.items() if name in self.inputs}
            for name in [name for name in changes if name.startswith("tables.") and name.endswith(".weight")]:
                table, weights = name.removesuffix("weight"), changes[name]
                rows, scale = changes[f"{table}rows"], self.tensors.get(f"{table}scale")
                if scale is not None:
                    scale[rows] = np.abs(weights).max(axis=1, initial=0.0) / 127
                    weights = np.rint(weights / np.where(scale[rows] > 0, scale[rows], 1)[:, None])
                self.tensors[name][rows] = weights
        step = manifest["position"]["step"]
        self.follows = {**self.follows, "sequence": self.follows["sequence"] + 1, "from_step": step}


def checked(folder: Path | str) -> dict[str, Any]:
    """Return the manifest of a folder, after a check of it and of all files that it names.

    Raises:
        ValueError: names a file that is missing or damaged.
    """
    manifest: dict[str, Any] = {}
    path = Path(folder) / "manifest.json"
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads(path.read_text())
    # Its digest is that of the rest of it, without spaces and in the order of the names.
    rest = {name: value for name, value in manifest.items() if name != DIGEST}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    if not is_whole(text, manifest):
        raise ValueError(f"{path} is missing or damaged; copy the folder again")
    for entry in manifest["files"]:
        file = path.with_name(entry["name"])
        if not (file.is_file() and is_whole(file.read_bytes(), entry)):
            raise ValueError(f"{file} is missing or damaged; copy the folder again")
    return manifest


def is_whole(content: bytes, entry: dict[str, Any]) -> bool:
    """Return True if the content of a file has the digest of its entry."""
    return bool(xxhash.xxh3_128(content).hexdigest() == entry.get(DIGEST))


def single(values: list[Any]) -> np.ndarray:
    """Return numbers of the precision and range of float32, as float64; NaN for None."""
    limit = np.finfo(np.float32).max
    return np.array(values, np.float64).clip(-limit, limit).astype(np.float32).astype(np.float64)


if __name__ == "__main__":
    print(Client(sys.argv[1]).score(json.loads(sys.argv[2])))
