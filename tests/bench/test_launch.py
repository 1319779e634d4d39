from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from horovod_abs.bench import launch
from horovod_abs.bench.hosts import Hosts


@pytest.fixture
def fake_horovodrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A horovodrun that is a Python program of the test's own."""
    path = tmp_path / "bin" / "horovodrun"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport os, sys\nexec(open({str(tmp_path / 'program.py')!r}).read())\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(launch.shutil, "which", lambda *args, **keywords: str(path))
    return tmp_path / "program.py"


def test_passes_on_what_ranks_print_without_their_prefix(fake_horovodrun: Path) -> None:
    fake_horovodrun.write_text(
        "print('horovodrun itself')\n"
        "print('[1,0]<stdout>: over MPI')\n"
        "print('[12]<stderr>:over Gloo')\n"
        "print('[1,3]<stdout>: [1] kept')\n"
    )
    lines: list[str] = []
    launch.run_ranks(2, "module", show=lines.append)
    assert lines == ["over MPI", "over Gloo", "[1] kept"]


def test_command_and_environment(fake_horovodrun: Path) -> None:
    fake_horovodrun.write_text("print('[0]<stdout>:', sys.argv[1:], os.environ['PATH'].split(':'))")
    lines: list[str] = []
    launch.run_ranks(3, "some.module", ["--x", "a b"], controller="gloo", show=lines.append)
    assert str(["-np", "3", "--gloo", sys.executable, "-m", "some.module", "--x", "a b"]) in lines[0]
    assert str(Path(sys.executable).parent) in lines[0]


def test_hosts_and_variables(fake_horovodrun: Path) -> None:
    class Here(Hosts):
        """Two hosts that are this machine."""

        def command(self, command: Sequence[str]) -> list[str]:
            return ["/usr/bin/env", "WHERE=h0", *command]

    fake_horovodrun.write_text("print('[0]<stdout>:', sys.argv[1:6], os.environ['WHERE'], os.environ['MORE'])")
    lines: list[str] = []
    launch.run_ranks(2, "module", show=lines.append, hosts=Here(2), variables={"MORE": "more"})
    assert lines == [str(["-np", "2", "-H", "h0:1,h1:1", "--disable-cache"]) + " h0 more"]


def test_a_failure_tells_the_command_and_the_last_lines(fake_horovodrun: Path) -> None:
    fake_horovodrun.write_text("print('mpirun: no slots')\nprint('[1,0]<stderr>: ValueError: no')\nsys.exit(7)")
    with pytest.raises(launch.LaunchError) as caught:
        launch.run_ranks(2, "module", show=lambda line: None)
    message = str(caught.value)
    assert "-np 2" in message
    assert "exit status 7" in message
    assert "mpirun: no slots" in message
    assert "ValueError: no" in message


def test_an_exception_ends_the_ranks(fake_horovodrun: Path) -> None:
    fake_horovodrun.write_text("print('[1,0]<stdout>:', os.getpid(), flush=True)\nimport time\ntime.sleep(600)")
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.run_ranks(2, "module", show=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_without_horovodrun_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda *args, **keywords: None)
    with pytest.raises(launch.LaunchError, match="horovod-abs install-horovod"):
        launch.run_ranks(2, "module")


def test_waiting_ranks_yield_when_there_are_more_than_processors() -> None:
    assert launch.environment(10_000, {})["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in launch.environment(1, {})
    assert launch.environment(10_000, {"OMPI_MCA_mpi_yield_when_idle": "0"})["OMPI_MCA_mpi_yield_when_idle"] == "0"


def test_on_a_terminal_a_bar_redraws_itself_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    screen = launch.Screen()
    for line in ("begin", "10%|# | 1/10", "20%|##| 2/10", "end"):
        screen(line)
    assert capsys.readouterr().out == "begin\n10%|# | 1/10\r\x1b[K20%|##| 2/10\nend\n"


def test_elsewhere_every_line_stays(capsys: pytest.CaptureFixture[str]) -> None:
    screen = launch.Screen()
    for line in ("10%|# | 1/10", "20%|##| 2/10", "end"):
        screen(line)
    assert capsys.readouterr().out == "10%|# | 1/10\n20%|##| 2/10\nend\n"
