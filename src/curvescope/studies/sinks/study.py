"""Attention sinks: where a model has them, and how its spectrum moves as a sink grows.

The sink is grown in several ways (`ways`), each at a few strengths, in the user's own module. On every text
the Hessian's Lanczos runs from the same probes give both ends of the spectrum, its bulk and its outliers
(`lines`), and differences from the unchanged model are paired by text and probe (`effects`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.numbers import plural
from curvescope.core.progress import Progress
from curvescope.data.batches import Batches
from curvescope.models.running.attending import Attending
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.study import Cost, Plan
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.setting import ModelOnData, make_problem, notes_of
from curvescope.studies.sinks.analysis import (
    HOWS,
    UNCHANGED,
    Blocks,
    Effort,
    Heads,
    Moved,
    Way,
    find_sinks,
    groups,
    measure_blocks,
    measure_moved,
    possible,
    reach,
    sink_token,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to grow and how hard to look. The defaults take under two minutes on two cores."""

    tokens: int = setting(144, "of all texts together")
    seq_len: int = setting(48, "tokens of one sequence")
    texts: int = setting(3, "disjoint parts of the data, to see what holds on others of the kind")
    hows: tuple[str, ...] = setting(tuple(HOWS), f"ways to grow a sink: {', '.join(HOWS)}")
    biases: tuple[float, ...] = setting((2.0, 4.0, 8.0), "strengths of bias")
    strengths: tuple[float, ...] = setting(
        (4.0,), "of key (× 1 + s), inserted (s tokens), softmax_one (weight s), activation (× 2^s)"
    )
    gates: tuple[float, ...] = setting((0.9,), "strengths of gated: 1 − g for a gate g on all heads")
    token: int | None = setting(None, "id of an inserted token; by default the model's first, or a new line")
    threshold: float = setting(0.2, "τ of outliers, of the largest |λ| of the unchanged model on a text")
    num_probes: int = setting(5, "seeds: random vectors with a Lanczos run each, on every text")
    num_steps: int = setting(10, "Lanczos steps of each, on the Hessian")
    ggn_steps: int = setting(6, "Lanczos steps on the GGN, for its λ_max, from one vector")
    block_steps: int = setting(4, "on groups of blocks, at the last strength of each way; 0: none")

    def __post_init__(self) -> None:
        as_tuples(self, "hows", "biases", "strengths", "gates")
        super().__post_init__()
        at_least(self, 1, "texts", "ggn_steps")
        at_least(self, 2, "num_probes")
        at_least(self, 4, "num_steps")
        at_least(self, 0, "block_steps")
        for how in self.hows:
            if how not in HOWS:
                raise UsageError(f"hows: expected some of {', '.join(HOWS)}, got {how!r}")
        if not all(0 < gate <= 1 for gate in self.gates):
            raise UsageError(f"gates: expected numbers above 0, up to 1, got {self.gates}")
        if min(*self.biases, *self.strengths, 1) <= 0 or not 0 < self.threshold < 1:
            raise UsageError("expected strengths above 0, and a threshold between 0 and 1")

    @property
    def ways(self) -> list[Way]:
        """All of them, the strengths of each ascending; whole numbers of tokens are inserted."""
        own = {"bias": self.biases, "gated": self.gates}
        found = [Way(how, float(s)) for how in self.hows for s in sorted(own.get(how, self.strengths))]
        return [way for way in found if way.how != "inserted" or way.strength == way.num_inserted]


@dataclass(frozen=True)
class Sinks(Shown):
    """One model: its sinks, and its spectrum as they grow."""

    model: str
    data: str
    loss_name: str
    num_terms: list[float]  # of every text
    num_parameters: int
    threshold: float
    heads: Heads
    hows: list[str]  # of each way but the unchanged
    strengths: list[float]
    moved: dict[str, Moved]  # by the name of the way; `unchanged` is one
    blocks: dict[str, Blocks]  # unchanged, and each way at its last strength; empty where not asked for

    @property
    def ways(self) -> list[Way]:
        """Those that were measured, without the unchanged."""
        return [Way(how, s) for how, s in zip(self.hows, self.strengths, strict=True)]

    def last(self) -> list[Way]:
        """Each way at its largest strength."""
        return list({way.how: way for way in self.ways}.values())


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Sinks:
    """Find the sinks, grow them, and follow the spectrum.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    return measure(problem, cfg, notes_of(cfg, problem), progress=progress, state=state)


def measure(
    problem: Problem,
    cfg: Config,
    notes: list[str],
    *,
    progress: Progress | None = None,
    state: State | None = None,
) -> Sinks:
    """The study on a problem of one's own; of the settings, those of ways and probes count."""
    sweep = prepare(problem, cfg, notes)
    contents = fingerprint(problem.model, sweep.whole)
    found = work_through(sweep.pieces(), contents=contents, progress=progress, state=state)
    return sweep.result(found)


@dataclass(frozen=True)
class Sweep:
    """All that is measured of one problem: its pieces, and the result that is made of them."""

    problem: Problem
    texts: list[Problem]
    ways: list[Way]  # the unchanged first
    effort: Effort
    token: int
    threshold: float
    reached: bool  # whether attention is
    notes: list[str]

    @property
    def whole(self) -> Batches:
        """The data of all texts."""
        return Batches(list(self.problem.batches), name=self.problem.batches.name)

    @property
    def last(self) -> list[Way]:
        """Whose blocks are looked at: the unchanged, and each way at its largest strength."""
        return list({way.how: way for way in self.ways}.values()) if self.effort.block_steps else []

    def pieces(self, front: str = "") -> list[Piece]:
        """One for the heads, one for each way at each strength; `front` is the beginning of their names."""
        said, where = front.replace(".", ": "), partial(find_sinks, self.problem.model, self.whole)
        found = [Piece(f"{front}heads", where, f"{said}where sinks are")]
        for way in self.ways:
            work = partial(measure_moved, self.texts, way, self.token, self.effort, reached=self.reached)
            words = said + _words(way)
            found.append(Piece(f"{front}{way.name}", work, words, kind=f"{front}spectra"))
        for way in self.last:
            work = partial(measure_blocks, self.texts[0], way, self.token, self.effort)
            words = f"{said}blocks, {_words(way)}"
            found.append(Piece(f"{front}blocks.{way.name}", work, words, kind=f"{front}blocks"))
        return found

    def result(self, found: Finished, front: str = "") -> Sinks:
        """From the finished pieces."""
        problem, heads = self.problem, found.take(Heads, f"{front}heads")
        return Sinks(
            model=problem.model.name,
            data=problem.batches.name,
            loss_name=problem.loss.name,
            num_terms=[text.num_terms for text in self.texts],
            num_parameters=problem.space().size,
            threshold=self.threshold,
            heads=heads,
            hows=[way.how for way in self.ways[1:]],
            strengths=[way.strength for way in self.ways[1:]],
            moved={way.name: found.take(Moved, front + way.name) for way in self.ways},
            blocks={way.name: found.take(Blocks, f"{front}blocks.{way.name}") for way in self.last},
            notes=list(dict.fromkeys([*self.notes, *heads.notes])),
        )


def prepare(problem: Problem, cfg: Config, notes: list[str]) -> Sweep:
    """What is to be measured: the texts, and the ways that the model and the data have."""
    texts = cut_texts(problem, cfg.texts)
    if len(texts) < cfg.texts:
        notes = [*notes, f"{plural(len(texts), 'sequence')} make {len(texts)} texts, not {cfg.texts}"]
    ways, left_out = possible(cfg.ways, problem.model, texts[0].batches)
    return Sweep(
        problem=problem,
        texts=texts,
        ways=[Way("", 0.0), *ways],
        effort=Effort(
            cfg.num_probes,
            cfg.num_steps,
            cfg.ggn_steps,
            cfg.block_steps,
            cfg.seed,
            cfg.engine,
            cfg.checkpoint,
        ),
        token=sink_token(problem.model, cfg.token),
        threshold=cfg.threshold,
        reached=not reach(problem.model, texts[0].batches, Attending(gate=0.5)),
        notes=[*notes, *left_out],
    )


def cut_texts(problem: Problem, count: int) -> list[Problem]:
    """The sequences of a problem in `count` parts of about one size, fewer where there are fewer of them."""
    batches = list(problem.batches)
    total = sum(batch.num_sequences for batch in batches)
    count = min(count, total)
    cuts = [total * i // count for i in range(count + 1)]
    found = []
    for start, stop in pairwise(cuts):
        first, parts = 0, []
        for batch in batches:
            low, high = max(start - first, 0), min(stop - first, batch.num_sequences)
            first += batch.num_sequences
            parts += [batch[low:high]] if low < high else []
        data = Batches(parts, name=problem.batches.name)
        found.append(Problem(problem.model, data, problem.loss, params=problem.choice.params))
    return found


def _words(way: Way) -> str:
    return f"{HOWS[way.how]}: {way.strength:g}" if way.strength else UNCHANGED


# ------------------------------------------------------------------------------------------------------- plan

FIRST = 1.5  # products of the whole that one on a part of the data, with its own graph, takes more


def cost(cfg: Config, problem: Problem) -> Cost:
    """Products over all tokens: one on a text counts as its share of them."""
    sweep = prepare(problem, cfg, [])
    spectra, looks = len(sweep.ways), len(sweep.last) * len(groups(problem))
    each = cfg.num_probes * cfg.num_steps + cfg.ggn_steps + FIRST * cfg.texts
    products = spectra * each + looks * cfg.block_steps / cfg.texts
    return Cost(len(sweep.pieces()), products, graphs=spectra)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"block_steps": 0},
        {"block_steps": 0, "num_probes": 4, "num_steps": 8, "ggn_steps": 6},
        {"block_steps": 0, "num_probes": 3, "num_steps": 8, "ggn_steps": 6, "tokens": 96},
        {"block_steps": 0, "num_probes": 2, "num_steps": 8, "ggn_steps": 4, "tokens": 96, "texts": 2},
        {"block_steps": 0, "num_probes": 2, "num_steps": 6, "ggn_steps": 4, "tokens": 64, "texts": 2},
    ),
)
