"""What a rank leaves for torchrun's report, which ends with the oldest of these files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path


def leave_for_torchrun(message: str, text: str) -> None:
    """Leave a message and what explains it; nothing happens without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
