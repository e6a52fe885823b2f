"""The user's module is what is measured: not copied, shared by operators and threads, left as it was."""

from __future__ import annotations

import logging
import signal
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from selection import some

pytestmark = pytest.mark.filterwarnings("ignore:dropout is switched off")


def drawn(make, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def small_net() -> nn.Module:
    parts = [q for _ in range(4) for q in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout())]
    return drawn(lambda: nn.Sequential(*parts).double())


def data(n: int = 16) -> tuple[Tensor, Tensor]:
    return drawn(lambda: (torch.randn(n, 8).double(), torch.randint(0, 8, (n,))), 1)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("shared", some([True, False], 1), ids=["one problem", "two problems"])
def test_operators_of_one_module_in_threads(shared):
    net = small_net()
    problems = [cs.Problem(net, data())] * 2 if shared else [cs.Problem(net, data()) for _ in range(2)]
    kinds = (cs.Hessian, cs.GGN, partial(cs.Hessian, engine="autograd"), partial(cs.Hessian, checkpoint=True))
    v = torch.randn(problems[0].space().size, dtype=torch.float64)
    truths = [kind(problems[0]) @ v for kind in kinds[:3]]
    truths.append(truths[0])
    identity = [id(p) for p in net.parameters()]
    errors: list[float] = []

    def work(number: int) -> None:
        for turn in range(6):
            problem = problems[turn % 2]
            errors.append(relative(kinds[number](problem) @ v, truths[number]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(kinds))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(errors) == 24
    assert max(errors) < 1e-12
    assert [id(p) for p in net.parameters()] == identity
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert all(m.training for m in net.modules())
    assert not any("forward" in vars(m) for m in net.modules())


def test_a_jacobian_takes_turns_too():
    net = small_net()
    P = cs.Problem(net, data())
    J, H = cs.Jacobian(P), cs.Hessian(P)
    v = torch.randn(H.shape[0], dtype=torch.float64)
    wanted = J @ v, H @ v
    found: list[float] = []

    def work(operator, want) -> None:
        found.extend(relative(operator @ v, want) for _ in range(10))

    threads = [threading.Thread(target=work, args=pair) for pair in zip((J, H), wanted, strict=True)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert max(found) < 1e-12


def test_operators_interleaved():
    net = small_net()
    P, Q = cs.Problem(net, data()), cs.Problem(net, data(9))
    operators = [cs.Hessian(P), cs.GGN(Q), cs.FunctionalHessian(P), cs.Hessian(Q).block("0.weight")]
    vectors = [torch.randn(A.shape[1], dtype=torch.float64) for A in operators]
    first = [A @ v for A, v in zip(operators, vectors, strict=True)]
    for _ in range(4):
        for A, v, want in zip(operators, vectors, first, strict=True):
            assert relative(A @ v, want) < 1e-13


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_product_leaves_the_module_as_it_was():
    net = small_net()
    interrupt = [False]

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if interrupt[0]:
            signal.raise_signal(signal.SIGINT)

    net[9].register_forward_pre_hook(hook)
    P = cs.Problem(net, data())
    H = cs.Hessian(P)
    v = torch.randn(H.shape[0], dtype=torch.float64)
    want = H @ v
    parameters = list(net.parameters())
    interrupt[0] = True
    for operator in (H, cs.Hessian(P), cs.Hessian(P, checkpoint=True), cs.GGN(P)):
        with pytest.raises(KeyboardInterrupt):
            operator @ v
        assert all(m.training for m in net.modules())
        assert not any("forward" in vars(m) for m in net.modules())
        assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    interrupt[0] = False
    assert relative(H @ v, want) < 1e-13


class Tied(nn.Module):
    """The embedding's weight, used once more without being a parameter of the head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(11, 5), nn.Linear(5, 5)
        weight = self.e.weight
        self.head = {
            "partial": partial(F.linear, weight=weight),
            "closure": lambda h: h @ weight.T,
            "list": [weight],
            "view": weight.T,
        }[how]

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(self.e(x)).tanh()
        if isinstance(self.head, list):
            return h @ self.head[0].T
        return h @ self.head if isinstance(self.head, Tensor) else self.head(h)


@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("how", ["partial", "closure", "list"])
def test_parameters_held_by_reference_are_followed(how, engine):
    m = drawn(lambda: Tied(how).double())
    x, y = drawn(lambda: torch.randint(0, 11, (2, 3, 4)), 2)
    loss = F.cross_entropy(m(x).flatten(0, 1), y.flatten())
    names, parameters = zip(*m.named_parameters(), strict=True)
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    P = cs.Problem(m, (x, y))
    gradient = P.space().gather({n: g.detach() for n, g in zip(names, first, strict=True)})
    assert relative(P.gradient(), gradient) < 1e-12
    v = torch.randn(P.space().size, dtype=torch.float64)
    tree = P.space().scatter(v)
    inner = sum((g * tree[n]).sum() for n, g in zip(names, first, strict=True))
    want = P.space().gather(dict(zip(names, torch.autograd.grad(inner, parameters), strict=True)))
    for _ in range(4):
        assert relative(cs.Hessian(P, engine=engine) @ v, want) < 1e-12
    with pytest.raises(cs.UsageError, match="in a closure or a list"):
        P.at({"e.weight": m.e.weight.detach() * 2}).gradient()


class Random(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.l, self.how = nn.Linear(4, 4), how
        self.source = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).tanh()
        if self.how == "dropout":
            return x + F.dropout(h, 0.5, True)
        return x + h * torch.rand(h.shape[-1], generator=self.source).to(h)


@pytest.mark.parametrize("seed", some(range(5), 1))
@pytest.mark.parametrize("how", ["dropout", "own generator"])
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"engine": "autograd"}])
def test_random_modules_are_refused_with_the_layers_name(how, options, seed):
    net = drawn(lambda: nn.Sequential(nn.Linear(4, 4), Random(how), Random(how)).double(), seed)
    x, y = drawn(lambda: (torch.randn(8, 4).double(), torch.randint(0, 4, (8,))), seed)
    H = cs.Hessian(cs.Problem(net, (x, y)), **options)
    v = torch.ones(H.shape[0], dtype=torch.float64)

    def twice() -> None:  # one's own generator is seen when the module is asked again
        H @ v
        H @ v

    with pytest.raises(cs.CurvescopeError, match=r"^[12] gives different outputs"):
        twice()


def test_a_problem_at_other_parameters():
    net = small_net()
    P = cs.Problem(net, data())
    H = cs.Hessian(P)
    v = torch.randn(H.shape[0], dtype=torch.float64)
    H @ v
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    moved = {name: p + 0.1 for name, p in own.items()}
    there, value, gradient = cs.Hessian(P.at(moved)) @ v, P.at(moved).loss_value(), P.at(moved).gradient()
    vector = P.space().gather(moved)
    assert relative(cs.Hessian(P.at(vector)) @ v, there) < 1e-13
    assert all(torch.equal(p, own[name]) for name, p in net.named_parameters())
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(moved[name])
    assert relative(H @ v, there) < 1e-12
    assert P.loss_value() == pytest.approx(value, rel=1e-13)
    assert relative(P.gradient(), gradient) < 1e-12
    with pytest.raises(cs.CurvescopeError, match="no such parameter"):
        P.at({"nobody": v})


def test_a_point_that_is_written_to_is_followed():
    net = small_net()
    P = cs.Problem(net, data())
    point = {name: p.detach().clone() for name, p in net.named_parameters()}
    H = cs.Hessian(P.at(point))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    for p in point.values():
        p.mul_(1.1)
    assert relative(H @ v, cs.Hessian(P.at(point), engine="autograd") @ v) < 1e-12


def test_an_algorithm_is_of_one_matrix():
    net = small_net()
    H = cs.Hessian(cs.Problem(net, data()))
    v = torch.randn(H.shape[0], dtype=torch.float64)

    def moving() -> None:
        with H.frozen():
            H @ v
            net[0].weight.data.mul_(2)

    with pytest.raises(cs.CurvescopeError, match="changed"):
        moving()
    fresh = cs.Hessian(H.problem, engine="autograd") @ v
    assert relative(H @ v, fresh) < 1e-12
    with (2.0 * H + H).frozen():
        assert relative((2.0 * H + H) @ v, 3 * fresh) < 1e-12


def test_another_structure_is_one_sentence():
    net = small_net()
    H = cs.Hessian(cs.Problem(net, data()))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    H @ v
    net[0] = nn.Linear(8, 8, bias=False).double()
    with pytest.raises(cs.CurvescopeError, match="other names or shapes"):
        H @ v


def test_float64_products_of_linear_layers_are_recorded(caplog):
    net = drawn(
        lambda: nn.Sequential(
            nn.Embedding(50, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 50)
        ).double()
    )
    x, y = drawn(lambda: torch.randint(0, 50, (2, 4, 32)))
    P = cs.Problem(net, (x, y))
    with caplog.at_level(logging.INFO, logger="curvescope"):
        for kind in (cs.Hessian, cs.GGN):
            A = kind(P)
            v = torch.randn(A.shape[0], dtype=torch.float64)
            first = A @ v
            for _ in range(4):
                assert torch.equal(A @ v, first)
    assert "not recorded" not in caplog.text


def test_a_transformers_module_with_fused_attention_is_followed():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, intermediate_size=12)
    m = drawn(lambda: transformers.LlamaForCausalLM(config))
    assert m.config._attn_implementation == "sdpa"
    x, y = drawn(lambda: torch.randint(0, 17, (2, 3, 6)))
    P = cs.Problem(m, (x, y))
    H = cs.Hessian(P)
    v = torch.randn(H.shape[0])
    H @ v
    optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(m(x).logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
    assert P.model.module is m
    assert m.config._attn_implementation == "sdpa"
    value = F.cross_entropy(m.eval()(x).logits.flatten(0, 1), y.flatten()).item()
    assert P.loss_value() == pytest.approx(value, rel=1e-5)
    assert relative(H @ v, cs.Hessian(P, engine="autograd") @ v) < 1e-4


def test_adapters_that_are_switched_off_are_noticed():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    shape = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = drawn(
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=12))
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    m = drawn(lambda: peft.get_peft_model(base, lora)).double()
    x, y = drawn(lambda: torch.randint(0, 17, (2, 3, 6)))
    P = cs.Problem(m, (x, y), params="*")  # PEFT freezes adapters that are switched off
    H = cs.Hessian(P)
    v = torch.randn(H.shape[0], dtype=torch.float64)
    before = H @ v
    with m.disable_adapter():
        within = H @ v
        assert relative(within, cs.Hessian(P, engine="autograd") @ v) < 1e-9
    assert relative(within, before) > 1e-3
    assert relative(H @ v, before) < 1e-12
    for part in m.modules():
        if hasattr(part, "scaling") and isinstance(part.scaling, dict):
            part.scaling["default"] *= 3
    after = H @ v
    assert relative(after, before) > 1e-3
    assert relative(after, cs.Hessian(cs.Problem(m, (x, y), params="*"), engine="autograd") @ v) < 1e-9
