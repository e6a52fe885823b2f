"""The study `sinks`: ends within their errors of dense ones, bulk and outliers by their formula, pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import curvescope as cs
import oracles
from curvescope.core.seeds import probes
from curvescope.models.capture import capture
from curvescope.models.running.attention_interventions import changed_attention
from curvescope.studies import find, sinks
from curvescope.studies.common.statistics import mean_interval
from curvescope.studies.sinks.analysis import (
    HOWS,
    UNCHANGED,
    Intervention,
    RitzLines,
    SinkEffect,
    effect,
    find_sinks,
    groups,
    measure_lines,
    possible,
    sink_mass,
    thresholds,
)
from curvescope.studies.sinks.study import cut_texts

LAST = {"bias": 4.0, "key": 2.0, "inserted": 2.0, "softmax_one": 2.0, "gated": 0.5, "activation": 2.0}
SMALL = {"biases": (4.0,), "strengths": (2.0,), "gates": (0.5,), "texts": 2, "num_probes": 2, "num_steps": 6}


def problem(**settings: Any) -> cs.Problem:
    small = {"d_model": 2, "n_heads": 1, "d_ff": 2, "n_ctx": 6, "vocab_size": 3, "norm_kind": "rmsnorm"}
    module = oracles.transformer(**{**small, **settings})
    tokens = torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(0))
    return cs.Problem(module, (tokens[:, :-1], tokens[:, 1:]))


@pytest.fixture(scope="module")
def case() -> cs.Problem:
    return problem()


@pytest.fixture(scope="module")
def result(case: cs.Problem) -> sinks.Sinks:
    return sinks.measure(case, sinks.Config(**SMALL, block_steps=2), ["a note"])


def dense(text: cs.Problem, way: Intervention) -> np.ndarray:
    moved = cs.Problem(text.model, way.batches(text.batches, 0), text.loss)
    with changed_attention(text.model, way.change):
        H = cs.Hessian(moved, engine="autograd").to_dense().numpy()
    return (H + H.T) / 2


@pytest.mark.parametrize("how", HOWS)
def test_both_ends_lie_within_their_errors_of_dense_ones(case: cs.Problem, result: sinks.Sinks, how: str):
    for x, text in enumerate(cut_texts(case, 2)):
        values = np.linalg.eigvalsh(dense(text, Intervention(how, LAST[how])))
        found = result.moved[f"{how}.{LAST[how]:g}"].hessian.ends()
        assert np.abs(values - found.top[x]).min() <= found.top_error[x]
        assert np.abs(values - found.bottom[x]).min() <= found.bottom_error[x]
        assert found.top[x] <= values[-1] + 1e-9
        assert found.top[x] > values[-1] - 0.2 * abs(values[-1])


def test_bulk_and_outliers_are_what_the_formula_says(case: cs.Problem):
    H = dense(case, Intervention("bias", 4.0))
    n = len(H)
    with changed_attention(case.model, Intervention("bias", 4.0).change):
        lines = measure_lines(cs.Hessian(case), num_probes=3, num_steps=n, seed=1)
    values, vectors = np.linalg.eigh(H)
    tau = 0.2 * np.abs(values).max()
    share = (vectors.T @ probes(n, 3, seed=1).numpy()) ** 2  # (n, P) of each eigenvector in each probe
    far = (values / tau) ** 4 / (1 + (values / tau) ** 4)
    outliers = far @ share
    width = np.sqrt((values**2 * (1 - far)) @ share / (n - outliers))
    found = lines.split(np.array([tau]))
    np.testing.assert_allclose(found.outliers[0], outliers, rtol=1e-6)
    np.testing.assert_allclose(found.width[0], width, rtol=1e-6)


def test_strength_zero_is_the_unchanged_model(case: cs.Problem, result: sinks.Sinks):
    for how in HOWS:
        assert Intervention(how, 0.0).name == UNCHANGED
    loss = result.moved[UNCHANGED].loss
    np.testing.assert_allclose(loss, [text.loss_value() for text in cut_texts(case, 2)], rtol=1e-12)
    table = result.tables()["sinks"]
    start = table[table["strength"] == 0]
    assert list(start["how"]) == list(HOWS)
    assert np.allclose(start["lambda_max_times"], 1)
    assert (start["bulk_width_direction"] == 0).all()


@pytest.mark.parametrize("token", [-1, 3, 99999])
def test_a_token_outside_of_the_vocabulary_is_refused_before_the_work(case: cs.Problem, token: int):
    begun: list[str] = []
    cfg = sinks.Config(**SMALL, token=token)
    with pytest.raises(cs.UsageError, match=f"expected an id from 0 to 2 of .*, got {token}"):
        sinks.measure(case, cfg, [], progress=lambda what, *_: begun.append(what))
    assert not begun


def test_inserted_tokens_leave_the_terms_as_they_are(case: cs.Problem):
    moved = cs.Problem(case.model, Intervention("inserted", 2.0).batches(case.batches, 1), case.loss)
    assert moved.num_terms == case.num_terms
    front = torch.ones(4, 2, dtype=torch.int64)
    z = case.model.evaluate(torch.cat([front, case.batches[0].inputs], dim=1))[:, 2:]
    own = torch.nn.functional.cross_entropy(z.flatten(0, 1), case.batches[0].targets.flatten())
    assert math.isclose(moved.loss_value(), float(own), rel_tol=1e-12)


def test_sink_mass_counts_what_no_later_token_gets(case: cs.Problem):
    P = capture(case.model, case.batches[0].inputs, "L0.attn.pattern")["L0.attn.pattern"]
    assert math.isclose(
        sink_mass(case.model, case.batches, Intervention("", 0.0)), float(P[:, :, 1:, 0].mean())
    )
    kept = 1 - sink_mass(case.model, case.batches, Intervention("softmax_one", 3.0))
    assert 0 < kept < 1 - sink_mass(case.model, case.batches, Intervention("", 0.0))
    gated = sink_mass(case.model, case.batches, Intervention("gated", 0.5))
    assert math.isclose(gated, sink_mass(case.model, case.batches, Intervention("", 0.0)), rel_tol=1e-12)
    assert sink_mass(case.model, case.batches, Intervention("bias", 30.0)) > 0.999


def test_sinks_are_found_where_they_were_planted():
    case = problem(d_model=4, n_heads=2, n_kv_heads=1, positions="learned")
    with torch.no_grad():
        case.model.module.get_parameter("P")[0] += torch.tensor([40.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = find_sinks(case.model, case.batches)
    P = capture(case.model, case.batches[0].inputs, "L0.attn.pattern")["L0.attn.pattern"]
    np.testing.assert_allclose(found.mass, P[:, :, 1:, 0].mean((0, 2))[None])
    assert found.points == ["in", "L0"]
    assert found.massive[0] > 5 * found.massive_others[0]
    layer: Any = case.model.module.get_submodule("L0")
    read = capture(case.model, case.batches[0].inputs, "L0.attn.in")["L0.attn.in"]
    norms = layer.values(read)[:, 0].norm(dim=-1).detach()
    truth = float((norms[:, 0] / norms[:, 1:].mean(-1)).mean())
    np.testing.assert_allclose(found.values, [[truth, truth]])


def made_up(factor: float, *, noise: float = 0.01) -> RitzLines:
    """Two texts, three probes and six steps; every eigenvalue times a factor, with some noise of probes."""
    alpha = np.array([3.0, 0.5, -1.0, 0.2, 0.1, 0.0]) * factor * np.ones((2, 3, 1))
    alpha *= 1 + noise * np.arange(3)[None, :, None]
    beta = np.full((2, 3, 6), 0.05 * factor)
    beta[..., -1] = 0
    return RitzLines(alpha, beta, np.full((2, 3), 6), 100, 1e-16)


def test_a_move_is_sure_only_if_other_texts_would_move_alike():
    def moved(*factors):
        mean, low, high = np.exp(mean_interval(np.log(np.array(factors))))
        return SinkEffect(
            np.array(factors), np.full(len(factors), 1e-3), float(mean), float(low), float(high)
        )

    assert moved(1.05, 20.0).direction == 0  # both texts moved up, other texts may not
    assert moved(2.0, 2.1).direction == 1
    assert moved(0.5, 0.51).direction == -1
    assert moved(2.0).direction == 0  # a single text


def test_effects_are_paired():
    one = {
        name: sinks.SinkSpectra(np.ones(2), np.ones(2), made_up(factor), made_up(factor))
        for name, factor in {UNCHANGED: 1.0, "bias.1": 1.1, "bias.2": 0.7}.items()
    }
    heads = find_sinks(problem().model, problem().batches)
    result = sinks.Sinks("m", "d", "l", [8.0, 8.0], 100, 0.2, heads, ["bias"] * 2, [1.0, 2.0], one, {})
    up, down = (effect(result, name, "lambda_max") for name in ("bias.1", "bias.2"))
    assert up.direction == 1
    assert down.direction == -1
    assert math.isclose(up.mean, 1.1)
    assert effect(result, UNCHANGED, "bulk_width").direction == 0
    wide = effect(result, "bias.1", "bulk_width")
    assert 1 < wide.mean < 1.1  # outliers count no more than the threshold, which is fixed
    assert (thresholds(result) > 0.6).all()


@pytest.mark.usefixtures("unrendered")
def test_tables_and_figures_are_complete(result: sinks.Sinks):
    tables = result.tables()
    promised = {"how", "strength", "sink_mass", "lambda_max", "lambda_max_error", "bulk_width"}
    assert promised | {"bulk_width_error", "loss", "outliers", "ggn_lambda_max"} <= set(tables["sinks"])
    assert len(tables["sinks"]) == 2 * len(HOWS)
    assert len(tables["texts"]) == 4 * len(HOWS)
    assert {"layer", "head", "sink_mass", "value_norm"} <= set(tables["heads"])
    assert set(tables["blocks"]["how"]) == {UNCHANGED, *HOWS}
    assert set(result.captions()) == {*tables, *result.figures()}
    assert ("note", "", "a note") in result.summary()


def test_blocks_are_those_of_the_dense_matrix(case: cs.Problem, result: sinks.Sinks):
    text = cut_texts(case, 2)[0]
    H, where = dense(text, Intervention("bias", 4.0)), case.space().slices
    found = result.blocks["bias.4"]
    assert found.names == list(groups(case))
    rows = np.concatenate(
        [np.arange(s.start, s.stop) for name, s in where.items() if name in ("L0.W_Q", "L0.W_K")]
    )
    values = np.linalg.eigvalsh(H[np.ix_(rows, rows)])
    i = found.names.index("queries, keys")
    assert np.abs(values - found.values[i]).min() <= found.errors[i] + 1e-12


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_numbers(case: cs.Problem):
    cfg, state, calls = sinks.Config(**SMALL, hows=("bias",), block_steps=0), {}, []

    def stop(what: str, number: int, total: int) -> None:
        calls.append(what)
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sinks.measure(case, cfg, [], progress=stop, state=state)
    again = sinks.measure(case, cfg, [], progress=lambda what, *_: calls.append(what), state=state)
    assert calls == ["where sinks are", "unchanged", *2 * ["score bias at the first key: 4"]]
    fresh = sinks.measure(case, cfg, [])
    assert np.array_equal(again.moved["bias.4"].hessian.alpha, fresh.moved["bias.4"].hessian.alpha)


def test_what_cannot_be_grown_is_left_out_with_a_sentence():
    linear = problem(attention="linear")
    ways, notes = possible([Intervention(how, 1.0) for how in HOWS], linear.model, linear.batches)
    assert [way.how for way in ways] == ["inserted", "activation"]
    assert "it is linear" in notes[0]
    ways, notes = possible([Intervention("inserted", 9.0)], problem().model, problem().batches)
    assert not ways
    assert "13 positions are more than the 6" in notes[0]
    cfg = sinks.Config(
        **{**SMALL, "texts": 9, "num_steps": 4, "ggn_steps": 2}, hows=("bias", "inserted"), block_steps=0
    )
    found = sinks.measure(linear, cfg, [])
    assert np.isnan(found.moved["inserted.2"].mass).all()
    assert any("make 4 texts, not 9" in note for note in found.notes)


def test_the_study_is_found_and_refuses_bad_settings():
    assert find("sinks").Config is sinks.Config
    assert len(sinks.Config().ways) == 3 + 1 + 4
    for bad, words in (
        ({"hows": ("twist",)}, "expected some of bias, key"),
        ({"gates": (1.5,)}, "above 0 and at most 1"),
        ({"strengths": (0.0,)}, "strengths above 0"),
        ({"num_probes": 1}, "num_probes: expected at least 2"),
    ):
        with pytest.raises(cs.UsageError, match=words):
            sinks.Config(**bad)


def test_weights_may_be_kept_in_half_precision():
    module, batches = problem().model.module.bfloat16(), problem().batches
    half, wide = (find_sinks(cs.load(module, dtype=kind), batches) for kind in (None, "float32"))
    assert half.notes == wide.notes == []
    for name in ("mass", "values", "massive", "massive_others"):
        np.testing.assert_allclose(getattr(half, name), getattr(wide, name), rtol=1e-5)
