"""Scenes with switches: what is marked, whose path is drawn, and that all choices share their axes."""

import numpy as np
import pytest

from curvescope.viz import style
from curvescope.viz.scenes import density
from curvescope.viz.scenes.curves import symbols
from curvescope.viz.style import LOOKS
from curvescope.viz.trajectory import path_scene


@pytest.fixture
def spectrum():
    grid = np.linspace(-2, 2, 21)
    outliers = {float(v): f"outlier {v}" for v in range(1, 21)}
    values, share = np.exp(-(grid**2)), np.linspace(0, 1, 20)
    one = density.Spectrum(
        "Hessian", LOOKS["hessian"], grid, values, (values / 2, 2 * values), grid, share, (share, share),
        {-2.0: "least"}, outliers,
    )  # fmt: skip
    return density.spectra([one, one])


def test_the_farthest_outliers_are_marked(spectrum):
    for variant in spectrum["variants"].values():
        marked = [t for t in variant["data"] if t["name"].startswith("outliers")]
        assert [len(t["x"]) for t in marked] == [density.MOST_APART] * 2
        assert marked[0]["text"][0] == "outlier 20"
        assert marked[0]["y"][0] != marked[1]["y"][0]  # matrices do not lie on each other


def test_every_axis_says_the_true_eigenvalue(spectrum):
    for key, variant in spectrum["variants"].items():
        curve = next(t for t in variant["data"] if t["name"] == "Hessian")
        if key.endswith("linear"):
            assert "customdata" not in curve
            assert "%{x:.4g}" in curve["hovertemplate"]
        else:
            assert "%{customdata}" in curve["hovertemplate"]
            assert len(curve["customdata"]) == len(curve["x"])


def test_paths_are_drawn_one_at_a_time_or_all():
    rng = np.random.default_rng(0)
    words, states = rng.normal(size=(3, 3)), rng.normal(size=(3, 4, 3))
    found = path_scene(words, states, ["a", "b", "a"], ["in", "L0", "L1", "L2"], token=1)
    assert found["controls"] == [{"name": "path", "choices": ["1: b", "all", "0: a", "2: a"]}]
    assert [len(v["data"]) for v in found["variants"].values()] == [2, 4, 2, 2]
    np.testing.assert_allclose(found["data"][1]["x"], states[1, :, 0], atol=1e-5)
    layouts = [v["layout"] for v in found["variants"].values()]
    assert all(layout == layouts[0] for layout in layouts)
    assert layouts[0]["scene"]["zaxis"]["title"]["text"] == "axis 3"


def test_subscripts_are_set():
    assert symbols("λ_max of ‖·‖_F, L0.W_F") == "λ<sub>max</sub> of ‖·‖<sub>F</sub>, L0.W_F"
    assert style.symbols("λ_min of H") == r"$\lambda_{\mathrm{min}}$ of H"
    assert style.symbols("λ_max of the token $") == "λ_max of the token $"
