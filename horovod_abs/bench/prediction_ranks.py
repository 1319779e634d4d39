"""What each rank of the prediction benchmark runs, given a setting and a folder for rank 0 to write to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import horovod_abs.torch as hvd
from horovod_abs.bench.prediction import PREDICTED, Setting
from horovod_abs.bench.utilisation_ranks import RUNS, Device, synchronous
from horovod_abs.emulate import Pace
from horovod_abs.observe.progress import open_bar


def main() -> None:
    """Record a synchronous run, then measure each algorithm on each cluster; rank 0 writes samples a second."""
    setting, folder = Setting.from_json(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured: dict[str, dict[str, list[float]]] = {
        name: {algorithm: [] for algorithm in PREDICTED} for name in setting.clusters
    }
    runs = [(name, algorithm) for _ in range(setting.repeats) for name in setting.clusters for algorithm in PREDICTED]
    with open_bar(1 + len(runs), enabled=hvd.rank() == 0) as bar:
        bar.set_description_str("recording ")
        recorded = setting.recorded_of_steps()
        synchronous(recorded, _device(setting, setting.recorded_ms), lambda: None, record=folder / "plain.jsonl")
        bar.update(1)
        for name, algorithm in runs:
            bar.set_description_str(f"{name}, {algorithm} ")
            times = setting.clusters[name]
            summary = RUNS[algorithm](setting.at(times), _device(setting, times), lambda: None)
            measured[name][algorithm].append(summary.samples_per_second)
            bar.update(1)
    if hvd.rank() == 0:
        (folder / "measured.json").write_text(json.dumps(measured))


def _device(setting: Setting, milliseconds: tuple[float, ...]) -> Device:
    pace = Pace(1e-3 * milliseconds[hvd.rank()], rank=hvd.rank())
    return Device(setting.at(milliseconds), pace)


if __name__ == "__main__":
    main()
