"""A limit of memory changes what is kept, and not the numbers."""

from __future__ import annotations

import pytest
from monitor_loops import IDS, PROBE, TARGETS, tiny

import curvescope as cs
from curvescope.monitor.measurement import Effort
from curvescope.monitor.memory_limit import parse_size, plan_memory

QUICK = {"every": 1, "budget": 1.0, "blocks": False}
EFFORT = Effort(top=3, tol=0.01, num_probes=8, max_products=60, seed=0)


def problem():
    return cs.Problem(tiny(), [(IDS, TARGETS)])


def test_sizes_are_read():
    assert parse_size("1 GiB") == 2**30
    assert parse_size("1.5MiB") == 3 * 2**19
    assert parse_size(1000) == 1000
    for wrong in ("much", "1 XB", 0, -1, True, 1.5):
        with pytest.raises(cs.UsageError, match="memory"):
            parse_size(wrong)


def test_what_is_planned_is_within_the_limit():
    whole = plan_memory(problem(), EFFORT, None)
    assert whole.effort == EFFORT
    assert whole.batches is None
    few = plan_memory(problem(), EFFORT, 120_000)
    assert few.effort.max_basis < EFFORT.max_basis
    vectors = 2 * few.effort.max_basis + 3 * few.effort.num_probes
    assert vectors * 8 * 236 <= 120_000


def test_a_limit_leaves_the_numbers(capsys):
    rows = []
    for memory in (None, "200 KiB"):
        monitor = cs.CurvatureMonitor(
            tiny(), [(IDS, TARGETS)], memory=memory, num_probes=4, raise_errors=True, **QUICK
        )
        rows.append(monitor.measure(0))
        assert sum("beside the training" in note for note in monitor.notes) == 1
    for name in ("loss", "grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-9)
    for name in ("lambda_max", "lambda_min"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=0.02, abs=0.02 * rows[0]["lambda_max"])


def test_too_little_is_said_with_what_is_needed():
    with pytest.raises(cs.UsageError, match="expected memory of at least"):
        cs.CurvatureMonitor(tiny(), PROBE, memory="1 KiB")
