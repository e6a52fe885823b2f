"""Paired spectra, from networks where pairs are exact to real ones: an assumption less on each rung.

A rung has one or several rows: a quantity of its Hessian, of the functional Hessian, or of the part of it in
queries and keys, over random draws of weights and data. Squared error, with targets that are outputs plus
normal numbers; the last small network reads tokens and has cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.studies.exact_spectra.dense import both_parts, eigenvalues
from curvescope.studies.exact_spectra.intervals import median
from curvescope.studies.exact_spectra.pairing import ENDS, exactly_paired, outliers, pairing
from curvescope.studies.exact_spectra.small_models import (
    attend,
    linear_network,
    relu_network,
    squared_error,
)

if TYPE_CHECKING:
    import pandas as pd

ALL, OUTLIERS, EXACT = "H", "outliers of H", "exact pairs of H"
FUNCTIONAL, EXACT_FUNCTIONAL = "H_f", "exact pairs of H_f"
QUERY_KEY, EXACT_QUERY_KEY = "H_f, queries and keys", "exact pairs of H_f, queries and keys"
QUANTITIES = (ALL, OUTLIERS, FUNCTIONAL, QUERY_KEY, EXACT, EXACT_FUNCTIONAL, EXACT_QUERY_KEY)
CONTROL = "control: random symmetric matrix"
NUM_TOKENS, NUM_UNITS, VOCABULARY, HIDDEN = 8, 8, 8, 6
PLAIN: dict[str, Any] = {
    "n_layers": 1, "n_heads": 1, "n_ctx": NUM_TOKENS, "causal": False, "norm": "none", "residual": False,
    "positions": "none", "bias_qkv": False, "bias_o": False, "bias_ff": False, "inputs": "continuous",
    "outputs": "regression", "d_ff": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Pairings(Result):
    """Columns: a row is one quantity of one draw of one rung."""

    rung: list[str]
    quantity: list[str]
    draw: np.ndarray
    value: np.ndarray  # nan where the rung does not have it

    def of(self, rung: str, quantity: str) -> np.ndarray:
        """The draws of one quantity of one rung."""
        return self.value[(np.array(self.rung) == rung) & (np.array(self.quantity) == quantity)]

    def to_frame(self) -> pd.DataFrame:
        """One row per rung: the median of every quantity over draws and the ends of its interval."""
        import pandas as pd

        rows = []
        for rung in dict.fromkeys(self.rung):
            row: dict[str, Any] = {"rung": rung, "draws": len(self.of(rung, self.quantity[0]))}
            for quantity in QUANTITIES:
                value, low, high = median(self.of(rung, quantity))
                row |= {quantity: value, f"{quantity}, low": low, f"{quantity}, high": high}
            rows.append(row)
        return pd.DataFrame(rows)


class Drawn(NamedTuple):
    """Draws of a rung: outputs of θ (R, n), the loss of outputs, θ, and what in it are queries and keys."""

    outputs: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor], Tensor]
    theta: Tensor
    query_key: Tensor  # (n,) bool


def rungs() -> dict[str, Callable[[int, int], Drawn]]:
    """Every small network by name, as a function of the number of draws and the seed."""
    block = PLAIN | {"d_model": 4, "n_heads": 2, "d_head": 2}
    whole = block | {"residual": True, "norm": "pre", "d_ff": HIDDEN}
    tokens = {"inputs": "tokens", "outputs": "tokens", "vocab_size": VOCABULARY, "causal": True}
    return {
        "linear network": partial(_scalars, linear_network, 2 * NUM_UNITS, 0),
        "ReLU network": partial(_scalars, relu_network, 2 * NUM_UNITS, 0),
        "1-D attention": partial(_scalars, attend, 2 * NUM_UNITS + 1, 2 * NUM_UNITS),
        "two heads": partial(_scalars, partial(attend, heads=2), 4 * NUM_UNITS + 2, 4 * NUM_UNITS),
        "d = 2, d_K = 8, W_O": partial(_zoo, PLAIN | {"d_model": 2, "d_head": NUM_UNITS}),
        "d = d_K = 4": partial(_zoo, PLAIN | {"d_model": 4, "d_head": 4}),
        "d = 4, two heads": partial(_zoo, block),
        "+ skip": partial(_zoo, block | {"residual": True}),
        "+ norms": partial(_zoo, block | {"residual": True, "norm": "pre"}),
        "+ feed-forward": partial(_zoo, whole),
        "+ depth 2": partial(_zoo, whole | {"n_layers": 2}),
        "+ tokens, cross-entropy": partial(_zoo, whole | {"n_layers": 2} | tokens),
    }


def climb(rung: str, *, num_draws: int, seed: int) -> Pairings:
    """All quantities of one rung, or of the control."""
    if rung == CONTROL:
        return _control(num_draws, seed)
    drawn = rungs()[rung](num_draws, seed)
    H, ggn = both_parts(drawn.outputs, drawn.loss, drawn.theta)
    values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    own = drawn.query_key
    parts = H - ggn, (H - ggn)[:, own][:, :, own]
    for spectrum in eigenvalues(H).numpy():
        values[ALL].append(pairing(spectrum))
        values[OUTLIERS].append(pairing(outliers(spectrum), ends=ENDS))
        values[EXACT].append(exactly_paired(spectrum))
    for part, name, exact in zip(
        parts, (FUNCTIONAL, QUERY_KEY), (EXACT_FUNCTIONAL, EXACT_QUERY_KEY), strict=True
    ):
        for spectrum in eigenvalues(part).numpy():
            values[name].append(pairing(spectrum))
            values[exact].append(exactly_paired(spectrum))
    return tagged(rung, values)


def tagged(rung: str, values: dict[str, list[float]]) -> Pairings:
    """Rows of one rung from its quantities over draws."""
    return Pairings(
        rung=[rung for each in values.values() for _ in each],
        quantity=[name for name, each in values.items() for _ in each],
        draw=np.concatenate([np.arange(len(each)) for each in values.values()]),
        value=np.concatenate([np.array(each, dtype=float) for each in values.values()]),
    )


def joined(parts: list[Pairings]) -> Pairings:
    """All rows, in order."""
    return Pairings(
        rung=[one for part in parts for one in part.rung],
        quantity=[one for part in parts for one in part.quantity],
        draw=np.concatenate([part.draw for part in parts]),
        value=np.concatenate([part.value for part in parts]),
    )


def _control(num_draws: int, seed: int) -> Pairings:
    """Independent normal entries, as many rows as 1-D attention has parameters: paired by chance alone."""
    A = _normal(generator(seed, 4), num_draws, 2 * NUM_UNITS + 1, 2 * NUM_UNITS + 1)
    spectra = eigenvalues(A).numpy()
    values = {
        ALL: [pairing(one) for one in spectra],
        OUTLIERS: [pairing(outliers(one), ends=ENDS) for one in spectra],
        EXACT: [exactly_paired(one) for one in spectra],
    }
    return tagged(CONTROL, values)


def _scalars(
    network: Callable[[Tensor, Tensor], Tensor], n: int, num_query_key: int, num_draws: int, seed: int
) -> Drawn:
    """A network on scalars: its first weights are queries and keys."""
    source = generator(seed, 5)
    theta, x = _normal(source, num_draws, n), _normal(source, num_draws, NUM_TOKENS)

    def outputs(theta: Tensor) -> Tensor:
        return network(theta, x)

    y = outputs(theta) + _normal(source, num_draws, NUM_TOKENS)
    return Drawn(outputs, partial(squared_error, y=y), theta, torch.arange(n) < num_query_key)


def _zoo(settings: dict[str, Any], num_draws: int, seed: int) -> Drawn:
    """A zoo Transformer with weights of standard deviation 1/√rows, and norms that scale by one."""
    source, module = generator(seed, 6), Transformer(TransformerConfig(**settings)).double()
    shapes = {name: p.shape for name, p in module.named_parameters()}
    theta = torch.cat([_weights(source, name, shape, num_draws) for name, shape in shapes.items()], dim=1)
    tokens = settings["inputs"] == "tokens"
    x = (
        torch.randint(VOCABULARY, (num_draws, 1, NUM_TOKENS), generator=source)
        if tokens
        else _normal(source, num_draws, 1, NUM_TOKENS, settings["d_model"])
    )

    def outputs(theta: Tensor) -> Tensor:
        pieces = theta.split([prod(shape) for shape in shapes.values()], dim=1)
        own = {name: piece.view(-1, *shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        run = torch.func.vmap(lambda weights, x: torch.func.functional_call(module, weights, (x,)))
        return run(own, x).flatten(1)

    f = outputs(theta)
    loss = (
        partial(_next_token, labels=torch.randint(VOCABULARY, (num_draws, NUM_TOKENS), generator=source))
        if tokens
        else partial(squared_error, y=f + _normal(source, *f.shape))
    )
    own = [torch.full((prod(shape),), name.endswith(("W_Q", "W_K"))) for name, shape in shapes.items()]
    return Drawn(outputs, loss, theta, torch.cat(own))


def _weights(source: torch.Generator, name: str, shape: torch.Size, num_draws: int) -> Tensor:
    """(R, entries of a parameter)."""
    if len(shape) == 1:
        return torch.full((num_draws, prod(shape)), 1.0 if name.endswith(".g") else 0.0).double()
    return _normal(source, num_draws, prod(shape)) / (1.0 if name == "E" else shape[0] ** 0.5)


def _next_token(f: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (R, T V) and labels (R, T)."""
    logits = f.view(*labels.shape, VOCABULARY)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape).mean(1)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)
