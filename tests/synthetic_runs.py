"""Run folders that no study made: everything that a page shows, without computing anything."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pandas as pd
import tomli_w

from curvescope.report import write_page
from curvescope.runs.disk.atomic_files import write_tables
from curvescope.runs.study_result import Line, Shown

SVG = (
    '<?xml version="1.0"?><!-- made --><svg width="360pt" viewBox="0 0 9 9"><path d="M 1.234567 2 #"/></svg>'
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;`x`"
SCENE = {
    "data": [{"y": [1.0, float("nan")], "name": HOSTILE}],
    "layout": {},
    "controls": [{"name": "matrix", "choices": ["H", "GGN"]}, {"name": "layer", "choices": list("012345")}],
    "variants": {f"{m}|{i}": {"data": [], "layout": {}} for m in ("H", "GGN") for i in "012345"},
}


@dataclass(frozen=True)
class Synthetic(Shown):
    """A result whose words, tables and scenes are what it is given."""

    words: str = "words"
    columns: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)
    num_parameters: int = 7
    about: list[str] = field(default_factory=list)
    num_terms: float | None = None

    def opening(self) -> str:
        return f"Opening {self.words}."

    def subjects(self) -> list[str]:
        return self.about

    def summary(self) -> list[Line]:
        return [("λ_max", "21,800 ± 1,000", self.words), ("note", "", f"noted {self.words}")]

    def captions(self) -> dict[str, str]:
        return {"values": f"Values {self.words}.", "map": f"Map {self.words}. Bars are 95 % intervals."}

    def tables(self) -> dict[str, pd.DataFrame]:
        return {
            "values": pd.DataFrame(self.columns or {"block": ["E"], "trace": [1.5], "trace_stderr": [0.5]})
        }

    def figures(self) -> dict[str, Any]:
        return {}

    def scenes(self) -> dict[str, Any]:
        return self.drawn


def make_run(root, study="spectrum", *, result=None, stills=("map",), described=(), **settings):
    """A finished run of that study, with these settings."""
    run = root / "runs" / study / "20260102-030405-0123abcd"
    while run.exists():
        run = run.with_name(run.name + "a")
    (run / "figures").mkdir(parents=True)
    words = {"study": study, "version": "0.1.0", **settings}
    (run / "config.toml").write_text(tomli_w.dumps(words), encoding="utf-8")
    (run / "env.json").write_text(
        '{"curvescope": "0.1.0", "machine": "x86", "threads": "1"}', encoding="utf-8"
    )
    (run / "log.txt").write_text(
        "2026-01-02 03:04:06 done: density\n2026-01-02 03:04:25 finished\n", encoding="utf-8"
    )
    if described:
        (run / "model.json").write_text(json.dumps(described), encoding="utf-8")
    for name in stills:
        (run / "figures" / f"{name}.svg").write_text(SVG, encoding="utf-8")
    result = Synthetic() if result is None else result
    write_tables(result, run / "tables")
    result.save(run)
    return run


def made(tmp_path, *runs):
    """The page of these runs, beside them."""
    return write_page(runs, tmp_path / "page.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """The elements of a page: (tag, attributes, text right inside), in their order."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}, []))
        if tag not in ("meta", "link", "img", "input", "br"):
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.elements[self._open[-1]][0] == tag, f"</{tag}> closes {self.elements[self._open[-1]][:2]}"
        self._open.pop()

    def handle_data(self, data):
        for i in self._open:
            self.elements[i][2].append(data)

    def all(self, tag=None, **attrs):
        """Elements of a tag that have these attributes: (attributes, text with what is inside)."""
        return [
            (has, " ".join("".join(text).split()))
            for name, has, text in self.elements
            if tag in (None, name) and all(has.get(key.rstrip("_")) == value for key, value in attrs.items())
        ]
