"""Real weights: their spectra are those of trained models; the same shapes with fresh weights have others.

What is stated was measured first; the bounds leave a factor of about two. A trained language model on text
that it wrote itself is at the minimum of its expected loss, where H = GGN: the functional Hessian is only
sampling noise, and falls as the text grows.
"""

import json

import numpy as np
import pytest
import torch

import curvescope as cs
from assets import LONG_STORY, asset, minilm
from commands import call
from curvescope.studies.run_study import load as load_run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def fresh(model):
    """A model of the same configuration, as transformers initializes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = model.module.config
        return cs.load(
            transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        )


def written(model, num_sequences, *, first=1, length=64, seed=0):
    """Next-token pairs of text that the model samples from itself."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.full((num_sequences, 1), first)
    with torch.no_grad():
        for _ in range(length):
            p = model.forward({}, ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=source)], dim=1)
    return cs.Batches.from_tensors(ids[:, :-1], ids[:, 1:], batch_size=32)


def ends(problem, *, max_products):
    """λ min, λ max, and uᵀ GGN u / λ max for the unit eigenvector u of λ max."""
    found = cs.eigsh(cs.Hessian(problem), 2, which="BE", max_products=max_products, seed=0)
    u = torch.as_tensor(found.vectors[:, -1].copy(), dtype=torch.float32)
    low, high = found.values
    assert found.residuals.max() < 0.05 * high
    return low, high, float(u @ (cs.GGN(problem) @ u)) / high


def test_stories260k_looks_trained():
    """Measured: λ min/λ max −0.21 (fresh weights −1.4), GGN's share of λ max 0.96 (0.15)."""
    model = cs.load(asset("stories260K"))
    batches = written(model, 32)
    trained, other = cs.Problem(model, batches), cs.Problem(fresh(model), batches)
    assert trained.loss_value() < 1.6
    assert 6 < other.loss_value() < 6.6  # log 512 = 6.24
    low, high, share = ends(trained, max_products=40)
    assert low < 0 < high
    assert -low / high < 0.35
    assert share > 0.9
    H = cs.Hessian(trained)
    density = cs.spectral_density(H, num_probes=2, num_steps=12, seed=0)
    bulk = (density.weights * (np.abs(density.nodes) < 0.05 * high)).sum(axis=1)
    assert bulk.min() > 0.98  # nearly all eigenvalues are near zero, next to the largest
    trace = cs.trace(H, num_probes=4, seed=0)
    assert trace.value > 5 * trace.stderr
    assert high > 1000 * trace.value / H.shape[0]  # an outlier: thousands of times the mean
    few = ends(cs.Problem(model, written(model, 8)), max_products=40)
    assert 0.15 < low / few[0] < 0.7  # four times the text: the noise is halved, measured 0.38
    assert few[2] < share
    low, high, share = ends(other, max_products=40)
    assert -low / high > 1
    assert share < 0.3


def test_stories15m_looks_trained_on_english(tmp_path):
    """Measured on 128 to 448 tokens: GGN's share of λ max 0.97 to 1.25, of fresh weights 0.16.

    λ min/λ max is −0.1 to −0.8, of fresh weights −0.9 to −1.1: on so little text it does not tell.
    """
    pytest.importorskip("sentencepiece")
    model = cs.load(asset("stories15M"))
    path = tmp_path / "story.txt"
    path.write_text(LONG_STORY, encoding="utf-8")
    batches = cs.text_data(path, model, tokens=128, seq_len=64)
    trained, other = cs.Problem(model, batches), cs.Problem(fresh(model), batches)
    assert trained.loss_value() < 2
    assert other.loss_value() > 10  # log 32000 = 10.4
    low, high, share = ends(trained, max_products=16)
    assert low < 0 < high
    assert -low < high
    assert 0.8 < share < 1.5
    assert high > 1000 * cs.trace(cs.GGN(trained), num_probes=2, seed=0).value / model.num_parameters
    *_, share = ends(other, max_products=16)
    assert share < 0.4


# ------------------------------------------------------------------------------------------------ MiniLM


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(LONG_STORY, encoding="utf-8")
    return path


def embedding(model, sentence):
    """The sentence's embedding as the model card says: the mean of the last hidden states, of length one."""
    found = model.tokenizer.tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        z = model.forward({}, dict(found))[0].mean(dim=0)
    return z / z.norm()


def test_minilm_is_the_trained_one():
    model = cs.load(minilm())
    a, b, c, d = (
        embedding(model, s)
        for s in (
            "A man is playing a guitar.",
            "Someone plays music on a guitar.",
            "The stock market fell sharply on Monday.",
            "Share prices dropped at the start of the week.",
        )
    )
    assert float(a @ b) > 0.6
    assert float(c @ d) > 0.4
    assert max(float(x @ y) for x in (a, b) for y in (c, d)) < 0.2


def test_minilm_info(capsys):
    code, out, _ = call("info", minilm(), "--json", capsys=capsys)
    found = json.loads(out)
    assert code == 0
    assert found["parameters"] == sum(b["parameters"] for b in found["blocks"]) == 22_713_216
    assert found["facts"]["task"] == "features"
    assert any(note.startswith("no head") for note in found["notes"])


def test_minilm_blocks(story, tmp_path, capsys):
    words = ["run", "blocks", minilm(), "--data", story, "--tokens", "60", "--out", tmp_path, "--quiet"]
    few = {"seq_len": 32, "num_trace_probes": 3, "num_norm_probes": 2, "max_products": 20}
    few |= {"norms": '["L5.W_Q", "L5.W_2"]', "extremes": '["L5.W_Q"]', "operators": '["hessian", "ggn"]'}
    code, out, err = call(*words, *(w for k, v in few.items() for w in ("--set", f"{k}={v}")), capsys=capsys)
    assert (code, err) == (0, "")
    _, found = load_run(out.strip().splitlines()[-1])
    assert "denoising" in found.notes[0]
    assert 0 < found.loss < 1
    H, G = found.parts["hessian"], found.parts["ggn"]
    assert len(G.traces.names) == 5 + 6 * 16 + 2
    assert np.isfinite(H.traces.samples).all()
    value, stderr = G.trace
    assert value > 5 * stderr
    assert all(G.traces.values[G.traces.names.index(n)] == 0 for n in ("W_pool", "b_pool"))
    own = G.norms["L5.W_2"]
    assert own.trace > 0
    top, size = G.extremes["L5.W_Q"].values[-1], 384 * 384
    assert top >= G.norms["L5.W_Q"].trace / size
    assert top <= 1.1 * G.norms["L5.W_Q"].norm + 5 * G.norms["L5.W_Q"].norm_stderr


def test_minilm_spectrum(story, tmp_path, capsys):
    words = ["run", "spectrum", minilm(), "--data", story, "--tokens", "60", "--out", tmp_path, "--quiet"]
    few = {"seq_len": 32, "num_trace_probes": 3, "num_probes": 1, "num_steps": 4, "num_eigenvalues": 1}
    few |= {"max_products": 16, "num_map_probes": 1, "map_blocks": '["L5.W_Q", "L5.W_2"]'}
    code, out, err = call(*words, *(w for k, v in few.items() for w in ("--set", f"{k}={v}")), capsys=capsys)
    assert (code, err) == (0, "")
    _, found = load_run(out.strip().splitlines()[-1])
    assert found.num_parameters == 22_713_216
    H, G, F = (found.parts[n] for n in ("hessian", "ggn", "functional"))
    (trace, stderr), top = G.trace, G.extremes.values[-1]
    assert trace > 5 * stderr
    assert trace > top > 1000 * trace / found.num_parameters
    assert np.allclose(H.traces.samples, G.traces.samples + F.traces.samples, atol=1e-3 * trace)
    assert H.extremes.values[0] >= F.extremes.values[0] - 1e-3 * top  # Weyl: the GGN adds nothing negative
    assert H.extremes.values[-1] <= top + F.extremes.values[-1] + 1e-3 * top
    model = cs.load(minilm())
    problem = cs.Problem(model, cs.denoising_data(story, model, tokens=60, seq_len=32), loss="mse_mean")
    assert problem.loss_value() == pytest.approx(found.loss, rel=1e-5)
    products = [make(problem, "L2.*") for make in (cs.Hessian, cs.GGN, cs.FunctionalHessian)]
    v = torch.randn(products[0].shape[0], generator=torch.Generator().manual_seed(0))
    h, g, f = (op @ v for op in products)
    assert float((h - g - f).norm() / h.norm()) < 1e-4
