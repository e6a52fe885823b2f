"""The study `full_hessian`: its matrices are those of cs.Hessian, its verdicts come from numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import CurvescopeError
from curvescope.data.tasks.pictures import pictures
from curvescope.papers.petrov2025.figures import FullHessianConfig
from curvescope.studies import find, full_hessian
from curvescope.studies.full_hessian import analysis, view
from curvescope.studies.full_hessian.analysis import GROUPS, stripe
from curvescope.studies.full_hessian.view import FAILS, HOLDS, MIXED, verdict

TINY = full_hessian.Config(
    num_images=60, patch_size=4, d_model=4, d_ff=3, batch_size=6, seeds=1, steps=1, num_points=2,
    num_probes=2, num_steps=2, dtype="float64",
)  # fmt: skip


@pytest.fixture(scope="module")
def result() -> full_hessian.FullHessian:
    return full_hessian.run(TINY)


@pytest.fixture(scope="module")
def truth(result: full_hessian.FullHessian) -> tuple[cs.Problem, np.ndarray]:
    """The trained network of the first seed, and its Hessian from all rows at once."""
    problem = analysis.make_problem(TINY, 0, analysis.read_pictures(TINY))
    problem = analysis.at(problem, result.networks[0].training.trained_weights)
    return problem, cs.Hessian(problem).to_dense().numpy()


def test_every_pair_of_blocks_is_that_of_the_operator(result, truth):
    (problem, H), found = truth, result.networks[0].trained
    where = problem.space().slices
    log = np.log10(np.abs(H) + 1e-6)
    for i, one in enumerate(found.names):
        for j, two in enumerate(found.names):
            block = H[where[one], where[two]]
            np.testing.assert_allclose(found.frobenius[i, j], np.linalg.norm(block), rtol=1e-9, atol=1e-13)
            np.testing.assert_allclose(found.max_abs[i, j], np.abs(block).max(), rtol=1e-9, atol=1e-13)
            np.testing.assert_allclose(found.brightness[i, j], log[where[one], where[two]].mean(), rtol=1e-6)
    np.testing.assert_allclose(found.norm, np.linalg.norm(H))
    inside = np.concatenate([np.arange(where[name].start, where[name].stop) for name in analysis.ATTENTION])
    np.testing.assert_allclose(found.attention, H[np.ix_(inside, inside)], rtol=1e-5, atol=1e-7)
    on_stripe = stripe(H[where["L0.W_Q"], where["L0.W_K"]], 4)
    np.testing.assert_allclose((found.stripe_ratio, found.stripe_share), on_stripe)


def test_written_out_in_any_order_of_blocks(truth):
    problem, H = truth
    where = problem.space().slices
    names = ["U", "L0.W_V", "L0.ln1.g"]
    order = np.concatenate([np.arange(where[name].start, where[name].stop) for name in names])
    found = analysis.written_out(problem, names)
    np.testing.assert_allclose(found, H[np.ix_(order, order)], atol=1e-13)
    assert np.array_equal(found, found.T)


def test_norms_of_groups_through_training(result):
    found = result.networks[0].norms
    assert found.steps.tolist() == TINY.points == [0, 1]
    problem = analysis.make_problem(TINY, 0, analysis.read_pictures(TINY))
    for s, weights in enumerate(result.networks[0].training.weights):
        H = cs.Hessian(analysis.at(problem, weights))
        for g, globs in enumerate(GROUPS.values()):
            A = H.block(list(globs))
            truth = A.to_dense().norm().item()
            assert found.exact[g] == (A.shape[0] <= 64)  # E and P have 80 parameters
            assert found.low[s, g] * (1 - 1e-9) <= truth <= found.high[s, g] * (1 + 1e-9)
            own = A.space.gather(dict(A.problem.named_parameters())).norm().item()
            np.testing.assert_allclose(found.weights[s, g], own)


def test_the_stripe_of_a_matrix_made_by_hand():
    A = np.arange(1.0, 5.0).reshape(2, 2)
    only = stripe(np.kron(A, np.eye(3)), 2)
    assert only.ratio == np.inf
    np.testing.assert_allclose(only.share, 1.0)
    mixed = stripe(np.kron(np.ones((2, 2)), np.full((3, 3), 2.0) + 4 * np.eye(3)), 2)
    np.testing.assert_allclose(mixed.ratio, 3.0)  # 6 on the stripe, 2 off it
    np.testing.assert_allclose(mixed.share, 3 * 36 / (3 * 36 + 6 * 4))
    noise = np.random.default_rng(0).normal(size=(160, 160))
    np.testing.assert_allclose(stripe(noise, 20), (1, 1 / 64), rtol=0.2)


def test_a_cell_of_the_picture_lies_in_one_pair_of_blocks():
    values = np.zeros((7, 7))
    values[:5, :5], values[5:, 5:] = 1, 2
    found = analysis.pooled(values, [5, 2])
    assert found.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 2]]


def with_rms(network: full_hessian.Network, pair: tuple[str, str], factor: float) -> full_hessian.Network:
    """The network with one pair of blocks of the first Hessian larger."""
    found = network.initial
    i, j = (found.names.index(name) for name in pair)
    frobenius, largest = found.frobenius.copy(), found.max_abs.copy()
    frobenius[[i, j], [j, i]] *= factor
    largest[[i, j], [j, i]] *= factor
    return replace(network, initial=replace(found, frobenius=frobenius, max_abs=largest))


def verdicts(result: full_hessian.FullHessian) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in result.claims()}


def test_other_numbers_give_other_verdicts(result):
    bright = "value–value is the brightest pair of Q, K, V, initial"
    for pair, wanted in (((view.V, view.V), HOLDS), ((view.Q, view.K), FAILS)):
        made_up = replace(result, networks=[with_rms(n, pair, 1e6) for n in result.networks])
        assert verdicts(made_up)[bright] == wanted
    grow = "entries grow from initialization to the trained network"
    huge = replace(result, networks=[with_rms(n, ("U", "U"), 1e6) for n in result.networks])
    assert verdicts(huge)[grow] == FAILS
    for factor, wanted in ((1e6, HOLDS), (1e-6, FAILS)):
        networks = []
        for network in result.networks:
            hessian = network.norms.hessian.copy()
            hessian[:, [1, 2]] *= factor
            networks.append(replace(network, norms=replace(network.norms, hessian=hessian)))
        found = verdicts(replace(result, networks=networks))
        assert found["keys and values have the largest Hessian blocks through training"] == wanted
    assert [verdict(so) for so in ([True, True], [True, False], [False])] == [HOLDS, MIXED, FAILS]


def test_tables_figures_and_claims_have_their_words(result):
    assert set(result.captions()) >= {*result.tables(), *result.figures()}
    assert len(result.claims()) >= 7
    pairs = result.tables()["hessian_pairs"]
    count = len(result.networks[0].initial.names)
    assert len(pairs) == 2 * count * (count + 1) // 2
    assert any("stays below" in note for note in result.notes)  # one step does not teach much


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_numbers(result):
    state = {}

    def stop(what: str, number: int, total: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        full_hessian.run(TINY, progress=stop, state=state)
    assert {"training.0", "initial.0"} <= set(state)
    again = full_hessian.run(TINY, state=state)
    for one, two in zip(again.networks, result.networks, strict=True):
        assert np.array_equal(one.trained.frobenius, two.trained.frobenius)
        assert np.array_equal(one.norms.hessian, two.norms.hessian)


def test_the_trained_network_is_the_first_with_enough_accuracy():
    data = analysis.read_pictures(TINY)
    found = analysis.train_one(replace(TINY, until=0.0, steps=3), 0, data)
    assert found.reached
    assert found.trained_step == int(found.evaluated[1:][found.accuracy[1:] > 0][0])
    assert found.trained_accuracy > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"until": 1.0}, "until: expected an accuracy"),
        ({"seeds": 0}, "seeds: expected at least 1"),
        ({"data": "cats"}, "expected the name of pictures"),
        ({"patch_size": 3}, "patch_size: "),
        ({"n_heads": 3}, "n_heads: expected a divisor of d_model"),
        ({"batch_size": 5000}, "1438"),
        ({"num_images": 5000}, "expected from 2 to 1797 pictures"),
    ],
)
def test_a_bad_setting_is_one_sentence(settings, words):
    with pytest.raises(cs.UsageError, match=words):
        full_hessian.run(full_hessian.Config.from_dict({"seeds": 1, **settings}))


def test_pictures_of_the_hub(monkeypatch):
    shapes = {
        "ylecun/mnist": ("image", "label", (28, 28)),
        "uoft-cs/cifar100": ("img", "fine_label", (32, 32, 3)),
    }

    def load_dataset(name: str, split: str) -> dict[str, list]:
        image, label, shape = shapes[name]
        assert split == "train[:10]"
        return {image: [np.full(shape, 51 * (i % 5), np.uint8) for i in range(10)], label: list(range(10))}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name, channels, size in (("mnist", 1, 28), ("cifar100", 3, 32)):
        found = pictures(name, num=10)
        assert found.images.shape == (8, channels, size, size)
        torch.testing.assert_close(found.images[:, 0, 0, 0], (found.classes % 5).double() / 5)

    def offline(name: str, split: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(CurvescopeError, match=r"could not read the pictures 'mnist'.*no network"):
        pictures("mnist", num=10)


def test_the_study_and_the_figure_are_found():
    assert find("full_hessian").Config is full_hessian.Config
    assert FullHessianConfig().of_study().seeds == 3
    assert FullHessianConfig(profile="full").of_study() == full_hessian.Config()
    assert FullHessianConfig(seeds=1).of_study().seeds == 1
