"""What the figures of this paper share: which model, and how a study's result becomes a figure's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from curvescope.models.load import load
from curvescope.runs.shown import Claim, Line, Scene, Shown
from curvescope.studies.setting import TokenModel

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

AUTO = "auto"
MODEL = "as for the study; auto is GPT-2 where it is in the local cache, else tiny-gpt"
GPT2 = ("gpt2", "openai-community/gpt2")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SHAPE = {"kind": "gpt2", "n_layers": 12, "d_model": 768, "vocab_size": 50257}

Setting = TypeVar("Setting", bound=TokenModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Reproduced(Shown):
    """A study's result as a figure of the paper: its names carry the figure's, its claims come with it."""

    figure: str
    model: str
    chosen: str  # why this model, in words
    result: Shown
    found: list[list[str]]  # the claims

    def claims(self) -> list[Claim]:
        """The model, then what the abstract and the reviews state, next to what was measured."""
        return [
            Claim("model", "GPT-2, 124M (abstract)", self.model, self.chosen, "abstract"),
            *(Claim(*row, source="abstract or reviews") for row in self.found),
        ]

    def summary(self) -> list[Line]:
        """That of the study, with the model before it."""
        return [("model", self.model, self.chosen), *self.result.summary()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows, and on which model."""
        return self._named(
            {name: f"{words} Model: {self.model}." for name, words in self.result.captions().items()}
        )

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name."""
        return self._named(self.result.tables())

    def figures(self) -> dict[str, Figure]:
        """Figures by name."""
        return self._named(self.result.figures())

    def scenes(self) -> dict[str, Scene]:
        """Figures to turn in a browser."""
        return self._named(self.result.scenes())

    def _named(self, found: dict[str, T]) -> dict[str, T]:
        return {f"{self.figure}_{name}": value for name, value in found.items()}


def with_model(cfg: Setting) -> tuple[Setting, str]:
    """The settings with `auto` replaced by the best model at hand, and why that one."""
    if cfg.model != AUTO:
        return cfg, "as asked for"
    for name in GPT2:
        if _is_cached(name):
            return replace(cfg, model=name), "the paper's model, from the local cache"
    why = "bundled: GPT-2 is not in the local cache; reproduce molina2023 MODEL takes any"
    return replace(cfg, model="tiny-gpt"), why


def is_gpt2(cfg: TokenModel) -> bool:
    """Whether the model is GPT-2 with 124 million parameters, by its shape and name."""
    if "gpt2" not in str(cfg.model).lower():
        return False
    facts = load(cfg.model, revision=cfg.revision).facts
    return all(facts.get(name) == value for name, value in SHAPE.items())


def measured_on(model: str, verdict: str) -> str:
    """The verdict, with the model's name where it is not the paper's."""
    return verdict if model in GPT2 else f"{verdict} on {model}"


def _is_cached(name: str) -> bool:
    """Whether a model's configuration and weights are in the local cache; nothing is fetched."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    files = [try_to_load_from_cache(name, file) for file in ("config.json", *WEIGHTS)]
    return isinstance(files[0], str) and any(isinstance(file, str) for file in files[1:])
