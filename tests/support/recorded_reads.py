"""Runs a script of the example, and prints the flags that code outside of checks and presets reads meanwhile.

python recorded_reads.py SCRIPT [FLAGS...]
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from recsuite.config.config import flag_names
from recsuite.config.flag import Section
from tests.support.launch import ROOT

CHECKS = {
    "validate",
    "check",
    "is_default",
    "replaced",
    "flags",
    "with_preset",
    "preset_flags",
    "fitting_preset",
}
PLACES = ("recsuite/config", "/flags.py", "dataclasses")


def main() -> None:
    """Record, and run."""
    read, names, plain = set(), flag_names().keys(), object.__getattribute__

    def recorded(self: Section, name: str) -> Any:
        if name in names:
            frame, functions = sys._getframe(1), set()
            while any(part in frame.f_code.co_filename for part in PLACES) and frame.f_back:
                functions.add(frame.f_code.co_name)
                frame = frame.f_back
            if not functions & CHECKS:
                read.add(name)
        return plain(self, name)

    Section.__getattribute__ = recorded  # type: ignore[method-assign, assignment]
    sys.path.append(str(ROOT / "example"))
    assert importlib.import_module(sys.argv[1]).main(sys.argv[2:]) == 0
    print(sorted(read))


if __name__ == "__main__":
    main()
