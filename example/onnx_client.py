"""Score with an exported model by onnxruntime and numpy alone, as a program of your own would do.

    ./run.sh export served --format onnx
    python example/onnx_client.py served '{"user": [42, 42], "movie": [1, 3]}'

Copy it: it imports neither torch nor this library. Tables with a fixed vocabulary only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from safetensors.numpy import load_file


class Client:
    """Model of an export; `score` takes the same values as `ServedModel.score`."""

    def __init__(self, folder: Path | str) -> None:
        def read(name: str) -> Any:
            return json.loads((Path(folder) / name).read_text())

        self.tensors = load_file(Path(folder) / "model.safetensors")
        self.tables, vocabulary = read("features.json")["tables"], read("vocabulary.json")
        schema = read("schema.json")
        self.numbers = [each for each in schema["features"] if each["number"] == "dense"]
        self.types = schema.get("event_types", [])
        self.encodings = {name: found for name, found in vocabulary.items() if isinstance(found, dict)}
        self.rows = {
            name: {value: row for row, value in enumerate(found, start=1)}
            for name, found in vocabulary.items()
            if isinstance(found, list)
        }
        # The rows of a history are found by the ids of items.
        self.rows["history"] = self.rows.get(schema["item"], {})
        self.session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"))
        self.inputs = [each.name for each in self.session.get_inputs()]

    def score(self, values: dict[str, list[Any]]) -> np.ndarray:
        """Return a score for each event, float32 [B]. values: feature to B values or lists of values."""
        size = len(next(iter(values.values())))
        given = {name: self.tensors[name] for name in self.inputs if name.startswith("dense.")}
        for table in self.tables:
            name, is_list = table["name"], table["multi"]
            lists = values.get(name, [[] if is_list else None] * size)
            if not is_list:
                lists = [[value] for value in lists]
            elif name != "history":
                # An empty list counts as one unknown value.
                lists = [each or [None] for each in lists]
            given[name] = self.looked_up(
                name, self.row_numbers(name, [each for one in lists for each in one])
            )
            if is_list:
                given[f"{name}.lengths"] = np.array([len(each) for each in lists], np.int64)
        if "history.labels" in self.inputs:
            labels = [each for one in values.get("history_ratings", []) for each in one]
            # Of several types of events the label is the position of the type.
            labels = [self.types.index(each) + 1 if each in self.types else each for each in labels]
            given["history.labels"] = np.array(labels, np.float32)
        if "history.places" in self.inputs:
            lengths = given["history.lengths"]
            places = [place for length in lengths for place in reversed(range(length))]
            ages = values.get("history_ages", [[0] * length for length in lengths])
            seconds = np.floor([each for one in ages for each in one])
            given["history.places"] = np.array(places, np.int32)
            # 0 for 0 seconds, 1 for 1 and 2, 2 for 3 to 6, and so on.
            given["history.gaps"] = np.minimum(np.frexp(1.0 + seconds)[1] - 1, 31).astype(np.int32)
        if "numbers" in self.inputs:
            columns = [self.scaled(each, values.get(each["name"], [None] * size)) for each in self.numbers]
            given["numbers"] = np.concatenate(columns, axis=1)
        return self.session.run(["score"], {name: given[name] for name in self.inputs})[0]

    def row_numbers(self, name: str, values: list[Any]) -> np.ndarray:
        """Return the row of each value; row 0 is that of unknown ones."""
        if name in self.rows:
            return np.array([self.rows[name].get(each, 0) for each in values], np.int64)
        numbers = np.array(values, np.float32).astype(np.float64)
        rows = np.searchsorted(self.encodings[name]["edges"], numbers, side="right") + 1
        return np.where(np.isnan(numbers), 0, rows)

    def looked_up(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return rows of a table, float32 [n, D]."""
        found = self.tensors[f"tables.{name}.weight"][rows].astype(np.float32)
        scale = self.tensors.get(f"tables.{name}.scale")
        return found if scale is None else found * scale[rows, None]

    def scaled(self, feature: dict[str, Any], values: list[Any]) -> np.ndarray:
        """Return a dense number or vector as the model takes it, float32 [B, width]; NaN for none."""
        missing, scale = [np.nan] * feature.get("width", 1), self.encodings[feature["name"]]
        lists = [missing if value is None else np.atleast_1d(value) for value in values]
        numbers = np.array(lists, np.float32).astype(np.float64)
        numbers = np.log1p(np.maximum(numbers, 0)) if scale["is_log"] else numbers
        return ((numbers - scale["mean"]) / scale["spread"]).astype(np.float32)

    def apply(self, delta: Path | str) -> None:
        """Write the rows and the dense part of the next delta of the training into the tables of float32."""
        for path in sorted(Path(delta).glob("*.safetensors")):
            found = load_file(path)
            for name, value in found.items():
                if name.startswith("dense.") and name in self.tensors:
                    self.tensors[name] = value
                elif name.endswith(".weight"):
                    self.tensors[name][found[f"{name.removesuffix('weight')}rows"]] = value


if __name__ == "__main__":
    print(Client(sys.argv[1]).score(json.loads(sys.argv[2])))
