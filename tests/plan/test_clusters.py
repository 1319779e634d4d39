"""Clusters: presets, files, and messages about what is wrong in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horovod_abs.plan.clusters import PRESETS, ClusterError, load
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Network
from horovod_abs.sim.speeds import Bursts, Cost, Drift, Noise, RankModel, Stall

WHOLE = """
[micro_batch]
samples = 32
fixed_ms = 2.0
sample_ms = 0.5

[network]
latency_ms = 0.1
mbit = [1000, 100, 1000]
algorithm = "tree"
overlap = false

[[ranks]]
count = 2
speed = 0.5
jitter = 0.1
stragglers = { probability = 0.02, factor = 4, spread = 0.3 }

[[ranks]]
bursts = { every_s = 10, lasting_s = 5, factor = 3.0 }
drift = { factor = 1.5, over_s = 600.0 }

[[failures]]
rank = 0
at_s = 30
pause_s = 5

[[failures]]
rank = 1
at_s = 60
leaves = true
"""


def file(folder: Path, text: str) -> Path:
    path = folder / "lab.toml"
    path.write_text(text)
    return path


def test_a_file_with_everything(tmp_path: Path) -> None:
    cost, noise = Cost(0.002, 0.0005), Noise(0.1, 0.02, 4.0, 0.3)
    assert load(file(tmp_path, WHOLE)) == ClusterModel(
        "lab",
        (
            RankModel(cost, 0.5, noise, stalls=(Stall(30.0, 5.0),)),
            RankModel(cost, 0.5, noise, leaves=60.0),
            RankModel(cost, loads=(Bursts(10.0, 5.0, 3.0), Drift(1.5, 600.0))),
        ),
        Network(0.0001, (1000.0, 100.0, 1000.0), "tree", overlap=False),
        samples=32,
    )


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("permanent", [800, 800, 400, 200]),
        ("transient", [800 * (2 / 3 + 1 / 3 / 3)] * 4),
        ("mixed", [speed * 800 * (2 / 3 + 1 / 3 / 3) for speed in (1, 1, 0.5, 0.25)]),
    ],
)
def test_presets(name: str, rates: list[float]) -> None:
    cluster = load(name)
    assert name in PRESETS
    assert (cluster.name, cluster.size, cluster.samples) == (name, 4, 16)
    assert [cluster.mean_rate(rank) for rank in range(4)] == pytest.approx(rates)
    assert cluster.ideal == pytest.approx(sum(rates))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("speed = 0.5", "speed = -0.5", r"ranks\[0\]\.speed: -0\.5 is not a number of above 0. Remedy: write a number"),
        ("speed = 0.5", "sped = 0.5", r"ranks\[0\]\.sped: there is no such key. Remedy: use one of bursts, count, "),
        ("count = 2", "count = 1.5", r"ranks\[0\]\.count: 1\.5 is not a whole number of at least 1"),
        ("factor = 3.0", 'factor = "3"', r"ranks\[1\]\.bursts\.factor: '3' is not a number of above 0"),
        ("lasting_s = 5, ", "", r"ranks\[1\]\.bursts\.lasting_s: it is missing. Remedy: write lasting_s = "),
        ('"tree"', '"star"', r"network\.algorithm: 'star' is not \"ring\" or \"tree\""),
        ("overlap = false", 'overlap = "no"', r"network\.overlap: 'no' is neither true nor false"),
        ("[1000, 100, 1000]", "[1000, 0, 1000]", r"network\.mbit: \[1000, 0, 1000\] are not all positive numbers"),
        ("[1000, 100, 1000]", "[1000, 100]", r"2 links for 3 ranks"),
        ("sample_ms = 0.5", "sample_ms = 0.0\nfixed_ms = 0.0", r"is not TOML: "),
        ("fixed_ms = 2.0\nsample_ms = 0.5", "sample_ms = 0.0", r"micro_batch: a micro-batch must take some time"),
        ("probability = 0.02", "probability = 2", r"ranks\[0\]\.stragglers: need .* a probability"),
        ("rank = 1", "rank = 3", r"failures\[1\]\.rank: there is no rank 3. Remedy: write one from 0 to 2"),
        ("leaves = true", "", r"failures\[1\]\.pause_s: a failure needs one of them"),
        ("[[ranks]]", "[[rank]]", r"ranks: there is no rank. Remedy: write a table \[\[ranks\]\]"),
        ("[[failures]]", "[failures.x]", r"failures: .* is not a list of tables. Remedy: write \[\[failures\]\]"),
        ("[network]", "[net]", r"net: there is no such key. Remedy: use one of failures, micro_batch, network, ranks"),
    ],
)
def test_what_is_wrong_is_named_with_key_value_and_remedy(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    assert before in WHOLE
    text = WHOLE.replace(before, after)
    if after == "[failures.x]":
        text = text.replace(after, after, 1).replace("[failures.x]", "[failures.y]", 1)
    with pytest.raises(ClusterError, match=message) as error:
        load(file(tmp_path, text))
    assert "lab.toml" in str(error.value)


def test_neither_preset_nor_file() -> None:
    with pytest.raises(
        ClusterError, match=r"nowhere is no cluster: pass one of permanent, transient, mixed, or the path"
    ):
        load("nowhere")


def test_the_guide_shows_a_file_that_can_be_used(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "notebooks/guides/plan_your_cluster.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    cluster = load(file(tmp_path, text))
    assert [rank.speed for rank in cluster.ranks] == [1.0] * 4 + [0.4] * 4
    assert cluster.ranks[7].stalls == (Stall(30.0, 5.0),)
