"""Networks of one head: the fast routes of sweeps against the operators, on networks of the same kind."""

import pytest
import torch

import curvescope as cs
from curvescope.closed_form.network.one_head import inner, layers
from curvescope.closed_form.network.one_head.layers import Task, forward
from curvescope.core.seeds import generator
from curvescope.data.tasks import task_data
from curvescope.papers.ormaniec2025.growth_sweeps import SCORED, embed
from draws import normal
from selection import a_half

OPERATORS = {"outer": cs.GGN, "functional": cs.FunctionalHessian, "total": cs.Hessian}
WIDTH, SEQUENCES = 4, 2
CASES = [("softmax", 1), ("softmax", 2), ("softmax", 3), ("linear", 1), ("linear", 3)]


class Network:
    """A small network of a sweep, as the fast routes see it and as a problem; `factor` is between the two."""

    def __init__(self, kind, depth, *, norm="none", std=0.7):
        linear = kind == "linear"
        config = cs.TransformerConfig(
            n_layers=depth, d_model=WIDTH, n_heads=1, n_ctx=18, vocab_size=12, attention=kind, norm=norm,
            activation="relu", d_ff=0 if linear else None, residual_scale=0.0 if linear else 1.0,
            init="scaled", embed_std=std, seed=2,
        )  # fmt: skip
        model = cs.load(cs.Transformer(config).double())
        targets = "onehot_current" if linear else "next"
        data = task_data("addition", num_sequences=SEQUENCES, targets=targets)
        self.problem = cs.Problem(model, data, "mse_mean" if linear else "cross_entropy")
        self.factor = 12 * 6 * SEQUENCES if linear else 1
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        tokens = next(iter(data)).inputs
        self.task, self.x = (
            Task(tokens, "mse" if linear else "ce", SCORED, 12),
            embed(self.weights["E"], self.weights["P"], tokens),
        )
        self.kind, self.skip, self.depth = kind, 0.0 if linear else 1.0, depth
        self.operators = {part: make(self.problem) for part, make in OPERATORS.items()}

    def layers(self):
        return forward(self.x, self.weights, self.depth, kind=self.kind, skip=self.skip, scored=SCORED)

    def operator(self, part, block):
        return self.operators[part].block(block)

    def products(self, part, block, V):
        return self.factor * (self.operator(part, block) @ V.flatten(1).T).T.reshape(V.shape)


def assert_close(found, expected):
    assert float((found - expected).norm()) <= 1e-10 * float(expected.norm())


@pytest.mark.parametrize(("kind", "depth"), a_half(CASES, shift=1))
def test_last_layer_is_exact(kind, depth):
    network = Network(kind, depth)
    found = layers.last_blocks(network.layers()[-1], network.weights["U"], network.task)
    check_last(network, found)


def test_pre_norm_is_exact():
    network = Network("softmax", 1, norm="pre", std=0.3)
    check_last(network, layers.pre_norm_blocks(network.x, network.weights, network.task))


def check_last(network, found):
    V = normal(generator(4), 2, WIDTH, WIDTH)
    for weight in "QKVO":
        block, name = found.block(weight), f"L{network.depth - 1}.W_{weight}"
        for part, norm in block.norms()._asdict().items():
            assert_close(norm, network.factor * network.operator(part, name).to_dense().norm())
            assert_close(block.product(V, part), network.products(part, name, V))


@pytest.mark.parametrize(("kind", "depth"), a_half([case for case in CASES if case[1] > 1], shift=0))
def test_inner_products_are_those_of_the_operators(kind, depth):
    network = Network(kind, depth)
    found = inner.suffix(network.layers(), network.weights["U"], network.task)
    V = normal(generator(5), 3, WIDTH, WIDTH)
    for layer in range(depth - 1):
        for block in ("W_Q", "W_V"):
            products = found.products(layer, block, V, list(OPERATORS))
            for part, product in zip(OPERATORS, products, strict=True):
                assert_close(product, network.products(part, f"L{layer}.{block}", V))


def test_inner_products_do_not_depend_on_the_cut_into_sequences_nor_on_the_other_parts(monkeypatch):
    network = Network("softmax", 3)
    found = inner.suffix(network.layers(), network.weights["U"], network.task)
    V = normal(generator(6), 2, WIDTH, WIDTH)
    whole = found.products(0, "W_Q", V, ["outer", "functional", "total"])
    torch.testing.assert_close(whole[0] + whole[1], whole[2], rtol=1e-12, atol=1e-14)
    monkeypatch.setattr(inner, "CACHE_BYTES", 1)
    for i, part in enumerate(OPERATORS):
        alone = found.products(0, "W_Q", V, [part])[0]
        torch.testing.assert_close(alone, whole[i], rtol=1e-12, atol=1e-14)


def test_last_layers_are_linear_where_they_should_be():
    for kind, depth in CASES:
        network = Network(kind, depth)
        found = layers.last_blocks(network.layers()[-1], network.weights["U"], network.task)
        zero = {weight: float(norm.functional) == 0.0 for weight, norm in found.norms("QV").items()}
        assert zero == {"Q": kind == "linear", "V": True}
