"""The study `compare`: differences against dense matrices, matching of blocks, refusals, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from commands import call
from curvescope.algorithms.estimates.intervals import student
from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.operators import GGN, Hessian
from curvescope.sampling import split_sample
from curvescope.sampling.statistics import degrees_of
from curvescope.studies import find
from curvescope.studies.compare import Comparison, Config, run
from curvescope.studies.compare.study import EQUAL, LARGER, OPEN, QUANTITIES, SMALLER, Estimate, split
from curvescope.studies.compare.view import changed
from curvescope.studies.problem_config import make_problem

SMALL = "n_layers = {}\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\nnorm = {!r}\n"
FEW = {"data": "task:addition", "dtype": "float64", "batch_size": 64, "num_probes": 4, "num_steps": 12}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, depth, norm in (("pre", 1, "pre"), ("post", 1, "post"), ("deep", 2, "pre")):
        found[name] = str(folder / f"{name}.toml")
        (folder / f"{name}.toml").write_text(SMALL.format(depth, norm).replace("'", '"'), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def compared(models, few_sequences):
    cfg = Config.from_dict({**FEW, "models": [models["pre"], models["post"]], "max_exact": 500})
    state = {}
    return cfg, run(cfg, state=state), state


def dense(cfg, side, kind, *blocks):
    return kind(make_problem(cfg.asked()[side].cfg), *blocks).to_dense()


def test_differences_are_those_of_dense_matrices(compared):
    cfg, found, _ = compared
    values = []
    for side in range(2):
        H, G = dense(cfg, side, Hessian), dense(cfg, side, GGN)
        h, g = torch.linalg.eigvalsh(H), torch.linalg.eigvalsh(G)
        loss = make_problem(cfg.asked()[side].cfg).loss_value()
        share, gap = (H - G).norm() / H.norm(), 1 - g[-1] / h[-1]
        values.append([loss, h[-1], h[0], H.trace(), H.norm(), g[-1], G.trace(), share, gap])
    expected = np.array(values, dtype=float)
    numerical = replace(found, sides=[replace(side, sampled={}) for side in found.sides])
    for i, name in enumerate(QUANTITIES):
        difference = numerical.difference(1, name)
        wanted = expected[1, i] - expected[0, i]
        assert difference == pytest.approx((wanted,) * 3, rel=1e-8, abs=1e-8), name
        assert difference.verdict == (LARGER if wanted > 0 else SMALLER)
        if expected[:, i].min() > 0:
            assert found.ratio(1, name).value == pytest.approx(expected[1, i] / expected[0, i])
    rows = found.tables()["differences"].set_index("quantity")
    assert rows["difference"].to_numpy() == pytest.approx(expected[1] - expected[0], rel=1e-8, abs=1e-8)


def test_blocks_are_those_of_dense_matrices(compared):
    cfg, found, _ = compared
    assert found.alone == {}
    for block in ("E", "L0.W_V"):
        norms = [float(dense(cfg, side, Hessian, block).norm()) for side in range(2)]
        assert found.ratio(1, "‖H‖_F", block).value == pytest.approx(norms[1] / norms[0])
    assert set(found.tables()["blocks"]["block"]) == set(found.blocks)


def test_estimates_hold_the_exact_numbers(compared, models):
    cfg, exact, _ = compared
    few = run(Config.from_dict({**FEW, "models": list(cfg.models), "max_exact": 0}))
    assert not few.sides[0].whole.hessian.exact
    for name in QUANTITIES:
        difference, truth = few.difference(1, name), exact.difference(1, name).value
        room = 1e-6 * max(1.0, abs(truth))
        assert difference.low - room <= truth <= difference.high + room, name


def test_models_of_one_file_name_are_no_data_sets(compared):
    _, found, _ = compared
    sides = [replace(side, model="m", name=f"{i}/m.toml") for i, side in enumerate(found.sides)]
    assert replace(found, sides=sides).subjects() == ["0/m.toml", "1/m.toml"]
    assert replace(found, sides=sides, on_data=None).subjects() == ["0/m.toml", "1/m.toml"]


def test_differences_on_the_same_sequences_are_paired(compared):
    cfg, found, _ = compared
    first, second = (side.sampled["loss"] for side in found.sides)
    problems = [make_problem(asked.cfg) for asked in cfg.asked()]
    shares = [split_sample(Hessian(p), most=8) for p in problems]
    losses = [np.array([group.problem.loss_value() for group in s.groups]) for s in shares]
    d = shares[0].weights * ((losses[1] - losses[0]) - (second.value - first.value))
    G = len(d)
    half = student(degrees_of(d)) * np.sqrt(G / (G - 1) * ((d - d.mean()) ** 2).sum())
    difference = found.difference(1, "loss")
    assert difference.high - difference.value == pytest.approx(half, rel=1e-6)
    assert half < student(G - 1) * math.hypot(first.sampling, second.sampling)


def test_equal_sides_are_told_to_be_equal(compared):
    _, found, _ = compared
    same = replace(found, sides=[found.sides[0], replace(found.sides[0], name="same.toml")])
    assert same.opening().startswith("same.toml against pre.toml: all 9 ")
    two, more = Estimate(2.0, 2.0, 2.0), Estimate(2.044, 2.044, 2.044)
    first = SimpleNamespace(name="a", quantity=lambda name, block: two, sampled={})
    loss = {"loss": more}
    second = SimpleNamespace(name="b", quantity=lambda name, block: loss.get(name, two), sampled={})
    said = replace(found, sides=[first, second]).opening()
    assert said.startswith("b against a: larger: loss (1.02-fold); equal: λ_max, ")


def test_every_ratio_of_the_tables_has_its_interval(compared):
    _, found, _ = compared
    row = found.tables()["differences"].set_index("quantity").loc["‖H‖_F"]
    assert tuple(row[["ratio", "ratio low", "ratio high"]]) == found.ratio(1, "‖H‖_F")


def test_it_goes_on_with_the_same_numbers_and_can_be_saved(compared, tmp_path):
    cfg, found, state = compared
    kept = {name: piece for name, piece in state.items() if "block" not in name}
    again = run(cfg, state=kept)
    assert again.difference(1, "trace") == found.difference(1, "trace")
    assert again.sides[1].blocks["E"].trace == found.sides[1].blocks["E"].trace
    found.save(tmp_path)
    loaded = Result.load(tmp_path)
    assert isinstance(loaded, Comparison)
    assert loaded.tables()["blocks"].equals(found.tables()["blocks"])
    assert loaded.opening() == found.opening()
    assert set(loaded.captions()) >= {*loaded.tables(), "quantities", "density", "block_ratios"} - {"sides"}


def test_blocks_without_a_partner_are_listed(models, few_sequences):
    settings = {
        **FEW,
        "models": [models["pre"], models["deep"]],
        "blocks": ["L*.W_V"],
        "num_density_probes": 0,
    }
    found = run(Config.from_dict(settings))
    assert found.blocks == ["L0.W_V"]
    assert found.alone == {"deep.toml": ["L1.W_V"]}
    assert any("L1.W_V" in note and "deep.toml" in note for note in found.notes)
    assert found.tables()["without_partner"]["block"].tolist() == ["L1.W_V"]
    assert "density" not in found.figures()


def test_one_model_on_two_data_sets(tmp_path):
    for name, words in (("a", "def f(x): return x\n"), ("b", "the quick brown fox\n")):
        (tmp_path / f"{name}.txt").write_text(40 * words, encoding="utf-8")
    names = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    cfg = Config.from_dict(
        {"datasets": names, "tokens": 32, "seq_len": 16, "blocks": ["L0.W_V"], "num_density_probes": 0,
         "num_probes": 2, "num_steps": 2, "num_block_probes": 2, "num_block_steps": 2}
    )  # fmt: skip
    found = run(cfg)
    losses = [make_problem(asked.cfg).loss_value() for asked in cfg.asked()]
    assert found.difference(1, "loss").value == pytest.approx(losses[1] - losses[0])
    assert [side.name for side in found.sides] == ["a.txt", "b.txt"]
    assert found.subjects() == ["tiny-gpt on a.txt", "tiny-gpt on b.txt"]
    assert not found.alike
    assert not any("different tokens" in note for note in found.notes)  # what is compared


@pytest.mark.parametrize(
    ("a", "b", "difference", "verdict"),
    [
        ((1, 0.5, 1.5), (3, 2, 4), (2, 0.5, 3.5), LARGER),
        ((3, 2, 4), (1, 0.5, 1.5), (-2, -3.5, -0.5), SMALLER),
        ((1, 0.5, 1.5), (1.2, 1, 1.4), (0.2, -0.5, 0.9), OPEN),
        ((1, 1, 1), (1, 1, 1), (0, 0, 0), EQUAL),
        ((1, math.nan, math.nan), (9, 8, 10), None, OPEN),
    ],
)
def test_a_difference_has_the_interval_of_both(a, b, difference, verdict):
    found = Estimate(*b).minus(Estimate(*a))
    assert difference is None or found == pytest.approx(difference)
    assert found.verdict == verdict


def test_a_ratio_has_the_interval_of_both():
    assert Estimate(6, 4, 8).over(Estimate(2, 1, 4)) == pytest.approx((3, 1, 8))
    assert Estimate(6, 4, 8).over(Estimate(2, -1, 4)) == (3, 1, math.inf)
    assert math.isnan(Estimate(6, 4, 8).over(Estimate(-2, -3, -1)).value)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Estimate(0.0027, -0.1, 0.13), "smaller: the difference is within -0.650 to -0.420"),
        (Estimate(0.11, 0.10, 0.12), "smaller: the difference is within -0.450 to -0.430, 0.200-fold"),
    ],
)
def test_a_ratio_is_told_where_its_interval_leaves_it_to(after: Estimate, said: str):
    before = Estimate(0.55, 0.55, 0.55)
    assert changed(after.minus(before), after.over(before)) == said


def test_a_revision_stands_behind_the_model(tmp_path, monkeypatch):
    assert split("tiny-gpt@early") == ("tiny-gpt", "early")
    assert split("me/model") == ("me/model", None)
    assert split("@x") == ("@x", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run@2").mkdir()
    assert split("run@2") == ("run@2", None)
    assert [asked.name for asked in Config().asked()] == ["tiny-gpt@initial", "tiny-gpt@final"]
    assert Config.from_dict(Config(models=("tiny-gpt@early", "tiny-gpt")).to_dict()).revision == "early"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"models": ("gpt2",)}, "two or more"),
        ({"model": "gpt2"}, "two or more"),
        ({"models": ("a", "a")}, "'a' twice"),
        ({"models": ("a", "b"), "datasets": ("x", "y")}, "got both"),
        ({"models": ("a", "b"), "model": "c"}, "got model='c'"),
    ],
)
def test_what_cannot_be_compared_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Config(**settings)


@pytest.mark.usefixtures("undrawn", "few_sequences")
def test_the_command_is_the_study(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("curvescope.studies.time_budget.Timer._timed", lambda self: 0.001)
    small = ("batch_size=64", "num_probes=2", "num_steps=4", "num_density_probes=0", "num_block_probes=2")
    few = [word for pair in small for word in ("--set", pair)]
    words = ["--data", "task:addition", "--blocks", "L0.W_V", "--out", tmp_path, *few]
    code, out, err = call("compare", models["pre"], models["post"], *words, "--json", capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert {row["quantity"] for row in found["tables"]["differences"]} == set(QUANTITIES)
    sides = f"models={models['pre']},{models['post']}"
    code, out, err = call("run", "compare", "--set", sides, *words, "-q", capsys=capsys)
    assert (code, out) == (0, f"{found['folder']}\n"), err  # found finished
    code, _, err = call("compare", "tiny-gpt@erly", "tiny-gpt", capsys=capsys)
    assert code == 2
    assert "erly" in err
    assert find("compare").plan is not None
