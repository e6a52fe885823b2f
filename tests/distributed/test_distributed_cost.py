"""What the cluster page predicts is what the cost model says."""

from pathlib import Path

from curvescope.distributed import cost

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "cluster.md"


def test_the_page_has_the_table():
    assert cost.table() in PAGE.read_text(encoding="utf-8")


def test_copies_of_one_trillion():
    decoder = cost.MODELS["1 T"]
    assert f"{cost.LAYER_COPIES * decoder.layer * 4 / 1e9:.0f}" == "126"
    assert f"{cost.OUTSIDE_COPIES * decoder.outside * 4 / 1e9:.0f}" == "105"
