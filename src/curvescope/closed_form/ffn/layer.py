"""Feed-forward layers: Jacobian, curvature and every block of the Hessian, plain and gated.

Rows are tokens. A layer has one branch, z = a(x W_1 + b_1), or two, z = a(x W_g) ∘ (x W_u), and
y = z W_2 + b_2. With the branches' hidden values h^α, slopes D^α = ∂z/∂h^α, bends D^{αβ} = ∂²z/∂h^α∂h^β,
a cotangent g of y and R = g W_2ᵀ, all formulas need only U^α = R ∘ D^α and S^{αβ} = R ∘ D^{αβ}. Loss
curvature B enters as a number c (B = c I), one matrix per token (L, o, o), or in full (L, o, L, o).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import INPUT, BlockMatrix, Pair, symmetric
from curvescope.core.errors import ShapeError, UsageError, near_misses
from curvescope.core.hessian_terms import Part, check_part

ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "identity", "swiglu", "geglu"]


@dataclass(frozen=True)
class Activation:
    """a, a′ and a″ of an activation; with `gated`, z = a(x W_g) ∘ (x W_u) instead of a(x W_1)."""

    name: str
    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    gated: bool = False


def activation(name: str) -> Activation:
    """Return an activation by name; `swiglu` and `geglu` are silu and gelu with a gate."""
    if name not in _KNOWN:
        raise UsageError(f"expected an activation, got {name!r}", hint=near_misses(name, list(_KNOWN)))
    return _KNOWN[name]


def _relu_slope(h: Tensor) -> Tensor:
    """Return 1 for h > 0, else 0, also at the kink, where ReLU has no derivative."""
    return (h > 0).to(h.dtype)


def _gelu(h: Tensor) -> Tensor:
    """h Φ(h)."""
    return h * _normal_cdf(h)


def _gelu_first(h: Tensor) -> Tensor:
    """Φ + h φ."""
    return _normal_cdf(h) + h * _normal_pdf(h)


def _gelu_second(h: Tensor) -> Tensor:
    """φ (2 − h²)."""
    return _normal_pdf(h) * (2 - h * h)


_K, _C = math.sqrt(2 / math.pi), 0.044715


def _tanh_parts(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """t = tanh u, u′ and u″ of u = k(h + c h³), k = √(2/π), c = 0.044715."""
    return torch.tanh(_K * (h + _C * h**3)), _K * (1 + 3 * _C * h * h), 6 * _K * _C * h


def _gelu_tanh(h: Tensor) -> Tensor:
    """h (1 + t)/2."""
    return h * (1 + _tanh_parts(h)[0]) / 2


def _gelu_tanh_first(h: Tensor) -> Tensor:
    """(1 + t)/2 + h (1 − t²) u′/2."""
    t, du, _ = _tanh_parts(h)
    return (1 + t) / 2 + h * (1 - t * t) * du / 2


def _gelu_tanh_second(h: Tensor) -> Tensor:
    """(1 − t²) u′ + h (1 − t²)(u″ − 2 t u′²)/2."""
    t, du, ddu = _tanh_parts(h)
    return (1 - t * t) * (du + h * (ddu - 2 * t * du * du) / 2)


def _silu_first(h: Tensor) -> Tensor:
    """ς + h ς(1 − ς)."""
    s = torch.sigmoid(h)
    return s + h * s * (1 - s)


def _silu_second(h: Tensor) -> Tensor:
    """ς(1 − ς)(2 + h(1 − 2ς))."""
    s = torch.sigmoid(h)
    return s * (1 - s) * (2 + h * (1 - 2 * s))


def _normal_pdf(h: Tensor) -> Tensor:
    return torch.exp(-h * h / 2) / math.sqrt(2 * math.pi)


def _normal_cdf(h: Tensor) -> Tensor:
    return torch.special.ndtr(h)


_SILU = (lambda h: h * torch.sigmoid(h), _silu_first, _silu_second)
_GELU = (_gelu, _gelu_first, _gelu_second)
_KNOWN = {
    "relu": Activation("relu", torch.relu, _relu_slope, torch.zeros_like),
    "gelu": Activation("gelu", *_GELU),
    "gelu_tanh": Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_first, _gelu_tanh_second),
    "silu": Activation("silu", *_SILU),
    "identity": Activation("identity", lambda h: h, torch.ones_like, torch.zeros_like),
    "swiglu": Activation("swiglu", *_SILU, gated=True),
    "geglu": Activation("geglu", *_GELU, gated=True),
}


@dataclass(frozen=True)
class Branch:
    """One hidden layer: its weight, the name of its bias if it has one, and ∂z/∂h."""

    weight: str
    bias: str | None
    W: Tensor  # (d, m)
    slope: Tensor  # (L, m)


@dataclass(frozen=True)
class FeedForwardPoint:
    """A feed-forward layer at tokens x, with the quantities that its derivatives need; see `ffn_point`."""

    x: Tensor  # (L, d)
    z: Tensor  # (L, m)
    W_2: Tensor  # (m, o)
    b_2: Tensor | None
    branches: tuple[Branch, ...]
    bends: Mapping[tuple[int, int], Tensor]  # ∂²z/∂h^α∂h^β, α ≤ β; absent ones are zero

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of the input and of each parameter, in order."""
        (d, m), sizes = self.branches[0].W.shape, {INPUT: self.x.numel()}
        for branch in self.branches:
            sizes[branch.weight] = d * m
            if branch.bias is not None:
                sizes[branch.bias] = m
        sizes["W_2"] = self.W_2.numel()
        if self.b_2 is not None:
            sizes["b_2"] = self.b_2.numel()
        return sizes

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(name for name in self.sizes if name != INPUT)

    def bend(self, a: int, b: int) -> Tensor:
        """∂²z/∂h^a∂h^b: (L, m)."""
        bend = self.bends.get((min(a, b), max(a, b)))
        return torch.zeros_like(self.z) if bend is None else bend


def ffn_point(x: Tensor, params: Mapping[str, Tensor], *, activation: Activation) -> FeedForwardPoint:
    """Return the layer at tokens x (…, d), from W_1, W_2 or W_g, W_u, W_2 and existing biases."""
    x = x.reshape(-1, x.shape[-1])
    names = (("W_g", "b_g"), ("W_u", "b_u")) if activation.gated else (("W_1", "b_1"),)
    for name in (*(weight for weight, _ in names), "W_2"):
        if name not in params:
            raise UsageError(f"a layer with {activation.name!r} needs {name!r}, got {', '.join(params)}")
    if params[names[0][0]].shape[0] != x.shape[-1]:
        raise ShapeError(
            f"expected {names[0][0]} with {x.shape[-1]} rows, got {tuple(params[names[0][0]].shape)}",
            hint="weights are inputs × outputs",
        )
    hidden = [x @ params[w] + params[b] if b in params else x @ params[w] for w, b in names]
    a, da, dda = (f(hidden[0]) for f in (activation.value, activation.first, activation.second))
    if activation.gated:
        z, slopes = a * hidden[1], (da * hidden[1], a)
        bends = {(0, 0): dda * hidden[1], (0, 1): da}
    else:
        z, slopes, bends = a, (da,), {(0, 0): dda}
    branches = tuple(
        Branch(w, b if b in params else None, params[w], slope)
        for (w, b), slope in zip(names, slopes, strict=True)
    )
    return FeedForwardPoint(x, z, params["W_2"], params.get("b_2"), branches, bends)


def ffn_output(at: FeedForwardPoint) -> Tensor:
    """y = z W_2 + b_2: (L, o)."""
    y = at.z @ at.W_2
    return y if at.b_2 is None else y + at.b_2


def ffn_jacobian(at: FeedForwardPoint) -> dict[str, Tensor]:
    """∂y/∂(x, parameters), by name: (L o, entries of the name).

    ∂y_io/∂x_ia = Σ_α,p W^α_ap D^α_ip W_2,po; ∂y_io/∂W^α_ap = x_ia D^α_ip W_2,po; ∂y_io/∂W_2,pw = z_ip δ_ow.
    """
    L, o = at.x.shape[0], at.W_2.shape[1]
    I_L, I_o = torch.eye(L).to(at.x), torch.eye(o).to(at.x)
    through = sum_branches(at)  # (L, d, m)
    jacobian = {INPUT: torch.einsum("iap,po,ij->ioja", through, at.W_2, I_L)}
    for branch in at.branches:
        local = branch.slope[:, :, None] * at.W_2  # (L, m, o)
        jacobian[branch.weight] = torch.einsum("ia,ipo->ioap", at.x, local)
        if branch.bias is not None:
            jacobian[branch.bias] = local.transpose(1, 2)
    jacobian["W_2"] = torch.einsum("ip,ow->iopw", at.z, I_o)
    if at.b_2 is not None:
        jacobian["b_2"] = I_o.expand(L, o, o)
    return {name: J.reshape(L * o, at.sizes[name]) for name, J in jacobian.items()}


def ffn_curvature(at: FeedForwardPoint, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
    """Return ∇²⟨g, y⟩ over (x, parameters), each pair of names once, by source.

    `activation` is the part with a″ (zero for ReLU almost everywhere): S^{11} times the outer square of
    ∂h^1/∂(x, W, b), summed over hidden values. `bilinear` has the other parts: the products x W^α, z W_2 and,
    in a gated layer, a(h_g) ∘ h_u.
    """
    g = g.reshape(at.x.shape[0], at.W_2.shape[1])
    R = g @ at.W_2.mT
    bent: dict[Pair, Tensor] = {}
    _add_bends(at, {(0, 0): R * at.bend(0, 0)}, bent)
    mixed: dict[Pair, Tensor] = {}
    _add_bends(at, {pair: R * bend for pair, bend in at.bends.items() if pair != (0, 0)}, mixed)
    I_L, I_d = torch.eye(at.x.shape[0]).to(g), torch.eye(at.x.shape[1]).to(g)
    for branch in at.branches:
        U = R * branch.slope
        _add(mixed, (INPUT, branch.weight), torch.einsum("ij,ab,ip->jabp", I_L, I_d, U))
        _add_outgoing(at, branch, g, mixed)
    return {"activation": bent, "bilinear": mixed}


def ffn_blocks(
    at: FeedForwardPoint, g: Tensor, B: float | Tensor, *, part: Part = "total", with_input: bool = True
) -> BlockMatrix:
    """Return all blocks over (x, parameters): Jᵀ B J (`outer`), ∇²⟨g, y⟩ (`functional`), or their sum.

    Args:
        at: the layer at its tokens.
        g: gradient of the loss in y, (…, o).
        B: Hessian of the loss in y.
        part: the part to compute.
        with_input: include the input `x` in the rows.
    """
    check_part(part)
    names = [name for name in at.sizes if with_input or name != INPUT]
    sizes = {name: at.sizes[name] for name in names}
    hessian = BlockMatrix(torch.zeros(sum(sizes.values()), sum(sizes.values())).to(at.x), sizes)
    if part != "functional":
        jacobian = ffn_jacobian(at)
        J = torch.cat([jacobian[name] for name in names], dim=1)
        hessian = hessian + BlockMatrix(J.mT @ apply_output_curvature(B, J, at), sizes)
    if part != "outer":
        for blocks in ffn_curvature(at, g).values():
            hessian = hessian + symmetric(blocks, at.sizes, at.x).select(names)
    return hessian


def apply_output_curvature(B: float | Tensor, J: Tensor, at: FeedForwardPoint) -> Tensor:
    """B J for columns J (L o, k)."""
    L, o = at.x.shape[0], at.W_2.shape[1]
    if not isinstance(B, Tensor) or B.dim() == 0:
        return B * J
    if B.shape == (L, o, o):
        return torch.einsum("iow,iwk->iok", B, J.reshape(L, o, -1)).reshape(J.shape)
    if B.shape == (L, o, L, o):
        return B.reshape(L * o, L * o) @ J
    raise ShapeError(
        f"expected a loss curvature that is a number, ({L}, {o}, {o}) or ({L}, {o}, {L}, {o}), "
        f"got {tuple(B.shape)}"
    )


def sum_branches(at: FeedForwardPoint) -> Tensor:
    """∂z_p/∂x_a = Σ_α W^α_ap D^α_ip: (L, d, m)."""
    total = torch.zeros(at.x.shape[0], *at.branches[0].W.shape).to(at.x)
    for branch in at.branches:
        total = total + branch.W * branch.slope[:, None, :]
    return total


def _add_bends(
    at: FeedForwardPoint, bends: Mapping[tuple[int, int], Tensor], blocks: dict[Pair, Tensor]
) -> None:
    """Add Σ_αβ S^{αβ} (∂h^α)(∂h^β)ᵀ over hidden entries; ∂h^α is W^α in x, x in W^α and 1 in b^α."""
    x, I_L, I_m = at.x, torch.eye(at.x.shape[0]).to(at.x), torch.eye(at.z.shape[1]).to(at.x)
    for (a, b), S in bends.items():
        for first, second in {(a, b), (b, a)}:
            one, two = at.branches[first], at.branches[second]
            _add(blocks, (INPUT, INPUT), torch.einsum("ap,ip,bp,ij->iajb", one.W, S, two.W, I_L))
            _add(blocks, (INPUT, two.weight), torch.einsum("ap,ip,ib->iabp", one.W, S, x))
            if two.bias is not None:
                _add(blocks, (INPUT, two.bias), torch.einsum("ap,ip->iap", one.W, S))
        for k, (row, left) in enumerate(features(at, at.branches[a])):
            for column, right in features(at, at.branches[b])[k if a == b else 0 :]:
                block = torch.einsum("ia,ib,ip,pq->apbq", left, right, S, I_m)
                _add(blocks, (row, column), block)


def _add_outgoing(at: FeedForwardPoint, branch: Branch, g: Tensor, blocks: dict[Pair, Tensor]) -> None:
    """Add the blocks of the product z W_2: g_io ∂z_ip/∂(·), against W_2[p, o]."""
    I_m = torch.eye(at.z.shape[1]).to(g)
    _add(blocks, (INPUT, "W_2"), torch.einsum("ap,ip,io->iapo", branch.W, branch.slope, g))
    for name, left in features(at, branch):
        block = torch.einsum("ia,ip,io,pq->apqo", left, branch.slope, g, I_m)
        _add(blocks, (name, "W_2"), block)


def features(at: FeedForwardPoint, branch: Branch) -> list[tuple[str, Tensor]]:
    """Return the factor of each parameter of a branch: x for the weight, 1 for the bias: (L, rows)."""
    factors = [(branch.weight, at.x)]
    return factors if branch.bias is None else [*factors, (branch.bias, torch.ones_like(at.x[:, :1]))]


def _add(blocks: dict[Pair, Tensor], pair: Pair, block: Tensor) -> None:
    blocks[pair] = blocks[pair] + block if pair in blocks else block
