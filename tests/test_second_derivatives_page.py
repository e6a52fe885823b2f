"""The page on second derivatives: its code, its four examples, and its table of torch's own functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvescope as cs
import guides

PAGE = Path(__file__).parent.parent / "docs" / "second_derivatives.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page leaves behind, its outputs compared."""
    with torch.random.fork_rng(devices=[]):
        return guides.run("second_derivatives.md")


def slope(model: nn.Module, loss: Callable[[], Tensor], *, by_differences: bool) -> Tensor:
    """The derivative of a loss along one direction of all parameters."""
    source = torch.Generator().manual_seed(5)
    parameters = list(model.parameters())
    along = [torch.randn(p.shape, generator=source, dtype=p.dtype) for p in parameters]
    if not by_differences:
        gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
        return torch.stack(
            [(g * v).sum() for g, v in zip(gradients, along, strict=True) if g is not None]
        ).sum()
    eps, values = 1e-5, []
    for sign in (1, -1, -1, 1):  # the last brings the parameters back
        with torch.no_grad():
            for p, v in zip(parameters, along, strict=True):
                p.add_(v, alpha=sign * eps)
        values.append(loss().detach())
    return (values[0] - values[2]) / (2 * eps)


@pytest.mark.parametrize("example", ["gradient penalty", "MAML", "forces"])
def test_the_gradient_of_an_example_is_that_of_finite_differences(page, example):
    model, loss = {
        "gradient penalty": (
            page["critic"],
            lambda: page["gradient_penalty"](page["critic"], page["real"], page["fake"], page["mix"]),
        ),
        "MAML": (
            page["learner"],
            lambda: page["after_one_step"](page["learner"], page["support"], page["query"]),
        ),
        "forces": (
            page["energy"],
            lambda: page["force_matching"](page["energy"], page["kinds"], page["positions"], page["wanted"]),
        ),
    }[example]
    found = slope(model, loss, by_differences=False)
    torch.testing.assert_close(found, slope(model, loss, by_differences=True), rtol=1e-6, atol=1e-9)


def test_mean_flow_is_that_of_the_plain_path_and_its_derivative_that_of_differences(page):
    flow, given = page["flow"], [page[name] for name in ("data", "noise", "r", "t")]
    plain = page["Flow"]().double()
    plain.load_state_dict(flow.state_dict())
    found = slope(flow, lambda: page["mean_flow_loss"](flow, *given), by_differences=False)
    with sdpa_kernel(SDPBackend.MATH):
        want = slope(plain, lambda: page["mean_flow_loss"](plain, *given), by_differences=False)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    data, noise, r, t = given
    z, v, eps = (1 - t) * data + t * noise, noise - data, 1e-5
    du_dt = torch.func.jvp(flow, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))[1]
    moved = [flow(z + s * eps * v, r, t + s * eps) for s in (1, -1)]
    torch.testing.assert_close(du_dt, (moved[0] - moved[1]) / (2 * eps), rtol=1e-6, atol=1e-8)


def test_forces_are_minus_the_slope_of_the_energy(page):
    energy, kinds, x = page["energy"], page["kinds"], page["positions"]
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype)
    with torch.no_grad():
        moved = [energy(kinds, x + s * 1e-5 * v).sum() for s in (1, -1)]
    found = (page["forces"](energy, kinds, x) * v).sum()
    torch.testing.assert_close(-found, (moved[0] - moved[1]) / 2e-5, rtol=1e-7, atol=1e-10)


# ----------------------------------------------------------------------------------- the table of torch's own

X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "F.scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*(x[:, None],) * 3),
    "F.layer_norm": lambda x: F.layer_norm(x, (6,)),
    "F.batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "F.instance_norm": F.instance_norm,
    "F.glu": F.glu,
    "F.rms_norm": lambda x: F.rms_norm(x, (6,)),
    "F.group_norm": lambda x: F.group_norm(x, 2),
    "F.gelu": F.gelu,
    "F.silu": F.silu,
    "F.softmax": lambda x: F.softmax(x, -1),
    "F.cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(12) % 6, reduction="none"),
}
ROW = re.compile(r"^\| (`F\..*?) \| (.*) \|$", flags=re.M)
SAID = {
    name: [cell.strip(" *") for cell in cells.split("|")]
    for names, cells in ROW.findall(TEXT)
    for name in re.findall(r"`(F\.\w+)`", names)
}


def verdicts(function: Callable[[Tensor], Tensor]) -> list[str]:
    """Each kind of derivative along one direction, beside differences: right, wrong or raises."""
    source = torch.Generator().manual_seed(8)
    v = torch.randn(X.shape, generator=source, dtype=X.dtype)
    with torch.no_grad():
        weights = torch.randn(function(X).shape, generator=source, dtype=X.dtype)

    def loss(x: Tensor) -> Tensor:
        return (function(x).sin() * weights).sum()

    jvp, grad = torch.func.jvp, torch.func.grad

    def double_backward() -> Tensor:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return (torch.autograd.grad((first * v).sum(), x)[0] * v).sum()

    def differences(eps: float) -> tuple[Tensor, Tensor]:
        up, at, down = (loss(X + s * eps * v) for s in (1, 0, -1))
        return (up - down) / (2 * eps), (up - 2 * at + down) / eps**2

    fine, coarse = differences(1e-4), differences(2e-4)
    first, second = ((4 * a - b) / 3 for a, b in zip(fine, coarse, strict=True))  # without the error in ε²
    ways: list[tuple[Callable[[], Tensor], Tensor]] = [
        (lambda: jvp(loss, (X,), (v,))[1], first),
        (double_backward, second),
        (lambda: (jvp(grad(loss), (X,), (v,))[1] * v).sum(), second),
        (lambda: (grad(lambda x: jvp(loss, (x,), (v,))[1])(X) * v).sum(), second),
        (lambda: jvp(lambda x: jvp(loss, (x,), (v,))[1], (X,), (v,))[1], second),
    ]
    return [_verdict(way, want) for way, want in ways]


def _verdict(way: Callable[[], Tensor], want: Tensor) -> str:
    try:
        found = way()
    except (RuntimeError, NotImplementedError):
        return "raises"
    return "right" if abs(float(found - want)) < 1e-5 * (1 + abs(float(want))) else "wrong"


def test_the_page_lists_the_functions_that_are_tried():
    assert set(SAID) == set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_what_the_page_says_of_torchs_own_function(name):
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the table is about torch 2.13")
    assert verdicts(OWN[name]) == SAID[name]


@pytest.mark.parametrize("name", OWN)
def test_inside_the_context_every_derivative_is_right(name):
    with cs.twice_differentiable(nn.Identity()):
        assert verdicts(OWN[name]) == ["right"] * 5


def test_the_hessian_of_a_network_with_layer_norms_is_right_inside():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3), nn.LayerNorm(3)
    ).double()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    x = X[0, :, :4]

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split([s.numel() for s in shapes.values()])
        named = {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        return torch.func.functional_call(model, named, (x,)).sin().sum()

    exact: Any = torch.autograd.functional.hessian(loss, theta)  # reverse over reverse
    with cs.twice_differentiable(model):
        torch.testing.assert_close(torch.func.hessian(loss)(theta), exact)


def test_the_message_that_people_search_for_is_there():
    for kernel in ("flash_attention", "efficient_attention", "flash_attention_for_cpu"):
        assert f"derivative for aten::_scaled_dot_product_{kernel}_backward is not implemented" in TEXT
