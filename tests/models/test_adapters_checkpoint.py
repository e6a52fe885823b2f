"""Layers of transformers' models computed again instead of being kept: the same products."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import adapters_cases as cases
import curvescope as cs
from adapters_cases import relative
from selection import pairs


@pytest.mark.parametrize(
    ("name", "kind"),
    pairs(["gpt2", "gpt_neox", "llama", "gemma", "bert", "vit"], [cs.Hessian, cs.GGN], shift=1, every=3),
)
def test_products_are_the_same(name: str, kind: type[cs.Hessian]):
    p = cs.Problem(cases.loaded(name), cases.data(name))
    v = torch.randn(p.space().size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = kind(p, engine="autograd") @ v
    assert float(want.norm()) > 0
    assert relative(kind(p, checkpoint=True) @ v, want) < 1e-9
