"""What the value of a word writes into the stream, head by head, as the logit lens reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.geometry.probes.common import Probing, begin, found_by, frame
from curvescope.geometry.probes.lens import behind_attention, logit_lens
from curvescope.geometry.vocabulary.references import Reference
from curvescope.geometry.vocabulary.representations import How, Representation
from curvescope.geometry.vocabulary.words import Form
from curvescope.models.model import Model

if TYPE_CHECKING:
    import pandas as pd

OutputBias = Literal["sum", "every"]


@dataclass(frozen=True)
class ValueProbe(Result):
    """What every word's value writes, read by the logit lens: head axis 0 … H − 1, then the layer's sum."""

    layer: int
    words: list[str]
    word_ids: np.ndarray  # (n,)
    ids: np.ndarray  # (n, H + 1, k)
    scores: np.ndarray  # (n, H + 1, k) logits
    cosine: np.ndarray  # (n, H + 1, k) of the normalized state and the token's logit direction
    fraction: np.ndarray  # (n, H + 1, k) of the token's greatest attainable logit
    z: np.ndarray  # (n, H + 1, k) above the same token's logits with the values of random tokens
    percentile: np.ndarray  # (n, H + 1, k)
    norms: np.ndarray  # (n, H + 1) length of the update
    text: list[list[list[str]]]
    bytes: list[list[list[str]]]
    num_random: int
    seed: int
    notes: list[str]
    legacy: InitVar[object] = None  # of saved results, which may have it; says nothing

    def to_frame(self) -> pd.DataFrame:
        """One row per word, head (or `sum`) and rank."""
        found = frame(self, [*range(self.ids.shape[1] - 1), "sum"])
        return found.assign(norm=np.repeat(self.norms.reshape(-1), self.ids.shape[2]))


def probe_values(
    model: Model,
    layer: int,
    words: Sequence[str | int] | None = None,
    *,
    k: int = 5,
    how: How = "auto",
    position: int = 0,
    corpus: Tensor | None = None,
    tokens: Representation | None = None,
    num_random: int = 200,
    seed: int = 0,
    folded: bool = True,
    output_bias: OutputBias = "sum",
    form: Form = "auto",
    tokenizer: Any = None,
) -> ValueProbe:
    """The tokens that the logit lens reads once a word's own value is added to it, per head and layer.

    A head's state is x_w + n_w Ŵ_V W_O + b̂_V W_O, the layer's is x_w plus all heads and b_O, which is what
    attention does to a sequence of that word alone. All that is not named here is as in `probe_keys`.

    Args:
        output_bias: where b_O goes: `sum` into the layer's update; `every` into the state of each head and
            of their sum, but into no update, and without a norm that stands behind attention.
    """
    if output_bias not in ("sum", "every"):
        raise UsageError(f"output_bias: expected sum or every, got {output_bias!r}")
    probing = begin(
        model, layer, words, tokens=tokens, k=k, num_random=num_random, seed=seed, folded=folded,
        form=form, tokenizer=tokenizer, how=how, position=position, corpus=corpus,
    )  # fmt: skip
    lens = logit_lens(model, layer, tokenizer=probing.names)
    rows = probing.rows
    updates, states = _written(model, rows, probing, probing.at, output_bias)
    _, others = _written(model, rows, probing, probing.random, output_bias)
    searches = [
        (lens.tokens, lens.read(states[:, i]), lens.read(others[:, i])) for i in range(states.shape[1])
    ]
    every = ["b_O is added to the state of every head"] if output_bias == "every" else []
    return ValueProbe(
        **found_by(searches, lens.tokens, probing, k),
        norms=updates.norm(dim=-1).numpy(),
        notes=[*probing.notes, *lens.notes, *every, *probing.head_notes],
    )


def _written(
    model: Model, rows: Reference, probing: Probing, at: Tensor, output_bias: OutputBias
) -> tuple[Tensor, Tensor]:
    """Updates of every head and their sum, and the states they lead to: (c, H + 1, d) each."""
    n, x, b_O = rows.rows(at), probing.tokens.states(at), probing.own[0].b_O
    each = torch.stack([circuit.values(n) for circuit in probing.own], dim=1)
    total = each.sum(1, keepdim=True)
    updates = torch.cat([each, total], dim=1)
    if output_bias == "every":
        return updates, x[:, None] + updates + b_O
    updates[:, -1] += b_O
    updates = behind_attention(model, probing.layer, updates)
    return updates, x[:, None] + updates
