"""`check_versions` with invented metadata, and its agreement with the lists of packages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from recsuite.errors import UserError
from recsuite.runtime import host

Install = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
PIP = f"{shlex.quote(sys.executable)} -m pip"
UNINSTALL = f"{PIP} uninstall -y fbgemm-gpu fbgemm-gpu-cpu"
CPU_TRIO = f"{PIP} install --no-deps torch==2.13.0 torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
CUDA_TRIO = f"{PIP} install torch==2.13.0 'torch!=2.13.0+cpu' torchrec==1.8.0 fbgemm-gpu==1.8.0"

PYTHONS = [(3, 10), (3, 11), (3, 12), (3, 13), (3, 14)]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that exactly these versions are installed, and that torch needs these packages."""

    def pretend(
        versions: dict[str, str], torch_needs: tuple[str, ...] = ("sympy",), has_driver: bool = True
    ) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", lambda name: list(torch_needs))
        monkeypatch.setattr(host, "_has_driver", lambda: has_driver)

    return pretend


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        host.check_versions()
    return str(caught.value)


def test_the_real_installation_passes() -> None:
    host.check_versions()


@pytest.mark.parametrize(
    "installed",
    [
        {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"},
        {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"},
        {"torch": "2.13.1", "torchrec": "1.8.2", "fbgemm-gpu": "1.8.1"},
        {"torch": "2.11.0", "torchrec": "1.6.1", "fbgemm-gpu-cpu": "1.6.0"},
        {"torch": "2.12.1", "torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.7.0"},
        {"torch": "2.14.1+cu130", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0"},
    ],
)
def test_versions_of_one_generation_pass(install: Install, installed: dict[str, str]) -> None:
    install(installed)
    host.check_versions()


@pytest.mark.parametrize(
    ("torch", "torchrec", "fbgemm", "stack"),
    [
        ("2.12.0", "1.8.0", "1.8.0", "2.13"),
        ("2.13.0", "1.9.0", "1.8.0", "2.13"),
        ("2.13.0", "1.8.0", "1.9.0", "2.13"),
        ("2.14.1", "1.8.0", "1.8.0", "2.14"),
        ("2.11.0", "1.8.0", "1.6.0", "2.11"),
        ("2.15.0", "1.10.0", "1.10.0", "2.13"),
        ("2.10.0", "1.5.1", "1.5.0", "2.13"),
        ("3.0.0", "1.8.0", "1.8.0", "2.13"),
    ],
)
def test_versions_that_do_not_belong_together_are_refused_with_those_that_do(
    install: Install, torch: str, torchrec: str, fbgemm: str, stack: str
) -> None:
    install({"torch": torch, "torchrec": torchrec, "fbgemm-gpu-cpu": fbgemm})
    names = zip(("torch", "torchrec", "fbgemm-gpu-cpu"), host.STACKS[stack], strict=True)
    trio = " ".join(f"{name}=={version}" for name, version in names)
    assert refusal() == (
        f"Found torch {torch}, torchrec {torchrec}, fbgemm-gpu-cpu {fbgemm}, which do not belong together: "
        "supported are torch 2.11 with 1.6, 2.12 with 1.7, 2.13 with 1.8, 2.14 with 1.9 of torchrec and "
        "fbgemm; "
        f"fix it with: {UNINSTALL} && {PIP} install --no-deps {trio}"
    )


def test_the_advice_on_a_cuda_wheel_installs_a_cuda_wheel(install: Install) -> None:
    install({"torch": "2.12.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"})
    assert refusal().endswith(f"fix it with: {UNINSTALL} && {CUDA_TRIO}")


def test_the_build_for_cuda_is_refused_without_a_driver(install: Install) -> None:
    install({"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0"}, has_driver=False)
    assert refusal() == (
        "Found torch 2.14.1, torchrec 1.9.2, fbgemm-gpu 1.9.0, the build for CUDA, which requires "
        "NVIDIA's driver, and there is no libnvidia-ml.so.1; install the driver, or the build for CPUs with: "
        f"{UNINSTALL} && {PIP} install --no-deps torch==2.14.1 torchrec==1.9.2 fbgemm-gpu-cpu==1.9.0"
    )


@pytest.mark.parametrize(
    ("torch_needs", "trio"),
    [(("sympy",), CPU_TRIO), (("sympy", "nvidia-nccl-cu13==2.29.7"), CUDA_TRIO)],
)
def test_of_two_fbgemm_wheels_the_one_that_suits_torch_is_kept(
    install: Install, torch_needs: tuple[str, ...], trio: str
) -> None:
    both = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.8.0"}
    install(both, torch_needs)
    sentence = refusal()
    assert "fbgemm-gpu 1.9.0, fbgemm-gpu-cpu 1.8.0, but the last two overwrite each other's files" in sentence
    assert sentence.endswith(f"fix it with: {UNINSTALL} && {trio}")


@pytest.mark.parametrize("missing", ["torch", "torchrec", "fbgemm-gpu-cpu"])
def test_the_advice_on_a_missing_package_installs_the_whole_list(install: Install, missing: str) -> None:
    versions = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    del versions[missing]
    install(versions)
    sentence = refusal()
    assert "but found " + ", ".join(f"{name} {version}" for name, version in versions.items()) in sentence
    assert sentence.endswith(
        f"{UNINSTALL} && {PIP} install --no-deps -r {shlex.quote(str(REPOSITORY / 'requirements.txt'))}"
    )


def test_the_advice_on_another_stack_keeps_it(install: Install) -> None:
    install({"torch": "2.14.1", "fbgemm-gpu-cpu": "1.9.0"})
    trio = "torch==2.14.1 torchrec==1.9.2 fbgemm-gpu-cpu==1.9.0"
    assert refusal().endswith(f"requirements.txt && {PIP} install --no-deps {trio}")


def test_outside_of_a_repository_the_message_names_the_folder_of_the_list(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "checkout", lambda: None)
    install({})
    sentence = refusal()
    assert "found none of them; fix it in the folder of the repository with: " in sentence
    assert sentence.endswith("install --no-deps -r requirements.txt")


def test_the_versions_for_reports_name_the_fbgemm_wheel(install: Install) -> None:
    install({"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "numpy": "2.4.6"})
    found = host.installed_versions()
    assert found.pop("python").startswith("3.")
    assert found == {
        "torch": "2.13.0",
        "torchrec": "1.8.0",
        "fbgemm": "fbgemm-gpu-cpu 1.8.0",
        "pandas": "missing",
        "numpy": "2.4.6",
    }


@pytest.mark.parametrize(
    ("filename", "wheel"), [("requirements.txt", "fbgemm-gpu-cpu"), ("requirements-cuda.txt", "fbgemm-gpu")]
)
def test_the_versions_of_the_trio_equal_the_pinned_requirements(filename: str, wheel: str) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (REPOSITORY / filename).read_text(), re.MULTILINE))
    trio = dict(zip(("torch", "torchrec", wheel), host.STACKS[host.PINNED], strict=True))
    assert {name: pins.get(name) for name in trio} == trio


def pins_of(python: tuple[int, int], *lists: str) -> list[tuple[str, str]]:
    """The packages that lists of requirements pin for a version of Python, each with its version."""
    pins = []
    for line in "\n".join((REPOSITORY / name).read_text() for name in lists).splitlines():
        match = re.fullmatch(r"([\w-]+)==(\S+)(?: ; python_version (<|>=) \"3\.(\d+)\")?", line)
        assert match or not line or line.startswith("#"), line
        if match and (match[3] is None or (python < (3, int(match[4]))) == (match[3] == "<")):
            pins.append((match[1].lower().replace("_", "-"), match[2]))
    return pins


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_gets_exactly_one_version_of_every_package(python: tuple[int, int]) -> None:
    pins = pins_of(python, "requirements.txt", "requirements-dev.txt")
    names = [name for name, _ in pins]
    assert len(names) == len(set(names))
    assert {"torch", "numpy", "pandas", "networkx", "pytest"} <= set(names)
    # The site is built with the same versions, so that its installation changes no package of the tests.
    of_the_site = pins_of(python, "requirements-docs.txt")
    assert len(dict(of_the_site)) == len(of_the_site)
    assert not [(name, pin) for name, pin in of_the_site if dict(pins).get(name, pin) != pin]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_that_a_python_gets_supports_it(python: tuple[int, int]) -> None:
    checked, refused = 0, []
    for name, version in pins_of(python, "requirements.txt", "requirements-dev.txt"):
        # Of a version that this Python does not get, there is no metadata here.
        if installed_version(name) == version:
            checked += 1
            # Some have no such field.
            fields: Any = metadata.metadata(name)
            needed = fields.get("Requires-Python")
            if needed and f"{python[0]}.{python[1]}.9" not in SpecifierSet(needed):
                refused.append(f"{name}=={version} needs Python {needed}")
    assert refused == []
    assert checked > 100


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def test_the_two_variants_pin_the_same_versions() -> None:
    cpu = set((REPOSITORY / "requirements.txt").read_text().splitlines())
    cuda = {
        line for line in (REPOSITORY / "requirements-cuda.txt").read_text().splitlines() if line[0] != "#"
    }
    torch, _, fbgemm = host.STACKS[host.PINNED]
    # pip takes any build for torch==VERSION, and of an index that has both that of the CPU.
    assert cuda - cpu == {f"fbgemm-gpu=={fbgemm}", f"torch!={torch}+cpu"}


def test_the_check_imports_none_of_the_packages() -> None:
    heavy = "{'torch', 'torchrec', 'fbgemm_gpu'}"
    check = "from recsuite.runtime.host import check_versions; check_versions()"
    code = f"import sys; {check}; sys.exit(len({heavy} & {{*sys.modules}}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
