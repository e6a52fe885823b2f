"""Krylov vectors in host memory give what vectors on the device give; overlaps are measured and told."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, with_spectrum

from curvescope.algorithms import SpectralDensity, krylov_storage, lanczos, spectral_density
from curvescope.algorithms.krylov_storage import HostRows, SplitBasis, host_dtype, place_basis
from curvescope.algorithms.spectra.krylov import Recurrence, Tridiagonals
from curvescope.core.errors import UsageError
from curvescope.core.operator import FunctionOperator
from curvescope.core.seeds import probes

GIB = 2**30


def operator(n: int, dtype: torch.dtype = torch.float32) -> FunctionOperator:
    """A bulk near zero and ten eigenvalues far from it."""
    d = torch.linspace(-0.01, 0.05, n, dtype=torch.float64)
    d[:: n // 10][:10] = torch.linspace(0.3, 10, 10, dtype=torch.float64)
    d = d.to(dtype)
    return FunctionOperator(lambda V: d[:, None] * V, (n, n), dtype=dtype, symmetric=True)


def steps(op: FunctionOperator, num_steps: int, near: int | None, k: int = 1) -> Recurrence:
    recurrence = Recurrence(op, op.shape[0], k, num_steps, near=near)
    probes(op.shape[0], k, seed=0, out=recurrence.vectors)
    recurrence.begin()
    for _ in range(num_steps):
        recurrence.advance(op @ recurrence.vectors)
    return recurrence


@pytest.mark.parametrize("n", [320, 3 * 2**16 + 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("near", [3, 4, 9, 12, 13])
def test_bits_are_those_of_vectors_in_one_place(near, dtype, n):
    op = operator(n, dtype)
    whole, split = steps(op, 12, None, 2), steps(op, 12, near, 2)
    assert [len(far) for far in split.far] == ([13 - near] * 2 if near < 13 else [])
    assert split.rows.shape[1] == near
    for name in ("alpha", "beta", "lengths", "orthogonality"):
        np.testing.assert_array_equal(getattr(split.finish(), name), getattr(whole.finish(), name))


def test_a_basis_is_in_order_wherever_its_vectors_are():
    whole, split = steps(operator(320), 9, None), steps(operator(320), 9, 5)
    basis = SplitBasis(split.rows[0, :-1], split.far[0])
    assert basis.num_rows == 9
    torch.testing.assert_close(basis.part(slice(7, 40)), whole.rows[0, :9, 7:40], rtol=0, atol=0)
    numbers = torch.arange(9.0)
    assert basis.near_first(numbers).tolist() == [0, 1, 7, 8, 2, 3, 4, 5, 6]
    assert torch.equal(basis.in_order(basis.near_first(numbers)), numbers)


def test_long_vectors_take_half_the_host_memory(monkeypatch):
    assert host_dtype(torch.float32, 2**24) == torch.bfloat16
    assert host_dtype(torch.float32, 2**24 - 1) == torch.float32
    assert host_dtype(torch.float64, 2**24) == torch.float64
    monkeypatch.setattr(krylov_storage, "MIN_BFLOAT16", 2**17)
    op = operator(2**17)
    whole, half = steps(op, 20, None), steps(op, 20, 3)
    assert half.far[0].num_bytes == 18 * 2 * 2**17
    (x, w), (y, v) = whole.finish().quadrature(), half.finish().quadrature()
    assert half.orthogonality < 3e-5  # 2⁻⁹ / √n is 5e-6 here, and 5e-7 for the vectors that it is meant for
    np.testing.assert_allclose(y, x, atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose(v, w, atol=1e-4)


def test_pieces_of_rows_are_put_together(monkeypatch):
    rows = HostRows(10, most=2, dtype=torch.float32, device=torch.device("cpu"))
    rows._piece = 4  # as on a card
    values = torch.arange(10.0)
    rows.append(values)
    out = torch.empty(7)
    rows.copy(0, slice(2, 9), out)
    assert torch.equal(out, values[2:9])
    assert len(rows.rows[0]) == 3
    assert krylov_storage.chunk(23, torch.bfloat16) == 2**22
    assert krylov_storage.chunk(100, torch.float32) == 2**19


def test_densities_in_host_memory_are_those_on_the_device():
    op = with_spectrum(SPECTRA["outliers"])
    host = spectral_density(op, num_probes=3, num_steps=20, basis="host")
    device = spectral_density(op, num_probes=3, num_steps=20, basis="device")
    np.testing.assert_allclose(host.nodes, device.nodes, atol=1e-10)  # one probe, or three, in a product
    np.testing.assert_allclose(host.weights, device.weights, atol=1e-10)
    start = probes(op.shape[0], 2, seed=0, dtype=op.dtype)
    found = lanczos(op, start, 10, basis="host")
    np.testing.assert_array_equal(found.alpha, lanczos(op, start, 10, basis="device").alpha)
    with pytest.raises(UsageError, match="basis to be one of"):
        spectral_density(op, basis="disk")  # pyright: ignore[reportArgumentType]


def test_where_a_basis_goes(monkeypatch):
    n, each = 2**26, 0.25  # GiB of a vector
    op = FunctionOperator(lambda V: V, (n, n), dtype=torch.float32, symmetric=True)
    monkeypatch.setattr(krylov_storage, "free_host_bytes", lambda: 20 * GIB)

    def place(where, vectors, max_gib=None):
        return place_basis(op, n, vectors, where=where, max_gib=max_gib)

    assert place("auto", 30) == place("device", 30) == (None, 30 * n * 4)
    assert place("host", 30).near == 3
    assert place("host", 3).near is None
    for where in ("auto", "device"):
        with pytest.raises(UsageError, match=r"takes 7\.5 GiB, more than max_gib = 7\.2"):
            place(where, 30, 7.2)
    op.device = torch.device("cuda")  # no number of it is asked for
    buffers = 2 * 101 * 2**20 * 2 / GIB
    assert place("auto", 101, 50.5 * each + buffers) == (50, 50 * n * 4 + 2 * 101 * 2**20 * 2)
    assert place("auto", 101, 101 * each).near is None
    with pytest.raises(UsageError, match=r"more than max_gib = 10"):
        place("device", 101, 10.0)
    with pytest.raises(UsageError, match=r"0\.6 GiB"):
        place("auto", 101, 2.5 * each)
    monkeypatch.setattr(krylov_storage, "free_host_bytes", lambda: 3 * GIB)
    with pytest.raises(UsageError, match=r"6\.4 GiB of host memory, of which 3\.0 are free"):
        place("auto", 101, 50.5 * each + buffers)
    monkeypatch.setattr(krylov_storage, "free_bytes", lambda device: 60 * GIB)
    assert krylov_storage.device_room(op, None, 9 * GIB) == 30 * GIB
    assert krylov_storage.device_room(op, None, 7 * GIB) == 8 * GIB
    assert krylov_storage.device_room(op, 1.0, 9 * GIB) == GIB


def test_orthogonality_is_told(tmp_path):
    op = with_spectrum(SPECTRA["outliers"])
    found = spectral_density(op, num_probes=2, num_steps=20)
    assert 0 < found.orthogonality < 1e-14
    assert "overlap" not in found.words
    assert np.isnan(spectral_density(op, num_probes=2, num_steps=20, reorthogonalize=False).orthogonality)
    assert spectral_density(with_spectrum(SPECTRA["small"])).orthogonality == 0.0
    again = SpectralDensity.load(found.save(tmp_path))
    assert again.orthogonality == found.orthogonality
    object.__setattr__(again, "orthogonality", 2e-3)
    assert "Lanczos vectors overlap by 0.002" in again.words
    tree = json.loads((tmp_path / "result.json").read_text())
    del tree["fields"]["orthogonality"]
    (tmp_path / "result.json").write_text(json.dumps(tree))
    assert np.isnan(SpectralDensity.load(tmp_path).orthogonality)  # of results saved before it was measured
    start = probes(op.shape[0], 1, seed=0, dtype=op.dtype)
    T = lanczos(op, start, 10)
    assert Tridiagonals.load(T.save(tmp_path / "T")).orthogonality == T.orthogonality < 1e-14


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_come_to_the_card_in_time(monkeypatch, dtype):
    monkeypatch.setattr(krylov_storage, "MAX_BUFFER_ROW", 2**12)  # many chunks, several pieces
    monkeypatch.setattr(krylov_storage, "PINNED_CHUNK", 2**15)
    n = 2**17 + 17 * 16
    d = operator(n, dtype) @ torch.ones(n, dtype=dtype)
    diagonal = d.cuda()
    options = {"dtype": dtype, "device": "cuda", "symmetric": True}
    op = FunctionOperator(lambda V: diagonal[:, None] * V, (n, n), **options)
    near = 1e-5 if dtype == torch.float32 else 1e-12
    for long in (2**24, 2**17):  # the second time in bfloat16
        monkeypatch.setattr(krylov_storage, "MIN_BFLOAT16", long)
        whole, split = (steps(op, 20, rows) for rows in (None, 4))
        (x, w), (y, v) = whole.finish().quadrature(), split.finish().quadrature()
        np.testing.assert_allclose(y, x, atol=near * np.abs(x).max())
        np.testing.assert_allclose(v, w, atol=100 * near)
        assert split.orthogonality < (3e-5 if dtype == torch.float32 else 1e-9)
