"""Everything on ranks is started once for the room."""

from __future__ import annotations

import os
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
    place = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    # autograd does not survive a fork where it has threads for a card
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    environment = {**os.environ, **hidden}
    words = [sys.executable, "-W", "ignore", str(here / "everything.py"), str(place)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return place
