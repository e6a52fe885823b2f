"""Whole blocks and stacks against autograd on a Transformer written out elementwise."""

import pytest
import torch
from closed_form_block_oracle import CASES, HEADS, B, D, T, arch, closed, loss_of, model, oracle
from torch.autograd.functional import hessian

from curvescope.closed_form.network.block import block_tape
from curvescope.closed_form.network.stack import StackCurvature, stack_tape
from curvescope.closed_form.objectives import (
    OutputObjective,
    cross_entropy_objective,
    squared_error_objective,
)
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from selection import some

TOL = 1e-11
SOURCES = ["ln1", "attention.core", "attention.bilinear", "ln2", "ffn.activation", "ffn.bilinear"]


def close(found, expected, tol=TOL):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tol * float(expected.abs().max())


LIKE_OTHERS = [  # each of their settings is that of another case
    "pre, layernorm, gelu, untied",
    "post, layernorm, gelu_tanh, mse",
    "post, two blocks, tied",
    "post, two blocks, relu, mse",
    "pre, two blocks, swiglu, rmsnorm, tied",
]
OFTEN = [name for name in CASES if name not in LIKE_OTHERS]


@pytest.mark.parametrize("name", OFTEN + some(LIKE_OTHERS, 0))
def test_everything_against_autograd(name):
    case = CASES[name]
    value, grad, H, G = oracle(case)
    params, found = closed(case)
    names = list(params)
    assert sum(p.numel() for p in params.values()) < 350
    assert set(found.names) == set(names)
    close(found.value, value)
    close(torch.cat([found.gradient()[n].reshape(-1) for n in names]), grad)

    close(found.hessian().to_dense(names), H)
    close(found.ggn().to_dense(names), G)
    sources = {source: term.to_dense(names) for source, term in found.sources().items()}
    assert float((sum(sources.values()) - (H - G)).abs().max()) <= TOL * float(H.abs().max())

    V = torch.randn(len(grad), 3, generator=generator(8), dtype=torch.float64)
    for part, matrix in {"total": H, "outer": G, "functional": H - G}.items():
        operator = found.operator(names, part=part)
        expected = matrix @ V
        assert float((operator @ V - expected).abs().max()) <= TOL * float((H @ V).abs().max())
    parts = V[:, 0].split([p.numel() for p in params.values()])
    v = {n: part.reshape(params[n].shape) for n, part in zip(names, parts, strict=True)}
    close(torch.cat([found.hvp(v)[n].reshape(-1) for n in names]), H @ V[:, 0])
    close(torch.cat([found.ggn_vp(v)[n].reshape(-1) for n in names]), G @ V[:, 0])


def test_sources_are_named_and_the_blocks_are_addressed_by_pairs():
    case = CASES["pre, two blocks, untied"]
    params, found = closed(case)
    assert list(found.sources()) == [
        *[f"L{i}.{part}" for i in range(2) for part in SOURCES],
        "ln_f",
        "unembedding",
    ]
    H = found.hessian()
    assert len(H) == len(params) ** 2
    assert H["L0.W_Q", "L1.b_1"].shape == (16, 2)
    assert torch.equal(H["L0.W_Q", "L1.b_1"], H.to_dense(["L1.b_1", "L0.W_Q"])[:2, 2:].T)
    close(H["U", "E"], H["E", "U"].T)


@pytest.mark.parametrize(
    "name", some(["pre, layernorm, silu, mse, real inputs", "post, two blocks, relu, mse"], 1)
)
def test_hessian_in_the_input(name):
    case = CASES[name]
    params, found = closed(case)
    inputs, targets = case.data()
    expected = hessian(lambda x: loss_of(case, model(params, x, case.arch, case.blocks), targets), inputs)
    n = inputs.numel()
    close(found.hessian()["x", "x"], expected.reshape(n, n))
    assert found.hessian().names == (*found.names, "x")
    mixed = hessian(
        lambda x, W: loss_of(case, model(params | {"L0.W_K": W}, x, case.arch, case.blocks), targets),
        (inputs, params["L0.W_K"]),
    )[0][1]
    close(found.hessian()["x", "L0.W_K"], mixed.reshape(n, -1))


def test_gauge_identities_of_a_deep_model():
    """H along W_Q Z, −W_K Zᵀ (and W_V Z, −Z W_O) is known from the gradient; the GGN maps it to zero."""
    case = CASES["pre, two blocks, untied"]
    params, found = closed(case)
    grad, Z = found.gradient(), torch.randn(2, 2, generator=generator(2), dtype=torch.float64)
    for layer in ("L0.", "L1."):
        for head in range(HEADS):
            mine = slice(2 * head, 2 * head + 2)

            def columns(tree, role, M, mine=mine, layer=layer):
                found = torch.zeros_like(tree[layer + role])
                found[..., mine] = tree[layer + role][..., mine] @ M
                return found

            def rows(tree, M, mine=mine, layer=layer):
                found = torch.zeros_like(tree[layer + "W_O"])
                found[mine] = M @ tree[layer + "W_O"][mine]
                return found

            scores = {layer + r: columns(params, r, Z) for r in ("W_Q", "b_Q")}
            scores |= {layer + r: columns(params, r, -Z.T) for r in ("W_K", "b_K")}
            scores_image = {layer + r: columns(grad, r, -Z.T) for r in ("W_Q", "b_Q")}
            scores_image |= {layer + r: columns(grad, r, Z) for r in ("W_K", "b_K")}
            values = {layer + r: columns(params, r, Z) for r in ("W_V", "b_V")} | {
                layer + "W_O": rows(params, -Z)
            }
            values_image = {layer + r: columns(grad, r, -Z.T) for r in ("W_V", "b_V")}
            values_image[layer + "W_O"] = rows(grad, Z.T)
            scale = max(float(h.abs().max()) for h in found.hvp(params).values())
            for direction, image in ((scores, scores_image), (values, values_image)):
                for name, h in found.hvp(direction).items():
                    expected = image.get(name, torch.zeros_like(h))
                    assert float((h - expected).abs().max()) <= 1e-12 * scale
                for h in found.ggn_vp(direction).values():
                    assert float(h.abs().max()) <= 1e-12 * scale


def test_zeros_that_must_be_there():
    case = CASES["pre, layernorm, gelu, untied"]
    params, found = closed(case)
    H, names = found.hessian(), list(params)
    scale = float(H.matrix.abs().max())
    assert float(found.gradient()["L0.b_K"].abs().max()) <= 1e-15
    for name in names:
        assert float(H["L0.b_K", name].abs().max()) <= 1e-14 * scale  # softmax ignores a shift of the scores
    functional = H.matrix - found.ggn().matrix
    place = H.slices
    for name in ("L0.W_V", "L0.b_O", "L0.b_2", "ln_f.b"):
        own = functional[place[name], place[name]]
        assert torch.allclose(own, own.T, rtol=0, atol=1e-13 * scale)
    core = found.sources()["L0.attention.core"]
    assert float(core["L0.W_V", "L0.W_V"].abs().max()) <= 1e-14 * scale
    assert torch.linalg.eigvalsh(found.ggn().matrix)[0] >= -1e-12 * scale
    # one token: queries and keys do nothing
    inputs, targets = case.data()
    tape = stack_tape(params, inputs[:, :1], case.arch)
    single = StackCurvature(tape, lambda z: cross_entropy_objective(z, targets[:, :1])).hessian()
    for name in names:
        for role in ("W_Q", "W_K", "b_Q", "b_K"):
            assert float(single[f"L0.{role}", name].abs().max()) <= 1e-14 * scale


def test_cutting_the_batch_adds_up():
    case = CASES["post, rmsnorm, tied, swiglu"]
    params, whole = closed(case)
    inputs, targets = case.data()
    parts = [
        StackCurvature(
            stack_tape(params, inputs[i : i + 1], case.arch),
            lambda z, i=i: cross_entropy_objective(z, targets[i : i + 1], num_terms=B * T),
        )
        for i in range(B)
    ]
    close(sum(p.hessian().matrix for p in parts), whole.hessian().matrix, tol=1e-13)
    close(sum(p.value for p in parts), whole.value, tol=1e-13)


def test_any_loss_through_its_derivatives():
    """Targets that do not count, and a loss of one's own that couples tokens."""
    case = CASES["post, layernorm, relu, untied"]
    params, _ = closed(case)
    inputs, targets = case.data()
    targets = targets.clone()
    targets[0, 1] = -100
    tape = stack_tape(params, inputs, case.arch)
    found = StackCurvature(tape, lambda z: cross_entropy_objective(z, targets))
    weight = params["L0.W_1"]

    def replaced(W):
        return model(params | {"L0.W_1": W}, inputs, case.arch, case.blocks)

    expected = hessian(lambda W: loss_of(case, replaced(W), targets), weight)
    close(found.hessian()["L0.W_1", "L0.W_1"], expected.reshape(12, 12))

    z = tape.output
    coupled = OutputObjective((z**3).sum() ** 2, 6 * (z**3).sum() * z**2, lambda u: _coupled(z, u))
    found = StackCurvature(tape, lambda _: coupled)
    expected = hessian(lambda W: (replaced(W) ** 3).sum() ** 2, weight)
    close(found.hessian()["L0.W_1", "L0.W_1"], expected.reshape(12, 12))


def _coupled(z, u):
    inner = (3 * z**2 * u).flatten(-3).sum(-1)[..., None, None, None]
    return 6 * inner * z**2 + 12 * (z**3).sum() * z * u


def test_a_block_alone():
    params = {
        name.removeprefix("L0."): p
        for name, p in CASES["post, layernorm, relu, untied"].parameters().items()
        if name.startswith("L0.")
    }
    x = torch.randn(1, T, D, generator=generator(4), dtype=torch.float64)
    settings = arch(norm="post")
    found = StackCurvature(
        block_tape(x, params, settings), lambda z: squared_error_objective(z, torch.zeros_like(z))
    )
    stacked = model({f"L0.{k}": v for k, v in params.items()}, x, settings, 1)
    close(found.tape.output, stacked)
    assert set(found.hessian().names) == {*params, "x"}


def test_errors_say_what_to_do():
    case = CASES["pre, layernorm, gelu, untied"]
    params, found = closed(case)
    inputs, _ = case.data()
    with pytest.raises(UsageError, match="does not use: L0"):
        stack_tape(params | {"L0.W_X": params["L0.W_Q"]}, inputs, case.arch)
    with pytest.raises(UsageError, match="gap"):
        stack_tape({name.replace("L0.", "L1."): p for name, p in params.items()}, inputs, case.arch)
    with pytest.raises(UsageError, match="embedding"):
        stack_tape({name: p for name, p in params.items() if name != "E"}, inputs, case.arch)
    with pytest.raises(ShapeError, match="positions"):
        stack_tape(params, torch.zeros(1, T + 2, dtype=torch.long), case.arch)
    with pytest.raises(ShapeError, match="query heads"):
        stack_tape(params, inputs, arch(num_heads=3))
    with pytest.raises(UsageError, match="W_Q"):
        found.hvp({"L0.W_q": params["L0.W_Q"]})
    with pytest.raises(ShapeError, match="shape"):
        found.hvp({"L0.W_Q": params["L0.W_Q"][:2]})
    with pytest.raises(UsageError, match="norm"):
        arch(norm="middle")
    with pytest.raises(ShapeError, match="integer targets"):
        StackCurvature(found.tape, lambda z: cross_entropy_objective(z, z))
