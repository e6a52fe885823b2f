"""Representation of a token in a block: its embedding, or its state after the blocks before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.geometry.roles import check_layer, embedding, read_norm, weight
from curvescope.geometry.sphere import Norm
from curvescope.geometry.vocabulary.names import names_of
from curvescope.geometry.vocabulary.references import Reference, ReferenceKind
from curvescope.models.capture.activation_points import block_paths
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating

How = Literal["auto", "raw", "position", "run", "mean"]
_CHUNK = 512


@dataclass(frozen=True, eq=False)
class Representation:
    """The stream before a block for every token, and what its attention reads of it.

    `table[at[i]]` is the stream of token ids[i]; attention reads `norm` of it where `normed`, else it itself.
    """

    table: Tensor  # (V or n, d)
    ids: Tensor  # (n,)
    at: Tensor  # (n,)
    norm: Norm
    normed: bool
    post: bool  # the norm stands behind the blocks
    how: str
    note: str

    def states(self, which: Tensor) -> Tensor:
        """The stream of some of `ids`, by their positions: (c, d) in float64.

        In a post-norm model that is what is added to: the stream behind the norm.
        """
        x = self.table[self.at[which]].double()
        return self.norm(x) if self.normed and self.post else x

    def reads(self, *, folded: bool) -> Reference:
        """Rows that attention reads: n(x) if the norm is folded into the weights, else γ ∘ n(x) + β."""
        kind: ReferenceKind = "raw" if not self.normed else "sphere" if folded else "normed"
        return Reference(self.table, self.ids, self.at, kind, self.norm, words=self.note)

    def positions(self, ids: Any) -> Tensor:
        """Positions in `self.ids` of tokens; −1 where a token is not there."""
        wanted = torch.as_tensor(ids)
        at = torch.searchsorted(self.ids, wanted).clamp_max(len(self.ids) - 1)
        return torch.where(self.ids[at] == wanted, at, torch.full_like(at, -1))


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
            token when it comes to the block; `mean` the mean state over a corpus. `auto` is `raw` for
            block 0 and `run` for the others.
        position: for `position`.
        bos: for `run`, a token put before.
        corpus: ids (N, T) for `mean`; tokens that do not occur in it are left out.
        ids: only these tokens, rising; default all that the tokenizer knows.
        tokenizer: instead of the model's own; decides which rows are tokens.
    """
    check_layer(model, layer)
    if how not in ("auto", "raw", "position", "run", "mean"):
        raise UsageError(f"how: expected auto, raw, position, run or mean, got {how!r}")
    chosen = how if how != "auto" else ("raw" if layer == 0 else "run")
    table = embedding(model, "input")
    known = names_of(model.tokenizer if tokenizer is None else tokenizer).known(len(table))
    ids = known if ids is None else known[torch.isin(known, ids)]
    norm, _ = read_norm(model, layer)
    pre = model.facts.get("norm") == "pre"
    normed = norm.kind != "none" and (pre or chosen in ("raw", "position"))
    at = ids
    if chosen == "position":
        table = table + _position(model, position).to(table)
    elif chosen == "run":
        table, at = _run(model, layer, ids, bos), torch.arange(len(ids))
    elif chosen == "mean":
        table, ids = _mean(model, layer, corpus, ids)
        at = torch.arange(len(ids))
    note = _sentence(chosen, layer, position, bos, len(ids))
    return Representation(table, ids, at, norm, normed, not pre, chosen, note)


def _sentence(how: str, layer: int, position: int, bos: int | None, num: int) -> str:
    words = {
        "raw": "its embedding, without position or earlier blocks",
        "position": f"its embedding plus position {position}, without earlier blocks",
        "run": f"its state before block {layer} in a sequence of that token alone"
        + ("" if bos is None else f" behind token {bos}"),
        "mean": f"its mean state before block {layer} over the corpus, for the {num} tokens that occur in it",
    }
    return f"a token is represented by {words[how]}"


def _position(model: Model, position: int) -> Tensor:
    """The learned position, counted as the model does."""
    P = weight(model, "P")
    if P is None:
        raise UsageError(
            f"expected learned positions, {model.name!r} has none", hint="how='raw' or how='run'"
        )
    first = len(P) - (model.n_ctx or len(P))  # OPT and RoBERTa leave rows out
    if not 0 <= position < len(P) - first:
        raise UsageError(f"position: expected 0 to {len(P) - first - 1}, got {position}")
    return P[first + position]


def _run(model: Model, layer: int, ids: Tensor, bos: int | None) -> Tensor:
    """The stream before the block at the last token of [bos,] t: (n, d)."""
    parts = []
    for start in range(0, len(ids), _CHUNK):
        sequences = ids[start : start + _CHUNK, None]
        if bos is not None:
            sequences = torch.cat([torch.full_like(sequences, bos), sequences], dim=1)
        parts.append(states_before(model, layer, sequences)[:, -1].clone())
    return torch.cat(parts)


class _Arrived(Exception):
    """Raised at the block that was asked for: what comes behind it need not be computed."""


def states_before(model: Model, layer: int, ids: Tensor) -> Tensor:
    """The stream (B, T, d) that comes to a block for ids (B, T); the pass ends there."""
    found: list[Tensor] = []

    def keep(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(arguments[0] if arguments else next(iter(options.values())))
        raise _Arrived

    block = model.module.get_submodule(block_paths(model)[layer])
    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with evaluating(model.module), torch.no_grad():
            model.forward({}, ids.to(model.device))
    except _Arrived:
        pass
    finally:
        handle.remove()
    return found[0].detach().cpu()


def _mean(model: Model, layer: int, corpus: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean stream before the block for the tokens of a corpus: (n, d), and these tokens."""
    if corpus is None:
        raise UsageError(
            "how='mean' needs a corpus of ids (N, T)", hint="cs.text_data(…) makes windows of a text"
        )
    if corpus.dim() != 2 or corpus.is_floating_point() or not corpus.numel():
        raise UsageError(f"corpus: expected ids (N, T), got {corpus.dtype} {tuple(corpus.shape)}")
    found, index = corpus.unique(return_inverse=True)
    total, step = None, max(1, 4096 // corpus.shape[1])
    for start in range(0, len(corpus), step):
        part = slice(start, start + step)
        x = states_before(model, layer, corpus[part]).double().flatten(0, 1)
        total = x.new_zeros(len(found), x.shape[1]) if total is None else total
        total.index_add_(0, index[part].flatten(), x)
    assert total is not None
    count = torch.bincount(index.flatten(), minlength=len(found))
    known = torch.isin(found, ids)
    return (total / count[:, None])[known], found[known]
