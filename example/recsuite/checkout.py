"""The repository that the library runs from, if it does: around an installed wheel there is none."""

from __future__ import annotations

from pathlib import Path


def checkout() -> Path | None:
    """The folder of the repository, with run.sh and the lists of packages; None outside of one."""
    package = Path(__file__).resolve().parent
    # Both: whoever installs into a folder of a project of their own may have such a list there too.
    is_one = package.parent.name == "example" and (package.parents[1] / "requirements.txt").is_file()
    return package.parents[1] if is_one else None
