"""The study `spectrum`: its numbers against a dense Hessian, and its run folder."""

import json

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.studies import run_study, spectrum
from curvescope.studies.problem_config import make_problem
from curvescope.studies.spectrum import study
from drawings import sketched
from scenes import checked

TOML = """
n_layers = 1
d_model = 4
n_heads = 2
d_ff = 4
vocab_size = 3
n_ctx = 11
init = "scaled"
"""

pytestmark = pytest.mark.usefixtures("few_sequences")
FEW = {"num_probes": 2, "num_steps": 5, "num_trace_probes": 2, "num_map_probes": 1, "map_blocks": ["L0.W_*"]}


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(TOML, encoding="utf-8")
    return {
        "model": str(path),
        "data": "task:sorting",
        "dtype": "float64",
        "batch_size": 64,
        "num_probes": 3,
        "num_steps": 20,
        "num_eigenvalues": 2,
        "num_trace_probes": 40,
        "num_map_probes": 3,
        "blocks": ["L0.W_[QV]", "L0.ln*", "U"],
    }


def test_numbers_meet_the_dense_matrices(settings):
    cfg = spectrum.Config.from_dict(settings)
    result = spectrum.run(cfg)
    problem = make_problem(cfg)
    assert result.loss == pytest.approx(problem.loss_value())
    for name, make in study.OPERATORS.items():
        A = make(problem, *cfg.blocks).to_dense()
        exact = torch.linalg.eigvalsh(A).numpy()
        part = result.parts[name]
        ends = exact[-2:] if name == "ggn" else exact[[0, 1, -2, -1]]
        np.testing.assert_allclose(part.extremes.values, ends, atol=1e-7 * np.abs(exact).max())
        assert part.extremes.converged
        value, stderr = part.trace
        assert abs(value - exact.sum()) < 4 * stderr
        assert part.density.wasserstein(exact) < 0.1 * (exact[-1] - exact[0])
    total = result.parts["ggn"].trace[0] + result.parts["functional"].trace[0]
    assert result.parts["hessian"].trace[0] == pytest.approx(total)  # the same probes for all three


def test_a_run_folder_is_complete_and_reads_back(settings, tmp_path):
    with sketched():
        path, result = run_study.run("spectrum", {**settings, **FEW}, out=tmp_path / "runs")
    names = {p.name for p in path.iterdir()}
    assert {
        "config.toml",
        "env.json",
        "log.txt",
        "model.json",
        "result.json",
        "arrays.npz",
        "verification.json",
        "figures",
        "tables",
    } == names
    assert {p.stem for p in (path / "figures").glob("*.png")} == {"density", "block_maps", "traces", "norms"}
    config, again = run_study.load(path)
    assert config["study"] == "spectrum"
    assert again.loss == result.loss
    scenes = checked(again)
    lines = scenes["density"]["variants"]["density|linear"]["data"]
    own = again.parts["hessian"].density
    (drawn,) = [one for one in lines if one["name"] == "Hessian"]
    assert set(scenes) == {"density", "block_map", "block_maps"}
    assert len(drawn["x"]) == 160  # fewer than a screen has pixels
    ends = own.ends(again.parts["hessian"].extremes.values)
    np.testing.assert_allclose([drawn["x"][0], drawn["x"][-1]], ends, rtol=1e-5)
    assert (
        np.isclose(
            drawn["x"],
            own.smoothed(ends=again.parts["hessian"].extremes.values)[0][:, None],
            rtol=1e-5,
            atol=1e-5,
        )
        .any(axis=0)
        .all()
    )
    heat = scenes["block_maps"]["variants"]["GGN"]["data"][0]["z"]
    m = again.parts["ggn"].map
    rms = m.frobenius / np.sqrt(np.outer(m.sizes, m.sizes))
    found = np.array(heat, dtype=float)
    np.testing.assert_allclose(found[rms > 0], np.log10(rms[rms > 0]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(again.parts["ggn"].density.density, result.parts["ggn"].density.density)
    json.loads((path / "env.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(settings, tmp_path, monkeypatch):
    settings = {**settings, **FEW}
    expected = spectrum.run(spectrum.Config.from_dict(settings))

    def stop(what: str, done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study.run("spectrum", settings, out=tmp_path / "runs", progress=stop)
    (begun,) = (tmp_path / "runs" / "spectrum").iterdir()
    assert not (begun / "result.json").exists()
    assert len(list((begun / "state").glob("*/result.json"))) == 5
    computed = []
    original = study.spectral_density
    monkeypatch.setattr(study, "spectral_density", lambda *a, **k: computed.append(1) or original(*a, **k))
    said = []
    path, result = run_study.run("spectrum", settings, out=tmp_path / "runs", say=said.append)
    assert path == begun
    assert "resuming" in said[0]
    assert len(computed) == 1  # of three densities, two were there
    assert not (path / "state").exists()
    assert (path / "arrays.npz").exists()
    for name, part in result.parts.items():
        np.testing.assert_array_equal(part.density.density, expected.parts[name].density.density)
        np.testing.assert_array_equal(part.map.frobenius, expected.parts[name].map.frobenius)


def test_a_mistake_leaves_nothing_behind(settings, tmp_path):
    with pytest.raises(UsageError, match="no block matches"):
        run_study.run("spectrum", {**settings, "blocks": ["L7.*"]}, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_unfinished_folder_is_not_a_result(tmp_path):
    (tmp_path / "state").mkdir()
    with pytest.raises(CurvescopeError, match="not finished"):
        run_study.load(tmp_path)


def test_settings_are_checked():
    with pytest.raises(UsageError, match="unknown setting 'num_probe'"):
        spectrum.Config.from_dict({"num_probe": 3})
    with pytest.raises(UsageError, match="num_probes"):
        spectrum.Config(num_probes=0)
    with pytest.raises(UsageError, match="tokenizer"):
        spectrum.run(spectrum.Config.from_dict({"model": _toml_without_tokenizer()}))


def _toml_without_tokenizer() -> str:
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "m.toml"
    path.write_text(TOML, encoding="utf-8")
    return str(path)


def test_the_lazy_surface_has_what_the_readme_uses():
    for name in cs.__all__:
        assert getattr(cs, name) is not None
