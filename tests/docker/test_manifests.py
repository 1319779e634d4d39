"""What docker/ and the guides to Docker, Kubernetes and Slurm say holds together; none of it is started here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
GUIDES = ROOT / "notebooks" / "guides"
COMPOSE = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SETTINGS = dict(
    line.split("=", 1) for line in (DOCKER / ".env").read_text().splitlines() if line and not line.startswith("#")
)
WORKERS = ("worker-fast", "worker-slow")
CORES = 2
"""Of the smallest machine that is to hold the cluster."""


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", (GUIDES / guide).read_text())


# -- Docker ------------------------------------------------------------------------------------------------------------


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "info", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_dockerfile_copies_is_let_in() -> None:
    copied = {
        source
        for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", (DOCKER / "Dockerfile").read_text())
        for source in line.split()[:-1]
    }
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == entry or source.startswith(f"{entry}/") for entry in let_in), source
    assert all(any(source.startswith(entry) for source in copied) for entry in let_in), (
        "something is let in for nothing"
    )


def test_settings_and_their_defaults_are_the_same() -> None:
    used = re.findall(r"\$\{(\w+):?-([^}]*)\}", (DOCKER / "compose.yml").read_text())
    assert {name for name, _ in used} == set(SETTINGS) - {"COMPOSE_PROJECT_NAME"}
    for name, default in used:
        assert SETTINGS[name] == default, name
    dockerfile = dict(re.findall(r"(?m)^ARG (\w+)=(.*)$", (DOCKER / "Dockerfile").read_text()))
    arguments = {name: re.sub(r"\$\{\w+:?-(.*)\}", r"\1", value) for name, value in build()["args"].items()}
    assert arguments == {name: dockerfile[name] for name in arguments}


def build() -> dict[str, Any]:
    (made,) = (service["build"] for service in SERVICES.values() if "build" in service)
    return made


def test_one_index_everywhere() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"(?m)^TORCH_INDEX \?= (.*)$", makefile) == [SETTINGS["TORCH_INDEX"]]


def test_workers_are_unequal_and_fit_the_machine() -> None:
    shares = {name: SERVICES[name]["cpu_quota"] / SERVICES[name]["cpu_period"] for name in WORKERS}
    assert shares["worker-fast"] > shares["worker-slow"]
    assert sum(SERVICES[name]["scale"] * share for name, share in shares.items()) < CORES
    for service in SERVICES.values():
        assert service["cpu_period"] == 10000
        assert service["shm_size"] == "1g"


def test_only_the_head_has_the_key_and_only_this_machine_reaches_the_lab() -> None:
    holders = {name for name, service in SERVICES.items() if any("head-keys" in each for each in service["volumes"])}
    assert holders == {"keys", "head"}
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 1
    assert ports[0].startswith("127.0.0.1:")
    assert not re.search(r"privileged|network_mode|docker\.sock", (DOCKER / "compose.yml").read_text())


def test_sshd_and_ssh_take_their_settings() -> None:
    port = re.search(r"(?m)^Port (\d+)$", (DOCKER / "sshd_config").read_text())
    assert port is not None
    assert re.search(rf"(?m)^\s+Port {port[1]}$", (DOCKER / "ssh_config").read_text())
    assert all(SERVICES[name]["healthcheck"]["test"][-1] == port[1] for name in WORKERS)
    ssh = shutil.which("ssh")
    if ssh is None:
        pytest.skip("there is no ssh")
    said = subprocess.check_output([ssh, "-G", "-F", DOCKER / "ssh_config", "worker-fast"], text=True)
    assert f"port {port[1]}\n" in said
    assert "stricthostkeychecking true\n" in said
    assert "passwordauthentication" in said


# -- Kubernetes --------------------------------------------------------------------------------------------------------

FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        "slotsPerWorker",
        "sshAuthMountPath",
        "mpiImplementation",
        "launcherCreationPolicy",
        "runPolicy",
        "mpiReplicaSpecs",
    },
    "spec.runPolicy": {
        "cleanPodPolicy",
        "ttlSecondsAfterFinished",
        "activeDeadlineSeconds",
        "backoffLimit",
        "schedulingPolicy",
        "suspend",
    },
    "spec.mpiReplicaSpecs": {"Launcher", "Worker"},
    **{
        f"spec.mpiReplicaSpecs.{role}{rest}": fields
        for role in ("Launcher", "Worker")
        for rest, fields in {
            "": {"replicas", "restartPolicy", "template"},
            ".template": {"metadata", "spec"},
            ".template.spec": {"containers", "volumes", "nodeSelector", "tolerations", "securityContext"},
            ".template.spec.containers": {
                "name",
                "image",
                "command",
                "args",
                "env",
                "resources",
                "securityContext",
                "volumeMounts",
            },
        }.items()
    },
}
"""Of MPIJob in kubeflow.org/v2beta1, and of the pods in it as far as they are used."""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    (manifest,) = blocks("kubernetes.md", "yaml")
    loaded: dict[str, Any] = yaml.safe_load(manifest)
    return loaded


def objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects in a manifest, with where they are; the items of a list are where the list is."""
    for each in node if isinstance(node, list) else [node]:
        if isinstance(each, dict):
            yield path, each
            for key, value in each.items():
                yield from objects(value, f"{path}.{key}".lstrip("."))


def test_the_mpijob_has_fields_that_exist(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    checked = [(path, set(each) - FIELDS[path]) for path, each in objects(job) if path in FIELDS]
    assert {path for path, _ in checked} == set(FIELDS)
    assert not [found for found in checked if found[1]]
    assert job["spec"]["mpiImplementation"] in {"OpenMPI", "Intel", "MPICH"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in {"All", "Running", "None"}


def container(job: dict[str, Any], role: str) -> dict[str, Any]:
    (only,) = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return dict(only)


def test_the_mpijobs_parts_agree(job: dict[str, Any]) -> None:
    spec = job["spec"]
    launcher, worker = container(job, "Launcher"), container(job, "Worker")
    words = shlex.split(launcher["args"][0].replace("\\\n", " "))
    ranks = int(words[words.index("-np") + 1])
    assert ranks == spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
    assert words[words.index("--hostfile") + 1] == "/etc/mpi/hostfile", "that is where the operator puts it"
    for option in ("HostKey", "AuthorizedKeysFile"):
        assert f"-o{option}={spec['sshAuthMountPath']}/" in " ".join(worker["args"])
    mounts = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]}


def test_the_mpijob_fits_the_image(job: dict[str, Any]) -> None:
    image, ssh = (DOCKER / "Dockerfile").read_text(), (DOCKER / "ssh_config").read_text()
    assert job["spec"]["sshAuthMountPath"] == "/home/worker/.ssh"
    assert "--create-home" in image
    for role in ("Launcher", "Worker"):
        assert container(job, role)["securityContext"]["runAsUser"] == int(SETTINGS["CLUSTER_UID"])
        assert container(job, role)["command"][:2] == ["tini", "--"]
    launcher = container(job, "Launcher")["args"][0]
    for setting in ("IdentityFile", "UserKnownHostsFile"):
        (file,) = re.findall(rf"{setting} (\S+)", ssh)
        assert file in launcher


def test_an_mpijob_with_a_field_that_does_not_exist_is_found(job: dict[str, Any]) -> None:
    wrong = yaml.safe_load(yaml.safe_dump(job).replace("slotsPerWorker", "slotsPerworker"))
    with pytest.raises(AssertionError, match="slotsPerworker"):
        test_the_mpijob_has_fields_that_exist(wrong)


# -- Slurm -------------------------------------------------------------------------------------------------------------

SBATCH = {
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "gpus-per-task",
    "constraint",
    "signal",
    "time",
    "output",
}


@pytest.mark.parametrize("number", [0, 1])
def test_the_batch_scripts(number: int) -> None:
    script = blocks("slurm.md", "bash")[number]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S+)$", script))
    assert set(options) <= SBATCH
    assert script.count("#SBATCH") == len(options)
    assert int(options["ntasks"]) == int(options["nodes"]) * int(options["ntasks-per-node"])
    assert re.search(r"(?m)^(mpirun -np \"\$SLURM_NTASKS\"|srun --mpi=pmix) ", script)
    assert "set -euo pipefail" in script


# -- commands in all guides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", ["docker.md", "kubernetes.md", "slurm.md"])
def test_what_the_guides_run_is_there(guide: str) -> None:
    text = (GUIDES / guide).read_text()
    for module in set(re.findall(r"python -m (horovod_abs[\w.]*)", text)):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    known = subprocess.check_output([sys.executable, "-m", "horovod_abs", "--help"], text=True)
    for command in set(re.findall(r"horovod-abs ([a-z][\w-]+)", text)):
        assert command in known, command
    services = set(re.findall(r"docker compose exec (\S+)", text)) | set(re.findall(r"--scale ([\w-]+)=", text))
    assert services <= set(SERVICES)
    for setting in set(re.findall(r"\b(CLUSTER_[A-Z]+|LAB_PORT|TORCH_INDEX)\b", text)):
        assert setting in SETTINGS
