"""A run checks its operators: what is right passes with room to spare, what is planted wrong is caught."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import curvescope as cs
from commands import call
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator.first_product_hooks import on_first_product
from curvescope.core.ranks import Division, use_division
from curvescope.engines import SecondDerivative
from curvescope.operators import GGN, FunctionalHessian, Hessian
from curvescope.report.pieces.methods import methods
from curvescope.runs.verification import checks, verification
from curvescope.runs.verification.columns import draw_blocks
from curvescope.runs.verification.verification import kind_of, verify
from curvescope.studies import run_study

pytestmark = pytest.mark.usefixtures("undrawn", "few_sequences")
SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"


def zoo(dtype="float64", **options):
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 16, "vocab_size": 12, "n_ctx": 18} | options
    return cs.Problem(
        cs.load(cs.TransformerConfig(**shape), dtype=dtype), cs.task_data("addition", num_sequences=8)
    )


def perceptron(dtype):
    """Piecewise linear, with dropout, in train mode."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    with pytest.warns(UserWarning, match="dropout is switched off"):
        return cs.Problem(nn.Sequential(*layers).to(dtype), (x, torch.arange(40) % 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "make",
    [lambda dtype: zoo(str(dtype).removeprefix("torch.")), perceptron],
    ids=["zoo", "relu and dropout"],
)
def test_right_products_pass_with_room_to_spare(make, dtype):
    found = verify(Hessian(make(dtype)))
    assert [check.name for check in found.checks] == ["symmetry", "finite difference", "columns"]
    for check in found.checks:
        assert check.error < check.tolerance / 20


def test_a_block_a_shift_and_other_parameters_pass():
    problem = zoo()
    moved = problem.at({name: 1.1 * p.detach() for name, p in problem.model.named_parameters()})
    for op in (
        Hessian(problem, "L0.W_Q", damping=0.3, weight_decay={"matrices": 0.1}),
        Hessian(moved),
        Hessian(problem, engine="autograd"),
        Hessian(problem, checkpoint=True),
    ):
        assert verify(op).passed
    assert verify(Hessian(problem).block("L0.W_Q", "L0.W_K")) is None
    assert verify(GGN(problem)).passed


def test_a_model_too_large_for_a_copy_is_differentiated_as_it_is(monkeypatch):
    monkeypatch.setattr(verification, "COPIED", 10)
    found = verify(Hessian(zoo("float32")))
    assert [check.name for check in found.checks] == ["symmetry", "finite difference"]
    assert found.passed
    assert "torch.float32" in found.checks[1].words
    assert found.checks[1].tolerance <= 0.05


def test_a_copy_that_does_not_fit_is_done_without(monkeypatch):
    own = cs.Problem.gradient

    def gradient(self, *patterns):
        if self.dtype == torch.float64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(self, *patterns)

    monkeypatch.setattr(cs.Problem, "gradient", gradient)
    found = verify(Hessian(zoo("float32")))
    assert found.passed
    assert "torch.float32" in found.checks[1].words


def test_a_figure_says_what_was_checked():
    box = methods("density", "what", "", {}, {}, "1 s", "curvescope run", checked="Hessian symmetry 1e-07")
    assert ("checked", "Hessian symmetry 1e-07") in box.rows
    assert "checked" not in dict(methods("density", "what", "", {}, {}, "1 s", "curvescope run").rows)


def test_nothing_is_moved_and_nothing_drawn():
    problem = perceptron(torch.float32)
    module = problem.model.module
    H, before = Hessian(problem), {name: p.detach().clone() for name, p in module.named_parameters()}
    v = torch.ones(H.shape[0])
    product, state = H @ v, torch.get_rng_state()
    with H.frozen():
        verify(H)
        torch.testing.assert_close(H @ v, product, rtol=0, atol=0)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())


def wrong(kind):
    """The product of a batch with a mistake in it."""
    own = SecondDerivative.apply

    def product(self, engine, index, batch, rows, tangents, receive):
        def changed(name, t):
            if kind == "one in a hundred":
                t = 1.01 * t
            elif name == "U" and kind == "not symmetric":
                t = t + 0.1 * t.flip(-1)
            elif name == "U":
                t = t.clone()
                t.view(len(t), -1)[:, -1] = 0
            receive(name, t)

        own(self, engine, index, batch, rows, tangents, changed)

    return product


@pytest.mark.parametrize("kind", ["one in a hundred", "a block without its last entry", "not symmetric"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_planted_mistake_is_caught(kind, dtype, monkeypatch):
    monkeypatch.setattr(SecondDerivative, "apply", wrong(kind))
    found = verify(Hessian(zoo(dtype)))
    assert not found.passed
    assert not found.checks[1].passed
    if kind == "not symmetric":
        assert not found.checks[0].passed
    assert "failed its check" in str(found.refusal())


def padded(dtype, *, tied, looks_up):
    """A table whose padding row occurs in the data, looked up by a layer or by a function."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(7, 4, padding_idx=0 if looks_up == "layer" else None)
            self.l, self.o = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            nn.init.normal_(self.e.weight)
            if tied:
                self.o.weight = self.e.weight

        def forward(self, x):
            h = self.e(x) if looks_up == "layer" else nn.functional.embedding(x, self.e.weight, padding_idx=0)
            return self.o(torch.tanh(self.l(h)))

    torch.manual_seed(0)
    ids = torch.tensor([[0, 1, 2], [3, 0, 4]])
    return cs.Problem(Padded().to(dtype), (ids, ids.roll(1, 1)))


@pytest.mark.parametrize("kind", [Hessian, GGN, FunctionalHessian])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("looks_up", ["layer", "function"])
def test_a_padding_row_leaves_differences_as_sharp_as_they_are(kind, dtype, tied, looks_up):
    problem = padded(dtype, tied=tied, looks_up=looks_up)
    found = verify(kind(problem))
    assert len(found.checks) == 3
    for check in found.checks:
        assert check.error < check.tolerance / 20
    assert found.checks[1].tolerance == verification.TOLERANCE[dtype]
    wrong = verify(with_more(kind, lambda op, found, *rest: 1.5 * found)(problem))
    assert not wrong.checks[1].passed


def with_more(kind, change):
    """An operator that is one of a kind, with something added to its products."""

    class Wrong(kind):
        def completed(self, total, N, V, rows, columns):
            found = super().completed(total, N, V, rows, columns)
            return change(self, found, V, rows, columns)

    Wrong.__name__ = kind.__name__
    return Wrong


@pytest.mark.parametrize(("block", "share"), [("L0.W_Q", 1.0), ("L1.W_K", 1.0), ("L0.W_V", 0.1)])
def test_a_diagonal_block_that_is_wrong_is_caught_beside_large_couplings(block, share):
    problem = zoo("float32", n_layers=2)
    own = Hessian(problem).block(block)

    def change(op, found, V, rows, columns):
        if block in rows.slices and block in columns.slices:
            found = found.clone()
            found[rows.slices[block]] += share * (own @ V[columns.slices[block]].contiguous())
        return found

    found = {check.name: check for check in verify(with_more(Hessian, change)(problem)).checks}
    assert not found["columns"].passed
    assert block in found["columns"].words


@pytest.mark.parametrize("kind", [GGN, FunctionalHessian])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("factor", [2.0, 1.05])
def test_a_multiple_of_a_part_is_caught(kind, dtype, factor):
    scaled = with_more(kind, lambda op, found, *rest: factor * found)
    found = {check.name: check for check in verify(scaled(zoo(dtype))).checks}
    assert found["symmetry"].passed
    assert not found["quadratic form"].passed
    assert not found["columns"].passed


def test_a_wrong_part_of_a_model_too_large_for_a_copy_is_caught(monkeypatch):
    monkeypatch.setattr(verification, "COPIED", 10)
    for kind in (GGN, FunctionalHessian):
        right = verify(kind(zoo("float32")))
        assert [check.name for check in right.checks] == ["symmetry", "quadratic form"]
        assert right.passed
        assert not verify(with_more(kind, lambda op, found, *rest: 2 * found)(zoo("float32"))).passed


def test_a_shift_that_is_wrong_is_caught():
    problem = zoo()
    op = Hessian(problem, damping=0.3)
    assert verify(op).passed
    op.shift = type("Twice", (), {"diagonal": op.shift.diagonal, "added": lambda self, x, *rest: x})()
    assert [check.name for check in verify(op).checks if not check.passed] == ["shift"]


def test_blocks_are_drawn_over_all_of_them_one_of_a_role_first():
    space = cs.load("tiny-gpt").space()
    drawn = [set(draw_blocks(space, most=12, stream=[stream])) for stream in range(40)]
    assert draw_blocks(space, most=12, stream=[0]) == draw_blocks(space, most=12, stream=[0])
    assert set.union(*drawn) == {block.name for block in space}
    assert all(len({name.partition(".")[2] or name for name in some}) == 12 for some in drawn)
    assert draw_blocks(space, most=100, stream=[0]) == [block.name for block in space]


def test_undefined_numbers_do_not_pass():
    assert not checks.ErrorCheck("symmetry", float("nan"), 1.0, "").passed


def test_every_kind_is_looked_at_once_before_its_first_product():
    problem, seen = zoo(), []
    H, G = Hessian(problem), GGN(problem)
    v = torch.ones(H.shape[0], dtype=torch.float64)
    with on_first_product(lambda op: seen.append((type(op).__name__, op @ v)), kind_of):
        for op in (H, H.block("L0.W_Q"), G, H):
            op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert [name for name, _ in seen] == ["Hessian", "GGN"]


def test_models_of_other_structure_are_looked_at_and_other_weights_are_not():
    seen, other_weights = [], zoo()
    with torch.no_grad():
        for p in other_weights.model.parameters():
            p *= 1.1
    more = [zoo(), other_weights, zoo(n_layers=2), zoo("float32"), zoo(d_ff=0)]
    with on_first_product(lambda op: seen.append(op.problem), kind_of):
        for problem in more:
            Hessian(problem) @ torch.ones(Hessian(problem).shape[0], dtype=problem.dtype)
    assert seen == [problem for problem in more if problem is not other_weights]


def test_engines_losses_and_code_are_kinds_of_their_own():
    problem, seen = zoo(), []
    ops = [Hessian(problem), Hessian(problem, engine="autograd"), Hessian(problem, checkpoint=True)]
    ops += [Hessian(cs.Problem(problem.model, problem.batches, cs.CrossEntropy(label_smoothing=0.1)))]
    with on_first_product(seen.append, kind_of):
        for op in (*ops, *ops):
            op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert seen == ops


def test_several_models_have_an_entry_each(tmp_path):
    for problem in (zoo(), zoo(n_layers=2), zoo()):
        checks.save_verification(tmp_path, verify(Hessian(problem)))
    assert len(checks.read_verifications(tmp_path)) == 2


class Divides(Division):
    """Ranks that make this share of a product."""

    def __init__(self, share):
        self.share = share

    def undivided(self, op, V, rows, columns):
        total, N = op.undivided(V, rows, columns)
        return self.share * total, N

    def frozen(self, op):
        return nullcontext()


@pytest.mark.parametrize(("share", "passed"), [(1.0, True), (0.5, False)])
def test_products_that_ranks_divide_are_compared_with_those_of_one(asked, tmp_path, share, passed):
    fails = nullcontext() if passed else pytest.raises(CurvescopeError, match="ranks is off by 5")
    with use_division(Divides(share)), fails:
        run_study.run("spectrum", asked, out=tmp_path / "runs")
    (path,) = (tmp_path / "runs" / "spectrum").iterdir()
    found = {check["name"]: check for check in checks.read_verifications(path)[0]["checks"]}
    assert found["symmetry"]["error"] <= found["symmetry"]["tolerance"]
    assert (found["ranks"]["error"] <= found["ranks"]["tolerance"]) == passed


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    few = {"num_probes": 1, "num_steps": 4, "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1}
    few |= {"max_products": 6, "map_blocks": ["L0.W_[QV]"]}
    return {"model": str(path), "data": "task:addition", "dtype": "float64", **few}


def test_a_run_records_its_errors(asked, tmp_path):
    path, _ = run_study.run("spectrum", asked, out=tmp_path / "runs")
    text = (path / "verification.json").read_text(encoding="utf-8")
    assert "uᵀCv" in text
    found = json.loads(text)
    assert [one["operator"] for one in found] == ["Hessian", "GGN", "FunctionalHessian"]
    assert all(one["passed"] for one in found)
    assert "checked: Hessian symmetry " in (path / "log.txt").read_text(encoding="utf-8")
    assert checks.describe_errors(checks.read_verifications(path)).startswith("Hessian symmetry ")


def test_a_failed_check_is_exit_code_one_with_the_numbers(asked, tmp_path, monkeypatch, capsys):
    settings = [f"--set={name}={value}" for name, value in asked.items() if isinstance(value, int)]
    words = ["run", "spectrum", asked["model"], "--data", "task:addition", "--out", tmp_path, *settings]
    with monkeypatch.context() as patch:
        patch.setattr(SecondDerivative, "apply", wrong("one in a hundred"))
        code, out, err = call(*words, capsys=capsys)
    assert (code, out) == (1, "")
    assert "the Hessian of small failed its check" in err
    assert "finite difference is off by 1.00e-02" in err
    code, out, _ = call(*words, capsys=capsys)
    assert code == 0
    assert "checked: Hessian symmetry" in out


def test_a_failed_check_is_a_failed_run(asked, tmp_path, monkeypatch):
    out = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(SecondDerivative, "apply", wrong("one in a hundred"))
        with pytest.raises(CurvescopeError, match=r"finite difference is off by 1\.00e-02.*1e-05"):
            run_study.run("spectrum", asked, out=out)
    (path,) = (out / "spectrum").iterdir()
    assert not (path / "result.json").exists()
    assert not checks.read_verifications(path)[0]["passed"]
    again, _ = run_study.run("spectrum", asked, out=out)  # once it is mended
    assert again == path
    assert all(one["passed"] for one in checks.read_verifications(path))
