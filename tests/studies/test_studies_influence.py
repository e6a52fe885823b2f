"""The study `influence`: scores against dense inverses, closed forms and retraining; queries; its run."""

from __future__ import annotations

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.algorithms import trace
from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.algorithms.estimates.trace import accurate_trace
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.operator import Matrix
from curvescope.core.result import Result
from curvescope.data.corpora import read_source
from curvescope.models.zoo.mlp import MLPConfig
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.studies import influence
from curvescope.studies.influence import analysis, view
from curvescope.studies.influence.view import says, short

SMALL = TransformerConfig(n_layers=1, d_model=4, n_heads=2, d_ff=4, n_ctx=5, vocab_size=6, init="scaled")


def sequences(count: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; some do not count, so that sequences weigh differently."""
    source = torch.Generator().manual_seed(3)
    x = torch.randint(0, 6, (count, 6), generator=source)
    y = x[:, 1:].clone()
    y[1, :3] = -100
    y[4, 2:] = -100
    return x[:, :-1], y


def problems(batch_size: int | None = None) -> tuple[cs.Problem, cs.Problem]:
    model, (x, y) = cs.load(SMALL, dtype="float64"), sequences()
    train = cs.Batches.from_tensors(x[:-1], y[:-1], batch_size=batch_size)
    return cs.Problem(model, train), cs.Problem(model, cs.Batches.from_tensors(x[-1:], y[-1:]))


def dense_scores(train: cs.Problem, query: cs.Problem, blocks: tuple[str, ...], damping: float) -> np.ndarray:
    """(N_i/N) ∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i with everything written out."""
    x, y = (torch.cat([getattr(b, name) for b in train.batches]) for name in ("inputs", "targets"))
    alone = [cs.Problem(train.model, (x[i : i + 1], y[i : i + 1])) for i in range(len(x))]
    G = cs.GGN(train, *blocks).to_dense()
    inverse = torch.linalg.inv(G + damping * torch.eye(len(G), dtype=G.dtype))
    q = query.gradient(*blocks)
    return (
        np.array([float(q @ inverse @ one.gradient(*blocks)) * one.num_terms for one in alone])
        / train.num_terms
    )


@pytest.mark.parametrize("blocks", [(), ("L0.W_*",)])
def test_scores_are_those_of_a_dense_inverse(blocks):
    train, query = problems()
    found = influence.score(train, query, *blocks, dampings=[0.01, 1.0])
    for d, damping in enumerate((0.01, 1.0)):
        np.testing.assert_allclose(
            found.values[d], dense_scores(train, query, blocks, damping), rtol=1e-6, atol=1e-10
        )
    assert found.converged.all()
    assert found.shares.sum() == pytest.approx(1)
    assert found.query_loss == query.loss_value()


def test_the_bound_covers_a_system_that_was_stopped_early():
    train, query = problems()
    loose = influence.score(train, query, dampings=[0.05], max_products=6)
    exact = dense_scores(train, query, (), 0.05)
    wrong = np.abs(loose.values[0] - exact)
    assert not loose.converged[0]
    assert (wrong > 1e-6 * np.abs(exact)).any()
    assert (wrong <= loose.error[0]).all()


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, None), (4, 1), (5, 2)])
def test_batches_and_chunks_change_nothing(batch_size, chunk):
    whole, query = problems()
    cut, _ = problems(batch_size)
    cut = cs.Problem(whole.model, cut.batches)
    one = influence.score(whole, query, dampings=[0.1])
    other = influence.score(cut, query, dampings=[0.1], chunk=chunk)
    np.testing.assert_allclose(one.values, other.values, rtol=1e-6, atol=1e-10)
    np.testing.assert_array_equal(one.sequences, other.sequences)


def linear(loss: str, outputs: int) -> tuple[cs.Problem, cs.Problem, torch.Tensor, torch.Tensor]:
    """A linear model on twelve points and a query; inputs and targets of all."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(13, 3, generator=source, dtype=torch.float64)
    y = torch.randn(13, 1, generator=source, dtype=torch.float64)
    y = y if loss == "mse" else torch.arange(13) % outputs
    model = cs.load(MLPConfig(d_in=3, d_out=outputs, depth=1), dtype="float64")
    return cs.Problem(model, (x[:-1], y[:-1]), loss), cs.Problem(model, (x[-1:], y[-1:]), loss), x, y


def test_linear_regression_has_a_closed_form():
    """θ₋ᵢ − θ = (N_i/N) A⁻¹ ∇ℓ_i / (1 − h_i), h_i = (N_i/N) tr(A⁻¹ ∇²ℓ_i): the score lacks leverage alone."""
    train, query, x, y = linear("mse", 1)
    ridge, X, Y, N = 0.1, x[:-1], y[:-1, 0], 12
    curved = float(cs.Hessian(train).to_dense()[0, 0] / (X[:, 0] ** 2).mean())  # of a squared error

    def fitted(kept: list[int]) -> torch.Tensor:
        A = curved * X[kept].T @ X[kept] / N + ridge * torch.eye(3, dtype=X.dtype)
        return torch.linalg.solve(A, curved * X[kept].T @ Y[kept] / N)

    theta = fitted(list(range(N)))
    at, asked = train.at(theta), query.at(theta)
    found = influence.score(at, asked, dampings=[ridge]).values[0]
    A = cs.Hessian(at).to_dense() + ridge * torch.eye(3, dtype=X.dtype)
    for i in range(N):
        moved = fitted([j for j in range(N) if j != i]) - theta
        leverage = curved * float(X[i] @ torch.linalg.solve(A, X[i])) / N
        assert float(asked.gradient() @ moved) * (1 - leverage) == pytest.approx(found[i], rel=1e-6)


def test_logistic_regression_moves_at_the_rate_of_the_score():
    """d ℓ_q / dε at the minimum of L − ε (N_i/N) ℓ_i + ridge, by Newton's method with ±ε."""
    train, query, x, y = linear("cross_entropy", 3)
    ridge, eye, step = 0.05, torch.eye(9, dtype=torch.float64), 1e-3
    single = [cs.Problem(train.model, (x[i : i + 1], y[i : i + 1])) for i in range(12)]

    def minimum(i: int, epsilon: float) -> torch.Tensor:
        theta = torch.zeros(9, dtype=torch.float64)
        for _ in range(7):
            whole, one = train.at(theta), single[i].at(theta)
            g = whole.gradient() - epsilon / 12 * one.gradient() + ridge * theta
            H = cs.Hessian(whole).to_dense() - epsilon / 12 * cs.Hessian(one).to_dense() + ridge * eye
            theta = theta - torch.linalg.solve(H, g)
        return theta

    best = minimum(0, 0.0)
    found = influence.score(train.at(best), query.at(best), dampings=[ridge]).values[0]
    for i in (0, 5):
        ends = [query.at(minimum(i, sign * step)).loss_value() for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(found[i], rel=1e-4)


@pytest.fixture(scope="module")
def case():
    """A smooth little network at a strong ridge, so that a first order is enough."""
    model = cs.load(MLPConfig(d_in=3, d_hidden=3, d_out=2, activation="gelu"), dtype="float64")
    source = torch.Generator().manual_seed(1)
    x = torch.randn(44, 3, generator=source, dtype=torch.float64)
    whole = cs.Problem(model, (x, (x[:, 0] * x[:, 1] + 0.3 * x[:, 2] > 0).long()))
    return analysis.RetrainingCase(*analysis.held_out(whole, 4), 0.02)


def test_the_hessian_predicts_retraining(case):
    before = {name: p.detach().clone() for name, p in case.problem.model.named_parameters()}
    minimum = analysis.minimize(case, case.start, steps=50)
    theta = torch.as_tensor(minimum.theta)
    here = case.problem.at(theta)
    assert minimum.objective == pytest.approx(here.loss_value() + 0.01 * float(theta @ theta))
    assert float((here.gradient() + 0.02 * theta).norm()) == pytest.approx(
        minimum.gradient_norm, rel=1e-3, abs=1e-12
    )
    assert minimum.gradient_norm < 1e-6
    predicted = analysis.predict(case, minimum)
    each = [analysis.leave_out(case, minimum, i) for i in range(0, 40, 5)]
    measured = np.stack([one.near for one in each], axis=1)
    same = [one for one in each if one.objective[0] == pytest.approx(one.objective[1], abs=1e-8)]
    assert len(same) >= 4
    for one in same:
        np.testing.assert_allclose(one.near, one.again, atol=1e-4)
    for method, least in ((analysis.HESSIAN, 0.95), (analysis.GGN_NAME, 0.8)):
        rho = analysis.over_queries(predicted.values[method][:, ::5], measured, draws=200, seed=0)
        assert rho.value > least
    assert all(torch.equal(before[name], p) for name, p in case.problem.model.named_parameters())


def test_predictions_are_the_scores_of_the_study(case):
    minimum = analysis.minimize(case, case.start, steps=50)
    theta = torch.as_tensor(minimum.theta)
    found = analysis.predict(case, minimum)
    one = influence.score(case.problem.at(theta), case.queries[1].at(theta), dampings=[0.02])
    np.testing.assert_allclose(found.values[analysis.GGN_NAME][1], one.values[0], rtol=1e-5, atol=1e-12)


def test_small_models_are_at_a_minimum_of_their_own_data():
    for name in analysis.CASES:
        made = analysis.make_case(name, 3, 0)
        assert len(made.queries) == 3
        assert len(made.problem.batches) == 1
        x = made.problem.batches[0].inputs
        assert all(
            q.batches.num_sequences == 1 and q.batches[0].inputs.shape[1:] == x.shape[1:]
            for q in made.queries
        )


def test_correlations_know_planted_orders():
    source = np.random.default_rng(0)
    measured = source.normal(size=(4, 30))
    right = analysis.over_queries(measured**3, measured, draws=200, seed=0)
    assert (right.value, right.low, right.high) == pytest.approx((1, 1, 1))
    noise = source.normal(size=(4, 30))
    nothing = analysis.over_queries(noise, measured, draws=200, seed=0)
    assert nothing.low < 0 < nothing.high
    assert analysis.gain(measured, noise, measured, draws=200, seed=0).low > 0
    assert analysis.slope(measured / 2, measured, draws=200, seed=0).value == pytest.approx(2)


@pytest.fixture(scope="module")
def bundled():
    model = cs.load("tiny-gpt")
    return cs.Problem(model, cs.text_data("sample", model, tokens=32, seq_len=16))


def test_a_query_is_the_loss_of_its_words_or_of_those_behind_an_arrow(bundled):
    encode = bundled.model.tokenizer.encode
    whole, part = analysis.asked(bundled, ("def run(self)", "def run=>(self)"))
    assert whole.num_terms == len(encode("def run(self)")) - 1
    assert part.num_terms == len(encode("(self)"))
    ids = encode("def run") + encode("(self)")
    log_p = bundled.model.module(torch.tensor([ids[:-1]])).log_softmax(-1)[0].detach()
    counted = range(len(encode("def run")) - 1, len(ids) - 1)
    assert part.loss_value() == pytest.approx(
        -float(np.mean([float(log_p[t, ids[t + 1]]) for t in counted])), rel=1e-4
    )
    assert analysis.read(part, "query") == ["def run(self)"]


@pytest.mark.parametrize("text", ["", "=>word", "words=>", "a=>b=>c", "x" * 4000])
def test_a_query_that_asks_nothing_is_one_sentence(bundled, text):
    with pytest.raises(UsageError, match="expected a query of"):
        analysis.asked(bundled, (text,))


def test_bad_calls_are_sentences():
    train, query = problems()
    with pytest.raises(UsageError, match="dampings above 0"):
        influence.score(train, query, dampings=[0.0])
    with pytest.raises(UsageError, match="a query of the same model"):
        influence.score(train, problems()[1], dampings=[1.0])
    with pytest.raises(UsageError, match="causal language model"):
        analysis.asked(train, ("a",))
    with pytest.raises(UsageError, match="more sequences than the 9"):
        analysis.held_out(train, 9)
    with pytest.raises(UsageError, match="cases: expected MLP, Transformer, got 'CNN'"):
        influence.Config(cases=("CNN",))


def test_small_models_are_trained_again_where_nothing_else_is_asked():
    both = ("MLP", "Transformer")
    assert influence.Config().cases == influence.Config(tokens=64, num_queries=1).cases == both
    others = {"model": "gpt2"}, {"data": "notes.txt"}, {"query": ("a b",)}, {"revision": "step0"}
    for other in others:
        assert influence.Config(**other).cases == ()
        assert influence.Config(**other, cases=both).cases == both
    assert influence.Config(cases="none").cases == influence.Config(cases=()).cases == ()
    with pytest.raises(UsageError, match="cases: expected MLP, Transformer, got 'none'"):
        influence.Config(cases=("none", "MLP"))


def test_blocks_are_checked_before_any_work():
    begun = []
    with pytest.raises(CurvescopeError, match="no block matches"):
        influence.run(
            influence.Config(tokens=64, blocks=("L9.*",)), progress=lambda *what: begun.append(what)
        )
    assert begun == []


def test_notes_say_what_was_read_and_what_was_not_done(tmp_path):
    cfg = influence.Config(tokens=64, query="def run", blocks=("L3.b_O",), max_products=2, other_dampings=())
    notes = influence.run(cfg).notes
    (read,) = [note for note in notes if "sequences of the text" in note and "--tokens" in note]
    first, total = read.split(" of ")[0], int(read.split(" of ")[1].split()[0])
    bundled = cs.load("tiny-gpt").tokenizer
    assert bundled is not None
    assert (first, total) == ("4", -(-(len(bundled.encode(read_source("sample"))) - 1) // 16))
    assert any("--set cases=MLP,Transformer" in note for note in notes)
    short = tmp_path / "short.txt"
    short.write_text("def run(self): return self.x", encoding="utf-8")
    notes = influence.run(replace(cfg, data=str(short), seq_len=4)).notes
    assert not any("--tokens for more" in note for note in notes)  # all of it is read


def test_cells_without_any_change_are_left_out_and_counted():
    source = np.random.default_rng(0)
    predicted = source.normal(size=(3, 6))
    measured = predicted * (1 + 0.1 * source.normal(size=(3, 6)))
    whole = analysis.slope(predicted, measured, draws=50, seed=0)
    assert whole.value == pytest.approx(np.median(measured / predicted))
    predicted[0, 0] = measured[0, 0] = 0
    found = analysis.slope(predicted, measured, draws=50, seed=0)
    others = np.ones((3, 6), bool)
    others[0, 0] = False
    assert found.value == pytest.approx(np.median(measured[others] / predicted[others]))
    assert found.low <= found.value <= found.high
    assert (found.count, whole.count) == (17, 18)
    assert view._size("", found, 18).measured.endswith("1 of 18 without any change")
    nothing = analysis.slope(0 * predicted, 0 * measured, draws=50, seed=0)
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()


def test_a_size_that_is_not_known_decides_nothing():
    one = Correlation(float("nan"), 0.9, 1.1, 18, 6)
    assert view._size("", one, 18).verdict == "not decided"
    assert view._size("", replace(one, value=1.0), 18).verdict == "holds"


def test_words_of_a_score():
    assert [says(1, 0.5), says(-1, 0.5), says(0.1, 0.5)] == ["helped", "harmed", "not decided"]
    assert short("a\n  b") == "a b"
    assert len(short("word " * 50)) == 60


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The study on a small model, with one small model trained again, for little, stopped once on the way."""
    path = tmp_path_factory.mktemp("model") / "small.toml"
    shape = "n_layers = 1\nd_model = 8\nn_heads = 2\nd_ff = 8\nn_ctx = 18\nvocab_size = 12\n"
    path.write_text(shape, encoding="utf-8")
    cfg = influence.Config(
        model=str(path), data="task:addition", max_products=4, cases=("MLP",), num_removed=4, num_checked=2,
        draws=50,
    )  # fmt: skip
    state, begun = {}, []

    def stop(what, number, total):
        begun.append(what)
        if number == 6:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "EVALUATIONS", 30)
        with pytest.raises(KeyboardInterrupt):
            influence.run(cfg, state=state, progress=stop)
        found = influence.run(cfg, state=state, progress=lambda what, *_: begun.append(what))
    return cfg, found, begun


def test_a_run_goes_on_where_it_was_stopped(measured):
    cfg, found, begun = measured
    assert len(begun) == 1 + 2 + 2 + 4 + 1
    assert found.units == [1.0, 0.1, 10.0]
    assert found.scores[0].damping == pytest.approx(found.mean_diagonal * np.array(found.units))
    assert len(found.texts) == 62
    assert all(len(text) == 18 and text[5] == "+" for text in [*found.texts, *found.queries])
    assert any(note.startswith("query 1: the linear system has not converged") for note in found.notes)
    one = found.comparisons["MLP"]
    assert one.near.shape == one.again.shape == one.predicted["Hessian"].shape == (2, 4)
    assert found.blocks == ["L0.*"]
    other = influence.run(replace(cfg, cases=(), batch_size=9, blocks=("L0.W_V",), other_dampings=()))
    assert other.claims() == []
    assert set(other.captions()) == {"scores", "sequences", "dampings"}


def test_it_is_shown(measured, tmp_path):
    mpl.use("Agg")
    found = Result.load(measured[1].save(tmp_path))
    figures, tables = found.figures(), found.tables()
    assert set(found.captions()) == set(figures) | set(tables)
    rows = tables["sequences"]
    first = rows[rows["query"] == 1]
    assert list(first["score"]) == sorted(first["score"], reverse=True)
    assert len(tables["dampings"]) == 2 * 3
    assert len(found.claims()) == 7
    assert {claim.verdict for claim in found.claims()} <= {"holds", "fails", "not decided"}
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize(("n", "outlier"), [(40, 0.5), (400, 0.5), (400, 0.02)])
def test_the_damping_scale_is_known_to_five_percent(n, outlier):
    """One eigenvalue dominates the trace: eight probes would give a scale that is wrong by a third."""
    u = torch.randn(n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = torch.eye(n, dtype=torch.float64) + outlier * n * (u @ u.T) / (u.T @ u)
    op = Matrix(A, symmetric=True, psd=True)
    runs = [accurate_trace(op, accuracy=0.05, seed=seed) for seed in range(40)]
    truth = (1 + outlier) * n
    assert np.mean([abs(r.value - truth) <= 0.05 * truth for r in runs]) >= 0.92
    for run in runs:
        assert run.high - run.low <= 0.1 * run.value or run.num_products == 256
        assert run.num_products <= min(n, 256)
    again = trace(op, num_probes=runs[0].num_products, seed=0)
    assert n <= 256 or again.samples.tolist() == runs[0].samples.tolist()


def test_the_summary_states_the_interval_of_the_damping_scale(measured):
    _, measured, _ = measured
    low, high = measured.mean_diagonal_interval
    assert low <= measured.mean_diagonal <= high
