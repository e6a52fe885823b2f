"""Tables and figures of the study `trajectory`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.runs.study_result import Tables
from curvescope.viz import style
from curvescope.viz import trajectory as viz

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from curvescope.studies.trajectory.study import Trajectory

TARGET = {  # curves that have a target, with their labels
    "angle_target": "angle to the target (°)",
    "cos_target": "cosine to the target",
    "logp_target": "log p(target)",
    "log_rank": "log rank of the target",
    "top1": "share with the target first",
    "gain": "log p(target) − log p(current)",
}
MOTION = {
    "norm": "|x|",
    "angle_start": "angle to the start (°)",
    "angle_end": "angle to the end (°)",
    "step": "step (°)",
    "length": "path so far (°)",
    "turn": "turn (°)",
    "entropy": "entropy (nats)",
    "kl_end": "KL(end ‖ point)",
}


def tables(result: Trajectory) -> Tables:
    """Target and motion by depth, changes, shares, and the tokens of the prompt."""
    m = result.means
    return {
        "target": _table_target(result),
        "motion": _table_motion(result),
        "change": _change(result),
        "shares": (
            {"block": m.blocks}
            | {_words(name): c.mean for name, c in m.shares.items()}
            | {f"± {_words(name)}": c.stderr for name, c in m.shares.items()}
        ),
        "tokens": _tokens(result),
    }


def _table_target(result: Trajectory) -> dict[str, object]:
    columns: dict[str, object] = {"point": result.means.names}
    for name, words in TARGET.items():
        if name in result.means.curves:
            c = result.means.curves[name]
            columns |= {words: c.mean, f"± {words}": c.stderr, f"shuffled {words}": c.shuffled}
    return columns


def _table_motion(result: Trajectory) -> dict[str, object]:
    columns: dict[str, object] = {"point": result.means.names}
    for name, words in MOTION.items():
        if name in result.means.curves:
            c = result.means.curves[name]
            columns |= {words: c.mean, f"± {words}": c.stderr}
    return columns


def _change(result: Trajectory) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {
            "quantity": words,
            "change minus shuffled": c.change,
            "±": c.change_stderr,
            "share of tokens with a decrease": c.falling,
        }
        for name, words in TARGET.items()
        if (c := result.means.curves.get(name)) is not None
    ]
    return pd.DataFrame(rows)


def _tokens(result: Trajectory) -> dict[str, object]:
    p = result.path
    columns: dict[str, object] = {"token": [repr(t) for t in p.tokens], "id": p.ids}
    for name, words in (("angle_target", "angle to the target"), ("logp_target", "log p(target)")):
        if name in p.values:
            columns |= {f"{words}, input": p.values[name][:, 0], f"{words}, output": p.values[name][:, -1]}
    if "log_rank" in p.values:
        columns["rank, output"] = np.exp(p.values["log_rank"][:, -1])
    if result.reads:
        columns |= {"reads": [repr(row[-1]) for row in result.reads], "p": p.reads_p[:, -1]}
    return columns | {"path (°)": p.values["length"][:, -1]}


def _words(name: str) -> str:
    known = {
        "attention_share": "attention's share",
        "attention_norm": "|attention|",
        "ff_norm": "|feed-forward|",
    }
    return known.get(name, name)


NUM_BLOCKS = 6  # of the grid: the first three and the last three


def figures(result: Trajectory) -> dict[str, Figure]:
    """Return the figures by name: curves, the map of the prompt, the grid and the single path."""
    panels = {"target": _figure_target(result)} if "angle_target" in result.means.curves else {}
    panels["motion"] = _figure_motion(result)
    if "angle_target" in result.path.values:
        panels["prompt"] = _prompt(result)
    panels["grid"] = _grid(result)
    p = result.path
    panels["path"] = viz.single_path(
        result.words_xyz,
        result.states_xyz[result.token],
        p.tokens,
        token=result.token,
        names=p.names,
        target=result.target,
    )
    return panels


def _figure_target(result: Trajectory) -> Figure:
    m = result.means
    names = [n for n in ("angle_target", "logp_target", "log_rank", "gain", "top1") if n in m.curves]
    figure, axes = style.panels(len(names), 3, (4.3, 2.9))
    for ax, name in zip(axes, names, strict=True):
        c = m.curves[name]
        title = "rank of the target (geometric mean)" if name == "log_rank" else TARGET[name]
        assert c.shuffled is not None
        assert c.shuffled_stderr is not None
        curve, base = {m.target: (c.mean, c.stderr)}, (c.shuffled, c.shuffled_stderr)
        viz.depth_curve(ax, m.names, curve, baseline=base, title=title, log_y=name == "log_rank")
    return figure


def _figure_motion(result: Trajectory) -> Figure:
    m = result.means
    panels = {
        "norm of the state |x|": {"|x|": "norm"},
        "angle (°)": {"to the start": "angle_start", "to the end": "angle_end"},
        "step and turn at each point (°)": {"step": "step", "turn": "turn"},
        "path so far (°)": {"path": "length"},
        "logit lens (nats)": {"entropy": "entropy", "KL(end ‖ point)": "kl_end"},
    }
    shown = {t: {k: v for k, v in lines.items() if v in m.curves} for t, lines in panels.items()}
    shown = {title: lines for title, lines in shown.items() if lines}
    figure, axes = style.panels(len(shown) + 1, 3, (4.2, 2.9))
    for ax, (title, lines) in zip(axes, shown.items(), strict=False):
        curves = {k: (m.curves[v].mean, m.curves[v].stderr) for k, v in lines.items()}
        viz.depth_curve(ax, m.names, curves, title=title)
    share = m.shares["attention_share"]
    viz.share_bars(axes[-1], m.blocks, share.mean, share.stderr)
    return figure


def _prompt(result: Trajectory) -> Figure:
    p = result.path
    size = (max(6.0, 1.8 + 0.72 * len(p.tokens)), 1.6 + 0.3 * len(p.names))
    figure, ax = style.subplots(figsize=size)
    values, words = p.values["angle_target"], result.reads or None
    viz.token_map(ax, p.tokens, p.names, values, label=f"angle to {result.means.target} (°)", words=words)
    return figure


def _grid(result: Trajectory) -> Figure:
    """Draw the input, and the states after the first three and the last three blocks."""
    p = result.path
    L = (len(p.names) - 1) // 2
    depths = list(range(1, L + 1))
    if L > NUM_BLOCKS:
        depths = [*depths[: NUM_BLOCKS // 2], *depths[-(NUM_BLOCKS // 2) :]]
    panels = {"input": 0} | {f"after block {depth - 1}": depth for depth in depths}
    states = result.states_xyz[:, ::2]
    assert np.isfinite(states).all()
    return viz.path_grid(result.words_xyz, states, p.tokens, token=result.token, panels=panels)
