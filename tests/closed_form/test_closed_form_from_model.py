"""Closed forms at a zoo model's weights and data against the matrix-free operators over the same data."""

import pytest
import torch

import curvescope as cs
import oracles
from curvescope.closed_form.attention.split import BlockSplit, block_split
from curvescope.closed_form.network import from_model
from curvescope.closed_form.network.from_model import (
    attention_blocks,
    attention_curvature,
    attention_moments,
    stack_curvature,
)
from selection import a_half, one_in, pairs, some

TOL = 1e-10
SMALL = {"n_layers": 2, "d_model": 4, "n_heads": 2, "d_ff": 3, "n_ctx": 4, "vocab_size": 4, "init_std": 0.4}
CONFIGS = {
    "pre": {},
    "none": {"norm": "none"},
    "post, rms, swiglu": {"norm": "post", "norm_kind": "rmsnorm", "activation": "swiglu"},
    "one head, not causal": {"n_heads": 1, "causal": False, "residual_scale": 0.5},
    "four heads, no biases, tied": {"n_heads": 4, "bias_qkv": False, "bias_o": False, "tied": True},
    "rope": {"positions": "rope"},
    "rope, shared keys": {"positions": "rope", "n_kv_heads": 1, "norm_affine": False, "d_head": 4},
    "alibi, wide heads": {"score_bias": "alibi", "d_head": 3, "positions": "none"},
    "learned score bias, no ff": {"score_bias": "learned", "d_ff": 0},
    "linear attention": {"attention": "linear", "norm": "none", "activation": "gelu_tanh"},
    "classes": {"outputs": "class", "n_out": 3, "bias_u": True},
    "regression, no residual": {
        "inputs": "continuous",
        "outputs": "regression",
        "n_out": 2,
        "residual": False,
        "norm": "none",
        "activation": "silu",
    },
    "images": {"inputs": "patches", "image_size": 4, "outputs": "class", "n_out": 3, "causal": False},
}
HEADS = [name for name in CONFIGS if name != "rope, shared keys"]


def zoo(**settings):
    return cs.load(oracles.shaken(cs.Transformer(cs.TransformerConfig(**{**SMALL, **settings}))))


def data(cfg, lengths=(3,)):
    """Three sequences of three positions per length, one batch each; some targets ignored, some weights."""
    source, found = torch.Generator().manual_seed(4), []
    for T in lengths:
        if cfg.inputs == "tokens":
            x = torch.randint(0, cfg.vocab_size, (3, T), generator=source)
        else:
            shape = (3, 1, 4, 4) if cfg.inputs == "patches" else (3, T, cfg.d_model)
            x = torch.randn(shape, generator=source).double()
        if cfg.outputs == "regression":
            y = torch.randn((3, T, cfg.n_out), generator=source).double()
        else:
            y = torch.randint(
                0, cfg.output_size, (3,) if cfg.outputs == "class" else (3, T), generator=source
            )
            y.view(-1)[1] = -100
        found.append(cs.Batch(x, y, torch.rand(3, generator=source).double() + 0.5))
    return cs.Batches(found)


def make(name):
    model = zoo(**CONFIGS[name])
    loss = "mse" if model.module.cfg.outputs == "regression" else "cross_entropy"
    batches = data(model.module.cfg)
    return model, batches, loss, cs.Problem(model, batches, loss)


def block_name(layer, head, weight):
    role = weight if weight.startswith("b_") else f"W_{weight}"
    return f"L{layer}.{role}" if head is None else f"L{layer}.h{head}.{role}"


def matrix(found, names, part="total"):
    """All blocks of the closed form, one matrix in the order of the names."""
    rows = []
    for a in names:
        row = [found.to_dense((a, b), part).flatten(2).flatten(0, 1) for b in names]
        rows.append(torch.cat(row, dim=1))
    return torch.cat(rows)


def ordered(found, model, layer, head):
    """The closed form's weights in the order of the operator's space, and the names of that space."""
    blocks = {block_name(layer, head, weight): weight for weight in found.names}
    names = [block.name for block in model.space(*blocks)]
    return names, [blocks[name] for name in names]


def close(found, expected, scale=None):
    assert found.shape == expected.shape
    scale = float(expected.abs().max()) if scale is None else scale
    assert scale > 1e-8
    assert float((found - expected).abs().max()) <= TOL * scale


@pytest.mark.parametrize(("name", "layer"), pairs(list(CONFIGS), [0, 1], every=5))
def test_layers_against_operators(name, layer):
    model, batches, loss, problem = make(name)
    found = attention_curvature(model, batches[0], layer, loss=loss)
    names, weights = ordered(found, model, layer, None)
    H = matrix(found, weights)
    close(H, cs.Hessian(problem, *names).to_dense())
    close(H, H.T)


@pytest.mark.parametrize("layer", a_half([0, 1], shift=1))
@pytest.mark.parametrize("name", one_in(list(CONFIGS), 6, shift=1))
def test_outer_parts_of_layers_against_operators(name, layer):
    model, batches, loss, problem = make(name)
    found = attention_curvature(model, batches[0], layer, loss=loss)
    names, weights = ordered(found, model, layer, None)
    outward = attention_curvature(model, batches, layer, loss=loss, curvature="ggn")
    close(matrix(outward, weights, "outer"), cs.GGN(problem, *names).to_dense())
    assert torch.equal(matrix(outward, weights, "functional"), matrix(found, weights, "functional"))


@pytest.mark.parametrize("layer", a_half([0, 1], shift=0))
@pytest.mark.parametrize("name", one_in(list(CONFIGS), 6, shift=2))
def test_functional_parts_of_layers_against_operators(name, layer):
    model, batches, loss, problem = make(name)
    bent = attention_curvature(model, batches, layer, loss=loss, curvature="functional")
    names, weights = ordered(bent, model, layer, None)
    scale = float(matrix(attention_curvature(model, batches, layer, loss=loss), weights).abs().max())
    close(matrix(bent, weights), cs.FunctionalHessian(problem, *names).to_dense(), scale)


@pytest.mark.parametrize("name", one_in(HEADS, 6, shift=4))
def test_single_heads_against_operators(name):
    model, batches, loss, problem = make(name)
    layer, head = 0, model.module.cfg.n_heads - 1
    found = attention_curvature(model, batches, layer, loss=loss, head=head)
    names, weights = ordered(found, model, layer, head)
    assert "O" in weights
    assert "b_O" not in weights
    close(matrix(found, weights), cs.Hessian(problem, *names).to_dense())
    outward = attention_curvature(model, batches, layer, loss=loss, head=head, curvature="ggn")
    close(matrix(outward, weights, "outer"), cs.GGN(problem, *names).to_dense())


@pytest.mark.parametrize("head", [0, 1])
def test_merged_scores_head_by_head(head):
    model = zoo(merged_qk=True, score_bias="alibi", norm="post")
    batches = data(model.module.cfg)
    found = attention_curvature(model, batches, 1, head=head)
    names, weights = ordered(found, model, 1, head)
    assert set(weights) == {"QK", "V", "b_V", "O"}
    close(matrix(found, weights), cs.Hessian(cs.Problem(model, batches), *names).to_dense())


def test_without_anything_behind_it_a_layer_has_the_loss_as_its_rest():
    """No residual, norm or feed-forward, squared error of the stream: B = 2/(L d)·I over N sequences."""
    plain = {"norm": "none", "d_ff": 0, "residual": False, "inputs": "continuous", "outputs": "regression"}
    model = zoo(n_layers=1, **plain, bias_o=False)
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 4, generator=source).double() for _ in range(2))
    found = attention_curvature(model, (x, y), 0, loss="mse").layer
    assert torch.allclose(
        found.B, (2 / 24 * torch.eye(12).double()).reshape(3, 4, 3, 4).expand(2, -1, -1, -1, -1)
    )
    assert torch.allclose(found.G, 2 / 24 * (model.module(x) - y))


def test_blocks_are_dense_and_only_those_asked_for():
    model, batches, loss, _ = make("pre")
    found = attention_curvature(model, batches, 1, loss=loss)
    every = attention_blocks(model, batches, 1, loss=loss)
    assert set(every) == {(a, b) for a in found.names for b in found.names}
    some = attention_blocks(model, batches, 1, loss=loss, pairs=[("Q", "K")])
    assert set(some) == {("Q", "K")}
    assert some["Q", "K"].outer.shape == (4, 4, 4, 4)
    assert torch.equal(some["Q", "K"].total, every["Q", "K"].total)


def test_batches_are_put_together_and_cut_as_one_likes():
    model = zoo()
    batches = data(model.module.cfg, lengths=(3, 3))
    cut = cs.Batches([part[i : i + 1] for part in batches for i in range(3)])
    whole, parts = (attention_curvature(model, b, 0).to_dense(("Q", "K")) for b in (batches, cut))
    close(whole, parts)
    stacks = [stack_curvature(model, b) for b in (batches, cut)]
    close(stacks[0].hessian().to_dense(), stacks[1].hessian().to_dense())
    assert float(stacks[0].value) == pytest.approx(cs.Problem(model, batches).loss_value(), rel=1e-12)


def test_the_model_is_left_as_it_was():
    model, batches, loss, _ = make("pre")
    module = model.module.train()
    before = {name: (id(p), p.clone(), p._version) for name, p in module.named_parameters()}
    outputs, attributes = module(batches[0].inputs), set(vars(module.L1))
    with torch.inference_mode():
        attention_curvature(model, batches, 1, loss=loss)
    stack_curvature(model, batches, loss).hvp({"U": torch.ones_like(module.U)})
    assert all(m.training for m in module.modules())
    assert set(vars(module.L1)) == attributes
    for name, p in module.named_parameters():
        assert (id(p), p._version) == (before[name][0], before[name][2])
        assert torch.equal(p, before[name][1])
        assert p.grad is None
    assert torch.equal(module(batches[0].inputs), outputs)


# ---------------------------------------------------------------------------------------------------- moments


@pytest.mark.parametrize("name", ["pre", "rope, shared keys", "images"])
def test_moments_of_the_real_attention(name):
    model, batches, _, _ = make(name)
    seen = {}
    model.module(batches[0].inputs, lambda place, tensor: seen.__setitem__(place, tensor.detach()))
    A, X = seen["L1.attn.pattern"], seen["L1.attn.in"]
    found = attention_moments(model, batches[0].inputs, 1)
    n, h, L, _ = A.shape
    assert found.M3.shape == (n, h, L, 4, 4, 4)
    for b, k, i in [(0, 0, 0), (1, h - 1, L - 1), (2, 0, L - 1)]:
        weights = A[b, k, i]
        mean = sum(weights[j] * X[b, j] for j in range(L))
        deviation = X[b] - mean
        close(found.M1[b, k, i], mean)
        assert torch.allclose(found.M2[b, k, i], torch.einsum("j,ja,jb->ab", weights, deviation, deviation))
        third = torch.einsum("j,ja,jb,jc->abc", weights, deviation, deviation, deviation)
        assert torch.allclose(found.M3[b, k, i], third)
    one = attention_moments(model, batches[0].inputs, 1, head=h - 1)
    assert torch.equal(one.M2, found.M2[:, h - 1 :])


def test_linear_attention_has_no_moments():
    model, batches, _, _ = make("linear attention")
    with pytest.raises(cs.UsageError, match="softmax attention"):
        attention_moments(model, batches[0].inputs, 0)


# ----------------------------------------------------------------------------------------------------- stacks

STACKS = [name for name, cfg in CONFIGS.items() if cfg.get("positions") != "rope" and "score_bias" not in cfg]
FEW = ["post, rms, swiglu", "images"]


@pytest.mark.parametrize("name", some([*FEW, *(name for name in STACKS if name not in FEW)], len(FEW)))
def test_stacks_against_operators(name):
    model, batches, loss, problem = make(name)
    found = stack_curvature(model, batches, loss)
    names = list(model.blocks)
    H, ggn = cs.Hessian(problem, *names).to_dense(), cs.GGN(problem, *names).to_dense()
    close(found.hessian().to_dense(names), H)
    close(found.ggn().to_dense(names), ggn)
    close(sum(term.to_dense(names) for term in found.sources().values()), H - ggn, float(H.abs().max()))
    v = torch.randn(len(H), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    close(found.operator(names) @ v, H @ v)
    assert any(".attention.core" in source for source in found.sources())


@pytest.mark.parametrize("loss", ["mse_mean", "custom"])
def test_stacks_take_every_loss(loss):
    model = zoo(**CONFIGS["regression, no residual"], n_layers=1)
    batches = data(model.module.cfg)
    batches = cs.Batches([cs.Batch(b.inputs, b.targets) for b in batches])
    loss = oracles.as_package_loss(loss)
    names = list(model.blocks)
    H = cs.Hessian(cs.Problem(model, batches, loss), *names).to_dense()
    close(stack_curvature(model, batches, loss).hessian().to_dense(names), H)


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"positions": "rope"}, "rope"), ({"merged_qk": True}, "True"), ({"score_bias": "learned"}, "learned")],
)
def test_what_a_stack_does_not_have_is_said(settings, word):
    model = zoo(**settings)
    with pytest.raises(cs.UsageError, match=f"{next(iter(settings))}.*got '?{word}"):
        stack_curvature(model, data(model.module.cfg))


# ------------------------------------------------------------------------------------------------------- maps


def test_a_map_holds_norms_of_features_or_entries(tmp_path):
    model, batches, loss, problem = make("pre")
    found = attention_curvature(model, batches, 0, loss=loss, head=1)
    H = cs.Hessian(problem, *(f"L0.h1.W_{role}" for role in "QKVO")).to_dense()
    entries = block_split(found, "QKVO", resolution="entries")
    assert entries.sizes == [8, 8, 8, 8]
    close(torch.from_numpy(entries.total), H.abs())
    features = block_split(found, "QKVO")
    assert features.sizes == [2, 2, 2, 2]
    Q, O = H[:8].reshape(4, 2, 32), H[24:].reshape(2, 4, 32)  # noqa: E741
    expected = (O[:, :, :8].reshape(2, 4, 4, 2) ** 2).sum((1, 2)).sqrt()
    close(torch.from_numpy(features.total[6:, :2]), expected)
    expected = (Q[:, :, 8:16].reshape(4, 2, 4, 2) ** 2).sum((0, 2)).sqrt()
    close(torch.from_numpy(features.total[:2, 2:4]), expected)
    for part in ("outer", "functional"):
        close(torch.from_numpy(getattr(entries, part)), matrix(found, "QKVO", part).abs())
    some = block_split(found, "QK", pairs=[("Q", "K")])
    assert torch.isnan(torch.from_numpy(some.outer[:2, :2])).all()
    assert torch.equal(torch.from_numpy(some.outer[:2, 2:]), torch.from_numpy(some.outer[2:, :2].T))
    back = BlockSplit.load(features.save(tmp_path))
    assert back.names == ["Q", "K", "V", "O"]
    assert (back.functional == features.functional).all()


# --------------------------------------------------------------------------------------------------- refusals


def test_refusals_are_one_sentence():
    model, batches, _, _ = make("pre")
    with pytest.raises(cs.UsageError, match="layer from 0 to 1, got 2"):
        attention_curvature(model, batches, 2)
    with pytest.raises(cs.UsageError, match="head from 0 to 1, got -1"):
        attention_curvature(model, batches, 0, head=-1)
    with pytest.raises(cs.UsageError, match="hessian, ggn, functional, got 'fisher'"):
        attention_curvature(model, batches, 0, curvature="fisher")
    with pytest.raises(cs.UsageError, match=r"at most 11 entries .* got 3 · 4 = 12 \(use shorter sequences"):
        attention_curvature(model, batches, 0, limit=11)
    with pytest.raises(cs.UsageError, match="sequences of one length"):
        attention_curvature(model, data(model.module.cfg, lengths=(3, 2)), 0)
    with pytest.raises(cs.UsageError, match="sequences of one length"):
        stack_curvature(model, data(model.module.cfg, lengths=(3, 2)))
    with pytest.raises(cs.UsageError, match="shares its keys and values"):
        attention_curvature(zoo(n_kv_heads=1), batches, 0, head=0)
    with pytest.raises(cs.UsageError, match="expected a head from 0 to 1 of a model with merged_qk"):
        attention_curvature(zoo(merged_qk=True), batches, 0)
    mlp = cs.MLPConfig(d_in=3, d_hidden=4, d_out=5, vocab_size=5)
    for call in (lambda: attention_curvature(mlp, batches, 0), lambda: stack_curvature(mlp, batches)):
        with pytest.raises(cs.UsageError, match="expected a zoo Transformer, got a MLP"):
            call()
    found = attention_curvature(model, batches, 0)
    for call in (
        lambda: block_split(found, ["QK"]),
        lambda: block_split(found, ["Q"], pairs=[("Q", "K")]),
        lambda: block_split(found, resolution="pixels"),
    ):
        with pytest.raises(cs.UsageError):
            call()


def test_a_loss_that_couples_sequences_is_refused():
    model = zoo(**CONFIGS["regression, no residual"])
    batches = data(model.module.cfg)
    coupled = cs.CustomLoss(lambda z, y, w: (z - y).sum() ** 2, lambda y, w: len(y))
    with pytest.raises(cs.UsageError, match="couples those of a batch"):
        attention_curvature(model, batches, 0, loss=coupled)
    one = cs.Batches([cs.Batch(b.inputs[:1], b.targets[:1]) for b in batches])
    found = attention_curvature(model, one, 0, loss=coupled)
    H = cs.Hessian(cs.Problem(model, one, coupled), "L0.W_Q").to_dense()
    close(found.to_dense(("Q", "Q")).reshape(H.shape), H)


def test_configurations_are_translated_field_by_field():
    cfg = cs.TransformerConfig(
        norm="post", norm_kind="rmsnorm", norm_eps=0.1, residual=False, outputs="class", n_out=2
    )
    arch = from_model.architecture(cfg)
    assert (arch.norm, arch.norm_kind, arch.norm_eps, arch.residual, arch.pooled) == (
        "post",
        "rmsnorm",
        0.1,
        False,
        True,
    )
