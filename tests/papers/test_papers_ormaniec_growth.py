"""The study of the sweeps: exponents, tables, structural zeros, resuming, drawing."""

import fnmatch
import math

import numpy as np
import pytest
import torch

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.core.seeds import generator, probes
from curvescope.papers.ormaniec2025 import growth
from curvescope.papers.ormaniec2025 import growth_exponents as slopes
from curvescope.papers.ormaniec2025.growth_exponents import GrowthLaw, published_curves
from curvescope.papers.ormaniec2025.growth_sweeps import EXPERIMENTS, estimate

CHEAP = ("mlp_L2", "linattn_none_mse_log_short_L1")


@pytest.fixture(scope="module")
def small():
    """Depth one, an inner layer, linear attention and an MLP, at a handful of scales."""
    names = ("softmax_none_ce_log_L1", "linattn*L2", "mlp_L3")
    return growth.run(growth.Config(experiments=names, repeats=2, every=9, probes=2))


def exponents(result, experiment, regime):
    return {
        (row.block, row.part, row.layer): row
        for row in result.sweeps[experiment].table_of_slopes()
        if row.regime == regime
    }


def test_exponents_of_softmax_attention(small):
    found = exponents(small, "softmax_none_ce_log_L1", "σ ≤ 1")
    expected = {("W_Q", "H_o"): 6, ("W_Q", "H_f"): 5, ("W_Q", "H"): 5, ("W_V", "H_o"): 2, ("W_V", "H"): 2}
    assert {(block, part) for block, part, _ in found} == set(expected)
    for (block, part, _), row in found.items():
        assert row.measured == pytest.approx(expected[block, part], abs=0.05)
        assert row.verdict == "holds"
        assert row.low < row.measured < row.high


def test_exponents_of_linear_attention_and_mlp(small):
    name = "linattn_none_mse_log_short_L2"
    for row in exponents(small, name, "all σ").values():
        assert row.measured == pytest.approx(18, abs=1e-6)  # homogeneous, and one draw is scaled
    for row in exponents(small, name, "small σ").values():
        assert row.measured == pytest.approx(9, abs=0.3)
        assert row.verdict == "fails; σ^9 holds"
    found = exponents(small, "mlp_L3", "all σ").values()
    assert [row.measured for row in found] == pytest.approx([2] * 6, abs=1e-9)


@pytest.mark.parametrize(
    ("experiment", "curve", "low", "high", "slope", "stderr"),
    [
        ("softmax_none_ce_log_L1", ("W_Q", "H_o", 0), 0.01, 1, 6.0053, 0.0084),
        ("softmax_none_ce_log_L5", ("W_V", "H_f", 2), 0.01, 0.1, 3.0606, 0.0241),
        ("softmax_pre_ce_log_L1", ("W_Q", "H", 0), 1, 10, -1.0233, 0.0265),
        ("linattn_none_mse_log_short_L2", ("W_V", "H_f", 0), 0.1, 0.3, 8.9741, 0.0463),
        ("linattn_none_mse_log_short_L3", ("W_Q", "H_o", 0), 0.1, 1, 54.5930, 0.7227),
        ("mlp_L1", ("W", "H", 0), 0.01, 10, 2.0014, 0.0015),
    ],
)
def test_slopes_of_the_published_curves(experiment, curve, low, high, slope, stderr):
    sigma, mean = EXPERIMENTS[experiment].sigmas, published_curves(experiment)[curve].mean
    inside = (sigma > low * 0.999) & (sigma < high * 1.001)
    found = slopes.fit(sigma[inside], mean[inside])
    assert (found.slope, found.stderr) == pytest.approx((slope, stderr), abs=6e-5)


def test_published_curves_are_of_the_sweeps():
    for name, experiment in EXPERIMENTS.items():
        for curve in published_curves(name):
            assert curve in experiment.rows
            assert not experiment.is_zero(*curve)


def test_interval_of_a_slope_covers_the_truth():
    source, sigma, inside = np.random.default_rng(0), np.logspace(-1, 0, 5), 0
    for _ in range(200):
        values = sigma**3 * np.exp(0.2 * source.standard_normal((8, 5)))
        low, high = slopes.interval(sigma, values)
        inside += low < 3 < high
    assert 180 <= inside <= 199
    assert all(math.isnan(end) for end in slopes.interval(sigma, values[:1]))


def test_verdicts():
    law = GrowthLaw("small σ", 0.1, 0.3, claimed=18, expected=9, tolerance=0.3)
    assert slopes.verdict(law, 18.2) == "holds"
    assert slopes.verdict(law, 9.4) == "fails"
    assert slopes.verdict(law, 9.4, lenient=True) == "fails; σ^9 holds"
    assert slopes.verdict(GrowthLaw("small σ", 0, 1, None, 3, 0.05), 3.01) == "not claimed; σ^3"


def test_tables_and_structural_zeros(small):
    tables = small.tables()
    frame = tables["growth"]
    columns = ["experiment", "block", "part", "layer", "sigma", "repeat", "frobenius", "stderr"]
    assert list(frame.columns) == columns
    assert len(frame) == 2 * 3 * 3 * (2 + 4 + 3)
    for row in frame.itertuples():
        zero = EXPERIMENTS[row.experiment].is_zero(row.block, row.part, row.layer)
        assert (row.frobenius == 0.0) == zero
        inner = fnmatch.fnmatch(row.experiment, "linattn*L2") and row.layer == 0
        assert (row.stderr > 0) == inner
    assert {"experiment", "layer", "claimed", "published", "measured", "low", "high", "verdict"} <= set(
        tables["slopes"].columns
    )


def test_an_estimate_meets_its_error_bar():
    A = torch.randn(30, 30, generator=generator(3), dtype=torch.float64)
    misses = []
    for trial in range(200):
        V = probes(30, 12, seed=trial)
        norm, stderr = estimate((A @ V).T[..., None])
        misses.append(float((norm - A.norm()) / stderr))
    assert 0.85 < np.mean(np.abs(misses) < 2) < 0.99
    assert abs(np.mean(misses)) < 0.4  # the root of a mean is a little low
    assert math.isnan(estimate(V.T[:1, :, None])[1])


@pytest.mark.slow
def test_probes_agree_with_exact_norms():
    cfg = {"experiments": ("softmax_none_ce_log_L1",), "repeats": 1, "every": 10, "probes": 20}
    exact, estimated = (growth.run(growth.Config(**cfg, exact=e)) for e in (True, False))
    truth, found = (r.sweeps["softmax_none_ce_log_L1"] for r in (exact, estimated))
    assert (truth.stderr == 0).all()
    assert (np.abs(found.frobenius - truth.frobenius) <= 5 * found.stderr).all()


@pytest.mark.slow
def test_a_killed_sweep_resumes_with_the_same_numbers():
    cfg = growth.Config(experiments=(*CHEAP, "softmax_none_ce_log_L2"), repeats=1, every=19, probes=1)
    whole, state, seen = growth.run(cfg), {}, []

    def stop(what, number, total):
        seen.append(what)
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        growth.run(cfg, progress=stop, state=state)
    assert list(state) == ["softmax_none_ce_log_L2.r00.s00"]
    kept = state["softmax_none_ce_log_L2.r00.s00"]
    again = growth.run(cfg, state=state)
    assert state["softmax_none_ce_log_L2.r00.s00"] is kept
    assert len(state) == 4
    for name, sweep in whole.sweeps.items():
        assert np.array_equal(sweep.frobenius, again.sweeps[name].frobenius)


def test_what_is_random_follows_the_settings():
    def curve(**options):
        cfg = growth.Config(experiments=("mlp_L2",), repeats=1, every=10, **options)
        return growth.run(cfg).sweeps["mlp_L2"].curve("W", "H", 1)[0]

    scaled = curve()
    assert scaled[1] / scaled[0] == pytest.approx(10 ** (2 * 30 / 19), rel=1e-12)
    assert curve(redraw=True)[1] / curve(redraw=True)[0] != pytest.approx(10 ** (2 * 30 / 19), rel=1e-3)
    assert not np.allclose(curve(seed=1), scaled, rtol=1e-3)


def test_a_stored_result_is_drawn_again(small, tmp_path):
    import matplotlib.pyplot as plt

    loaded = Result.load(small.save(tmp_path))
    figures = loaded.figures()
    assert set(figures) == {f"growth_{name}" for name in small.sweeps}
    assert set(figures) | {"growth", "slopes"} == set(loaded.captions())
    texts = [text.get_text() for ax in figures["growth_softmax_none_ce_log_L1"].axes for text in ax.texts]
    assert "exactly 0" in texts
    assert len(figures["growth_mlp_L3"].axes) == 1
    for figure in figures.values():
        plt.close(figure)
    assert loaded.claims() == small.claims()
    assert loaded.summary()[-1][1] == "0"


def test_what_is_refused():
    with pytest.raises(UsageError, match=r"^experiments: .*'softmax_L1'"):
        growth.Config(experiments=("softmax_L1",))
    with pytest.raises(UsageError, match="repeats: expected at least 1"):
        growth.Config(repeats=0)
    with pytest.raises(UsageError, match=r"^replay: .*\b20 repeats"):
        growth.Config(replay=True, repeats=21)
    with pytest.raises(UsageError, match="draws at every scale"):
        growth.Config(replay=True, redraw=False)


def test_profiles():
    quick, full = growth.Config(), growth.Config(profile="full")
    assert (quick.num_repeats, quick.num_probes, quick.step) == (3, 4, 2)
    assert (full.num_repeats, full.num_probes, full.step) == (20, 4, 1)
    assert growth.Config(profile="full", device="cuda").num_probes == 20
