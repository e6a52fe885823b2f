"""Instances whose spectrum is known in closed form, degenerate ones among them, beside a dense Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.studies.exact_spectra.dense import eigenvalues, hessians
from curvescope.studies.exact_spectra.small_models import (
    attend,
    linear_network,
    logistic_loss,
    pointer_loss,
    relu_network,
    squared_error,
)

if TYPE_CHECKING:
    import pandas as pd

ATTENTION, LINEAR, RELU = "1-D attention", "linear network", "ReLU network"
LENGTHS = (3, 5, 8)  # of several samples


class Case(NamedTuple):
    """A closed form, and the loss that it is of as a function of flat weights (1, n)."""

    name: str
    closed: ExactSpectrum
    loss: Callable[[Tensor], Tensor]
    theta: Tensor  # (n,)


@dataclass(frozen=True)
class Compared(Result):
    """Columns: a row is one eigenvalue of one case, in closed form and of the dense Hessian."""

    case: list[str]
    index: np.ndarray
    closed_form: np.ndarray
    numerical: np.ndarray

    def errors(self) -> dict[str, float]:
        """For each case max |closed form − numerical| over the largest |λ|; zero where all are zero."""
        names = np.array(self.case)
        found = {}
        for name in dict.fromkeys(self.case):
            mine, dense = self.closed_form[names == name], self.numerical[names == name]
            found[name] = float(np.abs(mine - dense).max() / (np.abs(dense).max() or 1.0))
        return found

    def to_frame(self) -> pd.DataFrame:
        """One row per eigenvalue."""
        import pandas as pd

        return pd.DataFrame(
            {
                "case": self.case,
                "index": self.index,
                "closed_form": self.closed_form,
                "numerical": self.numerical,
            }
        )


def compare(seed: int, *, d_K: int, num_tokens: int) -> Compared:
    """Every case: all eigenvalues, ascending."""
    cases = [*attention_cases(seed, d_K, num_tokens), *network_cases(seed, d_K, num_tokens)]
    dense = [eigenvalues(hessians(case.loss, case.theta[None]))[0].numpy() for case in cases]
    return Compared(
        case=[case.name for case, values in zip(cases, dense, strict=True) for _ in values],
        index=np.concatenate([np.arange(len(values)) for values in dense]),
        closed_form=np.concatenate([case.closed.eigenvalues for case in cases]),
        numerical=np.concatenate(dense),
    )


def attention_cases(seed: int, d_K: int, L: int) -> Iterator[Case]:
    """Self-attention on scalars."""
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
) -> Case:
    """Squared error: the mean over tokens, then over samples."""
    heads, bias = len(weights[2]), 0.0 if score_bias is None else score_bias
    closed = attention_1d_spectrum(xs, *weights, targets=ys, score_bias=score_bias)

    def loss(theta: Tensor) -> Tensor:
        each = [
            squared_error(attend(theta, x, heads=heads, score_bias=bias), y)
            for x, y in zip(xs, ys, strict=True)
        ]
        return torch.stack(each).mean(0)

    return Case(f"{ATTENTION}, {name}", closed, loss, _flat(weights))


def _attention_loss(
    name: str, weights: tuple[Tensor, Tensor, Tensor], x: Tensor, loss: Callable[[Tensor], Tensor]
) -> Case:
    """Any loss of the outputs, by its gradient and Hessian in them."""
    closed = attention_1d_spectrum(x, *weights, **_by_derivatives(attention_1d_outputs(x, *weights), loss))
    return Case(f"{ATTENTION}, {name}", closed, lambda theta: loss(attend(theta, x)), _flat(weights))


def network_cases(seed: int, m: int, n: int) -> Iterator[Case]:
    """Two layers, linear and with ReLU, m neurons on n scalars."""
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
            yield Case(
                f"{kind}, {name}",
                exact(*one, x, targets=y),
                lambda theta, network=network: squared_error(network(theta, x), y),
                theta,
            )
        theta = _flat((w, v))
        f = network(theta[None], x)[0]
        yield Case(
            f"{kind}, zero residual",
            exact(w, v, x, targets=f),
            lambda theta, network=network, f=f: squared_error(network(theta, x), f),
            theta,
        )
        yield Case(
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
