"""The ways to grow an attention sink, each with a strength; at strength 0 nothing is changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import IGNORED, Batch, Batches
from curvescope.models.model import Model
from curvescope.models.running.attending import AS_IT_IS, Attending, attending, patterns
from curvescope.tokenizers import as_tokenizer

UNCHANGED = "unchanged"
HOWS = {
    "bias": "score bias at the first key",
    "key": "first key × (1 + strength)",
    "inserted": "sink tokens in front",
    "softmax_one": "weight of the one in the denominator",
    "gated": "heads × (1 − strength)",
    "activation": "stream at the first token × 2^strength",
}
"""What the strength of each way is."""


class Way(NamedTuple):
    """One way at one strength."""

    how: str
    strength: float

    @property
    def name(self) -> str:
        """`bias.2`; `unchanged` at strength 0."""
        return f"{self.how}.{self.strength:g}" if self.strength else UNCHANGED

    @property
    def attending(self) -> Attending:
        """What is changed in the module."""
        s = self.strength
        changes: dict[str, Attending] = {
            "bias": Attending(bias=s),
            "key": Attending(key=1 + s),
            "softmax_one": Attending(extra=s),
            "gated": Attending(gate=1 - s),
            "activation": Attending(first=2**s),
        }
        return changes.get(self.how, AS_IT_IS) if s else AS_IT_IS

    @property
    def num_inserted(self) -> int:
        """Tokens put in front of every sequence."""
        return int(self.strength) if self.how == "inserted" else 0

    def batches(self, batches: Batches, token: int) -> Batches:
        """The data as this way wants them; the terms of the loss stay the same."""
        if not self.num_inserted:
            return batches
        return Batches([_inserted(b, self.num_inserted, token) for b in batches], name=batches.name)


def _inserted(batch: Batch, count: int, token: int) -> Batch:
    """`count` copies of a token in front of every sequence, with targets that do not count."""
    assert isinstance(batch.inputs, Tensor)
    front = batch.inputs.new_full((len(batch.inputs), count), token)
    weights = batch.weights
    if weights is not None and weights.shape == batch.targets.shape:
        weights = torch.cat([torch.zeros_like(front, dtype=weights.dtype), weights], dim=1)
    targets = torch.cat([torch.full_like(front, IGNORED), batch.targets], dim=1)
    return Batch(torch.cat([front, batch.inputs], dim=1), targets, weights)


def possible(ways: list[Way], model: Model, batches: Batches) -> tuple[list[Way], list[str]]:
    """The ways that this model and these data have, and a sentence on those that are left out."""
    refused: dict[str, list[str]] = {}
    for way in {way.how: way for way in ways}.values():
        why = reach(model, batches, way.attending)
        if why:
            refused.setdefault(why, []).append(way.how)
    ways = [way for way in ways if not any(way.how in hows for hows in refused.values())]
    notes = [f"{why}; left out: {', '.join(hows)}" for why, hows in refused.items()]
    inserted = [way for way in ways if way.num_inserted]
    why = _not_insertable(max((way.num_inserted for way in inserted), default=0), model, batches)
    if inserted and why:
        ways = [way for way in ways if not way.num_inserted]
        notes.append(f"no token can be put in front: {why}; left out: inserted")
    return ways, notes


def reach(model: Model, batches: Batches, how: Attending) -> str:
    """Why a model cannot be told to attend so, from one sequence; empty where it can."""
    try:
        with attending(model, how):
            model.evaluate(batches[0][:1].inputs)
    except UsageError as error:
        return str(error)
    return ""


def _not_insertable(most: int, model: Model, batches: Batches) -> str:
    inputs, targets = batches[0].inputs, batches[0].targets
    tokens = isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
    if not tokens or not isinstance(targets, Tensor) or targets.shape != inputs.shape:
        return "the data are no tokens with a target for each"
    length = max(b.targets.shape[1] for b in batches) + most
    if model.n_ctx is not None and length > model.n_ctx:
        return f"{length} positions are more than the {model.n_ctx} of {model.name}"
    return ""


def sink_token(model: Model, asked: int | None = None) -> int:
    """The one asked for; else the beginning of a text where the configuration names one, a new line, 0."""
    config: Any = getattr(model.module, "config", None)
    named, vocab = getattr(config, "bos_token_id", None), model.facts.get("vocab_size", 0)
    if asked is not None:
        if not 0 <= asked < (vocab or asked + 1):
            raise UsageError(f"token: expected an id from 0 to {vocab - 1} of {model.name!r}, got {asked}")
        return asked
    if isinstance(named, int) and 0 <= named < vocab:
        return named
    return as_tokenizer(model.tokenizer).encode("\n")[0] if model.tokenizer is not None else 0


def sink_mass(model: Model, batches: Batches, way: Way) -> float:
    """Mean over heads and queries behind the sink of the weight that goes to no token behind it.

    That is what the first token, the inserted ones and the one in a denominator take; before a gate.
    """
    sinks = max(1, way.num_inserted)
    total, count = 0.0, 0
    for batch in batches:
        inputs = batch.map(lambda t: t.to(model.device)).inputs
        for P in patterns(model, inputs, way.attending):
            mass = 1 - P[:, :, sinks:, sinks:].double().sum(-1)
            total, count = total + float(mass.sum()), count + mass.numel()
    return total / max(count, 1)
