"""The study `activations`: its numbers are those of dense blocks, its directions lead down the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import curvescope as cs
from commands import call
from curvescope.core.result import Result
from curvescope.studies import activations, find
from curvescope.studies.activations.study import KINDS, choose_points, token_names
from oracles import transformer
from selection import pairs

POINTS = ("L3.out", "L2.h1.out", "final")
SMALL: dict[str, Any] = {"tokens": 12, "seq_len": 6, "points": POINTS, "num_steps": 4, "num_probes": 2}


def problem(sizes: tuple[int, ...] = (3,), **settings: Any) -> cs.Problem:
    ids = torch.randint(0, 5, (3, 5), generator=torch.Generator().manual_seed(0))
    ids[1, 2] = ids[1, 1]
    parts = zip(ids[:, :-1].split(sizes), ids[:, 1:].split(sizes), strict=True)
    return cs.Problem(transformer(n_layers=2, **settings), [cs.Batch(x, y) for x, y in parts])


@pytest.mark.parametrize(("at", "matrix"), pairs(["embed", "L1.h0.out"], ["hessian", "ggn"]))
def test_every_token_is_its_dense_block(at: str, matrix: Any):
    case = problem()
    found = activations.token_curvature(case, at, matrix=matrix)
    kind = cs.ActivationHessian if matrix == "hessian" else cs.ActivationGGN
    op = kind(case, at)
    A, w = op.to_dense() * case.num_terms, op.width
    gradient, x = op.gradient().view(-1, w) * case.num_terms, op.values().view(-1, w)
    assert list(zip(found.sequence, found.position, strict=True)) == op.tokens
    assert found.exact
    for m in range(len(op.tokens)):
        values = torch.linalg.eigvalsh(A[m * w : m * w + w, m * w : m * w + w])
        assert found.lambda_max[m] == pytest.approx(float(values[-1]), abs=1e-9)
        assert found.lambda_min[m] == pytest.approx(float(values[0]), abs=1e-9)
        assert found.trace[m] == pytest.approx(float(values.sum()), abs=1e-9)
        assert found.slope[m] == pytest.approx(float(gradient[m].norm()), abs=1e-9)
        assert found.relative[m] == pytest.approx(float(values[-1] * x[m].norm() ** 2), abs=1e-8)


def test_numbers_do_not_depend_on_other_data_or_batches():
    whole = activations.token_curvature(problem(), "L0.mid")
    cut = activations.token_curvature(problem((1, 2)), "L0.mid")
    np.testing.assert_allclose(cut.lambda_max, whole.lambda_max, atol=1e-10)
    np.testing.assert_array_equal(cut.sequence, whole.sequence)
    first = cs.Problem(problem().model, [problem().batches[0][:1]])
    alone = activations.token_curvature(first, "L0.mid")
    np.testing.assert_allclose(alone.trace, whole.trace[:4], atol=1e-10)


def test_wide_states_by_lanczos():
    case = problem(d_model=24, n_heads=2, d_ff=6)
    found = activations.token_curvature(case, "L1.out", num_steps=14, num_probes=6)
    truth = activations.token_curvature(case, "L1.out", num_steps=24)
    assert truth.exact
    assert not found.exact
    np.testing.assert_allclose(found.lambda_max, truth.lambda_max, rtol=1e-6)
    scale = np.abs(truth.lambda_max)
    assert (np.abs(found.trace - truth.trace) <= 5 * found.trace_stderr + 1e-6 * scale).all()


def test_the_sharpest_direction_is_told_on_the_side_where_the_loss_falls():
    case = problem()
    found = activations.token_curvature(case, "final", k=1)
    U = case.model.module.get_parameter("U").detach()
    U = U - U.mean(1, keepdim=True)
    op = cs.ActivationHessian(case, "final")
    for m, slope in enumerate(op.gradient().view(-1, op.width)):
        block = cs.ActivationHessian(case, "final", tokens=op.tokens[m]).to_dense()
        u = torch.linalg.eigh(block).eigenvectors[:, -1]
        u = -u * torch.sign(u @ slope)
        assert found.towards[m] == f"'[{int((u @ U).argmax())}]'"
        assert found.away[m] == f"'[{int((-u @ U).argmax())}]'"
    assert token_names(case, found)[0] == f"[{int(case.batches[0].inputs[0, 0])}]"


STATE: dict[str, Result] = {}


@pytest.fixture(scope="module")
def result() -> activations.Activations:
    return activations.run(activations.Config(**SMALL), state=STATE)


def test_a_run_goes_on_where_it_was_stopped(result: activations.Activations):
    state, said = dict(STATE), list[str]()
    assert list(state) == ["contents", *(f"tokens at {at}" for at in POINTS)]
    del state["tokens at final"]
    later = activations.run(
        activations.Config(**SMALL), progress=lambda what, number, total: said.append(what), state=state
    )
    assert said == ["tokens at final"]
    for a, b in zip(result.points, later.points, strict=True):
        np.testing.assert_array_equal(a.lambda_max, b.lambda_max)
        np.testing.assert_array_equal(a.trace, b.trace)


def test_what_is_shown(result: activations.Activations, tmp_path: Path):
    tables, figures = result.tables(), result.figures()
    assert set(tables) | set(figures) == set(result.captions())
    assert len(tables["tokens"]) == 3 * 12
    assert list(tables["tokens"].columns[:5]) == ["sequence", "position", "token", "point", "lambda_max"]
    assert tables["points"]["width"].tolist() == [96, 24, 96]
    assert (tables["tokens"]["towards"] != "").all()
    assert activations.Activations.load(result.save(tmp_path)).texts == result.texts
    assert find("activations").Config is activations.Config


def test_the_command_line(tmp_path: Path, undrawn: None, capsys: Any):
    settings = [f"--set={k}={v}" for k, v in {**SMALL, "points": "final"}.items()]
    code, _, _ = call("run", "activations", *settings, "--out", tmp_path, "--quiet", capsys=capsys)
    assert code == 0
    (folder,) = (tmp_path / "activations").iterdir()
    assert (folder / "tables" / "tokens.csv").exists()


def test_points_that_are_chosen():
    model = cs.load("tiny-gpt")
    assert choose_points((), model) == ["embed", *(f"L{i}.out" for i in range(4)), "final"]
    with pytest.raises(cs.UsageError, match=r"L3\.mid"):
        choose_points(("L3.middle",), model)


def test_layers_are_computed_again_where_that_is_set(monkeypatch):
    kept, again = (activations.token_curvature(problem(), "L0.mid", checkpoint=c) for c in (False, True))
    np.testing.assert_allclose(again.lambda_max, kept.lambda_max, rtol=1e-8, atol=1e-12)
    heard: list[bool] = []

    class Heard(cs.ActivationHessian):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            heard.append(self.engine.checkpoint)

    monkeypatch.setitem(KINDS, "hessian", Heard)
    activations.run(activations.Config(**SMALL, checkpoint=True))
    assert heard
    assert all(heard)
