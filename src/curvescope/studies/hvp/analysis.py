"""Models for timing products, the contenders, and exact products as references.

A contender is a function of a module and one batch (x, y) of tokens and targets; it returns a `Product`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvescope.core.errors import MissingExtra
from curvescope.core.hessian_terms import MATRICES, MatrixName
from curvescope.core.operator import LinearOperator
from curvescope.core.requirements import how_to_install
from curvescope.data.batches import Batch, Batches
from curvescope.models.load import load
from curvescope.models.running.keep_float64 import exact as kept_double
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem

SHAPES = {  # layers, width, heads, vocabulary
    "small": (4, 128, 4, 1024),
    "124M": (12, 768, 12, 50257),
    "350M": (24, 1024, 16, 50257),
    "1.5B": (48, 1600, 25, 50257),
    "8B": (32, 4096, 32, 128256),
}
LLAMA_8B: dict[str, Any] = {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
"""Settings of Llama 3 8B besides these four numbers."""


class GPT2Block(nn.Module):
    """Layer of a typical GPT-2 implementation: fused attention, tanh GELU, pre-norm."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with tied embeddings and learned positions: tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, layers: int, d: int, heads: int, vocabulary: int, positions: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(positions, d)
        self.h = nn.ModuleList(GPT2Block(d, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Encoder(nn.Module):
    """Language model from `nn.TransformerEncoder`, pre-norm, GELU: tokens (B, T) to logits."""

    def __init__(self, layers: int, d: int, heads: int, vocabulary: int, positions: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(positions, d)
        options: dict[str, Any] = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
        }
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, **options)
        self.h = nn.TransformerEncoder(layer, layers, nn.LayerNorm(d), enable_nested_tensor=False)
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T, tokens.device, self.wte.weight.dtype)
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        return self.lm_head(self.h(x, mask, is_causal=True))


OWN = {"gpt2": GPT2, "encoder": Encoder}


def build(
    kind: str,
    size: str,
    positions: int,
    *,
    layers: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build a module in eval mode that takes tokens and returns logits, or an object with logits.

    Its weights are random and created on the device: in float32, for 8B in bfloat16.

    Args:
        layers: number of layers, if fewer than the size has; the rest of the shape is the same.
    """
    depth, d, heads, vocabulary = SHAPES[size]
    depth = depth if layers is None else min(layers, depth)
    with _made(torch.bfloat16 if size == "8B" else torch.float32, torch.device(device), seed):
        if kind in OWN:
            return OWN[kind](depth, d, heads, vocabulary, positions).eval()
        shape: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": d,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "max_position_embeddings": positions,
        }
        return _of_transformers(kind, shape, LLAMA_8B if size == "8B" else {}).eval()


def _of_transformers(kind: str, shape: dict[str, Any], more: dict[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(
            f"the model {kind!r} needs the package transformers", hint=how_to_install("transformers")
        ) from error
    d = shape["hidden_size"]
    if kind == "llama":
        shape |= {"intermediate_size": 8 * d // 3, "tie_word_embeddings": True} | more
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    config = transformers.GPTNeoXConfig(**shape, intermediate_size=4 * d, tie_word_embeddings=True)
    return transformers.GPTNeoXForCausalLM(config)


@contextmanager
def _made(dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[None]:
    """Create modules inside this context on the device, with this precision and seed."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits as a tensor."""
    found = module(tokens) if isinstance(module, tuple(OWN.values())) else module(tokens, use_cache=False)
    return getattr(found, "logits", found)


@contextmanager
def plain_attention(module: Any) -> Iterator[None]:
    """Use attention that PyTorch can differentiate twice inside this context."""
    config = getattr(module, "config", None)
    before = getattr(config, "_attn_implementation", None)
    fast = torch.backends.mha.get_fastpath_enabled()  # the fast path of torch's layers has no derivatives
    torch.backends.mha.set_fastpath_enabled(False)
    if config is not None:
        config._attn_implementation = "eager"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if config is not None:
            config._attn_implementation = before


def _initialize(part: nn.Module) -> None:
    if isinstance(part, nn.Linear | nn.Embedding):
        nn.init.normal_(part.weight, std=0.02)
    if isinstance(part, nn.Linear) and part.bias is not None:
        nn.init.zeros_(part.bias)


# ------------------------------------------------------------------------------------------------- contenders

Tree = Sequence[Tensor]
"""Tensors in the order of `module.parameters()`."""


@dataclass(frozen=True)
class ContenderProduct:
    """Product of a contender: `enter` converts a tree, `times` is timed, `leave` converts back."""

    enter: Callable[[Tree], Any]
    times: Callable[[Any], Any]
    leave: Callable[[Any], Tree]
    # Operator of this package, for repeated products and several columns.
    operator: LinearOperator | None = None


Maker = Callable[[nn.Module, Tensor, Tensor], ContenderProduct]


def ours(kind: str, engine: str, *, checkpoint: bool = False) -> Maker:
    """Contender with an operator of this package."""
    operator = OPERATORS[kind]

    def make(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
        found = operator(_problem(module, x, y), engine=engine, checkpoint=checkpoint)  # pyright: ignore[reportArgumentType]
        names = [name for name, _ in module.named_parameters()]

        def leave(Hv: Tensor) -> Tree:
            tree = found.space.scatter(Hv)
            return [tree[name] for name in names]

        def enter(tree: Tree) -> Tensor:
            return found.space.gather(dict(zip(names, tree, strict=True)))

        return ContenderProduct(enter, found.__matmul__, leave, found)

    return make


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
    """Unit of time: one gradient, with PyTorch's fused attention."""
    return ContenderProduct(lambda tree: tree, lambda tree: _gradient(module, x, y), lambda tree: tree)


def own_gradient(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
    """Unit of time if an eager gradient does not fit: `Problem.gradient`, always in float32."""
    problem = _problem(module, x, y)
    return ContenderProduct(lambda tree: tree, lambda tree: problem.gradient(), lambda tree: tree)


def double_backward(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
    """Plain double backward that rebuilds the graph for every product."""

    def times(v: Tree) -> Tree:
        with plain_attention(module):
            first = _gradient(module, x, y, create_graph=True)
            return torch.autograd.grad(first, list(module.parameters()), list(v))

    return ContenderProduct(lambda tree: tree, times, lambda tree: tree)


def compiled_jvp(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
    """Forward over reverse, torch.compile of jvp(grad(loss))."""
    names = [name for name, _ in module.named_parameters()]
    primals = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        z = torch.func.functional_call(module, parameters, (x,))
        return F.cross_entropy(getattr(z, "logits", z).flatten(0, 1), y.flatten())

    torch.compiler.reset()

    @torch.compile(dynamic=False)
    def product(tangents: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.jvp(torch.func.grad(loss), (primals,), (tangents,))[1]  # pyright: ignore[reportReturnType]

    def times(tangents: dict[str, Tensor]) -> dict[str, Tensor]:
        with plain_attention(module):
            return product(tangents)

    return ContenderProduct(
        lambda tree: dict(zip(names, tree, strict=True)), times, lambda found: [found[n] for n in names]
    )


class _Flat(nn.Module):
    """Wrapper with logits (terms, classes) for torch's losses, and twice differentiable attention."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with plain_attention(self.module):
            return logits(self.module, x).flatten(0, 1)


def eigenthings(kind: str) -> Maker:
    """Contender hessian-eigenthings."""

    def make(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
        peer, loss, data = import_module("hessian_eigenthings"), nn.CrossEntropyLoss(), [(x, y.flatten())]
        if kind == "hessian":
            found = peer.HessianOperator(_Flat(module), data, peer.supervised_loss(loss))
        else:
            parts = peer.supervised_forward, peer.supervised_loss_of_output(loss)
            found = peer.GGNOperator(_Flat(module), data, *parts)
        return _flat_product(module, found.matvec)

    return make


def curvlinops(kind: str) -> Maker:
    """Contender curvlinops."""

    def make(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
        peer, model = import_module("curvlinops"), _Flat(module)
        operator = getattr(peer, {"hessian": "HessianLinearOperator", "ggn": "GGNLinearOperator"}[kind])
        data, params = [(x, y.flatten())], list(model.parameters())
        found = operator(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False)
        return _flat_product(module, found.__matmul__)

    return make


def compiled(maker: Maker) -> Maker:
    """Contender whose product goes through torch.compile."""

    def make(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
        product = maker(module, x, y)
        # One-time work before compilation.
        product.times(product.enter([torch.zeros_like(p) for p in module.parameters()]))
        torch.compiler.reset()  # shapes of earlier contenders would make these dynamic
        return replace(product, times=torch.compile(product.times, dynamic=False))

    return make


def pyhessian(module: nn.Module, x: Tensor, y: Tensor) -> ContenderProduct:
    """Contender PyHessian."""
    peer = import_module("pyhessian")
    model = _Flat(copy.deepcopy(module))  # PyHessian leaves gradients with graphs in the module
    found = peer.hessian(
        model, nn.CrossEntropyLoss(), dataloader=[(x, y.flatten())], cuda=x.device.type == "cuda"
    )

    def times(v: Tree) -> Tree:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns about those gradients
            return found.dataloader_hv_product(list(v))[1]

    return ContenderProduct(lambda tree: tree, times, lambda tree: tree)


CONTENDERS: dict[str, Maker] = {
    "gradient": gradient,
    "hessian": ours("hessian", "fast"),
    "ggn": ours("ggn", "fast"),
    "functional": ours("functional", "fast"),
    "hessian checkpoint": ours("hessian", "fast", checkpoint=True),
    "ggn checkpoint": ours("ggn", "fast", checkpoint=True),
    "hessian autograd": ours("hessian", "autograd"),
    "ggn autograd": ours("ggn", "autograd"),
    "double backward": double_backward,
    "compiled jvp(grad)": compiled_jvp,
    "eigenthings": eigenthings("hessian"),
    "eigenthings ggn": eigenthings("ggn"),
    "curvlinops": curvlinops("hessian"),
    "curvlinops ggn": curvlinops("ggn"),
    "curvlinops compiled": compiled(curvlinops("hessian")),
    "curvlinops ggn compiled": compiled(curvlinops("ggn")),
    "PyHessian": pyhessian,
}
CHECKPOINTED = ("hessian checkpoint", "ggn checkpoint")
PACKAGES = {
    "eigenthings": "hessian_eigenthings",
    "eigenthings ggn": "hessian_eigenthings",
    "curvlinops": "curvlinops",
    "curvlinops ggn": "curvlinops",
    "curvlinops compiled": "curvlinops",
    "curvlinops ggn compiled": "curvlinops",
    "PyHessian": "pyhessian",
}
"""Package that a contender needs besides this one."""


def _problem(module: nn.Module, x: Tensor, y: Tensor) -> Problem:
    return Problem(load(module), Batches([Batch(x, y)]))


def _gradient(module: nn.Module, x: Tensor, y: Tensor, *, create_graph: bool = False) -> Tree:
    loss = F.cross_entropy(logits(module, x).flatten(0, 1), y.flatten())
    return torch.autograd.grad(loss, list(module.parameters()), create_graph=create_graph)


def _flat_product(module: nn.Module, times: Callable[[Tensor], Tensor]) -> ContenderProduct:
    shapes = [p.shape for p in module.parameters()]

    def leave(Hv: Tensor) -> Tree:
        parts = Hv.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return ContenderProduct(lambda tree: torch.cat([t.flatten() for t in tree]), times, leave)


# ------------------------------------------------------------------------------------------------------ exact

FEW = (2, 128)  # sequences and positions of the small batch


def matrix_of(contender: str) -> MatrixName:
    """Matrix whose product a contender computes."""
    for matrix in MATRICES:
        if matrix in contender:
            return matrix
    return "hessian"


def few(x: Tensor) -> Tensor:
    """Cut a batch to the small batch."""
    sequences, positions = FEW
    return x[:sequences, :positions]


def distance(name: str, module: nn.Module, x: Tensor, y: Tensor, v: Tree, want: Tree) -> float:
    """Relative error ‖Hv − exact‖ / ‖exact‖ of a contender, computed one parameter at a time."""
    product = CONTENDERS[name](module, x, y)
    found = product.leave(product.times(product.enter(v)))
    gap = norm = 0.0
    for ours, exact in zip(found, want, strict=True):
        exact = exact.to(ours.device)
        gap += float((ours.detach().double() - exact).square().sum())
        norm += float(exact.square().sum())
    return math.sqrt(gap / norm)


def exact_product(matrix: MatrixName, module: nn.Module, x: Tensor, y: Tensor, v: Tree) -> Tree:
    """Compute H v, GGN v or their difference in float64, on the CPU."""
    module = copy.deepcopy(module).double()
    params, v = list(module.parameters()), [t.double() for t in v]
    with plain_attention(module):
        with kept_double(torch.float64, casts=True):
            z = logits(module, x)
        if matrix == "hessian":
            return _on_cpu(_hessian(z, y, params, v))
        G = _on_cpu(_ggn(z, y, params, v, again=matrix == "functional"))
        if matrix == "ggn":
            return G
        return [a - b for a, b in zip(_on_cpu(_hessian(z, y, params, v)), G, strict=True)]


def _hessian(z: Tensor, y: Tensor, params: Tree, v: Tree) -> Tree:
    """Product ∇⟨∇L, v⟩."""
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    first = torch.autograd.grad(loss, params, create_graph=True)
    return torch.autograd.grad(first, params, v)


def _ggn(z: Tensor, y: Tensor, params: Tree, v: Tree, *, again: bool) -> Tree:
    """Product Jᵀ B J v, with J v as the derivative of Jᵀ u in u; `again` keeps the graph of z."""
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, params, u, create_graph=True)
    (Jv,) = torch.autograd.grad(pulled, u, v)
    del pulled
    leaf = z.detach().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, 1), y.flatten())
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (BJv,) = torch.autograd.grad(slope, leaf, Jv)
    return torch.autograd.grad(z, params, BJv, retain_graph=again)


def _on_cpu(tree: Tree) -> Tree:
    return [t.cpu() for t in tree]
