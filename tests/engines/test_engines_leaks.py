"""Memory stays flat over many products at changing parameters, by torch's record of allocations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import curvescope as cs
from selection import most, some

RECORDED = 25  # the last products: recording takes most of the time
FLAT = 10  # vectors over the parameters, for what is kept; a leak of one for each product is 25


def problem() -> cs.Problem:
    source = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 3, generator=source, dtype=torch.float64)
    return cs.Problem(net, (x, torch.randint(3, (5,), generator=source)))


Product = Callable[[], Tensor]


def multiply(make: Callable[..., cs.LinearOperator], **options: str) -> Callable[[cs.Problem], Product]:
    def start(p: cs.Problem) -> Product:
        A = make(p, **options)
        v = torch.ones(A.shape[1], dtype=torch.float64)
        return lambda: A @ v

    return start


def per_sample(p: cs.Problem) -> Product:
    samples = cs.per_sample(p, "0.weight")
    V = torch.ones(12, 1, dtype=torch.float64)
    return lambda: samples.products(V)


CASES = {
    "hessian": multiply(cs.Hessian),
    "hessian, autograd": multiply(cs.Hessian, engine="autograd"),
    "ggn": multiply(cs.GGN),
    "jacobian": multiply(cs.Jacobian),
    "per sample": per_sample,
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing waits for Python's collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left_over(product: Product, p: cs.Problem, count: int) -> int:
    """Bytes of tensors that live after `count` products at changing parameters, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        repeat(product, p, count)
    events = recorded.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def repeat(product: Product, p: cs.Problem, count: int) -> None:
    for _ in range(count):
        with torch.no_grad():
            for parameter in p.model.parameters():
                parameter.mul_(0.999)
        product()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("products", some([40, 200], 1))
@pytest.mark.parametrize("name", most(list(CASES), but=["hessian, autograd", "ggn", "jacobian"]))
def test_memory_stays_flat(name: str, products: int):
    p = problem()
    product = CASES[name](p)
    repeat(product, p, products - RECORDED)
    assert left_over(product, p, RECORDED) < FLAT * 8 * p.space().size


@pytest.mark.usefixtures("no_collection")
def test_a_leak_is_seen():
    p, kept = problem(), []
    v = torch.ones(p.space().size, dtype=torch.float64)
    leaked = left_over(lambda: kept.append(v + len(kept)) or v, p, RECORDED)
    assert leaked >= RECORDED * 8 * p.space().size
