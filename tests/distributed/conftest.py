"""Everything on ranks is started once for all tests of this folder, and for all workers of pytest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def ranks_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what ranks said and wrote."""
    if not dist.is_available() or not hasattr(os, "fork"):
        pytest.skip("needs torch.distributed and fork")
    import fcntl

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    place = shared / "ranks"
    with (shared / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker launches, the others wait for it
        if not (place / "launches.json").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            _launch(place)
    return place


def _launch(place: Path) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    # autograd does not survive a fork where it has threads for a card
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    environment = {**os.environ, **hidden}
    words = [sys.executable, "-W", "ignore", str(here / "everything.py"), str(place)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
