"""nanoGPT's checkpoints, against its forward pass written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import adapters_cases as cases
import curvescope as cs


def nano_weights(*, bias: bool, compiled: bool = False, d: int = 8) -> dict[str, torch.Tensor]:
    """The parameters of a nanoGPT of two layers, as its checkpoints hold them."""
    source = torch.Generator().manual_seed(3)
    draw = lambda *shape: 0.4 * torch.randn(*shape, generator=source)  # noqa: E731
    found = {"transformer.wte.weight": draw(11, d), "transformer.wpe.weight": draw(6, d)}
    for i in range(2):
        at = f"transformer.h.{i}."
        shapes = {
            "attn.c_attn": (3 * d, d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (4 * d, d),
            "mlp.c_proj": (d, 4 * d),
        }
        for name, shape in shapes.items():
            found[f"{at}{name}.weight"] = draw(*shape)
            found |= {f"{at}{name}.bias": draw(shape[0])} if bias else {}
        for n in (1, 2):
            found[f"{at}ln_{n}.weight"] = 1 + draw(d)
            found |= {f"{at}ln_{n}.bias": draw(d)} if bias else {}
        found[f"{at}attn.bias"] = torch.ones(1, 1, 6, 6)
    found["transformer.ln_f.weight"] = 1 + draw(d)
    found |= {"transformer.ln_f.bias": draw(d)} if bias else {}
    found["lm_head.weight"] = found["transformer.wte.weight"]
    return {f"_orig_mod.{k}": v for k, v in found.items()} if compiled else found


def nano_forward(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """nanoGPT's forward pass, written from its description: pre-norm, two heads, exact GELU, tied."""
    d, F = 8, nn.functional
    h = w["transformer.wte.weight"][x] + w["transformer.wpe.weight"][: x.shape[1]]
    affine = lambda z, name: F.linear(z, w[f"{name}.weight"], w.get(f"{name}.bias"))  # noqa: E731
    norm = lambda z, name: F.layer_norm(z, (d,), w[f"{name}.weight"], w.get(f"{name}.bias"))  # noqa: E731
    for i in range(2):
        at = f"transformer.h.{i}."
        parts = affine(norm(h, f"{at}ln_1"), f"{at}attn.c_attn").split(d, dim=-1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + affine(y, f"{at}attn.c_proj")
        h = h + affine(F.gelu(affine(norm(h, f"{at}ln_2"), f"{at}mlp.c_fc")), f"{at}mlp.c_proj")
    return norm(h, "transformer.ln_f") @ w["lm_head.weight"].T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_nanogpt_checkpoint(bias: bool, compiled: bool, tmp_path):
    args = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 8,
        "block_size": 6,
        "bias": bias,
        "vocab_size": 11,
        "dropout": 0.0,
    }
    (tmp_path / "out").mkdir()
    checkpoint = {
        "model": nano_weights(bias=bias, compiled=compiled),
        "model_args": args,
        "iter_num": 5,
        "best_val_loss": torch.tensor(2.0),
        "config": {"dataset": "shakespeare"},
    }
    torch.save(checkpoint, tmp_path / "out" / "ckpt.pt")
    x, _ = cases.data("nano")
    for source in (tmp_path / "out" / "ckpt.pt", str(tmp_path / "out")):
        model = cs.load(source)
        assert model.name == "out"
        torch.testing.assert_close(
            model.forward({}, x), nano_forward(nano_weights(bias=bias), x), rtol=1e-4, atol=1e-5
        )
        assert model.facts["tied"]
        assert ("L0.b_Q" in model.blocks) == bias
        assert "U" not in model.blocks
    assert cs.load(cs.save(model, tmp_path / "ours")).num_parameters == model.num_parameters
