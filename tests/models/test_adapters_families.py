"""One battery for every family: cover, forward, block Hessians, heads, layouts, batching, round trip."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import adapters_cases as cases
import curvescope as cs
from adapters_cases import relative
from curvescope.models.adapters import FAMILIES, family_of
from curvescope.models.capture import capture
from curvescope.models.model import check_cover
from mixtures import MIXTURES
from selection import a_third, one_in, pairs, some

every = pytest.mark.parametrize("name", cases.NAMES)
recurrent = pytest.mark.parametrize("name", list(cases.RECURRENT))


EXACT = 1e-10  # relative error in float64: casts to float32 inside are left out


def casts(name: str) -> bool:
    """Whether the family's table says that parts are computed in float32."""
    return bool(family_of(name).float32)


def block(model: cs.Model, name: str) -> torch.Tensor:
    """The values of a block, inputs × outputs; zero where the family has none."""
    found = {**model.blocks, **model.heads}.get(name)
    return torch.zeros(()) if found is None else found.take(model.get_parameter(found.parameter)).detach()


def test_every_declared_family_is_in_the_battery():
    elsewhere = {"t5", *MIXTURES}  # batteries of their own
    assert set(cases.NAMES) | set(cases.RECURRENT) | elsewhere == set(FAMILIES)
    assert len(cases.NAMES) >= 14


@pytest.mark.parametrize("name", [*cases.NAMES, *cases.RECURRENT])
def test_blocks_cover_every_parameter_once(name: str):
    model = cases.loaded(name)
    check_cover(model.blocks, model.module)
    assert model.space().size == model.num_parameters == sum(p.numel() for p in model.module.parameters())


@every
def test_every_parameter_has_a_role(name: str):
    model = cases.loaded(name)
    assert not set(model.blocks) & set(dict(model.named_parameters())), (
        "a parameter kept its own name: the table lacks it"
    )
    roles = {"W_Q", "W_K", "W_V", "W_O", "W_2", "ln1.g", "ln2.g"}
    gated = model.facts.get("gated", False)
    roles |= {"W_g", "W_u"} if gated else {"W_1", "b_1", "b_2"}
    for i in range(2):
        assert {f"L{i}.{role}" for role in roles} <= set(model.blocks)
    assert "E" in model.blocks


@pytest.mark.parametrize("name", [*cases.NAMES, *cases.RECURRENT])
def test_forward_is_the_original(name: str):
    model, module = cases.loaded(name), cases.original(name)
    x, _ = cases.data(name)
    with torch.no_grad():
        truth = (module.train() if name == "rwkv" else module)(x).logits.double()  # eval rescales RWKV
        found = model.forward({}, x)
    # the fused attention of older transformers leaves gemma2's soft cap out, which eager applies
    tolerance = 1e-4 if name == "gemma2" else 1e-5 if casts(name) else 1e-12
    assert relative(found, truth) < tolerance
    assert found.dtype == torch.float64


SLICED = ["phi3", "roberta"]  # packed, in an encoder


@pytest.mark.parametrize("name", SLICED + some([name for name in cases.NAMES if name not in SLICED], 0))
def test_block_hessian_is_a_slice_of_the_dense_one(name: str):
    case, model = cases.CASE[name], cases.loaded(name)
    x, y = cases.data(name)
    raw = list(dict.fromkeys(parameter for parameter, _ in case.raw.values()))
    dense, places = cases.dense_hessian(model.module, raw, x, y, exact=True)
    order = torch.cat([cut(places[parameter]).flatten() for parameter, cut in case.raw.values()])
    truth = dense[order][:, order]
    H = cs.Hessian(cs.Problem(model, (x, y))).block(list(case.raw))
    assert list(H.space.slices) == [n for n in model.blocks if n in case.raw]
    found = H @ torch.eye(H.shape[1], dtype=torch.float64)
    own = torch.cat([torch.arange(len(order)).split(_sizes(model, case))[i] for i in _places(H, case)])
    assert relative(found, truth[own][:, own]) < EXACT
    assert float(truth.abs().max()) > 1e-4


def _sizes(model: cs.Model, case: cases.Case) -> list[int]:
    return [model.blocks[n].size for n in case.raw]


def _places(H: cs.Hessian, case: cases.Case) -> list[int]:
    """For each block of the operator, in its order, the place of the block among the case's."""
    return [list(case.raw).index(n) for n in H.space.slices]


@pytest.mark.parametrize("name", one_in([*cases.NAMES, *cases.RECURRENT], 6, shift=2))
def test_products_are_differences_of_gradients(name: str):
    """To the accuracy of differences in float64, which no cast to float32 would leave: those give 1e-3."""
    model = cases.loaded(name)
    x, y = cases.data(name, 2)
    problem, step = cs.Problem(model, (x, y)), 1e-4
    space = model.space()
    v = torch.randn(space.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = v / v.norm()
    gradients = []
    for sign in (1, -1):
        moved = replace(model, module=copy.deepcopy(model.module))
        with torch.no_grad():
            for key, shift in space.scatter(v).items():
                moved.get_parameter(key).add_(shift, alpha=sign * step)
        gradients.append(cs.Problem(moved, (x, y)).gradient())
    difference = (gradients[0] - gradients[1]) / (2 * step)
    assert float((cs.Hessian(problem) @ v - difference).norm() / difference.norm()) < 1e-5


@pytest.mark.parametrize("name", [*cases.NAMES, *cases.RECURRENT])
def test_the_table_says_what_runs_in_float32(name: str):
    model = cases.loaded(name)
    x, _ = cases.data(name)
    with torch.no_grad(), cases.KeepDouble() as mode:
        model.module(x)
    assert (mode.casts > 0) == casts(name) == model.casts
    with torch.no_grad(), cases.KeepDouble() as mode:
        model.forward({}, x)
    assert mode.casts == 0
    assert any("computes in float32" in note for note in model.notes) == casts(name)


@pytest.mark.parametrize("name", a_third(cases.NAMES, shift=1))
def test_single_precision_is_the_modules_own(name: str):
    """Nothing is left out in float32: outputs are those of the module to the last bit."""
    model = cs.load(cases.folder_of(name), dtype="float32")
    x, _ = cases.data(name)
    x = x if x.dtype == torch.int64 else x.float()
    with torch.no_grad():
        assert torch.equal(model.forward({}, x), model.module(x).logits)


@every
def test_heads_are_slices_of_the_whole(name: str):
    case, model = cases.CASE[name], cases.loaded(name)
    k = case.size
    for role in ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O"):
        if f"L1.{role}" not in model.blocks:
            continue
        whole = block(model, f"L1.{role}")
        count = case.kv_heads if role[-1] in "KV" else case.heads
        names = [n for n in model.heads if n.startswith("L1.h") and n.endswith(f".{role}")]
        assert names == [f"L1.h{j}.{role}" for j in range(count)]
        for j, head in enumerate(names):
            own = slice(j * k, (j + 1) * k)
            assert torch.equal(block(model, head), whole[own] if role == "W_O" else whole[..., own])
    for role, (parameter, cut) in case.raw.items():
        assert torch.equal(block(model, role), cut(model.get_parameter(parameter)))


@every
def test_blocks_compute_what_the_layer_computes(name: str):
    """heads = A (x W_V + b_V), out = heads W_O + b_O, and the feed-forward, from captured tensors."""
    from transformers.activations import ACT2FN

    case, model = cases.CASE[name], cases.loaded(name)
    x, _ = cases.data(name)
    found = capture(model, x)
    act = ACT2FN[model.facts["activation"]]
    for i in range(2):
        at = {key.removeprefix(f"L{i}."): t for key, t in found.items() if key.startswith(f"L{i}.")}
        assert set(at) == {"attn.in", "attn.pattern", "attn.heads", "attn.out", "ff.in", "ff.out"}
        A = at["attn.pattern"]
        torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]), rtol=0, atol=1e-6)
        for j in range(case.heads):
            g = j * case.kv_heads // case.heads
            values = at["attn.in"] @ block(model, f"L{i}.h{g}.W_V") + block(model, f"L{i}.h{g}.b_V")
            own = at["attn.heads"][..., j * case.size : (j + 1) * case.size]
            torch.testing.assert_close(A[:, j] @ values, own)
        out = at["attn.heads"] @ block(model, f"L{i}.W_O") + block(model, f"L{i}.b_O")
        torch.testing.assert_close(out, at["attn.out"])
        h = at["ff.in"]
        if model.facts.get("gated"):
            z = act(h @ block(model, f"L{i}.W_g")) * (h @ block(model, f"L{i}.W_u"))
        else:
            z = act(h @ block(model, f"L{i}.W_1") + block(model, f"L{i}.b_1"))
        torch.testing.assert_close(z @ block(model, f"L{i}.W_2") + block(model, f"L{i}.b_2"), at["ff.out"])


@pytest.mark.parametrize(("name", "role"), pairs(cases.NAMES, ["Q", "K"]))
def test_zeroing_a_head_makes_its_pattern_flat_and_no_other(name: str, role: str):
    case, model = cases.CASE[name], cases.loaded(name)
    x, _ = cases.data(name)
    before = capture(model, x, "L0.attn.pattern")["L0.attn.pattern"]
    T = before.shape[-1]
    flat = torch.ones(T, T, dtype=torch.float64)
    flat = flat.tril() if model.facts["causal"] else flat
    flat = flat / flat.sum(-1, keepdim=True)
    count = case.heads if role == "Q" else case.kv_heads
    for j in range(count):
        changed = replace(model, module=copy.deepcopy(model.module))
        for kind in ("W", "b"):
            own = changed.heads.get(f"L0.h{j}.{kind}_{role}")
            if own is not None:
                with torch.no_grad():
                    own.put(torch.zeros(own.shape, dtype=torch.float64), changed.get_parameter(own.parameter))
        after = capture(changed, x, "L0.attn.pattern")["L0.attn.pattern"]
        for head in range(case.heads):
            mine = head == j if role == "Q" else head * case.kv_heads // case.heads == j
            if mine:
                assert float((after[:, head] - flat).abs().max()) < 1e-6
                assert float((before[:, head] - flat).abs().max()) > 1e-3
            else:
                torch.testing.assert_close(after[:, head], before[:, head], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", some([*cases.RECURRENT, *cases.NAMES], 3))
def test_products_do_not_depend_on_batching(name: str):
    model = cases.loaded(name)
    x, y = cases.data(name)
    chosen = ["L0.W_Q", "L1.W_O"] if name in cases.NAMES else ["*embeddings*"]
    whole = cs.Hessian(cs.Problem(model, (x, y))).block(chosen)
    parts = cs.Hessian(cs.Problem(model, [(x[:1], y[:1]), (x[1:], y[1:])])).block(chosen)
    v = torch.randn(whole.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert relative(parts @ v, whole @ v) < EXACT
    G = cs.GGN(cs.Problem(model, (x, y))).block(chosen)
    assert float(v @ (G @ v)) >= 0


@every
def test_facts(name: str):
    case, model = cases.CASE[name], cases.loaded(name)
    facts = model.facts
    assert facts["kind"] == name
    assert (facts["n_layers"], facts["d_model"], facts["d_ff"]) == (
        2,
        cases.D,
        cases.F,
    )
    assert (facts["n_heads"], facts["n_kv_heads"], facts["d_head"]) == (case.heads, case.kv_heads, case.size)
    assert facts["norm"] == ("post" if name in ("bert", "roberta", "distilbert") else "pre")
    assert facts["causal"] == (name not in ("bert", "roberta", "distilbert", "vit"))
    assert facts["tied"] == any(note.startswith("tied: ") for note in model.notes)
    assert ("U" in model.blocks) == (not facts["tied"])
    assert name == "vit" or facts["vocab_size"] == cases.V
    assert name == "vit" or any("no tokenizer" in note for note in model.notes)


@pytest.mark.parametrize("name", a_third(cases.NAMES, shift=2))
def test_round_trip(name: str, tmp_path):
    model = cases.loaded(name)
    model.module.save_pretrained(tmp_path / "again")
    again = cs.load(tmp_path / "again", dtype="float64")
    assert list(again.blocks.values()) == list(model.blocks.values())
    assert again.facts == model.facts
    for key, p in model.named_parameters():
        assert torch.equal(again.get_parameter(key), p)


@recurrent
def test_recurrent_models_say_what_does_not_apply(name: str):
    model = cases.loaded(name)
    assert set(model.blocks) == set(dict(model.named_parameters()))
    assert any("no heads, no attention pattern" in note for note in model.notes)
    with pytest.raises(cs.UsageError, match="only has parameters as blocks"):
        capture(model, cases.data(name)[0])


@recurrent
def test_hessian_of_recurrent_models(name: str):
    model = cases.loaded(name)
    x, y = cases.data(name)
    parameter = {"mamba": "backbone.layers.0.mixer.D", "rwkv": "rwkv.blocks.0.attention.time_decay"}[name]
    truth, _ = cases.dense_hessian(model.module, [parameter], x, y, exact=True)
    H = cs.Hessian(cs.Problem(model, (x, y))).block(parameter)
    assert relative(H @ torch.eye(len(truth), dtype=torch.float64), truth) < EXACT


SOURCES = ["mamba", "gemma3_text", "vit"]


@pytest.mark.parametrize(
    "name", SOURCES + some([name for name in [*cases.RECURRENT, *cases.NAMES] if name not in SOURCES], 0)
)
def test_sources_of_curvature_add_up(name: str):
    problem = cs.Problem(cases.loaded(name), cases.data(name))
    S, H = cs.FunctionalSources(problem), cs.Hessian(problem)
    v = torch.randn(H.shape[1], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = torch.stack([cs.GGN(problem) @ v, *S.products(v).values()]).sum(0)
    assert relative(found, H @ v) < EXACT
    wanted = {"mixer"} if name == "mamba" else {"attention", "feed_forward" if name == "rwkv" else "ffn"}
    assert {f"L{i}.{kind}" for i in range(2) for kind in wanted} <= set(S)
