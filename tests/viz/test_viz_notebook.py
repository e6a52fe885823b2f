"""What notebooks show: small, escaped, never an error, and nothing computed."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from curvescope.core.blocks import ParamSpace, parameter_block
from curvescope.core.operator import FunctionOperator, Identity
from curvescope.core.result import Result
from curvescope.viz import notebook

BAD = "<script>alert('x')</script>&\""


@dataclass(frozen=True)
class Plain(Result):
    value: float
    stderr: float
    label: str
    array: np.ndarray


@dataclass(frozen=True)
class Drawn(Result):
    values: np.ndarray

    def to_frame(self):
        return pd.DataFrame({"<i>": self.values, "name": BAD})

    def plot(self, ax=None):
        import matplotlib.pyplot as plt

        ax = plt.subplots()[1]
        ax.plot(self.values)
        return ax


@dataclass(frozen=True)
class Broken(Result):
    values: np.ndarray

    def to_frame(self):
        raise ValueError("no table")

    def plot(self, ax=None):
        raise RuntimeError("no figure")


def test_a_result_without_table_shows_its_fields_and_escapes_them():
    shown = Plain(21834.2, 1012.0, BAD, np.zeros((3, 4)))._repr_html_()
    assert "21,800 ± 1,000" in shown
    assert "array of (3, 4) float64" in shown
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown


def test_a_result_with_table_and_figure_shows_both_and_leaves_no_figure_open():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    shown = Drawn(np.arange(40.0))._repr_html_()
    assert plt.get_fignums() == before
    assert 'src="data:image/png;base64,' in shown
    assert "20 more rows" in shown
    assert "&lt;i&gt;" in shown
    assert "<script" not in shown
    assert len(shown) < notebook.LIMIT


def test_a_figure_of_many_pixels_is_drawn_once_and_made_smaller(monkeypatch):
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *given, **options: drawn.append(save(*given, **options)))
    monkeypatch.setattr(notebook, "PICTURE", 8_000)
    shown = Drawn(np.random.default_rng(0).normal(size=2_000))._repr_html_()
    assert "data:image/png" in shown
    assert len(shown) < 20_000
    assert len(drawn) == 1


def test_a_thin_line_keeps_its_color():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6))
    for ax in axes.flat:
        for slope in range(40):
            ax.plot([0, 1], [slope, slope + 9], color="gray", alpha=slope / 40, linewidth=0.5)
    axes[0, 0].plot([0, 1], [0, 50], color="#7570b3", linewidth=1)
    shown = notebook.picture(lambda: figure)
    address = re.search(r"data:image/png;base64,([^\"]+)", shown)
    assert address
    with Image.open(BytesIO(base64.b64decode(address[1]))) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    assert np.abs(pixels - [0x75, 0x70, 0xB3]).max(axis=1).min() < 12


def test_a_result_that_can_show_nothing_falls_back_to_its_repr():
    result = Broken(np.zeros(2))
    shown = notebook.box(result, "Broken", result.to_frame, result.plot)
    assert "<pre>Broken(values=[0, 0])</pre>" in shown
    assert "Broken" in result._repr_html_()


def test_long_words_and_many_columns_are_cut():
    shown = notebook.table([f"c{i}" for i in range(20)], [["x" * 10**6] * 20] * 3)
    assert len(shown) < 10_000
    assert "12 more columns" in shown


def test_parts_beyond_the_limit_are_left_out():
    shown = notebook.box(None, "name", lambda: "a" * 90_000, lambda: "b" * 90_000, lambda: "c")
    assert "b" * 10 not in shown
    assert shown.count("c</div>") == 1
    assert len(shown) < notebook.LIMIT


def test_the_bar_has_the_shares_of_the_whole():
    shown = notebook.bar({"W_Q": 3, BAD: 1})
    assert "W_Q 75.0%" in shown
    assert 'width="450.0"' in shown
    assert "<script" not in shown
    assert notebook.bar({}) == notebook.bar({"nothing": 0}) == ""


def test_many_shares_end_in_others_and_sum_to_the_whole():
    shown = notebook.bar({f"b{i}": 1.0 for i in range(16)})
    assert shown.count("<rect") == len(notebook.COLORS)
    assert f"others {9 / 16:.1%}" in shown


def _refuse(V):
    raise AssertionError("a notebook takes no product")


def test_an_operator_shows_its_parts_without_a_product():
    A = FunctionOperator(_refuse, (6, 6), symmetric=True, dtype=torch.float64)
    shown = (2 * A + Identity(6, dtype=torch.float64))._repr_html_()
    assert "Sum(6 × 6, float64, cpu)" in shown
    assert "Scaled(6 × 6" in shown
    assert "Identity(6 × 6" in shown


def test_an_operator_over_blocks_shows_them_by_role():
    A = FunctionOperator(_refuse, (24, 24), symmetric=True, dtype=torch.float64)
    blocks = (
        parameter_block("L0.W_Q", "a", (2, 3)),
        parameter_block("L1.W_Q", "b", (2, 3)),
        parameter_block("E", "e", (4, 3)),
    )
    space = ParamSpace(blocks, {"a": (2, 3), "b": (2, 3), "e": (4, 3)}, torch.float64, torch.device("cpu"))
    A.space = space  # pyright: ignore
    shown = A._repr_html_()
    assert "L*.W_Q" in shown
    assert ">E</td>" in shown
    assert "2 × 3" in shown
    assert "50.0%" in shown


@pytest.mark.parametrize("value", [True, None, float("nan"), np.float32(2), "a\nb"])
def test_values_of_any_kind_have_a_cell(value):
    assert "<td" in notebook.table(["x"], [[value]])
