"""The figures of the study `trajectory`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.trajectory.tables import TARGET
from curvescope.viz import trajectory as viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.trajectory.study import Trajectory

NUM_BLOCKS = 6  # of the grid: the first three and the last three


def draw(result: Trajectory) -> dict[str, Figure]:
    """Curves, the map of the prompt, the grid and the single path, by name."""
    found = {"target": _target(result)} if "angle_target" in result.means.curves else {}
    found["motion"] = _motion(result)
    if "angle_target" in result.path.values:
        found["prompt"] = _prompt(result)
    found["grid"] = _grid(result)
    p = result.path
    found["path"] = viz.single_path(
        result.words_xyz,
        result.states_xyz[result.token],
        p.tokens,
        token=result.token,
        names=p.names,
        target=result.target,
    )
    return found


def _target(result: Trajectory) -> Figure:
    import matplotlib.pyplot as plt

    m = result.means
    names = [n for n in ("angle_target", "logp_target", "log_rank", "gain", "top1") if n in m.curves]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    size = (4.2 * columns + 0.3, 2.9 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        c = m.curves[name]
        title = "rank of the target (geometric mean)" if name == "log_rank" else TARGET[name]
        assert c.shuffled is not None
        assert c.shuffled_stderr is not None
        base = (c.shuffled, c.shuffled_stderr)
        viz.depth_curve(
            ax, m.names, {m.target: (c.mean, c.stderr)}, baseline=base, title=title, log_y=name == "log_rank"
        )
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    return figure


def _motion(result: Trajectory) -> Figure:
    import matplotlib.pyplot as plt

    m = result.means
    panels = {
        "size of the state |x|": {"|x|": "norm"},
        "angle (°)": {"to the start": "angle_start", "to the end": "angle_end"},
        "step and turn at each point (°)": {"step": "step", "turn": "turn"},
        "path so far (°)": {"path": "length"},
        "what the lens reads (nats)": {"entropy": "entropy", "KL(end ‖ here)": "kl_end"},
    }
    shown = {t: {k: v for k, v in lines.items() if v in m.curves} for t, lines in panels.items()}
    shown = {title: lines for title, lines in shown.items() if lines}
    figure, axes = plt.subplots(2, 3, figsize=(12.6, 5.8), layout="constrained")
    for ax, (title, lines) in zip(axes.flat, shown.items(), strict=False):
        curves = {k: (m.curves[v].mean, m.curves[v].stderr) for k, v in lines.items()}
        viz.depth_curve(ax, m.names, curves, title=title)
    share = m.shares["attention_share"]
    viz.share_bars(axes.flat[len(shown)], m.blocks, share.mean, share.stderr)
    for ax in axes.flat[len(shown) + 1 :]:
        ax.set_visible(False)
    return figure


def _prompt(result: Trajectory) -> Figure:
    import matplotlib.pyplot as plt

    p = result.path
    size = (max(6.0, 1.8 + 0.72 * len(p.tokens)), 1.6 + 0.3 * len(p.names))
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    values, words = p.values["angle_target"], result.reads or None
    viz.token_map(ax, p.tokens, p.names, values, label=f"angle to {result.means.target} (°)", words=words)
    return figure


def _grid(result: Trajectory) -> Figure:
    """The input, and after the first three and the last three blocks."""
    p = result.path
    L = (len(p.names) - 1) // 2
    depths = list(range(1, L + 1))
    if L > NUM_BLOCKS:
        depths = [*depths[: NUM_BLOCKS // 2], *depths[-(NUM_BLOCKS // 2) :]]
    panels = {"input": 0} | {f"after block {depth - 1}": depth for depth in depths}
    states = result.states_xyz[:, ::2]
    assert np.isfinite(states).all()
    return viz.path_grid(result.words_xyz, states, p.tokens, token=result.token, panels=panels)
