"""A Transformer written out elementwise, its derivatives by autograd, and small cases of it."""

from dataclasses import dataclass, field

import torch
from torch.autograd.functional import hessian, jacobian

from curvescope.closed_form.network.block import Architecture
from curvescope.closed_form.network.stack import StackCurvature, stack_tape
from curvescope.closed_form.objectives import cross_entropy_objective, squared_error_objective
from curvescope.core.seeds import generator

B, T, D, HEADS, HIDDEN, VOCAB = 2, 3, 4, 2, 3, 3
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "identity": lambda h: h,
    "swiglu": torch.nn.functional.silu,
    "geglu": torch.nn.functional.gelu,
}


@dataclass(frozen=True)
class Case:
    """A small network: what it is, and which groups of parameters it has."""

    arch: Architecture
    blocks: int = 1
    loss: str = "cross_entropy"
    inputs: str = "tokens"
    biases: bool = True
    affine: bool = True
    extra: dict = field(default_factory=dict)
    seed: int = 0

    def parameters(self):
        source = generator(5, self.seed)

        def draw(*shape, scale=0.7):
            return scale * torch.randn(*shape, generator=source, dtype=torch.float64)

        params = {}
        if self.inputs == "tokens":
            params |= {"E": draw(VOCAB, D, scale=1.0), "P": draw(T + 1, D)}
        elif self.inputs == "embedded":
            params["E"] = draw(2, D)
        for i in range(self.blocks):
            params |= {f"L{i}.{role}": value for role, value in self.block(draw).items()}
        if self.arch.norm == "pre" and self.affine:
            params |= {"ln_f.g": 1 + draw(D), "ln_f.b": draw(D)}
        if not self.arch.tied and self.loss == "cross_entropy":
            params["U"] = draw(D, VOCAB)
        if self.extra.get("b_U"):
            params["b_U"] = draw(VOCAB)
        return params

    def block(self, draw):
        kv = self.extra.get("kv_heads", HEADS) * D // HEADS
        shapes = {"Q": (D, D), "K": (D, kv), "V": (D, kv), "O": (D, D)}
        gated = self.arch.activation in ("swiglu", "geglu")
        hidden = self.extra.get("hidden", HIDDEN)
        if hidden:
            shapes |= {"g": (D, hidden), "u": (D, hidden)} if gated else {"1": (D, hidden)}
            shapes["2"] = (hidden, D)
        found = {}
        for role, shape in shapes.items():
            found[f"W_{role}"] = draw(*shape)
            if self.biases and role not in "gu" and not (gated and role == "2"):
                found[f"b_{role}"] = draw(shape[1])
        if self.arch.norm != "none" and self.affine:
            for norm in ("ln1", "ln2") if hidden else ("ln1",):
                found[f"{norm}.g"] = 1 + draw(D)
                if self.arch.norm_kind == "layernorm":
                    found[f"{norm}.b"] = draw(D)
        return found

    def data(self):
        source = generator(6, self.seed)
        if self.inputs == "tokens":
            x = torch.randint(0, VOCAB, (B, T), generator=source)
        else:
            width = 2 if self.inputs == "embedded" else D
            x = torch.randn(B, T, width, generator=source, dtype=torch.float64)
        shape = (B,) if self.arch.pooled else (B, T)
        if self.loss == "cross_entropy":
            return x, torch.randint(0, VOCAB, shape, generator=source)
        return x, torch.randn(*shape, D, generator=source, dtype=torch.float64)


def norm(x, params, prefix, arch):
    if arch.norm_kind == "layernorm":
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    x = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + arch.norm_eps) ** 0.5
    x = x * params[f"{prefix}.g"] if f"{prefix}.g" in params else x
    return x + params[f"{prefix}.b"] if f"{prefix}.b" in params else x


def attention(x, params, arch):
    """Head by head, with plain loops."""
    k = params["W_Q"].shape[1] // arch.num_heads
    group = params["W_Q"].shape[1] // params["W_K"].shape[1]
    q, key, v = (x @ params[f"W_{r}"] + params.get(f"b_{r}", 0.0) for r in "QKV")
    seen = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
    heads = []
    for h in range(arch.num_heads):
        mine, shared = slice(h * k, (h + 1) * k), slice(h // group * k, (h // group + 1) * k)
        scores = q[..., mine] @ key[..., shared].transpose(1, 2) / k**0.5
        if arch.attention == "softmax":
            scores = scores.exp() * (seen if arch.causal else 1.0)
            A = scores / scores.sum(-1, keepdim=True)
        else:
            A = scores * (seen if arch.causal else 1.0)
        heads.append(A @ v[..., shared])
    y = torch.cat(heads, -1)
    y = y @ params["W_O"] if "W_O" in params else y
    return y + params.get("b_O", 0.0)


def feed_forward(x, params, arch):
    a = ACTIVATIONS[arch.activation]
    if "W_g" in params:
        z = a(x @ params["W_g"]) * (x @ params["W_u"])
    else:
        z = a(x @ params["W_1"] + params.get("b_1", 0.0))
    return z @ params["W_2"] + params.get("b_2", 0.0)


def model(params, inputs, arch, blocks):
    x = inputs
    if "E" in params:
        x = params["E"][inputs] if not inputs.is_floating_point() else inputs @ params["E"]
    x = x + params["P"][: x.shape[1]] if "P" in params else x
    for i in range(blocks):
        mine = {name[len(f"L{i}.") :]: p for name, p in params.items() if name.startswith(f"L{i}.")}
        parts = [(attention, "ln1", arch.residual_scale)]
        parts += [(feed_forward, "ln2", 1.0)] if "W_2" in mine else []
        for part, name, scale in parts:
            y = part(norm(x, mine, name, arch) if arch.norm == "pre" else x, mine, arch)
            x = scale * x + y if arch.residual else y
            x = norm(x, mine, name, arch) if arch.norm == "post" else x
    x = norm(x, params, "ln_f", arch) if arch.norm == "pre" else x
    x = x.mean(1) if arch.pooled else x
    if arch.tied:
        x = x @ params["E"].T
    elif "U" in params:
        x = x @ params["U"]
    return x + params.get("b_U", 0.0)


def loss_of(case, outputs, targets):
    if case.loss == "mse":
        return ((outputs - targets) ** 2).mean()
    return torch.nn.functional.cross_entropy(outputs.reshape(-1, VOCAB), targets.reshape(-1))


def oracle(case):
    """Loss, gradient, Hessian and GGN over the flat parameters, from autograd."""
    params, (inputs, targets) = case.parameters(), case.data()
    sizes = [p.numel() for p in params.values()]

    def outputs(flat):
        tree = {
            name: part.reshape(p.shape)
            for (name, p), part in zip(params.items(), flat.split(sizes), strict=True)
        }
        return model(tree, inputs, case.arch, case.blocks)

    flat = torch.cat([p.reshape(-1) for p in params.values()])
    H = hessian(lambda flat: loss_of(case, outputs(flat), targets), flat, vectorize=True)
    J = jacobian(outputs, flat, vectorize=True).reshape(-1, len(flat))
    z = outputs(flat)
    Bz = hessian(lambda z: loss_of(case, z, targets), z).reshape(z.numel(), z.numel())
    (grad,) = torch.autograd.grad(
        loss_of(case, outputs(flat.requires_grad_()), targets), flat, materialize_grads=True
    )
    return loss_of(case, z, targets), grad, H, J.T @ Bz @ J


def closed(case):
    params, (inputs, targets) = case.parameters(), case.data()
    loss = squared_error_objective if case.loss == "mse" else cross_entropy_objective
    return params, StackCurvature(stack_tape(params, inputs, case.arch), lambda z: loss(z, targets))


def arch(**options):
    return Architecture(**({"num_heads": HEADS} | options))


CASES = {
    "pre, layernorm, gelu, untied": Case(arch()),
    "pre, layernorm, gelu, tied": Case(arch(tied=True), extra={"b_U": True}),
    "post, layernorm, relu, untied": Case(arch(norm="post", activation="relu", norm_eps=0.0)),
    "post, rmsnorm, tied, swiglu": Case(
        arch(norm="post", norm_kind="rmsnorm", activation="swiglu", tied=True)
    ),
    "pre, rmsnorm, geglu, mse": Case(arch(norm_kind="rmsnorm", activation="geglu"), loss="mse"),
    "pre, layernorm, silu, mse, real inputs": Case(arch(activation="silu"), loss="mse", inputs="real"),
    "post, layernorm, gelu_tanh, mse": Case(arch(norm="post", activation="gelu_tanh"), loss="mse"),
    "pre, two blocks, untied": Case(arch(activation="gelu_tanh"), blocks=2, extra={"hidden": 2}),
    "post, two blocks, tied": Case(arch(norm="post", tied=True), blocks=2),
    "pre, two blocks, swiglu, rmsnorm, tied": Case(
        arch(norm_kind="rmsnorm", activation="swiglu", tied=True), blocks=2, biases=False
    ),
    "post, two blocks, relu, mse": Case(
        arch(norm="post", activation="relu", causal=False), blocks=2, loss="mse", inputs="real"
    ),
    "no norm, identity, linear attention, embedded": Case(
        arch(norm="none", activation="identity", attention="linear"), inputs="embedded"
    ),
    "no residual, no affine, large eps": Case(arch(residual=False, norm_eps=0.5), loss="mse", affine=False),
    "scaled residual, shared key heads, pooled": Case(
        arch(residual_scale=0.6, pooled=True), extra={"kv_heads": 1}
    ),
    "attention only": Case(arch(norm="post"), extra={"hidden": 0}),
}
