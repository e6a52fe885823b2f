"""The study `propagation`: exact numbers are those of dense matrices, estimates hold them, runs go on."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import curvescope as cs
import oracles
from curvescope.algorithms.blocks.probes import extreme_ends
from curvescope.report.glossary import used_in
from curvescope.studies import find, propagation
from curvescope.studies.propagation.study import layer_slices
from scenes import checked


def problem(**settings: object) -> cs.Problem:
    small = {"d_model": 2, "norm_kind": "rmsnorm", "n_heads": 1, "d_ff": 3, "n_ctx": 4, "vocab_size": 3}
    module = oracles.transformer(**{**small, **settings})
    tokens = torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(0))
    return cs.Problem(module, (tokens[:, :-1], tokens[:, 1:]))


@pytest.fixture(scope="module")
def case() -> cs.Problem:
    return problem()


@pytest.fixture(scope="module")
def dense(case: cs.Problem) -> dict[str, np.ndarray]:
    found = {"H": cs.Hessian(case).to_dense(), "GGN": cs.GGN(case).to_dense()}
    found |= cs.FunctionalSources(case).products(torch.eye(case.space().size, dtype=torch.float64))
    return {name: A.numpy() for name, A in found.items()}


def test_a_small_model_is_written_out(case: cs.Problem, dense: dict[str, np.ndarray]):
    result = propagation.measure(case, propagation.Config(max_exact=500, num_map_probes=0), [])
    H = dense["H"]
    assert result.shares.exact
    assert result.shares.residual < 1e-12
    for name, A in dense.items():
        values = np.linalg.eigvalsh((A + A.T) / 2)
        scale = float(np.abs(values).max()) or 1.0
        top, error, low, _ = result.ends_of(name)
        assert error == 0
        assert math.isclose(top, values[-1], abs_tol=1e-10 * scale)
        assert math.isclose(low, values[0], abs_tol=1e-10 * scale)
        assert math.isclose(result.shares.trace(name).value, np.trace(A), abs_tol=1e-9)
        assert math.isclose(result.shares.norm(name).value, np.linalg.norm(A), rel_tol=1e-9)
        assert math.isclose(result.shares.share(name).value, (A * H).sum() / (H * H).sum(), abs_tol=1e-10)
    total = sum(result.shares.share(name).value for name in ["GGN", *result.sources])
    assert math.isclose(total, 1.0, abs_tol=1e-10)


def test_estimates_hold_the_dense_truth(case: cs.Problem, dense: dict[str, np.ndarray]):
    cfg = propagation.Config(max_exact=0, num_probes=40, num_steps=12, num_map_probes=40)
    result = propagation.measure(case, cfg, [])
    H, missed, asked = dense["H"], 0, 0
    for name, A in dense.items():
        truths = (np.trace(A), np.linalg.norm(A), (A * H).sum() / (H * H).sum())
        found = (result.shares.trace(name), result.shares.norm(name), result.shares.share(name))
        asked += len(truths)
        missed += sum(not n.low <= t <= n.high for t, n in zip(truths, found, strict=True) if name != "H")
        values = np.linalg.eigvalsh((A + A.T) / 2)
        top, error, low, low_error = result.ends_of(name)
        assert np.abs(values - top).min() <= error + 1e-9
        assert np.abs(values - low).min() <= low_error + 1e-9
    assert missed <= 0.2 * asked  # 95 % intervals of numbers that depend on each other
    layers = layer_slices(case)
    assert list(layers) == ["E, P", "L0", "ln_f.g, U"]
    coupling = result.coupling
    assert coupling is not None
    order = np.concatenate([case.space().positions(block) for block in case.space()])
    H = H[order][:, order]
    for i, rows in enumerate(layers.values()):
        for j, columns in enumerate(layers.values()):
            truth = np.linalg.norm(H[rows, columns])
            assert abs(coupling.frobenius[i, j] - truth) < 0.35 * truth


def test_eigenvalues_of_nothing_are_refused(case: cs.Problem):
    with pytest.raises(cs.UsageError, match="eigenvalues: nothing matches foo"):
        propagation.measure(case, propagation.Config(eigenvalues=("foo",)), [])


def test_tables_have_the_promised_columns(case: cs.Problem):
    result = propagation.measure(case, propagation.Config(max_exact=0, num_probes=2, num_steps=2), ["a note"])
    table = result.tables()["sources"]
    assert list(table["source"][:2]) == ["H", "GGN"]
    assert {"layer", "source", "trace", "trace_stderr", "frobenius", "lambda_max", "lambda_min"} <= set(table)
    assert list(table["layer"]) == ["–", "–", *4 * ["L0"], "–", "–"]
    assert set(result.captions()) >= {*result.tables(), *result.figures()}
    traces = checked(result)["by_layer"]["variants"]["share"]["data"]
    shown = {
        text.split("</b>")[0][3:]: y for one in traces for text, y in zip(one["text"], one["y"], strict=True)
    }
    for name in result.sources:
        assert shown[name] == pytest.approx(result.shares.share(name).value, rel=1e-5, abs=1e-12)
    assert ("note", "", "a note") in result.summary()


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_numbers(case: cs.Problem):
    cfg, state = propagation.Config(max_exact=0, num_probes=2, num_steps=2, num_map_probes=0), {}
    calls = []

    def stop(what: str, number: int, total: int) -> None:
        calls.append(what)
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        propagation.measure(case, cfg, [], progress=stop, state=state)
    done = len(calls)
    again = propagation.measure(case, cfg, [], progress=lambda what, *_: calls.append(what), state=state)
    assert calls[done] == calls[done - 1]  # the piece that was begun
    fresh = propagation.measure(case, cfg, [])
    assert np.array_equal(again.shares.forms, fresh.shares.forms)
    assert again.ends_of("L0.ffn") == fresh.ends_of("L0.ffn")


def test_the_study_is_found_and_refuses_bad_settings():
    assert find("propagation").Config is propagation.Config
    with pytest.raises(cs.UsageError, match="num_probes: expected at least 2"):
        propagation.Config(num_probes=1)


@pytest.mark.parametrize("max_exact", [0, 500], ids=["probes", "exact"])
def test_a_source_that_is_nothing_but_rounding_is_zero(
    case: cs.Problem, max_exact: int, monkeypatch: pytest.MonkeyPatch
):
    class Rounded(cs.FunctionalSources):
        """The same, with rounding where the rest is."""

        def products(self, V: torch.Tensor) -> dict[str, torch.Tensor]:
            n = len(V)
            noise = torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=V.dtype)
            return {**super().products(V), "rest": 1e-13 * noise @ V}

    monkeypatch.setattr("curvescope.studies.propagation.study.FunctionalSources", Rounded)
    cfg = propagation.Config(max_exact=max_exact, num_probes=6, num_map_probes=0, num_steps=0)
    result = propagation.measure(case, cfg, [])
    (row,) = result.tables()["sources"].query("source == 'rest'").to_dict("records")
    assert row["trace"] == row["frobenius"] == row["share"] == 0
    assert row["method"] == "zero"
    assert 0 < row["frobenius_high"] < 1e-10
    assert row["trace_low"] < 0 < row["trace_high"]
    if max_exact:
        assert row["lambda_max"] == row["lambda_min"] == 0
    others = result.tables()["sources"].query("source != 'rest'")
    assert not (others["method"] == "zero").any()
    assert (others["frobenius"] > 0).all()


def test_the_rest_says_what_it_is(case: cs.Problem):
    cfg = propagation.Config(max_exact=0, num_probes=2, num_map_probes=0, num_steps=0)
    result = propagation.measure(case, cfg, [])
    assert result.outside == ["E", "P", "U"]
    table = result.tables()["sources"].set_index("source")
    assert table.loc["rest", "what"].endswith("blocks outside of them: E, P, U")
    assert "(E, P, U)" in result.captions()["sources"]
    assert "rest" in [term.name for term in used_in(result.captions().values())]


def test_an_end_that_did_not_converge_is_told_by_its_bounds(case: cs.Problem, dense: dict[str, np.ndarray]):
    cfg = propagation.Config(max_exact=0, num_probes=2, num_steps=1, num_map_probes=0)
    result = propagation.measure(case, cfg, [])
    label, value, words = result.summary()[1]
    found = [float(x.replace(",", "")) for x in re.findall(r"-?[\d,]*\.?\d+", f"{value} {words}")[:4]]
    values = np.linalg.eigvalsh(dense["H"])
    assert label == "λ_max, H"
    assert "±" not in value + words
    assert found[0] <= values[-1] <= found[1]
    assert found[2] <= values[0] <= found[3]
    table = result.tables()["sources"].set_index("source")
    for name in ("H", "GGN"):
        ends, row = np.linalg.eigvalsh(dense[name])[[0, -1]], table.loc[name]
        assert row["lambda_min_low"] - 1e-12 <= ends[0] <= row["lambda_min_high"] + 1e-12
        assert row["lambda_max_low"] <= ends[1] <= row["lambda_max_high"]


def test_the_ends_of_the_hessian_take_more_steps_than_those_of_sources(case: cs.Problem):
    cfg = propagation.Config(max_exact=0, num_probes=2, num_steps=6, num_map_probes=0)
    few = extreme_ends(cs.Hessian(case), num_steps=6)
    found = propagation.measure(case, cfg, []).ends
    assert found["H"].residuals.max() < few.residuals.max()
