"""A seeded grid of calls of attention: derivative × mask × precision × shape × layout, against float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from curvescope.nn.functional import RelativeBias, scaled_dot_product_attention

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BOUND = {"float64": 1e-11, "float32": 2e-4, "bfloat16": 0.12, "float16": 0.03}
MASKS = (
    "none",
    "causal",
    "bool",
    "bool, empty rows",
    "bool per head",
    "bool, one row",
    "additive",
    "additive per head",
    "additive, -inf",
    "additive, keys only",
    "trained mask",
    "score bias",
    "score bias, causal",
    "relative",
    "relative, causal",
    "bias and mask",
    "window",
    "window, causal",
    "key lengths",
    "everything",
    "dropout",
    "dropout, bias",
    "scale",
)
LAYOUTS = ("contiguous", "by token", "packed", "flipped")
SHAPES = {  # B, H, key heads, Lq, Lk, d, d_v
    "square": (2, 2, 2, 7, 7, 4, 4),
    "wide values": (1, 2, 2, 6, 6, 3, 5),
    "cross": (2, 1, 1, 5, 9, 4, 3),
    "more queries": (1, 2, 2, 9, 4, 2, 4),
    "grouped": (2, 4, 2, 6, 6, 3, 3),
    "one key head": (1, 3, 1, 5, 8, 4, 4),
    "one query": (2, 2, 2, 1, 6, 4, 4),
    "one key": (2, 2, 2, 5, 1, 4, 4),
}


CARD_SHAPES = {  # few, because Triton compiles its kernels for each width
    "tiles": (2, 2, 2, 48, 48, 16, 16),
    "tiles, grouped": (1, 4, 2, 80, 80, 32, 16),
    "tiles, cross": (1, 2, 1, 48, 112, 16, 32),
}


class Case(NamedTuple):
    """One comparison; the seed decides the numbers."""

    derivative: str
    mask: str
    dtype: str
    shape: str
    layout: str
    seed: int

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_").replace(",", "")


def cases(count: int, seed: int = 0, *, shapes: Sequence[str] = tuple(SHAPES)) -> list[Case]:
    """A draw from the grid in which every derivative meets every mask.

    `torch.func.hessian` has no way to say that random numbers are the same in all directions.
    """
    source = random.Random(seed)
    pairs = [pair for pair in product(DERIVATIVES, MASKS) if pair[0] != "hessian" or "dropout" not in pair[1]]
    found = []
    while len(found) < count:
        source.shuffle(pairs)
        for derivative, mask in pairs:
            dtype = source.choice(("float64", "float64", "float64", "float32", "bfloat16", "float16"))
            shape, layout = source.choice(shapes), source.choice(LAYOUTS)
            found.append(Case(derivative, mask, dtype, shape, layout, len(found)))
    return found[:count]


def error(case: Case, device: str = "cpu") -> float:
    """Largest ‖found − exact‖ / max(‖exact‖, √n / 2) of what the derivative returns for a case."""
    drawn = Drawn(case, device)
    found = DERIVATIVES[case.derivative](
        drawn.ours, drawn.inputs(DTYPES[case.dtype]), drawn.directions(DTYPES[case.dtype])
    )
    exact = DERIVATIVES[case.derivative](
        drawn.plain, drawn.inputs(torch.float64), drawn.directions(torch.float64)
    )
    found, exact = ([t.detach().double() for t in flat(x)] for x in (found, exact))
    assert [t.shape for t in found] == [t.shape for t in exact]
    errors = [
        float((a - b).norm()) / max(float(b.norm()), b.numel() ** 0.5 / 2)
        for a, b in zip(found, exact, strict=True)
    ]
    return max(e if e == e else float("inf") for e in errors)


def flat(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for y in x for t in flat(y)]


class Drawn:
    """The numbers of a case: inputs that are differentiated, and a function in two implementations."""

    def __init__(self, case: Case, device: str):
        self.case, self.device = case, device
        self.source = torch.Generator().manual_seed(case.seed)
        self.B, self.H, self.G, self.Lq, self.Lk, d, dv = (SHAPES | CARD_SHAPES)[case.shape]
        shapes = [(self.B, self.H, self.Lq, d), (self.B, self.G, self.Lk, d), (self.B, self.G, self.Lk, dv)]
        self._x = [self._normal(*s) for s in shapes]
        self.fixed = self._masks()
        low = DTYPES[case.dtype]
        self._x = [t.to(low).double() for t in self._x]
        self._moves = [self._normal(*t.shape).to(low).double() for _ in range(3) for t in self._x]
        self.do = self._normal(self.B, self.H, self.Lq, dv).to(low).double()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64).to(self.device)

    def _masks(self) -> dict[str, Any]:
        """What stands beside q, k, v; tensors that are differentiated are added to the inputs."""
        mask, B, H, Lq, Lk = self.case.mask, self.B, self.H, self.Lq, self.Lk
        found: dict[str, Any] = {"causal": "causal" in mask or mask == "everything"}
        seen = torch.rand(B, H, Lq, Lk, generator=self.source).to(self.device) < 0.7
        seen[..., 0] = True
        if mask == "bool":
            found["seen"] = seen[0, 0]
        elif mask == "bool, empty rows":
            seen[:, :, Lq // 2] = False
            found["seen"] = seen[:, :1]
        elif mask in ("bool per head", "bias and mask"):
            found["seen"] = seen
        elif mask == "bool, one row":
            found["seen"] = seen[:, :1, :1]
        low = DTYPES[self.case.dtype]
        additive = {
            "additive": (Lq, Lk),
            "additive per head": (H, Lq, Lk),
            "additive, keys only": (B, 1, 1, Lk),
            "additive, -inf": (1, 1, Lq, Lk),
        }
        if mask in additive:
            found["added"] = self._normal(*additive[mask]).to(low).double()
        if mask == "additive, -inf":
            found["added"] = found["added"].masked_fill(~seen[:1, :1], -torch.inf)
        self.trained = None
        trained = {
            "trained mask": (B, H, Lq, Lk),
            "score bias": (H, Lq, Lk),
            "score bias, causal": (H, 1, Lk),
            "bias and mask": (B, 1, Lq, Lk),
            "dropout, bias": (Lq, Lk),
            "relative": (H, Lq + Lk - 1),
            "relative, causal": (1, Lq + Lk - 1),
            "everything": (H, Lq + Lk - 1),
        }
        if mask in trained:
            self.trained = mask
            self._x.append(self._normal(*trained[mask]))
        if "window" in mask or mask == "everything":
            found["window"] = 3
        if mask in ("key lengths", "everything"):
            found["lengths"] = torch.tensor([Lk, max(0, Lk // 2 - 1)][:B], device=self.device)
        if "dropout" in mask:
            found["dropout"] = 0.3
        if mask == "scale":
            found["scale"] = 0.3
        return found

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v in the layout of the case, and the trained bias."""
        x = [t.to(dtype) for t in self._x]
        return [*_laid(self.case.layout, x[:3]), *x[3:]]

    def directions(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Three directions of the inputs, and the cotangent of the output."""
        n = len(self._x)
        moves = [t.to(dtype) for t in self._moves]
        return [moves[:n], moves[n : 2 * n], moves[2 * n :], [self.do.to(dtype)]]

    def ours(self, q: Tensor, k: Tensor, v: Tensor, *trained: Tensor) -> Tensor:
        fixed, named = self.fixed, {}
        mask = fixed.get("seen")
        if "added" in fixed:
            mask = fixed["added"].to(q.dtype)
        if self.trained == "trained mask":
            mask = trained[0]
        elif self.trained is not None:
            table = "relative" in self.trained or self.trained == "everything"
            named["score_bias"] = RelativeBias(trained[0]) if table else trained[0]
        torch.manual_seed(self.case.seed)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            fixed.get("dropout", 0.0),
            fixed["causal"],
            fixed.get("scale"),
            self.H != self.G,
            window=fixed.get("window"),
            key_lengths=fixed.get("lengths"),
            **named,
        )

    def plain(self, q: Tensor, k: Tensor, v: Tensor, *trained: Tensor) -> Tensor:
        """The definition, with every matrix written out."""
        fixed, group = self.fixed, self.H // self.G
        row, col = (torch.arange(n, device=self.device) for n in (self.Lq, self.Lk))
        row = row[:, None]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k.mT * fixed.get("scale", q.shape[-1] ** -0.5)
        seen = torch.ones(self.B, self.H, self.Lq, self.Lk, dtype=torch.bool, device=self.device)
        if fixed["causal"]:
            seen = seen & (col <= row)
        if "window" in fixed:
            seen = seen & ((row - col).abs() < fixed["window"])
        if "lengths" in fixed:
            seen = seen & (col < fixed["lengths"][:, None, None, None])
        if "seen" in fixed:
            seen = seen & fixed["seen"]
        if "added" in fixed:
            seen = seen & (fixed["added"] > -torch.inf)
            scores = scores + fixed["added"].clamp(min=-100)
        if self.trained is not None:
            table = "relative" in self.trained or self.trained == "everything"
            scores = scores + (trained[0][:, col - row + self.Lq - 1] if table else trained[0])
        weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * seen
        weights = weights / (weights.sum(-1, keepdim=True) + ~seen.any(-1, keepdim=True))
        if "dropout" in fixed:
            torch.manual_seed(self.case.seed)
            wide = torch.promote_types(DTYPES[self.case.dtype], torch.float32)
            weights = weights * F.dropout(torch.ones_like(seen, dtype=wide), fixed["dropout"])
        return weights @ v


def _laid(layout: str, x: list[Tensor]) -> list[Tensor]:
    """The same numbers, laid out in memory in another way."""
    if layout == "by token":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    if layout == "packed":
        return [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in x]
    if layout == "flipped":
        return [t.mT.contiguous().mT for t in x]
    return x


# ------------------------------------------------- derivatives: (function, inputs, directions) -> tensors


def leaves(x: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in x]


def backward(f: Callable, x: list[Tensor], g: list) -> Any:
    x = leaves(x)
    return torch.autograd.grad(f(*x), x, g[3][0])


def double_backward(f: Callable, x: list[Tensor], g: list) -> Any:
    x, do = leaves(x), g[3][0].clone().requires_grad_()
    first = torch.autograd.grad(f(*x), x, do, create_graph=True)
    return torch.autograd.grad(first, [*x, do], g[0])


def batched_double_backward(f: Callable, x: list[Tensor], g: list) -> Any:
    x, do = leaves(x), g[3][0].clone().requires_grad_()
    first = torch.autograd.grad(f(*x), x, do, create_graph=True)
    both = [torch.stack(pair) for pair in zip(g[0], g[1], strict=True)]
    return torch.autograd.grad(first, [*x, do], both, is_grads_batched=True)


def jvp_(f: Callable, x: list[Tensor], g: list) -> Any:
    return jvp(f, tuple(x), tuple(g[0]))


def _first(f: Callable, g: list) -> Callable:
    return lambda *x: vjp(f, *x)[1](g[3][0])


def jvp_of_grad(f: Callable, x: list[Tensor], g: list) -> Any:
    return jvp(_first(f, g), tuple(x), tuple(g[0]))


def grad_of_jvp(f: Callable, x: list[Tensor], g: list) -> Any:
    inner = lambda x, t: (jvp(f, x, t)[1] * g[3][0]).sum()  # noqa: E731
    return grad(inner, argnums=(0, 1))(tuple(x), tuple(g[0]))


def jvp_of_jvp(f: Callable, x: list[Tensor], g: list) -> Any:
    inner = lambda x, t: jvp(f, x, t)[1]  # noqa: E731
    return jvp(inner, (tuple(x), tuple(g[0])), (tuple(g[1]), tuple(g[2])))


def grad_of_grad(f: Callable, x: list[Tensor], g: list) -> Any:
    return vjp(_first(f, g), *x)[1](tuple(g[0]))


def _stacked(x: list[Tensor], g: list) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    xs = [torch.stack([t, t + 0.3 * s]) for t, s in zip(x, g[2], strict=True)]
    return xs, tuple(torch.stack(pair) for pair in zip(g[0], g[1], strict=True))


def vmap_backward(f: Callable, x: list[Tensor], g: list) -> Any:
    return vmap(_first(f, g), randomness="same")(*_stacked(x, g)[0])


def vmap_jvp(f: Callable, x: list[Tensor], g: list) -> Any:
    xs, ts = _stacked(x, g)
    return vmap(lambda x, t: jvp(f, x, t)[1], randomness="same")(tuple(xs), ts)


def vmap_jvp_of_grad(f: Callable, x: list[Tensor], g: list) -> Any:
    xs, ts = _stacked(x, g)
    return vmap(lambda x, t: jvp(_first(f, g), x, t)[1], randomness="same")(tuple(xs), ts)


def vmap_grad_of_jvp(f: Callable, x: list[Tensor], g: list) -> Any:
    xs, ts = _stacked(x, g)
    inner = lambda x, t: (jvp(f, x, t)[1] * g[3][0]).sum()  # noqa: E731
    return vmap(grad(inner, argnums=(0, 1)), randomness="same")(tuple(xs), ts)


def vmap_jvp_of_jvp(f: Callable, x: list[Tensor], g: list) -> Any:
    xs, ts = _stacked(x, g)
    inner = lambda x, t: jvp(f, x, t)[1]  # noqa: E731
    outer = lambda x, t: jvp(lambda x: inner(x, t), (x,), (tuple(g[2]),))[1]  # noqa: E731
    return vmap(outer, randomness="same")(tuple(xs), ts)


def vmap_one_input(f: Callable, x: list[Tensor], g: list) -> Any:
    """Only the keys have a batch: what is shared must get a derivative of its own for each."""
    keys = torch.stack([x[1], x[1] + g[0][1]])
    return vmap(lambda k: _first(f, g)(x[0], k, *x[2:]), randomness="same")(keys)


def _scalar(f: Callable, x: list[Tensor], g: list) -> Callable:
    """⟨dO, f⟩² along a line in every input: a function of three numbers, so that a Hessian is small."""

    def at(a: Tensor) -> Tensor:
        moved = [
            t + (a[j] * s.to(a.dtype)).to(t.dtype) for t, s, j in zip(x, g[0], (0, 1, 2, 0), strict=False)
        ]
        return (f(*moved) * g[3][0]).sum().to(a.dtype).square() / 10

    return at


_fwd, _rev = partial(jacfwd, randomness="same"), jacrev


def hessian_(f: Callable, x: list[Tensor], g: list) -> Any:
    return hessian(_scalar(f, x, g))(x[0].new_zeros(3))


def jacfwd_of_jacrev(f: Callable, x: list[Tensor], g: list) -> Any:
    return _fwd(_rev(_scalar(f, x, g)))(x[0].new_zeros(3))


def jacrev_of_jacfwd(f: Callable, x: list[Tensor], g: list) -> Any:
    return _rev(_fwd(_scalar(f, x, g)))(x[0].new_zeros(3))


def jacrev_of_jacrev(f: Callable, x: list[Tensor], g: list) -> Any:
    return _rev(_rev(_scalar(f, x, g)))(x[0].new_zeros(3))


def jacfwd_of_jacfwd(f: Callable, x: list[Tensor], g: list) -> Any:
    return _fwd(_fwd(_scalar(f, x, g)))(x[0].new_zeros(3))


def dual(f: Callable, x: list[Tensor], g: list) -> Any:
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(t, s) for t, s in zip(x, g[0], strict=True)]
        return tuple(forward_ad.unpack_dual(f(*made)))


def dual_of_backward(f: Callable, x: list[Tensor], g: list) -> Any:
    x = leaves(x)
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(t, s) for t, s in zip(x, g[0], strict=True)]
        do = forward_ad.make_dual(g[3][0], g[3][0].flip(-1))
        first = torch.autograd.grad(f(*made), made, do, create_graph=True)
        return [forward_ad.unpack_dual(t).tangent for t in first]


def backward_of_dual(f: Callable, x: list[Tensor], g: list) -> Any:
    x, t = leaves(x), leaves(g[0])
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(a, b) for a, b in zip(x, t, strict=True)]
        tangent = forward_ad.unpack_dual(f(*made)).tangent
        return torch.autograd.grad(tangent, [*x, *t], g[3][0])


DERIVATIVES: dict[str, Callable] = {
    "value": lambda f, x, g: f(*x),
    "backward": backward,
    "double backward": double_backward,
    "batched double backward": batched_double_backward,
    "jvp": jvp_,
    "jvp of grad": jvp_of_grad,
    "grad of jvp": grad_of_jvp,
    "jvp of jvp": jvp_of_jvp,
    "grad of grad": grad_of_grad,
    "vmap backward": vmap_backward,
    "vmap jvp": vmap_jvp,
    "vmap jvp of grad": vmap_jvp_of_grad,
    "vmap grad of jvp": vmap_grad_of_jvp,
    "vmap jvp of jvp": vmap_jvp_of_jvp,
    "vmap one input": vmap_one_input,
    "hessian": hessian_,
    "jacfwd of jacrev": jacfwd_of_jacrev,
    "jacrev of jacfwd": jacrev_of_jacfwd,
    "jacrev of jacrev": jacrev_of_jacrev,
    "jacfwd of jacfwd": jacfwd_of_jacfwd,
    "dual": dual,
    "dual of backward": dual_of_backward,
    "backward of dual": backward_of_dual,
}
