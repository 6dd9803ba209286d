"""Shared parts of tests: small data sets, and reasons to skip."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime
from tests.support.launch import GPUS, NO_GPUS, ROOT, SUPPORT, succeeded, torchrun
from tests.support.shared_folder import shared_folder

if TYPE_CHECKING:
    from tests.support.trained import Trained

# Threads of a test that wait for each other leave the cores to the tests beside it, as those of ranks do by
# themselves. It is read when torch is loaded, which nothing above does, and is not for what tests launch.
with mock.patch.dict(os.environ, OMP_WAIT_POLICY="passive"):
    import torch

# Counted before this process, too, is left without them; counting starts no CUDA context.
with mock.patch.dict(os.environ, GPUS):
    NUM_GPUS = torch.cuda.device_count()
os.environ.update(NO_GPUS)
TESTS = Path(__file__).parent
# Only with --all.
BESIDE = (
    "benchmarks",
    "cluster",
    "docs/test_deploy.py",
    "extras",
    "scripts/test_ray_train.py",
    "scripts/test_wheel.py",
    "test_conftest.py",
    "test_preloaded.py",
)
LONGEST = (
    "test_object_store",
    "test_commands",
    "test_storage",
    "test_graph",
    "test_retrain_store",
    "test_any_ranks",
    "test_kafka_commands",
    "test_kill",
    "test_service",
    "test_stream_commands",
    "test_dumps",
    "test_ranks",
    "test_drawn_rows",
    "test_example",
    "test_imports",
    "test_benchmark_panel",
    "test_dynamic_tables",
    "test_dump_faults",
    "test_conftest",
    "test_gaussian",
    "test_rankings",
    "test_columns",
    "test_lost",
    "test_run_sh",
    "test_ray_train",
    "test_prepare",
    "test_wheel",
    "test_silence",
    "test_memory",
    "test_origin",
    "test_fit",
    "test_devices",
    "test_many_ranks",
    "test_plan",
    "test_vectors",
    "test_retrieval",
    "test_serving",
    "test_pool",
    "test_proposal",
    "test_retrain",
    "test_ctr",
)


@pytest.fixture(scope="session")
def synthetic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set of 20,000 ratings."""
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    write_synthetic(folder, 20_000, seed=0)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set of 5,000 ratings."""
    folder = tmp_path_factory.mktemp("data") / "small"
    write_synthetic(folder, 5_000, seed=0)
    return folder


@pytest.fixture(scope="module")
def context() -> Iterator[RuntimeContext]:
    """This process as the only rank."""
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        yield init_runtime(Config())
        cleanup_runtime()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after a test: a later one may launch ranks that talk to other machines."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def original(
    synthetic_folder: Path, context: RuntimeContext, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """Trained model with checkpoints that no test changes; see `trained` for a copy."""
    from tests.support.trained import make_trained

    return make_trained(synthetic_folder, context, tmp_path_factory.mktemp("dumps"))


@pytest.fixture
def trained(original: Trained, tmp_path: Path) -> Trained:
    """A trained model, and a folder of its checkpoints for the test alone."""
    folder = tmp_path / "dumps"
    shutil.copytree(original.folder, folder, symlinks=True)
    config = original.config.replaced(save_dir=str(folder))
    return dataclasses.replace(original, folder=folder, config=config)


@pytest.fixture(scope="session")
def states_folder(synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which two ranks of `states.py` wrote those of the next two fixtures."""

    def make(folder: Path) -> None:
        succeeded(torchrun(2, SUPPORT / "states.py", synthetic_folder, folder, timeout=300))

    return shared_folder(tmp_path_factory, "states", make)


@pytest.fixture(scope="session")
def trained_folder(states_folder: Path) -> Path:
    """Folder with the "dumps" of a training, and "predictions.npz" of each."""
    return states_folder / "vocabulary"


@pytest.fixture(scope="session")
def dynamic_folder(states_folder: Path) -> Path:
    """Folder with the "dumps" of a training with dynamic tables, and "predictions.npz" of each."""
    return states_folder / "dynamic"


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """MovieLens as GroupLens made it."""
    beside = ROOT.parent / "shared" / "data" / "ml-latest-small"
    folder = Path(os.environ.get("MOVIELENS_DATA", beside))
    if not (folder / "ratings.csv").is_file():
        pytest.skip(f"no ratings.csv in {folder}; set MOVIELENS_DATA to a folder of ml-latest-small")
    return folder


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add --all, and read over what pyproject.toml says to plugins that are not installed."""
    parser.addoption("--all", action="store_true", help="also tests of extras, benchmarks, deploy and tests")
    smoke = "run `multi_gpu` on the CPU where there is no GPU; fail if no test passed"
    parser.addoption("--smoke", action="store_true", help=smoke)
    if not pluginmanager.hasplugin("instafail"):
        parser.addoption("--instafail", action="store_true")
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option)
        parser.addoption("--no-loadscope-reorder", action="store_true")
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that are beside the core in a file of the core."""
    config.addinivalue_line("markers", "beside: only with --all, or if its file is given")


def is_of_the_core_alone(config: pytest.Config) -> bool:
    """True for a run without --all and without a path."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip what is beside the core, unless --all or a path is given."""
    return True if is_of_the_core_alone(config) and is_beside(collection_path) else None


def is_beside(path: Path) -> bool:
    """True for tests of what is not the core: extras, benchmarks, deploy, Ray, and the tests themselves."""
    name = path.relative_to(TESTS).as_posix()
    return any(f"{name}/".startswith(f"{each}/") for each in BESIDE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print which tests need --all."""
    if is_of_the_core_alone(config) and not config.getoption("smoke"):
        paths = ", ".join(BESIDE)
        terminalreporter.write_line(f"Not run without --all: in tests/ {paths}, and the marker beside")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a --smoke in which no test passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("smoke") and reporter and not reporter.stats.get("passed"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the last line of a --smoke: place of the ranks, their backend, and numbers of tests."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("smoke") and reporter:
        reports = {how: reporter.stats.get(how, []) for how in ("passed", "failed", "error")}
        places = {dict(report.user_properties).get("ranks") for each in reports.values() for report in each}
        counts = ", ".join(f"{len(each)} {how}" for how, each in reports.items())
        reporter.write_line(f"smoke: {'; '.join(sorted(filter(None, places))) or 'no ranks'}: {counts}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the core, and with the files that take longest, so that the processes end together."""
    if is_of_the_core_alone(config):
        left = [item for item in items if item.get_closest_marker("beside")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (is_beside(item.path), places.get(item.path.stem, len(places))))


def pytest_collection_finish() -> None:
    """Keep all objects from before the first test out of garbage collection."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the machine cannot run, and say what is missing."""
    markers = ("gpu",) if item.config.getoption("smoke") else ("gpu", "multi_gpu")
    if not NUM_GPUS and any(map(item.get_closest_marker, markers)):
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep the name of the running test in a file, for a run that is killed from outside."""
    folder = os.environ.get("RUNNING_TESTS")
    if not folder:
        return (yield)
    file = Path(folder, str(os.getpid()))
    file.write_text(f"{item.nodeid}\n")
    outcome = yield
    # Only after a test that ended: xdist interrupts its processes when the run is killed.
    file.unlink()
    return outcome
