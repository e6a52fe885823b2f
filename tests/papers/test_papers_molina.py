"""The paper of Molina on the bundled model: what is run, what is compared, and that nothing is recalled."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

import curvescope as cs
from curvescope.papers.molina2023 import FIGURES
from curvescope.papers.molina2023.figures import compare_spectra, is_gpt2, reference, with_model
from curvescope.papers.reproduce import reproduce
from curvescope.report import write_page
from curvescope.studies import trajectory
from saved_models import save_family


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    plt.close("all")


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("figures", [["embeddings"], pytest.param(list(FIGURES), marks=pytest.mark.slow)])
def test_the_paper_runs_on_a_given_model_and_says_which(figures, tmp_path):
    settings = {
        "model": "tiny-gpt",
        "tokens": 128,
        "seq_len": 32,
        "layers": [0],
        "num_keys": 20,
        "num_random": 10,
    }
    known = settings if len(figures) > 1 else {"model": "tiny-gpt"}
    found = reproduce("molina2023", figures, settings=known, out=tmp_path)
    assert list(found) == figures
    for name, result in found.items():
        claims = result.claims()
        assert claims[0].measured == "tiny-gpt"
        assert len(claims) > 1
        assert all(key.startswith(f"{name}_") for key in (*result.tables(), *result.figures()))
        assert set(result.tables()) | set(result.scenes()) <= set(result.captions())
    assert (tmp_path / f"{min(found[figures[-1]].figures())}.png").exists()
    page = write_page([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Published and measured" in page
    shown = "".join(claim.published for result in found.values() for claim in result.claims())
    assert not re.search(r"\d\.\d", shown)  # no number of the paper is at hand


def test_the_default_model_is_named(monkeypatch):
    cfg = trajectory.Config(model="auto")
    monkeypatch.setattr("curvescope.papers.molina2023.figures._is_cached", lambda name: False)
    chosen, why = with_model(cfg)
    assert chosen.model == "tiny-gpt"
    assert "not in the local cache" in why
    monkeypatch.setattr("curvescope.papers.molina2023.figures._is_cached", lambda name: name == "gpt2")
    assert with_model(cfg)[0].model == "gpt2"


def test_reference_spectra_are_for_gpt2_only(tmp_path):
    values = reference()["blocks"]
    assert {block: len(heads) for block, heads in values.items()} == {"0": 12, "5": 12}
    for heads in values.values():
        for head in heads:
            for name in ("qk", "vo", "qk_folded", "vo_folded"):
                assert len(head[name]) == 20
                assert np.all(np.diff(head[name]) <= 0)
    assert not is_gpt2(trajectory.Config(model="tiny-gpt"))
    pytest.importorskip("transformers")
    named = save_family(tmp_path / "gpt2", "gpt2")
    assert not is_gpt2(trajectory.Config(model=named))  # its name, not its shape


def test_spectra_are_compared_with_the_reference(monkeypatch):
    """With a reference made from the model itself the differences vanish; with another they are found."""
    from curvescope.geometry.attention.heads import heads

    model = cs.load("tiny-gpt")
    own = [
        {
            f"{name}{'_folded' if folded else ''}": getattr(c, name).singular_values.tolist()[:4]
            for name in ("qk", "vo")
            for folded, c in ((False, raw), (True, fold))
        }
        for raw, fold in zip(heads(model, 0, folded=False), heads(model, 0), strict=True)
    ]
    where = "curvescope.papers.molina2023.figures.reference"
    monkeypatch.setattr(where, lambda: {"blocks": {"0": own}})
    assert compare_spectra(model)[0][-1] == "agrees"
    own[2]["vo_folded"][1] += 0.01
    assert compare_spectra(model)[0][-1] == "differs"


def test_recalled_numbers_of_the_paper_are_nowhere():
    package = Path(str(files("curvescope")))
    recalled = ("23.747", "24.872", "14.591", "3.959", "SPONSORED", "soDeliveryDate", "enegger")
    own = [
        path for path in (package / "papers" / "molina2023").rglob("*") if path.suffix in (".csv", ".json")
    ]
    for path in [*package.rglob("*.py"), *own]:
        text = path.read_text(encoding="utf-8")
        assert not any(number in text for number in recalled), path
