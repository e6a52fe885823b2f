"""Scenes: numbers are where they should be, colors keep signs, switches are complete."""

import itertools
import math

import matplotlib as mpl
import numpy as np
import pytest

from curvescope.viz import style
from curvescope.viz.scenes import Cell, Curve, curves, grid_map, layer_map, said, switched
from curvescope.viz.scenes.curves import SignedLog, log_axis, numbers
from curvescope.viz.scenes.density import DENSITY, SHARE, Spectrum, spectra


def test_every_combination_of_choices_has_a_variant_and_the_first_is_the_scene():
    found = switched({"a": ["x", "y"], "b": ["1", "2"]}, lambda a, b: {"data": [a + b], "layout": {}})
    assert list(found["variants"]) == ["x|1", "x|2", "y|1", "y|2"]
    assert found["variants"]["y|1"] == {"data": ["y1"], "layout": {}}
    assert found["data"] == ["x1"]
    assert "controls" not in switched({"a": ["x"]}, lambda a: {"data": [a], "layout": {}})


def test_what_is_not_finite_is_none():
    assert numbers([1.0, math.nan, math.inf]) == [1.0, None, None]
    assert said(21812.3, 1043.0) == "21,800 ± 1,000"
    assert said(math.nan) == "–"


def test_a_signed_logarithm_is_odd_ordered_and_ticked_with_true_values():
    scale = SignedLog(1e-3)
    x = np.array([-100.0, -1.0, -1e-5, 0.0, 1e-5, 1.0, 100.0])
    places = scale.of(x)
    assert (np.diff(places) > 0).all()
    np.testing.assert_allclose(places, -places[::-1])
    assert places[-1] == pytest.approx(math.log10(100 / 1e-3), abs=1e-4)
    ticks = scale.ticks(-100, 100)
    assert ticks["ticktext"][0] == "−100"
    assert ticks["tickvals"] == numbers(scale.of([-100, -1, 0, 1, 100]))[:1] + ticks["tickvals"][1:]
    assert "0" in ticks["ticktext"]


def test_a_map_of_layers_puts_blocks_in_their_places():
    values = {"E": -3.0, "L0.W_Q": 1.0, "L1.W_Q": 10.0, "L1.b_Q": math.nan, "U": 100.0}
    cells = {name: Cell(value, name) for name, value in values.items()}
    found = layer_map(cells, label="trace", colors="signed")
    inside, beside = found["data"]
    assert inside["text"] == [["L0.W_Q", "L1.W_Q"], ["", "L1.b_Q"]]
    assert beside["text"] == [["E"], ["U"]]
    scale = SignedLog(100 * 1e-4)
    assert inside["z"] == [numbers(scale.of([1.0, 10.0])), [None, None]]
    assert beside["z"][0][0] < 0
    assert found["layout"]["coloraxis"]["cmin"] == -found["layout"]["coloraxis"]["cmax"]
    assert found["layout"]["yaxis"]["ticktext"] == ["W_Q", "b_Q"]


def test_many_layers_have_few_labels():
    cells = {f"L{i}.W_Q": Cell(1.0 + i, "") for i in range(96)}
    axis = layer_map(cells, label="", colors="log")["layout"]["xaxis"]
    assert axis["ticktext"][:2] == ["0", "4"]
    assert len(axis["tickvals"]) == 24


def test_a_logarithmic_map_leaves_out_what_is_not_positive():
    found = grid_map(["a"], ["x", "y", "z"], [[Cell(10.0, ""), Cell(0.0, ""), None]], label="")
    assert found["data"][0]["z"] == [[1.0, None, None]]
    assert grid_map(["a"], ["x"], [[None]], label="")["data"] == []


def test_a_curve_has_its_numbers_and_the_ends_of_its_intervals():
    y = np.array([1.0, math.nan, 3.0])
    curve = Curve("c", np.arange(3.0), y, ["a", "b", "c"], y - 0.5, y + 1)
    (trace,) = curves([curve], x={}, y={})["data"]
    assert trace["y"] == [1.0, None, 3.0]
    assert (trace["error_y"]["array"], trace["error_y"]["arrayminus"]) == ([1.0, 0.0, 1.0], [0.5, 0.0, 0.5])
    assert log_axis("", [1.0, -1.0]).get("type") is None


def test_spectra_keep_signs_on_every_axis():
    grid = np.linspace(-2.0, 4.0, 7)
    band = (np.full(7, 0.1), np.full(7, 0.3))
    shares = np.array([0.25, 1.0])
    one = Spectrum(
        "H", style.LOOKS["hessian"], grid, np.full(7, 0.2), band, np.array([-2.0, 0.0, 4.0]), shares,
        (shares, shares), {4.0: "top", -2.0: "bottom"}, {},
    )  # fmt: skip
    found = spectra([one])["variants"]
    line = next(t for t in found[f"{DENSITY}|linear"]["data"] if t["name"] == "H")
    assert line["x"] == numbers(grid)
    moved = next(t for t in found[f"{DENSITY}|symlog"]["data"] if t["name"] == "H")
    assert moved["x"] == numbers(SignedLog(4e-3).of(grid))
    assert moved["customdata"] == numbers(grid, 4)
    sides = {t["name"]: t["x"] for t in found[f"{DENSITY}|log"]["data"] if t["name"].startswith("H")}
    assert sides["H"] == [1.0, 2.0, 3.0, 4.0]
    assert sides["H, λ < 0"] == [2.0, 1.0]
    steps = next(t for t in found[f"{SHARE}|linear"]["data"] if t["name"] == "H")
    assert (steps["x"], steps["y"]) == ([-2.0, 0.0, 0.0, 4.0], [0.25, 0.25, 1.0, 1.0])


def test_a_density_is_solid_only_where_its_shape_is_known():
    grid, values = np.linspace(-1.0, 1.0, 5), np.full(5, 0.2)
    known = np.array([False, False, True, True, False])
    unknown = np.full(5, np.nan)
    one = Spectrum(
        "H", style.LOOKS["hessian"], grid, values, (unknown, unknown), np.array([-1.0, 1.0]), np.ones(1),
        (np.ones(1), np.ones(1)), {}, {}, (values / 2, values * 2), known,
    )  # fmt: skip
    traces = spectra([one])["variants"][f"{DENSITY}|linear"]["data"]
    solid, dotted = (
        next(t for t in traces if t["name"].startswith("H") and t.get("line", {}).get("dash") == dash)
        for dash in ("solid", "dot")
    )
    assert [y is not None for y in solid["y"]] == known.tolist()
    assert [y is not None for y in dotted["y"]] == (~known).tolist()
    (band,) = [t for t in traces if t.get("fill") == "toself"]
    assert (min(band["y"]), max(band["y"])) == pytest.approx((0.1, 0.4))


SEEN = {  # linear RGB as people without one kind of cone see it (Machado and others 2009)
    "all cones": np.eye(3),
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(color, seen):
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    c = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = to_xyz @ np.clip(np.asarray(seen) @ c, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("cones", SEEN)
def test_colors_are_told_apart(cones):
    for a, b in itertools.combinations(style.PALETTE, 2):
        assert np.linalg.norm(lab(a, SEEN[cones]) - lab(b, SEEN[cones])) > 20, (a, b)


def test_colors_are_told_apart_in_gray():
    light = sorted(lab(color, np.eye(3))[0] for color in style.PALETTE)
    assert min(np.diff(light)) > 9


def test_the_style_is_on_inside_its_context_only():
    before = mpl.rcParams["axes.spines.top"]
    with style.context():
        assert mpl.rcParams["axes.spines.top"] is False
        assert mpl.rcParams["axes.prop_cycle"].by_key()["color"][:5] == list(style.PALETTE)
    assert mpl.rcParams["axes.spines.top"] is before
    assert style.line("ggn") == {"color": style.ORANGE, "ls": "--", "marker": "s"}
