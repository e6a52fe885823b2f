"""What ranks with a share of the data each compute, next to what one process has of all of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import curvescope as cs
from cases import transformer
from curvescope.algorithms.estimates.norms import frobenius_norm
from curvescope.core.operator import LinearOperator
from curvescope.distributed import DataParallel, divided, numbered, share, value_and_gradient

IGNORED = -100
PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "cluster.md"


@cache
def model() -> cs.Model:
    return cs.load(transformer())


@cache
def data() -> cs.Batches:
    """Seven sequences in ragged batches of 4, 2 and 1, lengths 5, 3 and 4; the last counts nowhere."""
    source = torch.Generator().manual_seed(1)
    found = []
    for B, T in ((4, 5), (2, 3), (1, 4)):
        x = torch.randint(0, 5, (B, T), generator=source)
        y = torch.randint(0, 5, (B, T), generator=source)
        y[0, :2] = IGNORED
        found.append(cs.Batch(x, y, 0.5 + torch.rand(B, T, generator=source, dtype=torch.float64)))
    found[-1].targets[:] = IGNORED
    return cs.Batches(found)


def problem(batches: cs.Batches) -> cs.Problem:
    return cs.Problem(model(), batches)


OPERATORS: dict[str, Callable[[cs.Batches], LinearOperator]] = {
    "hessian": lambda b: cs.Hessian(problem(b), damping=0.1, weight_decay={"matrices": 0.3}),
    "rectangular": lambda b: cs.Hessian(problem(b), weight_decay=0.2).block("L0.W_Q", "L0.W_[KQ]"),
    "ggn": lambda b: cs.GGN(problem(b), "L0.*"),
    "functional": lambda b: cs.FunctionalHessian(problem(b)),
    "empirical": lambda b: cs.EmpiricalFisher(problem(b)),
    "drawn": lambda b: cs.MonteCarloFisher(problem(b), num_samples=2, seed=3),
    "source": lambda b: cs.FunctionalSource(problem(b), "L0.attention"),
    "jacobian": lambda b: cs.Jacobian(problem(b), "L0.*"),
    "autograd": lambda b: cs.Hessian(problem(b), engine="autograd", checkpoint=True),
}


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def worst(errors: list[float]) -> str:
    return "same" if all(error < 1e-12 for error in errors) else f"apart by {errors}"


@cache
def whole(name: str) -> tuple[LinearOperator, Tensor, Tensor]:
    """The operator of one process, five columns, and its products with them."""
    op = OPERATORS[name](data())
    V = torch.randn(op.shape[1], 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return op, V, op @ V


def products_of_shares(*, group: dist.ProcessGroup | None = None) -> str:
    """Every operator, both products."""
    errors = []
    for name, make in OPERATORS.items():
        op, V, AV = whole(name)
        parts = DataParallel(make(share(data(), group=group)), group=group)
        errors.append(apart(parts @ V, AV))
        if not op.symmetric:
            errors.append(apart(parts.T @ AV, op.T @ AV))
    return worst(errors)


def one_rank() -> str:
    """A group of one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return products_of_shares(group=groups[dist.get_rank()])


def a_rank_without_data() -> str:
    """One sequence for all ranks."""
    one = data()[0][1:2]
    op = cs.Hessian(problem(cs.Batches([one])))
    parts = DataParallel(cs.Hessian(problem(share(cs.Batches([one])))))
    v = torch.ones(op.shape[1], dtype=torch.float64)
    loss = value_and_gradient(parts.problem)[0] / op.problem.loss_value() - 1
    with parts.frozen():
        return worst([apart(parts @ v, op @ v), abs(loss)])


def the_loss() -> str:
    """And its gradient."""
    value, gradient = value_and_gradient(problem(share(data())), "L0.*")
    wanted = problem(data()).value_and_gradient("L0.*")
    return worst([abs(value / wanted[0] - 1), apart(gradient, wanted[1])])


def exact_diagonals() -> str:
    """Of a GGN by its outputs and of a damped Hessian by its entries."""
    errors = []
    for name, block, way in (("ggn", "L0.W_Q", "outputs"), ("hessian", "L0.W_V", "entries")):
        op, options = OPERATORS[name](data()).block(block), {"method": way}  # pyright: ignore[reportAttributeAccessIssue]
        parts = DataParallel(OPERATORS[name](share(data()))).block(block)  # pyright: ignore[reportArgumentType]
        found, wanted = parts.exact_diagonal(**options).values, cs.exact_diagonal(op, **options).values
        errors.append(float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    return worst(errors)


def shares_of_ones_own() -> str:
    """Ranks that have read their batches themselves: unequal, and drawn for by number."""
    own = cs.Batches([data()[dist.get_rank()]])
    op = cs.MonteCarloFisher(problem(data()[: dist.get_world_size()]), seed=5)
    v = torch.ones(op.shape[1], dtype=torch.float64)
    parts = DataParallel(cs.MonteCarloFisher(problem(numbered(own)), seed=5))
    return worst([apart(parts @ v, op @ v)])


@contextmanager
def by(kind: str) -> Iterator[Callable[[str], LinearOperator]]:
    """How an operator is made over ranks: of shares, or of all data inside `divided`."""
    if kind == "shares":
        yield lambda name: DataParallel(OPERATORS[name](share(data())))
    else:
        with divided(kind):  # pyright: ignore[reportArgumentType]
            yield lambda name: OPERATORS[name](data())


def numbers(H: LinearOperator, G: LinearOperator) -> list[np.ndarray]:
    """What algorithms find."""
    b = torch.ones(H.shape[0], dtype=torch.float64)
    density = cs.spectral_density(H, num_probes=3, num_steps=4, seed=1)
    return [
        cs.eigsh(H, k=1, which="LA", seed=0, tol=1e-3).values,
        density.density,
        np.array([cs.trace(H, num_probes=4, seed=2).value, cs.spectral_norm(G, seed=0, tol=1e-2).value]),
        np.array([frobenius_norm(H, num_probes=3, seed=1).value]),
        cs.block_traces(H, num_probes=4, seed=0).values,
        cs.block_norms(H, num_probes=2, seed=0).frobenius,
        cs.diagonal(G, num_probes=3, method="roots", seed=4).values,
        cs.solve(H, b, damping=50.0, tol=1e-6).x,
    ]


def algorithms() -> str:
    """On shares, and on all data, divided by data and by probes."""
    wanted = numbers(OPERATORS["hessian"](data()), OPERATORS["ggn"](data()))
    errors = []
    for kind in ("shares", "data", "probes"):
        with by(kind) as make:
            found = numbers(make("hessian"), make("ggn"))
        errors += [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, wanted, strict=True)]
    return worst(errors)


def products_of_all_data() -> str:
    """Every operator inside `divided`, one column and five."""
    errors = []
    for kind in ("data", "probes", "auto"):
        with by(kind) as made:
            for name in OPERATORS:
                _, V, AV = whole(name)
                parts = made(name)
                errors += [apart(parts @ V, AV), apart(parts @ V[:, 0], AV[:, 0])]
    return worst(errors)


def script_of_the_page() -> str:
    """docs/tutorials/cluster.md: both ways are what one process has."""
    page = PAGE.read_text(encoding="utf-8")
    (script,) = re.findall(r"```\n(import torch\.distributed.*?)```", page, flags=re.S)
    seen: dict = {}
    exec(script.replace("dist.init_process_group()\n", ""), seen)
    op = cs.Hessian(cs.Problem(seen["model"], seen["batches"]), "L0.W_Q")
    wanted = cs.eigsh(op, k=1, which="LA", tol=1e-3).values[0]
    return worst([abs(seen[name] / wanted - 1) for name in ("top", "same")])


def a_share_that_counts_nowhere() -> str:
    """The sequences of rank 0 have no target that counts."""
    whole = data()[0]
    targets = whole.targets.clone()  # pyright: ignore[reportAttributeAccessIssue]
    targets[:2] = IGNORED
    some = cs.Batches([cs.Batch(whole.inputs, targets)])
    op = cs.Hessian(problem(some))
    v = torch.ones(op.shape[1], dtype=torch.float64)
    wanted, errors = op @ v, []
    with DataParallel(cs.Hessian(problem(share(some)))).frozen():
        errors.append(apart(DataParallel(cs.Hessian(problem(share(some)))) @ v, wanted))
    for kind in ("data", "probes", "auto"):
        with divided(kind):  # pyright: ignore[reportArgumentType]
            H = cs.Hessian(problem(some))
            with H.frozen():
                errors.append(apart(H @ v, wanted))
            errors.append(apart(H @ v, wanted))
    return worst(errors)


class Capacity(torch.nn.Module):
    """Two experts, each for the first six positions of a batch that choose it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.E, self.gate, self.U = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 5)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.E(ids).reshape(-1, 4)
        p = self.gate(x).softmax(-1)
        out = x
        for i, expert in enumerate(self.experts):
            chosen = p.argmax(-1) == i
            there = chosen & (chosen.long().cumsum(0) <= 6)
            out = out + torch.where(there[:, None], p[:, i : i + 1] * expert(x).tanh(), torch.zeros_like(x))
        return self.U(out).view(*ids.shape, 5)


@cache
def capacity() -> cs.Model:
    return cs.load(Capacity().double())


def sequences_that_know_of_each_other() -> str:
    """Whole batches go to ranks."""
    some = cs.Batches([data()[0], data()[0]])
    op = cs.Hessian(cs.Problem(capacity(), some))
    v = torch.ones(op.shape[1], dtype=torch.float64)
    wanted = op @ v
    with divided("data"):
        return worst([apart(cs.Hessian(cs.Problem(capacity(), some)) @ v, wanted)])


def shares_of_such_sequences() -> None:
    op = DataParallel(cs.Hessian(cs.Problem(capacity(), share(cs.Batches([data()[0]])))))
    op @ torch.ones(op.shape[1], dtype=torch.float64)


def _asked_by_rank(what: str) -> None:
    rank = dist.get_rank()
    damping = float(rank) if what == "damping" else 0.0
    block = ["L0.W_Q", "L0.W_K"][rank] if what == "blocks" else "L0.W_Q"
    kind = cs.GGN if what == "kinds" and rank else cs.Hessian
    op = DataParallel(kind(problem(share(data())), block, damping=damping))
    seed = rank if what == "vectors" else 0
    width = 1 + rank if what == "columns" else 1
    op @ torch.randn(op.shape[1], width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def other_vectors() -> None:
    _asked_by_rank("vectors")


def other_products() -> str:
    """Each is refused on every rank."""
    for what in ("damping", "blocks", "kinds", "columns"):
        try:
            _asked_by_rank(what)
        except cs.CurvescopeError as error:
            if "the same product" not in str(error):
                return f"{what}: {error}"
        else:
            return f"{what} were taken"
    return "refused"


def an_error_on_one_rank() -> None:
    """A product that cannot be taken on the last rank."""
    H = DataParallel(cs.Hessian(problem(share(data()))))
    if dist.get_rank() == dist.get_world_size() - 1:

        def undivided(*given: object) -> None:
            raise MemoryError("no room for a batch")

        H.op.undivided = undivided  # pyright: ignore[reportAttributeAccessIssue]
    H @ torch.ones(H.shape[1], dtype=torch.float64)


def _moved_on_one_rank(make: Callable[[cs.Problem], LinearOperator], *, frozen: bool) -> None:
    own = cs.load(transformer())
    batches = share(data())
    H = make(cs.Problem(own, batches))
    v = torch.ones(H.shape[1], dtype=torch.float64)
    H @ v
    weight = next(iter(own.parameters()))

    def move() -> None:
        if dist.get_rank() == 0:
            weight.data[0, 0] += 1e-9

    if not frozen:
        move()
        H @ v
        return
    with H.frozen():
        H @ v
        move()


def a_model_that_one_rank_changes() -> None:
    _moved_on_one_rank(lambda p: DataParallel(cs.Hessian(p)), frozen=False)


def a_change_inside_frozen() -> None:
    _moved_on_one_rank(lambda p: DataParallel(cs.GGN(p)), frozen=True)


def models_that_differ() -> None:
    own = cs.load(transformer(init_std=0.3 + 0.1 * dist.get_rank()))
    DataParallel(cs.Hessian(cs.Problem(own, share(data()))))


def draws_without_numbers() -> None:
    DataParallel(cs.MonteCarloFisher(problem(data())))


TASKS = {
    2: [
        one_rank,
        products_of_shares,
        the_loss,
        exact_diagonals,
        shares_of_ones_own,
        products_of_all_data,
        algorithms,
        script_of_the_page,
        a_share_that_counts_nowhere,
        sequences_that_know_of_each_other,
        shares_of_such_sequences,
        other_vectors,
        other_products,
        an_error_on_one_rank,
        a_model_that_one_rank_changes,
        a_change_inside_frozen,
        models_that_differ,
        draws_without_numbers,
    ],
    4: [products_of_shares, the_loss, a_rank_without_data],
}
