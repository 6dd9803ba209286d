"""One training with all of monitoring, for its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import EXAMPLE, succeeded, torchrun


@pytest.fixture(scope="session")
def watched(synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and report of two ranks, with a profile and TensorBoard's files."""
    folder = tmp_path_factory.mktemp("watched")
    flags = ("--data_path", synthetic_folder, "--epochs", 2, "--batch_size", 1024, "--report_dir", folder)
    result = torchrun(2, EXAMPLE, *flags, "--profile", 4, "--tensorboard")
    output = succeeded(result)
    assert "Profiler" not in result.stderr
    return output, folder
