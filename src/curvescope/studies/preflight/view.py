"""What a forecast says, line by line."""

from __future__ import annotations

from typing import Any

from torch import nn

from curvescope.core.numbers import data_size, duration, plural
from curvescope.core.parts import MATRIX_SYMBOLS
from curvescope.kernels.backends import has_triton
from curvescope.models.description import PRECISION, dtype_of, notes, roles
from curvescope.models.model import Model
from curvescope.studies.preflight.measurements import width
from curvescope.studies.preflight.prediction import DRAWN, MARGIN, Forecast, Prediction, advice

NAMED = 5  # roles, and stages, that a line names; the others are added up
PARTS = tuple(f" {MATRIX_SYMBOLS[kind]}" for kind in ("ggn", "functional"))
SYMBOLS = "H = H_o + H_f: the Hessian is the GGN plus the functional Hessian"
NO_PLAN = "{study} does not say how many products it takes: its time and memory are not predicted"


def lines(found: Forecast) -> list[str]:
    """What is run, what it takes, and what to change if it does not fit."""
    return [*about(found.problem.model, found), *taking(found), *advice(found)]


def about(model: Model, found: Forecast | None = None) -> list[str]:
    """Parameters by role, attention as it was measured, precision, dropout, tied weights."""
    shares = sorted(roles(model), key=lambda role: -role["parameters"])
    named = [f"{role['role']} {role['share']:.0%}" for role in shares[:NAMED]]
    rest = sum(role["share"] for role in shares[NAMED:])
    named += [f"others {rest:.0%}"] if rest >= 0.005 else []
    dtype = dtype_of(model)
    return [
        f"{model.name}: {model.num_parameters:,} parameters: {', '.join(named)}",
        *([f"attention: {attention(found)}"] if found is not None else []),
        PRECISION.get(dtype, f"{dtype}: curvature is only as exact as that"),
        f"dropout: {_dropout(model)}",
        f"tied weights: {_tied(model)}",
    ]


def attention(found: Forecast) -> str:
    """Which attention products go through, and why."""
    measured, device = found.measured, found.problem.device
    if not measured.fast:
        return f"plain, as autograd differentiates it twice: {measured.why or 'engine=autograd'}"
    triton = device.type == "cuda" and has_triton() and dtype_of(found.problem.model) != "float64"
    how = "Triton" if triton else "blockwise in torch"
    if measured.attends:
        return f"our fused kernel with a second derivative, {how}"
    return (
        f"the module's own code; calls of PyTorch's attention are our fused kernel ({how}) where that has "
        "what is asked for (no dropout, no mask of one's own), else the plain form"
    )


def _dropout(model: Model) -> str:
    said = [note for note in notes(model) if "dropout" in note.lower()]
    if said:
        return said[0]
    rates = {m.p for m in model.module.modules() if isinstance(m, nn.Dropout) and m.p > 0}
    return "switched off: curvature is that of the model in eval mode" if rates else "none"


def _tied(model: Model) -> str:
    said = [note for note in notes(model) if "tied" in note.lower() or "the unembedding is" in note]
    return said[0].removeprefix("tied weights: ").removeprefix("tied: ") if said else "none"


def taking(found: Forecast) -> list[str]:
    """Memory and time, of what they are made, and what they were measured on."""
    p, device = found.prediction, found.problem.device
    where = "of this card" if device.type == "cuda" else "of the process"
    top = p.largest
    made = {"weights and libraries": p.base, "graphs that are kept": top.graphs, "vectors": top.vectors}
    made["drawing" if top.what == DRAWN else "one product"] = top.memory - sum(made.values())
    parts = ", ".join(f"{name} {data_size(size)}" for name, size in made.items() if size > 0.01 * top.memory)
    steps = "" if found.stepwise else "; the study does not say its steps, so this is the most it takes"
    return [
        f"memory: about {data_size(p.memory)} {where} at its peak, in {top.what}: {parts}; "
        f"free now {data_size(p.free)}",
        f"time: about {duration(p.seconds)} ({_most(p)}): {_made(p)}{steps}",
        measured_on(found),
        *([SYMBOLS] if any(stage.what.endswith(PARTS) for stage in p.stages) else []),
    ]


def measured_on(found: Forecast) -> str:
    """What part of the data, and how the rest was reckoned."""
    cut, everything = found.measured.cut, found.measured.everything
    total = plural(found.problem.batches.num_sequences, "sequence")
    if cut.tokens == everything.tokens:
        share = f"{cut.sequences} of {everything.sequences} sequences of the first batch"
        return f"measured on {share}, of {total} in all"
    return (
        f"measured on the first {cut.tokens} of {everything.tokens} tokens of one sequence, of {total} in "
        f"all; time was taken to grow as T (1 + T / {6 * width(found.problem)}) with their length T"
    )


def _most(p: Prediction) -> str:
    eigenvalues = any(stage.most > stage.seconds for stage in p.stages)
    why = "all products that eigenvalues may take, and " if eigenvalues else ""
    return f"at most {duration(p.most)}: {why}a prediction {1 - 1 / MARGIN:.0%} too low"


def _made(p: Prediction) -> str:
    """The stages that take longest, and what is not products."""
    stages = sorted((stage for stage in p.stages if stage.seconds), key=lambda stage: -stage.seconds)
    parts = [f"{s.what} {duration(s.seconds)} ({s.products:.0f} products)" for s in stages[:NAMED]]
    rest = sum(s.seconds for s in stages[NAMED:])
    parts += [f"other products {duration(rest)}"] if rest >= 1 else []
    return ", ".join([*parts, f"starting, checks, figures and writing {duration(p.other)}"])


def as_dict(found: Forecast) -> dict[str, Any]:
    """The forecast as plain data."""
    p, problem = found.prediction, found.problem
    return {
        "study": found.study,
        "settings": found.cfg.to_dict(),
        "stepwise": found.stepwise,
        "attention": attention(found),
        "dropout": _dropout(problem.model),
        "tied": _tied(problem.model),
        "seconds": p.seconds,
        "most_seconds": p.most,
        "memory_bytes": p.memory,
        "base_bytes": p.base,
        "free_bytes": p.free,
        "fits": p.fits,
        "stages": [stage._asdict() for stage in p.stages],
        "measured_sequences": found.measured.cut.sequences,
        "measured_tokens": found.measured.cut.tokens or None,  # of each; null where they were not counted
        "advice": advice(found),
    }
