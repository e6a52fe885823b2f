"""Spectral densities against known spectra: errors, moments, blocks, batches of columns."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, Counting, diagonal_operator, uniform, with_spectrum
from scipy.integrate import trapezoid

from curvescope.algorithms import SpectralDensity, block_density, spectral_density
from curvescope.algorithms import columns as columns_module
from curvescope.algorithms.spectra import quadrature
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import FunctionOperator, Matrix
from selection import some


def broadened(grid, eigenvalues, width):
    z = (grid[:, None] - eigenvalues) / width
    return np.exp(-0.5 * z**2).mean(axis=1) / (width * np.sqrt(2 * np.pi))


@cache
def estimated(name):
    return spectral_density(with_spectrum(SPECTRA[name]), num_probes=24, num_steps=40)


@pytest.mark.parametrize(
    "name", some(["outliers", "normal", "indefinite", "rank three", "repeated", "even"], 1)
)
def test_density_is_within_its_error(name):
    eigenvalues, found = SPECTRA[name], estimated(name)
    assert found.nodes.shape == found.weights.shape == (24, 40)
    assert not found.exact
    assert found.num_products == 24 * 40
    assert trapezoid(found.density, found.grid) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(found.weights.sum(axis=1), 1)
    moments = np.array([np.mean(eigenvalues**p) for p in range(1, 5)])
    assert (np.abs(found.moments - moments) <= 4 * found.moments_stderr + 1e-12).all()
    exact = broadened(found.grid, eigenvalues, found.width)
    # four standard errors, and what 40 nodes cannot resolve
    assert (np.abs(found.density - exact) <= 4 * found.stderr + 0.01 * exact.max()).mean() > 0.99
    span = np.ptp(eigenvalues)
    assert found.wasserstein(eigenvalues) < 0.02 * span
    np.testing.assert_allclose(found.extremes, [eigenvalues.min(), eigenvalues.max()], atol=0.01 * span)
    assert found.extremes[0] >= eigenvalues.min() - 1e-9
    assert found.extremes[1] <= eigenvalues.max() + 1e-9


@pytest.mark.slow
def test_more_probes_bring_it_nearer():
    eigenvalues = SPECTRA["normal"]
    op = with_spectrum(eigenvalues)
    few, many = (spectral_density(op, num_probes=p, num_steps=30) for p in (4, 80))
    assert many.wasserstein(eigenvalues) < few.wasserstein(eigenvalues)
    assert many.wasserstein(eigenvalues) < 0.04
    assert many.moments_stderr[1] < 0.3 * few.moments_stderr[1]


@pytest.mark.parametrize(("num_seeds", "off"), some([(40, 0.5), (150, 0.35)], 0))
def test_error_bars_are_calibrated(num_seeds, off):
    """Over many seeds the errors divided by the error bars have a standard deviation near one."""
    eigenvalues = uniform(-1, 1, 40)
    op = with_spectrum(eigenvalues)
    moments = np.array([np.mean(eigenvalues**p) for p in range(1, 5)])
    at = np.array([-0.5, 0.0, 0.5])
    exact = broadened(at, eigenvalues, 0.2)
    z_moments, z_density = [], []
    for seed in range(num_seeds):
        found = spectral_density(op, num_probes=12, num_steps=9, grid=at, width=0.2, seed=seed)
        z_moments.append((found.moments - moments) / found.moments_stderr)
        z_density.append((found.density - exact) / found.stderr)
    for scores in (np.array(z_moments), np.array(z_density)):
        assert (np.abs(scores.mean(axis=0)) < off).all()
        assert ((scores.std(axis=0) > 0.7) & (scores.std(axis=0) < 1.4)).all()


@pytest.mark.parametrize("name", ["small", "n = 1", "n = 2"])
def test_small_operators_are_exact(name):
    eigenvalues = SPECTRA[name]
    op = Counting(with_spectrum(eigenvalues))
    found = spectral_density(op)
    assert found.exact
    assert found.num_products == op.columns == len(eigenvalues)
    np.testing.assert_allclose(found.nodes, np.sort(eigenvalues)[None], atol=1e-12)
    np.testing.assert_allclose(found.density, broadened(found.grid, eigenvalues, found.width), atol=1e-12)
    np.testing.assert_allclose(found.moments, [np.mean(eigenvalues**p) for p in range(1, 5)], atol=1e-12)
    assert found.wasserstein(eigenvalues) < 1e-12
    assert (found.stderr == 0).all()
    assert (found.moments_stderr == 0).all()
    assert trapezoid(found.density, found.grid) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("name", "value"), [("zero", 0.0), ("identity", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_spectrum_of_one_point(name, value, dtype):
    found = spectral_density(with_spectrum(SPECTRA[name], dtype=dtype))
    np.testing.assert_allclose(found.nodes[found.weights > 1e-6], value, atol=1e-5)
    np.testing.assert_allclose(found.moments, value, atol=1e-5)
    assert trapezoid(found.density, found.grid) == pytest.approx(1, abs=1e-4)
    assert found.grid[found.density.argmax()] == pytest.approx(value, abs=found.width)


def test_cdf_counts_eigenvalues():
    eigenvalues = SPECTRA["small"]
    exact = spectral_density(with_spectrum(eigenvalues))
    at = np.array([-2.0, -0.3, 0.0, 0.4, 2.0])
    np.testing.assert_allclose(exact.cdf(at), (eigenvalues[:, None] <= at).mean(axis=0))
    assert float(exact.cdf(10.0)) == pytest.approx(1)
    at = np.linspace(-2, 2, 9)
    np.testing.assert_allclose(
        estimated("normal").cdf(at), (SPECTRA["normal"][:, None] <= at).mean(axis=0), atol=0.03
    )


@pytest.mark.parametrize("dtype", some([torch.float64, torch.float32], 1))
def test_blocks_equal_their_own_densities(dtype):
    A = with_spectrum(uniform(-1, 2, 160), dtype=dtype).A
    slices = {"a": slice(0, 70), "b": slice(70, 78), "c": slice(80, 160), "b and c": slice(70, 160)}
    op = Counting(Matrix(A, symmetric=True))
    options = {"num_probes": 5, "num_steps": 12, "seed": 4}
    together = block_density(op, slices, **options)
    assert list(together) == list(slices)
    assert op.calls == 12 + 1  # all probes of all large blocks in lock step, and the small block written out
    tight = 1e-10 if dtype is torch.float64 else 1e-4
    for name, rows in slices.items():
        alone = spectral_density(Matrix(A[rows, rows].contiguous(), symmetric=True), **options)
        found = together[name]
        assert found.size == alone.size == rows.stop - rows.start
        assert found.exact == alone.exact == (name == "b")
        assert found.num_products == alone.num_products
        np.testing.assert_allclose(found.nodes, alone.nodes, atol=tight)
        np.testing.assert_allclose(found.density, alone.density, atol=tight * alone.density.max())
        np.testing.assert_allclose(found.moments_stderr, alone.moments_stderr, atol=tight)


def test_blocks_of_the_operators_space_by_default():
    op = with_spectrum(uniform(0, 1, 50))
    op.space = SimpleNamespace(slices={"x": slice(0, 20), "y": slice(20, 50)})
    found = block_density(op, num_steps=10)
    assert set(found) == {"x", "y"}


@pytest.mark.parametrize("most", [1, 3])
def test_batches_of_columns_change_nothing(monkeypatch, most):
    op = Counting(with_spectrum(uniform(-1, 2, 90)))
    slices = {"a": slice(0, 40), "b": slice(40, 90), "small": slice(0, 5)}
    options = {"num_probes": 4, "num_steps": 8}
    whole = block_density(op, slices, **options)
    monkeypatch.setattr(columns_module, "MAX_COLUMNS", most)
    op.widest = 0
    parts = block_density(op, slices, **options)
    assert op.widest == most
    for name in slices:
        np.testing.assert_allclose(parts[name].nodes, whole[name].nodes, atol=1e-12)
        np.testing.assert_allclose(parts[name].density, whole[name].density, atol=1e-10)


def test_memory_bounds_the_probes_run_together():
    op = Counting(with_spectrum(uniform(-1, 2, 100)))
    one_basis = 100 * 11 * 8 / 2**30
    whole = spectral_density(op, num_probes=4, num_steps=10)
    op.widest = 0
    parts = spectral_density(op, num_probes=4, num_steps=10, max_gib=2.5 * one_basis)
    assert op.widest == 2
    np.testing.assert_allclose(parts.nodes, whole.nodes, atol=1e-12)
    with pytest.raises(
        UsageError, match=r"basis of one probe of the operator takes .* reorthogonalize=False"
    ):
        spectral_density(op, num_probes=4, num_steps=10, max_gib=0.5 * one_basis)
    spectral_density(op, num_probes=4, num_steps=10, max_gib=0.5 * one_basis, reorthogonalize=False)


def test_bases_of_probes_that_are_done_are_let_go(monkeypatch):
    begun, alive, start = [], [], quadrature._started

    def started(*args):
        found = start(*args)
        begun.append(weakref.ref(found))
        return found

    def product(V):
        alive.append(sum(ref() is not None for ref in begun))
        return 2 * V

    monkeypatch.setattr(quadrature, "_started", started)
    op = FunctionOperator(product, (100, 100), symmetric=True)
    spectral_density(op, num_probes=3, num_steps=5, max_gib=1.5 * 100 * 6 * 8 / 2**30)
    assert len(begun) == 3
    assert set(alive) == {1}


def test_more_probes_extend_a_run():
    op = with_spectrum(SPECTRA["normal"])
    few, many = (spectral_density(op, num_probes=p, num_steps=10) for p in (3, 6))
    np.testing.assert_allclose(many.nodes[:3], few.nodes, atol=1e-12)


def test_without_reorthogonalization_the_measure_is_the_same():
    eigenvalues = SPECTRA["outliers"]
    op = with_spectrum(eigenvalues)
    with_it, without = (spectral_density(op, num_probes=3, reorthogonalize=flag) for flag in (True, False))
    np.testing.assert_allclose(without.moments, with_it.moments, rtol=1e-6)
    assert abs(without.wasserstein(eigenvalues) - with_it.wasserstein(eigenvalues)) < 0.02
    np.testing.assert_allclose(without.density, with_it.density, atol=0.02 * with_it.density.max())


def test_grid_and_width_are_obeyed():
    op = with_spectrum(SPECTRA["normal"])
    assert spectral_density(op, grid=77, num_probes=2, num_steps=10).grid.shape == (77,)
    points = np.linspace(-1, 1, 11)
    found = spectral_density(op, grid=points, width=0.3, num_probes=1)
    np.testing.assert_array_equal(found.grid, points)
    assert found.width == 0.3
    assert np.isnan(found.stderr).all()  # one probe does not know its error


def test_saved_framed_and_drawn(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    found = spectral_density(with_spectrum(SPECTRA["normal"]), num_probes=4, num_steps=20)
    again = SpectralDensity.load(found.save(tmp_path))
    np.testing.assert_array_equal(again.nodes, found.nodes)
    assert again.width == found.width
    assert list(found.to_frame().columns) == ["eigenvalue", "density", "stderr"]
    ax = found.plot(label="all")
    assert ax.get_yscale() == "log"
    assert "eigenvalue" in ax.get_xlabel()
    assert "density" in ax.get_ylabel()
    drawn = [line.get_ydata() for line in ax.lines if len(line.get_ydata()) == len(found.density)]
    np.testing.assert_array_equal(np.nanmax(drawn, axis=0), found.smoothed()[1])  # solid and dotted parts
    assert 1 <= len(ax.collections) <= 2  # the error band, and what is not resolved
    top = ax.get_ylim()[1]
    lower = spectral_density(with_spectrum(5 * SPECTRA["normal"]), num_probes=4, num_steps=20)
    assert lower.plot(ax) is ax
    assert ax.get_ylim()[1] == top  # a second curve leaves the first in view
    assert found.plot(log_y=False).get_yscale() == "linear"
    spectral_density(with_spectrum(SPECTRA["n = 1"])).plot()
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_probes": 0}, "num_probes of at least 1, got 0"),
        ({"num_steps": 2}, "num_steps of at least 3, got 2"),
        ({"grid": 1}, "grid of at least 2"),
        ({"grid": np.array([[0.0]])}, "a grid of finite points"),
        ({"width": 0.0}, "width above 0"),
        ({"max_gib": -1.0}, "max_gib above 0"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError, match=text):
        spectral_density(with_spectrum(SPECTRA["small"]), **options)


def test_wrong_operators_and_blocks():
    op = with_spectrum(SPECTRA["small"])
    with pytest.raises(UsageError, match="spectral_density needs a symmetric operator"):
        spectral_density(Matrix(torch.rand(4, 4, dtype=torch.float64)))
    with pytest.raises(UsageError, match="no space of named blocks"):
        block_density(op)
    with pytest.raises(UsageError, match="at least one block"):
        block_density(op, {})
    for wrong in (slice(5, 5), slice(0, 31), slice(-3, None), slice(0, 10, 2), 3):
        with pytest.raises(ShapeError, match="expected block 'a'"):
            block_density(op, {"a": wrong})
    assert block_density(op, {"a": slice(None, None)})["a"].size == 30


@pytest.mark.parametrize(
    ("exponent", "dtype"), [(-700, torch.float64), (230, torch.float64), (-100, torch.float32)]
)
@pytest.mark.parametrize("reorthogonalize", [True, False])
def test_the_size_of_an_operator_does_not_matter(exponent, dtype, reorthogonalize):
    A, size = with_spectrum(SPECTRA["outliers"], dtype=dtype).A, 2.0**exponent
    options = {"num_probes": 2, "num_steps": 8, "reorthogonalize": reorthogonalize}
    right = spectral_density(Matrix(A, symmetric=True), **options)
    found = spectral_density(Matrix(A * size, symmetric=True), **options)
    np.testing.assert_allclose(found.nodes / size, right.nodes, rtol=1e-9)
    np.testing.assert_allclose(found.weights, right.weights, rtol=1e-9)


@pytest.mark.parametrize("reorthogonalize", some([False, True], 1))
def test_two_million_rows_with_outliers(reorthogonalize):
    """The bulk keeps its weight and its shape beside eigenvalues a million times larger."""
    op = diagonal_operator(2_000_000, [1000.0, -400.0], bulk=1e-3)
    found = spectral_density(op, num_probes=2, num_steps=6, reorthogonalize=reorthogonalize)
    np.testing.assert_allclose(found.extremes, [-400, 1000], rtol=1e-5)
    assert found.share_near_zero(0.01).value == pytest.approx(1, abs=1e-5)
    n = op.shape[0]
    np.testing.assert_allclose(found.moments[0], 1e-3 + 600 / n, rtol=1e-3)
    np.testing.assert_allclose(found.moments[1], (1000**2 + 400**2) / n, rtol=1e-3)


def test_float32_stays_float32():
    seen = set()

    def product(V):
        seen.add(V.dtype)
        return 2 * V

    op = FunctionOperator(product, (100, 100), dtype=torch.float32, symmetric=True)
    spectral_density(op, num_probes=2, num_steps=5)
    assert seen == {torch.float32}


@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("scale", [1e-310, 1e308])
def test_eigenvalues_at_the_end_of_what_numbers_can_be_are_refused(n, scale):
    op = Matrix(torch.diag(scale * torch.linspace(-1, 1, n, dtype=torch.float64)), symmetric=True)
    with pytest.raises(UsageError, match=r"have no density in float64"):
        spectral_density(op, num_probes=1, num_steps=20)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_far_from_one_the_area_is_one_and_moments_are_the_nearest_numbers(scale):
    near, far = (
        spectral_density(
            Matrix(torch.diag(c * torch.linspace(-1, 1, 90, dtype=torch.float64)), symmetric=True),
            num_probes=2,
            num_steps=30,
        )
        for c in (1.0, scale)
    )
    assert trapezoid(far.density, far.grid) == pytest.approx(1, abs=1e-5)
    assert far.moments[0] == pytest.approx(near.moments[0] * scale, rel=1e-9, abs=1e-12 * scale)
    assert far.moments[1] == far.moments[3] == (0 if scale < 1 else np.inf)
    assert not np.isnan(far.moments).any()


@pytest.mark.parametrize("num_steps", [20, 60], ids=["Lanczos", "exact"])
def test_a_matrix_that_is_nothing_but_rounding_has_no_eigenvalue_but_zero(num_steps):
    """Rounding is not symmetric; beside it stands a block that is small and real."""
    A = torch.zeros(110, 110, dtype=torch.float64)
    A[:60, :60] = 1e-9 * torch.randn(60, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A[60:, 60:] = 1e-9 * with_spectrum(uniform(0.5, 2, 50)).A
    blocks = {"rounding": slice(0, 60), "real": slice(60, 110)}
    found = block_density(Matrix(A, symmetric=True), blocks, num_probes=3, num_steps=num_steps)
    assert found["rounding"].exact == (num_steps == 60)
    assert not found["rounding"].nodes.any()
    assert not found["rounding"].extremes.any()
    assert not found["rounding"].moments.any()
    assert found["real"].extremes[1] == pytest.approx(1e-9 * uniform(0.5, 2, 50).max(), rel=0.05)


def test_an_algorithm_within_an_algorithm_does_not_look_at_the_matrix_again():
    class Looked(Matrix):
        times = 0

        @contextmanager
        def frozen(self):
            self.times += 1
            yield

    op = Looked(torch.diag(torch.arange(50.0, dtype=torch.float64)), symmetric=True)
    spectral_density(op, num_probes=2, num_steps=5)
    assert op.times == 1
    spectral_density(op, num_probes=2, num_steps=5)
    assert op.times == 2
