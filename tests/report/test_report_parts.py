"""What a section is put together from: openings, figures with switches, methods, cards."""

import json
import shlex
import sys

import numpy as np
import pytest

import curvescope as cs
from cases import transformer
from curvescope.models.description import describe, telling_facts
from curvescope.report import write_page
from curvescope.report.page_elements import BAD, GOOD, OPEN, PART, still, verdict
from curvescope.report.pieces.methods import errors_in, run_command, time_of
from curvescope.report.pieces.pictures import as_json
from curvescope.runs.listing import start_time
from curvescope.studies import find
from synthetic_runs import SCENE, SVG, Page, Synthetic, made, make_run


def test_a_section_opens_with_the_sentence_and_has_cards_and_notes(tmp_path):
    page = Page(made(tmp_path, make_run(tmp_path, model="tiny-gpt")))
    (entry,) = page.all("article", id="run1")
    said = [
        "spectrum of tiny-gpt",
        "Opening words.",
        "spectral densities",
        "21,800 ± 1,000",
        "Note: noted words",
    ]
    places = [entry[1].replace("\xa0", " ").index(words) for words in said]
    assert places == sorted(places)


def test_what_runs_of_other_samples_say_is_told_apart(tmp_path):
    runs = [
        make_run(tmp_path, s, model="m", data="sample", tokens=t) for s, t in (("gap", 64), ("blocks", 128))
    ]
    html = made(tmp_path, *runs)
    assert "different samples. 64 tokens of sample: gap; 128 tokens of sample: blocks." in html
    assert "; on 64 tokens of sample</p>" in html
    assert "different samples" not in made(tmp_path, runs[0])


def test_models_of_one_file_name_are_told_apart(tmp_path):
    models = ("/x/p1/q.toml", "/x/p2/q.toml", "/x/p2/r.toml", "tiny-gpt")
    runs = [make_run(tmp_path, "propagation", model=model) for model in models]
    titles = ["p1/q.toml", "p2/q.toml", "r.toml", "tiny-gpt"]
    html = made(tmp_path, *runs)
    for title in titles:
        assert f"propagation of {title}<" in html
        assert html.count(f"<div><dt>source</dt><dd>{title}</dd></div>") == 1  # on a card of its own
    assert "propagation of q.toml<" not in html


@pytest.mark.parametrize(
    ("data", "terms", "words"),
    [
        ("digits", 2.0, "2 terms of digits"),
        ("/x/a.txt", 49.0, "49 terms of a.txt"),
        ("sample", 128.0, "128 tokens of sample"),
        ("/x/a.txt", None, "a.txt"),
    ],
)
def test_a_sample_is_as_large_as_what_was_measured(tmp_path, data, terms, words):
    runs = [
        make_run(tmp_path, study, model="m", data=data, tokens=128, result=Synthetic(num_terms=count))
        for study, count in (("gap", terms), ("taylor", None))
    ]
    several = make_run(tmp_path, "compare", model="m", data=data, tokens=128, datasets=[data, "b"])
    html = made(tmp_path, several, *runs)
    assert f"; on {words}</p>" in html
    assert "different samples" not in html  # the same settings: the same sample


def test_a_comparison_has_a_section_names_its_sides_and_says_its_command(tmp_path):
    told = {"parameters": 1, "dtype": "float32", "facts": {}, "notes": [], "roles": [], "blocks": []}
    models = [{**told, "model": name, "parameters": size} for name, size in (("a", 1), ("b", 2))]
    settings = {"model": "a", "revision": "early", "models": ["a@early", "b"], "data": "sample", "tokens": 32}
    result = Synthetic(about=["a@early", "b"])
    run = make_run(tmp_path, "compare", result=result, described=models, **settings)
    page = Page(made(tmp_path, run))
    (section,) = page.all("section", id="comparison")
    assert "compare of a@early and b" in section[1]
    assert "curvescope compare a@early b --profile full --tokens 32" in section[1]
    assert [text for _, text in page.all("h3")][:2] == ["a@early", "b"]
    assert page.all("h1")[0][1] == "a@early, b"
    alike = [{**told, "model": name} for name in ("a", "b")]
    run = make_run(tmp_path, "compare", result=result, described=alike, **settings)
    assert Page(made(tmp_path, run)).all("h3")[0][1] == "a@early and b"


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"models": ["a", "b c"]}, "curvescope compare a 'b c' --profile full"),
        (
            {"datasets": ["x", "y"], "data": "x", "revision": "z"},
            "curvescope compare a@z --data x --data y --profile full",
        ),
        (
            {"model": "tiny-gpt", "revision": "initial", "tokens": 8},
            "curvescope run compare tiny-gpt --tokens 8",
        ),
    ],
)
def test_the_command_of_a_comparison_names_its_sides(settings, command):
    assert run_command("compare", find("compare"), {"model": "a", **settings}) == command


def test_a_scene_has_real_switches_and_a_still_to_print(tmp_path):
    pytest.importorskip("plotly")
    html = made(tmp_path, make_run(tmp_path, result=Synthetic(drawn={"map": SCENE})))
    page = Page(html)
    assert len(html) < 12_000_000
    assert [text for _, text in page.all("legend")] == ["matrix"]
    radios = page.all("input", type="radio")
    assert [has["value"] for has, _ in radios] == ["H", "GGN"]
    assert "checked" in radios[0][0]
    assert len({has["name"] for has, _ in radios}) == 1
    assert [text for _, text in page.all("option")] == list("012345")
    assert page.all("figure", class_="live printed")
    assert [(has["width"], has["alt"]) for has, _ in page.all("img")] == [("480", "Map: Map words.")]


def test_a_scene_that_looks_other_than_its_still_has_words_of_its_own(tmp_path):
    pytest.importorskip("plotly")
    drawn = {"map": {**SCENE, "caption": "Turn it."}, "alone": {**SCENE, "caption": "Alone."}}
    page = Page(made(tmp_path, make_run(tmp_path, result=Synthetic(drawn=drawn))))
    assert [text for _, text in page.all("span", class_="of-scene")] == ["Turn it."]
    assert [text for _, text in page.all("span", class_="of-still")] == [
        "Map words. Bars are 95 % intervals."
    ]
    assert "caption" not in json.loads(as_json(drawn["map"]))


def test_lists_that_a_scene_repeats_are_told_once():
    x, y = list(range(40)), [0.5] * 40
    data = [{"x": np.array(x), "y": y}]
    scene = {
        "data": data,
        "layout": {},
        "variants": {"a": {"data": data}, "b": {"data": [{"x": x, "y": [1, 2]}]}},
    }
    told = json.loads(as_json(scene))
    assert told["lists"] == [x, y]
    assert told["data"] == [{"x": {"list": 0}, "y": {"list": 1}}] == told["variants"]["a"]["data"]
    assert told["variants"]["b"]["data"] == [{"x": {"list": 0}, "y": [1, 2]}]
    assert json.loads(as_json({"data": data})) == {"data": [{"x": x, "y": y}]}


def test_without_plotly_stills_are_all_there_is(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = Synthetic(drawn={"map": SCENE, "alone": SCENE})
    page = Page(made(tmp_path, make_run(tmp_path, result=result)))
    assert [text for _, text in page.all("h4")] == ["Map", "Values"]
    assert not page.all("input")
    assert not page.all("div", class_="scene")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, True),
        ({"inputs": "patches", "outputs": "class", "n_out": 3, "image_size": 4, "causal": False}, False),
    ],
)
def test_a_card_tells_a_vocabulary_that_is_used(settings, shown):
    model = cs.load(transformer(**settings))
    assert ("vocab_size" in telling_facts(dict(model.facts))) == shown


def test_a_figure_says_how_it_was_made(tmp_path):
    run = make_run(tmp_path, model="tiny-gpt", data="sample", tokens=64, num_probes=2, seed=3)
    (box,) = Page(made(tmp_path, run)).all("details", class_="methods")
    for words in (
        "tiny-gpt on sample",
        "num_probes = 2",
        "Bars are 95 % intervals.",
        "seed = 3",
        "20 s",
        "0.1.0",
    ):
        assert words in box[1]
    assert "curvescope run spectrum tiny-gpt --tokens 64 --set num_probes=2 --seed 3" in box[1]


def test_the_command_gives_the_same_settings():
    kind = find("gap").Config
    asked = {
        "model": "a folder/m",
        "tokens": 64,
        "dtype": "float64",
        "seed": 1,
        "checkpoints": ["early", "x,y"],
    }
    cfg = kind.from_dict(asked)
    words = shlex.split(run_command("gap", find("gap"), cfg.to_dict()))
    assert words[:4] == ["curvescope", "run", "gap", "a folder/m"]
    pairs = [w.partition("=") for flag, w in zip(words[4::2], words[5::2], strict=True) if flag == "--set"]
    named = {f: w for f, w in zip(words[4::2], words[5::2], strict=True) if f != "--set"}
    assert named == {"--profile": "full", "--tokens": "64", "--dtype": "float64", "--seed": "1"}
    found = {name: kind.read(name, text) for name, _, text in pairs}
    assert kind.from_dict(asked | found) == cfg
    assert found == {"checkpoints": ["early", "x,y"]}


def test_time_is_not_told_where_a_run_was_stopped(tmp_path):
    run = make_run(tmp_path)
    assert time_of(run, start_time(run)) == "20 s"
    with (run / "log.txt").open("a", encoding="utf-8") as log:
        log.write("2026-01-02 03:05:00 resumed: 1 of 2 pieces were there\n")
    assert time_of(run, start_time(run)) == ""
    (run / "log.txt").unlink()
    assert time_of(run, start_time(run)) == ""


def test_errors_are_what_a_caption_says_of_them():
    caption = "Density of all. The band is a 95 % interval. Ticks mark the ends."
    assert errors_in(caption) == "The band is a 95 % interval."


def test_every_model_has_a_card_and_old_runs_a_short_one(tmp_path):
    told = describe(cs.load("tiny-gpt"))
    runs = [
        make_run(tmp_path, "heads", model="tiny-gpt"),  # of old: without model.json
        make_run(tmp_path, model="tiny-gpt", described=[told]),
        make_run(tmp_path, model="tiny-gpt", revision="early"),
    ]
    html = made(tmp_path, *runs)
    card = html.split('<section id="model"')[1].split("</section>")[0]
    page = Page("<p>" + card.partition(">")[2] + "</p>")
    assert [text for _, text in page.all("h3")] == ["tiny-gpt", "tiny-gpt@early"]
    assert "558,144" in card
    assert "L*.W_Q" in card
    assert card.count(">Roles<") == 1
    (runs[1] / "model.json").write_text("{", encoding="utf-8")
    assert ">Roles<" not in made(tmp_path, *runs)


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("holds", GOOD),
        ("agrees", GOOD),
        ("agrees on tiny-gpt", GOOD),
        ("not violated here", GOOD),
        ("fails", BAD),
        ("differs", BAD),
        ("holds with a correction", PART),
        ("fails as printed, holds corrected", PART),
        ("holds (3 of 4), fails (1 of 4)", PART),
        ("in some of the networks", PART),
        ("not decided", OPEN),
        ("not claimed; σ^2", OPEN),
        ("–", OPEN),
    ],
)
def test_verdicts_have_levels(words, level):
    assert verdict(words) == level


def test_stills_are_short_and_cannot_end_their_attribute(tmp_path):
    path = tmp_path / "a.svg"
    path.write_text(SVG, encoding="utf-8")
    assert still(path).address == (
        "data:image/svg+xml;charset=utf-8,<svg width='360pt' viewBox='0 0 9 9'><path d='M 1.23 2 %23'/></svg>"
    )
    path.write_text(SVG.replace("M 1", "' onload='x"), encoding="utf-8")
    assert '"' not in still(path).address
    assert still(path).address.startswith("data:image/svg+xml;base64,")


def test_a_large_drawing_is_shown_in_pixels(tmp_path):
    from PIL import Image

    path = tmp_path / "a.svg"
    path.write_text(SVG.replace("M 1", "M 1" + " 2" * 20_000), encoding="utf-8")
    Image.new("RGB", (150, 30), "white").save(tmp_path / "a.png")
    assert still(path, most=50_000).address.startswith("data:image/svg")
    found = still(path, most=20_000)
    assert found.address.startswith(("data:image/webp;base64,", "data:image/png;base64,"))
    assert found.width == 96


def test_a_page_of_many_runs_stays_small(tmp_path):
    runs = [make_run(tmp_path, "heads", model="tiny-gpt") for _ in range(3)]
    assert write_page(runs, tmp_path / "p.html").stat().st_size < 200_000


def test_the_top_of_a_page_tells_what_has_no_error_and_what_was_lowered(tmp_path):
    run = make_run(tmp_path, model="m", tokens=32, num_probes=1, num_steps=8)
    html = made(tmp_path, run)
    assert (
        "Every estimate has its error, but for those of one probe: spectrum (<code>num_probes</code>)" in html
    )
    assert "to be done in time" not in html
    (run / "asked.toml").write_text('[settings]\nmodel = "m"\nnum_steps = 8\n', encoding="utf-8")
    html = made(tmp_path, run, make_run(tmp_path, "blocks", model="m", num_trace_probes=4))
    assert "to be done in time: spectrum 32 tokens, 1 probe. <code>--profile full</code>" in html
    assert "Every estimate has its error." in made(tmp_path, make_run(tmp_path, "blocks", model="m"))
