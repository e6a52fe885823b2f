"""A monitor leaves training as it is, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from monitor_loops import IDS, LABELS, PROBE, TARGETS, Dropped, X, fit, seed_everything, states, tiny
from torch import nn

import curvescope as cs

BOTH = (X[:8], LABELS[:8])


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=4, n_head=1, n_positions=4, vocab_size=5, resid_pdrop=0.2, attn_pdrop=0.2
    )
    return transformers.GPT2LMHeadModel(config)


CASES = {
    "zoo": (tiny, lambda p: torch.optim.AdamW(p, lr=0.01), PROBE, (IDS, TARGETS)),
    "dropout and batch norm": (Dropped, lambda p: torch.optim.SGD(p, 0.1, 0.9), [BOTH], (X, LABELS)),
    "Hugging Face": (hugging_face, lambda p: torch.optim.Adam(p, lr=0.01), PROBE, (IDS, TARGETS)),
}


def trained(case, *, watched: bool, **options):
    make, optimizer_of, probe, data = CASES[case]
    module = make().train()
    optimizer = optimizer_of(module.parameters())
    monitor = (
        cs.CurvatureMonitor(module, probe, every=4, budget=1.0, blocks=False, num_probes=2)
        if watched
        else None
    )
    seed_everything()
    fit(module, optimizer, monitor, data=data, **options)
    if monitor is not None:
        assert monitor.history["step"].tolist() == [0, 4]
        assert monitor.history["lambda_max"].notna().all()
    return module, optimizer, states()


@pytest.mark.parametrize("case", CASES)
def test_same_bits_and_same_random_numbers(case):
    plain, optimizer, drawn = trained(case, watched=False)
    watched, theirs, drawn_watched = trained(case, watched=True)
    assert drawn == drawn_watched
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name
    for ours, other in zip(optimizer.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(other[k])) for k in ours)


def test_same_bits_under_autocast_with_a_scaler():
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=4.0)

    plain, _, drawn = trained("Hugging Face", watched=False, cast=True, scaler=scaler())
    watched, _, drawn_watched = trained("Hugging Face", watched=True, cast=True, scaler=scaler())
    assert drawn == drawn_watched
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name


def test_modes_gradients_and_buffers_stay():
    module = Dropped().train()
    module.net[1].eval()
    module.net[0].bias.requires_grad_(False)
    module(X).square().mean().backward()
    before = copy.deepcopy(module.state_dict())
    grads = {
        name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in module.named_parameters()
    }
    modes = [part.training for part in module.modules()]
    with torch.no_grad(), cs.CurvatureMonitor(module, [BOTH], every=1, budget=1.0) as monitor:
        assert monitor.step(0) is not None
        assert not torch.is_grad_enabled()
    assert [part.training for part in module.modules()] == modes
    assert not module.net[0].bias.requires_grad
    for name, p in module.named_parameters():
        assert p.grad is grads[name][0], name
        assert p.grad is None or torch.equal(p.grad, grads[name][1])
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class Counting(nn.Module):
    """Counts its calls in a buffer, whatever its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.calls += torch.rand((), dtype=torch.float64)
        return self.linear(x) ** 3


def test_what_a_module_writes_and_draws_while_it_is_measured_is_undone():
    module = Counting()
    monitor = cs.CurvatureMonitor(module, [BOTH], every=1, budget=1.0, blocks=False)
    seed_everything()
    before, drawn = module.calls.clone(), states()
    monitor.step(0)
    assert torch.equal(module.calls, before)
    assert states() == drawn


def test_the_module_inside_is_measured():
    module = tiny()
    parallel = nn.DataParallel(module)
    compiled = torch.compile(module, backend="eager")
    plain, *others = (
        cs.CurvatureMonitor(m, PROBE, every=1, budget=1.0, blocks=False).measure(0)["lambda_max"]
        for m in (module, parallel, compiled)
    )
    assert others == [plain, plain]


def test_a_module_compiled_in_place_is_measured():
    module = tiny()
    expected = cs.CurvatureMonitor(module, PROBE, blocks=False).measure(0)["lambda_max"]
    module.compile(backend="eager")
    compiled = vars(module)["_compiled_call_impl"]
    assert cs.CurvatureMonitor(module, PROBE, blocks=False).measure(0)["lambda_max"] == expected
    assert vars(module)["_compiled_call_impl"] is compiled


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_wrappers_without_second_derivatives_are_refused_by_name(name):
    kind = type(name, (nn.Linear,), {})
    with pytest.raises(cs.UsageError, match=name):
        cs.CurvatureMonitor(kind(5, 5), [BOTH])


def test_a_loader_as_probe_draws_nothing_of_the_training():
    pairs = torch.utils.data.TensorDataset(X[:8], LABELS[:8])
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    module = Dropped()
    seed_everything()
    before = states()
    monitor = cs.CurvatureMonitor(module, loader, blocks=False, budget=1.0, num_probes=2)
    assert states() == before
    with torch.autocast("cpu", dtype=torch.bfloat16):  # its own sums stay in full precision
        cast = monitor.measure(0)
    right = cs.eigsh(cs.Hessian(cs.Problem(module.eval(), loader)), 1).values[0]
    assert cast["lambda_max"] == pytest.approx(right, rel=1e-5)


def test_the_rate_is_that_of_what_is_measured():
    one, two = tiny(), tiny()
    groups = [{"params": one.parameters(), "lr": 0.001}, {"params": two.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    row = cs.CurvatureMonitor(one, PROBE, blocks=False, budget=1.0, num_probes=2).measure(0, optimizer)
    assert row["lr"] == 0.001
    other = cs.CurvatureMonitor(one, PROBE, blocks=False, budget=1.0, num_probes=2).measure(
        0, torch.optim.Adagrad(one.parameters(), lr=0.1)
    )
    assert "threshold" not in other  # nothing is known of what it sees
