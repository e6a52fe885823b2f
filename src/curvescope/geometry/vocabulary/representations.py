"""Represent a token in a block by its embedding, or by its state after the previous blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.geometry.roles import check_layer, embedding, read_norm, weight
from curvescope.geometry.sphere import StreamNorm
from curvescope.geometry.vocabulary.names import names_of
from curvescope.geometry.vocabulary.references import ReferenceKind, TokenReference
from curvescope.models.capture.activation_points import block_paths
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating

How = Literal["auto", "raw", "position", "run", "mean"]
_CHUNK = 512


@dataclass(frozen=True, eq=False)
class Representation:
    """The stream before a block for every token, and the input of its attention.

    `table[at[i]]` is the stream of token ids[i]. If `normed`, attention reads `norm` of it, else the stream.
    """

    table: Tensor  # (V or n, d)
    ids: Tensor  # (n,)
    at: Tensor  # (n,)
    norm: StreamNorm
    normed: bool
    post: bool  # True if the norm follows the blocks (post-norm)
    how: str
    note: str

    def states(self, which: Tensor) -> Tensor:
        """Return the stream of some of `ids`, by their positions: (c, d) in float64.

        In a post-norm model this is the stream after the norm, to which attention adds its output.
        """
        x = self.table[self.at[which]].double()
        return self.norm(x) if self.normed and self.post else x

    def reads(self, *, folded: bool) -> TokenReference:
        """Return the rows that attention reads: n(x) if the norm is folded, else γ ∘ n(x) + β."""
        kind: ReferenceKind = "raw" if not self.normed else "sphere" if folded else "normed"
        return TokenReference(self.table, self.ids, self.at, kind, self.norm, words=self.note)

    def positions(self, ids: Any) -> Tensor:
        """Return the positions of tokens in `self.ids`; −1 for missing tokens."""
        tokens = torch.as_tensor(ids)
        at = torch.searchsorted(self.ids, tokens).clamp_max(len(self.ids) - 1)
        return torch.where(self.ids[at] == tokens, at, torch.full_like(at, -1))


def represent(
    model: Model,
    layer: int,
    *,
    how: How = "auto",
    position: int = 0,
    bos: int | None = None,
    corpus: Tensor | None = None,
    ids: Tensor | None = None,
    tokenizer: Any = None,
) -> Representation:
    """Return every token of the vocabulary in the form that a block receives.

    Args:
        how: `raw` e_t; `position` e_t plus the learned position; `run` the state of a sequence of that one
            token before the block; `mean` the mean state over a corpus. `auto` is `raw` for
            block 0 and `run` for the others.
        position: the position that `position` adds.
        bos: for `run`, a token that precedes it.
        corpus: ids (N, T) for `mean`; tokens that do not occur in it are omitted.
        ids: only these tokens, ascending; default all that the tokenizer knows.
        tokenizer: decides which rows are tokens; default the model's own.
    """
    check_layer(model, layer)
    if how not in ("auto", "raw", "position", "run", "mean"):
        raise UsageError(f"how: expected auto, raw, position, run or mean, got {how!r}")
    method = how if how != "auto" else ("raw" if layer == 0 else "run")
    table = embedding(model, "input")
    known = names_of(model.tokenizer if tokenizer is None else tokenizer).known(len(table))
    ids = known if ids is None else known[torch.isin(known, ids)]
    norm, _ = read_norm(model, layer)
    pre = model.facts.get("norm") == "pre"
    normed = norm.kind != "none" and (pre or method in ("raw", "position"))
    at = ids
    if method == "position":
        table = table + _position(model, position).to(table)
    elif method == "run":
        table, at = _run(model, layer, ids, bos), torch.arange(len(ids))
    elif method == "mean":
        table, ids = _mean(model, layer, corpus, ids)
        at = torch.arange(len(ids))
    note = _description(method, layer, position, bos, len(ids))
    return Representation(table, ids, at, norm, normed, not pre, method, note)


def _description(how: str, layer: int, position: int, bos: int | None, num: int) -> str:
    words = {
        "raw": "its embedding, without position or earlier blocks",
        "position": f"its embedding plus position {position}, without earlier blocks",
        "run": f"its state before block {layer} in a sequence of that token alone"
        + ("" if bos is None else f" after token {bos}"),
        "mean": f"its mean state before block {layer} over the corpus, for the {num} tokens that occur in it",
    }
    return f"a token is represented by {words[how]}"


def _position(model: Model, position: int) -> Tensor:
    """Return the embedding of a learned position, counted like the model counts."""
    P = weight(model, "P")
    if P is None:
        raise UsageError(
            f"expected learned positions, {model.name!r} has none", hint="how='raw' or how='run'"
        )
    first = len(P) - (model.n_ctx or len(P))  # OPT and RoBERTa skip the first rows
    if not 0 <= position < len(P) - first:
        raise UsageError(f"position: expected 0 to {len(P) - first - 1}, got {position}")
    return P[first + position]


def _run(model: Model, layer: int, ids: Tensor, bos: int | None) -> Tensor:
    """Return the stream before the block at the last token of [bos,] t: (n, d)."""
    parts = []
    for start in range(0, len(ids), _CHUNK):
        sequences = ids[start : start + _CHUNK, None]
        if bos is not None:
            sequences = torch.cat([torch.full_like(sequences, bos), sequences], dim=1)
        parts.append(states_before(model, layer, sequences)[:, -1].clone())
    return torch.cat(parts)


class _StopAtBlock(Exception):
    """Raised before the chosen block to end the pass, because later blocks are not needed."""


def states_before(model: Model, layer: int, ids: Tensor) -> Tensor:
    """Return the stream (B, T, d) before a block for ids (B, T); the pass ends there."""
    states: list[Tensor] = []

    def record(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        states.append(arguments[0] if arguments else next(iter(options.values())))
        raise _StopAtBlock

    block = model.module.get_submodule(block_paths(model)[layer])
    handle = block.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with evaluating(model.module), torch.no_grad():
            model.forward({}, ids.to(model.device))
    except _StopAtBlock:
        pass
    finally:
        handle.remove()
    return states[0].detach().cpu()


def _mean(model: Model, layer: int, corpus: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean stream before the block for the tokens of a corpus: (n, d), and these tokens."""
    if corpus is None:
        raise UsageError(
            "how='mean' needs a corpus of ids (N, T)", hint="cs.text_data(…) makes windows of a text"
        )
    if corpus.dim() != 2 or corpus.is_floating_point() or not corpus.numel():
        raise UsageError(f"corpus: expected ids (N, T), got {corpus.dtype} {tuple(corpus.shape)}")
    tokens, index = corpus.unique(return_inverse=True)
    total, step = None, max(1, 4096 // corpus.shape[1])
    for start in range(0, len(corpus), step):
        part = slice(start, start + step)
        x = states_before(model, layer, corpus[part]).double().flatten(0, 1)
        total = x.new_zeros(len(tokens), x.shape[1]) if total is None else total
        total.index_add_(0, index[part].flatten(), x)
    assert total is not None
    count = torch.bincount(index.flatten(), minlength=len(tokens))
    known = torch.isin(tokens, ids)
    return (total / count[:, None])[known], tokens[known]
