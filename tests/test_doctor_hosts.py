"""What the doctor says about several hosts; a host that does not answer is named in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from horovod_abs import doctor_hosts, host_probe
from horovod_abs.bench.hosts import Hosts, HostsUnavailable
from horovod_abs.doctor_hosts import Host, HostProblem, Link

VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "tensorflow": ""}
LINK = Link("a", "b", bits_per_second=0.95e9, round_trip=0.0001, address="10.0.0.2")


def facts(name: str, *, gpus: int = 0, **interfaces: str) -> dict[str, Any]:
    named = {interface: [address] for interface, address in interfaces.items()}
    return {"name": name, "versions": VERSIONS, "interfaces": named, "processors": 4, "gpus": gpus}


def test_the_probe_tells_the_truth_about_this_machine() -> None:
    with closing(Host("localhost")) as host:
        host.look()
    assert host.facts["versions"]["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert host.facts["versions"]["mpi4py"] == host_probe._version("mpi4py") != ""
    assert host.facts["versions"]["Open MPI"][0].isdigit()
    assert abs(host.clock) < 0.5


def test_two_probes_measure_the_way_between_them() -> None:
    with closing(Host("localhost")) as one, closing(Host("localhost")) as other:
        link = doctor_hosts.measure(one, other)
    assert link.error == ""
    assert link.bits_per_second > 1e8
    assert 0 < link.round_trip < 0.1
    assert link.address == "127.0.0.1"


def test_a_host_that_cannot_be_reached_is_told_with_the_reason() -> None:
    with closing(Host("localhost")) as one:
        error = one.ask("connect", "no-such-host.invalid", "1")["error"]
    assert error


def test_a_host_that_says_nothing_is_given_up_in_time() -> None:
    began = time.monotonic()
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with closing(Host("silent", silent)) as host, pytest.raises(HostProblem, match=r"no answer within 0.5 s"):
        host.ask("facts", seconds=0.5)
    assert time.monotonic() - began < 10


def test_what_ssh_says_is_passed_on() -> None:
    code = "import sys; sys.exit('ssh: Permission denied (publickey)')"
    with closing(Host("closed", [sys.executable, "-c", code])) as host, pytest.raises(HostProblem, match="publickey"):
        host.ask("facts")
    check = doctor_hosts.check_host("closed", {}, "ssh: Permission denied (publickey)")
    assert check.status == "failure"
    assert "ssh-copy-id closed" in check.remedy


def test_what_a_login_prints_is_passed_over() -> None:
    code = "print('Welcome!', flush=True); print('{\"time\": 5}', flush=True); import time; time.sleep(60)"
    with closing(Host("chatty", [sys.executable, "-c", code])) as host:
        assert host.ask("clock") == {"time": 5}


def test_differences_of_versions_are_named_with_their_hosts() -> None:
    same = doctor_hosts.check_versions({"a": VERSIONS, "b": VERSIONS})
    assert (same.status, same.detail) == ("ok", "the same on all hosts: Python 3.11.7, torch 2.13.0")
    unlike = {"a": VERSIONS, "b": {**VERSIONS, "torch": "2.12.0"}, "c": {**VERSIONS, "torch": ""}}
    check = doctor_hosts.check_versions(unlike)
    assert check.status == "failure"
    assert check.detail == "torch: 2.13.0 on a; 2.12.0 on b; none on c"


def test_hosts_of_one_name_are_refused() -> None:
    assert doctor_hosts.check_names({"a": facts("x"), "b": facts("y")}).status == "ok"
    check = doctor_hosts.check_names({"a": facts("x"), "b": facts("x")})
    assert check.status == "failure"
    assert "a calls itself x, b calls itself x" in check.detail


def test_clocks() -> None:
    assert doctor_hosts.check_clocks({"a": 3.0, "b": 3.1}).status == "ok"
    check = doctor_hosts.check_clocks({"a": 0.0, "b": 9.0, "c": -2.0})
    assert (check.status, check.detail) == ("warning", "b is 11.0 s ahead of c")


def test_links() -> None:
    slow = replace(LINK, target="c", bits_per_second=0.1e9)
    assert doctor_hosts.check_links([LINK, LINK]).status == "ok"
    check = doctor_hosts.check_links([LINK, slow])
    assert check.status == "warning"
    assert "a to c: 0.10 Gbit/s" in check.detail
    assert check.remedy.endswith("a and c")
    broken = doctor_hosts.check_links([LINK, Link("a", "c", error="c: timed out")])
    assert (broken.status, broken.detail) == ("failure", "a does not reach c: c: timed out")


def test_settings_that_follow() -> None:
    hosts = {"a": facts("a", eth0="10.0.0.1"), "b": facts("b", gpus=2, eth0="10.0.0.2")}
    told = doctor_hosts.advice(hosts, [LINK]).detail
    assert told.startswith("horovodrun -np 3 -H a:1,b:2 python SCRIPT")
    assert "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4" in told
    assert "0.034 s per million" in told  # 4 MB once through a link of 0.95 Gbit/s
    assert "coll_tuned" not in doctor_hosts.advice(hosts, [replace(LINK, bits_per_second=90e9)]).detail


def test_an_interface_is_named_where_there_is_a_choice() -> None:
    several = {"a": facts("a", eth0="10.0.0.1", docker0="172.17.0.1"), "b": facts("b", eth0="10.0.0.2")}
    assert "--network-interfaces eth0" in doctor_hosts.advice(several, [LINK]).detail


def test_with_many_hosts_each_is_measured_with_the_next() -> None:
    few, many = list("abcd"), list("abcdefgh")
    assert len(doctor_hosts.pairs(few)) == 6  # type: ignore[arg-type]
    assert doctor_hosts.pairs(many)[-1] == ("h", "a")  # type: ignore[arg-type]
    assert len(doctor_hosts.pairs(many)) == 8  # type: ignore[arg-type]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(3) as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.hosts
@pytest.mark.timeout(120)
def test_over_hosts(hosts: Hosts) -> None:
    def examined() -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "horovod_abs", "doctor", "--hosts", "h0,h1,h2", "--json"]
        told = subprocess.run(
            hosts.command(command), env=hosts.environment(os.environ), stdout=subprocess.PIPE, timeout=60, check=False
        )
        return told.returncode, {check["name"]: check for check in json.loads(told.stdout)["checks"]}

    status, checks = examined()
    assert not [check for check in checks.values() if check["status"] != "ok"]
    assert status == 0
    rates = [float(line.split(": ")[1].split()[0]) for line in checks["Network"]["detail"].splitlines()]
    assert len(rates) == 3
    assert all(0.5 < rate < 1.1 for rate in rates), "the links have 1 Gbit/s"
    assert checks["Settings"]["detail"].startswith("horovodrun -np 3 -H h0:1,h1:1,h2:1 python SCRIPT")

    hosts.cut(2)
    status, checks = examined()
    assert status == 1
    assert checks["h2"]["status"] == "failure"
    assert "timed out" in checks["h2"]["detail"]
    assert "-H h0:1,h1:1 " in checks["Settings"]["detail"]
