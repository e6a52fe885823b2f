"""Attention sinks: where a model has them, and how its spectrum moves as a sink grows.

The sink is grown in several ways (`ways`), each at a few strengths, in the user's own module. On every text
the Hessian's Lanczos runs from the same probes give both ends of the spectrum, its bulk and its outliers
(`lines`), and differences from the unchanged model are paired by text and probe (`effects`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.data.batches import Batches
from curvescope.models.running.attention_interventions import AttentionChange
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.problem_config import ModelOnData, make_problem, notes_of
from curvescope.studies.sinks.analysis import (
    HOWS,
    UNCHANGED,
    Intervention,
    SinkBlocks,
    SinkEffort,
    SinkHeads,
    SinkSpectra,
    find_sinks,
    groups,
    measure_blocks,
    measure_moved,
    possible,
    reach,
    sink_token,
)


@dataclass(frozen=True)
class Config(ModelOnData):
    """Interventions and effort. The defaults take under two minutes on two cores."""

    tokens: int = setting(144, "tokens of all texts together")
    seq_len: int = setting(48, "tokens of one sequence")
    texts: int = setting(
        3,
        "disjoint parts of the data, which show if an effect holds on other texts of the same kind",
        least=1,
    )
    hows: tuple[str, ...] = setting(tuple(HOWS), f"interventions that grow a sink: {', '.join(HOWS)}")
    biases: tuple[float, ...] = setting((2.0, 4.0, 8.0), "strengths of the intervention bias")
    strengths: tuple[float, ...] = setting(
        (4.0,), "strengths of key (× 1 + s), inserted (s tokens), softmax_one (weight s), activation (× 2^s)"
    )
    gates: tuple[float, ...] = setting(
        (0.9,), "strengths of the intervention gated: 1 − g for a gate g on all heads"
    )
    token: int | None = setting(
        None, "id of the inserted token; by default the model's beginning-of-sequence token, or a new line"
    )
    threshold: float = setting(
        0.2, "threshold τ of outliers, relative to the largest |λ| of the unchanged model on a text"
    )
    num_probes: int = setting(5, "random vectors for Lanczos runs on every text", least=2)
    num_steps: int = setting(10, "Lanczos steps per run on the Hessian", least=4)
    ggn_steps: int = setting(6, "Lanczos steps on the GGN for its λ_max, from one vector", least=1)
    block_steps: int = setting(
        4, "Lanczos steps on groups of blocks, at the largest strength of each intervention; 0: none", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for how in self.hows:
            if how not in HOWS:
                raise UsageError(f"hows: expected some of {', '.join(HOWS)}, got {how!r}")
        if not all(0 < gate <= 1 for gate in self.gates):
            raise UsageError(f"gates: expected numbers above 0 and at most 1, got {self.gates}")
        if min(*self.biases, *self.strengths, 1) <= 0 or not 0 < self.threshold < 1:
            raise UsageError("expected strengths above 0 and a threshold between 0 and 1")

    @property
    def ways(self) -> list[Intervention]:
        """Return all interventions, with ascending strengths; only whole numbers of tokens are inserted."""
        own = {"bias": self.biases, "gated": self.gates}
        interventions = [
            Intervention(how, float(s)) for how in self.hows for s in sorted(own.get(how, self.strengths))
        ]
        return [way for way in interventions if way.how != "inserted" or way.strength == way.num_inserted]


@dataclass(frozen=True)
class Sinks(Shown):
    """Sinks of one model, and its spectrum as the sinks grow."""

    model: str
    data: str
    loss_name: str
    num_terms: list[float]  # for every text
    num_parameters: int
    threshold: float
    heads: SinkHeads
    hows: list[str]  # intervention of each measurement except the unchanged model
    strengths: list[float]
    moved: dict[str, SinkSpectra]  # by the name of the intervention, including `unchanged`
    # Unchanged, and each intervention at its largest strength; empty if block_steps = 0.
    blocks: dict[str, SinkBlocks]

    @property
    def ways(self) -> list[Intervention]:
        """Interventions that were measured, without the unchanged model."""
        return [Intervention(how, s) for how, s in zip(self.hows, self.strengths, strict=True)]

    def last(self) -> list[Intervention]:
        """Each intervention at its largest strength."""
        return list({way.how: way for way in self.ways}.values())


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Sinks:
    """Find the sinks, grow them, and measure the spectrum."""
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
    """Run the study on a given problem; only the settings of interventions and probes are used."""
    sweep = prepare(problem, cfg, notes)
    contents = fingerprint(problem.model, sweep.whole)
    found = work_through(sweep.pieces(), contents=contents, progress=progress, state=state)
    return sweep.result(found)


@dataclass(frozen=True)
class SinkSweep:
    """Work on one problem: its pieces, and the result made from them."""

    problem: Problem
    texts: list[Problem]
    ways: list[Intervention]  # the unchanged model first
    effort: SinkEffort
    token: int
    threshold: float
    reached: bool  # True if attention can be changed
    notes: list[str]

    @property
    def whole(self) -> Batches:
        """Data of all texts."""
        return Batches(list(self.problem.batches), name=self.problem.batches.name)

    @property
    def last(self) -> list[Intervention]:
        """Interventions whose blocks are measured: unchanged, and each one at its largest strength."""
        return list({way.how: way for way in self.ways}.values()) if self.effort.block_steps else []

    def pieces(self, front: str = "") -> list[Piece]:
        """Return a piece for the heads and one per intervention and strength; `front` begins their names."""
        said, where = front.replace(".", ": "), partial(find_sinks, self.problem.model, self.whole)
        pieces = [Piece(f"{front}heads", where, f"{said}where sinks are")]
        for way in self.ways:
            work = partial(measure_moved, self.texts, way, self.token, self.effort, reached=self.reached)
            words = said + _words(way)
            pieces.append(Piece(f"{front}{way.name}", work, words, kind=f"{front}spectra"))
        for way in self.last:
            work = partial(measure_blocks, self.texts[0], way, self.token, self.effort)
            words = f"{said}blocks, {_words(way)}"
            pieces.append(Piece(f"{front}blocks.{way.name}", work, words, kind=f"{front}blocks"))
        return pieces

    def result(self, found: FinishedPieces, front: str = "") -> Sinks:
        """Make the result from the finished pieces."""
        problem, heads = self.problem, found.take(SinkHeads, f"{front}heads")
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
            moved={way.name: found.take(SinkSpectra, front + way.name) for way in self.ways},
            blocks={way.name: found.take(SinkBlocks, f"{front}blocks.{way.name}") for way in self.last},
            notes=list(dict.fromkeys([*self.notes, *heads.notes])),
        )


def prepare(problem: Problem, cfg: Config, notes: list[str]) -> SinkSweep:
    """Choose the texts, and the interventions that the model and the data allow."""
    texts = cut_texts(problem, cfg.texts)
    if len(texts) < cfg.texts:
        notes = [*notes, f"{plural(len(texts), 'sequence')} make {len(texts)} texts, not {cfg.texts}"]
    ways, left_out = possible(cfg.ways, problem.model, texts[0].batches)
    return SinkSweep(
        problem=problem,
        texts=texts,
        ways=[Intervention("", 0.0), *ways],
        effort=SinkEffort(
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
        reached=not reach(problem.model, texts[0].batches, AttentionChange(gate=0.5)),
        notes=[*notes, *left_out],
    )


def cut_texts(problem: Problem, count: int) -> list[Problem]:
    """Split the sequences of a problem into `count` parts of about equal size, at most one per sequence."""
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


def _words(way: Intervention) -> str:
    return f"{HOWS[way.how]}: {way.strength:g}" if way.strength else UNCHANGED


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Planned work: Lanczos on every text for each intervention, and on the blocks of the first text."""
    sweep = prepare(problem, cfg, [])
    share, spectra, looks = 1 / len(sweep.texts), len(sweep.ways), len(sweep.last)
    texts = len(sweep.texts) * spectra
    found = [
        Step("spectra of H", "hessian", texts * cfg.num_probes * cfg.num_steps, basis=cfg.num_steps + 1),
        Step("spectra of GGN", "ggn", texts * cfg.ggn_steps, basis=cfg.ggn_steps + 1),
    ]
    found = [step._replace(made=texts, share=share) for step in found]
    if looks:
        spaces = tuple(groups(problem).values())
        products, basis = looks * len(spaces) * cfg.block_steps, cfg.block_steps + 1
        found.append(Step("blocks", "hessian", products, basis=basis, spaces=spaces, made=looks, share=share))
    return found


PLAN = Plan(
    steps,
    (
        {"block_steps": 0},
        {"block_steps": 0, "num_probes": 4, "num_steps": 8, "ggn_steps": 6},
        {"block_steps": 0, "num_probes": 3, "num_steps": 8, "ggn_steps": 6},
        {"block_steps": 0, "num_probes": 2, "num_steps": 8, "ggn_steps": 4, "texts": 2},
        {"block_steps": 0, "num_probes": 2, "num_steps": 6, "ggn_steps": 4, "texts": 2},
    ),
)
