"""Does λ_max follow the norms of query and key weights? The study `weight_norms` with a paper's settings."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import at_least, setting
from curvescope.papers.common import FigureConfig, with_settings
from curvescope.studies import weight_norms

MODELS = {"quick": 96, "full": 300}
TOKENS = {"quick": 128, "full": 512}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: 96 random models with norms and as many without; full: 300 each, and more text."""

    models: int = setting(0, "random models of each kind; 0: those of the profile, 96 and 300")
    tokens: int = setting(0, "of the text for the bundled model; 0: those of the profile, 128 and 512")
    seed: int = setting(0, "of the data and of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "models", "tokens")

    def of_study(self) -> weight_norms.Config:
        """The settings of the study."""
        return weight_norms.Config(
            num_models=self.models or MODELS[self.profile],
            tokens=self.tokens or TOKENS[self.profile],
            device=self.device,
            seed=self.seed,
        )


STUDY = with_settings(Config, Config.of_study, weight_norms.run)
