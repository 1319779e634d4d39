from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import network
from horovod_abs.bench.cli import app
from horovod_abs.bench.hosts import unavailable
from horovod_abs.bench.network import QUICK, Setting


def test_the_limit_is_the_rings() -> None:
    assert Setting().limit(4) == pytest.approx(0.528)
    assert Setting().limit(2) == pytest.approx(0.264)
    assert Setting(hosts=2, rate="100mbit", parameters=1_000_000).limit(4) == pytest.approx(0.32)


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("64kbit", 64e3)])
def test_rates(rate: str, bits: float) -> None:
    assert network.bits_per_second(rate) == bits


@pytest.mark.parametrize("values", [{"rate": "fast"}, {"rate": "0gbit"}, {"rate": "1.2.3gbit"}, {"rate": "1gb"}])
def test_bad_rates_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not a rate such as"):
        Setting(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"hosts": 1}, {"repeats": 0}, {"ways": ()}, {"ways": ("gloo", "pigeon")}])
def test_bad_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least|among"):
        Setting(**values)  # type: ignore[arg-type]


def test_report_is_against_the_limit_and_alone() -> None:
    seconds = {"float32": [0.6, 0.528, 0.5], "parts": [0.7, 0.7, 0.7], "float16": [0.33, 0.33, 0.9]}
    each = {
        "seconds": seconds,
        "processor_seconds": 0.1,
        "sockets": 0.55,
        "micro_batch_alone": 0.02,
        "micro_batch_beside": 0.025,
        "exchange_beside": 0.8,
    }
    result = network.report(Setting(), {"mpi-ring": each, "gloo": {**each, "sockets": 0.57}})
    ring = result["ways"]["mpi-ring"]
    assert ring["seconds"] == {"float32": 0.528, "parts": 0.7, "float16": 0.33}
    assert ring["of_limit"] == {"float32": pytest.approx(1.0), "float16": pytest.approx(1.25)}
    assert ring["micro_batch_factor"] == pytest.approx(1.25)
    assert result["sockets"] == pytest.approx(0.56)
    assert json.loads(json.dumps(result))["limits"]["float32"] == pytest.approx(0.528)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rate", "fast"], "not a rate"), (["--ways", "mail"], "among"), (["--parameters", "x"], "whole number")],
)
def test_bad_options_are_refused_before_anything_is_started(arguments: list[str], message: str) -> None:
    outcome = CliRunner().invoke(app, ["network", *arguments], env={"COLUMNS": "200"})
    assert outcome.exit_code == 2
    assert message in outcome.output


@pytest.mark.hosts
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_exchanges_over_hosts_keep_to_the_limit(tmp_path: Path) -> None:
    """A link that is not shaped would be faster than the limit; what goes around the ring but once is near sockets."""
    if reason := unavailable():
        pytest.skip(reason)
    path = tmp_path / "network.json"
    outcome = CliRunner().invoke(app, ["network", "--quick", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(path.read_text())
    assert result["setting"]["ways"] == list(QUICK.ways)
    for way in result["ways"].values():
        assert way["of_limit"]["float32"] > 0.95
        assert way["seconds"]["float32"] < 3 * result["sockets"]
    assert result["sockets"] > 0.95 * result["limits"]["float32"]
