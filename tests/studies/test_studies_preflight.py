"""What a run will take: steps that are the study's own, a formula that adds up, words on what to change."""

from dataclasses import replace

import pytest
import torch

from curvescope.core.errors import CurvescopeError
from curvescope.operators.base import CurvatureOperator
from curvescope.runs.study import Step
from curvescope.studies import STUDIES, find, run_study
from curvescope.studies.preflight import forecast, view
from curvescope.studies.preflight.measurements import (
    AlgorithmCost,
    DataSubset,
    MemoryMeter,
    ProductCost,
    ProductKind,
    ProductMeasurements,
    ProductTimer,
    SubsetCost,
    _grown,
    check_room,
    cuts,
    part,
    scores,
    slower,
    whole,
    work,
)
from curvescope.studies.preflight.prediction import (
    AROUND,
    BUFFERS,
    DRAWN,
    FIGURES,
    MARGIN,
    Forecast,
    advice,
    kinds_of,
    predict,
    sampled,
)
from curvescope.studies.problem_config import make_problem
from curvescope.studies.time_budget import Timer
from curvescope.tokenizers import ByteTokenizer

SMALL = "n_layers = 2\nd_model = 8\nn_heads = 2\nd_ff = 16\nvocab_size = 12\nn_ctx = 18\ntied = true\n"
FEW = {"num_steps": 4, "num_probes": 2, "num_eigenvalues": 1, "num_trace_probes": 3, "num_map_probes": 1}
DATASETS = ["task:addition", "task:addition?num_sequences=4"]
STEPWISE = [name for name in STUDIES if find(name).plan is not None]
pytestmark = pytest.mark.usefixtures("few_sequences")


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return {"model": str(path), "data": "task:addition", "dtype": "float64"}


def flat(problem, taken, free=10**9):
    """As if every kind had taken the same."""

    def measured(steps):
        around = AlgorithmCost(row=0.0, kept=0.0, file=0.0)
        one = DataSubset(1, 0)
        return ProductMeasurements(
            dict.fromkeys(kinds_of(steps), taken), around, one, one, 1000, free, True, True, ""
        )

    return measured


def test_time_and_memory_are_added_up(small):
    problem = make_problem(find("spectrum").Config.from_dict({**small, "batch_size": 4}))  # two batches
    n = problem.space().size
    steps = [
        Step("a", "hessian", 10, columns=2, basis=3),
        Step("b", "hessian", 4, most=40),
        Step("c", "ggn", 5),
    ]
    taken = ProductCost(seconds=1.0, building=7.0, graph=100, passing=50)
    found = predict(problem, steps, flat(problem, taken)(steps), 3.0)
    assert [stage.seconds for stage in found.stages] == [10 * 2 + 2 * 7, 4 * 2, 5 * 2 + 2 * 7, 0]
    assert found.stages[1].most == 40 * 2
    assert found.seconds == 34 + 8 + 24 + 3 + AROUND
    assert found.most == pytest.approx(MARGIN * (found.seconds + 72))
    vectors = 2 * (3 + BUFFERS) * n * 8
    assert found.stages[0].memory == 1000 + 2 * 100 + vectors + 50
    assert found.stages[2].memory == 1000 + 4 * 100 + BUFFERS * n * 8 + 50  # both graphs are kept
    assert (found.stages[3].what, found.stages[3].memory) == (DRAWN, 1000 + 4 * 100 + FIGURES)
    assert found.memory == max(stage.memory for stage in found.stages)
    assert found.fits


def test_graphs_that_do_not_fit_are_built_for_every_product(small):
    problem = make_problem(find("spectrum").Config.from_dict(small))
    steps, taken = [Step("a", "hessian", 10)], ProductCost(seconds=1.0, building=7.0, graph=100, passing=0)
    assert predict(problem, steps, flat(problem, taken, free=150)(steps), 0.0).stages[0].seconds == 80.0
    assert predict(problem, steps, flat(problem, taken, free=201)(steps), 0.0).stages[0].seconds == 17.0


def test_operators_that_are_made_anew_are_there_one_at_a_time(small):
    problem = make_problem(find("spectrum").Config.from_dict(small))
    blocks = (("L0.W_Q",), ("L0.W_K",), ("L1.W_Q",))
    steps = [Step("a", "hessian", 6, spaces=blocks, made=2), Step("b", "hessian", 6, spaces=blocks)]
    taken = ProductCost(seconds=1.0, building=7.0, graph=100, passing=0)
    found = predict(problem, steps, flat(problem, taken)(steps), 0.0)
    assert [stage.graphs for stage in found.stages[:2]] == [100, 100]
    assert [stage.seconds for stage in found.stages[:2]] == [6 + 6 * 7, 6]
    shared = [step._replace(made=0) for step in steps]
    assert predict(problem, shared, flat(problem, taken)(shared), 0.0).stages[0].graphs == 300


def test_of_many_operators_a_few_are_measured():
    blocks = tuple((f"L{i}.W_Q",) for i in range(9))
    steps = [Step("a", "ggn", 9, spaces=blocks, columns=4), Step("b", "ggn", 9, spaces=blocks)]
    assert sampled(steps[0]) == [("L1.W_Q",), ("L4.W_Q",), ("L7.W_Q",)]
    assert list(kinds_of(steps)) == [ProductKind("ggn", (f"L{i}.W_Q",), 1) for i in (1, 4, 7)]


@pytest.mark.parametrize("name", ["spectrum", "blocks", "gap", "compare"])
def test_steps_are_the_products_that_a_study_takes(name, small, monkeypatch, undrawn):
    """Column by column, but for Lanczos where a space is exhausted, and eigenvalues until they are sure."""
    few = {"num_probes": 2, "num_steps": 2, "num_density_probes": 1, "num_density_steps": 3}
    settings = {
        # products on groups of sequences are a part of a product each
        "spectrum": {**FEW, "max_products": 20, "sampling": False},
        "blocks": {"blocks": ["L0.*"], "operators": ["ggn"], "sampling": False},
        "gap": {**few, "num_draws": 2, "blocks": ["L0.W_Q"]},
        "compare": {**few, "datasets": DATASETS, "sampling": False},
    }[name]
    study = find(name)
    cfg = study.Config.from_dict({**small, **settings})
    counted, multiply = [], CurvatureOperator._matmat

    def counting(self, V):
        counted.append(V.shape[1])
        return multiply(self, V)

    monkeypatch.setattr(CurvatureOperator, "_matmat", counting)
    study.run(cfg)
    steps = study.plan.steps(cfg, make_problem(cfg))
    exactly = sum(step.products for step in steps if not step.most)
    most = sum(max(step.products, step.most) for step in steps)
    assert 0.9 * exactly <= sum(counted) <= most


@pytest.mark.parametrize("name", STEPWISE)
def test_every_kind_that_a_study_names_can_be_measured(name, small):
    study = find(name)
    cfg = study.Config.from_dict({**small, **({"datasets": DATASETS} if name == "compare" else {})})
    problem = make_problem(cfg)
    steps = study.plan.steps(cfg, problem)
    assert all(step.products > 0 for step in steps)
    one, clock = DataSubset(1, whole(problem).tokens), iter(range(10**6)).__next__
    bench, kinds = ProductTimer(problem, cfg, MemoryMeter(problem.device), clock, one), {}
    for kind in kinds_of(steps):
        kinds.setdefault(kind.name, kind)
    for kind in kinds.values():
        assert bench.take(kind).seconds > 0


def test_a_study_without_a_plan_has_no_forecast():
    assert find("heads").plan is None
    assert forecast("heads", find("heads"), find("heads").Config()) is None
    assert "heads" in STUDIES


@pytest.fixture(scope="module")
def foretold(tmp_path_factory):
    path = tmp_path_factory.mktemp("foretold") / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    settings = {"model": str(path), "data": "task:addition", "dtype": "float64", **FEW}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("curvescope.studies.preflight.measurements.PATIENCE", 0.1)
        return forecast("spectrum", find("spectrum"), find("spectrum").Config.from_dict(settings))


def test_a_forecast_in_words(foretold):
    said = "\n".join(view.lines(foretold))
    for word in (
        "parameters: ",
        "attention: our fused kernel",
        "float64: ",
        "dropout: none",
        "it fits into memory: ",
    ):
        assert word in said
    assert "tied weights: the unembedding is the embedding" in said
    assert "12 of" not in said
    data = view.as_dict(foretold)
    assert data["fits"] is True
    assert data["seconds"] == pytest.approx(sum(s["seconds"] for s in data["stages"]) + AROUND)
    assert 0 < data["memory_bytes"] < data["base_bytes"] + data["free_bytes"]


def test_why_attention_is_plain(small):
    cfg = find("spectrum").Config.from_dict({**small, **FEW, "engine": "autograd"})
    found = forecast("spectrum", find("spectrum"), cfg)
    assert view.attention(found).endswith("engine=autograd was requested")


def scarce(found: Forecast, *, vectors: int, passing: int, free: int, columns: int = 1) -> Forecast:
    """The forecast as if there were less memory, or more were needed."""
    p = found.prediction
    stage = p.stages[0]._replace(
        vectors=vectors, graphs=0, memory=p.base + vectors + passing, columns=columns
    )
    return replace(found, prediction=replace(p, stages=(stage,), free=free, passing=passing))


def test_what_to_change_where_it_does_not_fit(foretold):
    column = foretold.problem.space().size * 8
    of_vectors = "\n".join(advice(scarce(foretold, vectors=40 * column, passing=0, free=20 * column)))
    assert "it does not fit into memory: " in of_vectors
    assert f"{40 - BUFFERS} vectors of" in of_vectors
    assert f"{20 - BUFFERS} would fit. Use a smaller num_steps" in of_vectors
    assert "fewer probes" not in of_vectors  # one runs at a time
    assert "--blocks 'L0.*'" in of_vectors
    several = scarce(foretold, vectors=40 * column, passing=0, free=20 * column, columns=2)
    assert "a smaller num_steps or fewer probes" in "\n".join(advice(several))
    assert "batch:" not in of_vectors
    of_batch = "\n".join(advice(scarce(foretold, vectors=0, passing=8000, free=4000)))
    assert "--set batch_size=4 instead of 8" in of_batch
    assert "vectors:" not in of_batch


def test_ranks_are_as_many_as_are_needed(foretold):
    p = foretold.prediction
    found = scarce(foretold, vectors=3 * p.base, passing=0, free=p.base)
    assert "torchrun --nproc-per-node 2 -m curvescope … --parallel shards" in "\n".join(advice(found))
    assert "ranks:" not in "\n".join(advice(replace(found, study="taylor")))


def test_a_product_that_does_not_fit_is_tried_on_fewer_sequences(small, monkeypatch):
    cfg = find("spectrum").Config.from_dict({**small, **FEW})
    take, tried = ProductTimer.take, []

    def scarce_memory(self, kind, *args, **kwargs):
        count = self.problem.batches.num_sequences
        tried.append(count)
        if count > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return take(self, kind, *args, **kwargs)

    monkeypatch.setattr(ProductTimer, "take", scarce_memory)
    monkeypatch.setattr("curvescope.studies.preflight.measurements.PATIENCE", 1e3)
    monkeypatch.setattr("curvescope.studies.preflight.measurements.ENOUGH", 0)
    assert forecast("spectrum", find("spectrum"), cfg).measured.cut.sequences == 2
    assert max(tried) == 8
    monkeypatch.setattr(
        ProductTimer, "take", lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError)
    )
    with pytest.raises((CurvescopeError, torch.OutOfMemoryError)):
        forecast("spectrum", find("spectrum"), cfg)


def test_a_long_run_begins_with_its_forecast(small, foretold, tmp_path, monkeypatch, undrawn):
    p = foretold.prediction
    slow = replace(p, other=300.0 + p.other - p.seconds)
    monkeypatch.setattr(Timer, "_timed", lambda self: 10.0)
    monkeypatch.setattr(
        "curvescope.studies.preflight.forecast", lambda *_, **__: replace(foretold, prediction=slow)
    )
    said = []
    limit = run_study.Limit(profile="full")
    path, _ = run_study.run("spectrum", {**small, **FEW}, out=tmp_path, limit=limit, say=said.append)
    assert "up to about " not in said[0]  # one prediction
    assert "\nattention: our fused kernel" in said[0]
    assert "time: about 5 min" in said[0]
    assert "attention: " in (path / "log.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(Timer, "_timed", lambda self: 1e-4)
    other = {**small, **FEW, "seed": 1}
    count = len(said)
    run_study.run("spectrum", other, out=tmp_path, limit=limit, say=said.append)
    assert "attention" not in "".join(said[count:])
    assert said[count].startswith("up to about ")


LONG = "n_layers = 1\nd_model = 16\nn_heads = 2\nd_ff = 16\nvocab_size = 512\nn_ctx = 256\n"


@pytest.fixture
def long(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(LONG, encoding="utf-8")
    tokenizer = tmp_path / "bytes.json"
    ByteTokenizer().save(tokenizer)
    return {"model": str(path), "tokenizer": str(tokenizer), "tokens": 512, "seq_len": 256, "batch_size": 2}


def test_a_slow_product_is_measured_on_the_first_tokens(long, monkeypatch):
    """A clock by which a product takes a + b s T (1 + T / 6d): what is told of the whole batch is that."""
    cfg = find("spectrum").Config.from_dict({**long, **FEW})
    problem = make_problem(cfg)
    now, multiply = [0.0], CurvatureOperator._matmat

    def slow(self, V):
        T = self.problem.batches[0].inputs.shape[1]
        now[0] += V.shape[1] * (0.3 + 0.01 * self.problem.batches.num_sequences * T * (1 + T / 96))
        return multiply(self, V)

    monkeypatch.setattr(CurvatureOperator, "_matmat", slow)
    found = forecast("spectrum", find("spectrum"), cfg, clock=lambda: now[0])
    assert now[0] < 20  # one on the whole batch takes 19 s
    assert found.measured.everything == whole(problem) == DataSubset(2, 256)
    assert found.measured.cut == DataSubset(1, 128)
    kind, taken = next(iter(found.measured.taken.items()))
    assert (kind.name, kind.columns) == ("hessian", 1)
    assert taken.seconds == pytest.approx(0.3 + 0.01 * 2 * 256 * (1 + 256 / 96))
    assert "measured on the first 128 of 256 tokens of one sequence, of 2 sequences" in view.measured_on(
        found
    )
    assert view.as_dict(found)["measured_tokens"] == 128


def test_parts_of_a_batch_go_from_all_to_the_first_tokens(long):
    problem = make_problem(find("spectrum").Config.from_dict(long))
    assert cuts(whole(problem)) == [
        DataSubset(2, 256),
        DataSubset(1, 256),
        DataSubset(1, 128),
        DataSubset(1, 64),
        DataSubset(1, 32),
    ]
    assert tuple(part(problem, DataSubset(1, 64)).batches[0].inputs.shape) == (1, 64)
    assert work(problem, DataSubset(2, 96)) == 2 * 96 * 2
    assert scores(problem, fused=True) == 0
    assert scores(problem, fused=False) == pytest.approx(2 / 16 / 16)
    assert slower((1.0, 3.0), (2.0, 4.0), 4.0) == 6 / 4  # 2 + w
    assert slower((1.0, 3.0), (2.0, 2.0), 4.0) == 2.0  # noise: as the work


def test_sequences_without_targets_at_their_start_are_not_cut(small):
    problem = make_problem(find("spectrum").Config.from_dict(small))
    assert whole(problem).tokens == 0  # 18 tokens are too few as well
    assert cuts(DataSubset(3, 0)) == [DataSubset(3, 0), DataSubset(2, 0), DataSubset(1, 0)]


def test_what_cannot_fit_is_not_begun(long, monkeypatch):
    problem = make_problem(find("spectrum").Config.from_dict(long))
    kind = ProductKind("hessian", (), 2)
    check_room(problem, kind, 10**9)
    with pytest.raises(CurvescopeError, match=r"vectors alone take .* and 1 kB are free"):
        check_room(problem, kind, 1024)
    monkeypatch.setattr(MemoryMeter, "free", lambda self: 1024)
    monkeypatch.setattr(ProductTimer, "take", lambda *_, **__: pytest.fail("a product was begun"))
    with pytest.raises(CurvescopeError, match="no product of"):
        forecast("spectrum", find("spectrum"), find("spectrum").Config.from_dict({**long, **FEW}))


def test_over_a_day_is_said_with_what_to_change(foretold):
    p = foretold.prediction
    slow = replace(foretold, prediction=replace(p, other=400 * 86400.0))
    said = advice(slow)[-1]
    assert "over a day" in said
    assert "num_probes (2)" in said
    assert "--budget 1h" in said
    assert "time: about 400 days" in "\n".join(view.taking(slow))
    assert "over a day" not in "\n".join(advice(foretold))


def test_a_piece_of_its_own_has_the_memory_to_itself(small):
    problem = make_problem(find("spectrum").Config.from_dict(small))
    taken = ProductCost(seconds=1.0, building=0.0, graph=100, passing=0)
    for alone, held in ((True, 100), (False, 200)):
        steps = [Step(k, k, 1, made=1, alone=alone) for k in ("hessian", "ggn")]
        assert predict(problem, steps, flat(problem, taken)(steps), 0.0).stages[1].graphs == held


def test_a_graph_that_is_not_kept_passes(small):
    problem = make_problem(find("spectrum").Config.from_dict(small))
    steps, taken = [Step("a", "hessian", 1)], ProductCost(seconds=1.0, building=7.0, graph=100, passing=5)
    stage = predict(problem, steps, flat(problem, taken, free=150)(steps), 0.0).stages[0]
    assert (stage.graphs, stage.memory - stage.vectors) == (0, 1000 + 105)


def test_one_part_alone_says_nothing_of_how_memory_grows(small):
    """What passed differs by chance between two measurements of the same part."""
    problem = make_problem(find("spectrum").Config.from_dict(small))
    one = DataSubset(1, 0)
    ends = tuple(SubsetCost(one, ProductCost(1.0, 0.0, 0, passing)) for passing in (10, 20))
    grown = _grown(problem, DataSubset(4, 0), {ProductKind("hessian", (), 1): ends[1]}, ends, fused=True)
    assert grown[ProductKind("hessian", (), 1)] == ProductCost(4.0, 0.0, 0, 20)
