"""The tables of the study `trajectory`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.trajectory.study import Trajectory

TARGET = {  # what has a target, with the words for it
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
    "kl_end": "KL(end ‖ here)",
}


def make(result: Trajectory) -> dict[str, pd.DataFrame]:
    """Target and motion along the depth, the changes, the shares, and the prompt's tokens."""
    import pandas as pd

    m = result.means
    return {
        "target": pd.DataFrame(_target(result)),
        "motion": pd.DataFrame(_motion(result)),
        "change": _change(result),
        "shares": pd.DataFrame(
            {"block": m.blocks}
            | {_words(name): c.mean for name, c in m.shares.items()}
            | {f"± {_words(name)}": c.stderr for name, c in m.shares.items()}
        ),
        "tokens": pd.DataFrame(_tokens(result)),
    }


def _target(result: Trajectory) -> dict[str, object]:
    found: dict[str, object] = {"point": result.means.names}
    for name, words in TARGET.items():
        if name in result.means.curves:
            c = result.means.curves[name]
            found |= {words: c.mean, f"± {words}": c.stderr, f"shuffled {words}": c.shuffled}
    return found


def _motion(result: Trajectory) -> dict[str, object]:
    found: dict[str, object] = {"point": result.means.names}
    for name, words in MOTION.items():
        if name in result.means.curves:
            c = result.means.curves[name]
            found |= {words: c.mean, f"± {words}": c.stderr}
    return found


def _change(result: Trajectory) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {
            "quantity": words,
            "change beyond shuffled": c.change,
            "±": c.change_stderr,
            "share of tokens where it falls": c.falling,
        }
        for name, words in TARGET.items()
        if (c := result.means.curves.get(name)) is not None
    ]
    return pd.DataFrame(rows)


def _tokens(result: Trajectory) -> dict[str, object]:
    p = result.path
    found: dict[str, object] = {"token": [repr(t) for t in p.tokens], "id": p.ids}
    for name, words in (("angle_target", "angle to the target"), ("logp_target", "log p(target)")):
        if name in p.values:
            found |= {f"{words}, input": p.values[name][:, 0], f"{words}, output": p.values[name][:, -1]}
    if "log_rank" in p.values:
        found["rank, output"] = np.exp(p.values["log_rank"][:, -1])
    if result.reads:
        found |= {"reads": [repr(row[-1]) for row in result.reads], "p": p.reads_p[:, -1]}
    return found | {"path (°)": p.values["length"][:, -1]}


def _words(name: str) -> str:
    known = {
        "attention_share": "attention's share",
        "attention_norm": "|attention|",
        "ff_norm": "|feed-forward|",
    }
    return known.get(name, name)
