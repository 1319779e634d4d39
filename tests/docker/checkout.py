"""A copy of this checkout to build and run in, with what this machine needs for it in docker/local."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from horovod_abs.install.index import why_silent
from horovod_abs.install.wheel import cache_dir
from tests.docker.engine import Engine, call

ROOT = Path(__file__).parents[2]
PROJECT = "horovod-abs-test"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


class Checkout:
    """The repository as a user has it, and the cluster that compose makes of it.

    Args:
        folder: Where to put it.
        engine: What it runs on.

    Attributes:
        image: The image's name.
        lab_port: Where JupyterLab is published.
    """

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.image = PROJECT
        self._engine = engine
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.lab_port: int = free.getsockname()[1]
        self._copy()
        local_files(folder / "docker" / "local")
        uid = os.getuid() or 1000
        self.environment = {
            **engine.environment,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "CLUSTER_IMAGE": self.image,
            "BASE": engine.base,
            "TORCH_INDEX": "" if why_silent(TORCH_INDEX) else TORCH_INDEX,
            "CLUSTER_UID": str(uid),
            "CLUSTER_GID": str(os.getgid() or 1000),
            "CLUSTER_WORK": "./work",
            "LAB_PORT": str(self.lab_port),
        }
        for name in ("runs", "data", "work"):
            (folder / "docker" / name).mkdir(exist_ok=True)
            if os.getuid() == 0:
                os.chown(folder / "docker" / name, uid, uid)

    def _copy(self) -> None:
        listed = subprocess.check_output(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
        )
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)

    def path(self, name: str) -> Path:
        """A file in docker/."""
        return self.folder / "docker" / name

    def compose(self, *arguments: str) -> str:
        """Call compose in docker/, and return what it printed; raises `AssertionError` if it fails."""
        return call([*self._engine.compose, *arguments], self.environment, self.path("."))

    def on_head(self, *command: str) -> str:
        """Run a command on the head."""
        return self.compose("exec", "-T", "head", *command)

    def start_on_head(self, output: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on the head that prints to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [*self._engine.compose, "exec", "-T", "head", *command],
                env=self.environment,
                cwd=self.path("."),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def containers(self, service: str) -> list[str]:
        """Identifiers of a service's containers."""
        return self.compose("ps", "-q", service).split()

    def health(self) -> set[str]:
        """What the health checks of all services say."""
        return {
            self._engine.docker("inspect", "--format", "{{.State.Health.Status}}", container).strip()
            for service in ("head", "worker-fast", "worker-slow")
            for container in self.containers(service)
        }


def local_files(folder: Path) -> None:
    """What pip is told on this machine, in files; and the Horovods that were built here before."""
    lines = ["[global]"]
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if certificates and Path(certificates).is_file():
        shutil.copy(certificates, folder / "certificates.crt")
        lines.append("cert = /local/certificates.crt")
    wheels = [wheel for links in _find_links() for wheel in Path(links).glob("*.whl")]
    if wheels:
        (folder / "wheels").mkdir()
        for wheel in wheels:
            shutil.copy(wheel, folder / "wheels")
        lines.append("find-links = /local/wheels")
    if len(lines) > 1:
        (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    for name in ("source", "wheels"):
        if (cache_dir() / name).is_dir():
            shutil.copytree(cache_dir() / name, folder / "horovod-abs" / name)


def _find_links() -> set[str]:
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    settings = [line.partition("=") for line in listed.splitlines()]
    return {
        link.removeprefix("file://")
        for key, _, value in settings
        if key.endswith(".find-links")
        for link in value.strip("'").split()
    }
