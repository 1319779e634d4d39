"""A Docker engine to test with: the machine's own, or one that is started for the tests and ended after them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

RELEASE = "bookworm"
PUBLISHED_BASE = f"debian:{RELEASE}-slim"
_FILTERS_BRIDGES = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
_START_SECONDS = 60.0


class EngineUnavailable(RuntimeError):
    """There is no engine, and none can be started; the message says why."""


class Engine:
    """Where images are built and containers run.

    Attributes:
        environment: What ``docker`` and compose are called with.
        base: The image to build on: Debian's own, or where that cannot be had one made of Debian's packages.
        compose: The beginning of a compose command, of the old kind if that is there.

    Raises:
        EngineUnavailable: on entering.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = dict(os.environ)
        self.base = PUBLISHED_BASE
        self.compose = ["docker-compose"]
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forwarding = ""

    def __enter__(self) -> Engine:
        if shutil.which("docker") is None:
            raise EngineUnavailable("docker is missing: apt-get install docker.io docker-compose")
        if shutil.which("docker-compose") is None:
            self.compose = ["docker", "compose"]
            if self.try_docker("compose", "version"):
                raise EngineUnavailable("compose is missing: apt-get install docker-compose")
        try:
            if self.try_docker("info"):
                self._start()
            self._find_base()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    # -- what to do with it ----------------------------------------------------------------------------------------

    def docker(self, *arguments: str) -> str:
        """Call ``docker``, and return what it printed; raises `AssertionError` if it fails."""
        return call(["docker", *arguments], self.environment)

    def try_docker(self, *arguments: str) -> str:
        """Call ``docker``; returns why it failed, "" if it did not."""
        done = subprocess.run(["docker", *arguments], env=self.environment, capture_output=True, text=True, check=False)
        return done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else ""

    # -- up and down -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """An engine of our own: its files in a folder of its own, its network rules taken out of others' way."""
        if os.geteuid() != 0:
            raise EngineUnavailable("no Docker engine answers, and only root can start one")
        for program, package in {"dockerd": "docker.io", "debootstrap": "debootstrap", "iptables": "iptables"}.items():
            if shutil.which(program) is None:
                raise EngineUnavailable(f"no Docker engine answers; to start one: apt-get install {package}")
        self._folder = Path(tempfile.mkdtemp(prefix="docker-"))
        self._forwarding = call(["iptables", "-S", "FORWARD"], os.environ).splitlines()[0]
        socket = f"unix://{self._folder}/socket"
        self.environment["DOCKER_HOST"] = socket
        command = ["dockerd", "--host", socket, "--pidfile", str(self._folder / "pid")]
        command += ["--data-root", str(self._folder / "data"), "--exec-root", str(self._folder / "exec")]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while reason := self.try_docker("info"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self._folder / "log").read_text(errors="replace")[-1500:]
                raise EngineUnavailable(f"dockerd does not start: {reason}\n{said}")
            time.sleep(0.5)
        if _FILTERS_BRIDGES.exists():  # or else the engine's rules keep the hosts of tests/hosts from each other
            _FILTERS_BRIDGES.write_text("0\n")

    def _find_base(self) -> None:
        if not self.try_docker("image", "inspect", self.base) or not self.try_docker("pull", "--quiet", self.base):
            return
        self.base = "horovod-abs-base"
        if not self.try_docker("image", "inspect", self.base):
            return
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            raise EngineUnavailable(f"{PUBLISHED_BASE} cannot be pulled; made by root, with the package debootstrap")
        with tempfile.TemporaryDirectory(prefix="debian-") as root:
            call(["debootstrap", "--variant=minbase", RELEASE, root], os.environ)
            with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
                subprocess.run(
                    ["docker", "import", "-", self.base],
                    env=self.environment,
                    stdin=packed.stdout,
                    stdout=subprocess.DEVNULL,
                    check=True,
                )

    def _end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
            call(["iptables", *self._forwarding.split()], os.environ)  # the engine has set it to drop everything
        if self._folder is not None:
            shutil.rmtree(self._folder)


def call(command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None) -> str:
    """What a command prints; raises `AssertionError`, with the end of it, if it fails."""
    done = subprocess.run(
        command,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout
