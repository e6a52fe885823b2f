"""The histograms against the published bars and norms."""

import numpy as np
import pytest

from curvescope.core.result import Result
from curvescope.data.tasks import task_data
from curvescope.papers.common import published_table
from curvescope.papers.ormaniec2025 import histograms

COLUMNS = ["attention", "block", "bin", "edge_lo", "edge_hi", "count"]


PARTS = {("softmax", "L0.W_Q"): ("H", "H_o", "H_f"), ("linear", "L0.W_Q"): ("H", "H_f")}  # others: H


@pytest.fixture(scope="module")
def result():
    """The parts that are published or known, from the same sums in one batch, which changes no product."""
    with pytest.MonkeyPatch.context() as patch:
        batches = task_data("addition", draw_size=8, sum_to_nine="coin")
        patch.setattr(histograms, "histogram_data", lambda: batches)
        measured = [
            histograms.measure(attention, block, parts=PARTS.get((attention, block), ("H",)))
            for attention in histograms.KINDS
            for block in histograms.BLOCKS
        ]
    return histograms.Histograms(measured)


def test_bars_are_the_published_ones(result):
    """78 bars; one count may differ by one, an entry that float32 put on the other side of an edge."""
    frame = result.tables()["histograms"]
    off = 0
    for row in published_table("ormaniec2025", "histograms"):
        ours = frame[(frame["attention"] == row["attention"]) & (frame["block"] == row["block"])]
        (bar,) = ours[ours["bin"] == int(row["bin"])].itertuples()
        assert bar.edge_lo == pytest.approx(float(row["edge_lo"]), rel=1e-5)
        assert bar.edge_hi == pytest.approx(float(row["edge_hi"]), rel=1e-5)
        off += abs(bar.count - int(row["count"]))
    assert [len(histograms.published(block)) for block in ("L0.W_Q", "L0.W_V")] == [29, 49]
    assert off <= 1


def test_norms_are_the_published_ones(result):
    for (attention, block, part), value in histograms.PUBLISHED_NORMS.items():
        assert result.of(attention, block).norms[part] == pytest.approx(value, rel=1e-5)


def test_every_claim_agrees(result):
    assert {claim.verdict for claim in result.claims()} == {"agrees"}
    assert len(result.claims()) == 20


def test_table_has_every_entry_once(result):
    frame = result.tables()["histograms"]
    assert list(frame.columns) == COLUMNS
    assert frame[["attention", "block"]].drop_duplicates().to_numpy().tolist() == [
        ["softmax", "L0.W_V"],
        ["softmax", "L0.W_Q"],
        ["linear", "L0.W_V"],
        ["linear", "L0.W_Q"],
    ]
    for bars in result.bars:
        assert bars.counts.sum() + (bars.entries < bars.edges[0]).sum() == 256**2
        assert bars.edges[-1] == bars.entries.max()


def test_scores_of_linear_attention_have_no_functional_part(result):
    assert result.of("linear", "L0.W_Q").norms["H_f"] == 0.0
    assert result.median_ratio("softmax") == pytest.approx(31.245, abs=0.01)
    assert 1 / 2 < result.median_ratio("linear") < 2


@pytest.mark.slow
def test_parts_sum_to_the_hessian_and_values_have_no_functional_part(result):
    whole = histograms.run(histograms.Config())
    values = whole.of("softmax", "L0.W_V").norms
    assert values["H_f"] == 0.0
    assert values["H"] == pytest.approx(values["H_o"], rel=1e-12)
    for one, other in zip(whole.bars, result.bars, strict=True):
        np.testing.assert_allclose(one.entries, other.entries, rtol=1e-6, atol=1e-15)


def test_bars_of_known_entries():
    edges = histograms.bar_edges(np.array([1e-12, 1e-6, 1e-2]), 4)
    assert edges == pytest.approx([1e-8, 1e-6, 1e-4, 1e-2])


def test_a_differing_bar_is_told(result):
    from dataclasses import replace

    bars = [replace(b, counts=b.counts + 2) if b.block == "L0.W_Q" else b for b in result.bars]
    verdicts = {c.claim: c.verdict for c in replace(result, bars=bars).claims()}
    assert verdicts["bars of L0.W_Q, softmax"] == "differs"
    assert verdicts["bars of L0.W_V, softmax"] == "agrees"


def test_it_is_saved_and_resumed(result, tmp_path):
    again = Result.load(result.save(tmp_path))
    assert again.claims() == result.claims()
    state = {f"{b.attention}.{b.block}": b for b in result.bars}
    resumed = histograms.run(histograms.Config(), state=state)  # all pieces are there: nothing is computed
    assert resumed.bars[0] is result.bars[0]
