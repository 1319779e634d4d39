"""Hypothesis profiles: ``ci`` is fixed and repeatable; ``long`` (``make test-schedules``) looks for new schedules."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=1500, derandomize=False)
settings.load_profile("ci")
