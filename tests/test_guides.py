"""docs/guides: their code runs in a loop of one's own, and gives what they say."""

from __future__ import annotations

import pytest

import guides


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("curvescope.monitor.files.write_figures", lambda result, folder: None)


def test_my_run_is_unstable(tmp_path):
    seen = guides.run("guides/unstable.md")
    history = seen["monitor"].history.set_index("step")
    jump = history["loss"].diff().idxmax()
    assert history.loc[jump - 4, "lr_lambda_max"] > history.loc[jump - 4, "threshold"]  # seen before it came
    for calm in (seen["calm"], seen["noisy"]):
        assert (calm.history["lr_lambda_max"] < calm.history["threshold"]).all()
    assert (tmp_path / "runs" / "unstable" / "result.json").exists()


def test_what_learning_rate():
    seen = guides.run("guides/learning_rate.md")
    assert seen["seen"]["ceiling"].min() == pytest.approx(seen["ceiling"], rel=0.05)
    assert seen["seen_adam"]["ceiling"][1:].min() == pytest.approx(seen["ceiling_adam"], rel=0.1)


def test_one_page_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr("curvescope.runs.folder.write_figures", lambda result, folder: None)
    guides.run("guides/report.md")
    assert {page.name for page in tmp_path.glob("*.html")} == {"report.html", "mine.html", "third.html"}


def test_two_models_side_by_side(monkeypatch):
    monkeypatch.setattr("curvescope.runs.folder.write_figures", lambda result, folder: None)
    found = guides.run("guides/compare.md")["found"]
    assert [side.name for side in found.sides] == ["tiny-gpt@initial", "tiny-gpt@final"]


def test_a_page_that_says_something_else_is_noticed():
    guides.compare("step 3  loss 2.50\n", "step 3  loss 2.51\n")
    for other in ("step 3  loss 3.51\n", "step 3  los 2.50\n", "step 3  loss 2.50\nmore\n"):
        with pytest.raises(AssertionError):
            guides.compare("step 3  loss 2.50\n", other)
