"""Workers are found by their service's name, in an order that stays, and horovodrun is told of them."""

from __future__ import annotations

import socket

import psutil
import pytest
from typer.testing import CliRunner

from horovod_abs import cluster
from horovod_abs.cli import app
from horovod_abs.cluster import ClusterError, Worker, command_line, find_workers, interface_to

NAMES = {
    "10.0.0.10": "abs_worker-fast_10.abs_cluster",
    "10.0.0.1": "abs_worker-fast_1.abs_cluster",
    "10.0.0.2": "abs_worker-fast_2.abs_cluster",
    "10.0.1.1": "abs-worker-slow-1.abs_cluster",
    "10.0.1.2": "gateway.example.org",
}
"""Docker's names, of docker-compose 1.29 and of docker compose, and a name that does not lead back."""


def addresses(name: str) -> list[str]:
    if name.startswith("worker-"):
        return [address for address in NAMES if address.startswith("10.0.0" if name == "worker-fast" else "10.0.1")]
    return [address for address, full in NAMES.items() if full.startswith(f"{name}.") and name != "gateway"]


def names(address: str) -> list[str]:
    return [NAMES[address]]


def test_workers_come_in_the_order_of_services_and_numbers() -> None:
    found = find_workers(["worker-fast", "worker-slow"], addresses, names)
    assert [worker.name for worker in found[:3]] == ["abs_worker-fast_1", "abs_worker-fast_2", "abs_worker-fast_10"]
    assert {worker.name for worker in found[3:]} == {"abs-worker-slow-1", "10.0.1.2"}
    assert [worker.address for worker in found[:3]] == ["10.0.0.1", "10.0.0.2", "10.0.0.10"]


def test_without_workers_it_says_where_it_runs() -> None:
    with pytest.raises(ClusterError, match=r"worker-fast or worker-slow.*docker compose exec head"):
        find_workers(["worker-fast", "worker-slow"], lambda _: [], names)


WORKERS = [Worker("fast-1", "10.0.0.1"), Worker("slow-1", "10.0.1.1")]


def test_one_rank_on_each_worker() -> None:
    line = command_line(WORKERS, ["python", "train.py", "--lr", "1"])
    assert " ".join(line) == "horovodrun --disable-cache -np 2 -H fast-1:1,slow-1:1 python train.py --lr 1"
    line = command_line(WORKERS, ["train"], ranks=1, controller="gloo", interface="eth0")
    assert " ".join(line) == "horovodrun --disable-cache -np 1 -H fast-1:1 --gloo --network-interfaces eth0 train"


def test_too_few_workers() -> None:
    with pytest.raises(ClusterError, match=r"3 ranks .* 2 workers: fast-1, slow-1.*--scale"):
        command_line(WORKERS, ["train"], ranks=3)


def test_the_interface_that_leads_to_a_host() -> None:
    name = interface_to("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in [each.address for each in psutil.net_if_addrs()[name]]


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(cluster, "run", lambda services, command, **options: given.extend((services, command, options)))
    line = ["cluster", "-np", "4", "--controller", "gloo", "--services", "a,b", "python", "-m", "x", "-np", "9"]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert given == [["a", "b"], ["python", "-m", "x", "-np", "9"], {"ranks": 4, "controller": "gloo"}]


def test_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    result = CliRunner().invoke(app, ["cluster", "true"])
    assert result.exit_code == 1
    assert "no worker answers" in result.output
