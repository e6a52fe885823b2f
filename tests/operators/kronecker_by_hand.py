"""K-FAC by loops: one sequence, one term, one column and one row at a time, from hooks on `nn.Linear`.

Nothing of the package is used. Roots of the loss's Hessian are eigenvectors, not the closed form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
Data = list[tuple[Tensor, Tensor]]


class Small(nn.Module):
    """Grouped causal attention, a layer that is called twice, a head; no bias on the queries."""

    def __init__(self, vocab: int = 5, d: int = 4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.q, self.k, self.v = nn.Linear(d, d, bias=False), nn.Linear(d, 2), nn.Linear(d, 2)
        self.o, self.mix, self.head = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        q = self.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        pattern = (q @ self.k(x).mT[:, None]).masked_fill(~mask, -torch.inf).softmax(-1)
        x = x + self.o((pattern @ self.v(x)[:, None]).transpose(1, 2).flatten(2))
        return self.head(torch.tanh(self.mix(torch.tanh(self.mix(x)))))


def calls(module: nn.Module, name: str, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Outputs of one sequence (T, C), and inputs and outputs of every call of a layer."""
    found: list[tuple[Tensor, Tensor]] = []
    layer = module.get_submodule(name)
    hook = layer.register_forward_hook(lambda _, given, y: found.append((given[0].detach(), y)))
    z = module(ids[None])[0]
    hook.remove()
    return z, found


def cotangents(z: Tensor, y: Tensor, kind: str) -> Iterator[Tensor]:
    """Vectors (T, C) of single terms whose outer products are the Hessian, or the empirical Fisher, in z."""
    for t in range(len(y)):
        if int(y[t]) == IGNORED:
            continue
        loss = lambda logits, t=t: F.cross_entropy(logits, y[t])  # noqa: E731
        if kind == "empirical":
            columns = [torch.func.grad(loss)(z[t].detach())]
        else:
            values, vectors = torch.linalg.eigh(torch.autograd.functional.hessian(loss, z[t].detach()))
            columns = [vectors[:, i] * values[i].clamp(min=0).sqrt() for i in range(len(values))]
        for column in columns:
            u = torch.zeros_like(z)
            u[t] = column
            yield u


def gradients(
    module: nn.Module, name: str, ids: Tensor, y: Tensor, kind: str, *, ones: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs a (rows, m) and gradients g (rows, n) of all calls of a layer, for every cotangent.

    Rows behind the last target that counts are no rows.
    """
    z, found = calls(module, name, ids)
    length = int((y != IGNORED).nonzero().max()) + 1
    a = torch.cat([given[0, :length] for given, _ in found])
    a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1) if ones else a
    for u in cotangents(z, y, kind):
        g = torch.autograd.grad(z, [out for _, out in found], u, retain_graph=True)
        yield a, torch.cat([x[0, :length] for x in g])


def kfac(
    module: nn.Module, name: str, data: Data, *, kind: str, sharing: str, ones: bool
) -> tuple[Tensor, Tensor]:
    """A and B of a layer."""
    A, B, rows, terms = 0, 0, 0, 0
    for ids, y in data:
        terms += int((y != IGNORED).sum())
        first = True
        for a, g in gradients(module, name, ids, y, kind, ones=ones):
            if first:
                inputs = a.mean(0, keepdim=True) if sharing == "reduce" else a
                A, rows, first = A + sum(torch.outer(r, r) for r in inputs), rows + len(inputs), False
            outputs = g.sum(0, keepdim=True) if sharing == "reduce" else g
            B = B + sum(torch.outer(r, r) for r in outputs)
    assert isinstance(A, Tensor)
    assert isinstance(B, Tensor)
    return A / rows, B / terms


def curvature(module: nn.Module, name: str, data: Data, *, kind: str, ones: bool) -> Tensor:
    """The exact matrix (1/N) Σ vec(G) vec(G)ᵀ of a layer, row-major, G = Σ_rows a gᵀ."""
    total, terms = 0, 0
    for ids, y in data:
        terms += int((y != IGNORED).sum())
        for a, g in gradients(module, name, ids, y, kind, ones=ones):
            G = (a.T @ g).flatten()
            total = total + torch.outer(G, G)
    assert isinstance(total, Tensor)
    return total / terms


def shampoo(module: nn.Module, name: str, data: Data, *, kind: str, ones: bool) -> tuple[Tensor, Tensor]:
    """L and R of a layer."""
    L, R, terms = 0, 0, 0
    for ids, y in data:
        terms += int((y != IGNORED).sum())
        for a, g in gradients(module, name, ids, y, kind, ones=ones):
            G = a.T @ g
            L, R = L + G @ G.T, R + G.T @ G
    assert isinstance(L, Tensor)
    assert isinstance(R, Tensor)
    return L / terms, R / terms
