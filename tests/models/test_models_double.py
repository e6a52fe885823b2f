"""Parts that a family computes in float32 stay in float64, however its release writes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from curvescope.models.running.keep_float64 import KeepDouble, exact
from oracles import shaken

WIDE = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NARROW = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))

PRODUCTS = {
    "@": lambda a, b: a @ b,
    "matmul": torch.matmul,
    "mm": lambda a, b: a.mm(b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "linear": lambda a, b: F.linear(a, b.T),
    "linear by name": lambda a, b: F.linear(input=a, weight=b.T),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "einsum of a list": lambda a, b: torch.einsum("ij,jk->ik", [a, b]),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=1),
    "baddbmm": lambda a, b: torch.baddbmm(torch.zeros(1, 3, 3), a[None], b[None])[0],
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_promote_what_is_in_float32(product):
    for a, b in ((WIDE, NARROW), (NARROW, WIDE)):
        with KeepDouble():
            found = product(a, b)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, a.double() @ b.double(), rtol=1e-15, atol=1e-15)
    with KeepDouble():
        assert product(NARROW, NARROW).dtype == torch.float32


CASTS = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to a place": lambda x: x.to("cpu", torch.float32),
    "to by name": lambda x: x.to(device="cpu", dtype=torch.float32),
    "type": lambda x: x.type(torch.float32),
    "softmax": lambda x: x.softmax(-1, dtype=torch.float32) * 0 + x,
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_to_float32_are_left_out(cast):
    with KeepDouble():
        assert torch.equal(cast(WIDE), WIDE)


def test_a_cast_still_moves():
    with KeepDouble():
        moved = WIDE.to(device="meta", dtype=torch.float32)
    assert (moved.device.type, moved.dtype) == ("meta", torch.float64)


class Rotated(nn.Module):
    """A head behind rotary tables; `entrywise` and matrix products are the two ways releases write them."""

    def __init__(self, *, entrywise: bool):
        super().__init__()
        self.entrywise = entrywise
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.3]), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None]
        if self.entrywise:
            angles = positions[..., None].float() * self.inv_freq.to(dtype=torch.float)
        else:
            table = self.inv_freq[None, :, None].float()
            angles = (table.float() @ positions[:, None, :].float()).transpose(1, 2)
        x = self.embed(tokens)
        return self.head((x * torch.cat((angles, angles), dim=-1).cos().to(x.dtype)).float())


def test_rotary_tables_by_matrix_products_agree_with_entrywise_ones():
    tokens = torch.arange(6).view(2, 3) % 5
    outputs = []
    for entrywise in (True, False):
        module = shaken(Rotated(entrywise=entrywise), seed=3)
        for name, p in module.named_parameters():
            p.data.copy_(torch.linspace(-1, 1, p.numel()).view_as(p) * (1 + len(name)))
        with exact(torch.float64, casts=True), torch.no_grad():
            outputs.append(module(tokens))
    assert outputs[0].dtype == torch.float64
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-14, atol=1e-14)


def test_a_llama_in_float64_is_the_one_in_float32_up_to_rounding():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8, pad_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = transformers.LlamaForCausalLM(config).eval()
    data = torch.arange(1, 11).view(2, 5), torch.arange(2, 12).view(2, 5) % 11
    single = cs.Problem(module, data).loss_value()
    double = cs.Problem(cs.load(module, dtype=torch.float64), data).loss_value()
    assert double == pytest.approx(single, rel=1e-6)
    assert double != single
