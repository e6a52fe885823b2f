"""Digests of numbers: short for every shape, and other wherever the numbers are."""

import pytest
import torch

from curvescope.engines.tensor_digest import MIN_ROW, digest, same

SHAPES = [(70_000, 1), (1, 70_000), (70_001,), (20_000, 3), (3, 20_001), (90, 800), (41, 100, 2), (5_000, 63)]


def drawn(shape, dtype=torch.float32):
    source = torch.Generator().manual_seed(3)
    return (100 * torch.randn(shape, generator=source)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_digest_is_short(shape):
    t = drawn(shape)
    assert sum(part.numel() for part in digest([t])) <= t.numel() / MIN_ROW + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entries_that_change_places_or_bits_are_noticed(shape, dtype):
    t = drawn(shape, dtype)
    before = digest([t])
    assert same(digest([t.clone()]), before)
    flat = t.view(-1)
    for i, j in [(0, 1), (0, -1), (-1, -2), (1023, 1024), (17, 17 + 1024), (5, len(flat) // 2)]:
        other = flat.clone()
        other[i], other[j] = flat[j], flat[i]
        if not torch.equal(other, flat):
            assert not same(digest([other.view(shape)]), before), (i, j)
        other = flat.clone()
        other[i] = -2 * flat[i] - 1
        assert not same(digest([other.view(shape)]), before), i


def test_the_layout_of_memory_does_not_matter_to_what_is_noticed():
    t = drawn((300, 1000)).T[:, ::2]
    before = digest([t])
    other = t.clone()
    other[3, 4], other[70, 80] = t[70, 80], t[3, 4]
    assert not same(digest([other]), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(90, 800), (70_001,), (20_000, 3)], ids=str)
def test_near_entries_of_half_precision_that_change_places_are_noticed(shape, dtype):
    """One unit in the last place apart, and at the same place in words of 8 bytes: the sum of bits stays."""
    near = torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps]).to(dtype)
    t = drawn(shape).div(100).to(dtype)
    for i, j in [(4, 8), (0, 400), (52, 100)]:
        t.view(-1)[[i, j]] = near
        other = t.clone()
        other.view(-1)[[i, j]] = near.flip(0)
        assert not same(digest([other]), digest([t])), (i, j)
