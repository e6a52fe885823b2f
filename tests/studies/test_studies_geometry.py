"""The studies of geometry through the public path: bundled, Hugging Face, encoders; repeatable; bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import curvescope as cs
from curvescope.cli import main
from curvescope.core.errors import MissingExtra, UsageError
from curvescope.core.result import Result
from curvescope.report import write_page
from curvescope.runs.disk.atomic_files import write_figures, write_tables
from curvescope.studies import find, run_study
from curvescope.studies import trajectory as trajectory_study
from curvescope.studies.trajectory import view
from drawings import sketched, unrendered
from saved_models import save_family
from scenes import checked
from selection import pairs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
QUICK: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "probes": {"layers": [0, -1], "num_random": 20},
    "heads": {"layers": [0, 1], "num_samples": 5},
    "trajectory": {"tokens": 128, "seq_len": 32, "prompt": "To kill two birds with one stone"},
    "layernorm": {"tokens": 128, "seq_len": 32, "layers": [0], "num_keys": 30},
}
EXPECTED = {
    "embeddings": ({"distances", "extremes", "frequency"}, {"distances", "scores", "reach"}),
    "probes": ({"keys", "values"}, {"key_strength", "value_strength"}),
    "heads": ({"heads", "qk", "vo", "key_bias", "composition"}, {"spectra", "scores", "composition"}),
    "trajectory": (
        {"target", "motion", "change", "shares", "tokens"},
        {"target", "motion", "prompt", "grid", "path"},
    ),
    "layernorm": ({"norms", "keys"}, {"picture", "axes", "states", "selectable"}),
}


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A folder of transformers for a family, with the bundled tokenizer."""
    return cache(lambda family: save_family(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study on the bundled model, run once: run folder and result."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def run_once(study: str) -> tuple[Path, Any]:
        with unrendered():
            return run_study.run(study, QUICK[study], out=root)

    return run_once


def run(study: str, **settings: Any) -> Any:
    """The result alone, without a folder."""
    module = find(study)
    return module.run(module.Config.from_dict({**QUICK[study], **settings}))


@pytest.mark.parametrize("study", QUICK)
def test_a_study_on_the_bundled_model_is_complete(study, done):
    path, result = done(study)
    tables, drawn = EXPECTED[study]
    assert set(result.tables()) == tables
    assert {p.stem for p in (path / "figures").glob("*.svg")} == drawn
    captions = result.captions()
    assert tables | drawn <= set(captions)
    assert all(len(row) == 3 for row in result.summary())
    assert {f"{name}.csv" for name in tables} <= {p.name for p in (path / "tables").iterdir()}
    assert all(not frame.empty for frame in result.tables().values())
    again = Result.load(path)
    for name, frame in result.tables().items():
        assert frame.equals(again.tables()[name])
    tex = (path / "tables" / "tables.tex").read_text(encoding="utf-8")
    assert tex.isascii()
    assert json.loads((path / "tables" / f"{min(tables)}.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(done, tmp_path):
    path, result = done("trajectory")
    again = run("trajectory")
    again.save(tmp_path)
    with np.load(path / "arrays.npz") as one, np.load(tmp_path / "arrays.npz") as two:
        assert one.files == two.files
        for name in one.files:
            np.testing.assert_array_equal(one[name], two[name])
    drawn = []
    for found in (result, again):
        with sketched(), plt.rc_context({"svg.hashsalt": "curvescope", "svg.fonttype": "path"}):
            view._grid(found).savefig(tmp_path / "grid.svg", metadata={"Date": None})
        drawn.append((tmp_path / "grid.svg").read_bytes())
    assert drawn[0] == drawn[1]


@pytest.mark.slow
@pytest.mark.parametrize("study", QUICK)
def test_every_figure_can_be_rendered(study, done, tmp_path):
    write_figures(done(study)[1], tmp_path)
    assert {p.stem for p in tmp_path.glob("*.svg")} == EXPECTED[study][1]


@pytest.mark.parametrize(("study", "family"), pairs(list(QUICK), ["gpt2", "llama", "bert"]))
def test_a_study_on_a_model_of_transformers(study, family, model_folder):
    result = run(study, model=model_folder(family))
    assert set(result.tables()) <= EXPECTED[study][0]
    words = " ".join(note for _, _, note in result.summary())
    if family == "bert":
        assert set(result.figures()) <= EXPECTED[study][1]
    if family == "bert" and study in ("heads", "layernorm"):
        assert "not foldable: post-norm" in words
    if family == "bert" and study == "trajectory":
        assert "no head over the vocabulary" in words
        assert "entropy" not in result.means.curves


def test_a_model_without_biases_says_so_and_lists_no_preferred_tokens(model_folder):
    found = run("heads", model=model_folder("llama"))
    assert ("query bias", "none") in [(name, value) for name, value, _ in found.summary()]
    tables = found.tables()
    assert "key_bias" not in tables
    assert not {"|k₀|", "bias share"} & set(tables["heads"].columns)
    assert "bias" not in found.captions()["scores"]
    assert len(found.figures()["scores"].axes) == 3 * 2  # each with its color bar
    scores = checked(found)["scores"]["variants"]
    assert list(scores) == ["QK rank", "VO rank", "copying"]
    copying = [layer.copying for layer in found.layers]
    np.testing.assert_allclose(scores["copying"]["data"][0]["z"], copying, rtol=1e-5)


def test_rounding_is_no_headline(done):
    found = done("embeddings")[1]
    assert "1 − cos(e, n(e))" in dict(line[:2] for line in found.summary())
    distances = dataclasses.replace(found.distances, cosine_mean=np.full(4, 8e-18))
    words = dict(line[:2] for line in dataclasses.replace(found, distances=distances).summary())
    assert words["direction"] == "kept"
    assert "1 − cos(e, n(e))" not in words


def test_the_page_has_the_paths_to_turn_once_and_needs_no_network(done, tmp_path):
    pytest.importorskip("plotly")
    paths = [done(study)[0] for study in ("heads", "trajectory")]
    page = write_page(paths, tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<div class="scene" ') == 2
    scenes = re.findall(r'<script type="application/json">(.*?)</script>', page)
    figure = json.loads(scenes[-1])  # behind the heads' scores
    result = done("trajectory")[1]
    assert len(figure["variants"]["all"]["data"]) == 1 + len(result.path.tokens)
    own = result.states_xyz[result.token]
    np.testing.assert_allclose(figure["data"][1]["x"], own[:, 0], atol=1e-5)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"'](https?:)?//", page)


def test_a_page_without_scenes_has_no_plotly(done, tmp_path):
    page = write_page([done("embeddings")[0]], tmp_path / "page.html")
    assert page.stat().st_size < 4_000_000
    assert "Plotly" not in page.read_text(encoding="utf-8")


def test_legacy_mode_has_the_originals_files(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("self\nname\n\nvalue\n", encoding="utf-8")
    assert run("embeddings", legacy=True).files()["word_embeddings.txt"]
    found = run("probes", legacy=True, words=str(words)).files()
    text = found["common_noun_logs_qk.txt"]
    assert text.count("Query: self\n") == 2  # once per layer
    assert text.count("=== block ") == 2
    assert found["common_noun_logs_vo.txt"].count("\tLayer Sum [") == 6
    old = run("heads", legacy=True)
    assert {"svd_qk_logs.txt", "svd_vo_latex_table_layer_0.txt", "key_query_bias_logs.txt"} <= set(
        old.files()
    )
    assert old.layers[0].qk.rank.max() == 19  # twenty pairs, one side each
    assert old.layers[0].qk.left.ids.shape[1] == 1


def test_texts_are_written_and_not_added_to(tmp_path):
    class Text:
        tables = staticmethod(dict)
        files = staticmethod(lambda: {"a.txt": "line\n"})

    for _ in range(2):
        write_tables(Text(), tmp_path)
    assert (tmp_path / "a.txt").read_bytes() == b"line\n"


def test_three_pairs_and_both_sides_by_default(done):
    result = done("heads")[1]
    assert result.layers[0].qk.rank.max() == 2
    assert result.layers[0].qk.left.ids.shape[1] == 2


def test_the_choice_of_projection_changes_the_picture_only(done):
    sphere, plain = run("trajectory", projection="sphere"), done("trajectory")[1]
    assert not np.allclose(sphere.picture.coordinates, plain.picture.coordinates)
    np.testing.assert_array_equal(sphere.path.values["angle_target"], plain.path.values["angle_target"])


def test_the_original_picture_is_fitted_to_raw_embeddings(monkeypatch, done):
    """With a projection that keeps three axes, words are rows of E, states are behind the final norm."""
    from curvescope.geometry import norm_of
    from curvescope.geometry.projection import Projection
    from curvescope.geometry.stream import stream

    def keep(fitted, groups, **options):
        assert fitted.shape == (512, 96)
        return Projection(np.concatenate([g[:, :3] for g in groups]), "umap apart", None, options["seed"])

    monkeypatch.setattr("curvescope.studies.trajectory.study.need_umap", lambda: None)
    monkeypatch.setattr("curvescope.studies.trajectory.study.project_apart", keep)
    found, plain = run("trajectory", legacy=True), done("trajectory")[1]
    model, ids = cs.load("tiny-gpt"), torch.from_numpy(found.path.ids)
    E = dict(model.module.named_parameters())["E"].detach()
    np.testing.assert_allclose(found.words_xyz, E[ids, :3].numpy(), rtol=1e-6)
    states = norm_of(model, "ln_f")(stream(model, ids[None]).points[0].double())
    np.testing.assert_allclose(found.states_xyz, states[..., :3].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.path.values["angle_target"], plain.path.values["angle_target"])
    assert "all points at once" in plain.captions()["grid"]
    assert "all points at once" not in found.captions()["grid"]


def test_the_original_picture_needs_umap(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingExtra, match=r"umap-learn, which is not installed"):
        run("trajectory", legacy=True)


def test_pairs_of_heads_are_weighed_by_data_when_there_is_some(done):
    assert "share on data" not in done("heads")[1].tables()["qk"]
    result = run("heads", data="sample", tokens=256, layers=[1])
    assert result.energies[0].num_tokens == 256
    for name in ("qk", "vo"):
        share = result.energies[0].share(name)
        np.testing.assert_allclose(np.nansum(share, axis=1), 1)
        column = result.tables()[name]["share on data"].to_numpy()
        np.testing.assert_allclose(column[::2], share[:, :3].reshape(-1))  # three pairs, two sides each
        assert "sample" in result.captions()[name]


def test_representation_by_the_corpus_is_said():
    result = run("probes", representation="mean", tokens=2000)
    assert "mean state before block" in " ".join(result.keys[0].notes)


def test_a_model_without_a_tokenizer_is_followed_on_a_task(tmp_path):
    config = tmp_path / "sorts.toml"
    config.write_text(
        "n_layers = 1\nd_model = 8\nn_heads = 2\nvocab_size = 3\nn_ctx = 11\n", encoding="utf-8"
    )
    cfg = trajectory_study.Config.from_dict({"model": str(config), "data": "task:sorting"})
    result = trajectory_study.run(cfg)
    assert len(result.path.tokens) == 11
    assert result.path.tokens[0].startswith("[")


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "one-token prompt": ("trajectory", {"prompt": "a"}, "at least 2 tokens, got 1"),
    "empty prompt": ("trajectory", {"prompt": ""}, "at least 2 tokens, got 0"),
    "token beyond the prompt": ("trajectory", {"token": 99}, "one of the prompt's"),
    "unknown projection": ("trajectory", {"projection": "tsne"}, "projection: expected one of"),
    "unknown layer": ("heads", {"layers": [4]}, "layers from 0 to 3 of 'tiny-gpt', got 4"),
    "layer that is no number": ("probes", {"layers": "last"}, "layers: expected int"),
    "missing words file": ("probes", {"words": "no/such/file.txt"}, "could not read 'no/such/file.txt'"),
    "unknown norm": ("layernorm", {"norms": ["L9.ln1"]}, "norms: expected some of"),
    "unknown role": ("embeddings", {"norm": "ln_x"}, "role of a norm"),
    "no tokens listed": ("embeddings", {"k": 0}, "k: expected at least 1"),
    "unknown setting": ("heads", {"layer": 1}, "unknown setting 'layer'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_sentence_and_leave_no_folder(case, tmp_path):
    study, settings, words = BAD[case]
    with pytest.raises(UsageError, match=words):
        run_study.run(study, settings, out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("study", QUICK)
def test_models_without_a_vocabulary_are_refused(study, tmp_path):
    config = tmp_path / "real.toml"
    config.write_text('inputs = "continuous"\noutputs = "regression"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="token vocabulary"):
        run_study.run(study, {**QUICK[study], "model": str(config)}, out=tmp_path / "runs")


def test_words_that_are_no_single_tokens_are_refused(tmp_path):
    words = tmp_path / "w.txt"
    words.write_text("zzzzqqqq\n", encoding="utf-8")
    with pytest.raises(UsageError, match="single tokens"):
        run_study.run("probes", {**QUICK["probes"], "words": str(words)}, out=tmp_path / "runs")
    words.write_text("\n", encoding="utf-8")
    with pytest.raises(UsageError, match="at least one word"):
        run_study.run("probes", {**QUICK["probes"], "words": str(words)}, out=tmp_path / "runs")


@pytest.mark.usefixtures("unrendered")
def test_the_command_line_prints_tables_and_the_folder(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "embeddings", "tiny-gpt", "--set", "k=1", "--out", str(tmp_path), "--tables"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "mean_l2_distance" in out
    assert str(tmp_path) in out


def test_counts_say_which_text(done):
    assert done("embeddings")[1].counts.data == "text:sample"
