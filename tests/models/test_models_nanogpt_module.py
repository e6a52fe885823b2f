"""Live modules of nanoGPT: logits of every position, roles, its own loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import curvescope as cs
from curvescope.models.capture import capture
from front_door import assert_meets_autograd, leaves_of, twice_differentiable
from nano import nano
from oracles import relative_error

IDS = torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(0))
X, Y = IDS[:, :-1], IDS[:, 1:].contiguous()
CUT = [(X[:1], Y[:1]), (X[1:], Y[1:])]


def test_a_live_module_meets_autograd_at_all_positions():
    module = nano(n_layer=1)
    problems = [cs.Problem(module, data) for data in ((X, Y), CUT)]

    def of_outputs(z):
        return F.cross_entropy(z.flatten(0, 1), Y.flatten())

    assert_meets_autograd(
        problems,
        leaves_of(module),
        lambda: module(X, Y)[1],
        outputs=lambda: module(X, Y)[0],
        of_outputs=of_outputs,
    )


@pytest.mark.parametrize("bias", [True, False])
def test_its_blocks_have_roles(bias: bool):
    module = nano(bias=bias)
    model = cs.load(module)
    assert model.evaluate(X).shape == (3, 5, 7)
    assert {"E", "P", "L1.W_Q", "L1.W_O", "L1.W_2", "L0.ln1.g", "ln_f.g"} <= set(model.blocks)
    assert ("L0.b_K" in model.blocks) == bias
    assert not any("transformer" in name for name in model.blocks)
    assert model.facts["tied"]
    assert model.facts["n_ctx"] == 6
    H = cs.Hessian(cs.Problem(model, (X, Y)))
    first = H.block("L1.h0.W_K").to_dense()
    rows = module.transformer.h[1].attn.c_attn.weight
    with twice_differentiable():
        (g,) = torch.autograd.grad(module(X, Y)[1], rows, create_graph=True)
    flat = g[4:6].T.flatten()  # the first head of K: inputs × outputs
    truth = torch.stack([torch.autograd.grad(x, rows, retain_graph=True)[0][4:6].T.flatten() for x in flat])
    assert relative_error(first, truth) < 1e-9


def test_the_fast_engine_runs_it_and_leaves_the_head_to_the_loss():
    p = cs.Problem(nano(), (X, Y))
    H, plain = cs.Hessian(p), cs.Hessian(p, engine="autograd")
    v = torch.ones(H.shape[1], dtype=torch.float64)
    assert relative_error(H @ v, plain @ v) < 1e-10
    assert H.engine.name == "fast"
    assert H.engine.detector.known is not None
    assert H.engine.detector.known.head is not None


def test_labels_are_shifted_and_ids_are_checked():
    module = nano()
    p = cs.Problem(module, {"input_ids": IDS, "labels": IDS})
    assert p.loss_value() == pytest.approx(float(module(X, Y)[1].detach()), rel=1e-12)
    assert any("shifted" in note for note in p.notes)
    assert any("every position" in note for note in p.model.notes)
    with pytest.raises(cs.UsageError, match="tokens from 0 to 6, the vocabulary of 'GPT'"):
        cs.Problem(module, (X + 3, Y))


def test_its_own_loss_ignores_what_it_ignores():
    module, y = nano(n_layer=1), Y.clone()
    y[0, 2:] = -1
    p = cs.Problem(module, [(X, y)], loss="own")
    assert p.loss_value() == pytest.approx(float(module(X, y)[1].detach()), rel=1e-12)
    counted = [(X[:1], y[:1]), (X[1:], y[1:])]
    cut = cs.Problem(module, counted, loss="own", terms=lambda batch: (batch[1] != -1).sum())
    assert cut.loss_value() == pytest.approx(p.loss_value(), rel=1e-12)


def test_a_compiled_module_is_the_same():
    module = nano()
    compiled = cs.Problem(torch.compile(module, backend="eager"), (X, Y))
    plain = cs.Problem(module, (X, Y))
    assert list(compiled.model.blocks) == list(plain.model.blocks)
    v = torch.ones(plain.space().size, dtype=torch.float64)
    assert relative_error(cs.Hessian(compiled) @ v, cs.Hessian(plain) @ v) < 1e-12


def test_what_flows_through_it_can_be_seen():
    found = capture(cs.load(nano()), X, "L1.*")
    assert found["L1.attn.out"].shape == (3, 5, 4)
    assert found["L1.attn.heads"].shape == (3, 5, 4)
