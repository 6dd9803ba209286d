"""One training with all flags of reports, for its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import EXAMPLE, succeeded, torchrun
from tests.support.shared_folder import shared_folder


@pytest.fixture(scope="session")
def watched(synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and report of two ranks, with a profile and TensorBoard's files."""

    def make(folder: Path) -> None:
        flags = ("--data_path", synthetic_folder, "--epochs", 2, "--batch_size", 2048)
        more = ("--profile", 4, "--tensorboard", "--report_dir", folder / "report")
        result = torchrun(2, EXAMPLE, *flags, *more)
        (folder / "output").write_text(succeeded(result))
        assert "Profiler" not in result.stderr

    folder = shared_folder(tmp_path_factory, "watched", make)
    return (folder / "output").read_text(), folder / "report"
