"""What ``horovod-abs doctor --hosts`` runs on each host: it reads commands, a line each, and answers each with JSON.

It is sent to the host's own Python over ssh, so that it also runs where this package is missing: only the standard
library is taken for granted. It ends with its input, and by itself after :data:`LIFETIME_SECONDS`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIFETIME_SECONDS = 600
PINGS = 30
SEND_SECONDS = 0.7
"""How long a pair of hosts sends; what goes before the connection is up to speed does not count."""
_UP_TO_SPEED_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0
_CHUNK = 1 << 18

DISTRIBUTIONS = {
    "horovod-abs": ("horovod-abs",),
    "horovod": ("horovod",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "mpi4py": ("mpi4py",),
}


def facts() -> dict[str, Any]:
    """What this host is, and which versions of everything it has; "" for what is missing."""
    versions = {name: _version(*alternatives) for name, alternatives in DISTRIBUTIONS.items()}
    versions = {"Python": platform.python_version(), **versions, "Open MPI": _open_mpi()}
    return {
        "name": socket.gethostname(),
        "versions": versions,
        "interfaces": _interfaces(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
    }


def _version(*alternatives: str) -> str:
    for name in alternatives:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _open_mpi() -> str:
    own = Path(sys.executable).parent / "mpirun"
    path = str(own) if own.exists() else shutil.which("mpirun")
    if path is None:
        return ""
    try:
        told = subprocess.run([path, "--version"], stdout=subprocess.PIPE, timeout=10, text=True).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.splitlines()[0].split()[-1] if told.strip() else ""


def _interfaces() -> dict[str, list[str]]:
    """IPv4 addresses by interface, without the loopback's; empty where psutil is missing."""
    try:
        import psutil
    except ImportError:
        return {}
    found = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses and not addresses[0].startswith("127.")}


class Listener:
    """Lets one other host measure the way to this one."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._heard: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def listen(self) -> dict[str, Any]:
        """Wait for one connection, in the background; says on which port."""
        self._server = socket.socket()
        self._server.bind(("", 0))
        self._server.listen(1)
        self._server.settimeout(2 * _PATIENCE_SECONDS)
        self._heard = {"error": "nobody has connected"}
        self._thread = threading.Thread(target=self._serve, args=(self._server,), daemon=True)
        self._thread.start()
        return {"port": self._server.getsockname()[1]}

    def heard(self) -> dict[str, Any]:
        """Bits per second that came, and this host's address on the way."""
        if self._thread is not None:
            self._thread.join(2 * _PATIENCE_SECONDS)
        return self._heard

    def _serve(self, server: socket.socket) -> None:
        try:
            with server, server.accept()[0] as peer:
                peer.settimeout(_PATIENCE_SECONDS)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(PINGS):
                    peer.sendall(peer.recv(1))
                address = peer.getsockname()[0]
                self._heard = {"address": address, "bits_per_second": _rate_of(peer)}
        except OSError as error:
            self._heard = {"error": str(error)}


def _rate_of(peer: socket.socket) -> float:
    """Bits per second that come from a peer, until it closes."""
    buffer, count = bytearray(_CHUNK), 0
    began: float | None = None
    first = last = time.perf_counter()
    while True:
        received = peer.recv_into(buffer)
        if not received:
            return 8 * count / (last - began) if began is not None and last > began else 0.0
        last = time.perf_counter()
        if began is not None:
            count += received
        elif last - first > _UP_TO_SPEED_SECONDS:
            began = last


def connect(host: str, port: str) -> dict[str, Any]:
    """Seconds of a message there and back, and send for a while."""
    try:
        with socket.create_connection((host, int(port)), _PATIENCE_SECONDS) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(PINGS):
                began = time.perf_counter()
                peer.sendall(b"?")
                if not peer.recv(1):
                    return {"error": "the connection was closed"}
                trips.append(time.perf_counter() - began)
            chunk, until = bytes(_CHUNK), time.perf_counter() + SEND_SECONDS
            while time.perf_counter() < until:
                peer.sendall(chunk)
            return {"round_trip": statistics.median(trips)}
    except OSError as error:
        return {"error": str(error)}


def main() -> None:
    """Answer until the input ends."""
    if hasattr(signal, "alarm"):
        signal.alarm(LIFETIME_SECONDS)
    listener = Listener()
    commands = {
        "facts": facts,
        "clock": lambda: {"time": time.time()},
        "listen": listener.listen,
        "heard": listener.heard,
        "connect": connect,
    }
    for line in iter(sys.stdin.readline, ""):
        name, *arguments = line.split()
        sys.stdout.write(json.dumps(commands[name](*arguments)) + "\n")  # type: ignore[operator]
        sys.stdout.flush()


if __name__ == "__main__":
    main()
