"""Starts a command on the workers of a cluster whose hosts are found by name: ``horovod-abs cluster``.

A service of docker/compose.yml, or a headless service of Kubernetes, has one name and as many addresses as it has
containers. Their number may change from run to run, so nobody keeps a list.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from horovod_abs.bench.launch import Controller, find_horovodrun

SERVICES = ("worker-fast", "worker-slow")
"""The services of docker/compose.yml that compute."""

Lookup = Callable[[str], list[str]]


class ClusterError(RuntimeError):
    """No run can be started; the message says why."""


@dataclass(frozen=True)
class Worker:
    """One host that computes.

    Attributes:
        name: What ``ssh`` is told: its own name if that leads back to it, else its address.
        address: Its IP address.
    """

    name: str
    address: str


def find_workers(services: Sequence[str], addresses: Lookup | None = None, names: Lookup | None = None) -> list[Worker]:
    """All containers of the services, in the services' order, and by number within each.

    Args:
        services: Their names.
        addresses: Asks for a name's addresses; the DNS by default.
        names: Asks for an address's names; the DNS by default.

    Raises:
        ClusterError: nobody answers to any of the names.
    """
    addresses, names = addresses or _addresses, names or _names
    workers: list[Worker] = []
    for service in services:
        found = [Worker(_best_name(address, addresses, names), address) for address in addresses(service)]
        workers += sorted(found, key=_natural)
    if not workers:
        raise ClusterError(
            f"no worker answers to the name {' or '.join(services)}. This runs on the cluster's head: "
            "docker compose exec head horovod-abs cluster …; docker compose ps shows what is up"
        )
    return workers


def command_line(
    workers: Sequence[Worker],
    command: Sequence[str],
    *,
    ranks: int | None = None,
    controller: Controller | None = None,
    interface: str | None = None,
) -> list[str]:
    """The ``horovodrun`` that starts a command, one rank on each worker.

    >>> print(*command_line([Worker("a", "10.0.0.1"), Worker("b", "10.0.0.2")], ["python", "train.py"]))
    horovodrun --disable-cache -np 2 -H a:1,b:1 python train.py

    Args:
        workers: As `find_workers` found them.
        command: The user's command and its arguments.
        ranks: On the first so many workers only.
        controller: Horovod's; by default the one that horovodrun chooses.
        interface: The network interface that leads to the workers. Without it horovodrun searches on all hosts, which
            takes longer than slow containers are given for it.

    Raises:
        ClusterError: there are fewer workers than ranks.
    """
    ranks = len(workers) if ranks is None else ranks
    if ranks > len(workers):
        raise ClusterError(
            f"{ranks} ranks are asked for, and there are {len(workers)} workers: "
            f"{', '.join(worker.name for worker in workers)}. "
            "docker compose up -d --scale worker-fast=N --scale worker-slow=M adds some"
        )
    hosts = ",".join(f"{worker.name}:1" for worker in workers[:ranks])
    line = ["horovodrun", "--disable-cache", "-np", str(ranks), "-H", hosts]
    line += [f"--{controller}"] if controller else []
    line += ["--network-interfaces", interface] if interface else []
    return [*line, *command]


def run(services: Sequence[str], command: Sequence[str], *, ranks: int | None, controller: Controller | None) -> None:
    """Turn into the ``horovodrun`` of `command_line`; does not return.

    Raises:
        ClusterError: there are no workers, or too few.
        LaunchError: there is no horovodrun.
    """
    workers = find_workers(services)
    line = command_line(
        workers, command, ranks=ranks, controller=controller, interface=interface_to(workers[0].address)
    )
    program = find_horovodrun()
    print(" ".join(line), flush=True)
    os.execv(program, line)


def interface_to(address: str) -> str | None:
    """The name of this host's network interface from which packets to an address go; `None` if it has no name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, known in interfaces if any(each.address == own for each in known)), None)


def _best_name(address: str, addresses: Lookup, names: Lookup) -> str:
    """Docker knows ``project_worker-fast_1.project_network``: a person and ``horovodrun -H`` want it short."""
    short = [name.partition(".")[0] for name in names(address)]
    return next((name for name in short if re.fullmatch(r"[\w-]+", name) and addresses(name) == [address]), address)


def _natural(worker: Worker) -> list[tuple[int, str]]:
    """Sorts ``worker-2`` before ``worker-10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", worker.name)]


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(address[0]) for *_, address in found})


def _names(address: str) -> list[str]:
    try:
        return [socket.gethostbyaddr(address)[0]]
    except OSError:
        return []
