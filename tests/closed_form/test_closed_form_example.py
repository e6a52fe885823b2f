"""The example of the documentation: one head of the bundled model, its exact blocks, a picture of them."""

import numpy as np
import pytest
import torch

import curvescope as cs


def example():
    """Five lines; a second or two and about 0.5 GB on a laptop."""
    from curvescope.closed_form.attention.split import block_split
    from curvescope.closed_form.network.from_model import attention_curvature

    model = cs.load("tiny-gpt")
    batch = cs.text_data("sample", model, tokens=16, seq_len=8)
    head = attention_curvature(model, batch, layer=0, head=0)
    split = block_split(head, "QKV")
    axes = split.plot()
    return model, batch, head, split, axes


def test_the_example_runs_and_its_blocks_are_those_of_the_operator():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg", force=True)
    import matplotlib.pyplot as plt

    model, batch, head, split, axes = example()
    assert [ax.get_title("left") for ax in axes] == ["total", "outer", "functional"]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["Q", "K", "V"]
    assert split.total.shape == (72, 72)
    assert np.isfinite(split.total).all()
    assert split.functional[48:, 48:].max() == 0  # F is linear in W_V
    assert split.functional[:48, :48].max() > 0
    images = [ax.get_images()[0] for ax in axes]
    assert np.array_equal(images[1].get_array().filled(0), split.outer)
    assert len({image.norm.vmax for image in images}) == 1
    assert len(axes[0].lines) == 4  # two borders, drawn both ways
    plt.close(axes[0].figure)

    H, source = cs.Hessian(cs.Problem(model, batch)), torch.Generator().manual_seed(0)
    for one, two in (("Q", "Q"), ("Q", "K"), ("K", "V")):
        block = H.block(f"L0.h0.W_{one}", f"L0.h0.W_{two}")
        v = torch.randn(block.shape[1], generator=source)
        expected, found = block @ v, head.matvec((one, two), v.reshape(head.shapes[two])).flatten()
        assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())  # single precision


def test_a_figure_marks_what_was_not_computed():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg", force=True)
    import matplotlib.pyplot as plt

    from curvescope.viz.matrix import block_split

    values = np.array([[1.0, 0.0, np.nan], [0.0, 1e-3, np.nan], [np.nan, np.nan, np.nan]])
    figure, axes = plt.subplots(1, 2)
    found = block_split(axes, ["Q", "K"], [2, 1], {"one": values, "two": 10 * values})
    assert list(found) == list(axes)
    drawn = axes[0].get_images()[0]
    assert drawn.get_array().mask.sum() == 7
    assert drawn.norm.vmax == 10
    assert [line.get_ydata()[0] for line in axes[0].lines if line.get_xdata()[0] == 0] == [1.5]
    plt.close(figure)
    empty = block_split(None, ["Q"], [1], {"nothing": np.zeros((1, 1))})
    assert len(empty) == 1
    plt.close(empty[0].figure)
