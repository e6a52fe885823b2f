"""Every test of the monitor trains the same way each time."""

from __future__ import annotations

import pytest
from monitor_loops import seed_everything


@pytest.fixture(autouse=True, scope="module")
def _seeded_module():
    seed_everything()


@pytest.fixture(autouse=True)
def _seeded():
    seed_everything()
