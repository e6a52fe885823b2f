"""Settings and text formats of the Traveling Words code, used by `legacy=true` in the geometry studies.

Traveling Words (santiag0m/traveling-words) is the code of Molina (2023). Its settings are options of
`curvescope.geometry`; this module collects them. It lies below `papers` because the studies use it, too.

The text files have the layout of the original, with a token list written as a Python list. The original
appended to its files on every run; here each file is written once. The original LaTeX did not compile: some
names fused with the next letter, and labels occurred several times. The tables here have the same columns and
captions, but compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.geometry.embeddings import LENGTHS
from curvescope.geometry.probes import ValueProbe
from curvescope.geometry.sphere import StreamNorm
from curvescope.geometry.vocabulary.representations import How
from curvescope.viz import writers

if TYPE_CHECKING:
    from curvescope.geometry.attention.directions import Directions, HeadDirections
    from curvescope.geometry.embeddings import Distances, Extremes
    from curvescope.geometry.probes import KeyProbe, ValueProbe

DISTANCES: dict[str, Any] = {"norm": StreamNorm("layernorm", eps=1e-5), "all_rows": True}
SCORES: dict[str, Any] = {"which": "input", "scores": LENGTHS, "all_rows": True}
DIRECTIONS: dict[str, Any] = {
    "folded": False,
    "sides": 1,
    "written": "embedding",
    "query_bias": True,
    "energy": False,
}
NUM_PAIRS = 20  # singular pairs of each head
REPRESENTATION: How = "raw"  # representation of a token in every block
KEYS: dict[str, Any] = {"folded": False, "bias": False, "form": "bare"}
VALUES: dict[str, Any] = {"folded": False, "output_bias": "every", "form": "bare"}
FITTED_ROWS = 10_000  # rows of the embedding to which its UMAP is fitted


def whole_lengths(probe: ValueProbe) -> ValueProbe:
    """Truncate the lengths of the probe's updates to integers, as the original prints them."""
    return replace(probe, norms=np.trunc(probe.norms))


TOP_WORDS = 3  # words per cell of the LaTeX tables


def embedding_text(distances: Distances, extremes: Extremes) -> str:
    """Format both tables about the embedding like the original: three decimals, commas between thousands."""
    tables = (f.to_frame().to_string(float_format="{:,.3f}".format) for f in (distances, extremes))
    return "\n".join([f"Avg. Norm: {distances.mean_norm:.3f}", *tables, ""])


def keys_text(probes: Sequence[KeyProbe]) -> str:
    """Content of common_noun_logs_qk.txt: nearest keys of every word, head by head."""
    lines = []
    for probe in probes:
        lines.append(f"=== block {probe.layer} ===")
        for word, by_head in zip(probe.words, probe.text, strict=True):
            lines += [f"Query: {word}", "Keys:"]
            lines += [f"\tHead {head}: {tokens}" for head, tokens in enumerate(by_head)]
            lines.append("")
    return _text(lines)


def values_text(probes: Sequence[ValueProbe]) -> str:
    """Content of common_noun_logs_vo.txt: the tokens that each word's value writes, per head and layer."""
    lines = []
    for probe in probes:
        lines.append(f"=== block {probe.layer} ===")
        for word, by_head, norms in zip(probe.words, probe.text, probe.norms, strict=True):
            names = [*(f"Head {head}" for head in range(len(by_head) - 1)), "Layer Sum"]
            lines += [f"Key: {word}", "Values:"]
            rows = zip(names, norms, by_head, strict=True)
            lines += [f"\t{name} [{norm:.4f}]: {tokens}" for name, norm, tokens in rows]
            lines.append("")
    return _text(lines)


def svd_text(layers: Sequence[HeadDirections], circuit: str) -> str:
    """Content of svd_qk_logs.txt or svd_vo_logs.txt: the tokens of every pair of singular vectors."""
    lines = []
    for layer in layers:
        directions = _circuit(layer, circuit)
        for head in range(layer.num_heads):
            at = (directions.head == head).nonzero()[0]
            lines += ["", f"=== Top singular values for block {layer.layer} - head {head} ==="]
            for title, side in (("Left:", directions.left), ("Right:", directions.right)):
                lines.append(title)
                lines += [
                    f"[{directions.rank[p]}] {side.text[p][0]} [{directions.singular_value[p]:.2f}]"
                    for p in at
                ]
    return _text(lines)


def svd_latex(layer: HeadDirections, circuit: str) -> str:
    """Content of svd_qk_latex_table_layer_B.txt and similar files: one table per head, with unique labels."""
    directions = _circuit(layer, circuit)
    parts = []
    for head in range(layer.num_heads):
        at = (directions.head == head).nonzero()[0]
        rows = [
            r"\begin{table}[ht]",
            r"\centering",
            rf"\caption{{Left and Right Singular Vectors at Layer {layer.layer} - Head {head}}}",
            rf"\label{{tab:svd-{circuit}-layer-{layer.layer}-head-{head}}}",
            r"\resizebox{\textwidth}{!}{%",
            r"\begin{tabular}{rll}",
            r"\toprule",
            rf"Rank & Top-{TOP_WORDS} Left Words & Top-{TOP_WORDS} Right Words \\",
            r"\midrule",
        ]
        for p in at:
            words = (
                ", ".join(writers.escape(t, spaces=True) for t in side.text[p][0][:TOP_WORDS])
                for side in (directions.left, directions.right)
            )
            rows.append(" & ".join([str(directions.rank[p]), *words]) + r" \\")
        parts.append("\n".join([*rows, r"\hline", r"\end{tabular}}", r"\end{table}", ""]))
    return "\n".join(parts)


def bias_text(layers: Sequence[HeadDirections]) -> str:
    """Content of key_query_bias_logs.txt: tokens that the biases of queries and keys prefer and avoid."""
    lines = []
    for layer in layers:
        if layer.query_bias is None:
            raise UsageError(
                "expected directions with the bias of the query", hint="decode_heads(…, query_bias=True)"
            )
        for head in range(layer.num_heads):
            lines.append(f"Block {layer.layer} - Head: {head}")
            for side, sign in enumerate("+-"):
                lines.append(f"[{sign}] Query: {layer.query_bias.text[head][side]}")
                lines.append(f"[{sign}] Key: {layer.key_bias.text[head][side]}")
            lines.append("")
    return _text(lines)


def _circuit(layer: HeadDirections, circuit: str) -> Directions:
    if circuit not in ("qk", "vo"):
        raise UsageError(f"expected the circuit qk or vo, got {circuit!r}")
    return layer.qk if circuit == "qk" else layer.vo


def _text(lines: Sequence[str]) -> str:
    return "\n".join([*lines, ""])
