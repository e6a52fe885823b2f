"""The benchmark of attention: ratios of one round, what one cannot do in words, nothing beyond its time."""

from __future__ import annotations

import math

import pytest
import torch

from curvescope.core.errors import UsageError
from curvescope.studies import attention
from curvescope.studies.attention import contenders
from curvescope.studies.attention.contenders import DERIVATIVES, MATH
from curvescope.studies.attention.study import places

TINY = {"lengths": (8, 16), "widths": (4, 8), "threads": (1,), "rounds": 2}
THREE = ("ours", MATH, "PyTorch fused")


@pytest.fixture(scope="module")
def cost() -> attention.Cost:
    return attention.run(
        attention.Config(**TINY, contenders=(*THREE, "jvp-flash-attention"), dtype="float64")
    )


def test_every_derivative_is_that_of_the_math_path(cost):
    for derivative in DERIVATIVES:
        for mask in ("none", "causal", "boolean", "additive"):
            one = cost.of("ours", derivative, mask=mask, length=8)
            assert one.error < 1e-13
            assert len(one.seconds) == len(one.unit) >= 2
            median, low, high = one.ratio()
            assert 0 < low <= median <= high
        assert cost.of(MATH, derivative).ratio() == (1, 1, 1)


def test_a_contender_that_cannot_says_why(cost):
    for derivative, words in (("jvp", "forward AD"), ("double backward", "is not implemented")):
        one = cost.of("PyTorch fused", derivative)
        assert one.seconds == []
        assert words in one.note
        assert all(math.isnan(x) for x in one.ratio())
    assert cost.of("PyTorch fused", "backward").note == ""
    assert any("jvp-flash-attention" in note for note in cost.notes)
    assert any("cannot" in value for _, value, _ in cost.summary())


def test_the_result_is_shown_and_stored(cost, tmp_path):
    table = cost.tables()["attention"]
    assert len(table) == len(cost.measured)
    assert {"ratio", "low", "high", "peak_MB", "note"} <= set(table)
    figures = cost.figures()
    assert set(figures) | {"attention"} == set(cost.captions())
    assert all(len(figure.axes) == len(DERIVATIVES) for figure in figures.values())
    again = attention.Cost.load(cost.save(tmp_path))
    assert again.tables()["attention"].equals(table)


def test_threads_are_as_they_were_and_each_number_is_used(cost, monkeypatch):
    seen = []
    monkeypatch.setitem(
        contenders.CONTENDERS,
        "ours",
        lambda x: lambda q, k, v: (seen.append(torch.get_num_threads()), q * 1)[1],
    )
    before = torch.get_num_threads()
    sizes = {"lengths": (8,), "widths": (4,), "masks": ("none",), "rounds": 2}
    attention.run(attention.Config(**sizes, threads=(1, 2), contenders=("ours",)))
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == before


def test_what_takes_too_long_is_left_out_and_named():
    sizes = {"widths": (4,), "masks": ("none",), "threads": (1,), "rounds": 2, "contenders": ("ours",)}
    found = attention.run(attention.Config(**sizes, lengths=(8, 2**40), minutes=0.05))
    assert {one.length for one in found.measured} == {8}
    assert found.left_out == [f"{2**40} tokens, width 4, no mask"]
    assert any("left out" in note for note in found.notes)


def test_the_plan_varies_one_setting_at_a_time_or_all():
    short = places(attention.Config())
    assert short == sorted(short, key=lambda place: place.work)
    assert {place.length for place in short} == {64, 128, 256, 512, 1024, 2048, 4096, 8192}
    assert {place.width for place in short} == {32, 64, 128}
    assert {place.mask for place in short} == {"none", "causal", "boolean", "additive"}
    assert {place.threads for place in short} == {1, 2}
    assert set(short) < set(places(attention.Config(full=True)))
    assert len(places(attention.Config(full=True))) == 8 * 3 * 4 * 2
    heads = {place.length: place.heads for place in short}
    assert (heads[64], heads[512], heads[1024], heads[8192]) == (16, 16, 8, 1)


@pytest.mark.parametrize(
    "wrong", [{"contenders": ("theirs",)}, {"masks": ("sliding",)}, {"lengths": (0,)}, {"rounds": 1}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(UsageError):
        attention.Config(**wrong)
