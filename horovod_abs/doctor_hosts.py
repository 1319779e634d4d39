"""``horovod-abs doctor --hosts``: whether several hosts can train together, and with which settings.

Over ssh each host runs :mod:`horovod_abs.host_probe` in the Python that this program runs in; all at the same time,
where they do not disturb each other. A host that does not answer within a bound is named, and the others go on.
"""

from __future__ import annotations

import itertools
import json
import queue
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from horovod_abs import host_probe, mpi
from horovod_abs.doctor import INSTALL_HOROVOD, Check

CONNECT_SECONDS = 10
ANSWER_SECONDS = 45.0
"""How long a host may take for an answer: importing nothing, it needs one or two."""
ALL_PAIRS_UP_TO = 6
"""With more hosts each is measured with the next one only."""
CLOCK_SECONDS = 0.5
"""Clocks that differ by more mix up what several hosts' logs say."""
SLOW_LINK = 0.5
"""A pair with less than this part of the fastest pair's bandwidth slows the whole ring."""
NETWORK_LIMITS_BELOW = 20e9
"""Bits per second below which exchanges take longer on the network than on the processors."""
_CLOCK_LOOKS = 5
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]


class HostProblem(RuntimeError):
    """A host does not do what it is asked."""


@dataclass(frozen=True)
class Link:
    """What was measured from one host to another.

    Attributes:
        source, target: Names of the hosts.
        bits_per_second: Of one TCP connection.
        round_trip: Seconds of a small message there and back.
        address: Of the target, as the source reached it.
        error: Why it could not be measured; the rest is then 0 or empty.
    """

    source: str
    target: str
    bits_per_second: float = 0.0
    round_trip: float = 0.0
    address: str = ""
    error: str = ""


class Host:
    """One host, with a probe that runs on it.

    Args:
        name: As ssh knows it.
        command: Starts the probe; over ssh by default, without it on this machine.

    Attributes:
        facts: What the probe has found, see :func:`horovod_abs.host_probe.facts`.
        clock: Seconds by which its clock is ahead of this machine's.
    """

    def __init__(self, name: str, command: Sequence[str] | None = None) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self.clock = 0.0
        script = Path(host_probe.__file__).read_text(encoding="utf-8")
        self._process = subprocess.Popen(
            probe_command(name, len(script)) if command is None else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._reads_errors = threading.Thread(target=self._read_errors, daemon=True)
        self._reads_errors.start()
        threading.Thread(target=self._read_answers, daemon=True).start()
        self._write(script)

    def ask(self, *words: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            HostProblem: there is none in time, or the probe has ended.
        """
        self._write(" ".join(words) + "\n")
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                line = self._answers.get(timeout=left)
                if not line:
                    raise HostProblem(self._why_it_ended())
                with suppress(json.JSONDecodeError):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        raise HostProblem(f"no answer within {seconds:g} s")

    def look(self) -> None:
        """Find out :attr:`facts` and :attr:`clock`.

        Raises:
            HostProblem: the host does not answer.
        """
        self.facts = self.ask("facts")
        looks = []
        for _ in range(_CLOCK_LOOKS):
            before, there, after = time.time(), self.ask("clock")["time"], time.time()
            looks.append((after - before, there - (before + after) / 2))
        self.clock = min(looks)[1]

    def close(self) -> None:
        """End the probe, and what it was started with."""
        self._process.kill()
        self._process.wait()

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(line.strip() for line in self._process.stderr if line.strip())

    def _why_it_ended(self) -> str:
        self._reads_errors.join(1)
        return self._errors[-1] if self._errors else f"the probe ended with status {self._process.poll()}"


def probe_command(name: str, length: int) -> list[str]:
    """Starts the probe, of so many characters, which it then reads from its input."""
    code = f"import sys; exec(compile(sys.stdin.read({length}), 'host_probe', 'exec'))"
    python = [sys.executable, "-u", "-c", code]
    return python if is_this_machine(name) else [*_SSH, name, shlex.join(python)]


def is_this_machine(name: str) -> bool:
    """Whether a host's name leads to this machine; Horovod starts ranks there without ssh."""
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        return socket.gethostbyname(name) in own
    except OSError:
        return False


def examine_hosts(names: Sequence[str]) -> Iterator[Check]:
    """Make all checks, one by one, so that each can be shown as it comes.

    Args:
        names: Of the hosts, as ssh knows them.
    """
    with ExitStack() as stack:
        hosts = [Host(name) for name in names]
        for host in hosts:
            stack.callback(host.close)
        problems = _each(hosts, Host.look)
        for host, problem in zip(hosts, problems, strict=True):
            yield check_host(host.name, host.facts, problem)
        hosts = [host for host, problem in zip(hosts, problems, strict=True) if not problem]
        facts = {host.name: host.facts for host in hosts}
        if len(hosts) < 2:
            return
        yield check_names(facts)
        yield check_versions({name: each["versions"] for name, each in facts.items()})
        yield check_clocks({host.name: host.clock for host in hosts})
        links = [measure(source, target) for source, target in pairs(hosts)]
    yield check_links(links)
    if all(not link.error for link in links):
        yield advice(facts, links)


def _each(hosts: Sequence[Host], do: Callable[[Host], None]) -> list[str]:
    """Do something with all hosts at once; for each the problem, or ""."""

    def attempt(host: Host) -> str:
        try:
            do(host)
        except HostProblem as problem:
            return str(problem)
        return ""

    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        return list(pool.map(attempt, hosts))


def pairs(hosts: Sequence[Host]) -> list[tuple[Host, Host]]:
    """What is measured: all pairs, or with many hosts each with the next one."""
    if len(hosts) <= ALL_PAIRS_UP_TO:
        return list(itertools.combinations(hosts, 2))
    return list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))


def measure(source: Host, target: Host) -> Link:
    """Bandwidth and latency from one host to another."""
    try:
        port = target.ask("listen")["port"]
        sent = source.ask("connect", target.name, str(port))
        if "error" in sent:
            return Link(source.name, target.name, error=f"{target.name}: {sent['error']}")
        heard = target.ask("heard")
    except HostProblem as problem:
        return Link(source.name, target.name, error=str(problem))
    if "error" in heard:
        return Link(source.name, target.name, error=heard["error"])
    return Link(source.name, target.name, heard["bits_per_second"], sent["round_trip"], heard["address"])


# -- what follows from what was found --------------------------------------------------------------------------------


def check_host(name: str, facts: Mapping[str, Any], problem: str) -> Check:
    """Whether a host answers, and what it is."""
    if problem:
        return Check(
            name,
            "failure",
            problem,
            f"`ssh {name} {sys.executable} --version` must work from here without a password (ssh-copy-id {name}), "
            "with the environment at the same path on all hosts",
        )
    interfaces = ", ".join(f"{each} {addresses[0]}" for each, addresses in facts["interfaces"].items())
    gpus = f", {facts['gpus']} GPUs" if facts["gpus"] else ""
    return Check(name, "ok", f"{facts['processors']} processors{gpus}; {interfaces or 'interfaces not known'}")


def check_names(facts: Mapping[str, Mapping[str, Any]]) -> Check:
    """MPI tells hosts apart by the names that they have themselves."""
    own = [each["name"] for each in facts.values()]
    if len(set(own)) == len(own):
        return Check("Host names", "ok", "all different")
    told = ", ".join(f"{name} calls itself {each['name']}" for name, each in facts.items())
    return Check("Host names", "failure", told, "Give each host a name of its own: hostnamectl set-hostname NAME")


def check_versions(versions: Mapping[str, Mapping[str, str]]) -> Check:
    """Whether all hosts have the same of everything.

    Args:
        versions: By host and thing; "" for what is missing.
    """
    alike, differences = [], []
    for thing in dict.fromkeys(thing for each in versions.values() for thing in each):
        by_version: dict[str, list[str]] = {}
        for host, each in versions.items():
            by_version.setdefault(each.get(thing, ""), []).append(host)
        if len(by_version) > 1:
            parts = (f"{version or 'none'} on {', '.join(hosts)}" for version, hosts in by_version.items())
            differences.append(f"{thing}: {'; '.join(parts)}")
        elif version := next(iter(by_version)):
            alike.append(f"{thing} {version}")
    if differences:
        return Check(
            "Versions", "failure", "\n".join(differences), f"Install the same everywhere, {INSTALL_HOROVOD} too"
        )
    return Check("Versions", "ok", f"the same on all hosts: {', '.join(alike)}")


def check_clocks(clocks: Mapping[str, float]) -> Check:
    """How far the hosts' clocks differ.

    Args:
        clocks: Seconds ahead of this machine, by host.
    """
    last, first = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    apart = clocks[first] - clocks[last]
    if apart <= CLOCK_SECONDS:
        return Check("Clocks", "ok", f"within {1e3 * apart:.0f} ms of each other")
    return Check(
        "Clocks",
        "warning",
        f"{first} is {apart:.1f} s ahead of {last}",
        "Training does not depend on it, reading logs does: run chrony or systemd-timesyncd",
    )


def check_links(links: Sequence[Link]) -> Check:
    """Whether hosts reach each other, and how fast."""
    broken = [link for link in links if link.error]
    if broken:
        return Check(
            "Network",
            "failure",
            "\n".join(f"{link.source} does not reach {link.target}: {link.error}" for link in broken),
            "Hosts must know each other's names (/etc/hosts), and reach each other on every port: look at the firewall",
        )
    told = [
        f"{link.source} to {link.target}: {link.bits_per_second / 1e9:.2f} Gbit/s, round trip "
        f"{1e3 * link.round_trip:.2f} ms"
        for link in links
    ]
    fastest = max(link.bits_per_second for link in links)
    slow = [link for link in links if link.bits_per_second < SLOW_LINK * fastest]
    if not slow:
        return Check("Network", "ok", "\n".join(told))
    names = ", ".join(f"{link.source} and {link.target}" for link in slow)
    return Check("Network", "warning", "\n".join(told), f"The slowest link holds up all: look at {names}")


def advice(facts: Mapping[str, Mapping[str, Any]], links: Sequence[Link]) -> Check:
    """What to start training with."""
    slots = {name: each["gpus"] or 1 for name, each in facts.items()}
    command = ["horovodrun", "-np", str(sum(slots.values())), "-H", ",".join(f"{n}:{k}" for n, k in slots.items())]
    if interfaces := used_interfaces(facts, links):
        command += ["--network-interfaces", ",".join(interfaces)]
    slowest = min(link.bits_per_second for link in links)
    lines = [f"{shlex.join(command)} python SCRIPT"]
    if slowest < NETWORK_LIMITS_BELOW:
        variables = " ".join(f"--mca {name.removeprefix('OMPI_MCA_')} {value}" for name, value in mpi.RING.items())
        lines.append(
            f'With plain Horovod add --mpi-args="{variables}": Open MPI then sums around a ring, in about half the '
            "time of its own choice; horovod_abs sets that by itself"
        )
        ring = 2 * (len(slots) - 1) / len(slots) * 8 * 4e6 / slowest
        lines.append(
            f"An exchange takes at least {ring:.3f} s per million parameters. Less with "
            "compression=hvd.Compression.fp16 over MPI, not over Gloo (--gloo), which takes less processor time"
        )
    return Check("Settings", "ok", "\n".join(lines))


def used_interfaces(facts: Mapping[str, Mapping[str, Any]], links: Sequence[Link]) -> list[str]:
    """The interfaces on which hosts were reached, where they have others besides; empty where there is no choice."""
    used = {
        name
        for link in links
        for name, addresses in facts[link.target]["interfaces"].items()
        if link.address in addresses
    }
    if any(set(each["interfaces"]) - used for each in facts.values()):
        return sorted(used)
    return []
