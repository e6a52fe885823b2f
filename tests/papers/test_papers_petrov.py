"""petrov2025 as a whole: every figure is found, explains its settings, and has a study of its name."""

from __future__ import annotations

import pytest

from curvescope.papers import figures_of, find_figure
from curvescope.papers.petrov2025 import landscape
from curvescope.studies import STUDIES, find

FIGURES = list(figures_of("petrov2025"))


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_a_study_too_and_explains_its_settings(figure: str):
    assert figure in STUDIES
    study = find_figure("petrov2025", figure)
    assert {"profile", "device"} <= {s.name for s in study.Config.settings()}
    assert all(s.meaning for s in study.Config.settings())
    assert all(s.meaning for s in find(figure).Config.settings())


def test_the_profiles_of_the_landscape_differ_in_size():
    quick, full = (landscape.Config(profile=p).of_study() for p in ("quick", "full"))
    assert (quick.tokens, full.tokens) == (8192, 65536)
    assert full.num_orders > quick.num_orders
