"""Sentences that open a section: written from the numbers of the result, none of them missing."""

from types import SimpleNamespace

import numpy as np
import pytest

from curvescope.core.number_format import with_error
from curvescope.runs.study_result import FAILS, HOLDS, Claim, count_verdicts
from curvescope.studies.blocks import view as blocks
from curvescope.studies.dynamics import view as dynamics
from curvescope.studies.propagation import view as propagation
from curvescope.studies.propagation.study import SourceEstimate
from curvescope.studies.spectrum import view as spectrum


def part(values, trace, *, psd=False, converged=True):
    """A part of a spectrum without sampling errors, as older runs saved it."""
    ends = SimpleNamespace(values=np.array(values), converged=converged)
    return SimpleNamespace(
        extremes=ends,
        trace=trace,
        traces=SimpleNamespace(psd=psd),
        sampled={},
        headline=lambda name, value, numerical: with_error(value, numerical),
    )


def parts(**changes):
    found = {
        "hessian": part([-781.2, 1940.0], (21_803.0, 1_020.0)),
        "ggn": part([1819.0], (20_000.0, 10.0), psd=True),
        "functional": part([-1307.0, 900.0], (1_803.0, 900.0)),
    }
    return SimpleNamespace(parts=found | changes)


def test_spectra_tell_ends_trace_and_parts():
    assert spectrum.opening(parts()) == (
        "The Hessian's eigenvalues reach from -781.2 to 1,940; the trace is 21,800 ± 1,000, 11 times λ_max. "
        "The GGN alone reaches 1,819, the functional Hessian 1,300 in size; all negative eigenvalues come "
        "from it."
    )


def test_what_is_noise_unsure_or_not_semi_definite_is_not_told_as_known():
    unsure = parts(hessian=part([2.0, 5.0], (1.0, 3.0), converged=False))
    said = spectrum.opening(unsure)
    assert "trace" not in said
    assert "as far as the search went" in said
    assert "negative" not in said
    assert "GGN" not in spectrum.opening(parts(ggn=part([1.0], (1.0, 1.0))))


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (
            [40.0, 2.0, 30.0, 1.0],
            "The diagonal block of the Hessian with the largest Frobenius norm is E (3,600, 95 % interval "
            "3,400 to 3,700); ",
        ),
        (
            [140.0, 2.0, 130.0, 1.0],
            "The diagonal block of the Hessian with the largest Frobenius norm is E (3,600, 95 % interval "
            "3,200 to 3,900) or P (3,300, 95 % interval 3,000 to 3,600), which are not told apart; ",
        ),
        (
            [np.nan] * 4,
            "Frobenius norms of the diagonal blocks of the Hessian are from one probe each, so their errors "
            "and their order are not known; the largest estimates are E 3,600, P 3,300, U 39, and ",
        ),
    ],
)
def test_the_map_of_a_spectrum_tells_the_largest_blocks_that_intervals_tell_apart(errors, words):
    norms, stderr = np.diag([3565.0, 38.7, 3292.0, 16.0]), np.diag(errors)
    ends = norms - 2 * stderr, norms + 2 * stderr
    found = SimpleNamespace(names=["E", "U", "P", "L0.W_Q"], frobenius=norms, stderr=stderr, interval=ends)
    result = SimpleNamespace(parts={"hessian": SimpleNamespace(map=found, sampled_norms={})})
    assert spectrum.of_blocks(result) == f"{words}the median of 4 is 1,700."


@pytest.mark.parametrize(
    ("error", "words", "value"),
    [
        (20.0, ["3 other sources is L3.ffn,", "4,660 ± 20, 0.93 of ‖H‖."], "L3.ffn"),
        (
            400.0,
            ["3 other sources is L3.ffn (4,660 ± 400) or L1.ffn (4,400 ± 400)"],
            "L3.ffn or L1.ffn",
        ),
    ],
)
def test_the_strongest_source_is_named_where_intervals_tell(error, words, value):
    values = {"L1.ffn": 4400.0, "L3.ffn": 4660.0, "L0.ffn": 90.0}
    norms = {name: SourceEstimate(v, error, v - 2 * error, v + 2 * error) for name, v in values.items()}
    norms["H"] = SourceEstimate(5000.0, 1.0, 4998.0, 5002.0)
    shares = SimpleNamespace(
        norm=norms.__getitem__,
        share=lambda name: SourceEstimate(0.5, 0.1, 0.3, 0.7),
        is_zero=lambda name: False,
    )
    result = SimpleNamespace(shares=shares, sources=list(values))
    said = propagation.opening(result)
    assert all(part in said for part in words), said
    label, shown, _ = propagation._strongest(result)
    assert (label, shown) == ("strongest source", value)


@pytest.mark.parametrize("apart", [None, SimpleNamespace(names=["E", "U"], mean=0.51234, mean_stderr=0.02)])
def test_blocks_tell_from_the_least_sharp_to_the_sharpest(apart):
    sharp = {"E": 1782.0, "P": 1487.0, "L0.W_Q": 1.234}
    of = SimpleNamespace(
        ranking=lambda: list(sharp),
        sharpness=lambda name: SimpleNamespace(largest=sharp[name]),
        heterogeneity=apart,
    )
    said = blocks.spread(SimpleNamespace(parts={"hessian": of}))
    expected = "λ_max of 3 blocks of the Hessian goes from 1.2 (L0.W_Q) to 1,800 (E); its median is 1,500."
    assert said.startswith(expected)
    assert ("2 of them are 0.512 ± 0.020 bits apart" in said) == (apart is not None)


def test_checkpoints_tell_a_peak_between_their_ends():
    columns = {"loss": [6.2, 4.0, 2.9], "lambda_max": [3.0, 90.0, 40.0], "lambda_max_error": [0.1, 1.0, 1.0]}
    one = SimpleNamespace(names=["initial", "early", "final"], column=lambda name: np.array(columns[name]))
    assert dynamics.over_checkpoints(one) == (
        "From initial to final the loss goes from 6.2 to 2.9 and λ_max from 3.00 ± 0.10 to 40.0 ± 1.0, "
        "highest at early (90.00)."
    )


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([], ""),
        ([HOLDS], "Verdicts on 1 statement: holds 1."),
        ([FAILS, HOLDS, FAILS], "Verdicts on 3 statements: fails 2, holds 1."),
    ],
)
def test_claims_introduce_a_result_without_words_of_its_own(verdicts, said):
    claims = [Claim("c", "p", "m", verdict) for verdict in verdicts]
    assert count_verdicts(SimpleNamespace(claims=lambda: claims)) == said
