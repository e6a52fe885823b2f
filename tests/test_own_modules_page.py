"""docs/own_modules.md: its code runs, block after block, and gives what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = (Path(__file__).parent.parent / "docs" / "own_modules.md").read_text(encoding="utf-8")


def test_the_examples_run():
    space: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
            exec(compile(code, "docs/own_modules.md", "exec"), space)
            if "roles" not in space:
                assert {"L1.W_Q", "L1.W_2"} <= set(space["model"].blocks)
                assert "L0 is 1.layers.0" in space["model"].notes[-1]
    assert list(space["model"].blocks)[:4] == ["E", "L0.W_Q", "L0.W_K", "L0.W_V"]
    names = {key: [block.name for block in space[key].space()] for key in ("problem", "everything", "last")}
    assert "0.weight" not in names["problem"]
    assert "80 of" in space["problem"].notes[-1]
    assert "0.weight" in names["everything"]
    assert names["last"][:2] == ["L0.ln2.g", "L1.W_Q"]
    assert space["head"].shape == (32, 32)
    assert float(space["head"].abs().max()) > 0
