"""The repository that the library runs from, if it does: around an installed wheel there is none."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def checkout() -> Path | None:
    """The folder of the repository, with run.sh and the lists of packages; None outside of one."""
    package = Path(__file__).resolve().parent
    # Both: whoever installs into a folder of a project of their own may have such a list there too.
    is_one = package.parent.name == "example" and (package.parents[1] / "requirements.txt").is_file()
    return package.parents[1] if is_one else None


# Where data sets lie that were obtained, and what is made of files whose folder cannot be written.
DATA_ROOT = (checkout() or Path()) / "data"


def place_for(folder: Path, name: str) -> Path:
    """Path of what is made of the files in a folder: in it, or below DATA_ROOT where it cannot be written."""
    # Root may write anywhere; a folder whose mode forbids it is still not ours to write to.
    if os.access(folder, os.W_OK) and folder.stat().st_mode & 0o222:
        return folder / name
    # Folders elsewhere may have the same name and hold other files.
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return (DATA_ROOT / "columns" / f"{folder.resolve().name}-{digest}").absolute() / name
