"""The heat map against the published numbers, the closed form of attention, and its own symmetry."""

import numpy as np
import pytest
import torch

from curvescope.closed_form.network.from_model import attention_curvature
from curvescope.core.errors import UsageError
from curvescope.operators import Hessian
from curvescope.papers.ormaniec2025 import heatmap
from curvescope.papers.ormaniec2025.small_model import heatmap_data, small_problem

COLUMNS = ["row", "col", "rows", "cols", "frobenius", "mean_abs", "median_abs", "max_abs"]


@pytest.fixture(scope="module")
def attention():
    return heatmap.run(heatmap.Config(blocks=("L0.W_[QKVO]",)))


def test_attention_part_is_the_published_one(attention):
    claims = {claim.claim: claim for claim in attention.claims()}
    assert claims["loss"].measured == "2.48540626"
    assert claims["‖H‖_F of L0.W_Q, L0.W_Q"].measured == "2.647e-04"
    assert claims["‖H‖_F of L0.W_V, L0.W_V"].measured == "2.549e-02"
    assert claims["‖H‖_F of L0.W_Q, L0.W_V"].measured == "9.272e-03"
    assert {claim.verdict for claim in claims.values()} == {"agrees"}
    assert len(claims) == 5
    assert {claim.source for claim in claims.values()} == {"authors' code", "figure"}


@pytest.mark.slow
def test_attention_part_is_the_closed_form(attention):
    problem = small_problem("softmax", heatmap_data())
    exact = attention_curvature(problem.model, problem.batches, 0)
    for one, two in (("Q", "Q"), ("Q", "V"), ("V", "V"), ("V", "O")):
        norm = float(exact.to_dense((one, two)).norm())
        assert attention.pair(f"L0.W_{one}", f"L0.W_{two}") == pytest.approx(norm, rel=1e-9)
    H = exact.to_dense(("Q", "K")).reshape(256, 256).numpy()
    found = attention.attention[:256, 256:512]
    assert found == pytest.approx(H, rel=1e-6, abs=1e-12)
    assert np.array_equal(attention.attention, attention.attention.T)


def test_table_is_the_upper_triangle(attention):
    frame = attention.tables()["heatmap"]
    names = ["L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O"]
    assert list(frame.columns) == COLUMNS
    assert frame[["row", "col"]].to_numpy().tolist() == [
        [a, b] for i, a in enumerate(names) for b in names[i:]
    ]
    block = np.abs(attention.attention[:256, 512:768].astype(float))
    (row,) = frame[(frame["row"] == "L0.W_Q") & (frame["col"] == "L0.W_V")].itertuples()
    assert (row.rows, row.cols) == (256, 256)
    assert row.frobenius == pytest.approx(np.linalg.norm(block), rel=1e-6)
    assert row.mean_abs == pytest.approx(block.mean(), rel=1e-6)
    assert row.median_abs == pytest.approx(np.median(block), rel=1e-6)
    assert row.max_abs == pytest.approx(block.max(), rel=1e-6)


def test_pixels_are_means_of_logarithms_inside_a_block(attention):
    shown = np.log10(np.abs(attention.attention.astype(float)) + 1e-6)
    want = shown[:4, 512:516].mean()
    assert attention.picture[0, 128] == pytest.approx(want, rel=1e-5)
    assert attention.picture.shape == (256, 256)
    assert np.array_equal(attention.picture, attention.picture.T)


def test_small_blocks_against_a_dense_hessian():
    """Biases and the ends of the network, rows in the published order."""
    result = heatmap.run(heatmap.Config(blocks=("L0.b_?", "b_U", "U")))
    assert result.names == ["L0.b_1", "L0.b_2", "U", "b_U"]
    H = Hessian(small_problem("softmax", heatmap_data()), *result.names).to_dense()
    torch.testing.assert_close(torch.tensor(result.norm).double(), H.norm())
    assert result.frobenius[1, 2] == pytest.approx(float(H[64:80, 80:272].norm()), rel=1e-12)
    assert result.attention.size == 0
    assert [claim.claim for claim in result.claims()] == ["loss"]
    assert set(result.figures()) == {"heatmap", "heatmap_blocks"}


def test_a_pattern_without_blocks_is_refused():
    with pytest.raises(UsageError, match=r"^blocks: .*'L1\.\*'"):
        heatmap.Config(blocks=("L1.*",))


@pytest.mark.slow
def test_whole_heat_map_is_the_published_one():
    result = heatmap.run(heatmap.Config())
    claims = {claim.claim: claim for claim in result.claims()}
    assert set(heatmap.PUBLISHED) < set(claims)
    assert {claim.verdict for claim in claims.values()} == {"agrees"}
    assert sum(result.sizes) == 3836
    frame = result.tables()["heatmap"]
    assert len(frame) == 78
    assert list(dict.fromkeys(frame["row"])) == list(heatmap.ORDER)
