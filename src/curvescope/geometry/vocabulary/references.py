"""References for directions: one row per token of the vocabulary, computed chunk by chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.geometry.roles import Which, embedding, has_lens, norm_kind, norm_of, weight
from curvescope.geometry.sphere import StreamNorm, project
from curvescope.geometry.vocabulary.names import names_of
from curvescope.models.model import Model

ReferenceKind = Literal["raw", "sphere", "normed", "logit"]
_CHUNK = 4096
_DESCRIPTIONS = {
    "raw": "rows of the {which} embedding",
    "sphere": "{which} embedding on the sphere of {norm}",
    "normed": "{which} embedding after {norm}",
    "logit": "logit directions P(γ ∘ u) of the {which} embedding and {norm}",
}


@dataclass(frozen=True, eq=False)
class TokenReference:
    """Rows r_t = f(E_t) for the tokens `ids`, computed in chunks in float64.

    kind: `raw` e; `sphere` n(e); `normed` γ ∘ n(e) + β; `logit` P(γ ∘ e). `bias` (n,) is added to scores.
    """

    table: Tensor  # (V, d) in the model's dtype
    ids: Tensor  # (n,) the tokens
    at: Tensor | None = None  # (n,) their rows in the table, if these are not `ids`
    kind: ReferenceKind = "raw"
    norm: StreamNorm = StreamNorm("none")  # noqa: RUF009 (frozen)
    centered: bool = False
    bias: Tensor | None = None
    words: str = "given rows"

    def __post_init__(self) -> None:
        if self.table.dim() != 2 or (self.bias is not None and self.bias.shape != self.ids.shape):
            raise ShapeError(f"expected rows (n, d) and one bias per row, got {tuple(self.table.shape)}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def d(self) -> int:
        """Width of a row."""
        return self.table.shape[1]

    def rows(self, which: slice | Tensor) -> Tensor:
        """Return the rows of some of `ids`, in float64: (c, d)."""
        r = self._plain(which)
        return r - self.mean if self.centered else r

    def _plain(self, which: slice | Tensor) -> Tensor:
        e = self._entries(which)
        if self.kind == "sphere":
            return self.norm.sphere(e)
        if self.kind == "normed":
            return self.norm(e)
        return self.norm.direction(e) if self.kind == "logit" else e

    def _entries(self, which: slice | Tensor) -> Tensor:
        return self.table[(self.ids if self.at is None else self.at)[which]].double()

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the rows before centering: (d,)."""
        total, linear = torch.zeros(self.d, dtype=torch.float64), self.kind in ("raw", "logit")
        for start in range(0, len(self), _CHUNK):
            part = slice(start, start + _CHUNK)
            total += (self._entries(part) if linear else self._plain(part)).sum(0)
        mean = total / max(len(self), 1)
        return self.norm.direction(mean) if self.kind == "logit" else mean

    def attainable(self, directions: Tensor, lengths: Tensor, bias: Tensor | None) -> Tensor:
        """Return the greatest attainable score of directions (m, 1, d) with rows of given lengths (m, c).

        `sphere` and `normed`: the greatest r · v over all states, √d |Pv| or β · v + √d |P(γ ∘ v)|, which the
        best possible token would have. `logit`: the greatest logit of the row's token, √d |r| plus its bias,
        if the direction is a normalized state, else |Pv| |r|. `raw`: |v| |r|, so the fraction is the cosine.
        """
        v = directions
        if self.kind == "raw" or self.norm.kind == "none":
            return v.norm(dim=-1) * lengths
        if self.kind == "logit":
            size = (
                math.sqrt(self.d) if self.bias is not None else project(v, kind=self.norm.kind).norm(dim=-1)
            )
            return size * lengths if bias is None else size * lengths + bias
        shifted = self.norm if self.kind == "normed" else StreamNorm(self.norm.kind)
        greatest = shifted.attainable(v)[1]
        return (greatest - v @ self.mean if self.centered else greatest).expand_as(lengths)


def reference(
    model: Model,
    kind: ReferenceKind = "sphere",
    *,
    norm: str | None = None,
    which: Which | None = None,
    centered: bool = False,
    bias: bool = False,
    tokenizer: object = None,
) -> TokenReference:
    """Return reference rows of a model's embedding, one per token that its tokenizer knows.

    Args:
        kind: `raw` e_t; `sphere` n(e_t); `normed` γ ∘ n(e_t) + β; `logit` P(γ ∘ u_t), whose product with n(x)
            is the logit of t. A model without a norm before its unembedding has raw rows for `logit`, and a
            model without norms has raw rows for all kinds.
        norm: role of the norm: `ln_f` (default of `logit`) or a block's, such as `L3.ln1` (default L0.ln1).
        which: rows of the input or the output embedding; the default is output for `logit`, else input.
        centered: subtract the mean row.
        bias: add β · u_t and the unembedding's bias to the scores of `logit`, so that they are logits.
        tokenizer: decides which rows are tokens; default the model's own.
    """
    if kind not in _DESCRIPTIONS:
        raise UsageError(f"kind: expected {', '.join(_DESCRIPTIONS)}, got {kind!r}")
    which = which or ("output" if kind == "logit" else "input")
    table = embedding(model, which)
    ids = names_of(model.tokenizer if tokenizer is None else tokenizer).known(len(table))
    norm_object = _norm(model, kind, norm)
    words = _DESCRIPTIONS["raw" if norm_object.kind == "none" else kind].format(
        which=which, norm=norm_object.name
    )
    shift = _bias(model, table, ids, norm_object) if bias and kind == "logit" else None
    return TokenReference(
        table, ids, None, kind, norm_object, centered, shift, words + (", centered" if centered else "")
    )


def rows_reference(
    rows: Tensor,
    *,
    ids: Tensor | None = None,
    kind: ReferenceKind = "raw",
    norm: StreamNorm | None = None,
    words: str = "given rows",
) -> TokenReference:
    """Return a reference of given rows (n, d), such as states, for the tokens `ids` (default 0 … n − 1).

    Args:
        kind: transformation of the rows, as in `reference`.
        norm: norm of that transformation.
    """
    at = torch.arange(len(rows))
    norm_object = norm or StreamNorm("none")
    return TokenReference(
        rows, at if ids is None else torch.as_tensor(ids), at, kind, norm_object, words=words
    )


def _norm(model: Model, kind: ReferenceKind, role: str | None) -> StreamNorm:
    if kind == "raw" or norm_kind(model) == "none":
        return StreamNorm("none")
    if kind == "logit" and role is None and not has_lens(model):
        return StreamNorm("none")
    return norm_of(model, role or ("ln_f" if kind == "logit" else _first_norm(model)))


def _first_norm(model: Model) -> str:
    """Return the role of the first norm after the embedding: the embedding's own, or the first block's."""
    return "ln_e" if "ln_e.g" in model.blocks else "L0.ln1"


def _bias(model: Model, table: Tensor, ids: Tensor, norm: StreamNorm) -> Tensor:
    """Return β · u_t + b_t."""
    total = torch.zeros(len(ids), dtype=torch.float64)
    if norm.beta is not None:
        for start in range(0, len(ids), _CHUNK):
            part = slice(start, start + _CHUNK)
            total[part] = table[ids[part]].double() @ norm.beta
    b_U = weight(model, "b_U")
    return total if b_U is None or len(b_U) < len(table) else total + b_U.double()[ids]
