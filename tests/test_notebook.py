"""What notebooks start ranks with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from horovod_abs import notebook


def test_a_command_may_go_on_in_further_lines() -> None:
    command = """horovodrun -np 4 python -m a.b --lr 0.1
                     --json 'my runs/x.json'"""
    assert notebook.parse(command) == (4, "a.b", ["--lr", "0.1", "--json", "my runs/x.json"])
    assert notebook.parse("horovodrun -np 12 python -m a") == (12, "a", [])


@pytest.mark.parametrize("command", ["python -m a", "horovodrun -np 0 python -m a", "horovodrun -np 2 python a.py", ""])
def test_another_command_is_refused_with_the_form(command: str) -> None:
    with pytest.raises(ValueError, match="starts ranks with horovodrun -np N python -m MODULE"):
        notebook.run(command)


def test_a_bar_takes_the_place_of_its_last_drawing() -> None:
    shown: list[str] = []

    def show(text: str) -> Callable[[str], None]:
        shown.append(text)
        return shown.append

    screen = notebook.Screen("starting", show)
    noise = "I0000 00:00:1.2  67 port.cc:153] oneDNN custom operations are on."
    for line in ("10%|# | 1/10", "20%|##| 2/10", noise, "done"):
        screen(line)
    assert shown == ["starting", "10%|# | 1/10", "20%|##| 2/10", "20%|##| 2/10\ndone"]


def test_run_starts_the_ranks_and_shows_what_they_print(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run_ranks(ranks: int, module: str, arguments: list[str], show: Callable[[str], None]) -> None:
        started.append((ranks, module, arguments))
        show("a line")

    shown: list[str] = []
    monkeypatch.setattr(notebook, "run_ranks", run_ranks)
    monkeypatch.setattr(notebook, "_below_the_cell", lambda text: shown.append)
    notebook.run("horovodrun -np 2 python -m a --b c")
    assert started == [(2, "a", ["--b", "c"])]
    assert shown == ["a line"]
