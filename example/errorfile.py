"""What a rank leaves for torchrun's report, which ends with the oldest of these files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

TOLD = "told to end by signal "


def leave_for_torchrun(message: str, text: str, is_said: bool = False) -> None:
    """Leave a message and what explains it; nothing happens without torchrun.

    is_said: whether the rank has said all of it in a sentence, and a report would only repeat that.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        details = {"py_callstack": text, "timestamp": str(int(time.time())), "is_said": is_said}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def is_said(message: Any) -> bool:
    """Whether what torchrun found in the file of a rank has been said by that rank."""
    return isinstance(message, dict) and bool(message.get("extraInfo", {}).get("is_said"))


def leave_told_to_end(status: int) -> None:
    """Leave that this rank ends because some rank was told to by a signal; the status has its number."""
    leave_for_torchrun(f"{TOLD}{status - 128}", "", is_said=True)


def told_to_end(log_dir: Path, since: float) -> int:
    """The signal that told a rank of this machine to end, by the files that torchrun has of ranks; or 0.

    since: when the launch began; torchrun may have files of others in the same place.
    """
    for path in log_dir.glob("*/attempt_*/*/error.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            message = json.loads(path.read_text())["message"]["message"]
            if message.startswith(TOLD) and path.stat().st_mtime >= since:
                return int(message.removeprefix(TOLD))
    return 0
