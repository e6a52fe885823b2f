"""The study `blocks`: its numbers against dense blocks, and its run folder."""

import math

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import curvescope as cs
from curvescope.algorithms.blocks.heterogeneity import heterogeneity
from curvescope.algorithms.blocks.probes import Ends, OwnProbes, own_probes
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix
from curvescope.operators import GGN, FunctionalHessian, Hessian
from curvescope.report import write_page
from curvescope.studies import blocks, run_study
from curvescope.studies.blocks import study
from curvescope.studies.problem_config import make_problem
from drawings import unrendered
from scenes import cells, checked

TOML = """
n_layers = 1
d_model = 4
n_heads = 2
d_ff = 8
vocab_size = 3
n_ctx = 11
init = "scaled"
"""
MAKE = {"hessian": Hessian, "ggn": GGN, "functional": FunctionalHessian}

pytestmark = pytest.mark.usefixtures("few_sequences")


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.toml"
    path.write_text(TOML, encoding="utf-8")
    return {
        "model": str(path),
        "data": "task:sorting",
        "dtype": "float64",
        "batch_size": 64,
        "operators": ["hessian", "ggn"],
        "extremes": ["L0.W_[V1]", "L0.h0.W_Q"],
        "density": ["P", "L0.W_1"],
        "num_trace_probes": 40,
        "num_small_probes": 40,
        "num_norm_probes": 40,  # few probes of a block with one large eigenvalue have skew errors
        "num_steps": 15,
        "num_sharp_steps": 0,
        "max_exact": 0,
    }


@pytest.fixture(scope="module")
def measured(settings):
    """The result, the problem, and the dense matrix of each operator with its blocks' places."""
    cfg = blocks.Config.from_dict(settings)
    problem = make_problem(cfg)
    truth = {name: MAKE[name](problem) for name in cfg.operators}
    dense = {name: op.to_dense().numpy() for name, op in truth.items()}
    return blocks.run(cfg), problem, dense, truth["hessian"].space.slices


def test_traces_and_norms_meet_the_dense_blocks_within_calibrated_errors(measured):
    result, _, dense, slices = measured
    scores = {"shared": [], "own": [], "norm": []}
    for operator, part in result.parts.items():
        for i, name in enumerate(part.traces.names):
            block = dense[operator][slices[name], slices[name]]
            if np.abs(block).max() < 1e-12:  # keys' biases do not matter to a softmax
                continue
            scores["shared"].append((part.traces.values[i] - np.trace(block)) / part.traces.stderr[i])
            if name in part.norms:
                own = part.norms[name]
                scores["own"].append((own.trace - np.trace(block)) / own.trace_stderr)
                samples = own.squared_samples
                error = samples.std(ddof=1) / math.sqrt(len(samples))
                scores["norm"].append((samples.mean() - (block**2).sum()) / error)
    for kind, found in scores.items():
        z = np.array(found)
        assert np.abs(z).max() < 4.5, kind  # of up to 60 scores, not quite Gaussian
        assert 0.6 < np.sqrt((z**2).mean()) < 1.5, kind


def test_a_key_bias_which_a_softmax_does_not_see_has_no_curvature(settings):
    own = {"blocks": ["L0.b_[QK]"], "extremes": ["L0.b_K"], "density": [], "max_exact": 64}
    result = blocks.run(blocks.Config.from_dict({**settings, **own, "num_sharp_steps": 4}))
    for table in (result.tables()[name].set_index("block") for name in ("hessian", "ggn")):
        none, some = table.loc["L0.b_K"], table.loc["L0.b_Q"]
        assert none["lambda_max"] == none["norm"] == none["spectral_norm"] == 0
        assert 0 < none["lambda_max_numerical"] < 1e-14 < some["lambda_max"]
        assert math.isnan(none["ceiling"])
        assert none["noise"] == 1
    assert result.parts["hessian"].is_noise("L0.b_K")
    assert result.parts["hessian"].ranking() == ["L0.b_Q", "L0.b_K"]


def test_norms_are_those_of_the_block_and_not_of_its_row(measured):
    result, _, dense, slices = measured
    H = dense["hessian"]
    rows = {name: np.linalg.norm(H[slices[name]]) for name in result.parts["hessian"].norms}
    for name, own in result.parts["hessian"].norms.items():
        exact = np.linalg.norm(H[slices[name], slices[name]])
        assert abs(own.norm - exact) < 4.5 * own.norm_stderr + 1e-25  # key biases: rounding alone
    small = [n for n in rows if np.linalg.norm(H[slices[n], slices[n]]) < 0.5 * rows[n]]
    assert small, "a case where the row would be a wrong answer"
    assert all(result.parts["hessian"].norms[n].norm < 0.75 * rows[n] for n in small)


def test_every_block_has_probes_of_its_own_by_default(measured):
    result, problem, dense, slices = measured
    assert list(result.parts["hessian"].norms) == list(problem.model.blocks)
    assert result.parts["hessian"].traces.names == list(problem.model.blocks)
    part, G = result.parts["ggn"], dense["ggn"]
    ends = {n: part.trace_interval(n) for n in slices}
    inside = [ends[n][0] - 1e-12 <= np.trace(G[s, s]) <= ends[n][1] + 1e-12 for n, s in slices.items()]
    assert np.mean(inside) > 0.8
    assert all(part.trace_of(n)[0] >= -1e-12 for n in slices)


def test_the_trace_shown_is_the_one_with_the_smaller_error(measured):
    part = measured[0].parts["hessian"]
    chosen = {part.trace_of(name)[2] for name in part.norms}
    assert "own" in chosen
    for i, name in enumerate(part.traces.names):
        assert part.trace_of(name)[1] <= part.traces.stderr[i]
    assert part.trace_of("b_nowhere")[2] == ""
    total, stderr = part.trace
    assert abs(total - np.trace(measured[2]["hessian"])) < 4 * stderr


def test_extreme_eigenvalues_are_those_of_the_dense_blocks_and_heads(measured):
    result, problem, _, _ = measured
    for operator, part in result.parts.items():
        assert "L0.h0.W_Q" in part.extremes
        for name, pair in part.extremes.items():
            exact = np.linalg.eigvalsh(MAKE[operator](problem, name).to_dense().numpy())
            assert pair.converged
            ends = exact[-1:] if operator == "ggn" else exact[[0, -1]]
            np.testing.assert_allclose(pair.values, ends, atol=1e-8 * np.abs(exact).max())
            assert part.row(name)["spectral_norm"] == pytest.approx(np.abs(exact).max())


@pytest.fixture(scope="module")
def ranked(settings):
    """Blocks with up to 20 entries written out, the others with Lanczos steps."""
    some = {"extremes": [], "density": [], "num_trace_probes": 4, "num_norm_probes": 3, "num_small_probes": 3}
    cfg = blocks.Config.from_dict({**settings, **some, "num_sharp_steps": 8, "max_exact": 20})
    return blocks.run(cfg)


def test_lambda_max_of_all_blocks_is_shown_without_numbers_of_single_blocks(settings):
    few = {"operators": ["hessian"], "num_trace_probes": 3, "num_sharp_steps": 4, "max_blocks": 0}
    result = blocks.run(blocks.Config.from_dict({**settings, "extremes": [], "density": [], **few}))
    number = result.parts["hessian"].sampled["lambda_max"]
    values = {label: value for label, value, _ in result.summary()}
    assert number.headline in values.values()
    assert number.inverse(2.0, "2/λ_max").headline in values.values()
    assert number.verdict() in result.opening()


def test_small_blocks_are_exact_and_say_so(ranked, measured):
    _, _, dense, slices = measured
    for operator, part in ranked.parts.items():
        for name, where in slices.items():
            A, row = dense[operator][where, where], part.row(name)
            own = part.norms[name]
            assert own.exact == (len(A) <= 20)
            assert (row["probes"] == "exact") == own.exact
            if own.exact and name != "L0.b_K":  # which is nothing but rounding
                ends = np.linalg.eigvalsh(_symmetric(A))
                assert (
                    row["noise"],
                    row["trace_numerical"],
                    row["norm_numerical"],
                    row["lambda_max_numerical"],
                ) == (0, 0, 0, 0)
                found = [row[c] for c in ("trace", "norm", "lambda_max", "lambda_min", "lambda_max_bound")]
                truth = [np.trace(A), np.linalg.norm(A), ends[-1], ends[0], ends[-1]]
                np.testing.assert_allclose(found, truth, atol=1e-12)


def test_the_sharpest_block_is_named_first(ranked, measured):
    _, _, dense, slices = measured
    for operator, part in ranked.parts.items():
        tops = {n: np.linalg.eigvalsh(_symmetric(dense[operator][s, s]))[-1] for n, s in slices.items()}
        order = part.ranking()
        assert set(order) == set(slices)
        assert order[0] == max(tops, key=lambda n: tops[n])
        for name, top in tops.items():
            found = part.sharpness(name)
            assert found.largest <= top + 1e-9
            assert abs(found.largest - top) <= found.error + 1e-9
            least = np.linalg.eigvalsh(_symmetric(dense[operator][slices[name], slices[name]]))[0]
            assert np.isnan(found.low) == np.isnan(found.smallest)
            assert not found.low > least + 1e-9
            assert not found.smallest < least - 1e-9
        frame = ranked.tables()[operator]
        assert list(frame["block"]) == order
        sharp = frame[frame["lambda_max"] > 0]
        np.testing.assert_allclose(sharp["ceiling"] * sharp["lambda_max_bound"], 2, rtol=1e-9)
    lines = {label: (value, words) for label, value, words in ranked.summary()}
    value, words = lines["sharpest, Hessian"]
    assert value == ranked.parts["hessian"].ranking()[0]
    assert "λ_max " in words
    assert ", then " in words
    whole = np.linalg.eigvalsh(_symmetric(dense["hessian"]))[-1]
    ends = ranked.parts["hessian"].whole
    assert ends.values[1] <= whole + 1e-9 <= ends.high + 1e-6
    number = ranked.parts["hessian"].sampled["lambda_max"]
    assert abs(number.value - whole) <= ends.residuals[1] + 1e-9
    rate = number.inverse(2.0, "2/λ_max")
    assert rate.low <= 2 / whole <= rate.high
    assert lines["learning rate below, Hessian"][0] == rate.headline
    assert number.verdict() in ranked.opening().partition(". ")[0]
    assert float(lines["sharpest over median, Hessian"][0].replace(",", "")) > 1
    assert "sharpness" in ranked.figures()


def ended(top: float, high: float) -> OwnProbes:
    """A block of which only both ends count."""
    ends, one = Ends(np.array([-1.0, top]), np.zeros(2), -1.0, high), np.ones(1)
    return OwnProbes(1.0, 0.0, 1.0, 0.0, one, one, 1, 0, 1.0, 1.0, 1.0, 1.0, ends)


def test_a_block_that_may_be_sharper_is_named_with_the_sharpest():
    low = np.ones(3)
    traces = cs.algorithms.BlockTraces(["a", "b", "c"], low, low, np.ones((2, 3)), 2, 0, low, low)
    tops = {"a": (880.0, 880.5), "b": (860.0, 895.0), "c": (9.0, 11.0)}
    part = blocks.Part(traces, {n: ended(*ends) for n, ends in tops.items()}, {}, {}, None)
    result = blocks.Blocks("m", "d", "mse", 1.0, 1.0, [*tops, "d"], np.array([2, 2, 2, 2]), {"hessian": part})
    said = result.opening()
    assert "λ_max 880.0, 1.0 times" in said
    assert "3 of 4 blocks; b (860.0 to 895.0) " in said


def test_a_trace_that_is_noise_is_marked_in_tables():
    samples = np.array([[-3.0, 5.0], [1.0, 5.5], [-1.0, 4.5]])
    low, high, zero = np.array([0.0, 4.0]), np.array([4.97, 6.0]), np.array([0.0, 5.0])
    traces = cs.algorithms.BlockTraces(["a", "b"], zero, zero, samples, 3, 0, low, high, psd=True)
    part = blocks.Part(traces, {}, {}, {}, None)
    result = blocks.Blocks("m", "d", "mse", 1.0, 1.0, ["a", "b"], np.array([2, 2]), {"ggn": part})
    frame = result.tables()["ggn"].set_index("block")
    assert frame.loc["a", "trace"] == "< 5.0"
    assert frame.loc["b", "trace"] == 5.0
    assert list(frame["noise"]) == pytest.approx([1.0, 0.2])
    assert {label for label, *_ in result.summary()} >= {"traces within noise, GGN"}


def test_divergences_meet_those_of_the_exact_spectra(measured):
    result, _, dense, slices = measured
    for operator, part in result.parts.items():
        found = part.heterogeneity
        pieces = {name: _symmetric(dense[operator][slices[name], slices[name]]) for name in found.names}
        exact = {n: cs.spectral_density(Matrix(torch.tensor(A)), num_steps=100) for n, A in pieces.items()}
        truth = heterogeneity(exact)
        assert (truth.stderr == 0).all()
        off = ~np.eye(len(found.names), dtype=bool)
        error = np.abs(found.divergence - truth.divergence)[off]
        assert (error < 4 * found.stderr[off] + np.abs(found.bias[off]) + 0.01).all()
        assert abs(found.mean - truth.mean) < 4 * found.mean_stderr + 0.01


def _symmetric(A):
    return (A + A.T) / 2


def test_divergences_are_a_matrix_of_distances_in_bits(measured):
    for part in measured[0].parts.values():
        D = part.heterogeneity.divergence
        np.testing.assert_array_equal(D, D.T)
        np.testing.assert_array_equal(np.diag(D), 0)
        assert ((D >= 0) & (D <= 1 + 1e-12)).all()
        assert part.heterogeneity.mean == pytest.approx(D[np.triu_indices(len(D), 1)].mean())


def test_own_probes_of_a_known_matrix():
    A = torch.tensor([[2.0, 1.0], [1.0, -3.0]], dtype=torch.float64)
    found = own_probes(Matrix(A), num_probes=4000, seed=3)
    assert abs(found.trace + 1) < 4 * found.trace_stderr
    assert found.trace_stderr == pytest.approx(2 / math.sqrt(4000), rel=0.05)  # √(2 Σ_{i≠j} A_ij²)
    assert abs(found.norm - math.sqrt(15)) < 4 * found.norm_stderr
    assert own_probes(Matrix(torch.zeros_like(A)), num_probes=2).norm == 0


QUICK = {"operators": ["functional"], "num_trace_probes": 3, "num_norm_probes": 2, "norms": ["L0.W_[QK]"]}


def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(settings, tmp_path, monkeypatch):
    settings = {**settings, **QUICK, "extremes": ["U"], "num_density_probes": 2}
    expected = blocks.run(blocks.Config.from_dict(settings))

    def stop(what, number, total):
        assert total == 1 + 2 + 1 + 2 + 1
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study.run("blocks", settings, out=tmp_path / "runs", progress=stop)
    (begun,) = (tmp_path / "runs" / "blocks").iterdir()
    assert len(list((begun / "state").glob("*/result.json"))) == 4
    computed = []
    original = study.spectral_density
    monkeypatch.setattr(study, "spectral_density", lambda *a, **k: computed.append(1) or original(*a, **k))
    monkeypatch.setattr(study, "block_traces", None)
    with unrendered():
        path, result = run_study.run("blocks", settings, out=tmp_path / "runs")
    assert path == begun
    assert len(computed) == 2
    for name, frame in expected.tables().items():
        assert frame.equals(result.tables()[name]), name
    _, again = run_study.load(path)
    np.testing.assert_array_equal(
        again.parts["functional"].heterogeneity.divergence,
        expected.parts["functional"].heterogeneity.divergence,
    )
    drawn = {p.stem for p in (path / "figures").glob("*.png")}
    assert drawn == {"traces", "norms", "extremes", "densities", "heterogeneity"}
    assert set(result.tables()) | drawn <= set(result.captions())
    scenes = checked(result)
    assert set(scenes) == {"block_map", "densities", "heterogeneity"}
    part = result.parts["functional"]
    chosen = scenes["heterogeneity"].get("variants", {}).get("functional", scenes["heterogeneity"])
    (heat,) = chosen["data"]
    np.testing.assert_allclose(heat["z"], part.heterogeneity.divergence, rtol=1e-5)
    for name, z in cells(scenes["block_map"], "functional|norm"):
        if name in part.norms and z is not None:
            assert z == pytest.approx(math.log10(part.norms[name].norm), rel=1e-5, abs=1e-6)
    normed = {name for name, _ in cells(scenes["block_map"], "functional|norm") if name}
    assert normed == set(part.norms)
    for row in scenes["block_map"]["variants"]["functional|norm"]["data"][0]["text"]:
        assert any(row)  # roles that have no norm have no row
    page = write_page([path], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "every layer × role block" in page
    assert page.count("<img ") == 5


@pytest.mark.usefixtures("unrendered")
def test_what_is_not_asked_for_is_not_there(settings, tmp_path):
    quick = {**settings, **QUICK, "extremes": [], "density": [], "norms": [], "num_trace_probes": 1}
    path, result = run_study.run("blocks", quick, out=tmp_path / "runs")
    assert set(result.figures()) == {"traces"}
    frame = result.tables()["functional"]
    assert list(frame.columns) == [
        *("block", "parameters", "trace", "trace_numerical", "trace_low", "trace_high", "probes", "noise")
    ]
    assert frame["parameters"].sum() == cs.load(settings["model"]).num_parameters
    page = cs.studies.run_study.load(path)[1].summary()
    assert "settled" in page[0][2]


def test_a_module_without_layers_is_drawn_as_bars():
    part = blocks.Part(_bare_traces(["one.weight", "two.weight"]), {}, {}, {}, None)
    sizes = np.array([2, 2])
    result = blocks.Blocks("m", "d", "mse", 1.0, 1.0, part.traces.names, sizes, {"hessian": part})
    (figure,) = result.figures().values()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == part.traces.names


def _bare_traces(names):
    samples = np.ones((2, len(names)))
    return cs.algorithms.BlockTraces(names, samples[0], samples[0] * 0, samples, 2, 0)


def test_settings_are_checked(settings, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'hessian'"):
        blocks.Config.from_dict({"operators": ["hesian"]})
    with pytest.raises(UsageError, match="operators: expected at least one"):
        blocks.Config(operators=())
    with pytest.raises(UsageError, match="num_steps: expected at least 3"):
        blocks.Config(num_steps=2)
    assert blocks.Config.from_dict({"extremes": "L0.*"}).extremes == ("L0.*",)
    for option in ("blocks", "norms", "extremes", "density"):
        with pytest.raises(UsageError, match=r"no block matches 'L7\.\*'"):
            run_study.run("blocks", {**settings, option: ["L7.*"]}, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
