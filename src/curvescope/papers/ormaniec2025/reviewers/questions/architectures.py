"""Question 3. Is it special to Transformers? The same sweeps for other networks of equal size and task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from curvescope.papers.ormaniec2025.reviewers.answers import (
    FAILS,
    HOLDS,
    OURS,
    PAPER,
    Answer,
    answer,
    less_than,
    more_than,
)
from curvescope.papers.ormaniec2025.reviewers.measure import Sweep, sweep
from curvescope.papers.ormaniec2025.reviewers.networks import ARCHITECTURES
from curvescope.papers.ormaniec2025.reviewers.setting import SMALL, Config
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, exponents, mean_of

QUESTION = "Is it special to Transformers?"
SIGMA = np.array([*SMALL, 1.0])
FIRST = "Transformer"
APART = 0.5  # exponents of different order are further apart


def pieces(cfg: Config) -> dict[str, Callable[[], Sweep]]:
    """A sweep of all blocks of every network."""
    options = {"seeds": cfg.count, "sequences": cfg.sequences}
    return {f"architecture.{name}": partial(sweep, make, SIGMA, **options)
            for name, make in ARCHITECTURES.items()}  # fmt: skip


def orders(found: Sweep, part: str = "H") -> np.ndarray:
    """Exponents for small σ: (seeds, blocks)."""
    return np.stack(
        [exponents(found.sigma, found.curve(part, block), high=SMALL[-1]) for block in found.blocks], axis=1
    )


def spread(found: Sweep, part: str = "H") -> Mean:
    """The largest less the smallest exponent among the blocks."""
    return mean_of(np.ptp(orders(found, part), axis=1))


def unlike(found: Sweep) -> Mean:
    """Decades between the largest and the least root mean square of a block's entries of H at σ = 1."""
    entries = [found.curve("H", b)[:, -1] / n for b, n in zip(found.blocks, found.sizes, strict=True)]
    return mean_of(np.ptp(np.log10(np.stack(entries)), axis=0))


def answers(found: Mapping[str, Sweep]) -> list[Answer]:
    """One row a network, and the question itself, of H_o and of H."""
    sweeps = {name: found[f"architecture.{name}"] for name in ARCHITECTURES}
    return [*(_one_order(name, one) for name, one in sweeps.items()),
            *(_special(sweeps, part) for part in ("H_o", "H")), _unlike(sweeps)]  # fmt: skip


def _one_order(name: str, one: Sweep) -> Answer:
    """All blocks of H grow alike."""
    shown = ", ".join(
        f"{block.removeprefix('L0.')} {mean:.2f}"
        for block, mean in zip(one.blocks, orders(one).mean(0), strict=True)
    )
    apart = spread(one)
    source = PAPER if name in ("Transformer", "MLP") else OURS
    claim = f"{name}: all blocks of H grow with one order"
    words = f"{shown}; largest less smallest {apart}"
    return answer(3, claim, "one", apart, less_than(apart, APART), measured=words, source=source)


def _special(sweeps: Mapping[str, Sweep], part: str) -> Answer:
    """Whether no other network has blocks of different order."""
    found = {name: spread(one, part) for name, one in sweeps.items()}
    verdict = only_first({name: more_than(mean, APART) for name, mean in found.items()})
    words = "largest less smallest exponent: " + ", ".join(f"{n} {m.value:.2f}" for n, m in found.items())
    claim = f"blocks of {part} of different order are special to Transformers"
    return answer(3, claim, "yes", found[FIRST], verdict, measured=words, source=PAPER)


def only_first(verdicts: Mapping[str, str]) -> str:
    """Verdict on `it is so of the Transformer alone`, from whether it is so of each network."""
    if verdicts[FIRST] != HOLDS:
        return verdicts[FIRST]
    others = [name for name, verdict in verdicts.items() if name != FIRST and verdict == HOLDS]
    if len(others) == len(verdicts) - 1:
        return FAILS
    return f"holds with exceptions: {', '.join(others)}" if others else HOLDS


def _unlike(sweeps: Mapping[str, Sweep]) -> Answer:
    """Sizes at σ = 1, where no exponent matters: the Transformer against the most unlike of the others."""
    found = {name: unlike(one) for name, one in sweeps.items()}
    most = max((name for name in found if name != FIRST), key=lambda name: found[name].value)
    more, least = found[FIRST], found[most].high
    words = ", ".join(f"{name} {mean}" for name, mean in found.items())
    claim = "at σ = 1 the blocks of the Transformer are the most unlike (decades of the size of an entry)"
    return answer(3, claim, f"more than {most}", more, more_than(more, least), measured=words)
