"""Findings come first on a page: a level in word, symbol and color, a number, links to the evidence."""

import pytest

from curvescope.report.pieces.cards import RESTS_ON, findings
from curvescope.report.sections import SECTIONS
from curvescope.studies import run_study
from curvescope.studies.diagnose.checks import CHECKS
from curvescope.studies.diagnose.study import Diagnosis
from drawings import unrendered
from synthetic_runs import Page, made, make_run

EFFORT = {
    "num_probes": 1, "num_steps": 4, "num_shared": 2, "block_steps": 0, "num_parts": 1, "part_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory, few_sequences):
    root = tmp_path_factory.mktemp("diagnosis")
    config = root / "m.toml"
    config.write_text(
        "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n", encoding="utf-8"
    )
    settings = {"model": str(config), "data": "task:addition", "batch_size": 64, "lr": 100.0}
    with unrendered():
        return run_study.run("diagnose", settings | EFFORT, out=root / "runs")


def test_findings_come_first_worst_first_with_links_that_lead_somewhere(diagnosis, tmp_path):
    run, found = diagnosis
    html = made(tmp_path, make_run(tmp_path, model="tiny-gpt"), run)
    page = Page(html)
    assert page.all("section")[0][0]["id"] == "findings"
    items = [(has, text) for has, text in page.all("li") if "finding" in has.get("class", "").split()]
    assert len(items) == len(found.findings) >= 1
    levels = [has["class"].split()[1] for has, _ in items]
    assert levels == sorted(levels, key=["bad", "part", "open"].index)
    assert "✖ fault" in items[0][1]
    assert found.findings[0].number in items[0][1]
    links = [has["href"] for has, _ in page.all("a")]
    assert "#run2-checks-table" in links
    assert 'id="run2-checks-table"' in html
    assert "#spectra" in links


def test_every_check_rests_on_something(diagnosis):
    assert set(RESTS_ON) == set(CHECKS)
    assert {section for _, section in RESTS_ON.values()} - {""} <= set(SECTIONS)
    found = diagnosis[1]
    assert isinstance(found, Diagnosis)
    alone = findings(found, anchor="a", tables=[], there=[])
    assert all(one.links == [] for one in alone)
