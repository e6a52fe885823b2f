"""Blocks of models: every entry once, inputs × outputs, chosen by globs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import curvescope as cs
import oracles
from curvescope.core.blocks import Block, parameter_block
from curvescope.models.model import check_cover
from oracles import Bench


def names(model: cs.Model, *patterns: str) -> list[str]:
    return [block.name for block in model.space(*patterns)]


def test_blocks_cover_every_parameter_once(bench: Bench):
    model = bench.model
    check_cover(model.blocks, model.module)
    assert model.num_parameters == model.space().size == sum(p.numel() for p in bench.module.parameters())
    assert sorted(bench.order.tolist()) == list(range(model.num_parameters))
    theta = model.space().gather(dict(model.named_parameters()))
    assert torch.equal(theta, bench.dense.theta[bench.order])


def test_heads_of_a_role_cover_it_once(bench: Bench):
    model = bench.model
    roles = {name.replace(name.split(".")[1] + ".", "", 1) for name in model.heads}
    for role in roles:
        layer, kind = role.split(".")
        covered = torch.cat([bench.dense.entries(model, n) for n in names(model, f"{layer}.h*.{kind}")])
        assert sorted(covered.tolist()) == sorted(bench.dense.entries(model, role).tolist())
        theta = model.space(f"{layer}.h*.{kind}").gather(dict(model.named_parameters()))
        assert torch.equal(theta, bench.dense.theta[covered])


def test_names_and_order_of_a_zoo_model():
    model = oracles.bench("pre-layernorm-gelu-2layers").model
    layer = ["W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O", "W_1", "b_1", "W_2", "b_2"]
    expected = {"E", "P", "ln_f.g", "ln_f.b", "U"}
    for i in range(2):
        expected |= {f"L{i}.{role}" for role in [*layer, "ln1.g", "ln1.b", "ln2.g", "ln2.b"]}
    found = names(model)
    assert set(found) == expected
    assert found[:2] == ["E", "P"]
    assert found[-3:] == ["ln_f.g", "ln_f.b", "U"]
    assert [found.index(f"L0.{role}") for role in layer] == sorted(
        found.index(f"L0.{role}") for role in layer
    )
    assert found.index("L0.W_2") < found.index("L1.W_Q")


def test_a_role_is_inputs_by_outputs_and_a_parameter_is_as_it_is_stored():
    zoo = oracles.bench("wide-heads").model
    assert zoo.blocks["L0.W_Q"].shape == (3, 6)
    assert zoo.blocks["L0.W_O"].shape == (6, 3)
    assert zoo.heads["L0.h1.W_Q"].shape == (3, 2)
    assert zoo.heads["L0.h1.b_Q"].shape == (2,)
    assert zoo.heads["L0.h1.W_O"].shape == (2, 3)
    plain = oracles.bench("plain-normed-mlp").model
    assert plain.blocks["up.weight"].shape == plain.get_parameter("up.weight").shape == (6, 3)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    W = plain.inputs_first(plain.blocks["up.weight"]).take(plain.get_parameter("up.weight"))
    torch.testing.assert_close(x @ W + plain.get_parameter("up.bias"), plain.module.up(x))


def test_tied_parameters_are_one_block():
    bench = oracles.bench("plain-attention-tied")
    assert "emb.weight" in bench.model.blocks
    assert "head.weight" not in bench.model.blocks
    zoo = oracles.bench("no-norm-linear-gelu_tanh-tied").model
    assert "U" not in zoo.blocks
    assert any("unembedding is the embedding" in note for note in zoo.notes)


def test_grouped_heads_count_keys_by_their_own():
    model = oracles.bench("pre-rmsnorm-swiglu-rope-grouped").model
    assert [n for n in model.heads if n.endswith("W_Q")] == ["L0.h0.W_Q", "L0.h1.W_Q"]
    assert [n for n in model.heads if n.endswith("W_K")] == ["L0.h0.W_K"]
    assert model.facts["n_kv_heads"] == 1


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("L0.W_Q",), ["L0.W_Q"]),
        (("L*.W_[QK]",), ["L0.W_Q", "L0.W_K", "L1.W_Q", "L1.W_K"]),
        (("*.b_O", "E"), ["E", "L0.b_O", "L1.b_O"]),
        (("L0.h*.W_Q",), ["L0.h0.W_Q", "L0.h1.W_Q"]),
        (("L?.h1.[Wb]_V",), ["L0.h1.W_V", "L0.h1.b_V", "L1.h1.W_V", "L1.h1.b_V"]),
        (("*.ln1.g",), ["L0.ln1.g", "L1.ln1.g"]),
        (("E", "E", "*E*"), ["E"]),
        (("L0.h0.W_Q", "L0.W_K"), ["L0.W_K", "L0.h0.W_Q"]),
    ],
)
def test_globs(patterns: tuple[str, ...], expected: list[str]):
    assert names(oracles.bench("pre-layernorm-gelu-2layers").model, *patterns) == expected


def test_a_layer_glob_does_not_take_its_heads():
    model = oracles.bench("pre-layernorm-gelu-2layers").model
    found = names(model, "L0.*")
    assert len(found) == 16
    assert not any(".h" in name for name in found)
    assert not any(".h" in name for name in names(model, "*"))
    assert names(model) == names(model, "*")


@pytest.mark.parametrize(
    "pattern",
    ["L0.w_q", "L0.WQ", "L7.W_Q", "L0.h9.W_Q", "nothing"],
)
def test_an_unknown_block_is_an_error_with_near_misses(pattern: str):
    with pytest.raises(cs.UsageError, match=f"no block matches '{pattern}'") as caught:
        oracles.bench("pre-layernorm-gelu-2layers").model.space("E", pattern)
    assert caught.value.hint
    if pattern in ("L0.w_q", "L0.WQ"):
        assert "L0.W_Q" in caught.value.hint
    if pattern == "L0.h9.W_Q":
        assert "L0.h0.W_Q" in caught.value.hint


@pytest.mark.parametrize("patterns", [("L0.W_Q", "L0.h1.W_Q"), ("*", "L1.h*.b_K"), ("L*.h*.W_O", "L1.W_O")])
def test_a_matrix_and_its_heads_together_overlap(patterns: tuple[str, ...]):
    with pytest.raises(cs.UsageError, match=r"blocks L\d\.._. and L\d\.h\d\.._. overlap"):
        oracles.bench("pre-layernorm-gelu-2layers").model.space(*patterns)


def test_check_cover_sees_gaps_and_overlaps():
    module = nn.Linear(3, 4)
    weight, bias = parameter_block("w", "weight", (4, 3), transposed=True), parameter_block("b", "bias", (4,))
    check_cover({"w": weight, "b": bias}, module)
    with pytest.raises(cs.UsageError, match="'bias' exactly once"):
        check_cover({"w": weight}, module)
    half = Block("b0", "bias", split=(2, 2), shape=(2,), narrow=((0, 0, 1),))
    with pytest.raises(cs.UsageError, match="'bias' exactly once"):
        check_cover({"w": weight, "b0": half}, module)
    with pytest.raises(cs.UsageError, match=r"'bias' exactly once.*2 times"):
        check_cover({"w": weight, "b": bias, "b0": half}, module)


def test_check_cover_says_that_entries_are_missing():
    half = Block("b0", "bias", split=(2, 2), shape=(2,), narrow=((0, 0, 1),))
    with pytest.raises(cs.UsageError, match=r"0 times|missing|not cover"):
        check_cover({"w": parameter_block("w", "weight", (4, 3)), "b0": half}, nn.Linear(3, 4))


class Nested(nn.Module):
    """Parameter paths of three parts whose second begins with h."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"head": nn.Linear(3, 2), "hidden": nn.Linear(3, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net["head"](torch.tanh(self.net["hidden"](x)))


@pytest.mark.parametrize("pattern", ["net.head.weight", "net.h*.weight", "*.hidden.*"])
def test_names_of_a_plain_module_are_not_taken_for_heads(pattern: str):
    found = names(cs.load(Nested()), pattern)
    assert found
    assert all(name in dict(Nested().named_parameters()) for name in found)


def test_facts_and_repr():
    model = oracles.bench("wide-heads").model
    assert model.facts["d_head"] == 2
    assert model.n_ctx == 5
    assert (
        repr(model) == f"Model('Transformer': {model.num_parameters} parameters, {len(model.blocks)} blocks)"
    )
    assert cs.load(nn.Linear(2, 2)).n_ctx is None
