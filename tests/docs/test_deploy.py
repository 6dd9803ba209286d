"""deploy/: the YAML fits the published schemas; what a container or a job runs, runs, and survives SIGTERM.

No image is built and no cluster is there: the lines of the Dockerfile, the pods and the job script run in
folders and processes of this machine, with stand-ins for what Slurm and Kubernetes would provide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

import serve
from recsuite.extras.retrain import PROMOTED
from tests.support.launch import INSTALLED, ROOT, family, free_port, run_command, started, succeeded, wait_for
from tests.support.quick_python import quick_python

DEPLOY = ROOT / "deploy"
SCHEMAS = {
    "CronJob": "IoK8sApiBatchV1CronJob",
    "Job": "IoK8sApiBatchV1Job",
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
    "Service": "IoK8sApiCoreV1Service",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
TERMINATED = 128 + signal.SIGTERM
# Added to what a file says, so that a test takes seconds, and that a training is interrupted before its end.
SHORT, LONG = ["--epochs", "4"], ["--epochs", "12", "--patience", "0"]


# Of Kubernetes, and so of the manifests.
MANIFESTS = sorted(path.name for path in DEPLOY.glob("*.yaml"))
IMAGE = "registry.example.com/recommender:1"
# Of a Deployment beside the parts that the package has, with their types.
OF_DEPLOYMENTS = {"replicas": int, "minReadySeconds": int, "progressDeadlineSeconds": int}
OF_STRATEGIES = {"maxSurge": (int, str), "maxUnavailable": (int, str)}


def objects(name: str) -> list[dict[str, Any]]:
    """The objects in a YAML file, after `envsubst '$IMAGE'`."""
    text = (DEPLOY / name).read_text()
    return [*yaml.safe_load_all(re.sub(r"\$(IMAGE\b|\{IMAGE\})", IMAGE, text))]


def documents(name: str) -> dict[str, Any]:
    """The objects in a YAML file, by their kind."""
    return {found["kind"]: found for found in objects(name)}


def pod_of(found: Any) -> dict[str, Any]:
    """The specification of the pods of an object: the innermost `spec` with containers; {} without one."""
    if isinstance(found, dict):
        if "containers" in found:
            return found
        return next(filter(None, map(pod_of, found.values())), {})
    return next(filter(None, map(pod_of, found)), {}) if isinstance(found, list) else {}


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, rest in (line.split(maxsplit=1) for line in lines)]


def read_and_written(kind: str, found: dict[str, Any]) -> Any:
    """An object after the published schema of its kind."""
    # A second of imports, which all processes that run tests would pay.
    from kubeflow_trainer_api import models

    def passed(name: str, part: dict[str, Any]) -> Any:
        return getattr(models, name).from_dict(part).to_dict()

    def of_types(types: Mapping[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        return {name: part[name] for name, of in types.items() if isinstance(part.get(name), of)}

    if kind != "Deployment":
        return passed(SCHEMAS[kind], found)
    # The package has its parts alone.
    spec = found["spec"]
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": passed("IoK8sApimachineryPkgApisMetaV1ObjectMeta", found["metadata"]),
        "spec": {
            **of_types(OF_DEPLOYMENTS, spec),
            "strategy": {"rollingUpdate": of_types(OF_STRATEGIES, spec["strategy"]["rollingUpdate"])},
            "selector": passed("IoK8sApimachineryPkgApisMetaV1LabelSelector", spec["selector"]),
            "template": passed("IoK8sApiCoreV1PodTemplateSpec", spec["template"]),
        },
    }


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_yaml_fits_the_published_schemas(name: str) -> None:
    for found in objects(name):
        # A field that the schema does not know is lost on the way.
        assert read_and_written(found["kind"], found) == found


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [
        ("job.yaml", "Job", "parallelism"),
        ("server.yaml", "Service", "targetPort"),
        ("server.yaml", "Deployment", "replicas"),
        ("server.yaml", "Deployment", "maxSurge"),
        ("server.yaml", "Deployment", "imagePullPolicy"),
        ("server.yaml", "Deployment", "readinessProbe"),
        ("server.yaml", "Deployment", "periodSeconds"),
        ("cronjob.yaml", "CronJob", "concurrencyPolicy"),
    ],
)
def test_a_misspelt_field_and_one_of_another_type_are_found(name: str, kind: str, key: str) -> None:
    found = documents(name)[kind]
    for wrong in (re.sub(rf'"{key}":', f'"{key}s":', json.dumps(found)), with_value(found, key, {"a": {}})):
        changed = json.loads(wrong)
        assert changed != found
        # Refused, or lost on the way.
        with contextlib.suppress(ValueError, KeyError):
            assert read_and_written(kind, changed) != changed


def with_value(found: dict[str, Any], key: str, value: Any) -> str:
    """An object as JSON, with another value of a field wherever it is."""

    def changed(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: value if name == key else changed(each) for name, each in part.items()}
        return [*map(changed, part)] if isinstance(part, list) else part

    return json.dumps(changed(found))


def test_all_pods_take_the_image_of_the_variable_and_volumes_that_are_claimed() -> None:
    claims = {found["metadata"]["name"] for found in objects("shared_folder.yaml")}
    pods = {name: pod for name in MANIFESTS for found in objects(name) if (pod := pod_of(found))}
    assert {*pods} == {*MANIFESTS} - {"shared_folder.yaml"}
    for pod in pods.values():
        (container,) = pod["containers"]
        assert (container["image"], container["imagePullPolicy"]) == (IMAGE, "IfNotPresent")
        assert {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]} == claims
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "data": "/data"}


def test_a_server_is_probed_at_its_port_and_follows_what_is_promoted_each_week() -> None:
    found = documents("server.yaml")
    spec, service = found["Deployment"]["spec"], found["Service"]["spec"]
    (container,) = pod_of(spec)["containers"]
    (port,) = container["ports"]
    command, *words = container["args"]
    flags = serve.parse(words)
    assert (command, flags.host, flags.port) == ("serve", "0.0.0.0", port["containerPort"])
    assert flags.wait
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert container["livenessProbe"]["tcpSocket"] == {"port": port["name"]}
    assert {*container["resources"]["requests"]} == {*container["resources"]["limits"]} == {"cpu", "memory"}
    assert service["ports"][0]["targetPort"] == port["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == service["selector"] == labels
    (retrain,) = pod_of(documents("cronjob.yaml")["CronJob"])["containers"]
    weekly = dict(zip(retrain["args"][1::2], retrain["args"][2::2], strict=True))
    assert flags.save_dir == Path(weekly["--save_dir"], PROMOTED)
    assert flags.data_path == weekly["--data_path"]


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    scripts = [ROOT / "run.sh", ROOT / ".ci" / "run", *DEPLOY.glob("*.sh")]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    succeeded(run_command([str(shellcheck), *map(str, scripts)]))


def test_the_numbers_of_machines_in_a_job_agree() -> None:
    job = documents("job.yaml")["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert int(env["NNODES"]) == job["parallelism"] == job["completions"]
    assert env["RDZV_ENDPOINT"].startswith("recommender-0.recommender:")


@dataclass
class Image:
    """The result of the Dockerfile: folder /app, entry point and command; and folders /shared and /data."""

    app: Path
    root: Path
    entrypoint: list[str]
    command: list[str]

    @property
    def shared(self) -> Path:
        """The folder /shared."""
        return self.root / "shared"

    def container(self, arguments: list[str], env: dict[str, str], command: list[str] | None = None) -> Any:
        """A container that runs, with stdout and stderr as one."""
        line = [*(command or self.entrypoint), *arguments]
        line = [re.sub(r"(^|=)(/(shared|data)\b)", rf"\1{self.root}\2", part) for part in line]
        # On a busy machine, threads that spin while they wait take the cores from those that they wait for.
        env = {"VARIANT": "cpu", "OMP_WAIT_POLICY": "passive", **env}
        return started(line, cwd=self.app, env=env, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def built(few_ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image, with packages from this installation, and few ratings as the default data set."""
    if not (INSTALLED / ".installed").is_file():
        pytest.skip(f"needs the installation that `./run.sh test` makes in {INSTALLED.name}")
    app = tmp_path_factory.mktemp("image") / "app"
    app.mkdir()
    forms: dict[str, list[str]] = {}
    with quick_python(app):
        for word, rest in dockerfile():
            if word == "COPY":
                _, *sources, target = rest.split()
                for source in sources:
                    _copy(ROOT / source, app / target)
            elif word == "RUN" and "run.sh" in rest:
                succeeded(run_command(shlex.split(rest), cwd=app, env={"VARIANT": "cpu"}))
            elif word in ("ENTRYPOINT", "CMD"):
                forms[word] = json.loads(rest)
        shutil.copytree(few_ratings, app / "data")
        yield Image(app, app, forms["ENTRYPOINT"], forms["CMD"])


@pytest.fixture
def image(built: Image, tmp_path: Path) -> Image:
    """The image, and an empty folder that its containers share."""
    return dataclasses.replace(built, root=tmp_path)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pyc"))
    else:
        shutil.copy2(source, target)


def test_files_copied_into_the_image_are_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for word, rest in dockerfile() if word == "COPY" for source in rest.split()[1:-1]}
    assert all(any(Path(source).match(pattern) for pattern in kept) for source in copied)


def test_the_command_of_the_image_trains_and_a_second_one_loads_its_checkpoint(image: Image) -> None:
    with image.container([*image.command, "--epochs", "1"], {"NPROC": "1"}) as process:
        output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    with image.container(["load", "--save_dir", "/shared/dumps"], {"NPROC": "1"}) as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "this model" in output
    answers_from_what_is_promoted(image)


def answers_from_what_is_promoted(image: Image) -> None:
    """The server of the manifest answers, and ends in time after a SIGTERM."""
    (image.shared / "models").mkdir()
    (image.shared / "models" / PROMOTED).symlink_to(image.shared / "dumps")
    (data,) = (image.app / "data").iterdir()
    (image.root / "data").mkdir()
    (image.root / "data" / "shop").symlink_to(data)
    (container,) = pod_of(documents("server.yaml")["Deployment"])["containers"]
    port = free_port()
    words = [word.replace("8000", str(port)) for word in container["args"]]
    with image.container(words, {}) as process:
        wait_for(process, "serving ")
        health = httpx.get(f"http://localhost:{port}/health", trust_env=False, timeout=60)
        assert (health.status_code, health.json()["failure"]) == (200, None), health.text
        process.terminate()
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output


class Pod(NamedTuple):
    """The process of a pod: arguments, command (None: that of the image) and environment of its container."""

    arguments: list[str]
    command: list[str] | None
    env: dict[str, str]


def pod_of_the_job(endpoint: str) -> Pod:
    spec = documents("job.yaml")["Job"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    return Pod(container["args"], container.get("command"), {**env, "RDZV_ENDPOINT": endpoint, "NPROC": "1"})


def pod_of_the_trainjob(endpoint: str) -> Pod:
    found = documents("trainjob.yaml")
    (job,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    trainer = found["TrainJob"]["spec"]["trainer"]
    address, port = endpoint.split(":")
    # What the trainer of Kubeflow tells a pod.
    env = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
    env |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": port}
    return Pod(trainer["args"], container["command"], env)


@contextlib.contextmanager
def pods(image: Image, more: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """One pod of each kind, which together are the two machines that each of the kinds asks for."""
    endpoint = f"localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(image.container([*pod.arguments, *more], pod.env, pod.command))
            for pod in (pod_of_the_job(endpoint), pod_of_the_trainjob(endpoint))
        ]


def outputs_of(processes: list[subprocess.Popen[str]]) -> str:
    return "".join(process.communicate(timeout=500)[0] for process in processes)


# Either may be the one that hosts the rendezvous.
@pytest.mark.soak
@pytest.mark.parametrize("numbers", [[0], [0, 1]])
def test_a_sigterm_to_one_pod_ends_all_after_a_checkpoint_and_new_pods_finish(
    image: Image, numbers: list[int]
) -> None:
    dumps = image.shared / "dumps"
    for number in numbers:
        before = checkpoints_in(dumps)
        with pods(image, LONG) as started_pods:
            wait_for_a_checkpoint(dumps, started_pods, before)
            started_pods[number].send_signal(signal.SIGTERM)
            output = outputs_of(started_pods)
        assert [pod.returncode for pod in started_pods] == [TERMINATED, TERMINATED], output
        assert ("loaded " in output) == bool(before)
    with pods(image, SHORT) as started_pods:
        output = outputs_of(started_pods)
    assert [pod.returncode for pod in started_pods] == [0, 0], output
    assert re.search(r"loaded .*dumps/(step|delta)-", output)
    assert "[RANK 0] ranks: 2 on cpu, 1 of them on this machine" in output
    assert "this model, " in output


def checkpoints_in(save_dir: Path) -> set[str]:
    return {path.name for path in save_dir.glob("step-*")}


def wait_for_a_checkpoint(
    save_dir: Path, processes: list[subprocess.Popen[str]], before: Set[str] = frozenset()
) -> None:
    deadline = time.monotonic() + 500
    while not checkpoints_in(save_dir) - before:
        assert time.monotonic() < deadline, "no checkpoint"
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        time.sleep(0.02)


# A step on two machines: both are this one, and a signal to srun goes to both.
SRUN = """#!/usr/bin/env bash
"$@" & one=$!
"$@" & two=$!
trap 'kill -TERM $one $two' TERM
worst=0
for task in $one $two; do
  while :; do
    status=0; wait "$task" || status=$?
    kill -0 "$task" 2>/dev/null || break
  done
  wait "$task" || status=$?
  ((status > worst)) && worst=$status
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
  show) echo localhost ;;
  requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""


@pytest.mark.soak
def test_a_slurm_job_is_queued_again_after_a_sigterm_and_finishes(image: Image, tmp_path: Path) -> None:
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    requeued = tmp_path / "requeued"
    env = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "REQUEUED": str(requeued),
        "SLURM_SUBMIT_DIR": str(image.app),
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SAVE_DIR": str(image.shared / "dumps"),
        "NPROC": "1",
        "VARIANT": "cpu",
    }
    job: dict[str, Any] = {"cwd": tmp_path, "env": env, "stderr": subprocess.STDOUT}
    command = ["bash", str(DEPLOY / "slurm.sh"), "--timeout", "60"]
    with started([*command, *LONG], **job) as process:
        wait_for_a_checkpoint(image.shared / "dumps", [process])
        for pid in family(process.pid):
            if _runs_srun(pid):
                os.kill(pid, signal.SIGTERM)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == TERMINATED, output
    assert requeued.read_text().split() == [env["SLURM_JOB_ID"]]
    output = succeeded(run_command([*command, *SHORT], **job))
    assert "this model, " in output
    assert requeued.read_text().split() == [env["SLURM_JOB_ID"]]


def _runs_srun(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return any(word.endswith(b"/srun") for word in words)
    return False
