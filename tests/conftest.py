"""Fixtures that the rooms share; `oracles.py` beside this file holds the dense truths."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import drawings
import oracles


@pytest.fixture(params=oracles.NAMES)
def bench(request: pytest.FixtureRequest) -> oracles.Bench:
    """Every case in turn, with its dense truth."""
    return oracles.bench(request.param)


@pytest.fixture
def tiny() -> oracles.Bench:
    """One case, for what does not depend on the model."""
    return oracles.bench("wide-heads")


@pytest.fixture
def unrendered() -> Iterator[None]:
    """Figures are made and not rendered, for a test that is not about their looks."""
    with drawings.unrendered():
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
