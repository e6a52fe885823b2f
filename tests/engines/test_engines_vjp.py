"""Reverse passes: from places in the graph instead of tensors, each result handed over when it is whole."""

import gc
import weakref

import pytest
import torch
from torch import nn

from curvescope.engines.vjp import ReversePass, edges, gradient, pull


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quartic():
    """s = Σ a² b² and its leaves: a gradient that depends on both."""
    a, b = draw(5, seed=1).requires_grad_(), draw(5, seed=2).requires_grad_()
    return (a**2 * b**2).sum(), [a, b]


def handed(sources, cotangents, into, group=1):
    found, names = {}, [str(i) for i in range(len(into))]
    ReversePass(sources, names, into)(cotangents, group, lambda name, x: found.__setitem__(name, x.clone()))
    return [found.get(name) for name in names]


@pytest.mark.parametrize("k", [1, 3])
def test_each_result_is_that_of_all_together(k):
    s, leaves = quartic()
    first = gradient(s, leaves)
    V = [draw(k, 5, seed=3), draw(k, 5, seed=4)]
    for got, want in zip(handed(edges(first), V, leaves), pull(first, V, leaves, 1), strict=True):
        assert torch.equal(got, want)
    a, b = (x.detach() for x in leaves)
    torch.testing.assert_close(handed(first, V, leaves)[0], 2 * b**2 * V[0] + 4 * a * b * V[1])


def test_a_leaf_that_is_a_gradient_itself():
    class Dot(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return b, a  # right for g = 1

    a, b = draw(5, seed=1).requires_grad_(), draw(5, seed=2).requires_grad_()
    first = gradient(Dot.apply(a, b), [a, b])
    assert first[0] is b
    v, w = draw(1, 5, seed=3), draw(1, 5, seed=4)
    assert all(map(torch.equal, handed(edges(first), [v, w], [a, b]), [w, v]))


def test_the_numbers_of_a_gradient_go():
    s, leaves = quartic()
    first = gradient(s, leaves)
    gone = [weakref.ref(x) for x in first]
    places = edges(first)
    del first
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert all(x is not None for x in handed(places, [draw(1, 5), draw(1, 5)], leaves))


def test_one_result_at_a_time_and_none_is_left():
    s, leaves = quartic()
    alive = []

    def receive(name, x):
        alive.append(sum(leaf.grad is not None for leaf in leaves))

    ReversePass(gradient(s, leaves), "ab", leaves)([draw(1, 5), draw(1, 5)], 1, receive)
    assert alive == [1, 1]
    assert all(leaf.grad is None and not leaf._post_accumulate_grad_hooks for leaf in leaves)


def test_nothing_is_left_behind_an_error():
    s, leaves = quartic()
    first, V = edges(gradient(s, leaves)), [draw(1, 5, seed=3), draw(1, 5, seed=4)]
    want = handed(first, V, leaves)

    def fail(name, x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ReversePass(first, "ab", leaves)(V, 1, fail)
    assert all(map(torch.equal, handed(first, V, leaves), want))


def test_a_parameter_of_the_user_keeps_its_gradient_and_its_hooks():
    p = nn.Parameter(draw(5))
    p.grad, seen = torch.ones(5, dtype=torch.float64), []
    p.register_post_accumulate_grad_hook(seen.append)
    first = gradient((p**3).sum(), [p])
    (found,) = handed(first, [draw(1, 5, seed=3)], [p])
    torch.testing.assert_close(found, 6 * p.detach() * draw(1, 5, seed=3))
    assert torch.equal(p.grad, torch.ones(5, dtype=torch.float64))
    assert not seen


def test_a_gradient_that_is_undefined_is_received_by_nobody():
    W = draw(2, 3, 1).requires_grad_()
    z = torch.nn.functional.conv1d(draw(4, 3, 5), W)
    first = gradient((z * draw(4, 2, 5)).sum(), [W])  # linear in W: its derivative is undefined
    assert handed(first, [draw(1, 2, 3, 1)], [W]) == [None]


def test_a_leaf_that_nothing_depends_on_receives_nothing():
    s, leaves = quartic()
    idle = draw(2).requires_grad_()
    found = handed(gradient(s, leaves), [draw(1, 5), draw(1, 5)], [*leaves, idle])
    assert found[2] is None
    assert found[0] is not None
