"""Growth tables against measured slopes of block norms."""

import math

import pytest
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.bounds import growth
from curvescope.core.seeds import generator

PARTS = ("outer", "functional")
STEP = 1.02


def make(seed=0, L=6, d=4, d_K=3, d_V=3):
    source = generator(seed)
    shapes = (L, d), (d, d_K), (d, d_K), (d, d_V), (L, d_V)
    return [torch.randn(*s, generator=source, dtype=torch.float64) for s in shapes]


def slopes(at, scale):
    """d log ‖block‖ / d log scale of a curvature `at(scale)`, by pair and part; None where it is zero."""
    low, high = at(scale / STEP), at(scale * STEP)
    found = {}
    for pair in growth.PAIRS:
        for part in PARTS:
            norms = [curvature.frobenius(pair, part).item() for curvature in (low, high)]
            zero = norms == [0.0, 0.0]
            found[pair, part] = None if zero else math.log(norms[1] / norms[0]) / (2 * math.log(STEP))
    return found


def check(table, measured, tolerance):
    for (pair, part), slope in measured.items():
        want = table.slope(pair, part)
        assert (slope is None) == (want is None), (pair, part)
        assert slope is None or abs(slope - want) < tolerance, (pair, part, slope, want)


@pytest.mark.parametrize("scale", [1e-3, 1e-2])
def test_data(scale):
    X, *W, G = make()
    check(growth.DATA, slopes(lambda s: attention.curvature(s * X, *W, G, 0.1), scale), 0.02)


def test_data_with_tokens_of_mean_zero():
    X, *W, G = make(1)
    X = X - X.mean(0)
    check(growth.DATA_CENTERED, slopes(lambda s: attention.curvature(s * X, *W, G, 0.1), 1e-2), 0.02)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0])
def test_data_of_linear_attention_at_every_scale(scale):
    X, *W, G = make(2)
    measured = slopes(lambda s: attention.curvature(s * X, *W, G, 0.1, kind="linear"), scale)
    check(growth.DATA_LINEAR, measured, 1e-9)
    assert growth.DATA_LINEAR.exact


def test_data_behind_a_norm():
    X, *W, G = make(3)

    def at(scale):
        return attention.curvature(
            torch.nn.functional.layer_norm(scale * X, X.shape[1:], eps=0.0), *W, G, 0.1
        )

    check(growth.DATA_NORMALIZED, slopes(at, 5.0), 1e-9)


@pytest.mark.parametrize(("name", "index"), [("WEIGHTS_Q", 0), ("WEIGHTS_K", 1)])
def test_weights_of_the_scores(name, index):
    X, *W, G = make(4)

    def at(scale):
        scaled = [scale * w if i == index else w for i, w in enumerate(W)]
        return attention.curvature(X, *scaled, G, 0.1)

    check(getattr(growth, name), slopes(at, 1e-4), 0.01)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_weights_of_the_values_at_every_scale(scale):
    X, *W, G = make(5)
    check(growth.WEIGHTS_V, slopes(lambda s: attention.curvature(X, *W[:2], s * W[2], G, 0.1), scale), 1e-9)


def test_third_moment_part_of_the_query_key_block_grows_with_the_larger_exponent():
    X, *W, G = make(6)

    def norm(scale):
        terms = attention.curvature(scale * X, *W, G, 0.1).terms(("Q", "K"), "functional")
        return [term.inner(term).sqrt().item() for term in terms]

    low, high = norm(1e-2 / STEP), norm(1e-2 * STEP)
    measured = [math.log(b / a) / (2 * math.log(STEP)) for a, b in zip(low, high, strict=True)]
    assert growth.DATA.exponents(("K", "Q"), "functional") == (5, 3)
    assert measured == pytest.approx([5, 3], abs=0.02)


def test_growth_stays_below_the_bound():
    X, *W, G = make(7)
    for scale in (0.5, 1.0, 2.0, 4.0):
        for (pair, part), slope in slopes(lambda s: attention.curvature(s * X, *W, G, 0.1), scale).items():
            if pair in (("Q", "Q"), ("K", "K")) and slope is not None:
                assert slope < growth.DATA.bound(pair, part)


def lone_gap():
    """A layer, and its smallest gap between two largest scores, with which no second query competes."""
    for seed in range(100):
        X, *W, G = make(seed)
        top = (X @ W[0] @ W[1].T @ X.T / 3**0.5).topk(2).values
        gaps = (top[:, 0] - top[:, 1]).sort().values
        if 0.1 < 1.7 * gaps[0] < gaps[1]:
            return X, W, G, gaps[0].item()
    raise AssertionError


def test_saturated_attention_falls_as_predicted():
    """σ²Δ = 12: slopes 6 − 48, 4 − 24, 5 − 24, 3 − 24 and 2, for a layer with one smallest gap."""
    X, W, G, gap = lone_gap()
    spread = 12.0
    sigma = (spread / gap) ** 0.5
    measured = {}
    for pair in growth.PAIRS:
        for part in PARTS:
            values = [
                attention.curvature(sigma * f * X, *W, G, 0.1).frobenius(pair, part).item()
                for f in (1 / 1.0001, 1.0001)
            ]
            if values[0] > 0:
                measured[pair, part] = math.log(values[1] / values[0]) / (2 * math.log(1.0001))
    for (pair, part), slope in measured.items():
        assert slope == pytest.approx(growth.saturation_slope(pair, part, spread), abs=0.15), (pair, part)
    assert growth.saturation_slope(("Q", "Q"), "outer", 12.0) == -42
    assert growth.saturation_slope(("V", "Q"), "functional", 12.0) == -21
    assert growth.saturation_slope(("V", "V"), "functional", 12.0) is None


def test_moments_name_one_power_for_each_exponent():
    for pair in growth.PAIRS:
        assert len(growth.MOMENTS_OUTER[pair]) == len(growth.DATA.exponents(pair, "outer"))
        assert len(growth.MOMENTS_FUNCTIONAL[pair]) == len(growth.DATA.exponents(pair, "functional"))
    with pytest.raises(TypeError):
        growth.MOMENTS_OUTER["Q", "Q"] = ()  # frozen
    with pytest.raises(AttributeError):
        growth.DATA.exact = True
