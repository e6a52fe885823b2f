"""Random numbers come from seeds; progress is shown to who listens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from curvescope.core import progress, seeds
from curvescope.core.operator import FunctionOperator
from curvescope.core.progress import listening, track
from curvescope.core.seeds import generator, probes


def test_a_probe_depends_on_seed_and_column_alone():
    many = probes(50, 6, seed=3)
    assert torch.equal(many[:, 2:5], probes(50, 3, seed=3, first=2))
    assert torch.equal(many, torch.cat([probes(50, 1, seed=3, first=j) for j in range(6)], dim=1))
    assert not torch.equal(many, probes(50, 6, seed=4))
    assert len({tuple(column.tolist()) for column in many.T}) == 6


def test_whole_numbers_of_numpy_are_whole_numbers():
    for seed in (np.int64(3), np.int32(3), np.uint8(3)):
        assert torch.equal(probes(20, 2, seed=seed, first=np.int64(1)), probes(20, 2, seed=3, first=1))
        assert generator(seed, np.int64(2)).initial_seed() == generator(3, 2).initial_seed()


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("n", [7, 31, 32, 33, 47, 64, 101])
def test_a_long_probe_is_drawn_in_pieces(monkeypatch, kind, n):
    whole = probes(n, 2, seed=5, kind=kind)
    monkeypatch.setattr(seeds, "CHUNK", 16)
    assert torch.equal(probes(n, 2, seed=5, kind=kind), whole)


def test_probes_have_the_moments_they_should():
    signs, normals = probes(500, 40, seed=0), probes(500, 40, seed=0, kind="gaussian")
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    n = signs.numel()
    assert abs(float(signs.mean())) < 4 / n**0.5
    assert abs(float(normals.mean())) < 4 / n**0.5
    assert abs(float(normals.var()) - 1) < 4 * (2 / n) ** 0.5
    for V in (signs, normals):
        correlation = V.T @ V / 500 - torch.diag((V * V).mean(0))
        assert float(correlation.abs().max()) < 5.5 / 500**0.5
    assert probes(3, 2, seed=0, dtype=torch.float32).dtype == torch.float32


def test_neighboring_streams_differ():
    drawn = {
        tuple(torch.randint(0, 2**31, (2,), generator=generator(seed, *stream)).tolist())
        for seed in range(30)
        for stream in [(), *[(i,) for i in range(10)], *[(i, j) for i in range(5) for j in range(5)]]
    }
    assert len(drawn) == 30 * 36


def test_global_state_is_not_touched():
    before = torch.get_rng_state()
    probes(10, 2, seed=1)
    generator(4, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_a_listener_hears_every_step_of_the_outermost_loop():
    heard = []
    with listening(lambda *step: heard.append(step)):
        for _ in track([1, 2, 3], "outer"):
            assert list(track([1, 2], "inner")) == [1, 2]
    assert heard == [("outer", 1, 3), ("outer", 2, 3), ("outer", 3, 3)]
    assert list(track(iter("ab"), "quiet")) == ["a", "b"]
    assert len(heard) == 3


def test_a_loop_of_unknown_length_and_a_stated_one():
    heard = []
    with listening(lambda *step: heard.append(step)):
        list(track(iter("ab"), "unknown"))
        list(track(iter("ab"), "stated", total=2))
    assert heard == [("unknown", 1, 0), ("unknown", 2, 0), ("stated", 1, 2), ("stated", 2, 2)]


def test_a_loop_of_one_step_lets_those_inside_speak():
    heard = []
    with listening(lambda *step: heard.append(step)):
        for _ in track([1], "outer"):
            list(track([1, 2], "inner"))
    assert heard == [("inner", 1, 2), ("inner", 2, 2), ("outer", 1, 1)]


def test_a_bar_of_unknown_length_is_shown(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    bar = progress._Bar("unknown", 0)
    bar.update(1)
    assert bar.progress is not None
    bar.close()
    known = progress._Bar("known", 1)
    known.update(1)
    assert known.progress is None  # over


def fail() -> None:
    for number in track([0, 1], "failed"):
        1 / number


def test_a_loop_that_breaks_or_fails_does_not_silence_the_next():
    heard = []
    with listening(lambda *step: heard.append(step)):
        for _ in track([1, 2], "left"):
            break
        with pytest.raises(ZeroDivisionError):
            fail()
        list(track([1], "next"))
    assert heard == [("next", 1, 1)]


def test_nothing_is_printed_without_a_terminal(capfd):
    list(track(range(3), "quiet"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("extra", [0, 5, seeds.CHUNK + 64])
def test_signs_of_long_vectors_are_the_bits_of_random_words(extra):
    n = seeds.LONG + extra
    v = probes(n, 1, seed=4, first=2, dtype=torch.float32)[:, 0]
    words = torch.empty(-(-n // 64), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator(4, 2))
    bits = (words[:, None] >> torch.arange(64)) & 1
    assert torch.equal(v, (2.0 * bits - 1).view(-1)[:n])
    assert abs(float(v.mean())) < 5 * n**-0.5
    assert torch.equal(v.double(), probes(n, 2, seed=4, first=1)[:, 1])


def test_signs_of_short_vectors_are_drawn_one_by_one():
    n = seeds.LONG - 1
    one_by_one = torch.randint(0, 2, (n,), generator=generator(4, 2), dtype=torch.int8)
    assert torch.equal(probes(n, 1, seed=4, first=2)[:, 0], 2.0 * one_by_one - 1)


def test_a_dense_matrix_shows_how_far_it_is():
    op, heard = FunctionOperator(lambda V: 2 * V, (5, 5), dtype=torch.float64), []
    with listening(lambda _, done, total: heard.append((done, total))):
        assert torch.equal(op.to_dense(chunk=2), 2 * torch.eye(5, dtype=torch.float64))
    assert heard == [(1, 3), (2, 3), (3, 3)]
