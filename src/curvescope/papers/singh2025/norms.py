"""Rank correlations of λ_max with weight norms: the study `weight_norms` with the settings of a paper."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import setting
from curvescope.papers.common import FigureConfig, with_settings
from curvescope.studies import weight_norms

MODELS = {"quick": 96, "full": 300}
TOKENS = {"quick": 128, "full": 512}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: 96 random models with norms and as many without; full: 300 each, and more text."""

    models: int = setting(0, "random models of each kind; 0: the default of the profile, 96 or 300", least=0)
    tokens: int = setting(
        0, "tokens of text for the bundled model; 0: the default of the profile, 128 or 512", least=0
    )
    seed: int = setting(0, "seed of the data and of everything random")

    def of_study(self) -> weight_norms.Config:
        """Return the settings of the study."""
        return weight_norms.Config(
            num_models=self.models or MODELS[self.profile],
            tokens=self.tokens or TOKENS[self.profile],
            device=self.device,
            seed=self.seed,
        )


STUDY = with_settings(Config, Config.of_study, weight_norms.run)
