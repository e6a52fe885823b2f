"""Fixtures that several packages share; `oracles.py` beside this file holds the dense truths."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the process that only hands tests out loads this file too, and no torch
    from oracles import Bench


def pytest_configure() -> None:
    """Garbage is looked for once many objects are left: after every few hundred costs up to a twentieth."""
    gc.set_threshold(50_000, 10, 10)


def pytest_collection_finish() -> None:
    """Garbage is not looked for among the modules and tests themselves: they stay to the end."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `bench` that chooses no cases meets every case in turn."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "bench" in metafunc.fixturenames and not any("bench" in mark.args[0] for mark in marks):
        import oracles

        metafunc.parametrize("bench", oracles.NAMES, indirect=True)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    """A case with its dense truth."""
    import oracles

    return oracles.bench(request.param)


@pytest.fixture
def tiny() -> Bench:
    """One case, for what does not depend on the model."""
    import oracles

    return oracles.bench("wide-heads")


@pytest.fixture
def unrendered() -> Iterator[None]:
    """Figures are made and not rendered, for a test that is not about their looks."""
    import drawings

    with drawings.unrendered():
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def early_recordings() -> Iterator[int]:
    """Products are recorded at the third, so that tests of few products are tests of replays too."""
    from curvescope.engines.replay import cpu

    shipped = cpu.WARM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WARM", 2)
        yield shipped


@pytest.fixture
def shipped_threshold(early_recordings: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Products are recorded when a user's are: after so many directions, which is the value."""
    monkeypatch.setattr("curvescope.engines.replay.cpu.WARM", early_recordings)
    return early_recordings


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs make no figures, for a test of the rest of a run: most of its time would go to them."""
    for writer in ("runs.folder", "monitor.files"):
        monkeypatch.setattr(f"curvescope.{writer}.write_figures", lambda result, folder: None)


@pytest.fixture(scope="module")
def few_sequences() -> Iterator[None]:
    """Studies of a task have eight sequences of it, to the end of a module that holds on any data."""
    from curvescope.data.tasks import task_data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("curvescope.data.tasks.task_data", partial(task_data, num_sequences=8))
        yield
