"""The study `prune`: exact on a quadratic at its minimum, surgeons agree, heads are heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.studies import find, prune
from curvescope.studies.common.weight_changes import Effects, Halves, weights
from curvescope.studies.prune import analysis
from curvescope.studies.prune.analysis import (
    BlockMinimum,
    DenseSurgeon,
    HeadRemovals,
    ProductSurgeon,
    Surgeon,
    dense_block,
    descend,
    iterated,
    measure_heads,
    one_shot,
    random_groups,
    sample,
    single_weights,
)
from curvescope.studies.prune.study import Pruned
from curvescope.studies.prune.view import differences

SMALL = cs.TransformerConfig(n_layers=1, d_model=6, n_heads=2, d_ff=8, n_ctx=4, vocab_size=7, seed=3)


def regression() -> Halves:
    """Least squares at its minimum: a quadratic loss without a gradient."""
    source = torch.Generator().manual_seed(0)
    X = torch.randn(30, 8, generator=source, dtype=torch.float64)
    X[:, 1] += X[:, 0]
    y = X @ torch.randn(8, 2, generator=source, dtype=torch.float64)
    y += torch.randn(30, 2, generator=source, dtype=torch.float64)
    net = cs.MLP(cs.MLPConfig(d_in=8, d_out=2, depth=1)).double()
    model = cs.load(net)
    W = torch.linalg.lstsq(X, y).solution
    (name,) = dict(model.named_parameters())
    block = next(iter(model.blocks.values()))
    with torch.no_grad():
        block.put(W, net.get_parameter(name))
    problem = cs.Problem(model, [(X, y)], loss="mse")
    return Halves(problem, problem)


def transformer() -> Halves:
    ids = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(0))
    model = cs.load(cs.Transformer(SMALL).double())
    parts = [(ids[i:j, :-1], ids[i:j, 1:]) for i, j in ((0, 4), (4, 6))]
    return Halves(*(cs.Problem(model, [part]) for part in parts))


def surgeon(halves: Halves, block: str, damping: float, left: torch.Tensor | None = None) -> DenseSurgeon:
    op = cs.GGN(halves.problem, block)
    return DenseSurgeon(torch.as_tensor(dense_block(op, left).matrix), damping)


def test_on_a_quadratic_at_its_minimum_what_is_predicted_comes_out():
    halves = regression()
    (block,) = halves.problem.model.blocks
    own = surgeon(halves, block, 1e-12)
    w = weights(halves.problem, block)
    for sets in (single_weights(w, 5), random_groups(w, 4, 0.3, 0)):
        found = sample(halves, block, own, sets)
        np.testing.assert_allclose(found.obs, found.compensated.measured.mean(1), rtol=1e-7)
        np.testing.assert_allclose(found.plain.predicted.mean(1), found.plain.measured.mean(1), rtol=1e-7)
        assert (found.obs < found.plain.measured.mean(1)).all()
    assert single_weights(w, 5)[0] == w.abs().argmin()
    found = one_shot(halves, block, own, (0.25, 0.5))
    measured = found.at("obs greedy").measured.mean(1)
    np.testing.assert_allclose(found.own[found.methods.index("obs greedy")], measured, rtol=1e-7)
    assert np.isnan(found.own[0]).all()
    assert found.methods[0] == "magnitude"


def test_iterated_removal_keeps_what_is_gone_and_adds_its_prices():
    halves = regression()
    (block,) = halves.problem.model.blocks
    seen = []

    def make(here: Halves, left: torch.Tensor | None) -> Surgeon:
        seen.append((weights(here.problem, block) == 0).sum().item())
        return surgeon(here, block, 1e-12, left)

    found = iterated(halves, block, make, (0.25, 0.5, 0.75))
    assert seen == [0, 4, 8]
    i = found.methods.index("obs iterated")
    np.testing.assert_allclose(found.own[i], found.at("obs iterated").measured.mean(1), rtol=1e-6)
    once = one_shot(halves, block, surgeon(halves, block, 1e-12), (0.75,))
    assert found.own[i, 2] < float(once.at("magnitude").measured.mean())


def test_surgeons_with_and_without_the_matrix_agree(monkeypatch):
    halves, block = transformer(), "L0.W_1"
    op, w = cs.GGN(halves.problem, block), weights(halves.problem, block)
    free = ProductSurgeon(op, 0.3, 0)
    G = torch.as_tensor(dense_block(op).matrix)
    dense = DenseSurgeon(G, free.damping / float(G.diagonal().mean()))  # the estimated diagonal has another λ
    Q = torch.tensor([3, 17, 20])
    wanted, _ = dense.remove(w, Q)
    found, residual = free.remove(w, Q)
    assert residual < 0.011
    assert found.increase == pytest.approx(wanted.increase, rel=1e-3)
    torch.testing.assert_close(free.diagonal.mean(), G.diagonal().mean(), rtol=0.5, atol=0)
    K = cs.KFAC(halves.problem, block, bias="separate").to_dense()
    inverse = torch.linalg.inv(K + free.damping * torch.eye(len(K), dtype=K.dtype))
    tight = {"rtol": 1e-7, "atol": 0.0}  # saliencies are small
    torch.testing.assert_close(free.saliencies(w), w**2 / 2 / inverse.diagonal(), **tight)
    left = torch.ones(len(w), dtype=torch.bool)
    left[::2] = False
    part = ProductSurgeon(op, 0.3, 0, left)
    assert part.remove(w[left], torch.tensor([1]))[0].delta.shape == (24,)
    K += part.damping * torch.eye(len(K), dtype=K.dtype)
    inverse = torch.linalg.inv(K[left][:, left])  # what is gone makes up for nothing
    torch.testing.assert_close(part.saliencies(w[left]), w[left] ** 2 / 2 / inverse.diagonal(), **tight)
    monkeypatch.setattr(analysis, "MOST_LEFT", 23)
    inverse = torch.linalg.inv(K)
    torch.testing.assert_close(part.saliencies(w[left]), (w**2 / 2 / inverse.diagonal())[left], **tight)
    assert part.order(w[left], 2) is None


def test_a_head_without_its_rows_of_W_O_is_a_head_without_values():
    halves = transformer()
    found = measure_heads(halves, cs.GGN(halves.problem, "L0.W_O"), 0, damping=0.1, seed=0)
    problem = halves.problem
    silent = {n: problem.get_parameter(n).detach().clone() for n in ("L0.W_V", "L0.b_V")}
    for name, value in silent.items():
        block = next(iter(problem.space(f"L0.h1.{name[3:]}")))
        block.put(torch.zeros(block.shape, dtype=torch.float64), value)
    wanted = problem.at(silent).loss_value() - problem.loss_value()
    assert found.plain.measured[1].mean() == pytest.approx(wanted, rel=1e-9)
    op, w = cs.GGN(problem, "L0.W_O"), weights(problem, "L0.W_O")
    G, rows = op.to_dense(), torch.arange(18, 36)  # of the second head
    shift = ProductSurgeon(op, 0.1, 0).damping
    wanted, _ = DenseSurgeon(G, shift / float(G.diagonal().mean())).remove(w, rows)
    assert wanted.increase <= found.obs[1] < 1.01 * wanted.increase
    assert found.residual.max() < 0.011


def test_a_descent_over_a_block_ends_where_its_gradient_is_zero():
    problem = transformer().problem
    found = descend(problem, "L0.b_O", 60)
    moved = weights(problem, "L0.b_O") + torch.as_tensor(found.delta)
    here = problem.at({"L0.b_O": moved})
    assert here.loss_value() == pytest.approx(found.loss[1], rel=1e-12)
    assert found.gradient_norm[0] == pytest.approx(float(problem.gradient("L0.b_O").norm()), rel=1e-9)
    assert float(here.gradient("L0.b_O").norm()) < 1e-4 * found.gradient_norm[0]
    assert found.evaluations <= 65


def effects_of(first: np.ndarray, second: np.ndarray, held: np.ndarray) -> Effects:
    """Two sequences that hardly differ; measured is both orders."""

    def pair(x: np.ndarray) -> np.ndarray:
        return np.stack([x * 0.999, x, x * 1.001], axis=-1)

    return Effects(pair(first), pair(second), pair(first + second), pair(held))


def planted(sign: float) -> Pruned:
    """The surgeon's saliency is right, or the wrong way round; magnitudes have nothing to do with it."""
    source = np.random.default_rng(0)
    truth, noise = np.exp(source.normal(size=30)), np.exp(source.normal(size=30))
    zero = np.zeros(30)
    come = effects_of(zero, truth, truth)
    said = truth**sign
    samples = prune.RemovalSamples(1, noise, said, said, said, come, come, zero)
    heads = HeadRemovals(0, noise, said, said, said, come, come, zero)
    methods = ["magnitude", "fisher", "obd", "obs", "magnitude + obs"]
    losses = np.repeat([1.0, 1.0, 1.0 - 0.1 * sign, 1.0 - 0.2 * sign, 1.0], 2)
    sets = prune.RemovalSets(
        methods,
        np.array([0.25, 0.5]),
        np.ones((5, 2)),
        effects_of(0 * losses, losses, losses),
        np.zeros((5, 2)),
    )
    common = {"model": "m", "data": "d", "loss": 1.0, "held_out_loss": 1.0, "gradient_norm": {"W": 0.1}}
    places = ("W", "W at its minimum")
    parts: dict[str, Any] = {
        "singles": dict.fromkeys(places, samples),
        "groups": dict.fromkeys(places, samples),
    }
    parts |= {"sets": dict.fromkeys(places, sets), "rounds": {}}
    parts["minima"] = {"W": BlockMinimum(np.zeros(3), np.ones(2), np.ones(2), 9)}
    rest = {"how": {"W": "dense"}, "damping": 0.1, "heads": {"L0": heads}, "draws": 100, "seed": 0}
    return Pruned(**common, **parts, **rest, notes=["a note"])


def test_verdicts_follow_the_numbers():
    right, wrong = ({c.claim: c.verdict for c in planted(s).claims()} for s in (1.0, -1.0))
    for kind in ("single weights", "random groups, at a minimum", "heads"):
        key = f"the saliency of OBS ranks removals by their measured increase: {kind}"
        assert (right[key], wrong[key]) == ("holds", "fails")
        key = f"first and second order together rank plain removals by their measured increase: {kind}"
        assert right[key] == wrong[key] == "holds"
        key = f"the diagonal of the curvature (OBD) ranks plain removals better than the magnitude: {kind}"
        if not kind.startswith("random"):
            assert (right[key], wrong[key]) == ("holds", "fails")
    for place in (
        ", on held-out data",
        ", at a minimum, on held-out data",
        ", at a minimum, on the curvature's data",
    ):
        key = f"OBS beats magnitude at the same sparsity{place}"
        assert right[key] == "holds"
    key = "OBS beats magnitude at the same sparsity, on held-out data"
    assert wrong[key] == "fails"
    key = "adjusting the remaining weights lowers the loss after magnitude pruning, on held-out data"
    assert right[key] == "not decided"
    assert not [claim for claim in right if "anew" in claim]  # it was not measured
    found = differences(planted(1.0), "obs", "magnitude", "held_out", False)
    assert found[0].value == pytest.approx(-0.2)


@pytest.mark.usefixtures("unrendered")
def test_words_tables_and_figures_are_complete():
    result = planted(1.0)
    tables = result.tables()
    assert set(result.captions()) == {*tables, *result.figures()}
    assert len(tables["sets"]) == 2 * 5 * 2
    assert len(tables["samples"]) == 2 * 2 * 2 * 30
    assert len(tables["heads"]) == 30
    assert ("note", "", "a note") in result.summary()
    assert find("prune").Config is prune.Config


def test_no_name_of_a_head_lies_on_another():
    """Sixteen heads, most of them close to each other and to the line of equal numbers."""
    from matplotlib.text import Text

    source = np.random.default_rng(1)
    layers = {}
    for layer in range(4):
        truth = source.normal(size=4) * (1.0 if layer == 0 else 0.05)
        come = effects_of(0 * truth, truth, truth)
        layers[f"L{layer}"] = HeadRemovals(layer, truth, truth, truth, truth, come, come, 0 * truth)
    figure = replace(planted(1.0), heads=layers).figures()["heads"]
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = [Text.get_window_extent(text).shrunk(0.95, 0.8) for text in ax.texts]  # without their lines
        assert len({text.get_text() for text in ax.texts}) == 16
        assert sum(box.count_overlaps(boxes) for box in boxes) == 16  # each with itself


@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_where_it_stopped(tmp_path):
    asked = {
        "tokens": 24,
        "seq_len": 8,
        "held_out": 0.5,
        "blocks": ("L3.b_O",),
        "num_weights": 6,
        "settle": 4,
    }
    cfg = prune.Config(**asked, num_groups=6, heads=False, draws=50, sparsities=(0.25, 0.5))
    state: dict = {}
    first = prune.run(cfg, state=state)
    for name in [name for name in state if name.startswith(("sets", "iterated"))]:
        del state[name]
    begun = []
    again = prune.run(cfg, state=state, progress=lambda words, number, total: begun.append(words))
    least = ["L3.b_O: least weights", "L3.b_O: least weights, curvature measured anew"]
    assert begun == [*least, "L3.b_O at its minimum: least weights"]
    np.testing.assert_array_equal(first.sets["L3.b_O"].own, again.sets["L3.b_O"].own)
    assert first.how == {"L3.b_O": "dense"}
    first.save(tmp_path)
    assert prune.Pruned.load(tmp_path).loss == first.loss


def test_settings_are_checked_before_the_work():
    for wrong in (
        {"sparsities": (0.5, 0.25)},
        {"group_share": 0.0},
        {"damping": 0.0},
        {"num_groups": 1},
        {"settle": -1},
    ):
        with pytest.raises(UsageError):
            replace(prune.Config(), **wrong)


@pytest.mark.usefixtures("unrendered")
def test_a_dotted_line_is_in_the_legend():
    (legend,) = planted(1.0).figures()["sets"].legends
    assert [text.get_text() for text in legend.get_texts()][-2:] == ["magnitude + obs", "predicted"]


@pytest.mark.usefixtures("unrendered")
def test_lines_of_methods_differ_without_colors():
    upper = planted(1.0).figures()["sets"].axes[0]
    looks = [(one[0].get_linestyle(), one[0].get_marker()) for one in upper.containers]
    assert len(set(looks)) == len(looks) > 1
    assert ":" not in {dash for dash, _ in looks}  # what was predicted
