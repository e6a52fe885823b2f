"""The claims of singh2025 about exact spectra: verdicts come from the numbers, and are what theory says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from curvescope.core.errors import UsageError
from curvescope.papers import PAPERS, figures_of, find_figure
from curvescope.papers.common import OURS
from curvescope.papers.singh2025 import SLIDES
from curvescope.papers.singh2025 import exact_spectra as figure
from curvescope.runs import study_result
from curvescope.studies import exact_spectra
from curvescope.studies.common.columns import stack_tables
from curvescope.studies.exact_spectra import analysis, study
from curvescope.studies.exact_spectra.analysis import compare
from curvescope.viz.interactive import scene

KEPT = ("linear network", "ReLU network", "1-D attention", "d = 2, d_K = 8, W_O", "d = d_K = 4")
EXPECTED = {
    "spectrum of 1-D attention": study_result.HOLDS,
    "spectrum of linear network": study_result.HOLDS,
    "spectrum of ReLU network": study_result.HOLDS,
    "outlier activations": study_result.HOLDS,
    "a bias shrinks the bulk": study_result.HOLDS,
    "a bias grows the outliers": figure.CONDITIONS,
    "the bulk is paired": study_result.HOLDS,
    "H_f is paired, linear network": study_result.HOLDS,
    "H_f is paired, ReLU network": study_result.HOLDS,
    "H_f is paired, 1-D attention": study_result.FAILS,
    "pairs survive d > 1": figure.CONDITIONS,
    "exact pairs as assumptions are dropped": study_result.HOLDS,
}


@pytest.fixture(scope="module")
def measured() -> exact_spectra.ExactSpectra:
    """Few draws; the last rung is written down."""
    rungs = [study.climb(name, num_draws=4, seed=0) for name in (study.CONTROL, *KEPT)]
    last = {name: [0.0, 0.1, 0.0] for name in study.QUANTITIES}
    last[study.EXACT] = [0.0, 0.0, 0.0]
    real = [
        study.tagged(study.rung_name(revision, part), {study.OUTLIERS: [value]})
        for part in study.PARTS
        for revision, value in (("initial", 0.99), ("final", 0.5))
    ]
    return exact_spectra.ExactSpectra(
        spectra=compare(0, d_K=3, num_tokens=4),
        sweeps=stack_tables([study.sweep(name, d_K=4, seeds=range(4)) for name in study.AXES]),
        gaps=stack_tables(
            [analysis.measure("scalars", 1.0, rho, num_draws=40, seed=0) for rho in (0.1, 1.0)]
        ),
        pairings=stack_tables([*rungs, study.tagged(figure.LAST, last), *real]),
    )


def test_verdicts_are_those_of_the_theory(measured: exact_spectra.ExactSpectra):
    found = {claim.claim: claim for claim in figure.ClaimedSpectra(measured).claims()}
    assert len(found) >= 25
    for name, verdict in EXPECTED.items():
        assert found[name].verdict == verdict, found[name]
    assert found["λ_max of the GGN, scalars"].measured == "worse in 2 of 2 settings, better in 0"
    assert found["λ_max of the GGN and the loss"].verdict == study_result.HOLDS
    assert found["outliers of tiny-gpt, one layer"].verdict == figure.CONDITIONS
    assert found["outliers of tiny-gpt, one layer"].measured.endswith("initial only")
    for claim in found.values():
        assert (claim.source, claim.whose) in (SLIDES, OURS)


def test_a_wrong_eigenvalue_fails(measured: exact_spectra.ExactSpectra):
    spectra = measured.spectra
    wrong = np.where(np.array(spectra.case) == "linear network, generic", 1.001, 1) * spectra.closed_form
    found = figure.ClaimedSpectra(replace(measured, spectra=replace(spectra, closed_form=wrong))).claims()
    assert [claim.verdict for claim in found[:3]] == [
        study_result.HOLDS,
        study_result.FAILS,
        study_result.HOLDS,
    ]


@pytest.mark.parametrize(("sign", "verdict"), [(1, study_result.HOLDS), (-1, study_result.FAILS)])
def test_who_is_worse_is_read_from_the_draws(measured: exact_spectra.ExactSpectra, sign: int, verdict: str):
    gaps = measured.gaps
    worse = np.array(gaps.kind) == (analysis.GAUSS_NEWTON_ATTENTION if sign > 0 else analysis.MLP)
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(worse))
    moved = replace(gaps, ggn_lambda_max=gaps.lambda_max * (1 + np.where(worse, 0.5, 0.1) * noise))
    found = {claim.claim: claim for claim in figure.ClaimedSpectra(replace(measured, gaps=moved)).claims()}
    assert found["λ_max of the GGN, scalars"].verdict == verdict


def test_the_figure_shows_what_the_study_does(measured: exact_spectra.ExactSpectra, tmp_path):
    result = figure.ClaimedSpectra(measured)
    assert set(result.tables()) >= {"exact_spectra_spectra", "exact_spectra_sweeps", "exact_spectra_pairing"}
    assert set(result.captions()) >= set(result.tables())
    assert len(result.summary()) == len(result.claims())
    again = figure.ClaimedSpectra.load(result.save(tmp_path))
    assert again.claims() == result.claims()


@pytest.mark.usefixtures("unrendered")
def test_figures_have_captions(measured: exact_spectra.ExactSpectra):
    import matplotlib.pyplot as plt

    result = figure.ClaimedSpectra(measured)
    drawn = result.figures()
    assert set(result.captions()) >= set(drawn)
    assert len(drawn) == 5
    for one in drawn.values():
        scene(one)  # rungs without a number have no error bar
        plt.close(one)


def test_the_paper_is_found_and_its_profiles_differ(
    measured: exact_spectra.ExactSpectra, monkeypatch: pytest.MonkeyPatch
):
    assert "singh2025" in PAPERS
    assert "exact_spectra" in figures_of("singh2025")
    assert find_figure("singh2025", "exact_spectra") is figure.STUDY
    quick, full = (figure.Config(profile=profile).of_study() for profile in ("quick", "full"))
    assert quick == exact_spectra.Config()
    assert full.num_draws > quick.num_draws
    given = figure.Config(profile="full", num_draws=3, bundled_tokens=0).of_study()
    assert given == replace(full, num_draws=3, bundled_tokens=0)
    with pytest.raises(UsageError, match="head_size"):
        figure.Config(head_size=1)
    monkeypatch.setattr(exact_spectra, "run", lambda cfg, **_: measured if cfg == full else None)
    assert figure.run(figure.Config(profile="full")).measured is measured
