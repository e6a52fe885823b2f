"""A linear recurrence with input-dependent coefficients, the core of Mamba and RWKV, and its curvature.

With t = 1 … T and h_0 = 0, channel by channel,

    h_t = a_t h_{t−1} + b_t,     h_t = Σ_{s ≤ t} π_{s→t} b_s,     π_{s→t} = Π_{s < r ≤ t} a_r.

For ℓ = Σ_t g_t h_t and the adjoint λ_t = g_t + a_{t+1} λ_{t+1} = Σ_{s ≥ t} π_{t→s} g_s the product rule gives

    ∂ℓ/∂b_s = λ_s                            ∂ℓ/∂a_s = λ_s h_{s−1}
    ∂²ℓ/∂a_s∂b_r = λ_s π_{r→s−1}             ∂²ℓ/∂a_s∂a_r = λ_s π_{r→s−1} h_{r−1}        for r < s,

the second symmetric in s and r, and zero otherwise: ℓ is linear in all b, and in each a alone. Products with
it take O(T) by two recurrences. Axis 0 is time, all others are channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scan(NamedTuple):
    """The states before and after each step, and the adjoint."""

    before: Tensor  # h_{t−1}, (T, …)
    states: Tensor  # h_t
    adjoint: Tensor  # λ_t


class Coefficients(NamedTuple):
    """a_t and b_t as functions of an input x_t of their own channel, with two derivatives; (T, …) each."""

    a: Tensor
    b: Tensor
    a_first: Tensor
    b_first: Tensor
    a_second: Tensor
    b_second: Tensor


def scan(a: Tensor, b: Tensor, g: Tensor) -> Scan:
    """Compute h_t forward and λ_t backward."""
    h, states = torch.zeros_like(b[0]), []
    for a_t, b_t in zip(a, b, strict=True):
        h = a_t * h + b_t
        states.append(h)
    return Scan(_shifted(torch.stack(states)), torch.stack(states), _adjoint(a, g))


def scan_gradient(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """∂ℓ/∂a and ∂ℓ/∂b, (T, …) each."""
    at = scan(a, b, g)
    return at.adjoint * at.before, at.adjoint


def scan_hessian(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """∂²ℓ/∂a_s∂a_r and ∂²ℓ/∂a_s∂b_r, (T, T, …) each; ∂²ℓ/∂b∂b is zero."""
    at = scan(a, b, g)
    mixed = at.adjoint[:, None] * _transitions(a)
    below = mixed * at.before[None]
    return below + below.transpose(0, 1), mixed


def scan_product(a: Tensor, b: Tensor, g: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Hessian in (a, b) times (da, db), in O(T): tangents of h forward and of λ backward."""
    at = scan(a, b, g)
    before_tangent = scan(a, da * at.before + db, g).before
    ahead = torch.cat([da[1:] * at.adjoint[1:], torch.zeros_like(g[:1])])
    adjoint = _adjoint(a, ahead)
    return adjoint * at.before + at.adjoint * before_tangent, adjoint


def scan_input_hessian(c: Coefficients, g: Tensor) -> Tensor:
    """∂²ℓ/∂x_s∂x_r, (T, T, …), where a_t and b_t are functions of x_t.

    With M the Hessian in the coefficients: a′ M_aa a′ + a′ M_ab b′ + b′ M_ba a′, and on the diagonal
    (∂ℓ/∂a) a″ + (∂ℓ/∂b) b″.
    """
    aa, ab = scan_hessian(c.a, c.b, g)
    to_a, to_b = scan_gradient(c.a, c.b, g)
    mixed = c.a_first[:, None] * ab * c.b_first[None]
    hessian = c.a_first[:, None] * aa * c.a_first[None] + mixed + mixed.transpose(0, 1)
    diagonal = to_a * c.a_second + to_b * c.b_second
    steps = torch.arange(len(diagonal))
    hessian[steps, steps] += diagonal
    return hessian


def selective(x: Tensor, *, decay: float = 1.0) -> Coefficients:
    """Return Mamba's coefficients of one state: a = exp(−A Δ), b = Δ x, Δ = log(1 + eˣ), A = `decay`."""
    step, slope = torch.nn.functional.softplus(x), x.sigmoid()
    bend = slope * (1 - slope)
    a = (-decay * step).exp()
    return Coefficients(
        a=a,
        b=step * x,
        a_first=-decay * slope * a,
        b_first=slope * x + step,
        a_second=(decay**2 * slope**2 - decay * bend) * a,
        b_second=bend * x + 2 * slope,
    )


def _adjoint(a: Tensor, g: Tensor) -> Tensor:
    """λ_t = g_t + a_{t+1} λ_{t+1}, (T, …)."""
    adjoints = [g[-1]]
    for t in range(len(g) - 2, -1, -1):
        adjoints.append(g[t] + a[t + 1] * adjoints[-1])
    return torch.stack(adjoints[::-1])


def _shifted(states: Tensor) -> Tensor:
    """Return h_{t−1} from h_t."""
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])


def _transitions(a: Tensor) -> Tensor:
    """Return π_{r→s−1} at (s, r) for r < s, zero elsewhere: (T, T, …)."""
    T = len(a)
    transitions = a.new_zeros(T, T, *a.shape[1:])
    for s in range(1, T):
        transitions[s] = a[s - 1] * transitions[s - 1]
        transitions[s, s - 1] = 1.0
    return transitions
