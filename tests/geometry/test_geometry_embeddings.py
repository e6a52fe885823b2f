"""Tables about embeddings against numpy written out."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields

import numpy as np
import pytest
import torch

import curvescope as cs
from cases import transformer
from curvescope.core.errors import UsageError
from curvescope.geometry import (
    HeadDirections,
    KeyProbe,
    StreamNorm,
    TokenScores,
    ValueProbe,
    distances,
    extremes,
    token_scores,
)
from curvescope.geometry.embeddings import LENGTHS
from curvescope.tokenizers import CharTokenizer

D, V = 6, 17


@pytest.fixture(scope="module")
def model() -> cs.Model:
    return cs.load(transformer(d_model=D, vocab_size=V, n_layers=2))


def array(model: cs.Model, name: str) -> np.ndarray:
    return dict(model.module.named_parameters())[name].detach().numpy()


def numpy_layernorm(E: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    centered = E - E.mean(1, keepdims=True)
    return centered / np.sqrt(centered.var(1, keepdims=True) + eps)


@pytest.mark.parametrize("options", [{"norm": StreamNorm("layernorm", eps=1e-5), "all_rows": True}, {}])
def test_distances(model, options):
    E = array(model, "E")
    N, norm = numpy_layernorm(E), np.linalg.norm(E, axis=1).mean()
    forms = [E, E - E.mean(0), E * D**0.5 / norm, (E - E.mean(0)) * D**0.5 / norm]
    found = distances(model, **options)
    assert found.settings == ["Original", "Centered", "Scaled", "Centered & Scaled"]
    assert found.mean_norm == pytest.approx(norm)
    for i, form in enumerate(forms):
        l2 = np.linalg.norm(form - N, axis=1)
        cosine = 1 - (form * N).sum(1) / np.linalg.norm(form, axis=1) / np.linalg.norm(N, axis=1)
        assert found.l2_mean[i] == pytest.approx(l2.mean())
        assert found.l2_std[i] == pytest.approx(l2.std(ddof=1))
        assert found.cosine_mean[i] == pytest.approx(cosine.mean())
        assert found.cosine_std[i] == pytest.approx(cosine.std(ddof=1))
    assert list(found.to_frame()) == [
        "setting",
        "mean_l2_distance",
        "l2_std_dev",
        "mean_cosine_distance",
        "cosine_std_dev",
    ]


def test_distances_use_the_models_own_norm():
    model = cs.load(transformer(d_model=D, vocab_size=V, norm_kind="rmsnorm", norm_eps=0.2))
    E = array(model, "E")
    N = E / np.sqrt((E**2).mean(1, keepdims=True) + 0.2)
    found = distances(model)
    assert found.norm == "rmsnorm"
    assert found.l2_mean[0] == pytest.approx(np.linalg.norm(E - N, axis=1).mean())
    old = distances(model, norm=StreamNorm("layernorm", eps=1e-5))
    assert old.l2_mean[0] == pytest.approx(np.linalg.norm(E - numpy_layernorm(E), axis=1).mean())


def test_scores_of_tokens(model):
    U, g, b = array(model, "U").T, array(model, "ln_f.g"), array(model, "ln_f.b")
    found = token_scores(model)
    assert (found.norm, found.which) == ("ln_f", "output")
    norm = np.linalg.norm
    scaled = g * U
    reach = norm(scaled - scaled.mean(1, keepdims=True), axis=1)
    want = {
        "original": norm(U, axis=1),
        "scale": norm(scaled, axis=1),
        "bias": norm(U, axis=1) + U @ b,
        "bias_and_scale": norm(scaled, axis=1) + U @ b,
        "max_logit": U @ b + D**0.5 * reach,
        "min_logit": U @ b - D**0.5 * reach,
        "reach": reach,
        "shift": U @ b,
        "angle_to_ones": np.degrees(np.arccos(U.sum(1) / norm(U, axis=1) / D**0.5)),
        "distance_to_mean": norm(U - U.mean(0), axis=1),
    }
    assert list(found.scores) == list(want)
    for name, values in want.items():
        np.testing.assert_allclose(found.scores[name], values, rtol=1e-10, atol=1e-12)


def test_logits_stay_within_what_is_attainable(model):
    found = token_scores(model)
    x = torch.randint(0, V, (50, 5), generator=torch.Generator().manual_seed(0))
    logits = model.forward({}, x).detach().numpy().reshape(-1, V)
    assert (logits <= found.scores["max_logit"] + 1e-12).all()
    assert (logits >= found.scores["min_logit"] - 1e-12).all()


def test_another_norm_and_some_of_the_scores(model):
    E, g, b = array(model, "E"), array(model, "L1.ln1.g"), array(model, "L1.ln1.b")
    found = token_scores(model, norm="L1.ln1")
    assert (found.norm, found.which) == ("L1.ln1", "input")
    np.testing.assert_allclose(found.scores["bias_and_scale"], np.linalg.norm(g * E, axis=1) + E @ b)
    old = token_scores(model, which="input", scores=LENGTHS)
    assert list(old.scores) == ["original", "scale", "bias", "bias_and_scale"]
    assert old.which == "input"
    g, b = array(model, "ln_f.g"), array(model, "ln_f.b")
    np.testing.assert_allclose(old.scores["bias_and_scale"], np.linalg.norm(g * E, axis=1) + E @ b)
    with pytest.raises(UsageError, match="role of a norm"):
        token_scores(model, norm="L7.ln1")
    with pytest.raises(UsageError, match="no score"):
        token_scores(model, scores=["size"])


def test_extremes_are_in_the_order_of_the_table(model):
    scores = token_scores(model, scores=LENGTHS)
    found = extremes(scores, k=3)
    assert found.position[:6] == ["Top 1", "Top 2", "Top 3", "Bottom 3", "Bottom 2", "Bottom 1"]
    assert found.setting[::6] == ["original", "scale", "bias", "bias_and_scale"]
    for i, name in enumerate(scores.scores):
        values = np.sort(scores.scores[name])
        own = found.score[6 * i : 6 * i + 6]
        np.testing.assert_array_equal(own, [*values[::-1][:3], values[2], values[1], values[0]])
        np.testing.assert_array_equal(scores.scores[name][found.ids[6 * i : 6 * i + 6]], own)
    assert list(found.to_frame()) == ["Position", "Norm", "String", "Bytes", "Setting"]
    assert set(extremes(scores, settings=["bias"]).setting) == {"bias"}
    with pytest.raises(UsageError, match="no score"):
        extremes(scores, settings=["size"])


def test_padded_rows_count_if_asked_for(model):
    short = CharTokenizer("abcdefgh")
    assert len(token_scores(model, tokenizer=short).ids) == 8
    assert len(token_scores(model, tokenizer=short, all_rows=True).ids) == V
    assert distances(model, tokenizer=short).num_tokens == 8
    assert distances(model, tokenizer=short, all_rows=True).num_tokens == V


def test_models_without_a_final_norm():
    for settings in ({"norm": "post"}, {"norm": "none"}):
        model = cs.load(transformer(d_model=D, vocab_size=V, **settings))
        assert np.isfinite(distances(model).l2_mean).all()
        assert np.isfinite(token_scores(model).scores["max_logit"]).all()
    images = cs.load(transformer(inputs="patches", outputs="class", n_out=3, image_size=4, causal=False))
    with pytest.raises(UsageError, match="token vocabulary"):
        distances(images)


def test_results_are_saved(model, tmp_path):
    scores = token_scores(model)
    again = type(scores).load(scores.save(tmp_path / "scores"))
    np.testing.assert_array_equal(again.scores["shift"], scores.scores["shift"])
    table = extremes(scores)
    assert type(table).load(table.save(tmp_path / "table")).text == table.text


def test_a_saved_result_that_says_legacy_is_read(model, tmp_path):
    scores = token_scores(model)
    file = scores.save(tmp_path) / "result.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert "legacy" not in tree["fields"]
    tree["fields"]["legacy"] = True
    file.write_text(json.dumps(tree), encoding="utf-8")
    again = type(scores).load(tmp_path)
    np.testing.assert_array_equal(again.scores["shift"], scores.scores["shift"])


@pytest.mark.parametrize("kind", [HeadDirections, KeyProbe, TokenScores, ValueProbe])
def test_results_accept_legacy_and_do_not_keep_it(kind):
    assert "legacy" in inspect.signature(kind).parameters
    assert "legacy" not in {field.name for field in fields(kind)}
