"""Figures of a run: stills as data: addresses, scenes as JSON, and the library that draws scenes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from curvescope.report.page_elements import Control, Entry, Methods, Picture, heading, still
from curvescope.viz.interactive import Scene

LONG = 30  # entries of a list that is worth telling once


def pictures(
    stills: Mapping[str, Path],
    scenes: Mapping[str, Scene],
    captions: Mapping[str, str],
    *,
    anchor: str,
    methods: Callable[[str], Methods],
    most: int,
) -> list[Picture]:
    """Return all figures and scenes in the order of the captions; those of one name stand together.

    Args:
        methods: how the figure of a name was made.
        most: characters that a drawing may take.
    """
    order = {name: i for i, name in enumerate(captions)}
    names = sorted({*stills, *scenes}, key=lambda name: (order.get(name, len(order)), name))
    return [
        Picture(
            anchor=f"{anchor}-{name}",
            heading=heading(name),
            caption=captions.get(name, ""),
            methods=methods(name),
            still=still(stills[name], most) if name in stills else None,
            scene=as_json(scenes[name]) if name in scenes else "",
            scene_caption=str(scenes.get(name, {}).get("caption", "")),
            controls=_controls(scenes.get(name, {})),
        )
        for name in names
    ]


def _controls(scene: Scene) -> list[Control]:
    return [
        Control(str(one["name"]), [str(choice) for choice in one["choices"]])
        for one in scene.get("controls", ())
    ]


def as_json(scene: Scene) -> str:
    """JSON of all but the caption, for a script element; numbers that are not finite are null.

    Variants repeat long lists of numbers: those stand once, in `lists`, and `{"list": i}` is in their places.
    """
    plain = _plain({key: part for key, part in scene.items() if key != "caption"})
    counts = Counter(_long_lists(plain))
    places = {text: i for i, text in enumerate(text for text, count in counts.items() if count > 1)}
    if places:
        plain = {**_referred(plain, places), "lists": [json.loads(text) for text in places]}
    return _dumped(plain).replace("<", "\\u003c")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _long_lists(value: Any) -> Iterator[str]:
    """The long lists of numbers and words in it, as JSON."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, list) and _is_long(value):
        yield _dumped(value)
        return
    if isinstance(value, list):
        for item in value:
            yield from _long_lists(item)


def _is_long(value: list[Any]) -> bool:
    return len(value) > LONG and not any(isinstance(item, dict | list) for item in value)


def _referred(value: Any, places: Mapping[str, int]) -> Any:
    """The same, with places of lists in the stead of lists that have one."""
    if isinstance(value, Mapping):
        return {key: _referred(item, places) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    text = _dumped(value) if _is_long(value) else ""
    return {"list": places[text]} if text in places else [_referred(item, places) for item in value]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def library(entries: Iterable[Entry]) -> str:
    """plotly.js if there is a scene and plotly is installed, else nothing; the page holds it (5 MB)."""
    if not any(picture.scene for entry in entries for picture in entry.pictures):
        return ""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs()
