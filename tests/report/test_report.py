"""The page: self-contained, complete, and without the model."""

import re

import pytest
import torch

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.models.load import load
from curvescope.report import write_page
from curvescope.report.page_elements import heading
from curvescope.studies import run_study
from drawings import unrendered


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, few_sequences):
    root = tmp_path_factory.mktemp("report")
    config = root / "m.toml"
    config.write_text(
        "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n", encoding="utf-8"
    )
    settings = {
        "model": str(config),
        "data": "task:addition",
        "batch_size": 64,
        "num_steps": 10,
        "num_probes": 2,
        "num_eigenvalues": 1,
        "num_trace_probes": 2,
        "num_map_probes": 2,
        "max_products": 8,
    }
    with unrendered():
        return run_study.run("spectrum", settings, out=root / "runs")[0]


def test_the_page_is_self_contained(run_folder, tmp_path):
    page = write_page([run_folder, run_folder], tmp_path / "page.html")
    html = page.read_text(encoding="utf-8")
    assert html.count("<img ") == 2 * len(list((run_folder / "figures").glob("*.svg")))
    marked = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)  # plotly's own code names addresses
    assert not re.search(r"""(src|href)=["'](https?:|//|/)""", marked)
    assert "λ_max" in html
    assert "num_steps = 10" in html
    assert not list(tmp_path.glob("*.partial"))


def test_the_report_makes_no_module(run_folder, tmp_path, monkeypatch):
    def made(*_, **__):
        raise AssertionError("a module is made")

    monkeypatch.setattr(torch.nn.Module, "__init__", made)
    assert write_page([run_folder], tmp_path / "p.html").exists()


def test_a_page_is_the_same_when_its_model_is_gone(run_folder, tmp_path):
    model = run_folder.parents[2] / "m.toml"
    before = write_page([run_folder], tmp_path / "before.html").read_text(encoding="utf-8")
    model.rename(tmp_path / "elsewhere.toml")
    try:
        assert write_page([run_folder], tmp_path / "after.html").read_text(encoding="utf-8") == before
        with pytest.raises(CurvescopeError):
            load(str(model))
    finally:
        (tmp_path / "elsewhere.toml").rename(model)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at least one"):
        write_page([], tmp_path / "p.html")
    with pytest.raises(CurvescopeError, match="run folder"):
        write_page([tmp_path], tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ggn", "GGN"),
        ("qk_directions", "QK directions"),
        ("most_VO", "Most VO"),
        ("block_maps", "Block maps"),
    ],
)
def test_headings_are_spelled_as_people_do(name, words):
    assert heading(name) == words
