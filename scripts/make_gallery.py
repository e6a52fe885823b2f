"""Measure the models of docs/gallery: a JSON file of numbers, a figure and the table of each page.

python scripts/make_gallery.py tiny-gpt vit mamba              # bundled, or made from a configuration
python scripts/make_gallery.py stories15M=FOLDER minilm=FOLDER
python scripts/make_gallery.py smollm2                         # its figure alone, from stored numbers

The script replaces only the text between `<!-- table -->` and `<!-- end of table -->` of a page.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Callable
from math import floor, log10
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
MARKED = re.compile(r"<!-- table -->\n.*?<!-- end of table -->", flags=re.S)
ROWS = {
    "parameters": "parameters",
    "terms": "terms of the loss",
    "loss": "loss",
    "lambda_max": "λ_max of H",
    "lambda_min": "λ_min of H",
    "ggn_lambda_max": "λ_max of the GGN",
    "trace": "trace of H",
    "ggn_trace": "trace of the GGN",
    "gap": "gap ‖H − H_o‖/‖H‖",
}


def table(result: dict[str, Any]) -> str:
    """Return the rows of a page: quantity, value, error and method."""
    lines = ["| | measured | ± | |", "|---|---|---|---|"]
    for name, words in ROWS.items():
        if name in result["numbers"]:
            value, error, how = result["numbers"][name]
            room = f"{float(f'{error:.2g}'):,g}" if error else ""
            lines.append(f"| {words} | {rounded(value, error)} | {room} | {how} |")
    return "\n".join(lines)


def rounded(value: float, error: float | None) -> str:
    """Format a number to the second digit of its error, with at most five digits; integers in full."""
    if isinstance(value, int):
        return f"{value:,}"
    if not error:
        return f"{value:.4g}"
    size = floor(log10(abs(value))) if value else 0
    digits = min(1 - floor(log10(error)), 4 - size)
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def marked(result: dict[str, Any]) -> str:
    """Return the table between its markers, with its method and date."""
    origin = result["made"]
    versions = f"curvescope {origin['curvescope']}, torch {origin['torch']}"
    numbers = f"[{result['name']}.json]({result['name']}.json)"
    when = f"{origin['date']} ({versions}, {origin['processor_seconds']} s)"
    line = f"Made by `{origin['command']}` on {when}; numbers: {numbers}."
    return f"<!-- table -->\n{table(result)}\n\n{line}\n<!-- end of table -->"


def measure(problem: Any, *, tol: float, num_probes: int, num_steps: int) -> dict[str, Any]:
    """Measure extreme eigenvalues, traces, gap, a density and the traces of all blocks."""
    import curvescope as cs

    H, G, R = cs.Hessian(problem), cs.GGN(problem), cs.FunctionalHessian(problem)
    ends, top = cs.eigsh(H, k=2, which="BE", tol=tol), cs.eigsh(G, k=1, which="LA", tol=tol)
    whole, missed = (cs.frobenius_norm(A, num_probes=num_probes) for A in (H, R))
    trace, blocks = cs.trace(H, num_probes=num_probes), cs.block_traces(G, num_probes=num_probes)
    gap = missed.value / whole.value
    error = gap * ((missed.stderr / missed.value) ** 2 + (whole.stderr / whole.value) ** 2) ** 0.5
    eigen, probes = "residual", f"standard error, {num_probes} probes"
    numbers = {
        "parameters": (int(problem.space().size), None, ""),
        "terms": (int(problem.num_terms), None, ""),
        "loss": (problem.loss_value(), None, ""),
        "lambda_max": (float(ends.values[-1]), float(ends.residuals[-1]), eigen),
        "lambda_min": (float(ends.values[0]), float(ends.residuals[0]), eigen),
        "ggn_lambda_max": (float(top.values[0]), float(top.residuals[0]), eigen),
        "trace": (trace.value, trace.stderr, probes),
        "ggn_trace": (blocks.total.value, blocks.total.stderr, probes),
        "gap": (gap, error, probes),
    }
    density = cs.spectral_density(H, num_probes=4, num_steps=num_steps)
    frame = blocks.to_frame().nlargest(12, "trace")
    return {
        "numbers": numbers,
        "converged": bool(ends.converged and top.converged),
        "blocks": {row.block: (row.trace, row.stderr) for row in frame.itertuples()},
        "density": curve(density),
    }


def curve(density: Any) -> dict[str, Any]:
    """Return 160 points of a density with their 95 % band, the outliers, and the kernel width."""
    import numpy as np

    ends = density.extremes
    room = 4 * density.width
    grid, middle, (low, high) = density.band(np.linspace(ends.min() - room, ends.max() + room, 160))
    columns = {"x": grid, "y": middle, "low": low, "high": high, "outliers": density.outliers().values}
    return {name: [float(f"{v:.4g}") for v in values] for name, values in columns.items()} | {
        "width": float(f"{density.width:.2g}")
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the figure of a page, in the common style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    from curvescope.viz import style

    with style.context():
        figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.1), layout="constrained")
        draw_density(left, result["density"])
        draw_blocks(right, result["blocks"])
        figure.savefig(path, dpi=200)  # seven inches are the width of a page
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def draw_density(ax: Any, curve: dict[str, Any]) -> None:
    """Draw the density of H with its band, and the outliers."""
    import numpy as np

    from curvescope.viz import spectrum

    x, y, low, high, outliers = (np.array(curve[key]) for key in ("x", "y", "low", "high", "outliers"))
    spectrum.density(ax, x, y, (low, high), nodes=outliers, log_y=True)
    ax.set_title(f"Density of H, kernel width {curve['width']:,g}")


def draw_blocks(ax: Any, blocks: dict[str, tuple[float, float]]) -> None:
    """Draw the twelve blocks with the largest trace of the GGN."""
    from curvescope.viz.style import BLUE

    names = list(blocks)[::-1]
    values, errors = zip(*(blocks[name] for name in names), strict=True)
    short = [name if len(name) < 16 else f"…{name[-28:].partition('.')[2]}" for name in names]
    ax.barh(short, values, xerr=errors, color=BLUE, error_kw={"ecolor": "0.3", "lw": 1})
    ax.set(title="The largest blocks", xlabel="trace of the GGN ± standard error")
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)


def draw_smollm2() -> None:
    """Draw the attention weight on the first token by head, from results of `benchmarks/sinks_smollm2.py`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd
    from matplotlib.colors import LinearSegmentedColormap
    from PIL import Image

    from curvescope.viz import style

    stored = DOCS.parent / "benchmarks" / "results" / "sinks-smollm2" / "heads.csv"
    mass = pd.read_csv(stored).pivot(index="head", columns="layer", values="sink_mass")
    path = DOCS / "images" / "gallery-smollm2.png"
    with style.context():
        figure, ax = plt.subplots(figsize=(7, 2.5), layout="constrained")
        colors = LinearSegmentedColormap.from_list("positive", style.SEQUENTIAL)
        image = ax.imshow(mass, cmap=colors, vmin=0, vmax=1, aspect="auto")
        figure.colorbar(image, ax=ax, label="mean weight")
        ax.grid(False)
        ax.set(xlabel="layer", ylabel="head", title="Weight on the first token", yticks=mass.index)
        figure.savefig(path, dpi=200)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def tiny_gpt(_: str) -> Any:
    import curvescope as cs

    model = cs.load("tiny-gpt")
    return cs.Problem(model, cs.text_data("sample", model, tokens=512, seq_len=64))


def stories(folder: str) -> Any:
    import curvescope as cs

    text = Path(__file__).parent / "gallery_story.txt"
    model = cs.load(folder)
    return cs.Problem(model, cs.text_data(text, model, tokens=128, seq_len=64))


def minilm(folder: str) -> Any:
    """Return the problem of a model without a head: states on masked inputs against those on full inputs."""
    import curvescope as cs

    model = cs.load(folder)
    text = Path(__file__).parent / "gallery_story.txt"
    return cs.Problem(model, cs.denoising_data(text, model, tokens=128, seq_len=64), loss="mse_mean")


def vit(_: str) -> Any:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    import curvescope as cs

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8,
        patch_size=2, num_channels=1, num_labels=10,
    )  # fmt: skip
    model = cs.load(ViTForImageClassification(config).eval())
    return cs.Problem(model, cs.image_data(model, 64))


def mamba(_: str) -> Any:
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    import curvescope as cs

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    model = MambaForCausalLM(config).eval()
    return cs.Problem(model, {"input_ids": ids, "labels": ids})


MODELS: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    "tiny-gpt": (tiny_gpt, {"tol": 1e-2, "num_probes": 16, "num_steps": 30}),
    "stories15M": (stories, {"tol": 5e-2, "num_probes": 4, "num_steps": 12}),
    "minilm": (minilm, {"tol": 5e-2, "num_probes": 4, "num_steps": 12}),
    "vit": (vit, {"tol": 1e-2, "num_probes": 32, "num_steps": 40}),
    "mamba": (mamba, {"tol": 1e-2, "num_probes": 32, "num_steps": 40}),
}


def make(name: str, folder: str) -> None:
    """Measure one model, write its JSON and figure, and the table into its page."""
    import torch

    import curvescope as cs

    build, effort = MODELS[name]
    start = time.process_time()
    result = measure(build(folder), **effort)
    given = f"{name}=FOLDER" if folder else name
    origin = {
        "command": f"python scripts/make_gallery.py {given}",
        "date": time.strftime("%Y-%m-%d"),
        "curvescope": cs.__version__,
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        "processor_seconds": round(time.process_time() - start),
    }
    result = {"name": name, "made": origin, **result}
    (DOCS / "gallery" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, DOCS / "images" / f"gallery-{name}.png")
    page = DOCS / "gallery" / f"{name}.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKED.sub(lambda _: marked(json.loads(json.dumps(result))), text), encoding="utf-8")
    print(name, json.dumps(result["numbers"]), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, _, folder = argument.partition("=")
        draw_smollm2() if name == "smollm2" else make(name, folder)
