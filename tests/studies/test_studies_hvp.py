"""The study of what a product costs: right numbers of the right things, and honest gaps."""

import math

import pytest
import torch

import curvescope as cs
from curvescope.studies import hvp
from curvescope.studies.hvp import study
from curvescope.studies.hvp.contenders import CONTENDERS, PACKAGES
from curvescope.studies.hvp.models import SHAPES, build, logits, plain_attention

TINY = {"batch_size": 2, "seq_len": 8, "rounds": 2}


@pytest.fixture(scope="module", autouse=True)
def _small():
    """The small models are smaller still: 2 layers of width 16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", (2, 16, 4, 64))
        yield


@pytest.fixture(scope="module")
def cost() -> hvp.Cost:
    return hvp.run(hvp.Config(**TINY, contenders=("hessian", "ggn", "functional", "hessian autograd")))


def test_errors_are_distances_to_float64(cost):
    for name in ("hessian", "ggn", "functional", "hessian autograd"):
        assert 1e-9 < cost.of(name).error < 1e-5
    assert math.isnan(cost.of("gradient").error)


def test_times_are_in_gradients_of_the_same_round(cost):
    m = cost.of("hessian")
    assert len(m.seconds) == len(m.unit) == 2
    median, low, high = cost.ratio("hessian")
    pairs = [a / b for a, b in zip(m.seconds, m.unit, strict=True)]
    assert low == min(pairs) <= median <= max(pairs) == high
    assert math.isnan(m.peak)  # a CPU does not say


def test_the_result_is_shown_and_stored(cost, tmp_path):
    table = cost.tables()["costs"]
    assert list(table.contender) == ["gradient", "hessian", "ggn", "functional", "hessian autograd"]
    assert set(cost.figures()) <= set(cost.captions())
    again = hvp.Cost.load(cost.save(tmp_path))
    assert again.tables()["costs"].equals(table)
    assert any("hessian" in line for line, _, _ in again.summary())


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    found = hvp.run(hvp.Config(**TINY, contenders=("eigenthings",)))
    assert found.of("eigenthings").note == "hessian_eigenthings is not installed"
    assert found.of("eigenthings").seconds == []
    assert "not installed" in str(found.summary())


def test_bad_settings_are_one_sentence():
    with pytest.raises(cs.UsageError, match=r"unknown contender 'hesian'.*did you mean"):
        hvp.Config(contenders=("hesian",))
    with pytest.raises(cs.UsageError, match="size: expected one of small, 124M"):
        hvp.Config.from_dict({"size": "tiny"})
    assert set(PACKAGES) <= set(CONTENDERS)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "neox"])
def test_every_model_takes_tokens_and_its_plain_attention_gives_the_same(kind):
    if kind != "gpt2":
        pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build(kind, "small", 16).eval()
    x = torch.arange(16).view(2, 8)
    with torch.no_grad():
        fused = logits(module, x)
        with plain_attention(module):
            torch.testing.assert_close(logits(module, x), fused, rtol=1e-4, atol=1e-5)
    assert fused.shape == (2, 8, 64)
