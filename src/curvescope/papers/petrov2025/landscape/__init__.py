"""|L_{k+1} − L_k| as the sample grows (E4, E5 and the follow-up), beside the control that it needs.

What is compared here is the law and its exponent, on any model; the published curves with their own kinds of
networks (ViTs on CIFAR-100, LoRA on MNIST, fully connected ones) are the figure `convergence`.
"""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.setting import FigureConfig
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import landscape

__all__ = ["STUDY", "Config", "run"]

TOKENS = {"quick": 8192, "full": 65536}
ORDERS = {"quick": 200, "full": 1000}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: 512 sequences in 200 orders; full: 4,096 in 1,000."""

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


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> landscape.Landscape:
    """The study with the settings of the profile."""
    return landscape.run(cfg.of_study(), progress=progress, state=state)


STUDY = Study(Config, run)
