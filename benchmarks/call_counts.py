"""Count the files, functions and Python calls of the package in a first and in a later product.

python benchmarks/call_counts.py [--tokens 1024]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import curvescope as cs

PACKAGE = str(Path(cs.__file__).parent)


def count(work: Callable[[], object]) -> dict[str, int]:
    """Count the package's files and functions that `work` enters, and their calls."""
    calls: Counter[tuple[str, str, int]] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename, code.co_qualname, code.co_firstlineno] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    files = {file for file, _, _ in calls}
    return {"files": len(files), "functions": len(calls), "calls": calls.total()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    tokens = parser.parse_args().tokens
    model = cs.load("tiny-gpt")
    H = cs.Hessian(cs.Problem(model, cs.text_data("sample", model, tokens=tokens, seq_len=min(tokens, 128))))
    v = torch.randn(H.shape[0], dtype=H.dtype, generator=torch.Generator().manual_seed(0))
    print("first product:", count(lambda: H @ v))
    for _ in range(4):  # recorded, compared and replayed
        H @ v
    print("later product:", count(lambda: H @ v))


if __name__ == "__main__":
    main()
