"""An algorithm that was stopped in the middle goes on with the products that are there, to the same bits."""

import os

import numpy as np
import pytest
import torch

from curvescope.algorithms import block_norms, eigsh, spectral_density, trace
from curvescope.algorithms.recorded_products import recording
from curvescope.core.operator import Matrix
from curvescope.runs.disk.journal import Journal, _write_all

N = 120
BLOCKS = {"a": slice(0, 50), "b": slice(50, N)}
ALGORITHMS = {
    "density": lambda op: spectral_density(op, num_probes=2, num_steps=12).nodes,
    "eigenpairs": lambda op: eigsh(op, 3, which="BE", max_products=60, max_basis=12).values,
    "trace": lambda op: trace(op, num_probes=70).samples,
    "map": lambda op: block_norms(op, BLOCKS, num_probes=2).frobenius,
}


class Counted(Matrix):
    """A matrix that counts its products, and can be stopped at one of them."""

    def __init__(self, stop_at=None):
        A = torch.randn(N, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        super().__init__(A + A.T, symmetric=True)
        self.count, self.stop_at = 0, stop_at

    def _matmat(self, V):
        if self.count == self.stop_at:
            raise KeyboardInterrupt
        self.count += 1
        return super()._matmat(V)


def journal(path, *tell):
    return Journal(path / "products", lambda: path / "products", *tell)


def run(name, path, op):
    with recording(journal(path)):
        return ALGORITHMS[name](op)


def records(path):
    return list(journal(path)._known.values())


class Strange(Matrix):
    """A matrix whose products lie in memory as no new tensor does."""

    def _matmat(self, V):
        n, k = V.shape
        place = torch.empty(n * k + 1, dtype=V.dtype)[1:].view(k, n).T
        return place.copy_(super()._matmat(V))


def test_a_product_lies_in_memory_alike_whether_it_was_read_or_computed(tmp_path):
    op, V = Strange(Counted().A, symmetric=True), torch.randn(N, 3, dtype=torch.float64)
    computed = journal(tmp_path).product(op, V)
    read = journal(tmp_path).product(op, V)
    assert torch.equal(read, op @ V)
    assert read.stride() == computed.stride()
    assert read.data_ptr() % 64 == computed.data_ptr() % 64 == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_stopped_algorithm_goes_on_to_the_same_bits(name, tmp_path):
    whole = Counted()
    want = ALGORITHMS[name](whole)
    stop = whole.count // 2
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path, Counted(stop_at=stop))
    assert journal(tmp_path).kept == stop
    rest = Counted()
    np.testing.assert_array_equal(run(name, tmp_path, rest), want)
    assert rest.count == whole.count - stop


def test_products_of_other_columns_are_not_believed(tmp_path):
    run("density", tmp_path, Counted())
    op = Counted()
    with recording(journal(tmp_path)):
        found = spectral_density(op, num_probes=2, num_steps=12, seed=1).nodes
    assert op.count == 12
    np.testing.assert_array_equal(found, spectral_density(op, num_probes=2, num_steps=12, seed=1).nodes)
    assert journal(tmp_path).kept == 12  # those of this seed


@pytest.mark.parametrize(
    ("where", "again"),
    [("body", 1), ("start", 9)],  # of its numbers: that product; of its header: what comes behind is lost
)
def test_a_byte_that_is_flipped_is_noticed(where, again, tmp_path):
    want = run("density", tmp_path, Counted())
    content = bytearray((tmp_path / "products").read_bytes())
    content[getattr(records(tmp_path)[3], where) + 5] ^= 1
    (tmp_path / "products").write_bytes(content)
    op = Counted()
    np.testing.assert_array_equal(run("density", tmp_path, op), want)
    assert op.count == again
    op = Counted()
    np.testing.assert_array_equal(run("density", tmp_path, op), want)
    assert op.count == 0


@pytest.mark.parametrize("beyond", [1, 60, 200])  # bytes of the fourth record that came to the disk
def test_a_file_that_is_torn_counts_up_to_its_last_whole_record(beyond, tmp_path):
    want = run("density", tmp_path, Counted())
    os.truncate(tmp_path / "products", records(tmp_path)[3].start + beyond)
    assert journal(tmp_path).kept == 3
    op = Counted()
    np.testing.assert_array_equal(run("density", tmp_path, op), want)
    assert op.count == 9
    assert journal(tmp_path).kept == 12


def test_products_that_would_take_long_to_write_are_left_out_and_computed_again(tmp_path, monkeypatch):
    want = ALGORITHMS["density"](Counted())
    own = Journal._write
    monkeypatch.setattr("curvescope.runs.disk.journal.PATIENCE", 0.0)
    monkeypatch.setattr("curvescope.runs.disk.journal.MOST_OF_TIME", 1e9)
    slow = iter(range(12))

    def every_third(self, number, *rest):
        if next(slow) % 3 == 0:
            own(self, number, *rest)

    monkeypatch.setattr(Journal, "_write", every_third)
    run("density", tmp_path, Counted())
    assert journal(tmp_path).kept == 4
    op = Counted()
    monkeypatch.setattr(Journal, "_write", own)
    np.testing.assert_array_equal(run("density", tmp_path, op), want)
    assert op.count == 8
    monkeypatch.setattr("curvescope.runs.disk.journal.MOST_OF_TIME", 0.0)
    (tmp_path / "products").unlink()
    run("density", tmp_path, Counted())
    assert journal(tmp_path).kept == 1  # the first, whose time was not known


def test_a_disk_that_is_full_stops_the_writing_and_nothing_else(tmp_path, monkeypatch):
    want = ALGORITHMS["density"](Counted())
    calls, said, own = [], [], _write_all

    def full(file, data):
        calls.append(1)
        own(file, data[:20])
        if len(calls) == 8:  # the numbers of the fourth
            raise OSError(28, "No space left on device")
        own(file, data[20:])

    monkeypatch.setattr("curvescope.runs.disk.journal._write_all", full)
    with recording(journal(tmp_path, said.append)):
        np.testing.assert_array_equal(ALGORITHMS["density"](Counted()), want)
    assert len(calls) == 8
    assert [("products" in line, "No space left on device" in line) for line in said] == [(True, True)]
    assert journal(tmp_path).kept == 3
    assert (tmp_path / "products").stat().st_size == records(tmp_path)[2].body + records(tmp_path)[2].size


def test_a_recorded_operator_is_the_operator_otherwise(tmp_path):
    op = Counted()
    op.space = "its own"
    seen = []
    with recording(journal(tmp_path)):
        from curvescope.algorithms.checks import fixed_operator

        fixed_operator(lambda a: seen.append((a.space, a.shape, a.psd, repr(a))))(op)
    assert seen == [("its own", (N, N), False, repr(op))]


def test_much_on_the_disk_is_said_once(tmp_path, monkeypatch):
    said = []
    with recording(journal(tmp_path, said.append)):
        ALGORITHMS["density"](Counted())
    assert said == []
    size = (tmp_path / "products").stat().st_size
    monkeypatch.setattr("curvescope.runs.disk.journal.LARGE_FILE", size // 2)
    (tmp_path / "products").unlink()
    with recording(journal(tmp_path, said.append)):
        ALGORITHMS["density"](Counted())
    assert len(said) == 1
    assert f"in {tmp_path} so" in said[0]
    assert "until each piece is done" in said[0]
