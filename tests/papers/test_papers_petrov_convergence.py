"""petrov2025, convergence: networks are what they say, data fall back, verdicts follow numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from curvescope.core.errors import CurvescopeError
from curvescope.papers.petrov2025 import convergence as figure
from curvescope.papers.petrov2025 import convergence_networks as networks
from curvescope.papers.petrov2025.convergence_networks import TrainingSettings
from curvescope.studies.landscape.analysis import growth
from curvescope.studies.landscape.view import TAUTOLOGY

SHAPE = (1, 1, 8, 8)


def made_up(
    family: str, spread: float, *, width: int = 0, hidden: int = 0, note: str = ""
) -> figure.NetworkCurve:
    """A curve of lognormal losses."""
    losses = np.random.default_rng(0).lognormal(0, 1, 60) * spread
    found = figure.thin(growth(losses, num_orders=20, seed=1))
    name = f"a network with changes of rank {width}"
    return figure.NetworkCurve(family, name, "digits", 10, 5, 0.9, 1, width, hidden, losses, found, note)


def sweep(power: float, ratio: float) -> figure.Convergence:
    curves = {"E4": made_up("E4", 1.0), "E7.rank8": made_up("E7", 1.0, width=8)}
    curves["E7.rank16"] = made_up("E7", ratio, width=16)
    for width in (4, 16, 64):
        for hidden in (1, 3):
            jitter = 1 + 0.01 * hidden
            curves[f"E8.h{width}.n{hidden}"] = made_up(
                "E8", jitter * width**power, width=width, hidden=hidden
            )
    return figure.Convergence(curves)


def test_verdicts_follow_the_numbers():
    one, other = ({c.claim: c for c in sweep(*args).claims()} for args in ((0.5, 0.5), (-0.5, 2.0)))
    assert len(one) == 9
    expected = {
        "as 1/k": (TAUTOLOGY, TAUTOLOGY),
        "curve of rank 16": (figure.HOLDS, figure.FAILS),
        "width h": (figure.HOLDS, figure.FAILS),
        "independent numbers": (figure.HOLDS, figure.HOLDS),
    }
    for part, verdicts in expected.items():
        (claim,) = (name for name in one if part in name)
        assert (one[claim].verdict, other[claim].verdict) == verdicts, claim
    assert sum(c.verdict == figure.OTHERS for c in one.values()) == 2  # heights of other pictures
    assert {c.whose for c in one.values()} == {"paper", "ours"}


def test_a_height_is_compared_where_the_pictures_are_the_published_ones():
    curve = replace(made_up("E7", 1.0), pictures="mnist")
    near = figure._height(curve, 100, curve.deviation / 100, figure.E7)
    far = figure._height(curve, 100, curve.deviation, figure.E7)
    assert (near.verdict, far.verdict) == (figure.HOLDS, figure.FAILS)


def test_low_rank_changes_are_of_low_rank_and_all_else_stays():
    body = networks.vit(SHAPE, 10, width=16, layers=2, patch=2, seed=0)
    before = {name: p.detach().clone() for name, p in body.named_parameters()}
    images, classes = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    expected = body(images).detach()
    adapted = networks.adapt(body, 3, seed=0)
    torch.testing.assert_close(adapted(images), expected)  # B is zero at first
    networks.fit(adapted, images, classes, TrainingSettings(2, 16, 1e-2), seed=0)
    for layer in ("L0", "L1"):
        part = adapted.get_submodule(layer)
        for name in ("W_Q", "W_V"):
            change = getattr(part, name).detach() - before[f"{layer}.{name}"]
            assert torch.linalg.matrix_rank(change, atol=1e-5) == 3
        torch.testing.assert_close(part.W_K.detach(), before[f"{layer}.W_K"])
    assert not torch.equal(adapted.U.detach(), before["U"])


def test_a_model_of_the_hub_is_adapted_in_queries_and_values():
    transformers = pytest.importorskip("transformers")
    cfg = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, num_labels=3,
    )  # fmt: skip
    body = networks.Resized(transformers.ViTForImageClassification(cfg), side=16)
    adapted = networks.adapt(body, 2, seed=0)
    assert adapted(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    moving = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert sum(name.endswith((".A", ".B")) for name in moving) == 4
    assert all(any(f".{q}." in n for q in networks.ADAPTED) for n in moving if n.endswith((".A", ".B")))
    assert sum("classifier" in name for name in moving) == 2
    assert len(moving) == 6


def test_published_pictures_that_cannot_be_read_give_way_to_digits(monkeypatch: pytest.MonkeyPatch):
    real = figure.pictures

    def offline(name: str, **options: object):
        if name != "digits":
            raise CurvescopeError(f"could not read the pictures {name!r}: no network")
        return real(name, **options)

    monkeypatch.setattr(figure, "pictures", offline)
    data, name, note = figure.Shelf(figure.Config(profile="full")).take("mnist", 4166)
    assert name == "digits"
    assert "no network" in note
    assert data.images.dtype == torch.float32
    with pytest.raises(CurvescopeError, match="no network"):
        figure.Shelf(figure.Config(pictures="mnist")).take("mnist", 10)


def test_the_profiles_have_the_published_experiments():
    quick, full = networks.experiments("quick"), networks.experiments("full")
    assert (
        {one.family for one in quick.values()} == {one.family for one in full.values()} == {"E4", "E7", "E8"}
    )
    assert len(full) == 1 + 2 + 25
    assert full["E4"].words == "ViT of 8 blocks, width 128, patches 4"
    assert (full["E4"].pictures, full["E8.h64.n10"].pictures) == ("cifar100", "mnist")
    network = networks.fully_connected(SHAPE, 10, width=4, hidden=3, seed=0)
    assert sum(p.dim() == 2 for p in network.parameters()) == 5


@pytest.mark.usefixtures("unrendered")
def test_a_run_on_a_few_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path):
    real = figure.pictures
    monkeypatch.setattr(figure, "pictures", lambda name, num, seed: real(name, num=80, seed=seed))
    short = {
        name: one._replace(how=TrainingSettings(1), group=min(one.group, 4))
        for name, one in networks.experiments("quick").items()
        if one.family != "E8" or one.width == 4
    }
    monkeypatch.setattr(figure, "experiments", lambda profile: short)
    monkeypatch.setattr(networks, "SMALL", {"width": 8, "layers": 1, "patch": 2})
    result = figure.run(figure.Config(num_orders=5))
    assert set(result.curves) == set(short)
    assert result.curves["E7.rank8"].num_trained < result.curves["E7.rank8"].num_parameters
    assert len(result.curves["E4"].losses) == 64
    assert set(result.captions()) == {*result.tables(), *result.figures()}
    again = figure.Convergence.load(result.save(tmp_path))
    assert again.tables()["convergence"].equals(result.tables()["convergence"])


def test_groups_are_means_of_all_pictures_but_the_last_few():
    losses = np.arange(11.0)
    found = figure.grouped(losses, 2, 0)
    assert len(found) == 5
    assert abs(found.sum() * 2 - losses.sum()) <= 10
    np.testing.assert_array_equal(figure.grouped(losses, 1, 0), losses)
