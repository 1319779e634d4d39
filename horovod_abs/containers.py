"""The cluster of containers in docker/, seen from outside: a notebook brings it up, trains on it, and takes it down.

::

    cluster = Containers()
    cluster("up -d --build --scale worker-fast=2 --scale worker-slow=2")
    cluster.wait_until_healthy()
    cluster("exec -T head horovod-abs cluster python -m horovod_abs.examples.torch_mnist --no-emulation")

Where there is no Docker engine each call says so, and does nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from horovod_abs.bench.launch import LaunchError
from horovod_abs.notebook import Screen, Show

FOLDER = Path(__file__).parents[1] / "docker"
"""In a checkout; an installed package is without it."""

_PREFIX = re.compile(r"^\[(?:\d+,)?\d+\]<(?:stdout|stderr)>: ?")
_SHOWN_LINES = 30


def speeds(path: Path = FOLDER / "compose.yml") -> dict[str, float]:
    """The processor time that each service of workers is given, in cores.

    >>> speeds()
    {'worker-fast': 0.5, 'worker-slow': 0.25}
    """
    services = yaml.safe_load(path.read_text())["services"]
    return {
        name: service["cpu_quota"] / service["cpu_period"]
        for name, service in services.items()
        if "cpu_quota" in service
    }


class Containers:
    """Calls compose in docker/, and shows what it prints below the cell.

    Args:
        folder: Where compose.yml is.
        show: How to show a text; by default as a notebook does.

    Attributes:
        missing: Why nothing can be called; "" if it can.
        runs: Where the containers leave what they write.
    """

    def __init__(self, folder: Path = FOLDER, show: Show | None = None) -> None:
        self._folder = folder
        self._show = show
        self._compose, self.missing = _find_compose(folder)
        self.runs = folder / "runs"

    def __call__(self, arguments: str) -> None:
        """Call compose, until it has ended.

        Args:
            arguments: Of compose; they may go on in further lines.

        Raises:
            LaunchError: it has failed; with the last lines that it printed.
        """
        words = shlex.split(arguments)
        line = shlex.join(["docker", "compose", *words])
        screen = Screen("…", self._show, head=f"$ {line}", most=_SHOWN_LINES)
        if self.missing:
            screen(f"skipped: {self.missing}")
            return
        with subprocess.Popen(
            [*self._compose, *words],
            cwd=self._folder,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for each in process.stdout:
                    if not each.rstrip().endswith(" ..."):  # compose says it again when it is done
                        screen(_PREFIX.sub("", each.rstrip("\n")))
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise LaunchError(f"{line}\nended with exit status {process.returncode}:\n{screen.text}")

    def wait_until_healthy(self, seconds: float = 90.0) -> None:
        """Wait until every container that stays up says that it is there.

        Raises:
            LaunchError: one does not, in that time; with what each has said.
        """
        deadline = time.monotonic() + seconds
        while not self.missing and (health := self._health()) != {"healthy"}:
            if time.monotonic() > deadline:
                said = ", ".join(sorted(health)) or "unknown: none is up"
                raise LaunchError(
                    f"after {seconds:g} s the containers' health is {said}. "
                    "docker compose ps shows which, docker compose logs why"
                )
            time.sleep(1.0)

    def _health(self) -> set[str]:
        ids = self._ask([*self._compose, "ps", "-q", "head", *speeds(self._folder / "compose.yml")]).split()
        return (
            set(self._ask(["docker", "inspect", "--format", "{{.State.Health.Status}}", *ids]).split())
            if ids
            else set()
        )

    def _ask(self, command: list[str]) -> str:
        return subprocess.run(
            command, cwd=self._folder, env=_environment(os.environ), capture_output=True, text=True, check=False
        ).stdout


def _find_compose(folder: Path) -> tuple[list[str], str]:
    """The beginning of a compose command, and why there is none."""
    if not (folder / "compose.yml").is_file():
        return [], "the package is installed without its folder docker/; a checkout of the repository has it"
    if shutil.which("docker") is None:
        return [], "there is no Docker here; the guide to Docker says what it takes"
    if not _succeeds(["docker", "info"]):
        return [], "no Docker engine answers; start one, or ask for the right to use it (group docker)"
    for compose in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(compose[0]) and _succeeds([*compose, "version"]):
            return compose, ""
    return [], "compose is missing: Debian's package is docker-compose"


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    """Results belong to who has called; not to root, as whom the image does not run."""
    return {"CLUSTER_UID": str(os.getuid()), "CLUSTER_GID": str(os.getgid()), **base} if os.getuid() else dict(base)
