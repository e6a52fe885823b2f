"""The site: a strict build of a small one takes linked files along, and refuses links that lead nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="make docs installs what builds the site")
ROOT = Path(__file__).parent.parent
SETTINGS = f"""site_name: small
use_directory_urls: false
plugins: []
hooks: [{ROOT}/scripts/site_sources.py]
not_in_nav: /source/
validation: {{links: {{not_found: warn, unrecognized_links: warn}}}}
"""


def build(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(page, encoding="utf-8")
    (folder / "mkdocs.yml").write_text(SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_linked_files_are_in_the_site(tmp_path):
    done = build(tmp_path, "# Here\n[a script](../scripts/site_sources.py) [why](../LICENSE)\n")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="source/scripts/site_sources.py.html"' in page
    shown = (tmp_path / "site" / "source" / "scripts" / "site_sources.py.html").read_text(encoding="utf-8")
    assert "def on_files" in shown
    assert (tmp_path / "site" / "source" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_a_linked_notebook_is_a_page_with_its_outputs(tmp_path):
    done = build(tmp_path, "# Here\n[a tour](../notebooks/tour.ipynb)\n")
    assert done.returncode == 0, done.stderr
    assert 'href="source/notebooks/tour.ipynb.html"' in (tmp_path / "site" / "index.html").read_text("utf-8")
    page = (tmp_path / "site" / "source" / "notebooks" / "tour.ipynb.html").read_text("utf-8")
    stored = json.loads((ROOT / "notebooks" / "tour.ipynb").read_text("utf-8"))
    outputs = [out for cell in stored["cells"] for out in cell.get("outputs", [])]
    pictures = sum("".join(out.get("data", {}).get("text/html", "")).count("<img src") for out in outputs)
    assert pictures > 0
    assert page.count('<img src="data:image/png') == pictures
    assert "&lt;img" not in page
    assert "<h1" in page
    assert "import curvescope as cs" in page


@pytest.mark.parametrize("link", ["../scripts/no_such_file.py", "nowhere.md"])
def test_a_link_that_leads_nowhere_stops_the_build(tmp_path, link):
    done = build(tmp_path, f"# Here\n[lost]({link})\n")
    assert done.returncode != 0
    assert "target is not found" in done.stderr
