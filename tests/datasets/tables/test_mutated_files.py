"""A hundred files, damaged or rewritten: each is read correctly or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launch import python
from tests.support.mutated_files import mutants

SEED, NUMBER = 20_261_122, 100
DEADLINE_SECONDS = 60


def test_a_mutated_file_is_read_correctly_or_refused_with_one_message(tmp_path: Path) -> None:
    made = mutants(SEED, NUMBER)
    for mutant in made:
        (tmp_path / mutant.name).write_bytes(mutant.content)
    run = python("-m", "tests.support.mutated_files", tmp_path, timeout=300)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0, f"{lines[-1]} ended the process: {run.stderr[-2000:]}"
    found = dict(zip((line["name"] for line in lines[::2]), lines[1::2], strict=True))
    assert [*found] == [mutant.name for mutant in made]
    assert [line for line in found.items() if "traceback" in line[1]] == []
    assert [name for name, line in found.items() if line["seconds"] > DEADLINE_SECONDS] == []
    values = {found[mutant.name].get("values", mutant.name) for mutant in made if mutant.is_same}
    assert len(values) == 1, values
    refused = {name: line["refused"] for name, line in found.items() if "refused" in line}
    assert [text for text in refused.values() if "\n" in text or not text.endswith(".")] == []
    # It names the file.
    assert [text for name, text in refused.items() if name not in text] == []
    # Of what is damaged most is noticed; a changed digit is a digit.
    assert len(refused) > NUMBER / 3
