"""A browser, found or skipped with a reason, and the page that it opens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium: the file that CURVESCOPE_BROWSER names, or the first on the path."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CURVESCOPE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on the path")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def page_file(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one small run of every kind; made only where there is a browser."""
    from small_runs import small_runs

    from curvescope.report import write_page

    root = tmp_path_factory.mktemp("page")
    return write_page(small_runs(root), root / "report.html")
