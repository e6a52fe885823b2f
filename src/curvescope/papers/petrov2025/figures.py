"""Figures of the paper that are studies of this package with the paper's settings."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import setting
from curvescope.data.tasks.pictures import PICTURES, check_pictures
from curvescope.papers.common import FigureConfig, with_settings
from curvescope.studies import full_hessian, landscape, scaling

NETWORKS = {"quick": {"seeds": 3, "batch_size": 64}, "full": {}}
TOKENS = {"quick": 8192, "full": 65536}
ORDERS = {"quick": 200, "full": 1000}
SEEDS = {"quick": 2, "full": 5}


@dataclass(frozen=True)
class FullHessianConfig(FigureConfig):
    """Heat maps of the dense Hessian, and block norms through training (experiments E1 to E3).

    Quick: 3 networks and batches of 64 images, about two minutes; full: 5 and the paper's 128.
    """

    seeds: int | None = setting(None, "networks to train; 3 in the profile quick, 5 in full")
    steps: int = setting(1000, "training steps")
    pictures: str = setting(
        "digits", f"images: one of {', '.join(PICTURES)}, or images:FOLDER; the paper's are mnist"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pictures(self.pictures)

    def of_study(self) -> full_hessian.Config:
        """Return the settings of the study."""
        own = {"data": self.pictures, "steps": self.steps, "device": self.device, **NETWORKS[self.profile]}
        own |= {} if self.seeds is None else {"seeds": self.seeds}
        return full_hessian.Config.from_dict(own)


@dataclass(frozen=True)
class LandscapeConfig(FigureConfig):
    """|L_{k+1} − L_k| as the sample grows (E4, E5 and the follow-up), with a control.

    This figure compares the law and its exponent on any model. The published curves with networks of the same
    kinds are the figure `convergence`. Quick: 512 sequences in 200 orders; full: 4,096 in 1,000.
    """

    model: str = setting("tiny-gpt", "a bundled name, a folder, a hub id, a checkpoint or a TOML file")
    text: str = setting(
        "python-stdlib", "text that the model reads: a corpus, a file, a folder, or task:NAME"
    )
    seed: int = setting(0, "seed of the data sample and of all probes")

    def of_study(self) -> landscape.Config:
        """Return the settings of the study."""
        return landscape.Config(
            model=self.model,
            data=self.text,
            tokens=TOKENS[self.profile],
            num_orders=ORDERS[self.profile],
            device=self.device,
            seed=self.seed,
        )


@dataclass(frozen=True)
class ScalingConfig(FigureConfig):
    """Curvature against model size and data size: the article draws 1/√D; here a trained grid is measured.

    The article's `ScalingLawAnalyzer` uses the outer product of the gradient as the Hessian and trains
    nothing; its figure draws 1/√D through the first point. Here every exponent has an interval and a verdict.
    Quick: the small grid with two seeds; full: five seeds, and on a GPU the large grid.
    """

    seeds: int = setting(0, "models of each cell; 0: the default of the profile, 2 or 5", least=0)
    seed: int = setting(0, "seed of the data and of everything random")

    def of_study(self) -> scaling.Config:
        """Return the settings of the study."""
        large = self.profile == "full" and self.device != "cpu"
        return scaling.Config(
            grid="large" if large else "small",
            seeds=self.seeds or SEEDS[self.profile],
            device=self.device,
            seed=self.seed,
        )


STUDIES = {
    "full_hessian": with_settings(FullHessianConfig, FullHessianConfig.of_study, full_hessian.run),
    "landscape": with_settings(LandscapeConfig, LandscapeConfig.of_study, landscape.run),
    "scaling": with_settings(ScalingConfig, ScalingConfig.of_study, scaling.run),
}
