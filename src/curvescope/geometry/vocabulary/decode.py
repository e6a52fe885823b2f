"""Decode directions into tokens: find the rows of a reference with the largest and smallest products.

The search processes the vocabulary in chunks to limit memory. A first pass in float32 selects a few more
candidates than requested, and recomputes their scores in float64. If rounding could have hidden a better
token, the direction is searched again in float64. The result is exact, with ties broken by id.
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
from curvescope.geometry.vocabulary.references import TokenReference, rows_reference

EXTRA_CANDIDATES = 8  # candidates beyond k
GROUP = 32  # directions that are scored against the whole vocabulary in float64 at a time


@dataclass(frozen=True)
class TopTokens(Tabular):
    """The k tokens nearest to each direction, best first; axis 1 is the sign: 0 is +, 1 is −."""

    ids: np.ndarray  # (m, 2, k)
    scores: np.ndarray  # (m, 2, k) products with sign × direction
    cosine: np.ndarray  # (m, 2, k)
    fraction: np.ndarray  # (m, 2, k) fraction of the greatest attainable score
    text: list[list[list[str]]]  # UTF-8 with errors replaced
    bytes: list[list[list[str]]]  # every byte as \xNN
    reference: str  # description of the rows
    num_tokens: int  # number of rows in the reference

    def table(self) -> Any:
        """Return one row per direction, sign and rank."""
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
    reference: TokenReference | Tensor,
    *,
    k: int = 5,
    tokenizer: Any = None,
    signs: Literal[1, 2] = 2,
    precision: Literal["float32", "float64"] = "float32",
    chunk: int = 8192,
) -> TopTokens:
    """Return the k rows r of the reference with the largest r · v, for v and −v of every direction v.

    `directions` is (m, d). Ties are broken by id. With fewer than k rows, all of them are listed.

    Args:
        reference: the reference, or rows (n, d) for the tokens 0 … n − 1.
        tokenizer: gives the names of tokens; without it they are called [id].
        signs: 1 omits −v (axis 1 has length one).
        precision: dtype of the first pass over the vocabulary; it does not change the result.
        chunk: number of tokens processed at a time.
    """
    source = rows_reference(reference) if isinstance(reference, Tensor) else reference
    v = torch.as_tensor(directions).detach().double().cpu()
    _check(v, source, k, chunk)
    sides = _best(v, source, min(k, len(source)), (1, -1)[:signs], precision, chunk)
    return _named(v, torch.stack(sides, dim=1), source, names_of(tokenizer))


def top_rows(
    directions: Tensor, reference: TokenReference, *, k: int, chunk: int = 8192
) -> tuple[Tensor, Tensor]:
    """Find the best rows like `top_tokens` with signs=1: (m, k) positions in `reference.ids`, and scores."""
    v = torch.as_tensor(directions).detach().double().cpu()
    _check(v, reference, k, chunk)
    (best,) = _best(v, reference, min(k, len(reference)), (1,), "float32", chunk)
    return best, scores_at(v, best, reference)


def _check(v: Tensor, source: TokenReference, k: int, chunk: int) -> None:
    if v.dim() != 2 or v.shape[1] != source.d:
        raise ShapeError(f"expected directions (m, {source.d}), got {tuple(v.shape)}")
    if k < 1 or chunk < 1:
        raise UsageError(f"expected k and chunk of at least 1, got {k} and {chunk}")
    if not len(source):
        raise UsageError("expected a reference with at least one token, got none")
    if not bool(torch.isfinite(v).all()):
        raise UsageError("expected finite directions, got inf or nan")


# --------------------------------------------------------------------------------------------- search


def _best(
    v: Tensor, source: TokenReference, k: int, signs: tuple[int, ...], precision: str, chunk: int
) -> list[Tensor]:
    """Return the positions in source.ids of the k best rows for sign × v: (m, k) for each sign."""
    dtype = torch.float32 if precision == "float32" else torch.float64
    num_candidates = min(k + EXTRA_CANDIDATES, len(source))
    candidates, longest = _candidates(v.to(dtype), source, num_candidates, signs, chunk)
    slack = _slack(v, source, longest, dtype)
    best_by_sign = []
    for sign, (last, positions) in zip(signs, candidates, strict=True):
        scores = scores_at(sign * v, positions, source)
        order = _order(scores, positions)[:, :k]
        best = positions.gather(1, order)
        if num_candidates < len(source):  # other tokens have at most the last candidate's rough score
            is_uncertain = scores.gather(1, order)[:, -1] <= last.double() + slack
            uncertain = is_uncertain.nonzero().flatten()
            for group in uncertain.split(GROUP) if len(uncertain) else ():
                best[group] = _best_exact(sign * v[group], source, k, longest, chunk)
        best_by_sign.append(best)
    return best_by_sign


def _candidates(
    v: Tensor, source: TokenReference, count: int, signs: tuple[int, ...], chunk: int
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Return the last rough score (m,) and positions (m, count) of the best rows per sign, and max |r|."""
    best = [(v.new_empty(len(v), 0), torch.empty(len(v), 0, dtype=torch.int64)) for _ in signs]
    longest = 0.0
    for start, rows, bias in _chunks(source, chunk, v.dtype):
        longest = max(longest, float(rows.norm(dim=1).max()))
        product = v @ rows.T
        for side, sign in enumerate(signs):
            scores = product if sign > 0 else product.neg_()
            scores = scores if bias is None else scores + bias
            top, at = scores.topk(min(count, scores.shape[1]), dim=1, sorted=False)
            values, positions = torch.cat([best[side][0], top], 1), torch.cat([best[side][1], at + start], 1)
            values, order = values.topk(min(count, values.shape[1]), dim=1)
            best[side] = values, positions.gather(1, order)
    return [(values[:, -1], positions) for values, positions in best], longest


def _chunks(
    source: TokenReference, chunk: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    for start in range(0, len(source), chunk):
        part = slice(start, start + chunk)
        bias = None if source.bias is None else source.bias[part].to(dtype)
        yield start, source.rows(part).to(dtype), bias


def scores_at(v: Tensor, positions: Tensor, source: TokenReference) -> Tensor:
    """Return the scores of chosen rows in float64: (m, c), like `positions`.

    The order of summation does not depend on the position of a row, so that equal rows tie exactly.
    """
    scores = torch.empty(positions.shape, dtype=torch.float64)
    for part, rows in rows_at(positions, source):
        scores[part] = (rows * v[part, None]).sum(-1)
    return scores if source.bias is None else scores + source.bias[positions]


def rows_at(positions: Tensor, source: TokenReference) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over slices of the m directions with their rows (…, c, d) at positions (m, c)."""
    step = max(1, 2**22 // (positions.shape[1] * source.d))
    for i in range(0, len(positions), step):
        chunk_positions = positions[i : i + step]
        yield (
            slice(i, i + step),
            source.rows(chunk_positions.flatten()).view(*chunk_positions.shape, source.d),
        )


def _order(scores: Tensor, positions: Tensor) -> Tensor:
    """Return the order by descending score, then by ascending position."""
    by_position = positions.argsort(dim=1, stable=True)
    by_score = (-scores.gather(1, by_position)).argsort(dim=1, stable=True)
    return by_position.gather(1, by_score)


def _slack(v: Tensor, source: TokenReference, longest: float, dtype: torch.dtype) -> Tensor:
    """Return the largest error of a rough score: (d + 4) ε |v| |r|, plus 2 ε of the bias: (m,)."""
    eps = torch.finfo(dtype).eps
    bias = 0.0 if source.bias is None else float(source.bias.abs().max())
    return eps * ((source.d + 4) * v.norm(dim=-1) * longest + 2 * bias)


def _best_exact(v: Tensor, source: TokenReference, k: int, longest: float, chunk: int) -> Tensor:
    """Rescore, for a few directions (m, d), every row that could be among the best."""
    parts = [
        v @ rows.T if bias is None else v @ rows.T + bias for _, rows, bias in _chunks(source, chunk, v.dtype)
    ]
    scores = torch.cat(parts, dim=1)
    least = scores.topk(k).values[:, -1] - 2 * _slack(v, source, longest, v.dtype)
    best = []
    for i, is_candidate in enumerate(scores >= least[:, None]):
        positions = is_candidate.nonzero().T
        exact = scores_at(v[i, None], positions, source)
        best.append(positions[0][_order(exact, positions)[0, :k]])
    return torch.stack(best)


# --------------------------------------------------------------------------------------------- result


def _named(v: Tensor, positions: Tensor, source: TokenReference, names: TokenNames) -> TopTokens:
    """Return scores, cosines and names of the tokens at `positions` (m, signs, k)."""
    scores, cosine, fraction = (torch.empty(positions.shape, dtype=torch.float64) for _ in range(3))
    for side, sign in enumerate((1, -1)[: positions.shape[1]]):
        scores[:, side], cosine[:, side], fraction[:, side] = measures(sign * v, positions[:, side], source)
    ids = source.ids[positions]
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


def measures(v: Tensor, positions: Tensor, source: TokenReference) -> tuple[Tensor, Tensor, Tensor]:
    """Return score, cosine and fraction of the greatest score of the rows at `positions`: (m, c) each."""
    scores, cosine, fraction = (torch.empty(positions.shape, dtype=torch.float64) for _ in range(3))
    for part, rows in rows_at(positions, source):
        direction, bias = v[part, None], None if source.bias is None else source.bias[positions[part]]
        product, lengths = (rows * direction).sum(-1), rows.norm(dim=-1)
        scores[part] = product if bias is None else product + bias
        cosine[part] = product / (lengths * direction.norm(dim=-1)).clamp_min(1e-300)
        high = source.attainable(direction, lengths, bias)
        fraction[part] = scores[part] / torch.where(high.abs() > 0, high, torch.full_like(high, torch.nan))
    return scores, cosine, fraction
