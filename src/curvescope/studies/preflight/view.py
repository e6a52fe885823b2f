"""Print a forecast line by line."""

from __future__ import annotations

from typing import Any

from torch import nn

from curvescope.core.hessian_terms import MATRIX_SYMBOLS
from curvescope.core.number_format import data_size, duration, plural
from curvescope.kernels.backends import has_triton
from curvescope.models.description import PRECISION, dtype_of, notes, roles
from curvescope.models.model import Model
from curvescope.studies.preflight.measurements import width
from curvescope.studies.preflight.prediction import DRAWN, MARGIN, CostPrediction, Forecast, advice

NAMED = 5  # roles and stages that a line names; the rest is summed up
PARTS = tuple(f" {MATRIX_SYMBOLS[kind]}" for kind in ("ggn", "functional"))
SYMBOLS = "H = H_o + H_f: the Hessian is the GGN plus the functional Hessian"
NO_PLAN = "{study} has no plan of its products, so its time and memory are not predicted"


def lines(forecast: Forecast) -> list[str]:
    """Describe the model, its predicted cost, and what to change if it does not fit."""
    return [*about(forecast.problem.model, forecast), *taking(forecast), *advice(forecast)]


def about(model: Model, forecast: Forecast | None = None) -> list[str]:
    """Describe parameters by role, attention, precision, dropout and tied weights."""
    shares = sorted(roles(model), key=lambda role: -role["parameters"])
    named = [f"{role['role']} {role['share']:.0%}" for role in shares[:NAMED]]
    rest = sum(role["share"] for role in shares[NAMED:])
    named += [f"others {rest:.0%}"] if rest >= 0.005 else []
    dtype = dtype_of(model)
    return [
        f"{model.name}: {model.num_parameters:,} parameters: {', '.join(named)}",
        *([f"attention: {attention(forecast)}"] if forecast is not None else []),
        PRECISION.get(dtype, f"{dtype}: curvature has at most the precision of this type"),
        f"dropout: {_dropout(model)}",
        f"tied weights: {_tied(model)}",
    ]


def attention(forecast: Forecast) -> str:
    """Describe the attention implementation that products use, and the reason."""
    measured, device = forecast.measured, forecast.problem.device
    if not measured.fast:
        return f"plain attention, differentiated twice by autograd: {measured.why or 'engine=autograd'}"
    triton = device.type == "cuda" and has_triton() and dtype_of(forecast.problem.model) != "float64"
    how = "Triton" if triton else "blockwise in torch"
    if measured.attends:
        return f"our fused kernel with second derivatives, {how}"
    return (
        f"the module's own code. Its calls of PyTorch's attention use our fused kernel ({how}) if it "
        "supports them (no dropout, no custom mask), else plain attention"
    )


def _dropout(model: Model) -> str:
    dropout_notes = [note for note in notes(model) if "dropout" in note.lower()]
    if dropout_notes:
        return dropout_notes[0]
    rates = {m.p for m in model.module.modules() if isinstance(m, nn.Dropout) and m.p > 0}
    return "switched off: curvature is measured in eval mode" if rates else "none"


def _tied(model: Model) -> str:
    tied_notes = [note for note in notes(model) if "tied" in note.lower() or "the unembedding is" in note]
    return tied_notes[0].removeprefix("tied weights: ").removeprefix("tied: ") if tied_notes else "none"


def taking(forecast: Forecast) -> list[str]:
    """Return lines on memory and time, their parts, and the data they were measured on."""
    p, device = forecast.prediction, forecast.problem.device
    where = "of GPU memory" if device.type == "cuda" else "of process memory"
    top = p.largest
    made = {"weights and libraries": p.base, "stored graphs": top.graphs, "vectors": top.vectors}
    made["drawing" if top.what == DRAWN else "one product"] = top.memory - sum(made.values())
    parts = ", ".join(f"{name} {data_size(size)}" for name, size in made.items() if size > 0.01 * top.memory)
    return [
        f"memory: about {data_size(p.memory)} {where} at the peak, in {top.what}: {parts}; "
        f"{data_size(p.free)} are free now",
        f"time: about {duration(p.seconds)} ({_most(p)}): {_made(p)}",
        measured_on(forecast),
        *([SYMBOLS] if any(stage.what.endswith(PARTS) for stage in p.stages) else []),
    ]


def measured_on(forecast: Forecast) -> str:
    """Name the part of the data that was measured, and how the rest was extrapolated."""
    cut, everything = forecast.measured.cut, forecast.measured.everything
    total = plural(forecast.problem.batches.num_sequences, "sequence")
    if cut.tokens == everything.tokens:
        share = f"{cut.sequences} of {everything.sequences} sequences of the first batch"
        return f"measured on {share}, of {total} in all"
    return (
        f"measured on the first {cut.tokens} of {everything.tokens} tokens of one sequence, of {total} "
        f"in all; the time is extrapolated as T (1 + T / {6 * width(forecast.problem)}) with the "
        "sequence length T"
    )


def _most(p: CostPrediction) -> str:
    eigenvalues = any(stage.most > stage.seconds for stage in p.stages)
    why = "eigenvalues need all allowed products and " if eigenvalues else ""
    return f"at most {duration(p.most)}, if {why}the prediction is {1 - 1 / MARGIN:.0%} too low"


def _made(p: CostPrediction) -> str:
    """Name the stages that take longest, and the time besides products."""
    stages = sorted((stage for stage in p.stages if stage.seconds), key=lambda stage: -stage.seconds)
    parts = [f"{s.what} {duration(s.seconds)} ({s.products:.0f} products)" for s in stages[:NAMED]]
    rest = sum(s.seconds for s in stages[NAMED:])
    parts += [f"other products {duration(rest)}"] if rest >= 1 else []
    return ", ".join([*parts, f"starting, checks, figures and writing {duration(p.other)}"])


def as_dict(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as plain data."""
    p, problem = forecast.prediction, forecast.problem
    return {
        "study": forecast.study,
        "settings": forecast.cfg.to_dict(),
        "attention": attention(forecast),
        "dropout": _dropout(problem.model),
        "tied": _tied(problem.model),
        "seconds": p.seconds,
        "most_seconds": p.most,
        "memory_bytes": p.memory,
        "base_bytes": p.base,
        "free_bytes": p.free,
        "fits": p.fits,
        "stages": [stage._asdict() for stage in p.stages],
        "measured_sequences": forecast.measured.cut.sequences,
        "measured_tokens": forecast.measured.cut.tokens
        or None,  # tokens per sequence; null if sequences cannot be cut
        "advice": advice(forecast),
    }
