"""Count files and functions of the library that run before the first `backward` of example.py.

    PYTHONPATH=example python benchmarks/first_backward.py                        the default command
    PYTHONPATH=example python benchmarks/first_backward.py --preset none          with flags of example.py

The first training makes the columns, the second one counts. A function counts once, however often it is
called, in any thread of the one process. Counted are the functions that run, not those that are only defined
or imported; compiled ones (numba, C) are not seen, and comprehensions are part of their function.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import example
import recsuite

LIBRARY = Path(recsuite.__file__).parent


class FirstBackward(BaseException):
    """End of the count; no handler of errors catches it."""


def count(flags: list[str]) -> set[CodeType]:
    """Return the functions of the library that ran until the first backward of a training."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    def backward(*arguments: Any, **named: Any) -> None:
        raise FirstBackward

    original, torch.Tensor.backward = torch.Tensor.backward, backward  # type: ignore[method-assign]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        example.main(flags)
    except FirstBackward:
        pass
    else:
        raise SystemExit("The training ended before its first backward, so nothing was counted.")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        torch.Tensor.backward = original  # type: ignore[method-assign]
    return {code for code in called if Path(code.co_filename).is_relative_to(LIBRARY)}


def main() -> None:
    """Count, and print the numbers and the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags = parser.parse_known_args()[1]
    count(flags)
    files: dict[str, int] = {}
    for code in count(flags):
        name = str(Path(code.co_filename).relative_to(LIBRARY))
        # A comprehension is no function.
        files[name] = files.get(name, 0) + (not code.co_name.startswith("<") or code.co_name == "<lambda>")
    print(f"{len(files)} files, {sum(files.values())} functions until the first backward")
    for name, number in sorted(files.items(), key=lambda each: -each[1]):
        print(f"{number:>5}  {name}")


if __name__ == "__main__":
    main()
