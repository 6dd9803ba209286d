"""What a rank leaves for torchrun's report, which ends with the oldest of these files."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any


def leave_for_torchrun(message: str, text: str, is_said: bool = False) -> None:
    """Leave a message and what explains it; nothing happens without torchrun.

    is_said: whether the rank has said all of it in a sentence, and a report would only repeat that.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        details = {"py_callstack": text, "timestamp": str(int(time.time())), "is_said": is_said}
        # Renamed into its place, for torchrun ends with a traceback where it finds half a file.
        aside = Path(f"{error_file}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
            aside.replace(error_file)


def is_said(message: Any) -> bool:
    """Whether what torchrun found in the file of a rank has been said by that rank."""
    return isinstance(message, dict) and bool(message.get("extraInfo", {}).get("is_said"))
