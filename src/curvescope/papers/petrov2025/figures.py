"""Figures of the paper that are studies of this package with the paper's settings."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import at_least, setting
from curvescope.data.tasks.pictures import PICTURES, check_pictures
from curvescope.papers.common import FigureConfig, with_settings
from curvescope.studies import full_hessian, landscape, scaling

NETWORKS = {"quick": {"seeds": 3, "batch_size": 64}, "full": {}}
TOKENS = {"quick": 8192, "full": 65536}
ORDERS = {"quick": 200, "full": 1000}
SEEDS = {"quick": 2, "full": 5}


@dataclass(frozen=True)
class FullHessianConfig(FigureConfig):
    """The heat maps of the dense Hessian and the norms through training (experiments E1 to E3).

    Quick: 3 networks and batches of 64 pictures, about two minutes; full: 5 and the paper's 128.
    """

    seeds: int | None = setting(None, "networks that are trained; 3 in the profile quick, 5 in full")
    steps: int = setting(1000, "of training")
    pictures: str = setting(
        "digits", f"one of {', '.join(PICTURES)}, or a folder; the paper's are mnist, by the package datasets"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pictures(self.pictures)

    def of_study(self) -> full_hessian.Config:
        """The settings of the study."""
        own = {"data": self.pictures, "steps": self.steps, "device": self.device, **NETWORKS[self.profile]}
        own |= {} if self.seeds is None else {"seeds": self.seeds}
        return full_hessian.Config.from_dict(own)


@dataclass(frozen=True)
class LandscapeConfig(FigureConfig):
    """|L_{k+1} − L_k| as the sample grows (E4, E5 and the follow-up), beside the control that it needs.

    The law and its exponent are compared here, on any model. The published curves with their own kinds of
    networks are the figure `convergence`. Quick: 512 sequences in 200 orders; full: 4,096 in 1,000.
    """

    model: str = setting("tiny-gpt", "a bundled name, a folder, a hub id, a checkpoint or a TOML file")
    text: str = setting("python-stdlib", "what the model reads: a corpus, a file, a folder, or task:NAME")
    seed: int = setting(0, "of the sample of the data and of all probes")

    def of_study(self) -> landscape.Config:
        """The settings of the study."""
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
    """Curvature against model size and data size: the article draws 1/√D, a trained grid is measured here.

    The article's `ScalingLawAnalyzer` takes the outer product of the gradient for the Hessian and trains
    nothing; its figure draws 1/√D through the first point. Here every exponent has an interval and a verdict.
    Quick: the small grid with two seeds; full: five seeds, and on a card the large grid.
    """

    seeds: int = setting(0, "models of each cell; 0: those of the profile, 2 and 5")
    seed: int = setting(0, "of the data and of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "seeds")

    def of_study(self) -> scaling.Config:
        """The settings of the study."""
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
