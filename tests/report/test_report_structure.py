"""The page as a document: sections in their order, headings, links, one file, and words that stay words."""

import json
import re
from itertools import pairwise

import pytest

from curvescope.report import page as pages
from curvescope.report import write_page
from curvescope.report.sections import SECTIONS
from synthetic_runs import HOSTILE, SCENE, Page, Synthetic, made, make_run


def test_sections_come_in_their_order_and_only_with_content(tmp_path):
    studies = ["hvp", "compare", "heads", "taylor", "monitor", "propagation", "blocks", "gap", "spectrum"]
    page = Page(made(tmp_path, *(make_run(tmp_path, study, model="tiny-gpt") for study in studies)))
    anchors = [has["id"] for has, _ in page.all("section")]
    assert anchors == [a for a in SECTIONS if a not in ("findings", "blocks", "papers")]
    nav = [has["href"] for has, _ in page.all("a") if has["href"].startswith("#")][1 : len(anchors) + 1]
    assert nav == [f"#{anchor}" for anchor in anchors]
    assert [text for _, text in page.all("h2")] == [SECTIONS[anchor].title for anchor in anchors]
    titles = [text for _, text in page.all("h3")]
    assert titles.index("spectrum of tiny-gpt") < titles.index("gap of tiny-gpt")


def test_parts_of_a_run_are_shown_where_they_belong(tmp_path):
    names = ("density", "block_maps")
    run = make_run(tmp_path, model="tiny-gpt", stills=names)
    html = made(tmp_path, run, make_run(tmp_path, "blocks", model="tiny-gpt"))
    spectra, block_map = html.split('<section id="block-map"')
    assert 'id="run1-density"' in spectra
    assert 'id="run1-block_maps"' in block_map
    assert 'href="#run1"' in block_map
    assert block_map.index("blocks of tiny-gpt") < block_map.index("spectrum of tiny-gpt")
    assert html.count("Opening words.") == 2  # of each run at home


def test_headings_descend_and_links_lead_somewhere(tmp_path):
    result = Synthetic(drawn={"map": SCENE})
    page = Page(made(tmp_path, make_run(tmp_path, result=result), make_run(tmp_path, "heads")))
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [has["id"] for has, _ in page.all() if "id" in has]
    assert len(ids) == len(set(ids))
    for _, has, _ in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "aria-controls"):
            assert has.get(name, ids[0]) in ids
        if has.get("href", "").startswith("#"):
            assert has["href"][1:] in ids
    landmarks = [tag for tag, _, _ in page.elements if tag in ("header", "nav", "main", "footer")]
    assert landmarks == ["header", "nav", "main", "footer"]


def test_the_page_says_of_whom_and_when_and_asks_for_nothing(tmp_path):
    run = make_run(tmp_path, model="folder/my model", revision="early")
    html = made(tmp_path, run)
    page = Page(html)
    assert page.all("title")[0][1] == "my model@early, 2 January 2026 · curvescope"
    described = page.all("meta", name="description")[0][0]["content"]
    assert "my model@early" in described
    assert "2 January 2026" in described
    for _, has, _ in page.elements:
        for name in ("src", "href", "data", "action", "srcset"):
            assert re.match(r"$|#|data:|runs/", has.get(name, "")), has
    assert not re.search(r"@import|url\(", html)
    assert page.all("link", rel="icon")[0][0]["href"].startswith("data:")
    assert "default-src 'none'" in html
    assert len(html) < 100_000  # no scene, no plotly


def test_words_of_others_stay_words(tmp_path):
    pytest.importorskip("plotly")
    columns = {HOSTILE: [HOSTILE], "verdict": [HOSTILE]}
    result = Synthetic(HOSTILE, columns, {"map": SCENE, HOSTILE.replace("/", "|"): SCENE}, notes=[HOSTILE])
    roles = [{"role": HOSTILE, "blocks": 1, "shape": HOSTILE, "parameters": 1, "share": 1.0}]
    blocks = [{"block": HOSTILE, "shape": [1], "parameters": 1, "share": 1.0}]
    told = {"parameters": 1, "dtype": "float32", "facts": {"kind": HOSTILE}, "notes": [HOSTILE]}
    told |= {"roles": roles, "blocks": blocks}
    run = make_run(tmp_path, result=result, described=[told], model=HOSTILE.replace("/", "|"), data=HOSTILE)
    page = Page(made(tmp_path, run))
    scripts = page.all("script")
    assert len(scripts) == 6  # the class, the page's, plotly, scenes', and two scenes
    plain = [text for has, text in scripts if has.get("type") != "application/json"]
    assert not any("alert(1)" in text for text in plain)
    assert not any("onerror" in has or has.get("src") == "x" for _, has, _ in page.elements)
    shown = [json.loads(text) for has, text in scripts if has.get("type") == "application/json"]
    assert shown[0]["data"][0] == {"y": [1.0, None], "name": HOSTILE}


def test_a_page_is_complete_or_not_written(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    page = write_page([run], tmp_path / "page.html")
    before = page.read_bytes()

    def broken(*_):
        raise RuntimeError

    monkeypatch.setattr(pages, "_about", broken)
    with pytest.raises(RuntimeError):
        write_page([run], page)
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
