"""Attention written plainly, and its Hessian by automatic differentiation: the oracle of the closed forms."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad, jacfwd

from curvescope.closed_form.attention.layer import rope_table
from curvescope.closed_form.attention.multihead import multihead_curvature
from curvescope.closed_form.attention.one_head import AttentionCurvature, curvature, merged_curvature
from curvescope.closed_form.objectives import cross_entropy, squared_error
from curvescope.core.seeds import generator


@dataclass
class Instance:
    """A small random attention layer with a loss."""

    X: Tensor
    X_K: Tensor
    X_V: Tensor
    weights: dict[str, Tensor]
    loss: str
    targets: dict[str, Tensor]
    num_heads: int = 1
    num_kv_heads: int = 1
    scale: float = 1.0
    mask: Tensor | None = None
    bias: Tensor | None = None
    rope: tuple[Tensor, ...] | None = None
    kind: str = "softmax"
    cross: bool = False

    def output(self, weights: dict[str, Tensor]) -> Tensor:
        """F (n, L, o), head by head."""
        num, share = self.num_heads, self.num_heads // self.num_kv_heads

        def side(X, name):
            out = X @ weights[name]
            return out + weights["b_" + name] if "b_" + name in weights else out

        keys = side(self.X_K, "K") if "K" in weights else self.X_K
        queries = side(self.X, "Q" if "Q" in weights else "QK").chunk(num, dim=-1)
        keys, values = keys.chunk(self.num_kv_heads, dim=-1), side(self.X_V, "V").chunk(self.num_kv_heads, -1)
        outs = []
        for h in range(num):
            q, k, v = queries[h], keys[h // share], values[h // share]
            if self.rope is not None:
                q, k = turn(q, *self.rope[:2]), turn(k, *self.rope[2:])
            t = self.scale * torch.einsum("nic,njc->nij", q, k)
            if self.bias is not None:
                t = t + self.bias[:, h]
            outs.append(self.weigh(t, h) @ v)
        joined = torch.cat(outs, dim=-1)
        if "O" not in weights:
            return joined
        return joined @ weights["O"] + weights.get("b_O", 0)

    def weigh(self, t: Tensor, h: int) -> Tensor:
        """Attention weights of scores t (n, L, S): exponentials over their sum, zero in empty rows."""
        seen = torch.ones_like(t) if self.mask is None else self.mask[:, h].to(t)
        if self.kind == "linear":
            return t * seen
        e = torch.exp(t - t.detach().amax(-1, keepdim=True)) * seen
        total = e.sum(-1, keepdim=True)
        return e / torch.where(total == 0, torch.ones_like(total), total)

    def loss_of(self, F: Tensor) -> Tensor:
        if self.loss == "squared":
            return (F - self.targets["Y"]).square().mean()
        if self.loss == "cross_entropy":
            logits = (F @ self.targets["U"]).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, self.targets["classes"].flatten())
        mixed = torch.einsum("nio,oijp->njp", F, self.targets["M"])
        return torch.log1p(mixed.square()).sum() + (F - self.targets["Y"]).pow(3).sum() / 5

    def closed_form(self, G: Tensor, B: float | Tensor) -> AttentionCurvature:
        """The same layer through the public functions; without a sample axis when there is one sample."""

        def cut(x):
            return x[0] if isinstance(x, Tensor) and len(self.X) == 1 else x

        options = {"scale": self.scale, "rope": self.rope, "kind": self.kind}
        if self.cross:
            options |= {"X_K": cut(self.X_K), "X_V": cut(self.X_V)}
        weights = {("W_" + n if n[:2] != "b_" else n): W for n, W in self.weights.items()}
        weights = {n: W[0] if n[:2] == "b_" else W for n, W in weights.items()}
        many = "O" in self.weights
        for what in ("mask", "bias"):
            table = getattr(self, what)
            options[what] = None if table is None else cut(table if many else table[:, 0])
        if many:
            heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
            return multihead_curvature(cut(self.X), G=cut(G), B=cut(B), **weights, **heads, **options)
        function = merged_curvature if "QK" in self.weights else curvature
        return function(cut(self.X), G=cut(G), B=cut(B), **weights, **options)


@dataclass
class Oracle:
    """Outer, functional and total Hessian over all weights, flat, in the order of the weights."""

    outer: Tensor
    functional: Tensor
    total: Tensor
    gradient: Tensor
    F: Tensor
    G: Tensor
    B: Tensor  # (n L o, n L o)
    slices: dict[str, slice] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        return max(self.total.abs().max().item(), 1e-300)

    def block(self, one: str, two: str, part: str) -> Tensor:
        return getattr(self, part)[self.slices[one], self.slices[two]]

    def derivatives(self, instance: Instance) -> tuple[Tensor, float | Tensor]:
        """G and B as a user would give them, in the most compact form."""
        if instance.loss == "squared":
            return squared_error(self.F, instance.targets["Y"])
        if instance.loss == "cross_entropy":
            return cross_entropy(self.F, instance.targets["classes"], instance.targets["U"])
        n, L, o = self.F.shape
        full = self.B.reshape(n, L, o, n, L, o)
        return self.G, torch.stack([full[i, :, :, i] for i in range(n)])


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions by 2 × 2 matrices: the pair (f, f + c/2) turns by its angle."""
    half = x.shape[-1] // 2
    R = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    pairs = torch.stack([x[..., :half], x[..., half:]], -1)
    out = torch.einsum("jfpq,njfq->njfp", R, pairs)
    return torch.cat([out[..., 0], out[..., 1]], dim=-1)


def differentiate(instance: Instance) -> Oracle:
    """H = jacfwd(grad(loss)), JᵀBJ, and the Hessian of ⟨G, F⟩ for a fixed G."""
    names, slices, start = list(instance.weights), {}, 0
    for name, W in instance.weights.items():
        slices[name] = slice(start, start + W.numel())
        start += W.numel()
    flat = torch.cat([W.flatten() for W in instance.weights.values()])

    def unflat(vector):
        return {name: vector[slices[name]].view(instance.weights[name].shape) for name in names}

    def output(vector):
        return instance.output(unflat(vector))

    F = output(flat)
    G = grad(instance.loss_of)(F)
    B = jacfwd(grad(instance.loss_of))(F).reshape(F.numel(), F.numel())
    J = jacfwd(output)(flat).reshape(F.numel(), -1)
    gradient = grad(lambda vector: instance.loss_of(output(vector)))
    functional = jacfwd(grad(lambda vector: (G * output(vector)).sum()))(flat)
    return Oracle(J.T @ B @ J, functional, jacfwd(gradient)(flat), gradient(flat), F, G, B, slices)


def random_instance(seed: int, *, logits: float = 1.0, max_tokens: int = 12, **fixed) -> Instance:
    """A layer whose shape and options are drawn from the seed; `fixed` overrides the draws."""
    source = generator(seed, 77)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=source))

    def coin(what, chance=0.5):
        lucky = bool(torch.rand((), generator=source) < chance)
        return fixed.get(what, lucky)

    def normal(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    kind = "linear" if coin("linear", 0.2) else "softmax"
    rope, cross, output = coin("rope", 0.3), coin("cross", 0.25), coin("output", 0.6)
    n, L = fixed.get("n", draw(1, 2)), fixed.get("L", draw(1, max_tokens))
    S = draw(1, max_tokens) if cross else L
    d, d_K, d_V = fixed.get("d", draw(1, 4)), draw(1, 3), draw(1, 3)
    d_K = 2 * draw(1, 2) if rope else d_K
    d_K = fixed.get("d_K", d_K)
    heads = fixed.get("heads", draw(1, 3) if output else 1)
    kv = fixed.get("kv", 1 if heads > 1 and coin("grouped", 0.4) else heads)
    d_V, d_cross, d_out = fixed.get("d_V", d_V), draw(1, 3), draw(1, 4)
    X = normal(n, L, d)
    X_K = normal(n, S, draw(1, 4)) if cross else X
    X_V = normal(n, S, d_cross) if cross else X
    weights = {
        "Q": normal(d, heads * d_K),
        "K": normal(X_K.shape[-1], kv * d_K),
        "V": normal(X_V.shape[-1], kv * d_V),
    }
    weights["Q"] = logits * weights["Q"]
    if fixed.get("merged"):
        weights = {"QK": logits * normal(d, d) / d_K**0.5, "V": weights["V"]}
    if output:
        weights["O"] = normal(heads * d_V, d_out)
    if coin("biases", 0.4):
        weights |= {"b_" + name: normal(1, W.shape[1]) for name, W in list(weights.items())}
    o = weights["O"].shape[1] if output else d_V
    loss = fixed.get("loss", ("squared", "cross_entropy", "coupled")[draw(0, 2)])
    targets = {"Y": normal(n, L, o), "U": normal(o, 4), "classes": torch.randint(4, (n, L), generator=source)}
    targets["M"] = normal(o, L, L, o) / (1 + L)
    mask = None
    if coin("masked"):
        mask = torch.rand(n, heads, L, S, generator=source) < 0.7
        if coin("causal", 0.5) and not cross:
            mask = torch.ones(L, S, dtype=torch.bool).tril().expand(n, heads, L, S)
    bias = normal(n, heads, L, S) if coin("biased", 0.3) else None
    tables = None
    if rope:
        tables = (*rope_table(L, d_K, base=30.0), *rope_table(S, d_K, base=30.0))
    return Instance(
        X, X_K, X_V, weights, loss, targets, heads, kv, d_K**-0.5, mask, bias, tables, kind, cross
    )
