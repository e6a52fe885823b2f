"""The study `why_adam`: stacked runs are torch's, curvature is that of dense blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.data.tasks import task_data
from curvescope.studies import why_adam
from curvescope.studies.why_adam import analysis
from curvescope.studies.why_adam.analysis import (
    CHOICES,
    FIRST,
    BlockSpectra,
    NetworkSize,
    TrainingRuns,
    TunedRuns,
    batches,
    choose,
    evaluated,
    flatten,
    ggn_blocks,
    hessian_blocks,
    network,
    pairs,
    rate_of,
    starts,
    train,
    tune,
)

SMALL = NetworkSize(width=4, layers=1, digits=1)
SOME = ("softmax-single-norm", "softmax-merged-norm", "mlp1-norm")
CFG = why_adam.Config(configurations=SOME, seeds=3, steps=40, width=4, batch_size=2, measured=2, draws=60)


def sums(count: int, seed: int = 0) -> torch.Tensor:
    return task_data("addition", num_sequences=count, digits=SMALL.digits, seed=seed)[0].inputs


def stacked(name: str, seeds: tuple[int, ...] = (0, 1)):
    made = [flatten(network(CHOICES[name], SMALL, seed).double(), SMALL.digits) for seed in seeds]
    return made[0][0], torch.stack([theta for _, theta in made])


@pytest.mark.parametrize("name", ["softmax-single-norm", "linear-merged-bare", "mlp3-norm"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_stacked_runs_are_those_of_torch(name, optimizer):
    flat, start = stacked(name)
    data = torch.stack([sums(5 * 3, seed).reshape(5, 3, -1) for seed in (0, 1)])
    found = train(
        flat, start, data, [0.01, 0.1], optimizer, evaluated=sums(4, 9), looks=[0, 5], checkpoints=[2, 5]
    )
    for s in (0, 1):
        for r, rate in enumerate((0.01, 0.1)):
            net = network(CHOICES[name], SMALL, s).double()
            make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
            own = make(net.parameters(), lr=rate, **({"momentum": 0.9} if optimizer == "sgd" else {}))
            for step in range(5):
                own.zero_grad()
                tokens = data[s, step]
                z = net(tokens)[:, 3:-1]
                torch.nn.functional.cross_entropy(z.flatten(0, 1), tokens[:, 4:].flatten()).backward()
                own.step()
                if step == 1:
                    torch.testing.assert_close(found.kept[0, s, r], flatten(net, 1)[1], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(found.kept[1, s, r], flatten(net, 1)[1], rtol=1e-9, atol=1e-11)


def test_the_loss_is_that_of_the_task():
    flat, theta = flatten(network(CHOICES["softmax-single-norm"], SMALL, 0).double(), SMALL.digits)
    problem = cs.Problem(flat.network, task_data("addition", num_sequences=5, digits=1, seed=3))
    assert float(flat.loss(theta, sums(5, 3))) == pytest.approx(problem.loss_value(), rel=1e-12)


def test_a_run_that_diverges_is_infinite_and_alone():
    flat, start = stacked("softmax-single-bare")
    data = torch.stack([sums(8 * 2, seed).reshape(8, 2, -1) for seed in (0, 1)])
    options = {"evaluated": sums(4, 9), "looks": [0, 8], "checkpoints": [8]}
    both = train(flat, start, data, [0.01, 1e9], "sgd", **options)
    alone = train(flat, start, data, [0.01], "sgd", **options)
    assert both.loss[:, 1, -1].isinf().all()
    assert not both.loss.isnan().any()
    torch.testing.assert_close(both.loss[:, :1], alone.loss)


def test_merged_networks_begin_as_the_same_function():
    for attention in ("softmax", "linear"):
        single, merged = (
            network(CHOICES[f"{attention}-{kind}-norm"], NetworkSize(), 5) for kind in ("single", "merged")
        )
        tokens = task_data("addition", num_sequences=3, digits=2, seed=0)[0].inputs
        torch.testing.assert_close(single(tokens), merged(tokens))
        assert "L0.W_QK" in dict(merged.named_parameters())


def test_an_mlp_sees_the_past_alone():
    net, tokens = network(CHOICES["mlp3-norm"], SMALL, 0), sums(2)
    other = tokens.clone()
    other[:, 4:] = 11 - other[:, 4:]
    torch.testing.assert_close(net(other)[:, :4], net(tokens)[:, :4])
    assert not torch.allclose(net(other)[:, 4:], net(tokens)[:, 4:])


@pytest.mark.parametrize("name", ["softmax-merged-norm", "linear-single-bare", "mlp1-norm"])
def test_blocks_are_those_of_dense_matrices(name):
    flat, theta = flatten(network(CHOICES[name], SMALL, 1).double(), SMALL.digits)
    problem = cs.Problem(flat.network, task_data("addition", num_sequences=3, digits=1, seed=2))
    for measure, operator in ((ggn_blocks, cs.GGN), (hessian_blocks, cs.Hessian)):
        found = measure(flat, theta, sums(3, 2))
        assert found.names == [n for n, p in flat.network.named_parameters() if p.dim() == 2]
        for block, spectrum, diagonal in zip(found.names, found.spectra, found.diagonals, strict=True):
            A = operator(problem, block).to_dense().numpy()
            np.testing.assert_allclose(spectrum, np.linalg.eigvalsh((A + A.T) / 2), atol=1e-9)
            np.testing.assert_allclose(diagonal, np.diag(A), atol=1e-10)


def test_heterogeneity_is_what_it_says():
    spectra = [np.array([0.0, 2.0]), np.array([-100.0, 100.0])]
    found = BlockSpectra(["a", "b"], spectra, [np.array([1.0, 100.0, 0.0]), np.array([-5.0, 5.0])])
    np.testing.assert_allclose(found.sizes, [1.0, 100.0])
    sizes, divergence, entries = found.heterogeneity
    assert sizes == pytest.approx(1.0)  # of 0 and 2
    assert entries == pytest.approx((1.0 + 0.0) / 2)
    assert 0.7 < divergence < 1  # zero is far from ±100, by asinh(1) over a width of a quarter
    same = BlockSpectra(["a", "b"], spectra[:1] * 2, [spectra[1]] * 2)
    np.testing.assert_allclose(same.heterogeneity, 0.0, atol=1e-12)


def valley(best: int, tried: list[float]):
    """Trainings whose loss is lowest at a rung; two rungs above it they diverge."""

    def run(rates: list[float]) -> TrainingRuns:
        tried.extend(rates)
        rungs = [round(2 * math.log10(rate / rate_of(best))) for rate in rates]
        loss = torch.tensor([math.inf if k > 1 else 1.0 + 0.1 * k * k for k in rungs]).double()
        kept = torch.tensor(rates)[None, None, :, None].expand(2, 3, -1, 1)
        return TrainingRuns(loss[None, :, None].expand(3, -1, 5), kept)

    return run


@pytest.mark.parametrize("best", [-8, -4, -1, 1])
def test_the_grid_grows_until_the_best_rate_is_inside(best):
    tried: list[float] = []
    found = tune(FIRST["adam"], valley(best, tried))
    assert not found.at_edge
    assert len(tried) == len(set(tried)) == len(found.rates)
    assert (np.diff(found.rates) > 0).all()
    np.testing.assert_allclose(found.rates[found.chosen], rate_of(best))
    np.testing.assert_allclose(found.parameters, rate_of(best), rtol=1e-6)
    np.testing.assert_allclose(found.loss, 1.0)


def test_a_grid_that_does_not_end_is_said():
    assert tune(FIRST["sgd"], valley(40, [])).at_edge


def test_the_rate_of_a_seed_is_chosen_by_the_others():
    final = np.array([[0.0, 2.0], [3.0, 2.5], [3.0, 2.5]])
    assert choose(final).tolist() == [1, 0, 0]
    final[2, 0] = math.inf
    assert choose(final).tolist() == [1, 1, 0]


@pytest.fixture(scope="module")
def done():
    state: dict[str, Result] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "MOST", 1)
        return why_adam.run(CFG, state=state), state


def test_it_goes_on_where_it_was(done):
    result, state = done
    assert len(state) == 3 * len(SOME)
    kept = {name: found for name, found in state.items() if name != "mlp1-norm.curvature"}
    begun: list[str] = []
    again = why_adam.run(CFG, state=kept, progress=lambda what, *_: begun.append(what))
    assert begun == ["mlp1-norm: curvature"]
    assert again.claims() == result.claims()


def test_it_can_be_shown(done, tmp_path):
    result, _ = done
    tables = result.tables()
    assert set(tables) | set(result.figures()) == set(result.captions())
    assert len(tables["gaps"]) == len(SOME)
    assert tables["rates"].groupby(["configuration", "optimizer"]).chosen_by.sum().eq(3).all()
    assert set(tables["changes"]["to"]) == {"merged"}
    assert len(result.summary()) >= len(SOME) + len(result.claims())
    result.save(tmp_path)
    assert why_adam.WhyAdam.load(tmp_path).claims() == result.claims()


def test_seeds_change_weights_and_batches_and_not_what_is_shared():
    other = replace(CFG, seed=1)
    assert not torch.equal(batches(CFG), batches(other))
    assert not torch.equal(evaluated(CFG), evaluated(other))
    weights = starts(CFG, SOME[0])[1]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights, starts(other, SOME[0])[1])
    torch.testing.assert_close(weights, starts(CFG, SOME[0])[1])


def test_configurations_are_paired_by_one_thing():
    names = list(CHOICES)
    assert len(names) == 12
    assert [len(pairs(factor, names)) for factor in ("merged", "linear", "bare")] == [4, 4, 6]
    assert ("mlp1-norm", "mlp1-bare") in pairs("bare", names)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="did you mean 'mlp1-norm'"):
        replace(CFG, configurations=("mlp1-norms",))
    with pytest.raises(UsageError, match="mlp1-norm"):
        replace(CFG, configurations=("mlp1-norm", "mlp1-norm"))
    with pytest.raises(UsageError, match="seeds"):
        replace(CFG, seeds=2)
    with pytest.raises(UsageError, match="width"):
        replace(CFG, width=5)
    with pytest.raises(UsageError, match="measured"):
        replace(CFG, measured=500)


def test_a_tuned_run_has_the_mean_of_its_last_looks():
    course = np.arange(12.0).reshape(1, 2, 6).repeat(3, axis=0)
    one = TunedRuns(np.array([0.1, 0.3]), course, np.array([0, 1, 1]), False, np.zeros(0))
    np.testing.assert_allclose(one.final[0], [3.5, 9.5])
    np.testing.assert_allclose(one.loss, [3.5, 9.5, 9.5])
