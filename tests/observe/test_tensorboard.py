from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from horovod_abs.driver import RoundRecord
from horovod_abs.observe.tensorboard import TensorBoardWriter, convert
from tests.observe.recorded import recorded
from tests.observe.records import record

pytest.importorskip("tensorboard")


def read(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, value and time of each scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(directory))
    events.Reload()
    return {
        tag: [(each.step, pytest.approx(each.value), each.wall_time) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


class Optimizer:
    param_groups = ({"lr": 0.25}, {"lr": 0.5})

    def __init__(self) -> None:
        self.last_round: RoundRecord | None = None
        self.callbacks: list[Any] = []

    def on_merge(self, callback: Any) -> object:
        self.callbacks.append(callback)
        return callback

    def merge(self, merged: RoundRecord) -> None:
        self.last_round = merged
        for callback in self.callbacks:
            callback()


def test_a_run_is_written_as_it_goes_on(tmp_path: Path) -> None:
    optimizer = Optimizer()
    with TensorBoardWriter(tmp_path) as board:
        board.watch(optimizer)
        optimizer.merge(record(0, (64.0, 32.0), (0.9, 0.5), merged_at=1.0))
        optimizer.merge(record(1, (64.0, 16.0), (1.5, 1.0), merged_at=3.0))
        board.values({"accuracy": 0.75, "note": "text"}, step=1)
    scalars = {tag: [each[:2] for each in values] for tag, values in read(tmp_path).items()}
    assert scalars == {
        "batch/global": [(0, 96.0), (1, 80.0)],
        "batch/rank 0": [(0, 64.0), (1, 64.0)],
        "batch/rank 1": [(0, 32.0), (1, 16.0)],
        "exchange seconds": [(0, 0.01), (1, 0.01)],
        "learning rate/group 0": [(0, 0.25), (1, 0.25)],
        "learning rate/group 1": [(0, 0.5), (1, 0.5)],
        "speed": [(1, 40.0)],
        "idle/rank 0": [(1, 0.25)],
        "idle/rank 1": [(1, 0.5)],
        "accuracy": [(1, 0.75)],
    }


def test_a_log_is_converted_with_its_own_times_and_without_pauses(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl", epochs=(5, 4))
    convert(log, tmp_path / "board")
    scalars = read(tmp_path / "board")
    assert [each[:2] for each in scalars["batch/global"]] == [(r.round, r.batch) for r in log.history]
    times = [each[2] for each in scalars["batch/global"]]
    expected = [log.run.since_1970(line.merged_at) for line in log.rounds]
    assert times == pytest.approx(expected, abs=1e-3)
    assert [each[1] for each in scalars["accuracy"]] == [0.5, 0.6]
    assert [each[1] for each in scalars["learning rate/group 0"]] == [0.1] * len(log.rounds)
    steps = {each[0] for each in scalars["speed"]}
    begun = {0, log.lines.index(log.events[0])}
    assert 0 not in steps
    first_of_second = next(line.round for line in log.rounds if line.merged_at > log.pauses[0][1])
    assert first_of_second not in steps, begun


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"tensorboard is not installed: pip install torch tensorboard"):
        TensorBoardWriter(tmp_path)
