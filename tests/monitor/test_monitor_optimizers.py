"""Optimizers and ways of training that people use: measured, or refused by name in a note."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from monitor_loops import IDS, PROBE, TARGETS, fit, seed_everything, states, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import curvescope as cs

QUICK = {"every": 2, "budget": 1.0, "blocks": False, "num_probes": 2}


class MuonWithAdam(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices and plain descent for the rest, as in copies people train with."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p)).mul_(group["momentum"]).add_(p.grad)
                if p.dim() == 2:
                    U, _, V = torch.linalg.svd(m, full_matrices=False)
                    m = U @ V
                p.add_(m, alpha=-group["lr"])


def matrices(module):
    return [p for p in module.parameters() if p.dim() == 2]


def others(module):
    return [p for p in module.parameters() if p.dim() != 2]


def muon_of_torch(module):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("a torch without Muon")
    return torch.optim.Muon(matrices(module), lr=0.02)


KNOWN = {
    "foreach AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "capturable rate": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": matrices(m), "lr": 0.01}, {"params": others(m), "lr": 0.001, "weight_decay": 0.0}]
    ),
    "foreach SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
}
REFUSED = {
    "Muon": muon_of_torch,
    "MuonWithAdam": lambda m: MuonWithAdam(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
}


def trained(make, *, watched):
    module = tiny()
    optimizer = make(module)
    monitor = cs.CurvatureMonitor(module, PROBE, raise_errors=True, **QUICK) if watched else None
    seed_everything()
    fit(module, optimizer, monitor, steps=range(5))
    return torch.nn.utils.parameters_to_vector(module.parameters()), states(), monitor, optimizer, module


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_optimizer_has_its_sharpness_and_keeps_its_bits(name):
    plain, drawn, *_ = trained(KNOWN[name], watched=False)
    watched, drawn_watched, monitor, optimizer, module = trained(KNOWN[name], watched=True)
    assert torch.equal(plain, watched)
    assert drawn == drawn_watched
    expected = cs.preconditioned_sharpness(cs.Hessian(cs.Problem(module, PROBE)), optimizer)
    assert monitor.history["sharpness"].iloc[-1] == pytest.approx(expected.value, rel=0.02)


@pytest.mark.parametrize("name", REFUSED)
def test_another_optimizer_is_refused_by_name_and_the_rest_is_measured(name):
    plain, drawn, *_ = trained(REFUSED[name], watched=False)
    watched, drawn_watched, monitor, *_ = trained(REFUSED[name], watched=True)
    assert torch.equal(plain, watched)
    assert drawn == drawn_watched
    assert monitor.history["sharpness"].isna().all()
    assert monitor.history["lambda_max"].notna().all()
    assert monitor.history["curvature_along_update"].notna().sum() == 2
    assert sum(name in note for note in monitor.notes) == 1


def test_adafactor_of_transformers_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    _, _, monitor, *_ = trained(lambda m: transformers.Adafactor(m.parameters()), watched=True)
    assert any("Adafactor" in note for note in monitor.notes)
    assert monitor.history["lambda_max"].notna().all()


class Checkpointed(nn.Module):
    """Layers that PyTorch computes again in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(self.inner, ids, use_reentrant=False)


@pytest.mark.parametrize("wrap", [Checkpointed, lambda m: torch.compile(m, backend="eager")])
def test_checkpointed_and_compiled_modules_accumulate_the_same_bits(wrap):
    found = []
    for watched in (False, True):
        module = wrap(tiny())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        monitor = cs.CurvatureMonitor(module, PROBE, raise_errors=True, **QUICK) if watched else None
        for step in range(3):
            optimizer.zero_grad()
            for part in (slice(0, 3), slice(3, 6)):  # gradients of two batches are added up
                loss = F.cross_entropy(module(IDS[part]).flatten(0, 1), TARGETS[part].flatten()) / 2
                loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.step(step, optimizer=optimizer, loss=loss)
        found.append(torch.nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*found)
    assert monitor.history["lambda_max"].notna().all()


# ------------------------------------------------------------------------------- new columns


def test_the_last_step_is_that_of_the_optimizer():
    module = tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    monitor = cs.CurvatureMonitor(module, PROBE, raise_errors=True, **{**QUICK, "every": 1})
    fit(module, optimizer, monitor, steps=[0])
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    fit(module, optimizer, monitor, steps=[1])
    d = torch.nn.utils.parameters_to_vector(module.parameters()).detach() - before
    H = cs.Hessian(cs.Problem(module, PROBE)).to_dense()
    row = monitor.history.iloc[-1]
    assert row["update_norm"] == pytest.approx(float(d.norm()), rel=1e-9)
    assert row["curvature_along_update"] == pytest.approx(float(d @ H @ d / (d @ d)), rel=1e-6)
    assert math.isnan(monitor.history["update_norm"][0])


def test_shares_of_the_top_eigenvector_are_those_of_its_blocks():
    module = tiny()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    fit(module, optimizer, steps=range(20))
    monitor = cs.CurvatureMonitor(module, PROBE, raise_errors=True, tol=1e-5, **QUICK)
    monitor.measure(0, optimizer)
    problem = cs.Problem(module, PROBE)
    u = torch.linalg.eigh(cs.Hessian(problem).to_dense())[1][:, -1]
    blocks = monitor.blocks.set_index("block")
    slices = problem.space().slices
    if set(slices) == set(blocks.index):
        for name, rows in slices.items():
            assert blocks.loc[name, "lambda_max_share"] == pytest.approx(
                float(u[rows].square().sum()), abs=0.01
            )
    for column in ("lambda_max_share", "sharpness_share"):
        assert blocks[column].sum() == pytest.approx(1)
    norm = math.sqrt(sum(float(p.detach().square().sum()) for p in module.parameters()))
    assert monitor.history["weight_norm"][0] == pytest.approx(norm)
    assert math.sqrt((blocks["weight_norm"] ** 2).sum()) == pytest.approx(norm)


def test_the_preconditioner_is_formed_little_by_little():
    module = tiny()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.9, 0.99))
    monitor = cs.CurvatureMonitor(module, PROBE, **QUICK)
    fit(module, optimizer, monitor, steps=range(5))
    formed = monitor.history["preconditioner_formed"].tolist()
    assert formed == pytest.approx([1 - 0.99**t for t in (1, 3, 5)])


def test_training_losses_are_kept_and_go_on_after_a_kill(tmp_path):
    module = tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def watch():
        return cs.CurvatureMonitor(module, PROBE, out=tmp_path / "run", raise_errors=True, **QUICK)

    monitor = watch()
    for step in range(4):
        fit(module, optimizer, steps=[step])
        monitor.step(step, optimizer, loss=torch.tensor(1.0 + step))
    assert monitor.history["train_loss"].tolist() == [1.0, 3.0]
    again = watch()
    for step in (3, 4):
        fit(module, optimizer, steps=[step])
        again.step(step, optimizer, loss=10.0 * step)
    import pandas as pd

    told = pd.read_csv(tmp_path / "run" / "steps.csv")
    assert told["step"].tolist() == [0, 1, 2, 3, 4]
    assert told["loss"].tolist() == [1.0, 2.0, 3.0, 30.0, 40.0]


class Attention(nn.Module):
    """One head, by PyTorch's function or by a softmax of its own."""

    def __init__(self, kind):
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.kind, self.E = kind, nn.Embedding(5, 4).double()
        self.E.weight.data = torch.randn(5, 4, generator=source, dtype=torch.float64)
        self.out = nn.Linear(4, 5).double()

    def forward(self, ids):
        x = self.E(ids)[:, None]  # (B, 1, T, d)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        if self.kind == "causal":
            y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        elif self.kind == "mask":
            y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        else:
            scores = (x @ x.transpose(-1, -2) / 2).masked_fill(~mask, -torch.inf)
            y = (F.softmax(scores, dim=-1) if self.kind == "function" else scores.softmax(-1)) @ x
        return self.out(y[:, 0])


@pytest.mark.parametrize("kind", ["causal", "mask", "function", "method"])
def test_entropy_and_logits_of_attention(kind):
    module = Attention(kind)
    row = cs.CurvatureMonitor(module, PROBE, raise_errors=True, **QUICK).measure(0)
    ids = PROBE[0][0]
    x = module.E.weight.detach()[ids]
    scores = x @ x.transpose(-1, -2) / 2
    shares = []
    for b in range(len(ids)):
        for t in range(1, ids.shape[1]):
            p = scores[b, t, : t + 1].softmax(-1)
            shares.append(float(-(p * p.log()).sum()) / math.log(t + 1))
    visible = torch.ones_like(scores, dtype=torch.bool).tril()
    assert row["attention_entropy"] == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    assert row["attention_entropy_min"] == row["attention_entropy"]
    assert row["attention_logit_max"] == pytest.approx(float(scores[visible].abs().max()), rel=1e-5)


def test_a_state_that_was_copied_is_not_written():
    module = tiny()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    fit(module, optimizer, steps=range(2))
    before = copy.deepcopy(optimizer.state_dict())
    cs.CurvatureMonitor(module, PROBE, **QUICK).measure(0, optimizer)
    after = optimizer.state_dict()
    for key, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][key][name]))
