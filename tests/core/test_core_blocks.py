"""Blocks as views of packed parameters, and vectors as lists of blocks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvescope.core.blocks import Block, ParamSpace, parameter_block
from curvescope.core.errors import ShapeError, UsageError
from curvescope.models.model import check_cover
from curvescope.models.parameter_selection import select

D, H, K = 4, 3, 2


def gpt2_blocks() -> tuple[dict[str, Block], dict[str, Block]]:
    """One matrix (d, 3 h k): all queries, then all keys, then all values."""
    blocks, heads = {}, {}
    for i, role in enumerate("QKV"):
        name = f"L0.W_{role}"
        blocks[name] = Block(name, "w", split=(D, 3, H * K), narrow=((1, i, 1),), shape=(D, H * K))
        for h in range(H):
            head = f"L0.h{h}.W_{role}"
            heads[head] = Block(head, "w", split=(D, 3, H, K), narrow=((1, i, 1), (2, h, 1)), shape=(D, K))
    return blocks, heads


def neox_blocks() -> tuple[dict[str, Block], dict[str, Block]]:
    """One matrix (3 h k, d), outputs first, where each head has its query, key and value together."""
    blocks, heads = {}, {}
    for i, role in enumerate("QKV"):
        name = f"L0.W_{role}"
        blocks[name] = Block(
            name, "w", split=(H, 3, K, D), narrow=((1, i, 1),), order=(3, 0, 1, 2), shape=(D, H * K)
        )
        for h in range(H):
            head = f"L0.h{h}.W_{role}"
            heads[head] = Block(
                head, "w", split=(H, 3, K, D), narrow=((0, h, 1), (1, i, 1)), order=(3, 0, 1, 2), shape=(D, K)
            )
    return blocks, heads


def neox_matrix(packed: Tensor, role: int) -> Tensor:
    """The matrix of a role as NeoX itself takes it apart: x W is (x packedᵀ) seen as (h, 3, k)."""
    rows = [packed[(h * 3 + role) * K + j] for h in range(H) for j in range(K)]
    return torch.stack(rows, dim=1)


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def test_packed_columns_as_in_gpt2():
    packed, (blocks, heads) = numbered(D, 3 * H * K), gpt2_blocks()
    for i, role in enumerate("QKV"):
        matrix = packed[:, i * H * K : (i + 1) * H * K]
        assert torch.equal(blocks[f"L0.W_{role}"].take(packed), matrix)
        for h in range(H):
            assert torch.equal(heads[f"L0.h{h}.W_{role}"].take(packed), matrix[:, h * K : (h + 1) * K])


def test_rows_interleaved_by_head_as_in_neox():
    packed, (blocks, heads) = numbered(3 * H * K, D), neox_blocks()
    for i, role in enumerate("QKV"):
        matrix = neox_matrix(packed, i)
        assert torch.equal(blocks[f"L0.W_{role}"].take(packed), matrix)
        for h in range(H):
            assert torch.equal(heads[f"L0.h{h}.W_{role}"].take(packed), matrix[:, h * K : (h + 1) * K])


@pytest.mark.parametrize("style", [gpt2_blocks, neox_blocks])
def test_packed_blocks_cover_views_and_positions(style):
    shape = (D, 3 * H * K) if style is gpt2_blocks else (3 * H * K, D)
    blocks, heads = style()
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(shape))
    check_cover(blocks, module)
    check_cover(heads, module)
    packed = numbered(*shape)
    for block in [*blocks.values(), *heads.values()]:
        assert block.size == block.take(packed).numel()
        assert block.view(packed).data_ptr() >= packed.data_ptr()
        assert torch.equal(packed.flatten()[block.positions(shape)], block.take(packed).flatten())
    view = heads["L0.h2.W_V"].view(packed)
    view.zero_()
    assert int((packed == 0).sum()) in (D * K, D * K + 1)  # the view shares memory (entry 0 was 0 already)


@pytest.mark.parametrize("style", [gpt2_blocks, neox_blocks])
def test_put_is_the_inverse_of_take(style):
    shape = (D, 3 * H * K) if style is gpt2_blocks else (3 * H * K, D)
    _, heads = style()
    packed, copied = numbered(*shape), torch.full(shape, -1.0, dtype=torch.float64)
    for block in heads.values():
        block.put(block.take(packed), copied)
    assert torch.equal(packed, copied)


def test_take_is_differentiable():
    _, heads = neox_blocks()
    packed = numbered(3 * H * K, D).requires_grad_()
    block = heads["L0.h1.W_K"]
    (found,) = torch.autograd.grad((block.take(packed) ** 2).sum(), packed)
    truth = torch.zeros_like(packed)
    block.put(2 * block.take(packed).detach(), truth)
    assert torch.equal(found, truth)


def test_a_transposed_weight():
    weight = numbered(5, 3)
    block = parameter_block("w", "weight", weight.shape, transposed=True)
    assert block.shape == (3, 5)
    assert torch.equal(block.take(weight), weight.T)
    assert torch.equal(parameter_block("w", "weight", (5, 3)).take(weight), weight)


SHAPES = {"a": (4, 6), "b": (3,), "c": (2, 6, 2)}
POOL = [
    parameter_block("a0", "a", (4, 6)),
    parameter_block("aT", "a", (4, 6), transposed=True),
    Block("a1", "a", split=(4, 2, 3), narrow=((1, 1, 1),), shape=(4, 3)),
    Block("a2", "a", split=(4, 2, 3), narrow=((1, 0, 1), (2, 1, 2)), order=(2, 1, 0), shape=(2, 4)),
    parameter_block("b0", "b", (3,)),
    Block("c0", "c", split=(2, 3, 2, 2), narrow=((1, 0, 1),), order=(3, 0, 1, 2), shape=(2, 4)),
    Block("c1", "c", split=(2, 3, 2, 2), narrow=((1, 1, 2),), shape=(2, 8)),
]
APART = st.lists(st.sampled_from(POOL), unique_by=lambda b: b.name).filter(
    lambda chosen: (
        len({b.name for b in chosen} & {"a0", "aT", "a1"}) <= 1
        and not ({"a0", "aT"} & {b.name for b in chosen} and "a2" in {b.name for b in chosen})
    )
)


def space_of(blocks: list[Block]) -> ParamSpace:
    return ParamSpace(tuple(blocks), SHAPES, torch.float64, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(blocks=APART, seed=st.integers(0, 2**31))
def test_gather_scatter_split_and_join_are_inverse(blocks: list[Block], seed: int):
    space = space_of(blocks)
    v = torch.randn(space.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tree = space.scatter(v)
    assert set(tree) == {b.parameter for b in blocks} == set(space.parameter_names)
    assert all(tensor.shape == SHAPES[name] for name, tensor in tree.items())
    assert torch.equal(space.gather(tree), v)
    assert sum(float((t**2).sum()) for t in tree.values()) == pytest.approx(float(v @ v))
    parts = space.to_dict(v)
    assert list(parts) == [b.name for b in blocks]
    if blocks:
        assert torch.equal(space.from_dict(parts), v)
    for block in blocks:
        assert parts[block.name].shape == block.shape
        assert torch.equal(block.take(tree[block.parameter]), parts[block.name])


@settings(max_examples=30, deadline=None)
@given(blocks=APART.filter(bool), k=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_columns_are_vectors_side_by_side(blocks: list[Block], k: int, seed: int):
    space = space_of(blocks)
    V = torch.randn(space.size, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    trees = space.scatter_columns(V)
    for j in range(k):
        alone = space.scatter(V[:, j])
        assert all(torch.equal(trees[name][j], alone[name]) for name in alone)
    assert torch.equal(space.gather_columns(trees, k), V)
    total = space.total(k)
    for name, x in [*trees.items(), *trees.items()]:
        total.add(name, x)
    assert torch.equal(total.result(), 2 * V)
    assert not space.total(k).result().any()
    assert list(space.scatter_columns(V[:, :1])) == list(space.parameter_names)


def test_columns_of_a_single_number():
    space = ParamSpace((parameter_block("s", "s", ()),), {"s": ()}, torch.float64, torch.device("cpu"))
    V = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    assert torch.equal(space.scatter_columns(V)["s"], V[0])
    assert torch.equal(space.gather_columns({"s": V[0]}, 3), V)


def test_zero_columns():
    space = space_of([POOL[0]])
    assert space.gather_columns({}, 0).shape == (24, 0)


def test_a_missing_parameter_counts_as_zero():
    space = space_of([POOL[0], POOL[4]])
    found = space.gather({"b": torch.ones(3, dtype=torch.float64)})
    assert torch.equal(found, torch.cat([torch.zeros(24), torch.ones(3)]).double())


def test_slices_follow_the_order():
    space = space_of([POOL[4], POOL[5], POOL[2]])
    assert space.slices == {"b0": slice(0, 3), "c0": slice(3, 11), "a1": slice(11, 23)}
    assert (len(space), space.size, space.parameter_names) == (3, 23, ("a", "b", "c"))
    assert [block.name for block in space] == ["b0", "c0", "a1"]


def test_wrong_sizes_are_refused():
    space = space_of([POOL[0]])
    with pytest.raises(ShapeError, match=r"expected a vector of 24 entries, got \(23,\)"):
        space.to_dict(torch.zeros(23))
    with pytest.raises(ShapeError, match=r"expected block 'a0' of shape \(4, 6\), got nothing"):
        space.from_dict({})
    with pytest.raises(ShapeError, match=r"expected block 'a0' of shape \(4, 6\), got \(5,\)"):
        space.from_dict({"a0": torch.zeros(5)})


def packed_space(*names: str) -> ParamSpace:
    """The space of some blocks of a packed matrix."""
    blocks, heads = gpt2_blocks()
    chosen = tuple({**blocks, **heads}[name] for name in names)
    return ParamSpace(chosen, {"w": (D, 3 * H * K)}, torch.float64, torch.device("cpu"))


def transposed_space(*, torch_order: bool) -> ParamSpace:
    """The space of a weight (5, 3) that is a block (3, 5), and of a bias."""
    blocks = (parameter_block("W", "w", (5, 3), transposed=True), parameter_block("b", "b", (5,)))
    own = frozenset({"w", "b"}) if torch_order else frozenset[str]()
    return ParamSpace(blocks, {"w": (5, 3), "b": (5,)}, torch.float64, torch.device("cpu"), own)


@pytest.mark.parametrize("torch_order", [True, False])
def test_a_part_of_another_shape_is_refused(torch_order: bool):
    space = transposed_space(torch_order=torch_order)
    parts = space.to_dict(numbered(20))
    with pytest.raises(ShapeError, match=r"\(5, 3\)"):
        space.from_dict({**parts, "W": parts["W"].T})
    with pytest.raises(ShapeError, match=r"\(3, 5\)"):
        space.gather({"w": parts["W"], "b": parts["b"]})
    assert torch.equal(space.from_dict({**parts, "W": parts["W"].flatten()}), numbered(20))


def test_a_part_of_no_block_is_refused():
    space = transposed_space(torch_order=True)
    with pytest.raises(UsageError, match="'w'"):
        space.from_dict({**space.to_dict(numbered(20)), "w": numbered(5, 3)})


@pytest.mark.parametrize("torch_order", [True, False])
def test_the_first_part_does_not_round_the_others(torch_order: bool):
    space = transposed_space(torch_order=torch_order)
    v = torch.rand(20, dtype=torch.float64)
    parts, tree = space.to_dict(v), space.scatter(v)
    parts["W"], tree["w"] = torch.ones(3, 5, dtype=torch.int64), torch.ones(5, 3)
    assert torch.equal(space.to_dict(space.from_dict(parts))["b"], parts["b"])
    assert torch.equal(space.scatter(space.gather(tree))["b"], tree["b"])


def test_spaces_of_other_entries_are_not_converted():
    v, head = numbered(D * H * K), numbered(D * K)
    with pytest.raises(UsageError, match="same entries"):
        packed_space("L0.W_Q").convert(v, packed_space("L0.W_K"))
    with pytest.raises(UsageError, match="same entries"):
        packed_space("L0.h0.W_Q").convert(head, packed_space("L0.h1.W_Q"))
    heads = packed_space(*(f"L0.h{h}.W_Q" for h in range(H)))
    back = heads.convert(packed_space("L0.W_Q").convert(v, heads), packed_space("L0.W_Q"))
    assert torch.equal(back, v)


def test_arrays_of_numpy_are_vectors():
    space = transposed_space(torch_order=True)
    v = numbered(20)
    array = v.numpy()
    for name, part in space.to_dict(v).items():
        assert torch.equal(space.to_dict(array)[name], part)
        assert torch.equal(space.to_dict(array[::-1])[name], space.to_dict(v.flip(0))[name])
    arrays = {name: part.numpy() for name, part in space.to_dict(v).items()}
    assert torch.equal(space.from_dict(arrays), v)
    assert torch.equal(space.gather({name: t.numpy() for name, t in space.scatter(array).items()}), v)
    moved = space.convert(array, space.in_blocks())
    assert isinstance(moved, np.ndarray)
    assert torch.equal(torch.as_tensor(moved), space.convert(v, space.in_blocks()))


def test_a_tree_of_one_vector_has_no_columns():
    space = transposed_space(torch_order=True)
    for split in (space.scatter, space.to_dict):
        with pytest.raises(ShapeError, match=r"\(20, 2\)"):
            split(numbered(20, 2))


def test_selection_keeps_the_models_order_and_refuses_overlap():
    blocks, heads = gpt2_blocks()
    chosen = select(["*.W_V", "L0.W_[QV]"], blocks, heads)
    assert [b.name for b in chosen] == ["L0.W_Q", "L0.W_V"]
    assert [b.name for b in select(["L0.h[02].W_K"], blocks, heads)] == ["L0.h0.W_K", "L0.h2.W_K"]
    assert [b.name for b in select(["L0.h0.W_K", "L0.W_Q"], blocks, heads)] == ["L0.W_Q", "L0.h0.W_K"]
    with pytest.raises(UsageError, match=r"L0\.W_K and L0\.h0\.W_K overlap.*not both"):
        select(["L0.h0.W_K", "L0.W_K"], blocks, heads)


def test_selection_reads_only_names():
    named = {"a.head.b": SimpleNamespace(name="a.head.b", parameter="p")}
    assert [b.name for b in select(["a.head.*"], named, {})] == ["a.head.b"]  # pyright: ignore
