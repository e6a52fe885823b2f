"""Exact identities of attention: rescalings that change no output, and blocks that vanish.

Where f(θ) = f(g_t(θ)) for a one-parameter group g_t of linear maps with generator A, the gradient transforms
with the inverse transpose, so H A θ = −Aᵀ∇L, and A θ lies in the kernel of the outputs' Jacobian.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import curvescope as cs
import oracles
from oracles import transformer
from selection import one_in

TIGHT = 1e-10

MODELS = {
    "pre-2layers": {"n_layers": 2, "activation": "gelu"},
    "post-3layers": {"n_layers": 3, "norm": "post", "activation": "silu", "d_ff": 3},
    "rms-tied-swiglu": {
        "n_layers": 2,
        "norm_kind": "rmsnorm",
        "activation": "swiglu",
        "tied": True,
        "d_ff": 3,
    },
    "alibi-bidirectional": {"n_layers": 2, "score_bias": "alibi", "causal": False, "positions": "none"},
    "linear": {"n_layers": 2, "attention": "linear", "norm": "post"},
    "grouped": {"n_layers": 2, "n_heads": 4, "d_head": 2, "n_kv_heads": 2, "d_ff": 2},
    "no-biases": {"n_layers": 3, "bias_qkv": False, "bias_o": False, "d_ff": 2},
}

some_layers = pytest.mark.parametrize(
    "layers",
    [slice(1, 2), pytest.param(slice(None, None, 2), marks=pytest.mark.slow)],
    ids=["second", "others"],
)


@cache
def problem(name: str, length: int = 4) -> cs.Problem:
    return make_problem(length=length, **MODELS[name])


def make_problem(length: int = 4, **settings) -> cs.Problem:
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 5, (3, length), generator=source) for _ in range(2))
    y[0, 0] = -100
    return cs.Problem(transformer(**settings), (x, y))


hessian, ggn, jacobian = cache(cs.Hessian), cache(cs.GGN), cache(cs.Jacobian)


def value(p: cs.Problem, name: str) -> Tensor:
    """The block's own entries, biases as rows."""
    head, parameter = oracles.head_of(name)
    found = p.model.get_parameter(parameter).detach()
    return found if head is None else oracles.slice_of_head(found, parameter, head, p.model)


def exists(p: cs.Problem, name: str) -> bool:
    return name in p.model.blocks or name in p.model.heads


def assert_gauge(p: cs.Problem, motion: dict[str, Tensor], answer: dict[str, Tensor]) -> None:
    """H motion = answer over all parameters, and the GGN and the Jacobian send the motion to zero."""
    space, everything = p.space(*motion), p.space()
    motion = {name: motion[name] for name in space.slices}
    v, scale = space.from_dict(motion), max(float(m.norm()) for m in motion.values())
    assert scale > 0.1
    whole = hessian(p).block(["*"], list(motion)).to_dense()
    found = everything.scatter(whole @ v)
    expected = space.scatter(space.from_dict({name: answer[name] for name in motion}))
    largest = float(whole.abs().max())
    assert max(float(t.abs().max()) for t in expected.values()) > 1e-4 * largest
    for name, tensor in found.items():
        truth = expected.get(name, torch.zeros_like(tensor))
        assert float((tensor - truth).abs().max()) < TIGHT * largest * scale, name
    assert float((jacobian(p).block(list(motion)) @ v).norm()) < TIGHT * scale
    assert float((ggn(p).block(["*"], list(motion)) @ v).norm()) < TIGHT * scale


def gradient(p: cs.Problem, name: str) -> Tensor:
    return p.space(name).to_dict(p.gradient(name))[name]


def mixer(size: int, seed: int = 3) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def query_key_gauge(p: cs.Problem, layer: int, queries: list[int], key: int, Z: Tensor):
    """W_Q → W_Q M, W_K → W_K M⁻ᵀ with their biases, M = I + tZ: the motion and H's answer."""
    motion, answer = {}, {}
    for kind in ("W", "b"):
        for head in queries:
            name = f"L{layer}.h{head}.{kind}_Q"
            if exists(p, name):
                motion[name], answer[name] = value(p, name) @ Z, -gradient(p, name) @ Z.T
        name = f"L{layer}.h{key}.{kind}_K"
        if exists(p, name):
            motion[name], answer[name] = -value(p, name) @ Z.T, gradient(p, name) @ Z
    return motion, answer


@some_layers
@pytest.mark.parametrize("name", one_in(list(MODELS), 3, shift=2))
def test_query_key_gauge_of_every_head(name: str, layers: slice):
    p = problem(name)
    facts = p.model.facts
    group = facts["n_heads"] // facts["n_kv_heads"]
    for layer in range(facts["n_layers"])[layers]:
        for key in range(facts["n_kv_heads"]):
            queries = list(range(key * group, (key + 1) * group))
            assert_gauge(p, *query_key_gauge(p, layer, queries, key, mixer(facts["d_head"])))


def test_query_key_gauge_under_rope_holds_for_rotations_and_scales_alone():
    p = make_problem(n_layers=2, positions="rope", d_model=4, n_heads=1)
    scales, angles = torch.diag(torch.tensor([0.7, -0.4, 0.7, -0.4])), torch.zeros(4, 4)
    for f, angle in enumerate((0.9, -1.3)):  # dimension f turns with f + k/2
        angles[f, f + 2], angles[f + 2, f] = angle, -angle
    assert_gauge(p, *query_key_gauge(p, 1, [0], 0, (scales + angles).double()))
    with pytest.raises(AssertionError):
        assert_gauge(p, *query_key_gauge(p, 1, [0], 0, mixer(4)))


@some_layers
@pytest.mark.parametrize("name", one_in(list(MODELS), 4, shift=0))
def test_value_output_gauge_of_every_head(name: str, layers: slice):
    p = problem(name)
    facts, Z = p.model.facts, mixer(p.model.facts["d_head"])
    group = facts["n_heads"] // facts["n_kv_heads"]
    for layer in range(facts["n_layers"])[layers]:
        for own in range(facts["n_kv_heads"]):
            motion, answer = {}, {}
            for block in (f"L{layer}.h{own}.W_V", f"L{layer}.h{own}.b_V"):
                if exists(p, block):
                    motion[block], answer[block] = value(p, block) @ Z, -gradient(p, block) @ Z.T
            for head in range(own * group, (own + 1) * group):
                block = f"L{layer}.h{head}.W_O"
                motion[block], answer[block] = -Z @ value(p, block), Z.T @ gradient(p, block)
            assert_gauge(p, motion, answer)


def test_gauges_can_fail():
    """The wrong sign, or the transpose in the wrong place, is seen."""
    p = problem("pre-2layers")
    motion, answer = query_key_gauge(p, 1, [1], 1, mixer(2))
    for wrong in (
        ({k: v.abs() for k, v in motion.items()}, answer),
        (motion, {k: -v for k, v in answer.items()}),
        query_key_gauge(p, 1, [0], 1, mixer(2)),
    ):
        with pytest.raises(AssertionError):
            assert_gauge(p, *wrong)


@pytest.mark.parametrize("name", ["pre-2layers", "post-3layers", "alibi-bidirectional", "grouped"])
def test_the_bias_of_keys_has_no_curvature_under_softmax(name: str):
    p = problem(name)
    columns = cs.Hessian(p).block("*", "L*.b_K").to_dense()
    assert columns.shape[1] > 0
    assert float(columns.abs().max()) < 1e-13
    assert float(p.gradient("L*.b_K").abs().max()) < 1e-14


@pytest.mark.parametrize("settings", [{"positions": "rope", "n_heads": 1}, {"attention": "linear"}])
def test_the_bias_of_keys_has_curvature_under_rope_and_linear_attention(settings: dict):
    p = make_problem(n_layers=2, **settings)
    assert float(cs.Hessian(p, "L*.b_K").to_dense().abs().max()) > 1e-5


def linear_tail(attention: str, n_layers: int = 2) -> cs.Problem:
    """After the last attention everything is linear."""
    return make_problem(n_layers=n_layers, attention=attention, norm="none", d_ff=0)


def part(operator: type, p: cs.Problem, block: str) -> float:
    return float(operator(p, block).to_dense().abs().max())


def test_functional_blocks_of_linear_attention_vanish_in_the_last_layer():
    p = linear_tail("linear")
    for role in ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O"):
        assert part(cs.FunctionalHessian, p, f"L1.{role}") < 1e-14, role
        assert part(cs.Hessian, p, f"L1.{role}") > 1e-4, role
    assert part(cs.FunctionalHessian, p, "L0.W_Q") > 1e-6
    mixed = cs.FunctionalHessian(p).block("L1.W_Q", "L1.W_K").to_dense()
    assert float(mixed.abs().max()) > 1e-4


def test_functional_block_of_values_vanishes_under_softmax_but_not_that_of_queries():
    p = linear_tail("softmax")
    for role in ("W_V", "b_V", "W_O", "b_O"):
        assert part(cs.FunctionalHessian, p, f"L1.{role}") < 1e-14, role
    assert part(cs.FunctionalHessian, p, "L1.W_Q") > 1e-5
    assert part(cs.FunctionalHessian, p, "L1.W_K") > 1e-5
    assert float(cs.FunctionalHessian(p).block("L1.W_V", "L1.W_O").to_dense().abs().max()) > 1e-4
    assert part(cs.FunctionalHessian, p, "U") < 1e-14


@pytest.mark.parametrize(
    "name", one_in(["pre-2layers", "post-3layers", "rms-tied-swiglu", "grouped"], 4, shift=3)
)
def test_one_position_leaves_queries_and_keys_without_curvature(name: str):
    p = problem(name, length=1)
    columns = cs.Hessian(p).block("*", "L*.[Wb]_[QK]").to_dense()
    assert float(columns.abs().max()) < 1e-14
    assert float(cs.Hessian(p).block("L*.W_V").to_dense().abs().max()) > 1e-6


def test_a_constant_on_all_logits_is_no_change():
    p = problem("pre-2layers")
    shift = torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None].expand(4, 5)
    image = cs.Hessian(p).block("*", "U") @ shift.reshape(-1)
    assert float(image.norm()) < 1e-14
    assert float((cs.Jacobian(p, "U") @ shift.reshape(-1)).norm()) > 1  # the outputs do move


def test_values_bias_can_move_into_the_outputs_bias():
    """Softmax rows sum to one: b_V + δ, b_O − δ W_O changes nothing."""
    p = problem("post-3layers")
    delta = mixer(2)[0]
    motion = {"L1.h1.b_V": delta, "L1.b_O": -(delta @ value(p, "L1.h1.W_O"))}
    space = p.space(*motion)
    v = space.from_dict({name: motion[name] for name in space.slices})
    assert float((cs.Jacobian(p).block(list(motion)) @ v).norm()) < TIGHT
    image = cs.Hessian(p).block("*", list(motion)) @ v
    found = p.space().to_dict(image)
    # The motion is affine in W_O: H's answer is δᵀ ∇_{b_O} in the rows of that head, and nothing else.
    answer = torch.zeros_like(found["L1.W_O"])
    answer[2:4] = torch.outer(delta, gradient(p, "L1.b_O"))
    for name, tensor in found.items():
        truth = answer if name == "L1.W_O" else torch.zeros_like(tensor)
        assert float((tensor - truth).abs().max()) < TIGHT, name


def test_norm_without_weights_makes_the_scale_of_its_input_a_symmetry():
    """Pre-norm, no residual noise in between: with ε = 0 the final norm does not see the stream's scale."""
    p = make_problem(n_layers=0, norm_eps=0.0, norm_affine=False, positions="none")
    E = value(p, "E")
    image = p.space().to_dict(cs.Hessian(p).block("*", "E") @ E.reshape(-1))
    torch.testing.assert_close(image["E"], -gradient(p, "E"), rtol=0, atol=1e-12)
    assert float(image["U"].abs().max()) < 1e-12
