"""docs/coming_from.md: twelve scripts of at most eight lines, run, their numbers against dense matrices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs

PAGE = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text(encoding="utf-8")
SETUP, *SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
MOST_LINES = 8


@pytest.fixture(scope="module")
def names() -> dict[Any, Any]:
    """What the scripts have left, one dictionary for all and one for each."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    space: dict[Any, Any] = {}
    with torch.random.fork_rng(devices=[]):
        for number, code in enumerate([SETUP, *SCRIPTS]):
            exec(compile(code, f"docs/coming_from.md, script {number}", "exec"), space)
            space[number] = {name: value for name, value in space.items() if isinstance(name, str)}
    return space


ROWS = re.findall(r"^\| `.*` \| `((?:cs|H|G)\..*?)` \|$", PAGE, flags=re.M)


@pytest.mark.parametrize("call", ROWS)
def test_a_row_of_the_tables_is_a_call_that_works(call: str, names: dict[Any, Any]):
    space = names | {"H": cs.Hessian(names["problem"]), "G": cs.GGN(names["problem"])}
    assert eval(call, space) is not None


def test_all_rows_of_the_tables_are_found():
    assert len(ROWS) == sum(line.startswith("| `") for line in PAGE.splitlines()) == 27


def dense(A: cs.LinearOperator) -> Tensor:
    return A.to_dense()


def test_there_are_twelve_of_at_most_eight_lines():
    headings = re.findall(r"^\*\*(\d+)\. .*?\*\* *\(`", PAGE, flags=re.M)
    assert headings == [str(i) for i in range(1, 13)]
    assert len(SCRIPTS) == 12
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in SCRIPTS) <= MOST_LINES


def test_eigenvalues_are_those_of_the_matrix(names: dict[Any, Any]):
    values = torch.linalg.eigvalsh(dense(names[1]["H"]))
    ends = torch.as_tensor(names[1]["ends"].values)
    torch.testing.assert_close(ends, torch.cat([values[:2], values[-2:]]), atol=1e-8, rtol=1e-6)
    assert names[1]["ends"].converged
    assert names[1]["blocks"].converged
    assert set(names[1]["product"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_estimates_cover_the_truth(names: dict[Any, Any]):
    G = dense(names[2]["H_o"])
    assert names[2]["trace"].low <= float(G.trace()) <= names[2]["trace"].high
    assert names[2]["norm"].value == pytest.approx(float(G.norm()), rel=0.3)
    assert len(names[2]["diagonal"].values) == len(G)


def test_steps_solve_their_systems(names: dict[Any, Any]):
    g, eye = names[3]["problem"].gradient(), torch.eye(names[3]["K"].shape[0], dtype=torch.float64)
    residual = (dense(names[2]["H_o"]) + 1e-2 * eye) @ names[3]["step"] + g
    assert float(residual.norm()) < 1e-6 * float(g.norm())
    natural = torch.linalg.solve(dense(names[4]["K"]) + 1e-3 * eye, g)
    torch.testing.assert_close(names[4]["natural"], natural)
    assert not names[4]["K"].left_out


def test_density_has_the_trace_of_the_matrix(names: dict[Any, Any]):
    H = dense(names[5]["H"])
    assert names[5]["trace"].low <= float(H.trace()) <= names[5]["trace"].high
    torch.testing.assert_close(
        torch.as_tensor(names[5]["top"].values[0]).abs(), torch.linalg.eigvalsh(H).abs().max()
    )
    assert names[6]["finer"].width == names[6]["density"].width / 2


def test_a_loss_of_model_and_batch_is_that_of_the_whole(names: dict[Any, Any]):
    whole = names[7]["loss_fn"](names["net"], (names["x"], names["y"])).detach()
    assert names[7]["problem7"].loss_value() == pytest.approx(float(whole))
    assert names[7]["top"].vectors.shape == (21, 3)


def test_labels_are_shifted_once(names: dict[Any, Any]):
    own = nn.functional.cross_entropy(names["lm"](names["ids"][:, :-1]).transpose(1, 2), names["ids"][:, 1:])
    assert names[8]["problem8"].loss_value() == pytest.approx(float(own.detach()))
    assert any("shift" in note for note in names[8]["problem8"].notes)


def test_diagonals_and_gradients_are_exact(names: dict[Any, Any]):
    G, H = dense(names[2]["H_o"]), dense(names[1]["H"])
    torch.testing.assert_close(torch.as_tensor(names[9]["exact"].values), G.diagonal())
    torch.testing.assert_close(torch.as_tensor(names[9]["hessian_diagonal"].values), H.diagonal())
    assert names[9]["weights"].shape == (6, 4)
    torch.testing.assert_close(names[10]["gradients"].mean(0), names["problem"].gradient())
    torch.testing.assert_close(torch.as_tensor(names[10]["norms"]), names[10]["gradients"].norm(dim=1))
    assert float(names[10]["traces"].mean()) == pytest.approx(float(G.trace()))


def test_the_evidence_is_that_of_the_dense_posterior(names: dict[Any, Any]):
    found, problem = names[11], names["problem"]
    P = problem.num_terms * dense(cs.GGN(problem, "2.*")) + 0.5 * torch.eye(21, dtype=torch.float64)
    prior = 0.5 * torch.eye(21, dtype=torch.float64)
    theta = torch.cat([p.detach().flatten() for p in names["net"][2].parameters()])
    fit = -nn.functional.cross_entropy(names["net"](names["x"]), names["y"], reduction="sum").detach()
    own = fit - 0.5 * (theta @ prior @ theta + torch.logdet(P) - torch.logdet(prior))
    torch.testing.assert_close(found["evidence"].double(), own, rtol=1e-5, atol=0)
    own = found["J"] @ torch.linalg.solve(P, found["J"].T)
    torch.testing.assert_close(found["covariance"], own, rtol=1e-5, atol=1e-7)


def test_influence_is_that_of_the_dense_inverse(names: dict[Any, Any]):
    found, eye = names[12], torch.eye(names[12]["E"].shape[0], dtype=torch.float64)
    E = dense(found["E"])
    damped = E + 0.1 * E.trace() / len(E) * eye
    train, query = (cs.per_sample(p).gradients() for p in (names["problem"], found["query"]))
    torch.testing.assert_close(found["scores"], query @ torch.linalg.solve(damped, train.T))
    assert found["scores"].shape == (3, 32)
