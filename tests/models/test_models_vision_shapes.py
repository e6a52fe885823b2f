"""Vision Transformers as timm and open_clip have them: roles by structure, attention with our kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvescope as cs
import vision_shapes as shapes
from curvescope.models.model import check_cover
from curvescope.models.running.fused import fuse
from curvescope.models.running.module_replacements import layout_of

every = pytest.mark.parametrize("name", shapes.CASES)
LAYER = {f"{x}_{y}" for x in "Wb" for y in "QKVO12"} | {f"ln{i}.{x}" for i in (1, 2) for x in "gb"}


def hessian_product(module: nn.Module, v: dict[str, Tensor]) -> dict[str, Tensor]:
    x, y = shapes.data()
    own = dict(module.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        loss = nn.functional.cross_entropy(module(x), y)
        g = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        inner = sum((a * v[name]).sum() for a, name in zip(g, own, strict=True))
        return dict(zip(own, torch.autograd.grad(inner, list(own.values())), strict=True))


@every
def test_every_parameter_has_a_role(name: str):
    model = cs.load(shapes.made(name))
    check_cover(model.blocks, model.module)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    for i in range(2):
        assert {n.removeprefix(f"L{i}.") for n in model.blocks if n.startswith(f"L{i}.")} >= LAYER
    assert {"E", "E_class", "P", "ln_f.g", "U"} <= set(model.blocks)
    assert {"n_layers": 2, "d_model": 6, "n_heads": 2, "d_head": 3, "d_ff": 8}.items() <= model.facts.items()
    assert len(model.heads) == 2 * 2 * 7


def test_scales_and_norms_of_queries_have_roles():
    model = cs.load(shapes.made("timm, norms of queries and keys"))
    assert {"L1.ls1", "L0.ls2", "L0.q_norm.g", "L1.k_norm.b"} <= set(model.blocks)


@every
def test_products_are_those_of_double_backward(name: str):
    module = shapes.made(name)
    H = cs.Hessian(cs.Problem(module, shapes.data()), engine="fast")
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = H.space.gather(hessian_product(module, H.space.scatter(v)))
    assert float((H @ v - truth).norm() / truth.norm()) < 1e-10


@pytest.mark.parametrize(("name", "cut"), [("timm", slice(9, 12)), ("interleaved", slice(12, 15))])
def test_the_order_of_packed_rows_is_found(name: str, cut: slice):
    """Keys of the second head: rows 9 to 11 of Q Q K K V V, rows 12 to 14 of Q K V Q K V."""
    model = cs.load(shapes.made(name))
    block = model.heads["L1.h1.W_K"]
    p = model.get_parameter("blocks.1.attn.qkv.weight")
    assert torch.equal(block.take(p), p[cut].T)


@pytest.mark.parametrize("name", ["timm, not fused", "timm, norms of queries and keys", "interleaved"])
def test_attention_that_is_written_out_is_ours(name: str):
    module = shapes.made(name)
    replaced = {r.module for r in fuse(cs.load(module)).replacements}
    assert {block.attn for block in module.blocks} <= replaced


def test_another_attention_with_these_parts_stays_as_it_is():
    """A bias of the scores, which neither layout has."""
    attn = shapes.Attention(normed=False, fused=False, bias=torch.linspace(0, 2, 25).view(5, 5)).double()
    assert layout_of(attn) is None
    model = cs.load(nn.Sequential(attn, nn.Linear(6, 2).double()))
    assert "0.qkv.weight" in model.blocks
    assert not fuse(model).replacements


def test_a_mask_is_left_to_the_module():
    attn = shapes.Attention(normed=False, fused=False).double()
    (taken,) = fuse(cs.load(nn.Sequential(attn))).replacements
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    torch.testing.assert_close(taken.replacement(x, attn_mask=mask), attn(x, attn_mask=mask))
    torch.testing.assert_close(taken.replacement(x, attn_mask=None), attn(x))
