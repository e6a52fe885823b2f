"""Bounds of the Hessian and the norms they bound, on drawn instances.

Entries are independent normal numbers in float64. A weight of n rows has the standard deviation
weight_scale/√n, tokens have data_scale, targets 1.

Hessians are written out in closed form and their norms are those of all eigenvalues.

Norms are exact: of matrices that are written out in Kronecker form, or known in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

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
from curvescope.closed_form.objectives import Objective, squared_error, squared_error_objective
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
from curvescope.core.numbers import plural
from curvescope.core.result import Result
from curvescope.core.seeds import generator

if TYPE_CHECKING:
    import pandas as pd

HEAD, KEYLESS, CLUSTERS = "random head", "head without keys", "two clusters"
BLOCK, CLOSING, STACK, ROW = "random block", "block with small W_2", "stack", "one row"
NETWORK = "ReLU network"
WEIGHTS, DATA, DEPTH = "weights", "data", "depth"
NO_STACK = (
    "there is no bound for a stack of several blocks: its norm is measured, and of each block alone, with "
    "the rest of the stack as its loss, there is one"
)


def network(num_layers: int) -> str:
    """The name of a ReLU network."""
    return f"{NETWORK}, {plural(num_layers, 'layer')}"


HEAD_SEED, BLOCK_SEED, NETWORK_SEED, STACK_SEED, ROW_SEED = range(5)  # streams of random numbers
NUM_CLUSTERED = 16  # tokens of `two_clusters`


class Sizes(NamedTuple):
    """Of heads, blocks and networks."""

    tokens: int = 6
    width: int = 4
    head: int = 3  # d_K
    hidden: int = 6  # of a feed-forward layer, or a network
    classes: int = 3


class Head(NamedTuple):
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


class Block(NamedTuple):
    """One post-norm block with ReLU, without biases, and its target."""

    X: Tensor  # (L, d)
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor  # (d, d)
    W_1: Tensor  # (d, d_ff)
    W_2: Tensor  # (d_ff, d)
    target: Tensor  # (L, d)


class Network(NamedTuple):
    """A fully connected ReLU network at one sample."""

    x: Tensor  # (d,)
    weights: list[Tensor]
    label: Tensor  # a class


def random_head(sizes: Sizes, seed: int, *, data_scale: float = 1.0, weight_scale: float = 1.0) -> Head:
    """Everything random; the same numbers at every scale."""
    source, (L, d, d_K) = generator(seed, HEAD_SEED), sizes[:3]
    X, target = _normal(source, L, d), _normal(source, L, d)
    W_Q, W_K, W_V = (weight_scale * _normal(source, d, n) / d**0.5 for n in (d_K, d_K, d))
    return Head(data_scale * X, W_Q, W_K, W_V, target)


def keyless_head(sizes: Sizes, seed: int, *, query_scale: float) -> Head:
    """W_K = 0, and the target is the output: an exact minimum whatever the queries are."""
    head = random_head(sizes, seed)
    head = head._replace(W_K=torch.zeros_like(head.W_K), W_Q=query_scale * head.W_Q)
    return head._replace(target=head.output)


def two_clusters(*, sharpness: float) -> Head:
    """Two of 16 tokens, (±1, 1), share the attention of each other; all others and the target are zero.

    The scores between the two are sharpness²/√2, all others zero: at 0 attention is uniform.
    """
    X = torch.zeros(NUM_CLUSTERED, 2, dtype=torch.float64)
    X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    W = torch.diag(torch.tensor([0.0, sharpness], dtype=torch.float64))
    return Head(X, W, W, torch.eye(2, dtype=torch.float64), torch.zeros_like(X))


def random_block(sizes: Sizes, seed: int, *, data_scale: float = 1.0, weight_scale: float = 1.0) -> Block:
    """Everything random; the same numbers at every scale."""
    block = _block(generator(seed, BLOCK_SEED), sizes)
    W_Q, W_K, W_V, W_1, W_2 = (weight_scale * W for W in block[1:6])
    return Block(data_scale * block.X, W_Q, W_K, W_V, W_1, W_2, block.target)


def closing_block(sizes: Sizes, seed: int, *, output_scale: float) -> Block:
    """A random block whose W_2 is multiplied by a number; at 0 its feed-forward layer adds nothing."""
    block = random_block(sizes, seed)
    return block._replace(W_2=output_scale * block.W_2)


def random_row(seed: int, *, width: int) -> Tensor:
    """One row for LayerNorm: (1, width)."""
    return _normal(generator(seed, ROW_SEED, width), 1, width)


def random_stack(sizes: Sizes, seed: int, *, depth: int) -> list[Block]:
    """Blocks one after the other: tokens and target are those of the first; a deeper one has more blocks."""
    return [_block(generator(seed, STACK_SEED, layer), sizes) for layer in range(depth)]


def random_network(sizes: Sizes, seed: int, *, num_layers: int, weight_scale: float) -> Network:
    """`num_layers` matrices without biases, and a random class."""
    source = generator(seed, NETWORK_SEED, num_layers)
    widths = [sizes.width, *[sizes.hidden] * (num_layers - 1), sizes.classes]
    weights = [weight_scale * _normal(source, a, b) / a**0.5 for a, b in pairwise(widths)]
    label = torch.randint(0, sizes.classes, (), generator=source)
    return Network(_normal(source, sizes.width), weights, label)


def _block(source: torch.Generator, sizes: Sizes) -> Block:
    """At scale one."""
    L, d, d_K, d_ff, _ = sizes
    X, target = _normal(source, L, d), _normal(source, L, d)
    shapes = (d, d_K), (d, d_K), (d, d), (d, d_ff), (d_ff, d)
    W_Q, W_K, W_V, W_1, W_2 = (_normal(source, *shape) / shape[0] ** 0.5 for shape in shapes)
    return Block(X, W_Q, W_K, W_V, W_1, W_2, target)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ comparisons

ROOM = 1e-9  # relative: a true norm above a bound by less is rounding
GROUPS = ["instance", "varied", "quantity", "bound"]


class Row(NamedTuple):
    """One true norm and one bound of it; nan where there is none."""

    quantity: str
    bound: str
    true: float
    value: float


@dataclass(frozen=True)
class Comparisons(Result):
    """Columns of a table: a row is one bound of one quantity of one instance."""

    instance: list[str]  # what it is: random head, …
    varied: list[str]  # what `scale` is of: weights, data, …
    scale: np.ndarray
    seed: np.ndarray
    quantity: list[str]
    bound: list[str]
    true: np.ndarray
    value: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """Bound over truth: below one it is violated; inf or nan where the truth is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.value / self.true

    @property
    def violated(self) -> np.ndarray:
        """Whether the truth is above the bound, by more than rounding; never where there is no bound."""
        return self.true > self.value * (1 + ROOM)

    def chosen(self, **columns: str | Sequence[str]) -> Comparisons:
        """The rows whose columns have one of these values."""
        keep = np.ones(len(self.instance), dtype=bool)
        for name, wanted in columns.items():
            wanted = [wanted] if isinstance(wanted, str) else list(wanted)
            keep &= np.isin(np.array(getattr(self, name), dtype=str), wanted)
        index = np.flatnonzero(keep)
        taken: dict[str, Any] = {
            name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
            for name, column in self._columns().items()
        }
        return Comparisons(**taken)

    def _columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_frame(self) -> pd.DataFrame:
        """One row per comparison, with ratio and violated."""
        import pandas as pd

        return pd.DataFrame(self._columns()).assign(ratio=self.ratio, violated=self.violated)


def tagged(instance: str, varied: str, scale: float, seeds: dict[int, list[Row]]) -> Comparisons:
    """Rows of several seeds of one instance at one scale."""
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


def joined(parts: Iterable[Comparisons]) -> Comparisons:
    """All rows, in order."""
    parts = list(parts)
    found: dict[str, Any] = {}
    for f in fields(Comparisons):
        columns = [getattr(part, f.name) for part in parts]
        arrays = isinstance(columns[0], np.ndarray)
        found[f.name] = np.concatenate(columns) if arrays else [x for column in columns for x in column]
    return Comparisons(**found)


def slack(found: Comparisons) -> pd.DataFrame:
    """Over each bound of each quantity: how many, how often violated, and the ratios to the truth.

    Ratios are over instances where the truth is not zero.
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


def head_hessian(head: Head) -> BlockMatrix:
    """Of ‖F − target‖²/(Ld) in Q, K, V."""
    return head_curvature(*head[:4], *squared_error(head.output, head.target)).hessian()


def compare_head(head: Head) -> list[Row]:
    """‖H‖ of a head: Theorem 1 with both of its constants, corrected, and the certified bound."""
    true = symmetric_norm(head_hessian(head).matrix)
    values = {
        THEOREM_1: theorem1_as_printed(*head).value,
        APPENDIX: theorem1_as_printed(*head, constants="appendix").value,
        PRIORI: theorem1_corrected(*head).whole,
        MEASURED: theorem1_corrected(*head, measured=True).whole,
        CERTIFIED: attention_bounds(*head[:4], *squared_error(head.output, head.target), lower=False).whole,
    }
    return [Row(WHOLE, bound, true, value) for bound, value in values.items()]


def block_hessian(blocks: list[Block]) -> StackCurvature:
    """Of blocks one after the other, from the first one's tokens to its target."""
    names = ("W_Q", "W_K", "W_V", "W_1", "W_2")
    params = {f"L{i}.{n}": getattr(block, n) for i, block in enumerate(blocks) for n in names}
    return StackCurvature(stack_tape(params, blocks[0].X[None], POST_NORM), _loss_to(blocks[0].target))


def compare_block(block: Block) -> list[Row]:
    """‖H‖ of a block: Theorem 6 with σ as its lemma defines it and as its proof uses it, and corrected."""
    curvature = block_hessian([block])
    true = symmetric_norm(curvature.hessian().to_dense(curvature.names))
    values = {
        THEOREM_6: theorem6_as_printed(*block).value,
        LITERAL: theorem6_as_printed(*block, sigma="row_norm").value,
        NORMS: theorem6_corrected(*block[:6], target=block.target, measured=False).whole,
        MEASURED: theorem6_corrected(*block[:6], target=block.target).whole,
    }
    return [Row(WHOLE, bound, true, value) for bound, value in values.items()]


def compare_stack(blocks: list[Block]) -> list[Row]:
    """‖H‖ of a stack, for which there is no bound, and of its part in each block alone, for which there is.

    What lies behind block l is a loss of its output: the gradient and the norm of the Hessian of that are
    measured, and enter the bound of the block.
    """
    curvature = block_hessian(blocks)
    H = curvature.hessian()
    rows = [Row(WHOLE, NONE, symmetric_norm(H.to_dense(curvature.names)), nan)]
    X = blocks[0].X
    for layer, block in enumerate(blocks):
        names = [name for name in curvature.names if name.startswith(f"L{layer}.")]
        Z = block_forward(X, *block[1:6]).Z
        G, bend = _loss_behind(Z, blocks[layer + 1 :], blocks[0].target)
        found = theorem6_corrected(X, *block[1:6], G=G, curvature=bend)
        rows.append(Row(f"‖H_{layer}{layer}‖", MEASURED, symmetric_norm(H.to_dense(names)), found.whole))
        X = Z
    return rows


def _loss_to(target: Tensor):
    def loss(z: Tensor) -> Objective:
        return squared_error_objective(z, target[None])

    return loss


def _loss_behind(Z: Tensor, blocks: list[Block], target: Tensor) -> tuple[Tensor, float]:
    """Gradient, and norm of the Hessian, of the loss as a function of Z."""
    if not blocks:
        G, c = squared_error(Z, target)
        return G, float(c)
    rest = block_hessian([blocks[0]._replace(X=Z, target=target), *blocks[1:]])
    G = rest.tape.cotangents(rest.objective.gradient)[0][0][0]
    return G, symmetric_norm(rest.hessian()[INPUT, INPUT])


def compare_network(network: Network) -> list[Row]:
    """‖GGN‖ and ‖H‖ of a ReLU network at one sample: the precursor's bound, and the corrected ones."""
    x, weights, label = network
    at, printed = relu_network_point(x, weights, label), precursor_as_printed(x, weights)
    rows = []
    for quantity, functional in ((OUTER, False), (WHOLE, True)):
        true = symmetric_norm(at.hessian(functional=functional).matrix)
        rows += [
            Row(quantity, PRECURSOR, true, printed),
            Row(quantity, PRIORI, true, a_priori_network_bounds(x, weights, functional=functional).whole),
            Row(quantity, MEASURED, true, measured_network_bounds(at, functional=functional).whole),
        ]
    return rows


# -------------------------------------------------------------------------------------------------- estimates

LEMMA: dict[str, Sigma] = {"lemma, literal σ": "row_norm", "lemma, σ of its proof": "std"}
REPAIRED = "repaired"
MOST_TOKENS = 8  # ∂²A/∂T² has L⁶ entries
PAIRS = ("QQ", "QK", "QV", "KK", "KV", "VV")


def head_estimates(head: Head) -> list[Row]:
    """What the proof of Theorem 1 uses of softmax and moments, and its estimates of the blocks."""
    at, parts = Theorem(*head), theorem1_as_printed(*head).parts
    L, x = len(head.X), norm_of(head.X)
    slopes = softmax_covariance(at.A, torch.eye(L).to(at.A))  # one matrix for each query
    slope = float(torch.linalg.matrix_norm(slopes, ord=2).max())
    rows = [
        Row("‖∂A/∂T‖", THEOREM_1, slope, parts["dA/dT"]),
        Row("‖∂A/∂T‖", REPAIRED, slope, 0.5),
        Row("‖A‖", THEOREM_1, norm_of(at.A), parts["A"]),
        Row("‖A‖", REPAIRED, norm_of(at.A), sqrt(L)),
        Row("‖Z_1‖", THEOREM_1, norm_of(at.Z1), parts["Z_1"]),
        Row("‖Z_1‖", REPAIRED, norm_of(at.Z1), x**3 / 2),
        Row("‖Z_2‖", THEOREM_1, norm_of(at.Z2), parts["Z_2"]),
    ]
    if L <= MOST_TOKENS:
        rows.append(Row("‖∂²A/∂T²‖", THEOREM_1, norm_of(softmax_derivatives(at.A)[1]), 6.0))
    return rows + _block_estimates(head)


def _block_estimates(head: Head) -> list[Row]:
    """Of the blocks of H; KK and KV, for which the paper has none, against its bound of the whole."""
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
            rows.append(Row(quantity, name, true, bound.value if missing else value))
        place = corrected.names.index(one), corrected.names.index(two)
        rows.append(Row(quantity, PRIORI, true, float(corrected.upper[place])))
    return rows


def block_estimates(block: Block) -> list[Row]:
    """What the proof of Theorem 6 uses: norms of LayerNorm, of Y and S, and of all derivatives of S."""
    at, printed = block_forward(*block[:6]), theorem6_as_printed(*block)
    rows = norm_estimates(at.R) + norm_estimates(at.S)
    Y_F = float(at.Y.norm())
    rows += [
        Row("‖Y‖_F", THEOREM_6, Y_F, printed.parts["Y"]),
        Row("‖S‖", THEOREM_6, norm_of(at.S), printed.parts["S"]),
    ]
    params = {name: getattr(block, name) for name in block_theorems.WEIGHTS}
    derived = block_theorems.PostNormBlock(block.X, params)
    return rows + _derivative_estimates(derived, printed, Y_F)


def norm_estimates(X: Tensor) -> list[Row]:
    """The lemma on LayerNorm of X (m, n) with both meanings of σ."""
    at = norm_point(X)
    true = float(norm_jacobian_norm(at).max()), float(norm_second_derivative_norm(at).max())
    rows = []
    for name, sigma in LEMMA.items():
        for quantity, one, value in zip(
            ("‖∂LN/∂X‖", "‖∂²LN/∂X²‖"), true, layernorm_norms_as_printed(X, sigma=sigma), strict=True
        ):
            rows.append(Row(quantity, name, one, value))
    return rows


def _derivative_estimates(
    block: block_theorems.PostNormBlock, printed: PrintedBound, Y_F: float
) -> list[Row]:
    """ξ, Φ and B. What is printed for (1, 2) is ∂B_2/∂W_1, and for (2, 1) ∂B_1/∂W_2."""
    xi, phi = block_theorems.inner_second_derivatives(block), head_second_derivatives(block.head)
    named = {f"B_{name[2:]}": norm_of(B) for name, B in block.B.items()}
    named |= {f"xi_{a[2:]}{b[2:]}": norm_of(M) for (a, b), M in xi.items()}
    named |= {f"Phi_{a[2:]}{b[2:]}": norm_of(M) for (a, b), M in phi.items()}
    named["xi_12"], named["xi_21"] = named["xi_21"], named["xi_12"]
    unprinted = {f"xi_{k}{i}" for k in "KQV" for i in "12"} | {"xi_11", "xi_22", "Phi_VV"}
    rows = [
        Row(f"‖{name.replace('xi', 'ξ').replace('Phi', 'Φ')}‖", THEOREM_6, true, printed.parts[name])
        for name, true in named.items()
        if name not in unprinted
    ]
    W = block.params
    corrected = head_curvature_norms(block.X, W["W_Q"], W["W_K"], W["W_V"])
    rows += [Row(f"‖Φ_{pair}‖", REPAIRED, named[f"Phi_{pair}"], bound) for pair, bound in corrected.items()]
    return [*rows, Row("‖ξ_21‖", REPAIRED, named["xi_21"], Y_F)]
