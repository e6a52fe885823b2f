"""docs/petrov2025.md: every class of the article has its line, every name exists, the snippets run."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import curvescope as cs
import petrov_results
from curvescope.papers import all_claims, figures_of
from curvescope.studies import STUDIES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "petrov2025.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
OF_THE_PAPER = {"propagation", "full_hessian", "landscape", "bounds", "scaling"}
THERE = (
    "LayerNormHessian",
    "verify_layernorm_hessian",
    "FFNHessian",
    "TransformerBlockHessian",
    "SelfAttentionHessian",
    "analyze_attention_curvature",
    "CurvaturePropagationAnalyzer",
    "ConvergenceDiagnostics",
    "ScalingLawAnalyzer",
    "TaylorExpansionAnalyzer",
    "TransformerHessianAnalyzer",
    "CurvatureAwareOptimizer",
    "demo_hessian_analysis",
    "SimpleTransformer",
    "visualize_hessian_spectrum",
    "visualize_curvature_flow",
    "plot_scaling_law_predictions",
)


def exists(name: str) -> bool:
    """Whether a dotted name below `curvescope` can be imported."""
    parts = ["curvescope", *name.split(".")]
    for cut in range(len(parts), 1, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_every_class_of_the_article_has_its_line():
    named = " ".join(row[0] for row in ROWS)
    for name in THERE:
        assert name in named, name
    assert all(len(row) == 3 for row in ROWS)
    assert len(ROWS) >= 28


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip(" `")[:40] for row in ROWS])
def test_the_names_here_exist(row: list[str]):
    check(row[2])


def test_the_names_of_the_rest_of_the_page_exist():
    prose = re.sub(r"```.*?```", "", PAGE.partition("## Open questions")[2], flags=re.S)
    check(prose)


def check(text: str) -> None:
    """Dotted names, names of `cs` and studies in backticks."""
    for name in re.findall(r"`([^`]+)`", text):
        if name.startswith("curvescope run "):
            assert name.split()[2] in OF_THE_PAPER | set(STUDIES), name
        elif found := re.match(r"cs\.(\w+)", name):
            assert hasattr(cs, found[1]), name
        elif re.fullmatch(r"[a-z_]+(\.\w+)+", name) and not name.startswith("ln"):
            assert exists(name), name


def test_the_named_tests_are_defined_in_the_linked_files():
    prose = PAGE.partition("## Open questions")[2]
    links = re.findall(r"\]\((\.\./tests/[^)]+)\)", prose)
    assert links
    defined = {
        node.name
        for link in links
        for node in ast.walk(ast.parse((ROOT / "docs" / link).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    for name in re.findall(r"`(test_\w+)`", prose):
        assert name in defined, name


def test_the_snippets_run():
    space: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
            exec(compile(code, "docs/petrov2025.md", "exec"), space)
    H, g = space["H"], space["g"]
    assert space["curvature"] == pytest.approx(float(g @ (H @ g) / (g @ g)), rel=0.01)
    problem, u, theta = space["problem"], space["u"], space["theta"]
    assert sum(space["parts"].values()) == pytest.approx(space["second"], rel=1e-9)
    assert {"L0.attention", "ln_f", "rest", "GGN"} <= set(space["parts"])
    t = 0.1 * space["radius"]
    rest = (
        problem.at(theta + t * u).loss_value()
        - problem.loss_value()
        - t * float(g @ u)
        - t**2 / 2 * space["second"]
    )
    assert rest == pytest.approx(t**3 / 6 * space["third"], rel=0.1)


def test_the_table_of_claims_is_what_the_stored_results_give():
    """Claims, numbers and verdicts are computed here; `petrov_results.py` writes page and results."""
    results = petrov_results.load()
    found = petrov_results.TABLE.findall(PAGE)
    assert found == [petrov_results.markdown(results)]
    claims = all_claims.table(results)
    assert f"\n{all_claims.tally(claims)}.\n" in PAGE
    assert len(claims) >= 77
    assert set(claims["figure"]) == set(figures_of("petrov2025"))
    assert set(claims["whose"]) == {"paper", "article", "ours"}
    assert not claims.duplicated(["figure", "claim"]).any()


def test_verdicts_on_mnist_are_those_of_the_stored_results():
    assert petrov_results.mnist_markdown() in PAGE


def test_the_page_is_in_the_navigation():
    assert "petrov2025.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
