"""Numbers of the study `exact_spectra`. Medians have 95 % bootstrap intervals.

Full Hessians and Gauss–Newton matrices by automatic differentiation, many instances at once.

An instance is a row of θ (R, n). Instances are independent, so one backward pass gives one row of the
Hessian of each instance. Second derivatives use double backward.

Pairing of a spectrum: the degree to which its eigenvalues come as ±λ.

P = 1 − Σ_i |p_i − n_i| / Σ_i (p_i + n_i)

with the positive eigenvalues p_1 ≥ p_2 ≥ … and the absolute values n_1 ≥ n_2 ≥ … of the negative ones,
padded with zeros. P is 1 if and only if the spectrum is symmetric, and 0 if and only if all signs agree, as
for a GGN. A random symmetric matrix has P near 1, too, so a P near 1 is not evidence of structure. The
evidence is the share of eigenvalues whose partner agrees to rounding.

Smallest networks with known spectra, as functions of flat weights, many instances at once.

A row of θ is one instance. Data have a row for each instance, or are shared by all instances.

Error of the GGN's λ_max, for attention and for MLPs with the same number of parameters.

Targets are outputs plus ρ times normal numbers, so that the loss is ρ² in expectation for every network;
weights of n rows have the standard deviation scale/√n, tokens 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.spectra import (
    ExactSpectrum,
    SpectrumOptions,
    attention_1d_outputs,
    attention_1d_spectrum,
    two_layer_linear_spectrum,
    two_layer_relu_spectrum,
)
from curvescope.core.result import Tabular
from curvescope.core.seeds import generator
from curvescope.studies.common.columns import columns_of, stack_tables
from curvescope.studies.common.statistics import Interval, median_difference, median_interval

# ------------------------------------------------------------------------------------------------------ dense

Function = Callable[[Tensor], Tensor]


def hessians(loss: Function, theta: Tensor) -> Tensor:
    """Hessians ∇²ℓ_r of the losses ℓ (R,) at θ (R, n), each in its own row: (R, n, n)."""
    theta = theta.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(theta).sum(), theta, create_graph=True)
    return _rows(slope, theta)


def jacobians(outputs: Function, theta: Tensor) -> Tensor:
    """Jacobians ∂f_r/∂θ_r of the outputs f (R, N): (R, N, n)."""
    theta = theta.detach().requires_grad_()
    return _rows(outputs(theta), theta)


def _rows(values: Tensor, theta: Tensor) -> Tensor:
    """Derivative of each column of values (R, m), a backward pass for each: (R, m, n)."""
    if not values.requires_grad:
        return theta.new_zeros(*values.shape, theta.shape[1])
    rows = [
        torch.autograd.grad(column.sum(), theta, retain_graph=True, materialize_grads=True)[0]
        for column in values.unbind(1)
    ]
    return torch.stack(rows, dim=1)


def both_parts(outputs: Function, loss: Function, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Hessian and GGN JᵀBJ of loss(outputs(θ)): (R, n, n) each.

    Args:
        outputs: θ (R, n) to f (R, N).
        loss: f (R, N) to ℓ (R,).
    """
    H = hessians(lambda one: loss(outputs(one)), theta)
    J, B = jacobians(outputs, theta), hessians(loss, outputs(theta))
    return H, J.mT @ B @ J


def eigenvalues(A: Tensor) -> Tensor:
    """Ascending eigenvalues of the symmetric part of matrices: (R, n)."""
    return torch.linalg.eigvalsh((A + A.mT) / 2)


# ---------------------------------------------------------------------------------------------------- pairing

ENDS = 3  # number of outliers of each sign
EXACT = 1e-9  # tolerance relative to the largest |λ| for equal eigenvalues


def pairing(values: np.ndarray, *, ends: int | None = None) -> float:
    """Pairing P of a spectrum, or of its `ends` largest eigenvalues of each sign; nan if all are zero."""
    positive, negative = _sides(values)
    if ends is not None:
        positive, negative = positive[:ends], negative[:ends]
    total = positive.sum() + negative.sum()
    return float(1 - np.abs(positive - negative).sum() / total) if total > 0 else np.nan


def outliers(values: np.ndarray) -> np.ndarray:
    """Eigenvalues that are not repeated: those outside a bulk of repeated ±b."""
    values = np.sort(np.asarray(values, dtype=float))
    same = np.diff(values) <= EXACT * np.abs(values).max(initial=0.0)
    return values[~(np.append(same, False) | np.append(False, same))] if len(values) else values


def exactly_paired(values: np.ndarray) -> float:
    """Share of nonzero eigenvalues whose negative is an eigenvalue, too; nan if all are zero."""
    size = np.abs(values).max(initial=0.0)
    if size == 0:
        return np.nan
    positive, negative = (side[side > EXACT * size] for side in _sides(values))
    paired = i = j = 0
    while i < len(positive) and j < len(negative):
        if abs(positive[i] - negative[j]) <= EXACT * size:
            paired, i, j = paired + 2, i + 1, j + 1
        elif positive[i] > negative[j]:
            i += 1
        else:
            j += 1
    return paired / (len(positive) + len(negative))


def condition_number(values: np.ndarray) -> float:
    """Condition number max |λ| / min |λ| over eigenvalues above 1e-12 of the largest; nan if all are zero."""
    sizes = np.abs(values)
    there = sizes[sizes > 1e-12 * sizes.max()]
    return float(there.max() / there.min()) if len(there) else np.nan


def _sides(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positive and negative parts, largest first, each as long as the spectrum."""
    values = np.asarray(values, dtype=float)
    return np.sort(np.maximum(values, 0))[::-1], np.sort(np.maximum(-values, 0))[::-1]


# ----------------------------------------------------------------------------------------------- small models


def attend(theta: Tensor, x: Tensor, *, heads: int = 1, score_bias: Tensor | float = 0.0) -> Tensor:
    """Self-attention on scalars, f_i = Σ_h w_V^h Σ_j A^h_ij x_j with scores ⟨w_Q^h, w_K^h⟩ x_i x_j/√d_K.

    Args:
        theta: (R, n), a row is (w_Q, w_K, w_V), n = h(2 d_K + 1), each head after head.
        x: (L,) or (R, L).
        score_bias: added to the scores (…, L, L).
    """
    R, d_K = len(theta), (theta.shape[1] // heads - 1) // 2
    w_Q, w_K, w_V = theta.split([heads * d_K, heads * d_K, heads], dim=1)
    a = (w_Q * w_K).view(R, heads, d_K).sum(2) / d_K**0.5
    x = x.expand(R, -1)
    scores = a[:, :, None, None] * (x[:, :, None] * x[:, None, :])[:, None] + score_bias
    return (w_V[:, :, None] * (torch.softmax(scores, dim=3) @ x[:, None, :, None]).squeeze(3)).sum(1)


def linear_network(theta: Tensor, x: Tensor) -> Tensor:
    """f(x) = ⟨w, v⟩ x; a row of θ is (w, v)."""
    w, v = theta.chunk(2, dim=1)
    return (w * v).sum(1, keepdim=True) * x


def relu_network(theta: Tensor, x: Tensor) -> Tensor:
    """f(x) = Σ_k v_k relu(w_k x), plus a last entry of θ if it has an odd number; a row is (w, v, bias)."""
    m = theta.shape[1] // 2
    w, v, bias = theta[:, :m], theta[:, m : 2 * m], theta[:, 2 * m :]
    hidden = torch.relu(w[:, :, None] * x.expand(len(theta), -1)[:, None, :])
    return (v[:, :, None] * hidden).sum(1) + bias.sum(1, keepdim=True)


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Mean over the last axis of (f − y)²."""
    return (f - y).square().mean(-1)


def logistic_loss(f: Tensor, signs: Tensor) -> Tensor:
    """Cross-entropy of two classes ±1 with logit f: mean over the last axis of log(1 + exp(−y f))."""
    return torch.nn.functional.softplus(-signs * f).mean(-1)


def pointer_loss(f: Tensor, place: int) -> Tensor:
    """Cross-entropy for one of N positions with logits f (…, N); its Hessian couples all outputs."""
    return torch.logsumexp(f, dim=-1) - f[..., place]


# ------------------------------------------------------------------------------------------------------ cases

CASE_ATTENTION, LINEAR, RELU = "1-D attention", "linear network", "ReLU network"
LENGTHS = (3, 5, 8)  # sequence lengths of several samples


class SpectrumCase(NamedTuple):
    """Closed form of a spectrum, and its loss as a function of flat weights (1, n)."""

    name: str
    closed: ExactSpectrum
    loss: Callable[[Tensor], Tensor]
    theta: Tensor  # (n,)


@dataclass(frozen=True)
class Compared(Tabular):
    """Table with one row per eigenvalue and case: closed form, and value from the dense Hessian."""

    case: list[str]
    index: np.ndarray
    closed_form: np.ndarray
    numerical: np.ndarray

    def errors(self) -> dict[str, float]:
        """Return max |closed form − numerical| / largest |λ| of each case; zero if all are zero."""
        names = np.array(self.case)
        found = {}
        for name in dict.fromkeys(self.case):
            mine, dense = self.closed_form[names == name], self.numerical[names == name]
            found[name] = float(np.abs(mine - dense).max() / (np.abs(dense).max() or 1.0))
        return found

    def table(self) -> Any:
        """Return one row per eigenvalue."""
        return columns_of(self)


def compare(seed: int, *, d_K: int, num_tokens: int) -> Compared:
    """Compare all eigenvalues of every case, ascending."""
    cases = [*attention_cases(seed, d_K, num_tokens), *network_cases(seed, d_K, num_tokens)]
    dense = [eigenvalues(hessians(case.loss, case.theta[None]))[0].numpy() for case in cases]
    return Compared(
        case=[case.name for case, values in zip(cases, dense, strict=True) for _ in values],
        index=np.concatenate([np.arange(len(values)) for values in dense]),
        closed_form=np.concatenate([case.closed.eigenvalues for case in cases]),
        numerical=np.concatenate(dense),
    )


def attention_cases(seed: int, d_K: int, L: int) -> Iterator[SpectrumCase]:
    """Return the cases of self-attention on scalars."""
    source = generator(seed, 0)
    w, u, x, y = (_normal(source, n) for n in (d_K, d_K, L, L))
    w_V = _normal(source, 1)
    zero, across = torch.zeros_like(w), u - (u @ w) / (w @ w) * w
    weights = {
        "generic": (w, u, w_V),
        "w_Q = 0": (zero, u, w_V),
        "w_K = 0": (w, zero, w_V),
        "w_Q = w_K = 0": (zero, zero, w_V),
        "w_V = 0": (w, u, 0 * w_V),
        "parallel": (w, 0.5 * w, w_V),
        "antiparallel": (w, -0.5 * w, w_V),
        "w_K = w_Q": (w, w, w_V),
        "w_K = −w_Q": (w, -w, w_V),
        "orthogonal": (w, across, w_V),
        "d_K = 1": (w[:1], u[:1], w_V),
        "saturated": (10 * w, 10 * w, w_V),
    }
    for name, one in weights.items():
        yield _attention(name, one, [x], [y])
    generic = weights["generic"]
    yield _attention("one token", generic, [x[:1]], [y[:1]])
    yield _attention("equal tokens", generic, [x[0].expand(L)], [y])
    yield _attention("zero residual", generic, [x], [attention_1d_outputs(x, *generic)])
    xs, ys = ([_normal(source, n) for n in LENGTHS] for _ in range(2))
    yield _attention("several samples", generic, xs, ys)
    sink = torch.zeros(L).double()
    sink[0] = 3.0
    yield _attention("first-token bias", generic, [x], [y], score_bias=sink)
    causal = torch.zeros(L, L).double().masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    yield _attention("causal", generic, [x], [y], score_bias=causal)
    heads = _normal(source, 2, d_K), _normal(source, 2, d_K), _normal(source, 2)
    yield _attention("two heads", heads, [x], [y])
    yield _attention_loss("logistic loss", generic, x, lambda f: logistic_loss(f, torch.sign(y)))
    yield _attention_loss("cross-entropy", generic, x, lambda f: pointer_loss(f, 0))


def _attention(
    name: str,
    weights: tuple[Tensor, Tensor, Tensor],
    xs: list[Tensor],
    ys: list[Tensor],
    score_bias: Tensor | None = None,
) -> SpectrumCase:
    """Case with squared error: the mean over tokens, then over samples."""
    heads, bias = len(weights[2]), 0.0 if score_bias is None else score_bias
    closed = attention_1d_spectrum(xs, *weights, targets=ys, score_bias=score_bias)

    def loss(theta: Tensor) -> Tensor:
        each = [
            squared_error(attend(theta, x, heads=heads, score_bias=bias), y)
            for x, y in zip(xs, ys, strict=True)
        ]
        return torch.stack(each).mean(0)

    return SpectrumCase(f"{CASE_ATTENTION}, {name}", closed, loss, _flat(weights))


def _attention_loss(
    name: str, weights: tuple[Tensor, Tensor, Tensor], x: Tensor, loss: Callable[[Tensor], Tensor]
) -> SpectrumCase:
    """Case with any loss of the outputs, by its gradient and Hessian in the outputs."""
    closed = attention_1d_spectrum(x, *weights, **_by_derivatives(attention_1d_outputs(x, *weights), loss))
    return SpectrumCase(
        f"{CASE_ATTENTION}, {name}", closed, lambda theta: loss(attend(theta, x)), _flat(weights)
    )


def network_cases(seed: int, m: int, n: int) -> Iterator[SpectrumCase]:
    """Return the cases of two-layer networks, linear and with ReLU, with m neurons on n scalars."""
    source = generator(seed, 1)
    w, v, x, y = (_normal(source, k) for k in (m, m, n, n))
    pairs = {
        "generic": (w, v),
        "v = 0": (w, 0 * v),
        "parallel": (w, 2 * w),
        "antiparallel": (w, -2 * w),
        "one neuron": (w[:1], v[:1]),
    }
    linear, relu = two_layer_linear_spectrum, two_layer_relu_spectrum
    for kind, exact, network, more in (
        (LINEAR, linear, linear_network, {"w = v = 0": (0 * w, 0 * v)}),
        (RELU, relu, relu_network, {"all w > 0": (w.abs(), v)}),
    ):
        for name, one in {**pairs, **more}.items():
            theta = _flat(one)
            yield SpectrumCase(
                f"{kind}, {name}",
                exact(*one, x, targets=y),
                lambda theta, network=network: squared_error(network(theta, x), y),
                theta,
            )
        theta = _flat((w, v))
        f = network(theta[None], x)[0]
        yield SpectrumCase(
            f"{kind}, zero residual",
            exact(w, v, x, targets=f),
            lambda theta, network=network, f=f: squared_error(network(theta, x), f),
            theta,
        )
        yield SpectrumCase(
            f"{kind}, cross-entropy",
            exact(w, v, x, **_by_derivatives(f, lambda f: pointer_loss(f, 0))),
            lambda theta, network=network: pointer_loss(network(theta, x), 0),
            theta,
        )


def _by_derivatives(f: Tensor, loss: Callable[[Tensor], Tensor]) -> SpectrumOptions:
    """Gradient and Hessian of a loss in the outputs f (N,)."""
    at = f.detach().requires_grad_()
    (G,) = torch.autograd.grad(loss(at), at)
    return {"G": G, "B": hessians(loss, f[None])[0]}


def _flat(weights: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([w.reshape(-1) for w in weights])


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


# ----------------------------------------------------------------------------------------------- gauss newton

NUM_TOKENS, WIDTH = 8, 4
GAUSS_NEWTON_ATTENTION, MLP = "attention", "MLP"
SCALES = (0.3, 1.0, 3.0)
RESIDUALS = (0.1, 1.0, 10.0)


class SmallNetwork(NamedTuple):
    """Network with outputs (R, N) for weights θ (R, n) and tokens (R, L, d); `rows` scale each weight."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    outputs: Callable[[Tensor, Tensor], Tensor]
    width: int = WIDTH

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)


def head(theta: Tensor, X: Tensor, *, d: int = WIDTH) -> Tensor:
    """Output of a softmax head with d_K = d_V = d: (R, L, d)."""
    W_Q, W_K, W_V = _matrices(theta, ((d, d),) * 3)
    scores = X @ W_Q @ (X @ W_K).mT / d**0.5
    return torch.softmax(scores, dim=2) @ X @ W_V


def feed_forward(theta: Tensor, X: Tensor, *, hidden: int, d: int = WIDTH) -> Tensor:
    """Output relu(X W_1) W_2 of a feed-forward layer: (R, L, d)."""
    W_1, W_2 = _matrices(theta, ((d, hidden), (hidden, d)))
    return torch.relu(X @ W_1) @ W_2


def block(theta: Tensor, X: Tensor, *, hidden: int) -> Tensor:
    """Output of a head and a feed-forward layer, each with its skip connection: (R, L, d)."""
    cut = 3 * WIDTH**2
    X = X + head(theta[:, :cut], X)
    return X + feed_forward(theta[:, cut:], X, hidden=hidden)


def _pair(hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((WIDTH, hidden), (hidden, WIDTH))


SQUARES = ((WIDTH, WIDTH),) * 3
MATCHES: dict[str, tuple[SmallNetwork, SmallNetwork]] = {
    "scalars": (
        SmallNetwork(
            GAUSS_NEWTON_ATTENTION,
            ((1, 8), (1, 8), (1,)),
            lambda theta, X: attend(theta, X[:, :, 0])[:, :, None],
            1,
        ),
        SmallNetwork(
            MLP, ((1, 8), (8,), (1,)), lambda theta, X: relu_network(theta, X[:, :, 0])[:, :, None], 1
        ),
    ),
    "width 4": (
        SmallNetwork(GAUSS_NEWTON_ATTENTION, SQUARES, head),
        SmallNetwork(MLP, _pair(6), partial(feed_forward, hidden=6)),
    ),
    "block": (
        SmallNetwork(GAUSS_NEWTON_ATTENTION, SQUARES + _pair(6), partial(block, hidden=6)),
        SmallNetwork(MLP, _pair(12), partial(feed_forward, hidden=12)),
    ),
}


@dataclass(frozen=True)
class Gaps(Tabular):
    """Table with one row per draw. The gap is |λ_max(H_o) − λ_max(H)| / |λ_max(H)|."""

    match: list[str]  # pair of networks that are compared
    kind: list[str]  # attention or MLP
    num_parameters: np.ndarray
    scale: np.ndarray  # scale of the weights
    residual: np.ndarray  # ρ
    draw: np.ndarray
    lambda_max: np.ndarray
    ggn_lambda_max: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """Relative error of λ_max of the GGN against the Hessian."""
        return np.abs(self.ggn_lambda_max - self.lambda_max) / np.abs(self.lambda_max)

    def chosen(self, match: str, kind: str, scale: float, residual: float) -> np.ndarray:
        """Return the gaps of all draws of one network in one setting."""
        rows = (np.array(self.match) == match) & (np.array(self.kind) == kind)
        return self.gap[rows & (self.scale == scale) & (self.residual == residual)]

    def differences(self) -> dict[tuple[str, float, float], tuple[Interval, Interval, Interval]]:
        """Return the gaps of attention and the MLP and their difference, by match, scale, residual."""
        found = {}
        for match in dict.fromkeys(self.match):
            for scale in np.unique(self.scale):
                for residual in np.unique(self.residual):
                    one, other = (
                        self.chosen(match, kind, scale, residual) for kind in (GAUSS_NEWTON_ATTENTION, MLP)
                    )
                    both = median_interval(one), median_interval(other), median_difference(one, other)
                    found[match, float(scale), float(residual)] = both
        return found

    def table(self) -> Any:
        """Return one row per match, scale and residual: medians over draws and their intervals."""
        counts = dict(zip(self.match, self.num_parameters, strict=True))
        rows = []
        for (match, scale, residual), found in self.differences().items():
            row = {"match": match, "num_parameters": counts[match], "scale": scale, "residual": residual}
            for name, one in zip((GAUSS_NEWTON_ATTENTION, MLP, "difference"), found, strict=True):
                row |= {f"{name}_gap": one.value, f"{name}_low": one.low, f"{name}_high": one.high}
            rows.append(row)
        return rows


def measure(match: str, scale: float, residual: float, *, num_draws: int, seed: int) -> Gaps:
    """Measure all draws of both networks of a match."""
    return stack_tables(
        _draws(match, network, scale, residual, num_draws, seed) for network in MATCHES[match]
    )


def measure_all(match: str, *, num_draws: int, seed: int) -> Gaps:
    """Measure a match over all scales and residuals."""
    return stack_tables(
        measure(match, scale, residual, num_draws=num_draws, seed=seed)
        for scale in SCALES
        for residual in RESIDUALS
    )


def _draws(
    match: str, network: SmallNetwork, scale: float, residual: float, num_draws: int, seed: int
) -> Gaps:
    source = generator(seed, 3, [GAUSS_NEWTON_ATTENTION, MLP].index(network.kind))
    X = _normal(source, num_draws, NUM_TOKENS, network.width)
    parts = [_normal(source, num_draws, int(np.prod(s))) / s[0] ** 0.5 for s in network.shapes]
    theta = scale * torch.cat(parts, dim=1)

    def outputs(theta: Tensor) -> Tensor:
        return network.outputs(theta, X).flatten(1)

    f = outputs(theta)
    y = f + residual * _normal(source, *f.shape)
    H, G = both_parts(outputs, partial(squared_error, y=y), theta)
    return Gaps(
        match=[match] * num_draws,
        kind=[network.kind] * num_draws,
        num_parameters=np.full(num_draws, network.num_parameters),
        scale=np.full(num_draws, scale),
        residual=np.full(num_draws, residual),
        draw=np.arange(num_draws),
        lambda_max=eigenvalues(H)[:, -1].numpy(),
        ggn_lambda_max=eigenvalues(G)[:, -1].numpy(),
    )


def _matrices(theta: Tensor, shapes: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Split the rows of θ into matrices: (R, rows, columns) each."""
    parts = theta.split([a * b for a, b in shapes], dim=1)
    return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
