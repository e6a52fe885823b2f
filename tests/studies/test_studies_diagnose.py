"""The study `diagnose`: every planted fault is found, a healthy model is left alone, numbers are right."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diagnose_cases import CFG, problem

import curvescope as cs
from commands import call
from curvescope.models.capture import capture
from curvescope.models.load import load
from curvescope.models.zoo.folder import save
from curvescope.runs.resumable_loop import Contents
from curvescope.studies import diagnose, find
from curvescope.studies.diagnose.checks import CHECKS, Finding, Seen, below, dead_heads, judged
from curvescope.studies.diagnose.measurements import (
    by_layer,
    first_equal,
    measure_depth,
    measure_heads,
    measure_rows,
    sgd_sharpness,
)
from saved_models import save_family


@pytest.fixture(scope="module")
def healthy() -> cs.Problem:
    return problem()


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def found(healthy: cs.Problem, state: dict[str, Any]) -> diagnose.Diagnosis:
    return diagnose.diagnose(healthy, replace(CFG, block_steps=4), state=state)


def spoilt(source: cs.Problem, change: Callable[[dict[str, torch.Tensor]], None]) -> cs.Problem:
    """With weights of its own, changed."""
    model = replace(source.model, module=copy.deepcopy(source.model.module))
    with torch.no_grad():
        change(dict(model.named_parameters()))
    return cs.Problem(model, source.batches)


def times(factor: float, *fronts: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda ps: [p.mul_(factor) for name, p in ps.items() if name.startswith(fronts)]


def remeasured(piece: str) -> Callable[[cs.Problem, Seen], Seen]:
    """One of the measurements again, on the spoilt model."""
    measure: dict[str, Callable[[cs.Problem], Any]] = {
        "rows": lambda p: measure_rows(p, CFG.effort),
        "heads": measure_heads,
        "depth": measure_depth,
    }
    return lambda p, seen: seen._replace(**{piece: measure[piece](p)})


def new_loss(p: cs.Problem, seen: Seen) -> Seen:
    return seen._replace(whole=replace(seen.whole, loss=p.loss_value()))


Change = Callable[[dict[str, torch.Tensor]], Any]
PLANTED: dict[str, tuple[Change, Callable[[cs.Problem, Seen], Seen]]] = {
    "uneven_layers": (times(30.0, "L1.W_"), remeasured("rows")),
    "flat_blocks": (lambda ps: ps["L2.b_1"].fill_(-100.0), remeasured("rows")),
    "saturated_attention": (times(100.0, "L1.W_Q", "L1.W_K"), remeasured("heads")),
    "dead_heads": (lambda ps: ps["L1.W_O"][4:].zero_(), remeasured("heads")),
    "embedding_scale": (times(100.0, "E", "P"), remeasured("depth")),
    "confidence": (times(30.0, "U"), new_loss),
}


def test_a_healthy_model_is_not_accused(found: diagnose.Diagnosis):
    assert not found.unusual
    assert {check.name for check in found.findings} == {"learning_rate", "block_learning_rate"}
    assert "nothing unusual" in found.summary()[0][2]
    assert [check.name for check in found.checks if check.severity == "not looked at"] == []
    assert {check.name for check in found.checks} == set(CHECKS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(healthy: cs.Problem, found: diagnose.Diagnosis, name: str):
    change, again = PLANTED[name]
    check = CHECKS[name](again(spoilt(healthy, change), seen_of(found)))
    assert check.severity in ("fault", "warning")
    assert check.meaning
    assert check.advice
    assert "diagnosis: planted" in check.evidence
    assert CHECKS[name](seen_of(found)).severity == "fine"


def seen_of(result: diagnose.Diagnosis) -> Seen:
    names = [name for name in Seen._fields if name != "learning_rate"]
    return Seen(**{name: getattr(result, name) for name in names})


@pytest.mark.parametrize(("share", "severity"), [(2.0, "fault"), (0.5, "fine")])
def test_a_learning_rate_is_told_from_the_ceiling(
    healthy: cs.Problem, found: diagnose.Diagnosis, share: float, severity: str
):
    top = cs.eigsh(cs.Hessian(healthy, engine="autograd"), 1, which="LA", tol=1e-4, vectors=False).values[0]
    seen = seen_of(found)._replace(learning_rate=share * 2 / float(top))
    check = CHECKS["learning_rate"](seen)
    assert check.severity == severity
    assert check.value == pytest.approx(share, rel=0.05)
    assert check.error > 0
    assert CHECKS["block_learning_rate"](seen._replace(learning_rate=1e6)).severity == "fault"


@pytest.mark.parametrize("share", [0.7, 0.99, 1.2])
def test_a_rate_within_the_error_of_the_ceiling_is_a_note_with_a_lower_rate(
    found: diagnose.Diagnosis, share: float
):
    ceiling = found.sharpness.max_learning_rate
    wide = replace(found.sharpness, residual=0.5 * found.sharpness.value)
    check = CHECKS["learning_rate"](seen_of(found)._replace(sharpness=wide, learning_rate=share * ceiling))
    assert abs(check.value - check.limit) < check.error
    assert check.severity == "note"
    least = float(check.advice.partition(" ")[0])
    assert least < share * ceiling
    again = CHECKS["learning_rate"](seen_of(found)._replace(sharpness=wide, learning_rate=least))
    assert again.severity == "fine"


@pytest.mark.parametrize(
    ("rate", "said"), [(0.001999, "0.0019"), (0.0020, "0.0020"), (12.99, "12"), (1.0, "1.0")]
)
def test_an_advised_rate_is_not_above_the_one_that_is_safe(rate: float, said: str):
    assert below(rate) == said


def test_momentum_moves_the_ceiling(found: diagnose.Diagnosis):
    heavy = sgd_sharpness(found.whole, 0.9, 0)
    assert heavy.max_learning_rate == pytest.approx(1.9 * found.sharpness.max_learning_rate)


def test_a_post_norm_stack_that_is_not_trained_is_warned_of(found: diagnose.Diagnosis):
    shape = {"n_layers": 12, "d_model": 16, "d_ff": 32, "embed_std": 1.0, "activation": "relu"}
    seen = {}
    for norm in ("post", "pre"):
        deep = problem(**shape, norm=norm)
        gradient = by_layer(deep, deep.gradient())
        parts = replace(found.parts, gradient=gradient, without=np.stack([gradient, gradient]))
        whole = replace(found.whole, loss=deep.loss_value())
        depth = replace(found.depth, norm=norm)
        seen[norm] = seen_of(found)._replace(parts=parts, whole=whole, depth=depth)
    assert CHECKS["norm_placement"](seen["post"]).severity == "warning"
    assert CHECKS["norm_placement"](seen["pre"]).severity == "fine"
    doubtful = replace(
        seen["post"].parts,
        without=seen["post"].parts.without * np.array([np.linspace(1, 9, 12) ** 2, np.ones(12)]),
    )
    open_still = CHECKS["norm_placement"](seen["post"]._replace(parts=doubtful))
    assert (open_still.severity, open_still.advice) == ("note", "")
    learned = replace(seen["post"].whole, loss=1.0)
    assert CHECKS["norm_placement"](seen["post"]._replace(whole=learned)).severity == "fine"


def test_copies_are_counted(healthy: cs.Problem, found: diagnose.Diagnosis):
    batch = healthy.batches[0]
    x, y = batch.inputs, batch.targets
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    data = [cs.Batch(x[:5], y[:5]), cs.Batch(x[3:5], y[3:5]), cs.Batch(x[:1], (y[:1] + 1) % 8)]
    twice = cs.Problem(healthy.model, data)
    assert first_equal(twice).tolist() == [0, 1, 2, 3, 4, 3, 4, 7]
    samples = replace(found.samples, copies=first_equal(twice))
    check = CHECKS["duplicates"](seen_of(found)._replace(samples=samples))
    assert (check.severity, check.value, check.error) == ("warning", 2 / 8, 0.0)
    assert "5 = 3" in check.where


def test_a_sequence_with_a_large_gradient_is_steep(healthy: cs.Problem, found: diagnose.Diagnosis):
    batch = healthy.batches[0]
    alone = cs.Problem(healthy.model, [batch[3:4]])
    samples = found.samples
    assert samples.gradient_norms[3] == pytest.approx(float(alone.gradient().norm()), rel=1e-4)
    assert samples.losses[3] == pytest.approx(alone.loss_value(), rel=1e-5)
    norms = samples.gradient_norms.copy()
    norms[5] *= 100
    check = CHECKS["steep_sequences"](seen_of(found)._replace(samples=replace(samples, gradient_norms=norms)))
    assert (check.severity, check.where) == ("warning", "sequence 5")
    traces = samples.traces * np.where(np.arange(8) == 2, 100, 1)
    check = CHECKS["sharp_sequences"](seen_of(found)._replace(samples=replace(samples, traces=traces)))
    assert (check.severity, check.where) == ("warning", "sequence 2")


@pytest.mark.parametrize(
    ("name", "piece", "values"),
    [
        ("batch_choice", "parts", {"top": np.array([1.0, 1.0, 1.0, 400.0]), "error": np.zeros(4)}),
        ("sinks", "heads", {"mass": np.full((8, 3, 2), 0.9)}),
    ],
)
def test_other_numbers_beyond_their_limits_are_found(
    found: diagnose.Diagnosis, name: str, piece: str, values: dict[str, Any]
):
    seen = seen_of(found)
    check = CHECKS[name](seen._replace(**{piece: replace(getattr(seen, piece), **values)}))
    assert check.severity in ("warning", "note")
    assert CHECKS[name](seen).severity == "fine"


def test_liveness_is_the_trace_of_the_softmax_jacobian(healthy: cs.Problem):
    heads = measure_heads(healthy)
    P = capture(healthy.model, healthy.batches[0].inputs, "L1.attn.pattern")["L1.attn.pattern"].double()
    J = torch.diag_embed(P) - P[..., :, None] * P[..., None, :]
    trace = J.diagonal(dim1=-2, dim2=-1).sum(-1)[:, :, 1:]
    n = torch.arange(2, P.shape[-1] + 1)
    np.testing.assert_allclose(heads.liveness[:, 1], (trace / (1 - 1 / n)).mean(-1).numpy(), rtol=1e-5)
    assert ((heads.liveness > 0) & (heads.liveness <= 1 + 1e-9)).all()


def test_row_norms_of_the_dense_hessian_lie_within_the_errors():
    small = problem(n_layers=1, d_model=4, n_heads=1, d_ff=0, norm_affine=False)
    rows_found = measure_rows(small, replace(CFG, num_shared=60).effort)
    H = cs.Hessian(small, engine="autograd").to_dense().double()
    space = small.space()
    for i, block in enumerate(space):
        squares = rows_found.squares[:, i]
        right = float(H[space.positions(block)].square().sum())
        rounding = 1e-12 * float(H.square().sum())  # all that there is of a key's bias
        assert abs(squares.mean() - right) < 4 * squares.std(ddof=1) / math.sqrt(60) + rounding, block.name


def test_beyond_is_beyond_by_more_than_the_error():
    base = Finding("x", "fault", 2.0, 0.5, 1.0, "", "", "bad", "mend", "seen")
    assert judged(base).severity == "fault"
    assert judged(replace(base, error=1.1)).severity == "fine"
    assert judged(replace(base, below=True)).severity == "fine"
    assert judged(replace(base, value=0.2, below=True)).severity == "fault"
    assert judged(replace(base, error=1.1)).advice == ""
    middle, low, high = replace(base, value=0.5, error=0.1, below=True).excess
    assert low < middle == 2.0 < high


def test_ceilings_of_blocks_are_those_of_the_momentum(healthy: cs.Problem):
    cfg = replace(CFG, block_steps=6, momentum=0.9)
    told = {check.name: check.value for check in diagnose.diagnose(healthy, cfg).checks}
    assert told["block_learning_rate"] >= told["learning_rate"] * 0.99  # no block is sharper than the whole


def test_most_heads_may_be_dead():
    heads = SimpleNamespace(
        why_written="", written=np.array([[0.0, 1e-9, 1.0, 0.0]]), change=np.zeros((1, 4))
    )
    found = dead_heads(SimpleNamespace(heads=heads))
    assert (found.severity, found.value) == ("fault", 0.75)


def test_what_does_not_apply_is_told_with_the_reason():
    mlp = load(cs.MLP(cs.MLPConfig(d_in=4, d_hidden=8, d_out=3, depth=2)))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    result = diagnose.diagnose(cs.Problem(mlp, (x, torch.arange(8) % 3)), CFG)
    unseen = {check.name: check.meaning for check in result.checks if check.severity == "not looked at"}
    assert {"saturated_attention", "sinks", "dead_heads", "uneven_layers", "norm_placement"} <= set(unseen)
    assert all(unseen.values())
    assert not result.unusual


def test_the_result_is_shown_and_saved(found: diagnose.Diagnosis, tmp_path: Path):
    found.save(tmp_path)
    again = diagnose.Diagnosis.load(tmp_path)
    assert [check.name for check in again.checks] == [check.name for check in found.checks]
    tables, figures = again.tables(), again.figures()
    every = {"findings", "checks", "headline", "layers", "blocks", "heads", "sequences", "parts"}
    assert set(tables) == every
    assert set(figures) == {"checks", "layers", "blocks", "heads"}
    assert set(tables) | set(figures) <= set(again.captions())
    assert len(tables["heads"]) == 6
    assert tables["blocks"]["lambda_max"].is_monotonic_decreasing


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, healthy: cs.Problem) -> Path:
    folder = tmp_path_factory.mktemp("diagnose") / "model"
    save(healthy.model, folder)
    return folder


WORDS = [
    "--set",
    "engine=autograd",
    "--set",
    "num_steps=4",
    "--set",
    "block_steps=4",
    "--set",
    "part_steps=4",
]


def test_json_is_a_list_of_findings(saved: Path, tmp_path: Path, undrawn: None, few_sequences: None, capsys):
    words = ["diagnose", saved, "--data", "task:markov", *WORDS, "--out", tmp_path, "--json"]
    code, out, err = call(*words, "--lr", "1000", capsys=capsys)
    assert code == 0
    told = json.loads(out)
    assert isinstance(told, list)
    assert {"name", "severity", "value", "error", "evidence"} <= set(told[0])
    assert told[0]["severity"] == "fault"
    assert "learning_rate" in {each["name"] for each in told if each["severity"] == "fault"}
    assert "8/8" in err
    code, out, err = call(*words[:-1], "--lr", "1000", capsys=capsys)
    assert code == 0
    assert "already finished" in err
    assert "fault: learning_rate" in out
    assert "evidence: Cohen et al. 2021" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "-1"], "lr: expected a learning rate above 0, got -1"),
        (["--optimizer", "lion"], "optimizer: expected one of sgd, adam, adamw, got 'lion'"),
        (["--optimizer", "adam", "--momentum", "0.9"], "momentum is a setting of sgd, got optimizer adam"),
        (["--state", "x.pt"], "optimizer_state is that of adam or adamw, got optimizer sgd"),
        (["--num-steps", "9"], "num_steps is a setting, not an option"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], said: str, tmp_path: Path, capsys):
    code, out, err = call("diagnose", "tiny-gpt", *words, "--out", tmp_path, capsys=capsys)
    assert code == 2
    assert said in err.splitlines()[0]
    assert not out
    assert not list(tmp_path.iterdir())


def test_it_is_a_study_that_goes_on(healthy: cs.Problem, found: diagnose.Diagnosis, state: dict[str, Any]):
    assert find("diagnose").Config is diagnose.Config
    assert isinstance(state["contents"], Contents)
    done: list[str] = []
    again = diagnose.diagnose(
        healthy, replace(CFG, block_steps=4), state=state, progress=lambda what, *_: done.append(what)
    )
    assert not done
    assert [check.severity for check in again.checks] == [check.severity for check in found.checks]


def test_a_hugging_face_folder_is_diagnosed(tmp_path: Path, undrawn: None, capsys):
    pytest.importorskip("transformers")
    folder = save_family(tmp_path / "gpt2", "gpt2")
    few = [
        "--tokens",
        "64",
        "--set",
        "seq_len=8",
        "--set",
        "num_probes=1",
        "--set",
        "block_steps=0",
        "--set",
        "num_shared=2",
    ]
    code, out, _ = call("diagnose", folder, *few, *WORDS[:4], "--out", tmp_path, "--json", capsys=capsys)
    assert code == 0
    told = {each["name"]: each["severity"] for each in json.loads(out)}
    assert told.pop("learning_rate") == "note"
    assert told == {"block_learning_rate": "not looked at"}
