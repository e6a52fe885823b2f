"""Directions as tokens: the rows of a reference with the largest and the smallest products.

The code processes the vocabulary in chunks, so that no table exceeds a chunk of tokens times the directions.
A first pass in float32 keeps a few candidates more than are asked for; their scores are computed again in
float64, and where rounding could have hidden a better token, the direction is done again in float64. The
result is exact, with ties broken by id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Tabular
from curvescope.geometry.vocabulary.names import TokenNames, names_of
from curvescope.geometry.vocabulary.references import Reference, rows_reference

SPARE = 8  # candidates beyond k
GROUP = 32  # directions that are scored against the whole vocabulary in float64 at a time


@dataclass(frozen=True)
class TopTokens(Tabular):
    """The k tokens nearest to each direction, best first; axis 1 is the sign: 0 is +, 1 is −."""

    ids: np.ndarray  # (m, 2, k)
    scores: np.ndarray  # (m, 2, k) of sign × direction
    cosine: np.ndarray  # (m, 2, k)
    fraction: np.ndarray  # (m, 2, k) of the greatest score that could be had
    text: list[list[list[str]]]  # UTF-8 with errors replaced
    bytes: list[list[list[str]]]  # every byte as \xNN
    reference: str  # what the rows are, in words
    num_tokens: int  # rows compared with

    def table(self) -> Any:
        """One row per direction, sign and rank."""
        m, signs, k = self.ids.shape
        index = np.indices((m, signs, k)).reshape(3, -1)
        columns: dict[str, Any] = {"direction": index[0], "sign": 1 - 2 * index[1], "rank": index[2] + 1}
        for name in ("ids", "scores", "cosine", "fraction"):
            columns["id" if name == "ids" else name.removesuffix("s")] = getattr(self, name).reshape(-1)
        for name in ("text", "bytes"):
            columns[name] = [cell for row in getattr(self, name) for side in row for cell in side]
        return columns


def top_tokens(
    directions: Tensor,
    reference: Reference | Tensor,
    *,
    k: int = 5,
    tokenizer: Any = None,
    signs: Literal[1, 2] = 2,
    precision: Literal["float32", "float64"] = "float32",
    chunk: int = 8192,
) -> TopTokens:
    """The k rows of the reference with the largest r · v, for v and −v of every row v of `directions` (m, d).

    Ties are broken by id. With fewer than k rows, all of them are listed.

    Args:
        reference: what to compare with, or its rows (n, d) themselves, for the tokens 0 … n − 1.
        tokenizer: names the tokens; without one they are called [id].
        signs: 1 leaves −v out (axis 1 has length one).
        precision: of the first pass over the vocabulary; the result is the same.
        chunk: tokens of the vocabulary at a time.
    """
    source = rows_reference(reference) if isinstance(reference, Tensor) else reference
    v = torch.as_tensor(directions).detach().double().cpu()
    _check(v, source, k, chunk)
    sides = _best(v, source, min(k, len(source)), (1, -1)[:signs], precision, chunk)
    return _named(v, torch.stack(sides, dim=1), source, names_of(tokenizer))


def top_rows(directions: Tensor, reference: Reference, *, k: int, chunk: int = 8192) -> tuple[Tensor, Tensor]:
    """Find the best rows like `top_tokens` with signs=1: positions in `reference.ids` and scores, (m, k)
    each.
    """
    v = torch.as_tensor(directions).detach().double().cpu()
    _check(v, reference, k, chunk)
    (best,) = _best(v, reference, min(k, len(reference)), (1,), "float32", chunk)
    return best, scores_at(v, best, reference)


def _check(v: Tensor, source: Reference, k: int, chunk: int) -> None:
    if v.dim() != 2 or v.shape[1] != source.d:
        raise ShapeError(f"expected directions (m, {source.d}), got {tuple(v.shape)}")
    if k < 1 or chunk < 1:
        raise UsageError(f"expected k and chunk of at least 1, got {k} and {chunk}")
    if not len(source):
        raise UsageError("expected a reference with at least one token, got none")
    if not bool(torch.isfinite(v).all()):
        raise UsageError("expected finite directions, got inf or nan")


# ------------------------------------------------------------------------------------------ the search


def _best(
    v: Tensor, source: Reference, k: int, signs: tuple[int, ...], precision: str, chunk: int
) -> list[Tensor]:
    """Positions in source.ids of the k best rows of sign × v, ties by position: (m, k) for each sign."""
    dtype = torch.float32 if precision == "float32" else torch.float64
    wanted = min(k + SPARE, len(source))
    rough, longest = _candidates(v.to(dtype), source, wanted, signs, chunk)
    slack = _slack(v, source, longest, dtype)
    found = []
    for sign, (last, places) in zip(signs, rough, strict=True):
        scores = scores_at(sign * v, places, source)
        order = _order(scores, places)[:, :k]
        best = places.gather(1, order)
        if wanted < len(source):  # a token that was left out has at most the last candidate's rough score
            unsure = scores.gather(1, order)[:, -1] <= last.double() + slack
            again = unsure.nonzero().flatten()
            for group in again.split(GROUP) if len(again) else ():
                best[group] = _thorough(sign * v[group], source, k, longest, chunk)
        found.append(best)
    return found


def _candidates(
    v: Tensor, source: Reference, count: int, signs: tuple[int, ...], chunk: int
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Return for each sign the last rough score (m,) and the positions (m, count) of the best rows; and max
    |r|.
    """
    best = [(v.new_empty(len(v), 0), torch.empty(len(v), 0, dtype=torch.int64)) for _ in signs]
    longest = 0.0
    for start, rows, bias in _chunks(source, chunk, v.dtype):
        longest = max(longest, float(rows.norm(dim=1).max()))
        product = v @ rows.T
        for side, sign in enumerate(signs):
            scores = product if sign > 0 else product.neg_()
            scores = scores if bias is None else scores + bias
            top, at = scores.topk(min(count, scores.shape[1]), dim=1, sorted=False)
            values, places = torch.cat([best[side][0], top], 1), torch.cat([best[side][1], at + start], 1)
            values, order = values.topk(min(count, values.shape[1]), dim=1)
            best[side] = values, places.gather(1, order)
    return [(values[:, -1], places) for values, places in best], longest


def _chunks(source: Reference, chunk: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    for start in range(0, len(source), chunk):
        part = slice(start, start + chunk)
        bias = None if source.bias is None else source.bias[part].to(dtype)
        yield start, source.rows(part).to(dtype), bias


def scores_at(v: Tensor, places: Tensor, source: Reference) -> Tensor:
    """Scores of chosen rows in float64: (m, c), as `places`.

    A sum over products, whose order does not depend on where a row lies, so that equal rows tie exactly.
    """
    scores = torch.empty(places.shape, dtype=torch.float64)
    for part, rows in rows_at(places, source):
        scores[part] = (rows * v[part, None]).sum(-1)
    return scores if source.bias is None else scores + source.bias[places]


def rows_at(places: Tensor, source: Reference) -> Iterator[tuple[slice, Tensor]]:
    """Rows (…, c, d) at places (m, c), a slice of the m at a time."""
    step = max(1, 2**22 // (places.shape[1] * source.d))
    for i in range(0, len(places), step):
        own = places[i : i + step]
        yield slice(i, i + step), source.rows(own.flatten()).view(*own.shape, source.d)


def _order(scores: Tensor, places: Tensor) -> Tensor:
    """Positions of a sort by falling score, then by rising place."""
    by_place = places.argsort(dim=1, stable=True)
    by_score = (-scores.gather(1, by_place)).argsort(dim=1, stable=True)
    return by_place.gather(1, by_score)


def _slack(v: Tensor, source: Reference, longest: float, dtype: torch.dtype) -> Tensor:
    """Most that a rough score can be off: (d + 4) ε |v| |r|, and 2 ε of the bias: (m,)."""
    eps = torch.finfo(dtype).eps
    bias = 0.0 if source.bias is None else float(source.bias.abs().max())
    return eps * ((source.d + 4) * v.norm(dim=-1) * longest + 2 * bias)


def _thorough(v: Tensor, source: Reference, k: int, longest: float, chunk: int) -> Tensor:
    """Rescore, for a few directions (m, d), every row that could be among the best."""
    parts = [
        v @ rows.T if bias is None else v @ rows.T + bias for _, rows, bias in _chunks(source, chunk, v.dtype)
    ]
    scores = torch.cat(parts, dim=1)
    least = scores.topk(k).values[:, -1] - 2 * _slack(v, source, longest, v.dtype)
    found = []
    for i, could in enumerate(scores >= least[:, None]):
        places = could.nonzero().T
        exact = scores_at(v[i, None], places, source)
        found.append(places[0][_order(exact, places)[0, :k]])
    return torch.stack(found)


# ------------------------------------------------------------------------------------------ the answer


def _named(v: Tensor, places: Tensor, source: Reference, names: TokenNames) -> TopTokens:
    """Scores, cosines and names of the tokens at `places` (m, signs, k)."""
    scores, cosine, fraction = (torch.empty(places.shape, dtype=torch.float64) for _ in range(3))
    for side, sign in enumerate((1, -1)[: places.shape[1]]):
        scores[:, side], cosine[:, side], fraction[:, side] = measures(sign * v, places[:, side], source)
    ids = source.ids[places]
    text, raw = names.nested(ids)
    return TopTokens(
        ids.numpy(),
        scores.numpy(),
        cosine.numpy(),
        fraction.numpy(),
        text,
        raw,
        source.words,
        len(source),
    )


def measures(v: Tensor, places: Tensor, source: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """Score, cosine (of direction and row), and fraction of the greatest score: (m, c) each, at `places`."""
    scores, cosine, fraction = (torch.empty(places.shape, dtype=torch.float64) for _ in range(3))
    for part, rows in rows_at(places, source):
        own, bias = v[part, None], None if source.bias is None else source.bias[places[part]]
        product, lengths = (rows * own).sum(-1), rows.norm(dim=-1)
        scores[part] = product if bias is None else product + bias
        cosine[part] = product / (lengths * own.norm(dim=-1)).clamp_min(1e-300)
        high = source.attainable(own, lengths, bias)
        fraction[part] = scores[part] / torch.where(high.abs() > 0, high, torch.full_like(high, torch.nan))
    return scores, cosine, fraction
