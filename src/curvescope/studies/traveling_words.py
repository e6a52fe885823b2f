"""What `legacy=true` means in the studies of geometry: the choices of the Traveling Words code.

That is santiag0m/traveling-words, the code of Molina (2023). Its choices are options of `curvescope.geometry`
like any others; they are put together here and nowhere else. The setting stands below `papers` because the
studies have the option too.

The text files of the Traveling Words code (santiag0m/traveling-words), in its own layout.

Tokens stand as a Python list of their texts. The original added to its files with every run; these are whole
texts, to be written once. Its LaTeX had names that fused with letters behind them and labels that occurred
several times: the tables here have its columns and captions, but compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.geometry.embeddings import LENGTHS
from curvescope.geometry.probes import ValueProbe
from curvescope.geometry.sphere import Norm
from curvescope.geometry.vocabulary.representations import How
from curvescope.viz import writers

if TYPE_CHECKING:
    from curvescope.geometry.attention.directions import Directions, HeadDirections
    from curvescope.geometry.embeddings import Distances, Extremes
    from curvescope.geometry.probes import KeyProbe, ValueProbe

DISTANCES: dict[str, Any] = {"norm": Norm("layernorm", eps=1e-5), "all_rows": True}
SCORES: dict[str, Any] = {"which": "input", "scores": LENGTHS, "all_rows": True}
DIRECTIONS: dict[str, Any] = {
    "folded": False,
    "sides": 1,
    "written": "embedding",
    "query_bias": True,
    "energy": False,
}
NUM_PAIRS = 20  # singular pairs of each head
REPRESENTATION: How = "raw"  # of a token, in every block
KEYS: dict[str, Any] = {"folded": False, "bias": False, "form": "bare"}
VALUES: dict[str, Any] = {"folded": False, "output_bias": "every", "form": "bare"}
FITTED_ROWS = 10_000  # of the embedding, to which its UMAP is fitted


def whole_lengths(probe: ValueProbe) -> ValueProbe:
    """The probe with the lengths of its updates cut to whole numbers, as they were printed."""
    return replace(probe, norms=np.trunc(probe.norms))


TOP_WORDS = 3  # of the LaTeX tables


def embedding_text(distances: Distances, extremes: Extremes) -> str:
    """Both tables about the embedding, as they were printed: three decimals, commas between thousands."""
    tables = (f.to_frame().to_string(float_format="{:,.3f}".format) for f in (distances, extremes))
    return "\n".join([f"Avg. Norm: {distances.mean_norm:.3f}", *tables, ""])


def keys_text(probes: Sequence[KeyProbe]) -> str:
    """common_noun_logs_qk.txt: nearest keys of every word, head by head."""
    lines = []
    for probe in probes:
        lines.append(f"=== block {probe.layer} ===")
        for word, by_head in zip(probe.words, probe.text, strict=True):
            lines += [f"Query: {word}", "Keys:"]
            lines += [f"\tHead {head}: {tokens}" for head, tokens in enumerate(by_head)]
            lines.append("")
    return _text(lines)


def values_text(probes: Sequence[ValueProbe]) -> str:
    """common_noun_logs_vo.txt: what every word's value writes, head by head and for the layer."""
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
    """svd_qk_logs.txt or svd_vo_logs.txt: the tokens of every pair of singular vectors."""
    lines = []
    for layer in layers:
        found = _circuit(layer, circuit)
        for head in range(layer.num_heads):
            at = (found.head == head).nonzero()[0]
            lines += ["", f"=== Top singular values for block {layer.layer} - head {head} ==="]
            for title, side in (("Left:", found.left), ("Right:", found.right)):
                lines.append(title)
                lines += [f"[{found.rank[p]}] {side.text[p][0]} [{found.singular_value[p]:.2f}]" for p in at]
    return _text(lines)


def svd_latex(layer: HeadDirections, circuit: str) -> str:
    """svd_qk_latex_table_layer_B.txt and the like: one table per head; every label occurs once."""
    found = _circuit(layer, circuit)
    parts = []
    for head in range(layer.num_heads):
        at = (found.head == head).nonzero()[0]
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
                ", ".join(_latex(t) for t in side.text[p][0][:TOP_WORDS])
                for side in (found.left, found.right)
            )
            rows.append(" & ".join([str(found.rank[p]), *words]) + r" \\")
        parts.append("\n".join([*rows, r"\hline", r"\end{tabular}}", r"\end{table}", ""]))
    return "\n".join(parts)


def bias_text(layers: Sequence[HeadDirections]) -> str:
    """key_query_bias_logs.txt: tokens that the biases of queries and keys prefer and avoid."""
    lines = []
    for layer in layers:
        if layer.query_bias is None:
            raise UsageError(
                "expected directions with the query's bias", hint="decode_heads(…, query_bias=True)"
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


def _latex(token: str) -> str:
    return writers.escape(token, spaces=True)


def _text(lines: Sequence[str]) -> str:
    return "\n".join([*lines, ""])
