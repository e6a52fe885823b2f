"""How different the curvature of blocks is, and of the entries of one: exact, from dense blocks.

A block is a weight matrix. Of the diagonal block A_b (n_b × n_b) of the GGN or of the Hessian there are

    size        mean |λ| of A_b; of the GGN that is tr A_b / n_b
    spectrum    all eigenvalues of A_b
    diagonal    |a_ii|

and of a network three numbers of heterogeneity:

    sizes       between blocks: standard deviation over blocks of log₁₀ size
    spectra     between blocks: mean over pairs of the Jensen–Shannon divergence of spectra, in bits
    entries     within blocks: mean over blocks of the standard deviation of log₁₀ |a_ii| inside one

Entries that are zero, a position that no counted output sees, have no logarithm and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from curvescope.algorithms.blocks.heterogeneity import spectra_divergence
from curvescope.core.result import Result
from curvescope.studies.why_adam.ensemble import Flat

MEASURES = {
    "sizes": "between blocks, spread of log₁₀ mean |λ|",
    "spectra": "between blocks, mean divergence of spectra",
    "entries": "within blocks, spread of log₁₀ |diagonal|",
}
CHUNK = 128  # unit vectors at a time
ZERO = 1e-12  # of the largest entry of its block: what is left out


@dataclass(frozen=True)
class Blocks(Result):
    """Sizes, spectra and diagonals of the blocks of one network with its weights."""

    names: list[str]
    spectra: list[np.ndarray]  # (n_b,) each
    diagonals: list[np.ndarray]  # (n_b,) each

    @property
    def sizes(self) -> np.ndarray:
        """Mean |λ| of each block."""
        return np.array([np.abs(values).mean() for values in self.spectra])

    @property
    def heterogeneity(self) -> np.ndarray:
        """The MEASURES, (3,)."""
        divergences = [spectra_divergence(a, b) for a, b in combinations(self.spectra, 2)]
        within = [_spread_of_logs(values) for values in self.diagonals]
        return np.array([_spread_of_logs(self.sizes), np.mean(divergences), np.mean(within)])


def _spread_of_logs(values: np.ndarray) -> float:
    """Standard deviation of log₁₀ |x|, without zeros."""
    size = np.abs(values)
    return float(np.log10(size[size > ZERO * size.max(initial=0.0)]).std())


def ggn_blocks(flat: Flat, theta: Tensor, tokens: Tensor) -> Blocks:
    """Of the GGN of the mean loss over the tokens (N, T).

    A_b = R_bᵀ R_b with a row J_bᵀ √(p_c / M) (e_c − p) for each of the M counted digits and each class c.
    Where a block has more entries than there are rows, its eigenvalues are those of R_b R_bᵀ, and zeros.
    """
    spectra, diagonals = [], []
    found = _ggn_rows(flat, theta, tokens)
    for R in found.values():
        short = R @ R.T if R.shape[0] < R.shape[1] else R.T @ R
        values = torch.linalg.eigvalsh(short).clamp(min=0.0).cpu().numpy()
        spectra.append(np.concatenate([np.zeros(R.shape[1] - len(values)), values]))
        diagonals.append((R * R).sum(0).cpu().numpy())
    return Blocks(list(found), spectra, diagonals)


def _ggn_rows(flat: Flat, theta: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """R_b (rows, n_b) of each block."""
    blocks, rest = _parted(flat, theta)

    def rows(sequence: Tensor) -> dict[str, Tensor]:
        z, pull, *_ = vjp(lambda own: flat.logits({**rest, **own}, sequence[None])[0], blocks)
        D, V = z.shape
        p = z.softmax(-1)
        own = p.sqrt()[:, :, None] * (torch.eye(V).to(p) - p[:, None])  # (D, c, V)
        placed = torch.einsum("dcv,de->dcev", own, torch.eye(D).to(p)).reshape(D * V, D, V)
        return vmap(lambda r: pull(r)[0])(placed)

    count = len(tokens) * (flat.digits + 1)
    return {name: part.reshape(-1, blocks[name].numel()) / count**0.5
            for name, part in vmap(rows)(tokens).items()}  # fmt: skip


def hessian_blocks(flat: Flat, theta: Tensor, tokens: Tensor) -> Blocks:
    """Of the Hessian of the mean loss over the tokens, from products with all unit vectors of a block."""
    names, spectra, diagonals = [], [], []
    for name, A in _hessians(flat, theta, tokens):
        names.append(name)
        spectra.append(torch.linalg.eigvalsh(A / 2 + A.T / 2).cpu().numpy())
        diagonals.append(A.diagonal().cpu().numpy())
    return Blocks(names, spectra, diagonals)


def _hessians(flat: Flat, theta: Tensor, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A_b (n_b, n_b) of one block after the other; forward over reverse."""
    blocks, rest = _parted(flat, theta)
    for name, W in blocks.items():

        def slope(own: Tensor, name: str = name) -> Tensor:
            return grad(lambda w: flat.loss_of({**rest, **blocks, name: w}, tokens))(own)

        def column(v: Tensor, W: Tensor = W, slope=slope) -> Tensor:
            return jvp(slope, (W,), (v,))[1]

        units = torch.eye(W.numel()).to(W).reshape(-1, *W.shape)
        yield name, vmap(column, chunk_size=CHUNK)(units).flatten(1)


def _parted(flat: Flat, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Matrices, which are the blocks, and the rest: gains and shifts of norms."""
    tree = flat.tree(theta)
    blocks = {name: W for name, W in tree.items() if W.dim() == 2}
    return blocks, {name: w for name, w in tree.items() if name not in blocks}
