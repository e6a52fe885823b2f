"""Bounds of the Hessian and the exact norms they bound, on random instances.

Entries are independent normal numbers in float64. The standard deviation is weight_scale/√n for a weight of n
rows, data_scale for tokens, and 1 for targets.

Hessians are computed in closed form as full matrices; their norms come from all eigenvalues.

All norms are exact: they come from full matrices in Kronecker form, or from closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.attention import curvature as head_curvature
from curvescope.closed_form.block_matrix import INPUT, BlockMatrix
from curvescope.closed_form.bounds import attention_bounds
from curvescope.closed_form.bounds.block import block_forward, theorem6_corrected
from curvescope.closed_form.bounds.operator_norms import head_curvature_norms, theorem1_corrected
from curvescope.closed_form.bounds.relu_network import (
    a_priori_network_bounds,
    measured_network_bounds,
    relu_network_point,
)
from curvescope.closed_form.network.block import Architecture
from curvescope.closed_form.network.stack import StackCurvature, stack_tape
from curvescope.closed_form.norms import norm_jacobian_norm, norm_point, norm_second_derivative_norm
from curvescope.closed_form.objectives import OutputObjective, squared_error, squared_error_objective
from curvescope.closed_form.printed import block_theorems
from curvescope.closed_form.printed.block_theorems import head_second_derivatives
from curvescope.closed_form.printed.bounds import (
    PrintedBound,
    Sigma,
    layernorm_norms_as_printed,
    precursor_as_printed,
    theorem1_as_printed,
    theorem6_as_printed,
)
from curvescope.closed_form.printed.kronecker import Theorem, softmax_derivatives
from curvescope.closed_form.softmax import softmax_covariance
from curvescope.core.number_format import plural
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.studies.common.columns import columns_of, select_rows

if TYPE_CHECKING:
    import pandas as pd

HEAD, KEYLESS, CLUSTERS = "random head", "head without keys", "two clusters"
BLOCK, CLOSING, STACK, ROW = "random block", "block with small W_2", "stack", "one row"
NETWORK = "ReLU network"
WEIGHTS, DATA, DEPTH = "weights", "data", "depth"
NO_STACK = (
    "no published bound covers a stack of several blocks. The study measures its norm; each block alone has "
    "a bound, with the rest of the stack as its loss"
)


def network(num_layers: int) -> str:
    """Return the name of a ReLU network of this depth."""
    return f"{NETWORK}, {plural(num_layers, 'layer')}"


HEAD_SEED, BLOCK_SEED, NETWORK_SEED, STACK_SEED, ROW_SEED = range(5)  # streams of random numbers
NUM_CLUSTERED = 16  # tokens of `two_clusters`


class Sizes(NamedTuple):
    """Sizes of heads, blocks and networks."""

    tokens: int = 6
    width: int = 4
    head: int = 3  # d_K
    hidden: int = 6  # width of a feed-forward layer or network
    classes: int = 3


class HeadInstance(NamedTuple):
    """One softmax head, d_V = d, and its target."""

    X: Tensor  # (L, d)
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor  # (d, d_K)
    W_V: Tensor  # (d, d)
    target: Tensor  # (L, d)

    @property
    def output(self) -> Tensor:
        """F = softmax(X W_Q W_Kᵀ Xᵀ/√d_K) X W_V."""
        scores = self.X @ self.W_Q @ (self.X @ self.W_K).mT / self.W_Q.shape[1] ** 0.5
        return torch.softmax(scores, 1) @ self.X @ self.W_V


class BlockInstance(NamedTuple):
    """One post-norm block with ReLU, without biases, and its target."""

    X: Tensor  # (L, d)
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor  # (d, d)
    W_1: Tensor  # (d, d_ff)
    W_2: Tensor  # (d_ff, d)
    target: Tensor  # (L, d)


class NetworkInstance(NamedTuple):
    """A fully connected ReLU network at one sample."""

    x: Tensor  # (d,)
    weights: list[Tensor]
    label: Tensor  # a class


def random_head(
    sizes: Sizes, seed: int, *, data_scale: float = 1.0, weight_scale: float = 1.0
) -> HeadInstance:
    """Random head; all scales use the same random numbers."""
    source, (L, d, d_K) = generator(seed, HEAD_SEED), sizes[:3]
    X, target = _normal(source, L, d), _normal(source, L, d)
    W_Q, W_K, W_V = (weight_scale * _normal(source, d, n) / d**0.5 for n in (d_K, d_K, d))
    return HeadInstance(data_scale * X, W_Q, W_K, W_V, target)


def keyless_head(sizes: Sizes, seed: int, *, query_scale: float) -> HeadInstance:
    """Head with W_K = 0 whose target is its output: an exact minimum for all queries."""
    head = random_head(sizes, seed)
    head = head._replace(W_K=torch.zeros_like(head.W_K), W_Q=query_scale * head.W_Q)
    return head._replace(target=head.output)


def two_clusters(*, sharpness: float) -> HeadInstance:
    """Head in which two of 16 tokens, (±1, 1), attend to each other; all other tokens and the target are
    zero.

    The scores between the two are sharpness²/√2, all others are zero. At sharpness 0 attention is uniform.
    """
    X = torch.zeros(NUM_CLUSTERED, 2, dtype=torch.float64)
    X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    W = torch.diag(torch.tensor([0.0, sharpness], dtype=torch.float64))
    return HeadInstance(X, W, W, torch.eye(2, dtype=torch.float64), torch.zeros_like(X))


def random_block(
    sizes: Sizes, seed: int, *, data_scale: float = 1.0, weight_scale: float = 1.0
) -> BlockInstance:
    """Random block; all scales use the same random numbers."""
    block = _block(generator(seed, BLOCK_SEED), sizes)
    W_Q, W_K, W_V, W_1, W_2 = (weight_scale * W for W in block[1:6])
    return BlockInstance(data_scale * block.X, W_Q, W_K, W_V, W_1, W_2, block.target)


def closing_block(sizes: Sizes, seed: int, *, output_scale: float) -> BlockInstance:
    """Random block whose W_2 is multiplied by output_scale; at 0 its feed-forward layer adds nothing."""
    block = random_block(sizes, seed)
    return block._replace(W_2=output_scale * block.W_2)


def random_row(seed: int, *, width: int) -> Tensor:
    """One row for LayerNorm: (1, width)."""
    return _normal(generator(seed, ROW_SEED, width), 1, width)


def random_stack(sizes: Sizes, seed: int, *, depth: int) -> list[BlockInstance]:
    """Stack of `depth` random blocks; tokens and target are those of the first block."""
    return [_block(generator(seed, STACK_SEED, layer), sizes) for layer in range(depth)]


def random_network(sizes: Sizes, seed: int, *, num_layers: int, weight_scale: float) -> NetworkInstance:
    """`num_layers` matrices without biases, and a random class."""
    source = generator(seed, NETWORK_SEED, num_layers)
    widths = [sizes.width, *[sizes.hidden] * (num_layers - 1), sizes.classes]
    weights = [weight_scale * _normal(source, a, b) / a**0.5 for a, b in pairwise(widths)]
    label = torch.randint(0, sizes.classes, (), generator=source)
    return NetworkInstance(_normal(source, sizes.width), weights, label)


def _block(source: torch.Generator, sizes: Sizes) -> BlockInstance:
    """Random block at scale one."""
    L, d, d_K, d_ff, _ = sizes
    X, target = _normal(source, L, d), _normal(source, L, d)
    shapes = (d, d_K), (d, d_K), (d, d), (d, d_ff), (d_ff, d)
    W_Q, W_K, W_V, W_1, W_2 = (_normal(source, *shape) / shape[0] ** 0.5 for shape in shapes)
    return BlockInstance(X, W_Q, W_K, W_V, W_1, W_2, target)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ comparisons

ROOM = 1e-9  # relative tolerance: a smaller excess over a bound is rounding
GROUPS = ["instance", "varied", "quantity", "bound"]


class BoundRow(NamedTuple):
    """One true norm and one bound of it; nan if there is no bound."""

    quantity: str
    bound: str
    true: float
    value: float


@dataclass(frozen=True)
class Comparisons(Result):
    """Table of comparisons: a row is one bound of one quantity of one instance."""

    instance: list[str]  # kind of instance: random head, … …
    varied: list[str]  # quantity that `scale` multiplies: weights, data, … …
    scale: np.ndarray
    seed: np.ndarray
    quantity: list[str]
    bound: list[str]
    true: np.ndarray
    value: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """Bound / truth. Below one the bound is violated; inf or nan if the truth is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.value / self.true

    @property
    def violated(self) -> np.ndarray:
        """True for each row whose truth exceeds the bound by more than rounding; else False."""
        return self.true > self.value * (1 + ROOM)

    def chosen(self, **columns: str | Sequence[str]) -> Comparisons:
        """Return the rows whose columns have one of these values."""
        keep = np.ones(len(self.instance), dtype=bool)
        for name, wanted in columns.items():
            wanted = [wanted] if isinstance(wanted, str) else list(wanted)
            keep &= np.isin(np.array(getattr(self, name), dtype=str), wanted)
        return select_rows(self, keep)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per comparison, with ratio and violated."""
        import pandas as pd

        return pd.DataFrame(columns_of(self)).assign(ratio=self.ratio, violated=self.violated)


def tagged(instance: str, varied: str, scale: float, seeds: dict[int, list[BoundRow]]) -> Comparisons:
    """Join the rows of several seeds of one instance at one scale."""
    rows = [(seed, row) for seed, found in seeds.items() for row in found]
    n = len(rows)
    return Comparisons(
        instance=[instance] * n,
        varied=[varied] * n,
        scale=np.full(n, float(scale)),
        seed=np.array([seed for seed, _ in rows], dtype=int),
        quantity=[row.quantity for _, row in rows],
        bound=[row.bound for _, row in rows],
        true=np.array([row.true for _, row in rows], dtype=float),
        value=np.array([row.value for _, row in rows], dtype=float),
    )


def slack(found: Comparisons) -> pd.DataFrame:
    """Summarize each bound of each quantity: count, number of violations, and ratios to the truth.

    Ratios exclude instances whose truth is zero.
    """
    frame = found.to_frame().dropna(subset=["value"])
    frame["ratio"] = np.where(frame["true"] > 0, frame["ratio"], np.nan)
    groups = frame.groupby(GROUPS, sort=False)
    table = groups.agg(
        instances=("true", "size"),
        violated=("violated", "sum"),
        median_ratio=("ratio", "median"),
        least_ratio=("ratio", "min"),
        largest_ratio=("ratio", "max"),
    )
    return table.reset_index()


# --------------------------------------------------------------------------------------------------- measures

WHOLE, OUTER = "‖H‖", "‖GGN‖"
THEOREM_1, APPENDIX = "Theorem 1", "Theorem 1, appendix"
THEOREM_6, LITERAL = "Theorem 6", "Theorem 6, literal σ"
PRECURSOR, NONE = "precursor", "none"
PRIORI, NORMS = "corrected, a priori", "corrected, operator norms"
MEASURED, CERTIFIED = "corrected, measured", "certified"
PRINTED = (THEOREM_1, APPENDIX, THEOREM_6, LITERAL, PRECURSOR)
CORRECTED = (PRIORI, NORMS, MEASURED, CERTIFIED)
POST_NORM = Architecture(num_heads=1, norm="post", norm_eps=0.0, activation="relu", causal=False)


def norm_of(A: Tensor) -> float:
    """Spectral norm."""
    return float(torch.linalg.matrix_norm(A, ord=2))


def symmetric_norm(H: Tensor) -> float:
    """Largest |eigenvalue|."""
    return float(torch.linalg.eigvalsh((H + H.mT) / 2).abs().max())


def head_hessian(head: HeadInstance) -> BlockMatrix:
    """Hessian of ‖F − target‖²/(Ld) in Q, K, V."""
    return head_curvature(*head[:4], *squared_error(head.output, head.target)).hessian()


def compare_head(head: HeadInstance) -> list[BoundRow]:
    """Compare ‖H‖ of a head with Theorem 1 (both constants), the corrected bound and the certified bound."""
    true = symmetric_norm(head_hessian(head).matrix)
    values = {
        THEOREM_1: theorem1_as_printed(*head).value,
        APPENDIX: theorem1_as_printed(*head, constants="appendix").value,
        PRIORI: theorem1_corrected(*head).whole,
        MEASURED: theorem1_corrected(*head, measured=True).whole,
        CERTIFIED: attention_bounds(*head[:4], *squared_error(head.output, head.target), lower=False).whole,
    }
    return [BoundRow(WHOLE, bound, true, value) for bound, value in values.items()]


def block_hessian(blocks: list[BlockInstance]) -> StackCurvature:
    """Curvature of a stack of blocks, from the first block's tokens to its target."""
    names = ("W_Q", "W_K", "W_V", "W_1", "W_2")
    params = {f"L{i}.{n}": getattr(block, n) for i, block in enumerate(blocks) for n in names}
    return StackCurvature(stack_tape(params, blocks[0].X[None], POST_NORM), _loss_to(blocks[0].target))


def compare_block(block: BlockInstance) -> list[BoundRow]:
    """Compare ‖H‖ of a block with Theorem 6 (σ as in its lemma and in its proof) and the corrected bound."""
    curvature = block_hessian([block])
    true = symmetric_norm(curvature.hessian().to_dense(curvature.names))
    values = {
        THEOREM_6: theorem6_as_printed(*block).value,
        LITERAL: theorem6_as_printed(*block, sigma="row_norm").value,
        NORMS: theorem6_corrected(*block[:6], target=block.target, measured=False).whole,
        MEASURED: theorem6_corrected(*block[:6], target=block.target).whole,
    }
    return [BoundRow(WHOLE, bound, true, value) for bound, value in values.items()]


def compare_stack(blocks: list[BlockInstance]) -> list[BoundRow]:
    """Return ‖H‖ of a stack, which has no bound, and compare its part in each block with that block's bound.

    The blocks after block l form a loss of its output. The gradient and the Hessian norm of this loss are
    measured and enter the bound of block l.
    """
    curvature = block_hessian(blocks)
    H = curvature.hessian()
    rows = [BoundRow(WHOLE, NONE, symmetric_norm(H.to_dense(curvature.names)), nan)]
    X = blocks[0].X
    for layer, block in enumerate(blocks):
        names = [name for name in curvature.names if name.startswith(f"L{layer}.")]
        Z = block_forward(X, *block[1:6]).Z
        G, bend = _loss_behind(Z, blocks[layer + 1 :], blocks[0].target)
        found = theorem6_corrected(X, *block[1:6], G=G, curvature=bend)
        rows.append(BoundRow(f"‖H_{layer}{layer}‖", MEASURED, symmetric_norm(H.to_dense(names)), found.whole))
        X = Z
    return rows


def _loss_to(target: Tensor):
    def loss(z: Tensor) -> OutputObjective:
        return squared_error_objective(z, target[None])

    return loss


def _loss_behind(Z: Tensor, blocks: list[BlockInstance], target: Tensor) -> tuple[Tensor, float]:
    """Gradient and Hessian norm of the loss as a function of Z."""
    if not blocks:
        G, c = squared_error(Z, target)
        return G, float(c)
    rest = block_hessian([blocks[0]._replace(X=Z, target=target), *blocks[1:]])
    G = rest.tape.cotangents(rest.objective.gradient)[0][0][0]
    return G, symmetric_norm(rest.hessian()[INPUT, INPUT])


def compare_network(network: NetworkInstance) -> list[BoundRow]:
    """Compare ‖GGN‖ and ‖H‖ of a ReLU network at one sample with the old and the corrected bounds."""
    x, weights, label = network
    at, printed = relu_network_point(x, weights, label), precursor_as_printed(x, weights)
    rows = []
    for quantity, functional in ((OUTER, False), (WHOLE, True)):
        true = symmetric_norm(at.hessian(functional=functional).matrix)
        rows += [
            BoundRow(quantity, PRECURSOR, true, printed),
            BoundRow(
                quantity, PRIORI, true, a_priori_network_bounds(x, weights, functional=functional).whole
            ),
            BoundRow(quantity, MEASURED, true, measured_network_bounds(at, functional=functional).whole),
        ]
    return rows


# -------------------------------------------------------------------------------------------------- estimates

LEMMA: dict[str, Sigma] = {"lemma, literal σ": "row_norm", "lemma, σ of its proof": "std"}
REPAIRED = "repaired"
MOST_TOKENS = 8  # ∂²A/∂T² has L⁶ entries
PAIRS = ("QQ", "QK", "QV", "KK", "KV", "VV")


def head_estimates(head: HeadInstance) -> list[BoundRow]:
    """Compare the estimates in the proof of Theorem 1 (softmax, moments, blocks) with the truth."""
    at, parts = Theorem(*head), theorem1_as_printed(*head).parts
    L, x = len(head.X), norm_of(head.X)
    slopes = softmax_covariance(at.A, torch.eye(L).to(at.A))  # one matrix for each query
    slope = float(torch.linalg.matrix_norm(slopes, ord=2).max())
    rows = [
        BoundRow("‖∂A/∂T‖", THEOREM_1, slope, parts["dA/dT"]),
        BoundRow("‖∂A/∂T‖", REPAIRED, slope, 0.5),
        BoundRow("‖A‖", THEOREM_1, norm_of(at.A), parts["A"]),
        BoundRow("‖A‖", REPAIRED, norm_of(at.A), sqrt(L)),
        BoundRow("‖Z_1‖", THEOREM_1, norm_of(at.Z1), parts["Z_1"]),
        BoundRow("‖Z_1‖", REPAIRED, norm_of(at.Z1), x**3 / 2),
        BoundRow("‖Z_2‖", THEOREM_1, norm_of(at.Z2), parts["Z_2"]),
    ]
    if L <= MOST_TOKENS:
        rows.append(BoundRow("‖∂²A/∂T²‖", THEOREM_1, norm_of(softmax_derivatives(at.A)[1]), 6.0))
    return rows + _block_estimates(head)


def _block_estimates(head: HeadInstance) -> list[BoundRow]:
    """Estimates of the blocks of H; those of KK and KV, not in the paper, use its bound of the full H."""
    H, corrected = head_hessian(head), theorem1_corrected(*head)
    printed = {
        THEOREM_1: theorem1_as_printed(*head),
        APPENDIX: theorem1_as_printed(*head, constants="appendix"),
    }
    rows = []
    for one, two in PAIRS:
        true, quantity = norm_of(H[one, two]), f"‖H_{one}{two}‖"
        for name, bound in printed.items():
            value = float(bound.blocks[bound.names.index(one), bound.names.index(two)])
            missing = (one, two) in (("K", "K"), ("K", "V"))
            rows.append(BoundRow(quantity, name, true, bound.value if missing else value))
        place = corrected.names.index(one), corrected.names.index(two)
        rows.append(BoundRow(quantity, PRIORI, true, float(corrected.upper[place])))
    return rows


def block_estimates(block: BlockInstance) -> list[BoundRow]:
    """Compare the estimates in the proof of Theorem 6: LayerNorm, Y, S, and all derivatives of S."""
    at, printed = block_forward(*block[:6]), theorem6_as_printed(*block)
    rows = norm_estimates(at.R) + norm_estimates(at.S)
    Y_F = float(at.Y.norm())
    rows += [
        BoundRow("‖Y‖_F", THEOREM_6, Y_F, printed.parts["Y"]),
        BoundRow("‖S‖", THEOREM_6, norm_of(at.S), printed.parts["S"]),
    ]
    params = {name: getattr(block, name) for name in block_theorems.WEIGHTS}
    derived = block_theorems.PostNormBlock(block.X, params)
    return rows + _derivative_estimates(derived, printed, Y_F)


def norm_estimates(X: Tensor) -> list[BoundRow]:
    """Compare the lemma on LayerNorm of X (m, n), with both meanings of σ."""
    at = norm_point(X)
    true = float(norm_jacobian_norm(at).max()), float(norm_second_derivative_norm(at).max())
    rows = []
    for name, sigma in LEMMA.items():
        for quantity, one, value in zip(
            ("‖∂LN/∂X‖", "‖∂²LN/∂X²‖"), true, layernorm_norms_as_printed(X, sigma=sigma), strict=True
        ):
            rows.append(BoundRow(quantity, name, one, value))
    return rows


def _derivative_estimates(
    block: block_theorems.PostNormBlock, printed: PrintedBound, Y_F: float
) -> list[BoundRow]:
    """Estimates of ξ, Φ and B. The printed (1, 2) is ∂B_2/∂W_1, and the printed (2, 1) is ∂B_1/∂W_2."""
    xi, phi = block_theorems.inner_second_derivatives(block), head_second_derivatives(block.head)
    named = {f"B_{name[2:]}": norm_of(B) for name, B in block.B.items()}
    named |= {f"xi_{a[2:]}{b[2:]}": norm_of(M) for (a, b), M in xi.items()}
    named |= {f"Phi_{a[2:]}{b[2:]}": norm_of(M) for (a, b), M in phi.items()}
    named["xi_12"], named["xi_21"] = named["xi_21"], named["xi_12"]
    unprinted = {f"xi_{k}{i}" for k in "KQV" for i in "12"} | {"xi_11", "xi_22", "Phi_VV"}
    rows = [
        BoundRow(f"‖{name.replace('xi', 'ξ').replace('Phi', 'Φ')}‖", THEOREM_6, true, printed.parts[name])
        for name, true in named.items()
        if name not in unprinted
    ]
    W = block.params
    corrected = head_curvature_norms(block.X, W["W_Q"], W["W_K"], W["W_V"])
    rows += [
        BoundRow(f"‖Φ_{pair}‖", REPAIRED, named[f"Phi_{pair}"], bound) for pair, bound in corrected.items()
    ]
    return [*rows, BoundRow("‖ξ_21‖", REPAIRED, named["xi_21"], Y_F)]
