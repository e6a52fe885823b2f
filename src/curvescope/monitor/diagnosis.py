"""Causes of an unstable training run: findings from its history, each with evidence and a remedy.

`diagnose_run` is a pure function of the columns that a monitor writes. `RULES` is the table of checks: what
each compares, its limit, and the reason for the limit. A rule whose columns are missing finds nothing.

Limits that are not from theory lie beyond what the healthy runs of `benchmarks/monitor_diagnosis.py` have at
the calibrating seeds; docs/guides/unstable.md has the table of found, missed and false alarms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from curvescope.core.number_format import plural, rounded
from curvescope.core.result import Result
from curvescope.monitor.run_history import BACK, FIRST_STEPS, HIGHER, SPIKE, WINDOW, RunHistory, Trouble

Severity = Literal["fault", "warning", "note"]
ORDER = ("fault", "warning", "note")

FOLLOWS = 0.25  # share of the run within which an instability is early
MOST_STEPS = 6  # that are listed by number
MATRIX = re.compile(r"W_|weight|proj|^E$|^U$")
NO_MATRIX = re.compile(r"bias|norm|ln_?\d?\b|\bb_")
LEAST_ALIKE = 2  # matrices of a layer, from which on layers are known to be built alike
LAYER = re.compile(r"(.*?)(\d+)(.*)")


@dataclass(frozen=True)
class RunFinding(Result):
    """One cause, or one symptom that no cause explains."""

    name: str
    severity: str  # a Severity
    step: int  # since when
    value: float
    limit: float  # the value is unusual beyond this
    unit: str  # what the value is
    evidence: str
    remedy: str
    reason: str  # for the limit
    where: str = ""  # block, layer or steps

    def sentence(self) -> str:
        """Evidence and remedy."""
        return f"{self.evidence}; {self.remedy}" if self.remedy else self.evidence


# ------------------------------------------------------------------------------------------------ the rules

Check = Callable[[RunHistory, "Rule"], RunFinding | None]


class Rule(NamedTuple):
    """A check: what it compares with which limit, why, and which findings it explains."""

    name: str
    limit: float
    unit: str
    reason: str
    check: Check
    explains: tuple[str, ...] = ()


def _finding(rule: Rule, severity: Severity, step: Any, value: float, **words: str) -> RunFinding:
    return RunFinding(
        name=rule.name,
        severity=severity,
        step=int(step),
        value=float(value),
        limit=rule.limit,
        unit=rule.unit,
        reason=rule.reason,
        **words,  # pyright: ignore[reportArgumentType]
    )


PULLED = 0.8  # of the limit, right behind a sign in the loss: at most 0.72 in healthy runs


class Crossing(NamedTuple):
    """Measurements at which the sharpness is above the optimizer's threshold."""

    first: int  # index of the measurement
    step: int  # of the training loop
    above: np.ndarray  # indices
    most: float  # of the ratio
    usual: float  # median of the ratio above the limit
    signs: Trouble
    after: list[int]  # steps of signs in the loss at or after the first


def _crossing(history: RunHistory, limit: float) -> Crossing | None:
    """Find the measurements beyond the limit; None if they say no more than one noisy number does.

    It counts if the loss shows a sign after it, or if at least half of the measurements from there on are
    beyond the limit, and at least two. Right after a sign a smaller ratio is enough: an instability
    pulls the sharpness down again (Damian, Nichani and Lee 2023).
    """
    ratio, signs = history.ratio(), history.trouble
    bounds = np.full(len(ratio), limit)
    for step in (s for s in [*signs.spikes, signs.diverged] if s is not None):
        bounds[np.flatnonzero(history.at >= step)[:1]] = PULLED * limit
    with np.errstate(invalid="ignore"):
        above = np.flatnonzero(ratio > bounds)
    if not len(above):
        return None
    begin = history.at[max(above[0] - 1, 0)]
    after = [s for s in [*signs.spikes, signs.diverged] if s is not None and s >= begin]
    later = np.isfinite(ratio[above[0] :]).sum()
    if not after and (len(above) < 2 or 2 * len(above) < later):
        return None
    most, usual = float(np.nanmax(ratio)), float(np.median(ratio[above]))
    return Crossing(int(above[0]), int(history.at[above[0]]), above, most, usual, signs, after)


def _has_warmup(history: RunHistory) -> bool:
    """Return True if the learning rate rises in the first part of the run."""
    lr = history.column("lr")
    lr = lr[np.isfinite(lr)]
    return bool(len(lr) > 1 and lr[0] < 0.9 * lr.max())


def _is_early(history: RunHistory, crossing: Crossing) -> bool:
    begin = float(history.at[0])
    first = min([float(history.at[crossing.first]), *map(float, crossing.after)])
    return first - begin <= max(FOLLOWS * history.num_steps, history.at[min(2, len(history.at) - 1)] - begin)


def learning_rate(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The sharpness is above the optimizer's threshold."""
    crossing = _crossing(history, rule.limit)
    if crossing is None or _lacks_warmup(history, crossing):
        return None
    return _rate_finding(history, rule, crossing, f"{_lower(crossing.usual)}{_or_warm_up(history, crossing)}")


def no_warmup(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The same, of an adaptive optimizer at its full rate from the first step on."""
    crossing = _crossing(history, rule.limit)
    if crossing is None or not _lacks_warmup(history, crossing):
        return None
    steps = warmup_steps(history)
    remedy = f"warm the rate up over about {steps} steps, or {_lower(crossing.usual)}"
    return _rate_finding(history, rule, crossing, remedy, "the rate is at its full value from the start; ")


def _lacks_warmup(history: RunHistory, crossing: Crossing) -> bool:
    adaptive = np.isnan(history.column("threshold")).all()
    return bool(adaptive and not _has_warmup(history) and _is_early(history, crossing))


def _rate_finding(
    history: RunHistory, rule: Rule, crossing: Crossing, remedy: str, front: str = ""
) -> RunFinding:
    step = history.at[crossing.first]
    if crossing.most > rule.limit:
        evidence = (
            f"{front}η · sharpness crossed the optimizer's threshold at step {step:.0f} and reached "
            f"{rounded(crossing.most, 2)} times it"
        )
    else:
        evidence = (
            f"{front}η · sharpness was at {rounded(crossing.most, 2)} of its threshold at step {step:.0f}"
        )
    if crossing.after:
        evidence += f"; {_signs(crossing)}"
    else:
        count = int(np.isfinite(history.ratio()[crossing.first :]).sum())
        evidence += f", above it at {len(crossing.above)} of {plural(count, 'measurement')} since"
    where, share = sharpest(history, crossing.above)
    if where:
        evidence += f"; block {where} carries {100 * share:.0f} % of it"
    severity: Severity = "fault" if crossing.after or crossing.most > 2 * rule.limit else "warning"
    return _finding(rule, severity, step, crossing.most, evidence=evidence, remedy=remedy, where=where)


def _signs(crossing: Crossing) -> str:
    """`loss spikes at 52 and 71 follow, and the loss diverges from step 80`."""
    spikes = [s for s in crossing.after if s != crossing.signs.diverged]
    parts = []
    if spikes:
        kind = "loss spikes" if len(spikes) > 1 else "a loss spike"
        parts.append(f"{kind} at {_listed(spikes)} {_follow(crossing, spikes)}")
    if crossing.signs.diverged in crossing.after:
        parts.append(f"the loss diverges from step {crossing.signs.diverged}")
    return ", and ".join(parts)


def _follow(crossing: Crossing, spikes: Sequence[int]) -> str:
    """`follow`, or that the first came between two measurements."""
    if spikes[0] < crossing.step:
        return "came just before this measurement" if len(spikes) == 1 else "came with it"
    return "follow" if len(spikes) > 1 else "follows"


def _listed(steps: Sequence[int]) -> str:
    """`52, 71 and 90`; of many the first few."""
    words = [str(step) for step in steps[:MOST_STEPS]]
    if len(steps) > MOST_STEPS:
        return f"{', '.join(words)} and {len(steps) - MOST_STEPS} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _lower(times: float) -> str:
    """Advice for a ratio: the next half, or of large ones two digits, and at most 100."""
    factor = math.ceil(2 * times) / 2 if times < 10 else float(f"{times:.1g}")
    return f"lower the learning rate about {min(max(factor, 1.5), 100.0):g}×"


def _or_warm_up(history: RunHistory, crossing: Crossing) -> str:
    if _has_warmup(history) or not _is_early(history, crossing):
        return ""
    return f", or warm up over {warmup_steps(history)} steps"


def warmup_steps(history: RunHistory) -> int:
    """2 / (1 − β₂), the warm-up that needs no tuning (Ma and Yarats 2021); a tenth of the run without β₂."""
    formed, at = history.column("preconditioner_formed"), history.at
    known = np.flatnonzero((formed > 0) & (formed < 0.999))
    if len(known):
        i = int(known[0])
        beta2 = (1 - formed[i]) ** (1 / (at[i] - at[0] + 1))
        if 0 < beta2 < 1:
            steps = 2 / (1 - beta2)
            return int(float(f"{steps:.2g}"))
    return max(int(float(f"{history.num_steps / 10:.1g}")), 10)


def sharpest(history: RunHistory, rows: Sequence[int] | np.ndarray) -> tuple[str, float]:
    """The block with the largest share of the top eigenvector, mean over measurements, and that share."""
    for column in ("sharpness_share", "lambda_max_share"):
        shares = [history.blocks_at(float(history.at[i]), column) for i in rows]
        shares = [one for one in shares if one]
        if shares:
            names = dict.fromkeys(name for one in shares for name in one)
            means = {name: float(np.mean([one.get(name, 0.0) for one in shares])) for name in names}
            top = max(means, key=lambda name: means[name])
            return top, means[top]
    return "", math.nan


def initialization(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The first loss is far above that of equal probabilities."""
    uniform, loss = history.column("uniform_loss"), history.column("loss")
    train = history.losses[1]
    if not len(loss) or history.at[0] > FIRST_STEPS or not np.isfinite(uniform).any():
        return None
    first = float(train[0]) if len(history.steps) and len(train) else float(loss[0])
    value = first / float(uniform[np.isfinite(uniform)][0])
    if not value > rule.limit:
        return None
    return _finding(
        rule,
        "fault",
        history.at[0],
        value,
        evidence=f"the first loss is {rounded(first, 3)}, {rounded(value, 2)} times log V: the untrained "
        "model is confident, and wrong",
        remedy="make the initial weights smaller (a standard deviation of 0.02, or 1/√width), the "
        "unembedding first",
    )


def scaled_layer(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The weights of one layer are unlike those of the same role in the other layers, at the start."""
    if not len(history.at):
        return None
    norms = history.blocks_at(float(history.at[0]), "weight_norm")
    factors: dict[str, dict[str, float]] = {}  # by layer, by block
    roles: dict[tuple[str, str], dict[str, str]] = {}
    for name in norms:
        if match := LAYER.fullmatch(name):
            roles.setdefault((match[1], match[3]), {})[match[2]] = name
    alike = [members for members in roles.values() if len(members) >= 3]
    matrices = [members for members in alike if _is_matrix(next(iter(members.values())))]
    if len(matrices) < LEAST_ALIKE:  # a stack of single layers, which may well be of other shapes
        return None
    for members in matrices:
        for layer, name in members.items():
            others = float(np.median([norms[other] for other in members.values() if other != name]))
            if others > 0 and norms[name] > 0:
                factors.setdefault(layer, {})[name] = norms[name] / others
    extreme = {layer: max(own.values(), key=lambda f: abs(math.log(f))) for layer, own in factors.items()}
    if not extreme:
        return None
    layer = max(extreme, key=lambda name: abs(math.log(extreme[name])))
    value = math.exp(abs(math.log(extreme[layer])))
    if not value > rule.limit:
        return None
    own = factors[layer]
    unlike = [name for name, factor in own.items() if math.exp(abs(math.log(factor))) > rule.limit]
    kind = "larger" if extreme[layer] > 1 else "smaller"
    return _finding(
        rule,
        "fault",
        history.at[0],
        value,
        evidence=f"the weights of {_names(unlike)} begin {rounded(value, 2)} times {kind} than those of the "
        "same role in the other layers",
        remedy="initialize this layer like the others",
        where=unlike[0],
    )


def _is_matrix(name: str) -> bool:
    """Return True if a block is a weight matrix, by its name."""
    return bool(MATRIX.search(name)) and not NO_MATRIX.search(name)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


SATURATED = 0.2  # entropy of the lowest head, over that of equal weights
ALONE = 3.0  # times that queries and keys grow more than the other matrices


def attention_logits(history: RunHistory, rule: Rule) -> RunFinding | None:
    """Scores of attention grow until a head looks at single keys."""
    logit, entropy = history.column("attention_logit_max"), history.column("attention_entropy_min")
    with np.errstate(invalid="ignore"):
        above = np.flatnonzero((logit > rule.limit) & ((entropy < SATURATED) | np.isnan(entropy)))
    if not len(above):
        return None
    i, first = int(above[0]), int(np.flatnonzero(np.isfinite(logit))[0])
    growth = _inner_growth(history, i)
    course = "is" if i == first else f"went from {rounded(logit[first], 2)} to"
    evidence = (
        f"the largest attention score {course} {rounded(logit[i], 2)} at step {history.at[i]:.0f}, and the "
        f"lowest head's entropy {rounded(entropy[i], 2)} of that of equal weights"
    )
    alone = growth > ALONE
    if alone:
        evidence += (
            f"; weights of queries and keys grew {rounded(growth, 2)} times more than the other matrices"
        )
    return _finding(
        rule,
        "fault" if alone or not np.isfinite(growth) else "warning",
        history.at[i],
        logit[i],
        evidence=evidence,
        remedy="normalize queries and keys, cap the scores, or lower the learning rate of W_Q and W_K",
    )


INNER = re.compile(r"(^|[._])(W_Q|W_K|W_QK|q_proj|k_proj)($|[._])")


def _inner_growth(history: RunHistory, i: int) -> float:
    """Growth of the norms of queries and keys over that of the other matrices; nan if these are not known."""
    before = history.blocks_at(float(history.at[0]), "weight_norm")
    now = history.blocks_at(float(history.at[i]), "weight_norm")
    both = [name for name in now if before.get(name, 0.0) > 0 and _is_matrix(name)]
    inner = [now[name] / before[name] for name in both if INNER.search(name)]
    others = [now[name] / before[name] for name in both if not INNER.search(name)]
    if not inner or not others:
        return math.nan
    return float(np.median(inner) / np.median(others))


def moment_precision(history: RunHistory, rule: Rule) -> RunFinding | None:
    """Second moments are kept in a precision in which they cannot decay."""
    resolution = history.column("moment_resolution")
    with np.errstate(invalid="ignore"):
        below = np.flatnonzero(resolution < rule.limit)
    if not len(below):
        return None
    value = float(resolution[below[0]])
    return _finding(
        rule,
        "warning",
        history.at[below[0]],
        value,
        evidence=f"the optimizer keeps its mean of squared gradients in half precision: 1 − β₂ is "
        f"{rounded(value, 2)} of a rounding unit, so that a large value never decays",
        remedy="keep the optimizer's state in float32, or take a smaller β₂",
    )


def bad_batch(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The training loss jumps for a few steps while the curvature allows the steps."""
    at, loss = history.losses
    if not len(history.steps.get("step", ())):
        return None
    signs, ratio = history.trouble, history.ratio()
    if signs.diverged is not None:
        return None
    innocent: list[tuple[int, float]] = []
    for step, size in zip(signs.spikes, signs.sizes, strict=True):
        before = ratio[(history.at <= step) & np.isfinite(ratio)]
        with np.errstate(invalid="ignore"):
            stable = not len(before) or before[-1] < 1
        if stable and size > rule.limit and _comes_back(at, loss, step):
            innocent.append((step, size))
    if not innocent:
        return None
    steps = [step for step, _ in innocent]
    known = ratio[(history.at <= steps[0]) & np.isfinite(ratio)]
    below = f", although η · sharpness was at {rounded(known[-1], 2)} of its threshold" if len(known) else ""
    i = int(np.flatnonzero(at == steps[0])[0])
    return _finding(
        rule,
        "warning",
        steps[0],
        innocent[0][1],
        evidence=f"the training loss jumped to {rounded(float(loss[i]), 3)} at step {_listed(steps)}, "
        f"{rounded(innocent[0][1], 2)} times its usual spread, and came back{below}",
        remedy="look at the batches of these steps (other text, wrong labels); clip the gradients",
        where=f"step {_listed(steps)}",
    )


def _comes_back(at: np.ndarray, loss: np.ndarray, step: int) -> bool:
    """Return True if the loss soon returns to its earlier size, or if later steps are not known yet."""
    before = np.median(loss[(at < step) & (at >= step - WINDOW)])
    later = loss[(at > step) & (at <= step + BACK)]
    return bool(not len(later) or np.min(later) < HIGHER * before)


RISEN = 1.1  # probe loss over its lowest


def weight_growth(history: RunHistory, rule: Rule) -> RunFinding | None:
    """Weights grow while the loss on the probe batches rises."""
    norm, loss = history.column("weight_norm"), history.column("loss")
    known = np.isfinite(norm) & np.isfinite(loss)
    if known.sum() < 4:
        return None
    growth, low = norm / norm[known][0], np.fmin.accumulate(loss)
    at, train = history.losses
    with np.errstate(invalid="ignore"):
        above = np.flatnonzero(known & (growth > rule.limit) & (loss > RISEN * low))
    above = [i for i in above if _falls(at, train, history.at[i])]
    if len(above) < 2:
        return None
    i = above[0]
    return _finding(
        rule,
        "warning",
        history.at[i],
        float(growth[above[-1]]),
        evidence=f"weights grew {rounded(float(growth[above[-1]]), 2)} times and still grow, while the loss "
        f"on the probe batches rose from {rounded(float(low[above[-1]]), 3)} to "
        f"{rounded(float(loss[above[-1]]), 3)}",
        remedy="more weight decay, more data, or stop earlier",
    )


def _falls(at: np.ndarray, loss: np.ndarray, step: float) -> bool:
    """Return True if the training loss at a step is near its lowest so far, or is not known."""
    known = loss[(at <= step) & np.isfinite(loss)]
    if len(known) < 3 * WINDOW:
        return True
    means = np.convolve(known, np.ones(10) / 10, mode="valid")
    return bool(means[-1] < RISEN * means.min())


def label_noise(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The training loss stays above the loss on the probe batches."""
    at, loss = history.losses
    if not len(history.steps.get("step", ())) or len(history.at) < 4 or history.trouble.diverged is not None:
        return None
    uniform = history.column("uniform_loss")
    gaps = []
    for step, probe, scale in zip(history.at, history.column("loss"), uniform, strict=True):
        near = loss[(np.abs(at - step) <= WINDOW / 2) & np.isfinite(loss)]
        gaps.append((np.median(near) - probe) / scale if len(near) else np.nan)
    late = np.array(gaps)[len(gaps) // 3 :]
    late = late[np.isfinite(late)]
    with np.errstate(invalid="ignore"):
        above = np.flatnonzero(np.array(gaps) > rule.limit)
    if len(late) < 2 or not (late[-2:] > rule.limit).all() or not len(above):
        return None
    return _finding(
        rule,
        "warning",
        history.at[above[0]],
        float(late[-1]),
        evidence="the training loss stays above the loss on the probe batches, by "
        f"{100 * float(late[-1]):.0f} % of log V at step {history.at[-1]:.0f}: training batches hold what "
        "the probe batches do not",
        remedy="look for wrong labels, or data unlike the probe batches; dropout makes a part of it too",
    )


def unexplained(history: RunHistory, rule: Rule) -> RunFinding | None:
    """The loss diverges or jumps."""
    signs = history.trouble
    if signs.first is None:
        return None
    signs_seen = [f"spikes at {_listed(signs.spikes)}"] if signs.spikes else []
    signs_seen += [f"diverges from step {signs.diverged}"] if signs.diverged is not None else []
    ratio = history.ratio()
    known = np.flatnonzero(np.isfinite(ratio))
    curvature = (
        f"; η · sharpness was at most {rounded(float(np.nanmax(ratio)), 2)} of its threshold"
        if len(known)
        else "; no sharpness was measured before"
    )
    return _finding(
        rule,
        "warning",
        signs.first,
        max([*signs.sizes, math.nan if signs.diverged is None else math.inf], default=math.nan),
        evidence=f"the loss {' and '.join(signs_seen)}{curvature}",
        remedy="measure more often around these steps (a larger budget, a smaller every), and look at the "
        "batches and at the precision of the numbers",
    )


SYMPTOMS = ("unexplained",)
RULES: tuple[Rule, ...] = (
    Rule(
        "learning_rate", 1.0, "η · sharpness over the threshold",
        "steps on the quadratic diverge above 1; one measurement alone counts only if the loss follows",
        learning_rate, explains=("unexplained", "attention_logits"),
    ),
    Rule(
        "no_warmup", 1.0, "η · sharpness over the threshold",
        "steps on the quadratic diverge above 1, here in the first quarter of a run whose rate does not rise",
        no_warmup, explains=("unexplained", "attention_logits"),
    ),
    Rule(
        "initialization", 1.2, "first loss over log V",
        "healthy models begin within 5 % of log V",
        initialization, explains=("unexplained", "learning_rate", "no_warmup", "attention_logits"),
    ),
    Rule(
        "scaled_layer", 3.0, "norm of a matrix over that of the same role in other layers",
        "layers of a healthy model begin with equal norms, up to the spread of random numbers",
        scaled_layer, explains=("unexplained", "learning_rate", "no_warmup", "attention_logits"),
    ),
    Rule(
        "attention_logits", 50.0, "largest attention score",
        "a softmax over scores that far apart is one key alone; Dehghani et al. 2023 see divergence there",
        attention_logits, explains=("unexplained",),
    ),
    Rule(
        "moment_precision", 1.0, "1 − β₂ over the rounding unit",
        "below 1 a product with β₂ rounds to the number itself", moment_precision,
    ),
    Rule(
        "bad_batch", SPIKE, "height of a spike over the usual spread",
        "beyond what batches make in healthy runs: at most 3.9", bad_batch, explains=("unexplained",),
    ),
    Rule(
        "weight_growth", 1.5, "norm of the weights over the first",
        "with a rising probe loss: overfitting that weight decay would slow",
        weight_growth, explains=("learning_rate", "no_warmup"),
    ),
    Rule(
        "label_noise", 0.08, "training loss minus probe loss, over log V",
        "in healthy runs without dropout the training loss is at or below the probe loss", label_noise,
    ),
    Rule(
        "unexplained", SPIKE, "height of a spike over the usual spread",
        "beyond what batches make in healthy runs", unexplained,
    ),
)  # fmt: skip
"""The checks, in the order in which causes explain others."""


def diagnose_run(history: RunHistory) -> list[RunFinding]:
    """All findings, worst first. What another finding explains is a note, and a symptom then is left out."""
    findings = [finding for rule in RULES if (finding := rule.check(history, rule)) is not None]
    since = {finding.name: finding.step for finding in findings}
    alone = {f.name for f in findings if f.name == "attention_logits" and f.severity == "fault"}
    kept: list[RunFinding] = []
    for finding in findings:
        causes = [rule.name for rule in RULES if finding.name in rule.explains and rule.name in since]
        causes = [name for name in causes if name != "weight_growth" or since[name] < finding.step]
        if alone and finding.name in ("learning_rate", "no_warmup"):
            causes = ["attention_logits"]  # queries and keys grew alone: their sharpness follows
        elif finding.name in alone:
            causes = [name for name in causes if name in ("initialization", "scaled_layer")]
        if not causes:
            kept.append(finding)
        elif finding.name not in SYMPTOMS:
            evidence = f"{finding.evidence}; this probably follows from {causes[0]}"
            kept.append(replace(finding, severity="note", evidence=evidence))
    return sorted(kept, key=lambda finding: ORDER.index(finding.severity))


def verdict(findings: Sequence[RunFinding]) -> str:
    """Count the findings: `1 fault, 2 notes`."""
    counts = {kind: sum(f.severity == kind for f in findings) for kind in ORDER}
    return ", ".join(plural(count, kind) for kind, count in counts.items() if count) or "nothing unusual"
