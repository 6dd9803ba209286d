"""Behaviour of run.sh with stand-ins for python3 and nvidia-smi that record their calls."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from recsuite.runtime import host

REPOSITORY = Path(__file__).resolve().parents[2]
LISTS = tuple(f"requirements{kind}.txt" for kind in ("", "-cuda", "-dev", "-docs"))
COPIED = ("run.sh", "pyproject.toml", *LISTS)
# All that is needed to check a command line.
CHECKING = (
    *sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("example/recsuite/config/*.py")),
    "example/recsuite/errors.py",
    "example/recsuite/runtime/console.py",
)
EXTRAS = tuple(
    f"example/recsuite/extras/{name}.py" for name in ("launcher/__main__", "retrain", "reports/compare")
)
SETTINGS = ("NPROC", "NNODES", "RDZV_ENDPOINT", "MAX_RESTARTS", "VARIANT", "PYTHON", "STACK")
OWN_VARIABLES = (*SETTINGS, "OMP_NUM_THREADS", "CDPATH")

# Every call becomes one line, its arguments joined by "|". FAKE_PIP says what happens to an installation, and
# CHECKED that flags are those of the example.
FAKE_PYTHON = r"""#!/usr/bin/env bash
case "$1" in
  -V) echo "Python ${FAKE_VERSION:-3.11.7}"; exit ;;
  -c) [[ -z "${FAKE_OLD:-}" ]]; exit ;;
  -m)
    if [[ "$2" == recsuite.config ]]; then [[ -n "${CHECKED:-}" ]] && exec "$REAL_PYTHON" "$@"; exit 0; fi
    if [[ "$2" == recsuite.tools.choose_script ]]; then echo "$FAKE_COMMAND"; exit; fi
    ;;
esac
(IFS='|'; echo "$*" >>"$CALLS")
case "$*" in
  "${FAKE_FAILING:-nothing}") exit 1 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *" pip "*" --version") [[ "$0" == */.venv/* ]] ;;
  *" show -q "*) [[ "$*" == *" ${FAKE_INSTALLED:-nothing}" ]] ;;
  *" show torch") echo "Requires: filelock, ${FAKE_TORCH_NEEDS:-sympy}" ;;
  *" pip "*" install "*)
    case "${FAKE_PIP:-}" in
      fail) echo "ERROR: no such wheel"; exit 1 ;;
      talk) printf '%s\n' "Collecting six==1.17.0" "  Downloading six" "Installing collected packages: six" ;;
      killed) kill -KILL "$PPID" ;;
      slow) sleep 0.5 ;;
    esac ;;
  *"/example.py --doctor"*)
    echo "ranks=$LOCAL_WORLD_SIZE gpus=${CUDA_VISIBLE_DEVICES-all} omp=$OMP_NUM_THREADS" >>"$CALLS" ;;
  *recsuite.extras.launcher*) echo "OMP_NUM_THREADS=$OMP_NUM_THREADS" >>"$CALLS" ;;
esac
"""
FAKE_NVIDIA_SMI = r"""#!/usr/bin/env bash
[[ "${FAKE_GPUS:-0}" != 0 ]] || { echo "No devices were found"; exit 9; }
for ((i = 0; i < FAKE_GPUS; i++)); do echo "GPU $i: NVIDIA Model (UUID: $i)"; done
"""


@dataclass
class Copy:
    """A copy of the repository's scripts, and what its stand-ins were called with."""

    folder: Path
    environment: dict[str, str]

    def start(
        self, *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.folder / "run.sh", *arguments],
            cwd=cwd or self.folder,
            env=self.environment | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: str, status: int = 0, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> tuple[str, str]:
        process = self.start(*arguments, cwd=cwd, env=env)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, out + err
        return out, err

    def calls(self, word: str = "") -> list[str]:
        log = Path(self.environment["CALLS"])
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if word in line]

    def installs(self) -> list[str]:
        """The arguments of every pip install, without the folder."""
        lines = [line.partition("|install|")[2] for line in self.calls("|install|")]
        # The library itself is installed with every list of packages.
        return [line.replace(f"{self.folder}/.venv/", "") for line in lines if "|-e|" not in line]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    folder = tmp_path / "a copy"
    for name in (*COPIED, *CHECKING, *EXTRAS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("python3", FAKE_PYTHON), ("nvidia-smi", FAKE_NVIDIA_SMI)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    environment["PATH"] = f"{commands}{os.pathsep}{environment['PATH']}"
    environment |= {"CALLS": str(tmp_path / "calls"), "REAL_PYTHON": sys.executable}
    return Copy(folder, environment)


@pytest.fixture
def checked(copy: Copy) -> None:
    """Have the flags checked as in a clone."""
    copy.environment["CHECKED"] = "1"


# --- setup ---


def test_the_first_setup_installs_the_cpu_list_without_dependencies(copy: Copy) -> None:
    _, err = copy.run("setup")
    assert copy.installs() == ["--no-deps|-r|requirements.txt"]
    assert "installing requirements.txt, about 510 MB" in err


def test_the_library_is_installed_where_its_metadata_are(copy: Copy) -> None:
    copy.run("setup")
    assert len(copy.calls("|-e|")) == 1
    # As in a container image.
    (copy.folder / "pyproject.toml").unlink()
    shutil.rmtree(copy.folder / ".venv")
    copy.run("setup")
    assert len(copy.calls("|-e|")) == 1


def test_an_installation_shows_each_package_and_ends_with_the_next_commands(copy: Copy) -> None:
    _, err = copy.run("setup", env={"FAKE_PIP": "talk"})
    shown = ["run.sh:   Collecting six==1.17.0", "run.sh:   Installing collected packages: six"]
    # The list, and the library itself.
    assert [line for line in err.splitlines() if line.startswith("run.sh:  ")] == shown * 2
    assert err.splitlines()[-1].startswith("run.sh: installed; ./run.sh trains, ")


def test_a_second_setup_calls_no_pip_and_prints_nothing(copy: Copy) -> None:
    copy.run("setup")
    before = copy.calls()
    assert copy.run("setup") == ("", "")
    assert copy.calls() == before


def test_a_changed_list_is_installed_again(copy: Copy) -> None:
    copy.run("setup")
    with (copy.folder / "requirements.txt").open("a") as file:
        file.write("six==1.17.0\n")
    copy.run("setup")
    assert copy.installs() == ["--no-deps|-r|requirements.txt"] * 2


def test_another_python_in_the_venv_installs_again(copy: Copy) -> None:
    copy.run("setup")
    copy.run("setup", env={"FAKE_VERSION": "3.12.1"})
    assert len(copy.installs()) == 2


def test_an_interrupted_change_does_not_leave_the_old_stamp(copy: Copy) -> None:
    listed = copy.folder / "requirements.txt"
    old = listed.read_text()
    copy.run("setup")
    listed.write_text(old + "six==1.17.0\n")
    copy.run("setup", status=-9, env={"FAKE_PIP": "killed"})
    listed.write_text(old)
    copy.run("setup")
    assert len(copy.installs()) == 3


def test_a_failing_pip_names_the_step_and_shows_its_last_lines(copy: Copy) -> None:
    _, err = copy.run("setup", status=1, env={"FAKE_PIP": "fail"})
    assert "ERROR: no such wheel" in err
    assert "run.sh: installing requirements.txt failed" in err
    copy.run("setup")
    assert len(copy.installs()) == 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs the flock command")
def test_two_setups_at_once_install_once(copy: Copy) -> None:
    processes = [copy.start("setup", env={"FAKE_PIP": "slow"}) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
    assert len(copy.installs()) == 1


def test_the_cuda_list_is_installed_with_its_dependencies(copy: Copy) -> None:
    copy.run("setup", env={"VARIANT": "cuda"})
    assert copy.installs() == ["-r|requirements-cuda.txt"]


def test_a_gpu_chooses_the_cuda_list(copy: Copy) -> None:
    copy.run("setup", env={"FAKE_GPUS": "1"})
    assert copy.installs() == ["-r|requirements-cuda.txt"]


@pytest.mark.parametrize(("variant", "other"), [("cpu", "fbgemm-gpu"), ("cuda", "fbgemm-gpu-cpu")])
def test_the_other_variant_is_removed_before_the_installation(copy: Copy, variant: str, other: str) -> None:
    copy.run("setup", env={"VARIANT": variant, "FAKE_INSTALLED": other})
    steps = [line for line in copy.calls() if "|uninstall|" in line or "|install|" in line]
    assert "|uninstall|-y|torch|fbgemm-gpu|fbgemm-gpu-cpu" in steps[0]
    assert "|install|" in steps[1]


def test_switching_the_variant_and_back_installs_three_times(copy: Copy) -> None:
    for variant in ("cpu", "cuda", "cpu"):
        copy.run("setup", env={"VARIANT": variant})
    assert len(copy.installs()) == 3


def test_the_cuda_build_of_torch_gets_its_libraries_on_cpu_too(copy: Copy) -> None:
    _, err = copy.run("setup", env={"FAKE_TORCH_NEEDS": "nvidia-nccl-cu13"})
    assert copy.installs() == ["--no-deps|-r|requirements.txt", "torch==2.13.0"]
    assert "installing NVIDIA's libraries" in err


@pytest.mark.parametrize("stack", sorted(host.STACKS))
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_a_stack_is_the_pinned_list_with_three_other_versions(copy: Copy, stack: str, variant: str) -> None:
    copy.run("setup", env={"STACK": stack, "VARIANT": variant})
    list_of = "requirements.txt" if variant == "cpu" else "requirements-cuda.txt"
    folder = copy.folder / (".venv" if stack == host.PINNED else f".venv-{stack}")
    pinned, installed = (set((place / list_of).read_text().splitlines()) for place in (copy.folder, folder))
    names = ("torch", "torchrec", "fbgemm-gpu-cpu" if variant == "cpu" else "fbgemm-gpu")
    pins = {f"{name}=={version}" for name, version in zip(names, host.STACKS[stack], strict=True)}
    assert pins <= installed
    assert len(installed) == len(pinned)
    changed = len(pins) + (variant == "cuda")
    assert len(installed - pinned) == (0 if stack == host.PINNED else changed)
    assert variant == "cpu" or f"torch!={host.STACKS[stack][0]}+cpu" in installed


def test_the_folders_of_two_stacks_are_independent(copy: Copy) -> None:
    for stack in ("2.13", "2.14", "2.13", "2.14"):
        copy.run("setup", env={"STACK": stack})
    assert len(copy.installs()) == 2


def test_test_installs_the_development_list_too_and_passes_its_arguments_on(copy: Copy) -> None:
    copy.run("test", "-k", "two words")
    assert copy.installs() == ["--no-deps|-r|requirements.txt", "--no-deps|-r|requirements-dev.txt"]
    assert copy.calls()[-1] == "-m|pytest|-k|two words"


def test_smoke_runs_the_tests_of_several_ranks_and_passes_its_arguments_on(copy: Copy) -> None:
    copy.run("smoke", "-k", "dynamic")
    assert copy.calls()[-1] == "-m|pytest|-m|multi_gpu|--smoke|-n|0|--timeout|0|-q|-k|dynamic"


def test_lint_runs_every_linter(copy: Copy) -> None:
    copy.run("lint")
    wanted = ["-m|ruff|check|.", "-m|ruff|format|--check|.", "-m|mypy", "-m|codespell_lib"]
    assert copy.calls()[-4:] == wanted


def test_docs_installs_its_list_alone_and_builds_the_site(copy: Copy) -> None:
    _, err = copy.run("docs")
    assert copy.installs() == ["--no-deps|-r|requirements-docs.txt"]
    assert copy.calls()[-1] == "-m|mkdocs|build|--strict|--quiet"
    assert f"{copy.folder}/site" in err
    copy.run("docs")
    assert len(copy.installs()) == 1


def test_no_other_command_installs_the_packages_of_the_site(copy: Copy) -> None:
    for command in ("setup", "test", "lint"):
        copy.run(command)
    assert not [line for line in copy.installs() if "docs" in line]


# --- train ---


def test_torchrun_starts_ranks_without_the_launcher_and_other_missing_extras_are_named(copy: Copy) -> None:
    shutil.rmtree(copy.folder / "example" / "recsuite" / "extras")
    _, err = copy.run("train")
    assert len(copy.calls("-m|torch.distributed.run|--standalone|--nproc_per_node=2|")) == 1
    assert "recsuite.extras.launcher is not installed: torchrun starts the ranks" in err
    for command, name in (("retrain", "retrain"), ("report", "reports.compare")):
        _, err = copy.run(command, status=2)
        assert f"this requires recsuite.extras.{name}, which is not installed" in err


def launch(copy: Copy) -> str:
    (line,) = copy.calls("recsuite.extras.launcher")
    return line.replace(f"{copy.folder}/", "")


def launch_words(copy: Copy) -> list[str]:
    (line,) = copy.calls("recsuite.extras.launcher")
    return line.split("|")[2:]


def test_no_argument_trains_on_two_processes_without_a_gpu(copy: Copy) -> None:
    copy.run()
    assert launch(copy) == "-m|recsuite.extras.launcher|--standalone|--nproc_per_node=2|example/example.py"
    assert copy.calls()[-1] == "OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({"FAKE_GPUS": "8"}, 8),
        ({"FAKE_GPUS": "8", "NPROC": "3"}, 3),
        ({"FAKE_GPUS": "8", "VARIANT": "cpu"}, 2),
    ],
)
def test_the_gpus_decide_the_processes_unless_nproc_does(
    copy: Copy, variables: dict[str, str], processes: int
) -> None:
    copy.run("train", env=variables)
    assert f"--nproc_per_node={processes}|" in launch(copy)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("subcommand", [(), ("train",)])
def test_flags_pass_through_unchanged(copy: Copy, subcommand: tuple[str, ...]) -> None:
    copy.run(*subcommand, "--report_dir", "my  report *", "--epochs", "2")
    assert launch(copy).endswith("example/example.py|--report_dir|my  report *|--epochs|2")


def test_the_script_that_fits_the_data_is_started_and_its_command_line_is_printed(
    copy: Copy, tmp_path: Path
) -> None:
    data = tmp_path / "my  data *"
    data.mkdir()
    chosen = ["retrieval.py", "--data_path", str(data), "--preset", "ranking", "--train"]
    _, err = copy.run("--data_path", str(data), env={"FAKE_COMMAND": shlex.join(chosen)})
    assert launch(copy).endswith("|".join(["--nproc_per_node=2", f"example/{chosen[0]}", *chosen[1:]]))
    (printed,) = [line for line in err.splitlines() if "the command is" in line]
    words = shlex.split(printed.partition(" is ")[2])
    assert words[0] == f"{copy.folder}/.venv/bin/torchrun"
    assert words[1:] == [*launch_words(copy)]


def test_several_machines_meet_at_the_endpoint(copy: Copy) -> None:
    copy.run("train", env={"NNODES": "2", "RDZV_ENDPOINT": "host:29500"})
    meeting = "--nnodes=2|--rdzv_backend=c10d|--rdzv_endpoint=host:29500|--nproc_per_node=2|"
    assert launch(copy).startswith(f"-m|recsuite.extras.launcher|{meeting}")


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        (
            {"NNODES": "1:2", "RDZV_ENDPOINT": "host:1"},
            "--nnodes=1:2|--rdzv_backend=c10d|--rdzv_endpoint=host:1",
        ),
        ({"NNODES": "1:1", "MAX_RESTARTS": "3"}, "--standalone|--max_restarts=3"),
        ({"MAX_RESTARTS": "0"}, "--standalone"),
    ],
)
def test_machines_may_join_and_leave_and_ranks_restart(
    copy: Copy, variables: dict[str, str], where: str
) -> None:
    _, err = copy.run("--dump", "--resume", env=variables)
    assert launch(copy).startswith(f"-m|recsuite.extras.launcher|{where}|--nproc_per_node=2|")
    assert "MAX_RESTARTS" not in err


def test_restarts_without_resume_print_a_notice(copy: Copy) -> None:
    _, err = copy.run("--dump", env={"MAX_RESTARTS": "3"})
    assert "run.sh: without --resume each of MAX_RESTARTS=3 starts from the beginning" in err


@pytest.mark.usefixtures("checked")
def test_a_bad_flag_stops_before_anything_is_installed_or_launched(copy: Copy) -> None:
    _, err = copy.run("--epochs", "0", status=2)
    assert err == "example.py: --epochs must be between 1 and 1,000,000, got 0.\n"
    assert copy.calls() == []


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("flag", ["--help", "--help_all", "-h"])
def test_help_among_the_flags_prints_them_and_launches_nothing(copy: Copy, flag: str) -> None:
    out, _ = copy.run("train", flag)
    assert "--batch_size" in out
    assert copy.calls() == []


@pytest.mark.usefixtures("checked")
def test_it_works_from_another_folder_and_keeps_that_folder(copy: Copy, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    _, err = copy.run("--report_dir", "file", status=2, cwd=elsewhere)
    assert "--report_dir must be a folder, got the file file" in err
    copy.run(cwd=elsewhere)
    assert launch(copy).endswith("|example/example.py")
    assert (copy.folder / ".venv").is_dir()


@pytest.mark.parametrize("failing", ["", "-m codespell_lib", "-m pytest --all"])
def test_ci_lints_and_tests_from_any_folder_and_fails_with_either(
    copy: Copy, tmp_path: Path, failing: str
) -> None:
    (copy.folder / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/run", copy.folder / ".ci/run")
    environment = copy.environment | {"FAKE_FAILING": failing}
    result = subprocess.run([copy.folder / ".ci/run"], cwd=tmp_path, env=environment, timeout=300)
    assert (result.returncode == 0) == (not failing)
    assert {"-m|ruff|check|.", "-m|mypy", "-m|codespell_lib", "-m|pytest|--all"} <= {*copy.calls("-m|")}


# --- the life of a model ---


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["dump", "--resume"], "--dump|--resume"),
        (["inc_dump", "--dump_every", "5"], "--inc_dump|--dump_every|5"),
        (["compact"], "--compact"),
        (["load"], "--load"),
        (["load", "--until", "5"], "--load|--until|5"),
        (["load", "two words", "--until", "5"], "--load=two words|--until|5"),
    ],
)
def test_a_mode_is_launched_with_its_flag(copy: Copy, arguments: list[str], flags: str) -> None:
    copy.run(*arguments)
    assert launch(copy).endswith(f"--nproc_per_node=2|example/example.py|{flags}")


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["export", "two words", "--save_dir", "a"], "--export=two words|--save_dir|a"),
        (["recommend", "--user", "42"], "--recommend|--user|42"),
        (["schema", "my shop"], "--schema=my shop"),
    ],
)
def test_a_mode_for_one_process_is_not_launched(copy: Copy, arguments: list[str], flags: str) -> None:
    copy.run(*arguments)
    assert not copy.calls("recsuite.extras.launcher")
    assert any(call.endswith(f"example/example.py|{flags}") for call in copy.calls())


@pytest.mark.parametrize(
    ("mode", "flags", "what"),
    [
        ("schema", [], "the file or folder of your tables"),
        ("export", ["--seed", "3"], "the folder to write"),
    ],
)
def test_a_mode_without_its_path_names_the_missing_path(
    copy: Copy, mode: str, flags: list[str], what: str
) -> None:
    _, err = copy.run(mode, *flags, status=2)
    assert err == f"run.sh: {mode} needs a path behind it, ./run.sh {mode} PATH: {what}\n"


def test_runs_are_compared_by_one_process_that_gets_the_arguments(copy: Copy) -> None:
    copy.run("report", "two words", "another")
    assert not copy.calls("recsuite.extras.launcher")
    assert copy.installs() == ["--no-deps|-r|requirements.txt"]
    assert copy.calls()[-1] == "-m|recsuite.extras.reports.compare|two words|another"


# --- doctor ---


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, "ranks=2 gpus= omp=1"),
        ({"NPROC": "3", "OMP_NUM_THREADS": "4"}, "ranks=3 gpus= omp=4"),
        ({"FAKE_GPUS": "8"}, "ranks=8 gpus=all omp=1"),
        ({"FAKE_GPUS": "8", "VARIANT": "cpu"}, "ranks=2 gpus= omp=1"),
    ],
)
def test_the_doctor_is_one_process_with_the_environment_of_a_rank(
    copy: Copy, variables: dict[str, str], seen: str
) -> None:
    copy.environment.pop("CUDA_VISIBLE_DEVICES", None)
    copy.run("doctor", "--num_workers", "2", "--cache_dir", "two words", env=variables)
    assert len(copy.installs()) == 1
    call, environment = copy.calls()[-2:]
    assert call == f"{copy.folder}/example/example.py|--doctor|--num_workers|2|--cache_dir|two words"
    assert environment == seen
    assert copy.calls("torch.distributed.run") == []


@pytest.mark.usefixtures("checked")
def test_the_doctor_refuses_the_flags_that_train_refuses(copy: Copy) -> None:
    _, err = copy.run("doctor", "--train", status=2)
    assert err == "example.py: --doctor and --train cannot be used together.\n"
    _, err = copy.run("doctor", status=2, env={"NPROC": "0"})
    assert err == "run.sh: NPROC=0 is not a number of processes; give 1 or more\n"
    assert copy.calls() == []


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_a_script_with_flags_of_its_own_is_one_process_that_gets_them(copy: Copy, command: str) -> None:
    copy.run(command, "--hosts", "4", "--table", "two words:10:8", env={"FAKE_GPUS": "8", "VARIANT": "cpu"})
    assert len(copy.installs()) == 1
    assert copy.calls()[-1] == f"{copy.folder}/example/{command}.py|--hosts|4|--table|two words:10:8"


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["tarin"], {}, "unknown subcommand tarin; './run.sh help' lists them"),
        (["setup", "now"], {}, "setup takes no arguments; found now"),
        ([], {"NPROC": "abc"}, "NPROC=abc is not a number of processes; give 1 or more"),
        ([], {"NPROC": "0"}, "NPROC=0 is not a number of processes; give 1 or more"),
        ([], {"NNODES": "-1"}, "NNODES=-1 is not a number of machines; give 1 or more, or MIN:MAX"),
        ([], {"NNODES": "2"}, "NNODES=2 needs RDZV_ENDPOINT, the HOST:PORT of one of the machines"),
        ([], {"NNODES": "1:2"}, "NNODES=1:2 needs RDZV_ENDPOINT, the HOST:PORT of one of the machines"),
        (
            [],
            {"NNODES": "2", "RDZV_ENDPOINT": "host"},
            "RDZV_ENDPOINT=host has no port; give the HOST:PORT of one of the machines",
        ),
        ([], {"NNODES": "2:1"}, "NNODES=2:1 is not a number of machines; give 1 or more, or MIN:MAX"),
        ([], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 is not a number of restarts; give 0 or more"),
        ([], {"VARIANT": "tpu"}, "VARIANT=tpu is not known; give cpu or cuda"),
        ([], {"STACK": "2.15"}, "STACK=2.15 is not known; give 2.11, 2.13 or 2.14"),
        ([], {"PYTHON": "no-python"}, "no-python is not found; set PYTHON to a Python 3.10 or newer"),
    ],
)
def test_a_mistake_gives_one_message_and_status_2(
    copy: Copy, arguments: list[str], variables: dict[str, str], sentence: str
) -> None:
    assert copy.run(*arguments, status=2, env=variables) == ("", f"run.sh: {sentence}\n")
    assert copy.calls() == []


def test_an_old_python_is_refused_with_its_version(copy: Copy) -> None:
    _, err = copy.run("setup", status=2, env={"FAKE_OLD": "1", "FAKE_VERSION": "3.9.18"})
    assert err.startswith(
        "run.sh: python3 is Python 3.9.18; delete .venv if there is one and set PYTHON to 3.10"
    )


@pytest.mark.parametrize("word", ["help", "-h", "--help"])
def test_help_names_every_subcommand_and_variable(copy: Copy, word: str) -> None:
    out, _ = copy.run(word)
    for name in (
        "train",
        "dump",
        "inc_dump",
        "load",
        "compact",
        "export",
        "recommend",
        "schema",
        "report",
        "doctor",
        "plan",
        "setup",
        "test",
        "lint",
        *SETTINGS,
    ):
        assert name in out


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which only root can")
@pytest.mark.parametrize("is_there", [False, True])
def test_the_checkout_of_another_user_is_refused_with_one_message(copy: Copy, is_there: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # That of pytest is closed to others.
        shutil.copytree(copy.folder.parent, folder, dirs_exist_ok=True)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        checkout = Path(folder) / copy.folder.name
        if is_there:
            (checkout / ".venv").mkdir(mode=0o755)
        commands = copy.environment["PATH"].replace(str(copy.folder.parent), folder)
        result = subprocess.run(
            [checkout / "run.sh", "setup"],
            cwd="/",
            env=copy.environment | {"PATH": commands, "CALLS": "/dev/null"},
            user=65_534,
            capture_output=True,
            text=True,
        )
    assert result.returncode == 1
    assert re.fullmatch(
        r"run.sh: \S+ may not write .*/.venv, where packages are to be installed; make a clone of your own, "
        r"or have its owner call ./run.sh setup\n",
        result.stderr,
    )
