"""All blocks of any zoo Transformer against the scale of its embeddings."""

import math

import numpy as np
import pytest

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.papers.ormaniec2025 import beyond
from curvescope.papers.ormaniec2025.growth_sweeps import PARTS

pytestmark = pytest.mark.usefixtures("few_sequences")
SETTINGS = {"blocks": ("E", "L0.W_[QKV]"), "d_model": 4, "n_heads": 1, "activation": "relu", "scales": 7}


@pytest.fixture(scope="module")
def small():
    return beyond.run(beyond.Config(**SETTINGS))


def test_exponents_of_all_pairs(small):
    """The table of growth in the data: σ⁶, σ⁴, σ² and σ⁵, σ³, and zero for the values."""
    place = {name: i for i, name in enumerate(small.names)}
    Q, K, V = (place[f"L0.W_{role}"] for role in "QKV")
    outer, functional = small.exponents[:2]
    for pair, power in {(Q, Q): 6, (Q, K): 6, (K, K): 6, (Q, V): 4, (K, V): 4, (V, V): 2}.items():
        assert outer[pair] == pytest.approx(power, abs=0.1)
    for pair, power in {(Q, Q): 5, (K, K): 5, (Q, K): 3, (Q, V): 3, (K, V): 3}.items():
        assert functional[pair] == pytest.approx(power, abs=0.2)
    assert math.isnan(functional[V, V])
    assert (small.frobenius[:, PARTS.index("H_f"), V, V] == 0).all()
    assert small.exact
    assert {claim.verdict for claim in small.claims()} == {"holds"}


def test_numbers_are_those_of_the_operators(small):
    cfg = beyond.Config(**SETTINGS)
    index = 4
    problem = beyond._scaled(beyond._problem(cfg), float(cfg.sigma[index]))
    for p, operator in enumerate((cs.GGN, cs.FunctionalHessian, cs.Hessian)):
        H = operator(problem, *cfg.blocks)
        dense, cut = H.to_dense(), H.space.slices
        for i, one in enumerate(small.names):
            block = dense[cut[one], cut[one]]
            assert small.spectral[index, p, i] == pytest.approx(float(np.linalg.norm(block, 2)), abs=1e-12)
            assert small.trace[index, p, i] == pytest.approx(float(block.trace()), abs=1e-12)
            for j, two in enumerate(small.names):
                norm = float(dense[cut[one], cut[two]].norm())
                assert small.frobenius[index, p, i, j] == pytest.approx(norm, rel=1e-9, abs=1e-13)


def test_large_blocks_are_estimated(small, monkeypatch):
    monkeypatch.setattr(beyond, "DENSE", 1)
    found = beyond.run(beyond.Config(**{**SETTINGS, "scales": 2, "probes": 20}))
    assert not found.exact
    for p in range(3):
        for i in range(len(small.names)):
            truth = small.frobenius[0, p, i, i]
            assert abs(found.frobenius[0, p, i, i] - truth) <= 5 * found.stderr[0, p, i]
    assert math.isnan(found.frobenius[0, 0, 0, 1])
    assert len(found.tables()["beyond"]) == 2 * 3 * 4


def test_settings_change_the_model_and_a_run_resumes():
    cfg = {"blocks": ("L0.h*.W_Q", "L0.ln1.g"), "d_model": 4, "norm": "pre", "scales": 2}
    state: dict[str, Result] = {}
    whole = beyond.run(beyond.Config(**cfg), state=state)
    del state["scale01"]
    again = beyond.run(beyond.Config(**cfg), state=state)
    assert np.array_equal(whole.frobenius, again.frobenius)
    assert whole.names == ["L0.ln1.g", "L0.h0.W_Q", "L0.h1.W_Q"]
    assert whole.claims() == []
    trained = beyond.run(beyond.Config(**cfg, steps=3))
    assert not np.allclose(trained.frobenius, whole.frobenius, rtol=1e-3)


@pytest.mark.slow
def test_a_bundled_model_on_text():
    cfg = {"model": "tiny-gpt", "data": "sample", "tokens": 8, "seq_len": 8, "scales": 2}
    found = beyond.run(beyond.Config(**cfg, blocks=("L0.h0.b_Q",)))
    assert found.model == "tiny-gpt"
    assert np.isfinite(found.frobenius).all()


def test_a_stored_result_is_drawn_again(small, tmp_path):
    import matplotlib.pyplot as plt

    loaded = Result.load(small.save(tmp_path))
    figures = loaded.figures()
    assert set(figures) | {"beyond"} == set(loaded.captions())
    for figure in figures.values():
        plt.close(figure)


def test_what_is_refused():
    with pytest.raises(UsageError, match="scales: expected at least 2"):
        beyond.Config(scales=1)
    with pytest.raises(UsageError, match="steps: expected at least 0"):
        beyond.Config(steps=-1)
