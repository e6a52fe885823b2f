"""Tables as text: LaTeX that a strict reader accepts, formats that give back the table, the old layouts."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.geometry import probe_keys, probe_values
from curvescope.geometry.attention.directions import decode_heads
from curvescope.geometry.embeddings import distances, extremes, token_scores
from curvescope.models.zoo.folder import zoo_model
from curvescope.studies import traveling_words
from curvescope.tokenizers import CharTokenizer
from curvescope.viz import writers

NASTY = [
    r"\alpha", "50%_&#{x}~^$", "a--b,,c", "''``", "\n", "\t\r", "\x00\x1b", " lead", "trail ", "  ", "",
    "中文", "é", "\ufffd", "😀", '"<|>"', "\\n", r"\texttt{\textbackslash{}n}", "-" * 5, "{}", "\\", "--",
    "u0041", "\u00ad",
]  # fmt: skip
COMMANDS = {
    "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">",
    "textbar": "|", "textquotedbl": '"', "textquotesingle": "'", "textasciigrave": "`",
    "textvisiblespace": " ",
}  # fmt: skip


def read_latex(source: str) -> str:
    """The text that LaTeX would set, by a reader of its own that knows the rules and nothing of the writer.

    Refused: characters beyond ASCII, commands that are not known or not closed by {}, special characters
    that are not escaped, ligatures, braces that do not match.
    """
    assert source.isascii()
    out, i = [], 0
    while i < len(source):
        c = source[i]
        if source.startswith(r"\texttt{\textbackslash{}", i):
            end = source.index("}", i + len(r"\texttt{\textbackslash{}"))
            code = source[i + len(r"\texttt{\textbackslash{}") : end]
            out.append({"n": "\n", "r": "\r", "t": "\t"}.get(code) or chr(int(code[1:], 16)))
            i = end + 1
        elif c == "\\":
            word = re.match(r"\\([a-zA-Z]+)\{\}", source[i:])
            if word:
                out.append(COMMANDS[word[1]])
                i += len(word[0])
            else:
                assert source[i + 1] in "{}$&#%_", source[i:]
                out.append(source[i + 1])
                i += 2
        elif source.startswith("{}", i):
            i += 2
        else:
            assert c not in "{}$&#%_~^<>|\"'`", source[i:]
            assert not (c in "-,." and source[i : i + 2] in ("--", ",,")), "a ligature"
            assert c.isprintable()
            out.append(c)
            i += 1
    return "".join(out)


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("spaces", [False, True])
def test_latex_gives_back_the_text(text, spaces):
    assert read_latex(writers.escape(text, spaces=spaces)) == text


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_latex_gives_back_any_text(text):
    assert read_latex(writers.escape(text, spaces=True)) == text


def test_a_code_cannot_be_taken_for_text():
    assert writers.escape("\n") != writers.escape("\\n")
    assert writers.escape("\\n") == r"\textbackslash{}n"


def frame() -> pd.DataFrame:
    count = len(NASTY)
    values = np.linspace(-2, 1e6, count)
    values[3] = np.nan
    return pd.DataFrame({"tok_en": NASTY, "|x|": values, "n": np.arange(count), "yes": [True] * count})


def test_tables_have_as_many_cells_as_columns_and_labels_occur_once():
    tables = {"first one": frame(), "first_one": frame().head(3), "long": pd.concat([frame()] * 2)}
    text = writers.write_all(tables, {"long": "100 % & more: β ≤ 2 ‖x‖"}, tokens=["tok_en"])["tables.tex"]
    assert text.isascii()
    assert text.count(r"\begin{document}") == text.count(r"\end{document}") == 1
    for kind in ("table", "tabular", "longtable"):
        assert text.count(rf"\begin{{{kind}}}") == text.count(rf"\end{{{kind}}}") > 0
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "caption" not in line]
    assert len(rows) == 3 + sum(len(t) for t in tables.values())
    assert all(len(re.findall(r"(?<!\\)&", row)) == 3 for row in rows)
    labels = re.findall(r"\\label\{([^}]*)\}", text)
    assert len(labels) == len(set(labels)) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9:-]+", label) for label in labels)
    assert _balanced(text)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(tmp_path):
    tables = {"nasty": frame(), "long": pd.concat([frame()] * 3)}
    text = writers.write_all(tables, {"nasty": f"{''.join(writers.MATH)} 100 % & more"}, tokens=["tok_en"])
    (tmp_path / "tables.tex").write_text(text["tables.tex"], encoding="ascii")
    strict = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    done = subprocess.run(strict, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in (tmp_path / "tables.log").read_text(errors="replace")


def _balanced(text: str) -> bool:
    depth = 0
    for match in re.finditer(r"\\\\|\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        assert depth >= 0
    return depth == 0


def test_csv_and_json_give_back_the_table():
    one = frame()
    again = pd.read_csv(io.StringIO(writers.write(one, "csv")), keep_default_na=False)
    printable = [i for i, t in enumerate(NASTY) if "\r" not in t and "\x00" not in t]
    assert [again["tok_en"][i] for i in printable] == [NASTY[i] for i in printable]
    rows = json.loads(writers.write(one, "json"))
    assert [row["tok_en"] for row in rows] == NASTY
    assert rows[3]["|x|"] is None
    assert rows[2]["n"] == 2
    assert rows[0]["yes"] is True


def test_markdown_has_one_line_per_row_and_its_cells():
    lines = writers.write(frame(), "md", tokens=["tok_en"]).splitlines()
    assert len(lines) == 2 + len(NASTY)
    assert lines[1] == "| --- | ---: | ---: | --- |"
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 5, line
    assert "`\\n`" in lines[2 + NASTY.index("\n")]


def test_tokens_that_are_no_utf8_are_called_by_their_bytes():
    assert writers.label("�", r"\xe2") == r"\xe2"
    assert writers.label("a", r"\x61") == "a"
    assert writers.visible("a\n\x1b") == r"a\n\x1b"


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="got 'xls'"):
        writers.write(frame(), "xls")


# ------------------------------------------------------------------------------- the original's layouts

ALPHABET, SCALE = "abcdef", [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
PARTNER = [1, 0, 3, 2, 5, 4]  # a ↔ b, c ↔ d, e ↔ f


@cache
def planted() -> cs.Model:
    """Six letters on six axes: the query of a letter looks for its partner, its value writes the one after.

    W_Q = 3 × the pairing and W_K = I, so the nearest key of a is b; W_V = 5 × a shift of one and W_O = I, so
    the value of a writes b, of b writes c, … In block 1 W_Q and W_V are diagonal with different sizes.
    """
    cfg = cs.TransformerConfig(
        n_layers=2, d_model=6, n_heads=1, d_ff=0, n_ctx=4, vocab_size=6, positions="none", norm_eps=1e-9
    )
    model = cs.load(cfg, dtype="float64")
    one, pair = torch.eye(6).double(), torch.eye(6).double()[PARTNER]
    sizes = torch.diag(torch.tensor(SCALE).double())
    with torch.no_grad():
        values: dict[str, Any] = {"E": 10 * one, "U": one}
        for i, (Q, shift) in enumerate(
            [(3 * pair, 5 * one.roll(1, 1)), (sizes @ pair, sizes @ one.roll(1, 1))]
        ):
            values |= {f"L{i}.W_Q": Q, f"L{i}.W_K": one, f"L{i}.W_V": shift, f"L{i}.W_O": one}
            values |= {f"L{i}.b_Q": one[2], f"L{i}.b_K": one[4]}
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    return zoo_model(model.module, name="planted", tokenizer=CharTokenizer(ALPHABET))  # pyright: ignore


def test_logs_of_keys_byte_for_byte():
    found = [
        probe_keys(planted(), layer, ["a", "d"], k=1, how="raw", **traveling_words.KEYS) for layer in (0, 1)
    ]
    block = "Query: a\nKeys:\n\tHead 0: ['b']\n\nQuery: d\nKeys:\n\tHead 0: ['c']\n\n"
    assert traveling_words.keys_text(found) == f"=== block 0 ===\n{block}=== block 1 ===\n{block}"


def test_logs_of_values_byte_for_byte():
    """|n(e)| = √6, five times that is 12.2, cut to 12; e = 10 stays smaller in the logits than 12.2."""
    found = probe_values(planted(), 0, ["a", "f"], k=1, how="raw", **traveling_words.VALUES)
    found = traveling_words.whole_lengths(found)
    lines = [
        "=== block 0 ===",
        "Key: a",
        "Values:",
        "\tHead 0 [12.0000]: ['b']",
        "\tLayer Sum [12.0000]: ['b']",
        "",
        "Key: f",
        "Values:",
        "\tHead 0 [12.0000]: ['a']",
        "\tLayer Sum [12.0000]: ['a']",
        "",
        "",
    ]
    assert traveling_words.values_text([found]) == "\n".join(lines)


def test_logs_of_singular_vectors_byte_for_byte():
    found = decode_heads(planted(), 1, k=1, num=3, **traveling_words.DIRECTIONS)
    size = [s / 6**0.5 for s in SCALE[:3]]
    qk = ["", "=== Top singular values for block 1 - head 0 ===", "Left:"]
    qk += [f"[{i}] ['{letter}'] [{s:.2f}]" for i, (letter, s) in enumerate(zip("abc", size, strict=True))]
    qk += ["Right:"]
    qk += [f"[{i}] ['{letter}'] [{s:.2f}]" for i, (letter, s) in enumerate(zip("bad", size, strict=True))]
    assert traveling_words.svd_text([found], "qk") == "\n".join([*qk, ""])
    vo = ["", "=== Top singular values for block 1 - head 0 ===", "Left:"]
    vo += [
        f"[{i}] ['{letter}'] [{s:.2f}]" for i, (letter, s) in enumerate(zip("abc", SCALE[:3], strict=True))
    ]
    vo += ["Right:"]
    vo += [
        f"[{i}] ['{letter}'] [{s:.2f}]" for i, (letter, s) in enumerate(zip("bcd", SCALE[:3], strict=True))
    ]
    assert traveling_words.svd_text([found], "vo") == "\n".join([*vo, ""])


def test_latex_of_singular_vectors_has_the_old_columns_and_labels_of_its_own():
    found = [decode_heads(planted(), layer, k=1, num=2, **traveling_words.DIRECTIONS) for layer in (0, 1)]
    text = "\n".join(traveling_words.svd_latex(layer, name) for layer in found for name in ("qk", "vo"))
    labels = re.findall(r"\\label\{([^}]*)\}", text)
    assert len(labels) == len(set(labels)) == 4
    assert r"Rank & Top-3 Left Words & Top-3 Right Words \\" in text
    assert "Left and Right Singular Vectors at Layer 1 - Head 0" in text
    assert "\n0 & a & b \\\\\n" in traveling_words.svd_latex(found[1], "qk")
    assert _balanced(text)


def test_logs_of_biases():
    found = decode_heads(planted(), 0, k=1, **traveling_words.DIRECTIONS)
    text = traveling_words.bias_text([found])
    avoided = [found.query_bias.text[0][1], found.key_bias.text[0][1]]  # pyright: ignore
    lines = [
        "Block 0 - Head: 0",
        "[+] Query: ['f']",
        "[+] Key: ['c']",
    ]  # the query's bias W_Q b_K, e's partner
    lines += [f"[-] Query: {avoided[0]}", f"[-] Key: {avoided[1]}", "", ""]
    assert text == "\n".join(lines)
    with pytest.raises(UsageError, match="query_bias=True"):
        traveling_words.bias_text([decode_heads(planted(), 0, k=1)])


def test_text_of_the_embedding_tables():
    scores = token_scores(planted(), **traveling_words.SCORES)
    text = traveling_words.embedding_text(
        distances(planted(), **traveling_words.DISTANCES), extremes(scores, k=1)
    )
    lines = text.splitlines()
    assert lines[0] == "Avg. Norm: 10.000"
    assert lines[1].split() == [
        "setting",
        "mean_l2_distance",
        "l2_std_dev",
        "mean_cosine_distance",
        "cosine_std_dev",
    ]
    assert lines[2].split()[:2] == ["0", "Original"]
    assert "10.000" in text
    assert r"\x61" in text


def test_an_unknown_circuit_is_refused():
    with pytest.raises(UsageError, match="qk or vo"):
        traveling_words.svd_text([decode_heads(planted(), 0, k=1, **traveling_words.DIRECTIONS)], "ov")
