"""Memory of the algorithms is what their docstrings say: peak of resident memory, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RESET = Path("/proc/self/clear_refs")  # Linux forgets the peak of a process that writes 5 here
SCRIPT = """
import ctypes, gc, json
from pathlib import Path
import torch
from curvescope.algorithms import diagonal, eigsh, frobenius_norm, solve, spectral_density, trace
from curvescope.core.operator import FunctionOperator

n = 1_000_000
d = torch.full((n,), 1e-2)
d[:4] = torch.tensor([100.0, 50, 20, 3])
op = FunctionOperator(lambda V: d[:, None] * V, (n, n), dtype=torch.float32, symmetric=True, psd=True)
b = torch.ones(n)

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

def peak(call):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) * 1024 / (4 * n)

trace(op, num_probes=4, method="xtrace"), eigsh(op, 1, max_basis=6, tol=1e-2)  # what is loaded once
print(json.dumps({
    "eigsh": peak(lambda: eigsh(op, 2, max_basis=10, tol=1e-4, vectors=False)),
    "eigsh, vectors": peak(lambda: eigsh(op, 4, max_basis=8, tol=1e-3)),
    "density": peak(lambda: spectral_density(op, num_probes=1, num_steps=6)),
    "density, two probes": peak(lambda: spectral_density(op, num_probes=2, num_steps=6)),
    "density, short": peak(lambda: spectral_density(op, num_probes=1, num_steps=6, reorthogonalize=False)),
    "hutchinson": peak(lambda: trace(op, num_probes=4)),
    "hutch++": peak(lambda: trace(op, num_probes=9, method="hutch++")),
    "xtrace": peak(lambda: trace(op, num_probes=6, method="xtrace")),
    "frobenius": peak(lambda: frobenius_norm(op, num_probes=4)),
    "diagonal": peak(lambda: diagonal(op, num_probes=4)),
    "cg": peak(lambda: solve(op, b, tol=1e-3)),
    "minres": peak(lambda: solve(op, b, tol=1e-3, method="minres")),
}))
"""
# vectors by the formulas, with the one that a product of the operator above returns for each column
FORMULAS = {
    "eigsh": 10 + 1 + 1,
    "eigsh, vectors": 8 + 1 + 4,
    "density": 6 + 1 + 1,
    "density, two probes": 2 * (6 + 1) + 2 + 2,
    "density, short": 2 + 1,
    "hutchinson": 2 * 4,
    "hutch++": 9,
    "xtrace": 2 * 6,
    "frobenius": 2 * 4,
    "diagonal": 2 * 2 + 2 * 4,  # two in float64
    "cg": 5 + 1,
    "minres": 6 + 2 + 1,
}


@pytest.mark.skipif(not RESET.exists(), reason="needs /proc/self/clear_refs")
def test_peak_memory_is_what_the_docstrings_say():
    # large blocks are given back when they are freed, so that the peak is what is in use
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(run.stdout)
    assert found.keys() == FORMULAS.keys()
    for name, vectors in FORMULAS.items():
        assert 0.75 * vectors - 0.5 <= found[name] <= vectors + 1.0, (name, found[name], vectors)
