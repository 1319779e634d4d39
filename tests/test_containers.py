"""A notebook brings the cluster of containers up where there is an engine, and says why not where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_abs import containers
from horovod_abs.bench.launch import LaunchError
from horovod_abs.containers import Containers, speeds

DOCKER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    info) exit {info} ;;
    "compose version") exit {plugin} ;;
    "compose ps"*) echo c1; echo c2 ;;
    inspect*) cat {health} ;;
    "compose fail") echo "[1,0]<stdout>:the reason"; exit 3 ;;
    "compose exec"*) echo "horovodrun"; echo "[1,0]<stdout>: 50%|# | 1/2"; echo "[0]<stderr>:100%|##| 2/2"
        echo "Creating x ... "; pwd ;;
esac
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Containers, list[str]]]:
    """Makes `Containers` of a program that stands in for Docker, and the list of what it shows."""

    def make(info: int = 0, plugin: int = 0, health: str = "healthy\nhealthy\n") -> tuple[Containers, list[str]]:
        (tmp_path / "health").write_text(health)
        program = tmp_path / "docker"
        program.write_text(DOCKER.format(log=tmp_path / "log", health=tmp_path / "health", info=info, plugin=plugin))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        shown: list[str] = []

        def show(text: str) -> Callable[[str], None]:
            shown.append(text)
            return shown.append

        return Containers(show=show), shown

    return make


def test_slow_workers_have_half_the_time_of_fast_ones() -> None:
    assert speeds() == {"worker-fast": 0.5, "worker-slow": 0.25}


def test_what_compose_prints_is_shown_below_the_command(made: Callable[..., tuple[Containers, list[str]]]) -> None:
    cluster, shown = made()
    cluster("exec -T head\n  horovod-abs cluster")
    head = "$ docker compose exec -T head horovod-abs cluster"
    assert shown[0] == f"{head}\n…"
    assert shown[-1] == f"{head}\n100%|##| 2/2\nhorovodrun\n{containers.FOLDER}"


def test_a_failure_is_raised_with_what_was_said(made: Callable[..., tuple[Containers, list[str]]]) -> None:
    cluster, _ = made()
    with pytest.raises(LaunchError, match=r"compose fail\nended with exit status 3:\n(.*\n)*the reason"):
        cluster("fail")


def test_it_waits_until_all_are_healthy(made: Callable[..., tuple[Containers, list[str]]]) -> None:
    cluster, _ = made()
    cluster.wait_until_healthy(0)
    cluster, _ = made(health="healthy\nstarting\n")
    with pytest.raises(LaunchError, match="after 0 s the containers' health is healthy, starting"):
        cluster.wait_until_healthy(0)


def test_without_an_engine_every_call_says_so_and_does_nothing(
    made: Callable[..., tuple[Containers, list[str]]], tmp_path: Path
) -> None:
    cluster, shown = made(info=1)
    cluster("up -d")
    cluster.wait_until_healthy(0)
    assert shown[-1].startswith("$ docker compose up -d\nskipped: no Docker engine answers")
    assert (tmp_path / "log").read_text() == "info\n"


def test_what_is_missing_is_named(
    made: Callable[..., tuple[Containers, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers.shutil, "which", lambda name: None if name == "docker-compose" else name)
    assert "compose is missing" in made(plugin=1)[0].missing
    assert "without its folder docker/" in Containers(tmp_path / "elsewhere").missing
    monkeypatch.setattr(containers.shutil, "which", lambda name: None)
    assert "there is no Docker here" in Containers().missing


@pytest.mark.parametrize("uid", [0, 1234])
def test_results_belong_to_who_has_called(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers.os, "getuid", lambda: uid)
    monkeypatch.setattr(containers.os, "getgid", lambda: uid)
    ours = {"CLUSTER_UID": "1234", "CLUSTER_GID": "1234"} if uid else {}
    assert containers._environment({"A": "b"}) == {**ours, "A": "b"}
    assert containers._environment({"CLUSTER_UID": "7"})["CLUSTER_UID"] == "7"
