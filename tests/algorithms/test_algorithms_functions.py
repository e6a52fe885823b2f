"""Traces of functions by Lanczos quadrature against eigenvalues, within their intervals and brackets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithms_known import Counting, uniform, with_spectrum

from curvescope.algorithms import FunctionTrace, logdet, trace_function
from curvescope.algorithms.estimates.trace_function import gauss, radau
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.operator import Matrix
from curvescope.core.seeds import probes
from selection import pairs, some

N = 120
SPECTRA = {
    "even": np.linspace(0.1, 10, N),
    "outliers": np.r_[500.0, 100, 20, uniform(0, 1, N - 3)],
    "singular": np.r_[np.zeros(60), np.logspace(-3, 1, N - 60)],
    "clustered": np.r_[np.full(60, 2.0), np.full(60, 2.0 + 1e-9)],
    "zero": np.zeros(N),
}
TRUTHS = {"log": np.log, "inverse": lambda x: 1 / x, "sqrt": np.sqrt, "exp": np.exp}


def per_probe(op: Matrix, f, damping: float, count: int) -> np.ndarray:
    """vᵀ f(A + λ I) v for the probes of seed 0."""
    values, U = np.linalg.eigh(op.A.double().numpy())
    V = probes(op.shape[0], count, seed=0).numpy()
    return ((U.T @ V) ** 2 * f(np.maximum(values, 0) + damping)[:, None]).sum(axis=0)


@pytest.mark.parametrize(("name", "dtype"), pairs(["log", "inverse", "sqrt"], [torch.float64, torch.float32]))
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_brackets_hold_probe_by_probe_and_intervals_over_probes(spectrum, name, dtype):
    op = with_spectrum(SPECTRA[spectrum], dtype=dtype, psd=True)
    found = trace_function(op, name, damping=0.05, num_probes=8, num_steps=12)
    each, truth = per_probe(op, TRUTHS[name], 0.05, 8), TRUTHS[name](SPECTRA[spectrum] + 0.05).sum()
    assert found.lower is not None
    assert (found.lower <= each).all()
    assert (found.upper >= each).all()
    width = float((found.upper - found.lower).max())
    assert abs(truth - found.value) <= 4 * found.stderr + width + 1e-9
    assert found.low <= found.value <= found.high or found.stderr == 0 or math.isnan(found.low)
    assert found.num_products == 8 * 12


def test_more_steps_narrow_the_bracket_to_the_probes():
    op = with_spectrum(SPECTRA["even"], psd=True)
    widths = []
    for steps in (5, 10, 20, 40):
        found = logdet(op, damping=0.1, num_steps=steps, num_probes=4)
        widths.append(float((found.upper - found.lower).max()))
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 1e-6 * abs(found.value)
    assert found.last_steps < 1e-6 * abs(found.value)
    np.testing.assert_allclose(found.samples, per_probe(op, np.log, 0.1, 4), rtol=1e-7)


@pytest.mark.parametrize("num_seeds", some([12, 40], 1))
def test_intervals_cover_the_truth(num_seeds):
    op, truth = with_spectrum(SPECTRA["even"], psd=True), np.log(SPECTRA["even"] + 0.1).sum()
    runs = [logdet(op, damping=0.1, num_probes=4, num_steps=20, seed=seed) for seed in range(num_seeds)]
    held = np.mean([run.low <= truth <= run.high for run in runs])
    assert held >= 0.85


def test_functions_of_ones_own_and_of_indefinite_operators():
    values = np.linspace(-2, 3, N)
    op = Counting(with_spectrum(values))
    found = trace_function(op, lambda x: x**4, num_probes=6, num_steps=8)
    assert found.num_products == op.columns == 48
    assert found.lower is None
    assert found.last_steps < 1e-9  # polynomials of low degree are exact
    assert abs(found.value - (values**4).sum()) < 4 * found.stderr
    exp = trace_function(op, "exp", num_probes=6, num_steps=25)
    assert abs(exp.value - np.exp(values).sum()) < 4 * exp.stderr
    assert exp.function == "exp"


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_any_size(scale):
    op = scale * with_spectrum(SPECTRA["even"], psd=True)
    found = logdet(op, damping=0.05 * scale, num_probes=6, num_steps=20)
    truth = np.log(SPECTRA["even"] + 0.05).sum() + N * math.log(scale)
    assert found.low <= truth <= found.high
    assert found.lower is not None


def test_small_is_exact():
    values = np.linspace(1, 2, 20)
    found = logdet(with_spectrum(values, psd=True))
    assert found.exact
    assert found.num_products == 20
    assert found.low == found.high == found.value == pytest.approx(np.log(values).sum(), rel=1e-12)
    assert found.stderr == 0


def test_one_probe_has_no_interval():
    found = logdet(with_spectrum(SPECTRA["even"], psd=True), num_probes=1, num_steps=10)
    assert math.isnan(found.low)
    assert math.isnan(found.stderr)
    assert found.lower is None  # without damping zero is no end of the logarithm


def test_memory_decides_how_many_run_together_and_nothing_else():
    op = with_spectrum(SPECTRA["even"], psd=True)
    options = {"damping": 0.1, "num_probes": 5, "num_steps": 10}
    little = 3 * N * 11 * 8 / 2**30
    np.testing.assert_allclose(
        logdet(op, **options).samples, logdet(op, **options, max_gib=little).samples, rtol=1e-12
    )
    with pytest.raises(UsageError, match="more than max_gib"):
        logdet(op, **options, max_gib=little / 10)


def test_radau_has_its_node():
    alpha, beta = np.array([1.0, 2, 3]), np.array([0.5, 0.4, 0.3])
    rule = radau(alpha, beta, -0.1)
    assert rule.nodes[0] == pytest.approx(-0.1, abs=1e-12)
    assert rule.weights.sum() == pytest.approx(1)
    assert (radau(alpha, np.array([0.5, 0.4, 0.0]), -0.1).nodes == gauss(alpha, beta[:2]).nodes).all()


def test_saved_and_read(tmp_path):
    found = logdet(with_spectrum(SPECTRA["even"], psd=True), damping=0.1, num_probes=3, num_steps=5)
    again = FunctionTrace.load(found.save(tmp_path))
    np.testing.assert_array_equal(again.lower, found.lower)
    assert again.value == found.value


OP = with_spectrum(SPECTRA["even"])
WRONG = {
    "unknown": (
        lambda: trace_function(OP, "tanh"),
        "expected a function or one of 'log', 'inverse', 'sqrt', 'exp'",
    ),
    "no function": (lambda: trace_function(OP, 3), "expected a function of an array of eigenvalues, got int"),
    "shape": (lambda: trace_function(OP, lambda x: 1.0), "to give an array of"),
    "negative": (
        lambda: logdet(with_spectrum(np.linspace(-1, 1, N))),
        r"log is not finite at the eigenvalue -\d.* \(damping increases all eigenvalues\)",
    ),
    "zero": (lambda: logdet(with_spectrum(np.zeros(5), psd=True)), "log is not finite at the eigenvalue 0"),
    "damping": (lambda: logdet(OP, damping=-1), "expected a finite damping of at least 0"),
    "probes": (lambda: logdet(OP, num_probes=0), "expected num_probes of at least 1"),
    "steps": (lambda: logdet(OP, num_steps=1), "expected num_steps of at least 2"),
    "rectangle": (lambda: logdet(Matrix(torch.ones(2, 3))), "trace_function needs a symmetric operator"),
    "tensor": (lambda: logdet(torch.eye(3)), "trace_function needs a LinearOperator"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_sentence(name):
    call, message = WRONG[name]
    with pytest.raises(CurvescopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
