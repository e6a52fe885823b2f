"""The bundled model: it loads, it has learned, and estimates on it meet its dense spectrum."""

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.data.baselines import uniform_loss, unigram_loss
from curvescope.data.corpora import corpus_text
from curvescope.models.model import check_cover
from curvescope.models.zoo import REVISIONS


@pytest.fixture(scope="module")
def model():
    return cs.load("tiny-gpt")


def test_blocks_cover_every_parameter_once(model):
    check_cover(model.blocks, model.module)
    assert 400_000 < model.num_parameters < 700_000
    assert model.facts["n_layers"] >= 4


def test_it_has_learned_and_its_checkpoints_are_in_order(model):
    ids = model.tokenizer.encode(corpus_text("sample"))
    losses = {}
    for revision in REVISIONS:
        checkpoint = cs.load("tiny-gpt", revision=revision)
        losses[revision] = cs.Problem(
            checkpoint, cs.text_data("sample", model, tokens=1024, seq_len=128)
        ).loss_value()
    assert abs(losses["initial"] - uniform_loss(512)) < 0.1
    assert losses["early"] < unigram_loss(ids, ids, 512)
    assert losses["middle"] < losses["early"] - 0.3
    assert losses["final"] < losses["early"] - 0.3


def test_the_tokenizer_gives_back_its_text(model):
    text = corpus_text("sample")[:5000]
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


@pytest.mark.slow
def test_density_of_a_block_is_close_to_its_dense_spectrum():
    model = cs.load("tiny-gpt", dtype="float64")
    problem = cs.Problem(model, cs.text_data("sample", model, tokens=16, seq_len=8, batch_size=2))
    H = cs.Hessian(problem).block("L1.ln1.g")
    exact = torch.linalg.eigvalsh(H.to_dense()).numpy()
    rho = cs.spectral_density(H, num_probes=8, num_steps=15, seed=0)
    # The distance between two samples of the measure, one a probe each, is its scale of error.
    single = cs.spectral_density(H, num_probes=1, num_steps=15, seed=1).wasserstein(exact)
    distance = rho.wasserstein(exact)
    assert distance < 0.02 * (exact[-1] - exact[0])
    assert distance < single
    top = cs.eigsh(H, k=3, which="LA")
    assert top.converged
    np.testing.assert_allclose(top.values, exact[::-1][:3], rtol=1e-8)


def test_one_head_is_a_block(model):
    problem = cs.Problem(model, cs.text_data("sample", model, tokens=32, seq_len=16))
    H = cs.Hessian(problem).block("L2.h3.W_Q", "L2.h3.W_O")
    assert H.shape == (96 * 24, 24 * 96)
    assert torch.isfinite(H @ torch.ones(H.shape[1])).all()
