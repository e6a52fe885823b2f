"""petrov2025, propagation: verdicts are computed from numbers, and what is measured is what the names say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from curvescope.algorithms.blocks.probes import Ends
from curvescope.models.zoo import REVISIONS
from curvescope.papers import find_figure
from curvescope.papers.petrov2025 import propagation as said
from curvescope.papers.petrov2025.propagation import (
    Config,
    DenseSpectrum,
    PropagationSweeps,
    _measure,
    _write_out,
)
from curvescope.studies.propagation import Propagation, Shares

SEEDS, DEPTHS, STEPS = 2, [1, 2, 4], 10


def made_up(norm: float, *, top: float = 1.0, source: float = 1.0, residual: float = 1e-15) -> Propagation:
    """A result with these norms of H and of the first norm's source."""
    names = ["H", "GGN", "L0.ln1", "rest"]
    squares = np.tile(np.square([norm, norm, source, 0.1]), (3, 1))
    squares[0] *= 1.01  # some spread
    shares = Shares(names, np.ones((3, 4)), squares, squares.copy(), residual, False)
    ends = {"H": Ends(np.array([-1.0, top]), np.zeros(2), -1.0, top)}
    return Propagation("m", "d", "l", 1.0, 8.0, 10, shares, ends, None)


def sweeps(
    *, power: float, sigma: float, pre: float = 1.0, off: float = 2.0, diagonal: float = 3.0
) -> PropagationSweeps:
    found = {}
    for seed in range(SEEDS):
        jitter = 1 + 0.01 * seed
        for norm in said.NORMS:
            for d in DEPTHS:
                top = pre if norm == "pre" else 2.0
                found[f"depth.{norm}.{d}.{seed}"] = made_up(jitter * d ** (power * jitter), top=top)
        for s in said.SIGMAS:
            found[f"sigma.{s:g}.{seed}"] = made_up(1.0, source=s ** (sigma * jitter))
    found |= {f"training.{name}": made_up(1.0, residual=1e-7) for name in REVISIONS}
    spectra = {}
    for name, variant in said.by_component(STEPS, SEEDS).items():
        top = (1.0 if "everything" in name else off) * (1 + 0.1 * variant.seed)
        norms = np.ones((3, 3)) + diagonal * np.eye(3)
        norms[2] = norms[:, 2] = 0
        spectra[name] = DenseSpectrum(np.array([-0.1, 0.0, 0.5, top]), ["E", "L0.W_Q", "L0.b_K"], norms, 1.0)
    return PropagationSweeps(SEEDS, DEPTHS, STEPS, found, spectra)


def verdicts(result: PropagationSweeps) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in result.claims()}


def test_verdicts_follow_the_numbers():
    one = verdicts(sweeps(power=0.5, sigma=-2.0, pre=1.0, off=2.0))
    other = verdicts(sweeps(power=-0.5, sigma=0.01, pre=4.0, off=0.5, diagonal=0.0))
    assert len(one) == 12
    expected = {
        "the Hessian of a block has many zero blocks": ("fails", "fails"),
        "diagonal blocks dominate": ("holds", "not decided"),
        "LayerNorm keeps curvature bounded": ("fails", "holds"),
        "the norm of the Hessian grows with depth, norms pre": ("holds", "fails"),
        "pre-norm has less curvature than post-norm": ("holds", "fails"),
        "residual connections lower the largest eigenvalue": ("holds", "fails"),
        "the feed-forward network raises the largest eigenvalue": ("fails", "holds"),
        "the Hessian is the GGN and a sum over sources": ("holds", "holds"),
    }
    for claim, (first, second) in expected.items():
        assert (one[claim], other[claim]) == (first, second), claim


def test_slopes_and_intervals():
    result = sweeps(power=0.5, sigma=-2.0)
    value, low, high = said.exponent(result, "post")
    assert low < value < high
    assert math.isclose(value, 0.5, abs_tol=0.02)
    assert math.isclose(said.sigma_slope(result)[0], -2.0, abs_tol=0.05)


def test_condition_leaves_out_rounding_and_negative_eigenvalues():
    one = DenseSpectrum(np.array([-3.0, -1e-15, 1e-14, 0.5, 2.0]), ["E"], np.ones((1, 1)), 0.0)
    assert one.condition == 4.0


def test_the_source_of_a_norm_grows_as_one_over_the_variance():
    models = said.by_sigma(1)
    sizes = [_measure(models[f"sigma.{s:g}.0"]).shares.norm("L0.ln1").value for s in (0.1, 0.01)]
    assert math.isclose(sizes[1] / sizes[0], 100, rel_tol=0.15)  # what attention adds shrinks more slowly


def test_a_component_that_is_switched_off_is_gone():
    models = said.by_component(2, 1)
    small = {"d_model": 4, "d_ff": 4}
    whole, off = (
        _write_out(
            models[f"component.{name}.2.0"]._replace(
                settings=models[f"component.{name}.2.0"].settings | small
            )
        )
        for name in ("everything", "no norm")
    )
    assert any(name.startswith("L0.ln1") for name in whole.names)
    assert not any("ln" in name for name in off.names)
    assert np.all(np.diff(whole.values) >= 0)


@pytest.mark.usefixtures("unrendered")
def test_words_tables_and_figures_are_complete():
    result = sweeps(power=0.5, sigma=-2.0)
    assert set(result.captions()) == {*result.tables(), *result.figures()}
    assert len(result.tables()["components"]) == 2 * len(said.COMPONENTS)
    assert len(result.summary()) == 3 + 4
    assert find_figure("petrov2025", "propagation").Config is Config
