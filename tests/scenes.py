"""What holds for every scene of a result."""

import json
from itertools import product

from curvescope.runs.study_result import Shown


def checked(result: Shown) -> dict:
    """The scenes of a result, after a look at all of them."""
    found = result.scenes()
    assert set(found) <= set(result.captions())
    for name, scene in found.items():
        text = json.dumps(scene, allow_nan=False)
        assert len(text) < 300_000, name
        for word in ("bgcolor", '"font"', '"template"'):  # the page is light or dark
            assert word not in text, (name, word)
        choices = [control["choices"] for control in scene.get("controls", [])]
        if choices:
            assert set(scene["variants"]) == {"|".join(chosen) for chosen in product(*choices)}
            first = scene["variants"]["|".join(options[0] for options in choices)]
            assert {key: scene[key] for key in ("data", "layout")} == first
    return found


def cells(scene: dict, key: str) -> list:
    """Names, as the words of the cells begin with them, and places among the colors, of a map."""
    maps = scene["variants"][key]["data"]
    words = [text for one in maps for row in one["text"] for text in row]
    places = [z for one in maps for row in one["z"] for z in row]
    return [(text.split("</b>")[0][3:], z) for text, z in zip(words, places, strict=True)]
