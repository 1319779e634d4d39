"""The cluster of docker/, as a user brings it up and trains on it: containers of unequal share, over MPI and Gloo.

Skipped, with the reason, where there is no Docker engine and none can be started. `make test-docker` runs it, in this
order, and prints how long its parts take. In an engine that was there before, the image stays, for the next time.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docker.checkout import PROJECT, Checkout
from tests.docker.engine import Engine, EngineUnavailable

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

MNIST = ["python", "-m", "horovod_abs.examples.torch_mnist", "--no-emulation"]
FAST, SLOW = "worker-fast", "worker-slow"
OURS = ["--filter", f"label=com.docker.compose.project={PROJECT}"]


TOLD = {
    "mpi": "lost communication with a remote daemon|A daemon failed to report back",
    "gloo": "one or more processes exited with non-zero status",
}
"""What a run says whose worker was killed; Open MPI the second if that was early."""


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"\n{what}: {time.monotonic() - began:.0f} s", flush=True)


def wait_until(true: Callable[[], object], seconds: float, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    try:
        with timed("engine and base image"):
            made.__enter__()
    except EngineUnavailable as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.__exit__(None, None, None)


@pytest.fixture(scope="module")
def checkout(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"), engine)


@pytest.fixture(scope="module")
def cluster(checkout: Checkout) -> Iterator[Checkout]:
    """The cluster, up; down again after the last test."""
    try:
        with timed("docker-compose up"):
            checkout.compose("up", "-d", "--scale", f"{FAST}=2", "--scale", f"{SLOW}=2")
            wait_until(lambda: checkout.health() == {"healthy"}, 120, lambda: checkout.compose("ps"))
        yield checkout
    finally:
        checkout.compose("down", "--volumes")


@pytest.mark.timeout(3600)
def test_the_image_builds(checkout: Checkout, engine: Engine) -> None:
    with timed("docker-compose build"):
        checkout.compose("build")
    size = int(engine.docker("image", "inspect", "--format", "{{.Size}}", checkout.image))
    print(f"the image: {size / 1e9:.2f} GB")
    with timed("docker-compose build, after an edit of the package"):
        with (checkout.folder / "horovod_abs" / "rounds.py").open("a") as edited:
            edited.write("\n# an edit\n")
        assert "install_horovod" in (said := checkout.compose("build"))
        assert "Setting up Horovod" not in said, "Horovod was installed again"


def test_the_image_holds_no_key_no_compiler_and_nothing_of_this_machine(checkout: Checkout, engine: Engine) -> None:
    def run(*command: str) -> str:
        return engine.docker("run", "--rm", checkout.image, *command).strip()

    uid = checkout.environment["CLUSTER_UID"]
    assert run("sh", "-c", "id -u; whoami; stat -c %u /runs /keys/head") == f"{uid}\nworker\n{uid}\n{uid}"
    keys = "find /keys /etc/ssh /home -type f | grep -E '^/keys/|/ssh_host|/id_|authorized_keys' || true"
    assert run("sh", "-c", keys) == ""
    assert run("sh", "-c", "command -v g++ cc make || true; ls -d /local /build 2>/dev/null || true") == ""
    assert "horovod_abs" in run("python", "-c", "import horovod_abs; print(horovod_abs.__file__)")


def test_the_private_key_is_on_the_head_only(cluster: Checkout) -> None:
    assert "PRIVATE KEY" in cluster.on_head("cat", "/keys/head/cluster")
    for service in (FAST, SLOW):
        assert cluster.compose("exec", "-T", service, "ls", "/keys/head") == ""
        assert (
            cluster.compose("exec", "-T", service, "sh", "-c", "ssh head true; ssh worker-fast true; echo $?")[-4:]
            == "255\n"
        )
    refused = cluster.on_head("sh", "-c", "ssh -o PubkeyAuthentication=no worker-fast true || true")
    assert re.search(r"Permission denied \(publickey\)", refused)


def test_the_environment_reaches_ssh_sessions(cluster: Checkout) -> None:
    inside = cluster.compose("exec", "-T", SLOW, "printenv", "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", "PATH")
    assert inside.startswith("1\n1\n/opt/venv/bin:")
    assert cluster.on_head("ssh", SLOW, "printenv OMP_NUM_THREADS OMPI_MCA_mpi_yield_when_idle PATH") == inside


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_mnist_trains_across_containers_of_unequal_share(controller: str, cluster: Checkout) -> None:
    results = f"{controller}.json"
    with timed(f"MNIST over {controller}"):
        command = ["horovod-abs", "cluster", "-np", "4", "--controller", controller, *MNIST]
        said = cluster.on_head(*command, "--epochs", "4", "--exchange", "updates", "--json", results)
    table = re.sub(r"(?m)^\[(1,)?0\]<stdout>:", "", "\n".join(re.findall(r"(?m)^\[(?:1,)?0\]<stdout>:.*$", said)))
    print(table)
    assert "16,000 │ 100.0%" in table
    file = cluster.path("runs") / results
    assert file.stat().st_uid == int(cluster.environment["CLUSTER_UID"])
    samples = [rank["samples"] for rank in json.loads(file.read_text())["summary"]["ranks"]]
    assert sum(samples[:2]) > sum(samples[2:]), "the fast workers have done less than the slow ones"


def test_a_script_and_data_of_ones_own(cluster: Checkout) -> None:
    cluster.path("data/name").write_text("my data")
    cluster.path("work/mine.py").write_text(
        "import pathlib, socket\n"
        "data = pathlib.Path('/data/name').read_text()\n"
        "pathlib.Path(f'mine-{socket.gethostname()}').write_text(data)\n"
    )
    cluster.on_head("horovod-abs", "cluster", "python", "/work/mine.py")
    assert [file.read_text() for file in cluster.path("runs").glob("mine-*")] == ["my data"] * 4


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_killed_worker_ends_the_run(controller: str, cluster: Checkout, engine: Engine, tmp_path: Path) -> None:
    """Killed, not cut off: Open MPI's launcher would wait for ever for a host that vanishes from the network."""
    output = tmp_path / "output"
    command = ["horovod-abs", "cluster", "--controller", controller, *MNIST, "--epochs", "1000"]
    process = cluster.start_on_head(output, *command)

    def said() -> str:
        return output.read_text(errors="replace")

    try:
        wait_until(lambda: re.search(r"epoch \d+ .*samples/s", said()), 300, said)
        victim = cluster.containers(SLOW)[-1]
        with timed(f"a run over {controller} ends after a worker was killed"):
            engine.docker("kill", victim)
            process.wait(30)
        assert re.search(TOLD[controller], said()), said()[-3000:]
        running = engine.docker("ps", "--quiet", *OURS).split()
        wait_until(lambda: not any("torch_mnist" in engine.docker("top", each) for each in running), 30, said)
    finally:
        process.kill()
        process.wait()
        cluster.compose("up", "-d", "--no-build")
        wait_until(lambda: cluster.health() == {"healthy"}, 60, lambda: cluster.compose("ps"))


def test_workers_come_and_go(cluster: Checkout) -> None:
    try:
        cluster.compose("up", "-d", "--no-recreate", "--scale", f"{FAST}=1", "--scale", f"{SLOW}=3")
        wait_until(lambda: cluster.health() == {"healthy"}, 60, lambda: cluster.compose("ps"))
        said = cluster.on_head("horovod-abs", "cluster", "hostname")
        assert "-np 4" in said
        assert len(re.findall(r"worker-fast", said.splitlines()[0])) == 1
        assert len(set(re.findall(r"<stdout>:\s*([0-9a-f]{12})", said))) == 4
    finally:
        cluster.compose("up", "-d", "--no-recreate", "--scale", f"{FAST}=2", "--scale", f"{SLOW}=2")
    too_many = ["sh", "-c", "horovod-abs cluster -np 9 hostname || true"]
    assert "9 ranks are asked for, and there are 4 workers" in cluster.on_head(*too_many)


def test_jupyterlab_wants_its_token_and_is_published_on_this_machine_only(cluster: Checkout, engine: Engine) -> None:
    (head,) = cluster.containers("head")
    assert engine.docker("port", head).strip() == f"8888/tcp -> 127.0.0.1:{cluster.lab_port}"
    address = f"http://127.0.0.1:{cluster.lab_port}"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{address}/api/contents", timeout=30)
    (token,) = re.findall(r"token=(\w+)", cluster.on_head("jupyter", "server", "list"))
    with urllib.request.urlopen(f"{address}/api/contents?token={token}", timeout=30) as answer:
        assert json.load(answer)["type"] == "directory"
    with urllib.request.urlopen(f"{address}/lab?token={token}", timeout=30) as answer:
        assert b"JupyterLab" in answer.read()


def test_down_leaves_results_and_nothing_else(cluster: Checkout, engine: Engine) -> None:
    cluster.on_head("touch", "result")
    cluster.compose("down", "--volumes")
    for what in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        assert engine.docker(*what, "--quiet", *OURS) == "", what
    assert cluster.path("runs/result").is_file()
