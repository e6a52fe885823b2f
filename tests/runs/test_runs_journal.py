"""An algorithm that was stopped in the middle goes on with the products that are there, to the same bits."""

import numpy as np
import pytest
import torch

from curvescope.algorithms import block_map, eigsh, spectral_density, trace
from curvescope.algorithms.recording import recording
from curvescope.core.operator import Matrix
from curvescope.runs.journal import Journal

N = 120
BLOCKS = {"a": slice(0, 50), "b": slice(50, N)}
ALGORITHMS = {
    "density": lambda op: spectral_density(op, num_probes=2, num_steps=12).nodes,
    "eigenpairs": lambda op: eigsh(op, 3, which="BE", max_products=60, max_basis=12).values,
    "trace": lambda op: trace(op, num_probes=70).samples,
    "map": lambda op: block_map(op, BLOCKS, num_probes=2).frobenius,
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


def run(name, path, op):
    with recording(Journal(path, lambda: path)):
        return ALGORITHMS[name](op)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_stopped_algorithm_goes_on_to_the_same_bits(name, tmp_path):
    whole = Counted()
    want = ALGORITHMS[name](whole)
    stop = whole.count // 2
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path, Counted(stop_at=stop))
    assert Journal(tmp_path, lambda: tmp_path).kept == stop
    rest = Counted()
    np.testing.assert_array_equal(run(name, tmp_path, rest), want)
    assert rest.count == whole.count - stop


def test_products_of_other_columns_are_not_believed(tmp_path):
    run("density", tmp_path, Counted())
    op = Counted()
    with recording(Journal(tmp_path, lambda: tmp_path)):
        found = spectral_density(op, num_probes=2, num_steps=12, seed=1).nodes
    assert op.count == 12
    np.testing.assert_array_equal(found, spectral_density(op, num_probes=2, num_steps=12, seed=1).nodes)
    assert Journal(tmp_path, lambda: tmp_path).kept == 12  # those of this seed


def test_a_damaged_file_is_computed_again(tmp_path):
    want = run("density", tmp_path, Counted())
    sorted(tmp_path.glob("*.npy"))[3].write_bytes(b"half")
    op = Counted()
    np.testing.assert_array_equal(run("density", tmp_path, op), want)
    assert op.count == 9


def test_a_gap_ends_what_is_known(tmp_path):
    run("density", tmp_path, Counted())
    sorted(tmp_path.glob("*.npy"))[3].unlink()
    assert Journal(tmp_path, lambda: tmp_path).kept == 3


def test_a_disk_that_is_full_stops_the_writing_and_nothing_else(tmp_path, monkeypatch):
    want = ALGORITHMS["density"](Counted())
    calls = []

    def full(file, array, **rest):
        calls.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    np.testing.assert_array_equal(run("density", tmp_path, Counted()), want)
    assert len(calls) == 1


def test_a_recorded_operator_is_the_operator_otherwise(tmp_path):
    op = Counted()
    op.space = "its own"
    seen = []
    with recording(Journal(tmp_path, lambda: tmp_path)):
        from curvescope.algorithms.checks import of_one_matrix

        of_one_matrix(lambda a: seen.append((a.space, a.shape, a.psd, repr(a))))(op)
    assert seen == [("its own", (N, N), False, repr(op))]


def test_much_on_the_disk_is_said_once(tmp_path, monkeypatch):
    said = []
    with recording(Journal(tmp_path, lambda: tmp_path, said.append)):
        ALGORITHMS["density"](Counted())
    assert said == []
    size = sum(path.stat().st_size for path in tmp_path.glob("*.npy"))
    monkeypatch.setattr("curvescope.runs.journal.MUCH", size // 2)
    (tmp_path / "other").mkdir()
    with recording(Journal(tmp_path / "other", lambda: tmp_path / "other", said.append)):
        ALGORITHMS["density"](Counted())
    assert len(said) == 1
    assert f"kept in {tmp_path} so" in said[0]
    assert "until each piece is done" in said[0]
