"""Replayed work on a CPU gives the numbers of the work itself, in bounded memory, or is not replayed."""

import copy
import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvescope as cs
from curvescope.engines.replay import cpu
from curvescope.engines.replay.cpu import Pool, Recording, Replay, Writer
from curvescope.models.running.aliased_parameters import DispatchMode
from selection import pairs, some

MAKERS = {"hessian": cs.Hessian, "ggn": cs.GGN, "functional": cs.FunctionalHessian}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def recorded(work, inputs):
    writer = Writer(inputs)
    with writer:
        found = work(inputs)
    return Recording(writer, found, Pool())


@pytest.fixture
def replays(monkeypatch):
    """A list that grows with every replay."""
    found, replay = [], Recording.replay

    def counted(self, tensors):
        found.append(self)
        return replay(self, tensors)

    monkeypatch.setattr(Recording, "replay", counted)
    return found


def problem(**changes) -> cs.Problem:
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 6, "vocab_size": 7} | changes
    model = cs.load(cs.TransformerConfig(**shape), dtype="float64")
    tokens = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(0))
    return cs.Problem(model, cs.Batches.from_tensors(tokens, tokens.roll(1, 1), batch_size=2))


# ------------------------------------------------------------------------------------------------ products


MODELS = [
    {},
    {"norm_kind": "rmsnorm", "activation": "swiglu"},
    {"norm": "post"},
    {"positions": "rope", "tied": True},
]


@pytest.mark.parametrize(("changes", "name"), pairs(MODELS, [*MAKERS], every=2), ids=str)
def test_many_products_are_those_of_autograd(name, changes, replays):
    p = problem(**changes)
    ours, theirs = MAKERS[name](p, engine="fast"), MAKERS[name](p, engine="autograd")
    for i in range(5):
        v = draw(ours.shape[1], seed=i)
        torch.testing.assert_close(ours @ v, theirs @ v, rtol=1e-9, atol=1e-12)
    assert len(replays) == 4 * len(p.batches)  # one that is compared, then the third product and what follows


@pytest.mark.parametrize("name", some(["ggn", "hessian", "functional"], 1))
def test_blocks_share_the_memory_of_a_pool(name):
    p = problem(n_layers=2, d_model=4)
    ours, theirs = MAKERS[name](p, engine="fast"), MAKERS[name](p, engine="autograd")
    chosen = [("L0.*", "L1.*"), ("L1.W_Q", "L1.W_K"), ("*", "E"), ("L1.*", "L1.*")]
    want = {}
    for i in range(4):  # in turns
        for names in chosen:
            A, B = ours.block(*names), theirs.block(*names)
            v = draw(A.shape[1], seed=i % 2)
            if i < 2:
                want[names, i] = B @ v
            torch.testing.assert_close(A @ v, want[names, i % 2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", some(["functional", "hessian", "ggn"], 1))
def test_a_replay_is_the_product_bit_for_bit(name, monkeypatch, replays):
    monkeypatch.setattr("curvescope.engines.memory.CPU_GROUP_BYTES", 1)  # no batches
    operator = MAKERS[name](problem(), engine="fast")
    V = draw(operator.shape[1], 6)
    first = operator @ V[:, 0]
    assert all(torch.equal(operator @ V[:, 0], first) for _ in range(4))
    count = len(replays)
    together = MAKERS[name](problem(), engine="fast") @ V
    assert len(replays) == count + 5 * 3  # of six columns and three batches, and each compared once
    assert torch.equal(operator @ V, together)
    assert all(torch.equal(together[:, j], operator @ V[:, j]) for j in range(6))
    torch.testing.assert_close(
        together, MAKERS[name](problem(), engine="autograd") @ V, rtol=1e-9, atol=1e-12
    )


def test_earlier_products_are_not_overwritten():
    H = cs.Hessian(problem(), engine="fast")
    vectors = [draw(H.shape[1], seed=i) for i in range(5)]
    found = [H @ v for v in vectors]
    kept = [x.clone() for x in found]
    for v in vectors:
        H @ v
    assert all(torch.equal(x, y) for x, y in zip(found, kept, strict=True))


def test_parameters_that_change_are_noticed():
    p = problem()
    H = cs.Hessian(p, engine="fast")
    v = draw(H.shape[1])
    for _ in range(4):
        before = H @ v
    p.model.get_parameter("L0.W_1").data.mul_(1.5)
    after = H @ v
    assert (after - before).norm() > 1e-6 * before.norm()
    torch.testing.assert_close(after, cs.Hessian(p, engine="autograd") @ v, rtol=1e-9, atol=1e-12)


def test_threads_take_turns():
    H = cs.Hessian(problem(), engine="fast")
    vectors = [draw(H.shape[1], seed=i) for i in range(24)]
    want = [H @ v for v in vectors]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(H.__matmul__, vectors))
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_an_operator_can_be_copied_and_its_memory_goes_with_it():
    H = cs.Hessian(problem(), engine="fast")
    v = draw(H.shape[1])
    for _ in range(3):
        want = H @ v
    twin = copy.deepcopy(H)
    for _ in range(4):
        torch.testing.assert_close(twin @ v, want, rtol=1e-9, atol=1e-12)
    pool = weakref.ref(H.engine.caching._pool)
    del H
    gc.collect()
    assert pool() is None


def test_watching_operations_does_not_load_torchs_compiler():
    modes = DispatchMode.__subclasses__()
    assert Writer in modes
    assert not any(hasattr(mode.__torch_dispatch__, "__wrapped__") for mode in modes)  # nothing put around


# ------------------------------------------------------------------------------------ what is not replayed


class Counted:
    """Counts how often the work is done as it is."""

    def __init__(self, work):
        self.work, self.times = work, 0

    def __call__(self, tensors, group, receive):
        self.times += 1
        for name, x in zip("xyz", self.work(tensors), strict=False):
            receive(name, x)


def first(work, *tensors, group=1):
    found = {}
    work(tensors, group, found.__setitem__)
    return found["x"]


def test_work_is_soon_replayed():
    work = Counted(lambda t: [t[0] @ t[0]])
    replay = Replay(work, ("x",), Pool())
    for i in range(8):
        x = draw(1, 4, 4, seed=i)
        torch.testing.assert_close(first(replay, x), x @ x)
    assert work.times == 4  # twice as it is, then recorded and compared


def test_work_is_replayed_after_as_many_directions_as_users_have(shipped_threshold):
    work = Counted(lambda t: [t[0] @ t[0]])
    replay = Replay(work, ("x",), Pool())
    for i in range(shipped_threshold):
        x = draw(1, 4, 4, seed=i)
        torch.testing.assert_close(first(replay, x), x @ x)
    assert work.times == shipped_threshold > 2  # a single eigenvector may take fewer
    for i in range(5):
        x = draw(1, 4, 4, seed=100 + i)
        torch.testing.assert_close(first(replay, x), x @ x)
    assert work.times == shipped_threshold + 2  # recorded and compared, then replayed


@pytest.mark.parametrize("name", MAKERS)
def test_bits_are_the_same_on_both_sides_of_the_threshold_that_users_have(name, shipped_threshold, replays):
    op = MAKERS[name](problem())
    v = draw(op.shape[1])
    with op.frozen():
        expected = op @ v
        for _ in range(shipped_threshold - 1):
            assert torch.equal(op @ v, expected)
        assert not replays
        for _ in range(3):
            assert torch.equal(op @ v, expected)
        assert replays


@pytest.mark.parametrize("batched", [False, True])
def test_few_directions_at_once_are_not_recorded(batched):
    work = Counted(lambda t: [t[0] @ t[0]])
    replay, few = Replay(work, ("x",), Pool()), cpu.MANY // 4
    for i in range(few):
        x = draw(4, 4, 4, seed=i)
        torch.testing.assert_close(first(replay, x, group=4 if batched else 1), x @ x)
    assert work.times == few
    x = draw(4, 4, 4)  # now there are more than MANY
    torch.testing.assert_close(first(replay, x, group=4 if batched else 1), x @ x)
    torch.testing.assert_close(first(replay, x, group=4 if batched else 1), x @ x)
    torch.testing.assert_close(first(replay, x, group=4 if batched else 1), x @ x)
    assert work.times == few + (3 if batched else 2)  # recorded and compared, then replayed


@pytest.mark.parametrize(
    "work",
    [
        lambda t: [t[0] + torch.rand(4, 4, dtype=torch.float64) * 0],
        lambda t: [t[0] * 2 if float(t[0].sum()) > 0 else t[0] * 3],
        lambda t: [t[0].flatten()[t[0].flatten() > 0].sum()],
        lambda t: [torch.view_as_real(torch.complex(t[0], t[0]))],
        lambda t: [torch.from_numpy(np.sin(t[0].numpy()))],
        lambda t: [torch.sparse.mm(t[0].to_sparse(), t[0])],
        lambda t: [t[0].clone().resize_(2, 8)],
    ],
    ids=["random", "number read", "shape", "complex", "numpy", "sparse", "resized"],
)
def test_work_that_cannot_be_repeated_goes_on_as_it_is(work, caplog):
    counted = Counted(lambda t: [work([t[0][0]])[0][None]])
    replay = Replay(counted, ("x",), Pool())
    with caplog.at_level(logging.INFO, logger="curvescope"):
        for i in range(5):
            x = draw(4, 4, seed=i)
            torch.testing.assert_close(first(replay, x[None])[0], work([x])[0])
    assert counted.times >= 5
    assert "not recorded" in caplog.text


# --------------------------------------------------------------------------------------------- any program

OPERATIONS = ["add", "mul", "mm", "add_", "mul_", "T", "sum", "clone", "slice", "zeros", "layer_norm", "bmm"]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=25
)


def program(lines):
    """Work on 4 × 4 matrices: each line makes another one, or writes into one that was made."""

    def work(tensors):
        known = [*tensors, torch.full((4, 4), 0.5, dtype=torch.float64)]
        for name, i, j in lines:
            a, b = known[i % len(known)], known[j % len(known)]
            own = known[3:]  # what may be written into
            if name in ("add_", "mul_"):
                if own:
                    target = own[i % len(own)]
                    target.add_(b.clone(), alpha=0.5) if name == "add_" else target.mul_(0.5)
                continue
            known.append(
                {
                    "add": lambda a, b: a + b,
                    "mul": lambda a, b: a * b * 0.5,
                    "mm": lambda a, b: a @ b * 0.25,
                    "T": lambda a, b: a.T,
                    "sum": lambda a, b: a.sum(0, keepdim=True).expand(4, 4) + b,
                    "clone": lambda a, b: a.clone(),
                    "slice": lambda a, b: torch.cat([a[:2], b[2:]]),
                    "zeros": lambda a, b: torch.zeros_like(a),
                    "layer_norm": lambda a, b: torch.nn.functional.layer_norm(a, (4,)),
                    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0] + a,
                }[name](a, b)
            )
        return known[-3:]

    return work


@settings(max_examples=60, deadline=None)
@given(PROGRAMS)
def test_any_program_is_replayed(lines):
    work = program(lines)
    inputs = [draw(4, 4, seed=1), draw(4, 4, seed=2)]
    with torch.no_grad():
        recording = recorded(work, [t.clone() for t in inputs])
        for seed in (3, 5):
            others = [draw(4, 4, seed=seed), draw(4, 4, seed=seed + 1)]
            want = work([t.clone() for t in others])
            assert all(map(torch.equal, recording.replay(others), want))


def test_memory_is_used_again():
    pool, size = Pool(), 4 * 4 * 8
    x = draw(1, 4, 4)

    def work(tensors, group, receive):
        (t,) = tensors
        for _ in range(50):
            t = (t * 2).sin()
        receive("x", t)

    for _ in range(3):  # recordings take turns in the same memory
        replay = Replay(work, ("x",), pool)
        for _ in range(4):
            found = first(replay, x)
        torch.testing.assert_close(found, first(work, x))
    assert sum(block.numel() for block in pool._blocks) <= 4 * size
