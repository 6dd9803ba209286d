"""Start-up check that torch, torchrec and fbgemm belong together, read from the installed metadata.

It imports none of the three: with versions that do not match the import itself fails, with pages of messages
from the dynamic loader.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

from recsuite.checkout import checkout
from recsuite.errors import UserError

# Those that requirements.txt and requirements-cuda.txt pin.
TORCH = "2.13.0"
TORCHREC = "1.8.0"
FBGEMM = "1.8.0"

# Two names for one module: installed together, they overwrite each other's files.
FBGEMM_WHEELS = ("fbgemm-gpu", "fbgemm-gpu-cpu")


def check_versions() -> None:
    """Refuse an installation that cannot start.

    Raises:
        UserError: when one of the three is missing, both fbgemm wheels are there, or versions do not match.
    """
    # Each is read once, for that takes milliseconds of every start.
    versions = {name: _version(name) for name in ("torch", "torchrec", *FBGEMM_WHEELS)}
    torch, torchrec = versions["torch"], versions["torchrec"]
    wheels = [name for name in FBGEMM_WHEELS if versions[name]]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if torch is None or torchrec is None or not wheels:
        needed = "The example needs torch, torchrec and one of fbgemm-gpu and fbgemm-gpu-cpu"
        mend = _mend(wheels, everything=True)
        where = "" if checkout() else " in the folder of the repository"
        raise UserError(f"{needed}, but found {found or 'none of them'}; mend it{where} with: {mend}")
    if len(wheels) == 2:
        fault = f"Found {found}, but the last two overwrite each other's files and only one can be there"
        raise UserError(f"{fault}; mend it with: {_mend(wheels)}")
    wanted = _partner(torch)
    if not _minor(torchrec) == _minor(versions[wheels[0]]) == wanted:
        rule = f"torch {_minor(torch)} needs torchrec and fbgemm {wanted}" if wanted else "torch 2 is needed"
        fault = f"Found {found}, which do not belong together: {rule}"
        raise UserError(f"{fault}; mend it with: {_mend(wheels)}")


def has_cuda_kernels() -> bool:
    """Whether the installed fbgemm wheel is the one for CUDA."""
    return _version("fbgemm-gpu") is not None


def installed_versions() -> dict[str, str]:
    """The versions a report names, "missing" for what is not installed."""
    fbgemm = [f"{name} {_version(name)}" for name in FBGEMM_WHEELS if _version(name)]
    versions = {name: _version(name) or "missing" for name in ("torch", "torchrec", "pandas", "numpy")}
    return {"python": platform.python_version(), **versions, "fbgemm": " and ".join(fbgemm) or "missing"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str | None) -> str | None:
    match = re.match(r"\d+\.\d+", version or "")
    return match and match.group()


def _partner(torch: str) -> str | None:
    """The torchrec and fbgemm of a torch: 2.N goes with 1.(N - 5); tried with 2.13 and 2.11."""
    match = re.match(r"2\.(\d+)", torch)
    return f"1.{int(match.group(1)) - 5}" if match else None


def _mend(wheels: list[str], everything: bool = False) -> str:
    """The commands that lead to the three pinned packages, or to all the pinned packages."""
    # A single fbgemm wheel says which kind is wanted. With both or none torch says it: its CUDA build asks
    # for NVIDIA's libraries.
    wheel = wheels[0] if len(wheels) == 1 else FBGEMM_WHEELS[0 if _torch_wants_cuda() else 1]
    cuda = wheel == "fbgemm-gpu"
    # Outside of a repository the list has to be fetched from one, so only its name is known.
    requirements = (checkout() or Path()) / f"requirements{'-cuda' if cuda else ''}.txt"
    three = f"torch=={TORCH} torchrec=={TORCHREC} {wheel}=={FBGEMM}"
    what = f"-r {shlex.quote(str(requirements))}" if everything else three
    # A bare "pip" may belong to another Python.
    pip = f"{shlex.quote(sys.executable)} -m pip"
    # Both, also where one is right: they share their files, so removing one damages the other.
    uninstall = f"{pip} uninstall -y {' '.join(FBGEMM_WHEELS)}"
    # On a CPU without what they depend on: torchrec asks for the fbgemm of CUDA, and pip would put its files
    # over those for the CPU. requirements.txt is a complete list therefore.
    return f"{uninstall} && {pip} install {'' if cuda else '--no-deps '}{what}"


def _torch_wants_cuda() -> bool:
    needed = (metadata.requires("torch") or []) if _version("torch") else []
    return any(line.startswith("nvidia-") for line in needed)
