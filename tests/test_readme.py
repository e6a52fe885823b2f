"""The code in the README and the documentation runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    (name, i, code)
    for name in ("README.md",)
    for i, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.S)
    )
]


@pytest.mark.parametrize(("name", "number", "code"), BLOCKS, ids=[f"{name}-{i}" for name, i, _ in BLOCKS])
def test_the_example_runs(name, number, code, tmp_path, monkeypatch, capsys):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    exec(compile(code, f"{name}, block {number}", "exec"), space)
    if "rho" in space:
        assert space["top"].converged
        assert (tmp_path / "layer3" / "result.json").exists()
        assert "True" in capsys.readouterr().out


def test_the_readme_has_a_short_example_and_links_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = next(code for _, _, code in BLOCKS)
    assert len([line for line in first.splitlines() if line.strip()]) <= 15
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link
    for path in re.findall(r"`((?:docs|scripts|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
