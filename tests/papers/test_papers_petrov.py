"""petrov2025 as a whole: every figure is found, explains its settings, and has a study of its name."""

from __future__ import annotations

import pytest

from curvescope.cli import main
from curvescope.core.errors import UsageError
from curvescope.papers import figures_of, find_figure
from curvescope.papers.petrov2025.figures import LandscapeConfig
from curvescope.papers.reproduce import reproduce
from curvescope.studies import STUDIES, find

FIGURES = list(figures_of("petrov2025"))


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_a_study_too_and_explains_its_settings(figure: str):
    assert figure in STUDIES or figure == "convergence"  # which trains networks of its own
    study = find_figure("petrov2025", figure)
    assert {"profile", "device"} <= {s.name for s in study.Config.settings()}
    assert all(s.meaning for s in study.Config.settings())
    if figure in STUDIES:
        assert all(s.meaning for s in find(figure).Config.settings())


def test_data_of_the_whole_paper_is_refused(tmp_path):
    """Pictures and a text have names of their own, so that one setting cannot be taken for the other."""
    with pytest.raises(UsageError, match="'data' could mean several things for petrov2025") as caught:
        reproduce("petrov2025", settings={"data": "mnist"}, out=tmp_path)
    assert "pictures=NAME" in str(caught.value.hint)
    assert "text=NAME" in str(caught.value.hint)
    with pytest.raises(SystemExit, match="2"):
        main(["reproduce", "petrov2025", "--set", "data=mnist", "--out", str(tmp_path)])
    known = {name: {s.name for s in find_figure("petrov2025", name).Config.settings()} for name in FIGURES}
    assert "pictures" in known["full_hessian"]
    assert "text" in known["landscape"]
    assert not any("data" in names for names in known.values())


def test_the_profiles_of_the_landscape_differ_in_size():
    quick, full = (LandscapeConfig(profile=p).of_study() for p in ("quick", "full"))
    assert (quick.tokens, full.tokens) == (8192, 65536)
    assert full.num_orders > quick.num_orders
