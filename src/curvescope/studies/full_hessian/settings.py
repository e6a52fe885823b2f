"""The settings of the study `full_hessian`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.data.tasks.pictures import PICTURES, check_pictures


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which network on which pictures, and how many of them. The defaults take about four minutes."""

    data: str = setting(
        "digits", f"pictures: {', '.join(PICTURES)}, or a folder; but for digits through the package datasets"
    )
    num_images: int | None = setting(
        None, "pictures, a fifth of them to validate; all of digits, else 10,000"
    )
    patch_size: int | None = setting(None, "pixels along a side of a patch; 4, and 2 for digits (8 × 8)")
    d_model: int = setting(16, "width")
    d_ff: int = setting(64, "width of the feed-forward network")
    n_heads: int = setting(1, "heads of the attention")
    init: Literal["xavier", "scaled", "gpt2"] = setting("xavier", "how weights are drawn, see the zoo")
    seeds: int = setting(5, "networks that are trained: own weights, own order of the pictures")
    steps: int = setting(1000, "of training, with AdamW")
    until: float = setting(0.5, "the trained Hessian is of the first step with more validation accuracy")
    batch_size: int = setting(128, "pictures of a step; the Hessian is that of the first step's")
    lr: float = setting(3e-3, "learning rate behind the warm-up; it falls along a cosine")
    weight_decay: float = setting(0.01, "of matrices")
    num_points: int = setting(12, "steps at which norms are taken: 0, then evenly in the logarithm")
    num_probes: int = setting(8, "random vectors for the norm of a group of blocks")
    num_steps: int = setting(8, "Lanczos steps before them, which take out the largest eigenvalues")
    dtype: Literal["float32", "float64"] = setting(
        "float32", "of weights and Hessian; float64 takes twice as long"
    )
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of the first network; the others follow")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pictures(self.data)
        at_least(self, 1, "seeds", "steps", "batch_size", "d_model", "d_ff", "n_heads", "num_steps")
        at_least(self, 2, "num_points", "num_probes")
        if not 0 <= self.until < 1:
            raise UsageError(f"until: expected an accuracy from 0 to below 1, got {self.until}")

    @property
    def points(self) -> list[int]:
        """Steps at which norms are taken, the first and the last one among them."""
        spaced = np.geomspace(1, self.steps, self.num_points - 1).round().astype(int).tolist()
        return list(dict.fromkeys([0, *spaced, self.steps]))
