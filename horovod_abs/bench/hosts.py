"""Several hosts on one Linux machine: network namespaces on a bridge, each with a hostname and an sshd of its own.

What runs on them sees separate machines, with a network of a set bandwidth between them; processors and files are
those of the one machine. It needs root, and Debian's packages iproute2, openssh-server and openssh-client::

    with Hosts(4, rate="1gbit") as hosts:
        hosts.start(["horovodrun", "-np", "4", "-H", hosts.slots, "python", "train.py"]).wait()
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client"}
_numbers = itertools.count()
_PATH = os.pathsep.join(["/usr/sbin", "/sbin", os.environ.get("PATH", os.defpath)])


class HostsUnavailable(RuntimeError):
    """Hosts cannot be made on this machine; the message says what is missing."""


class Hosts:
    """Makes hosts ``h0``, ``h1``, … and takes them down again, whatever happens in between, SIGTERM included.

    Args:
        count: How many.
        rate: Of each host's link, in both directions, as ``tc`` takes it.

    Raises:
        HostsUnavailable: on entering: no root, a program is missing, or the kernel refuses.
    """

    def __init__(self, count: int = 4, *, rate: str = "1gbit") -> None:
        self.count = count
        self.rate = rate
        self._bridge = f"ha{os.getpid()}x{next(_numbers)}"
        self._folder = Path()

    @property
    def names(self) -> list[str]:
        """The hosts' names."""
        return [f"h{host}" for host in range(self.count)]

    @property
    def slots(self) -> str:
        """For ``horovodrun -H``: one rank on each."""
        return ",".join(f"{name}:1" for name in self.names)

    # -- up and down -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Hosts:
        if reason := unavailable():
            raise HostsUnavailable(reason)
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._terminated = signal.signal(signal.SIGTERM, _exit) if _ends_by_sigterm() else None
        try:
            self._bring_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._take_down()

    def _bring_up(self) -> None:
        for key in ("key", "host"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        self._write_ssh()
        Path("/run/sshd").mkdir(exist_ok=True)
        _call("ip", "link", "add", self._bridge, "type", "bridge")
        _call("ip", "link", "set", self._bridge, "up")
        for host in range(self.count):
            self._bring_up_host(host)
        for name in self.names:
            self._await(name)

    def _await(self, name: str) -> None:
        """The first packets through a new bridge may be lost."""
        for _ in range(10):
            if self.start(["ssh", "-o", "ConnectTimeout=2", name, "true"]).wait() == 0:
                return
        raise HostsUnavailable(f"{name} does not answer to ssh{_bridge_is_filtered()}")

    def _write_ssh(self) -> None:
        """Launchers call plain ``ssh``: one that comes first on their path carries key and options."""
        wrapper = self._folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -i {self._folder}/key {options} "$@"\n')
        wrapper.chmod(0o755)

    def _bring_up_host(self, host: int) -> None:
        space, link = self._space(host), self._link(host)
        files = self._files(host)
        files.mkdir(parents=True)
        addresses = [f"{self._address(other)} h{other}" for other in range(self.count)]
        (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
        _call("ip", "netns", "add", space)
        _call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _call("ip", "link", "set", link, "master", self._bridge, "up")
        _call("ip", "-n", space, "address", "add", f"{self._address(host)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _call("ip", "-n", space, "link", "set", device, "up")
        shaped = ("root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms")
        _call("tc", "qdisc", "replace", "dev", link, *shaped)
        _call("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", "eth0", *shaped)
        sshd = [str(shutil.which("sshd", path=_PATH)), "-h", str(self._folder / "host")]
        for option in (
            f"AuthorizedKeysFile={self._folder}/key.pub",
            "StrictModes=no",
            "PermitRootLogin=yes",
            "PasswordAuthentication=no",
            "UsePAM=no",
            "PidFile=none",
        ):
            sshd += ["-o", option]
        _call(*self._inside(host), *sshd)

    def _take_down(self) -> None:
        for host in range(self.count):
            self.kill(host)
            with contextlib.suppress(HostsUnavailable):
                _call("ip", "netns", "delete", self._space(host))
            shutil.rmtree(self._files(host), ignore_errors=True)
        with contextlib.suppress(HostsUnavailable):
            _call("ip", "link", "delete", self._bridge)
        if self._terminated is not None:
            signal.signal(signal.SIGTERM, self._terminated)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- what to do with them --------------------------------------------------------------------------------------

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
        directory: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on ``h0``, from which ``ssh`` leads to all hosts.

        Args:
            command: The command and its arguments.
            environment: Variables to set besides this process's own.
            output: A file descriptor for what it prints; this process's own by default.
            directory: To start it in; this process's own by default.
        """
        return subprocess.Popen(
            self.command(command),
            env=self.environment({**os.environ, **(environment or {})}),
            cwd=directory,
            stdout=output,
            stderr=output,
        )

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one on ``h0``; to be started with :meth:`environment`."""
        return [*self._inside(0), *command]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with a path on which ``ssh`` leads to all hosts, and this Python's programs are found."""
        path = [str(self._folder / "bin"), str(Path(sys.executable).parent), base.get("PATH", os.defpath)]
        return {**base, "PATH": os.pathsep.join(path)}

    def cut(self, host: int) -> None:
        """Pull a host's network cable: what is sent to it is lost, and nobody is told."""
        _call("ip", "link", "set", self._link(host), "down")

    def mend(self, host: int) -> None:
        """Plug it in again."""
        _call("ip", "link", "set", self._link(host), "up")

    def kill(self, host: int) -> None:
        """Kill everything that runs on a host, its sshd too."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._space(host)], env={"PATH": _PATH}, capture_output=True, text=True, check=False
        )
        for process in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _inside(self, host: int) -> list[str]:
        """The beginning of a command that is to run on a host: MPI wants hosts to have names of their own."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname h{host}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._space(host), *named]

    def _space(self, host: int) -> str:
        return f"{self._bridge}-h{host}"

    def _link(self, host: int) -> str:
        return f"{self._bridge}v{host}"

    def _files(self, host: int) -> Path:
        """What ``ip netns exec`` puts in the place of files in /etc."""
        return Path("/etc/netns") / self._space(host)

    def _address(self, host: int) -> str:
        return f"10.77.{zlib.crc32(self._bridge.encode()) % 250}.{10 + host}"


def unavailable() -> str | None:
    """Why hosts cannot be made here; ``None`` if nothing is known to be in the way."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are network namespaces, which need Linux and root"
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=_PATH) is None:
            return f"{program} is missing: install the package {package}"
    return None


def _ends_by_sigterm() -> bool:
    """Whether SIGTERM would end this process on the spot, with hosts left behind."""
    in_charge = threading.current_thread() is threading.main_thread()
    return in_charge and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _bridge_is_filtered() -> str:
    """Docker's engine turns on what keeps hosts on a bridge from each other."""
    switch = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if switch.exists() and switch.read_text().strip() == "1":
        return "; a firewall looks at what passes through bridges: sysctl -w net.bridge.bridge-nf-call-iptables=0"
    return ""


def _call(*command: str) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": _PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HostsUnavailable(f"{' '.join(command[:6])} … failed: {done.stderr.strip() or done.stdout.strip()}")
