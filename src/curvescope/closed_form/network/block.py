"""One Transformer block as primitives: attention and feed-forward, each with its norm and skip connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from curvescope.closed_form.attention.core import (
    AttentionKind,
    CorePoint,
    Triple,
    core_curvature,
    core_curve,
    core_jacobian,
    core_point,
    core_push,
    core_vjp,
    merge_heads,
)
from curvescope.closed_form.block_matrix import INPUT, Pair, slices
from curvescope.closed_form.ffn.layer import ActivationName
from curvescope.closed_form.network.primitives import Primitive, Tape, TapeRecorder, Tree, choose, rows
from curvescope.closed_form.network.tokens import FeedForwardPrimitive, NormPrimitive
from curvescope.closed_form.norms import NormKind
from curvescope.core.errors import ShapeError, UsageError


@dataclass(frozen=True)
class Architecture:
    """Properties of a network that its parameters do not determine.

    Biases, γ and β, the unembedding, the number of blocks and whether a block has attention or a feed-forward
    layer follow from the parameters' names.
    """

    num_heads: int
    norm: Literal["none", "pre", "post"] = "pre"
    norm_kind: NormKind = "layernorm"
    norm_eps: float = 1e-5
    activation: ActivationName = "gelu"
    attention: AttentionKind = "softmax"
    causal: bool = True
    scale: float | None = None  # factor of the scores; None is 1/√(head size)
    residual: bool = True
    residual_scale: float = 1.0  # multiplies the skip around attention
    tied: bool = False  # the unembedding is the transposed embedding
    pooled: bool = False  # the unembedding reads the mean over tokens

    def __post_init__(self) -> None:
        if self.norm not in ("none", "pre", "post"):
            raise UsageError(f"expected norm of none, pre, post, got {self.norm!r}")
        if self.num_heads < 1:
            raise UsageError(f"expected at least one head, got {self.num_heads}")


def record_block(recorder: TapeRecorder, params: Tree, arch: Architecture, *, prefix: str = "") -> None:
    """Append the primitives of the block whose parameters begin with `prefix`.

    Pre-norm: x + attention(norm₁ x), then x + ffn(norm₂ x). Post-norm: norm₁(x + attention(x)), then
    norm₂(x + ffn(x)).
    """
    if f"{prefix}W_Q" in params:
        mask = _causal_mask(recorder.x) if arch.causal else None

        def attend(x: Tensor) -> AttentionPrimitive:
            return AttentionPrimitive(
                x,
                params,
                prefix=prefix,
                num_heads=arch.num_heads,
                kind=arch.attention,
                mask=mask,
                scale=arch.scale,
            )

        _record_sublayer(recorder, attend, params, arch, norm=f"{prefix}ln1.", scale=arch.residual_scale)
    if f"{prefix}W_2" in params:

        def feed(x: Tensor) -> FeedForwardPrimitive:
            return FeedForwardPrimitive(x, params, prefix=prefix, activation_name=arch.activation)

        _record_sublayer(recorder, feed, params, arch, norm=f"{prefix}ln2.", scale=1.0)


def record_norm(recorder: TapeRecorder, params: Tree, arch: Architecture, *, prefix: str) -> None:
    """Append a norm with γ and β under `prefix`, such as `ln_f.`."""
    recorder.apply(lambda x: NormPrimitive(x, params, prefix=prefix, kind=arch.norm_kind, eps=arch.norm_eps))


def block_tape(x: Tensor, params: Tree, arch: Architecture) -> Tape:
    """Return the tape of a single block at inputs x (B, T, d), with parameters `W_Q, …, ln2.b`."""
    recorder = TapeRecorder(x)
    record_block(recorder, {name: p.detach() for name, p in params.items()}, arch)
    return recorder.tape()


def _record_sublayer(recorder, make, params: Tree, arch: Architecture, *, norm: str, scale: float) -> None:
    start = recorder.now
    if arch.norm == "pre":
        record_norm(recorder, params, arch, prefix=norm)
    recorder.apply(make, skip=start if arch.residual else None, scale=scale)
    if arch.norm == "post":
        record_norm(recorder, params, arch, prefix=norm)


def _causal_mask(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


@final
class AttentionPrimitive(Primitive):
    """y = Σ_h O_h W_O^h + b_O for x (B, T, d), with W_Q, W_K, W_V, W_O and the biases found under `prefix`.

    Heads are columns of W_Q, W_K, W_V and rows of W_O. W_K and W_V may have fewer heads, each shared by
    neighbors (grouped queries). Without W_O the output is the concatenated heads. There are two sources of
    curvature: `core`, the attention weights, and `bilinear`, the products with the four matrices.
    """

    def __init__(
        self,
        x: Tensor,
        params: Tree,
        *,
        prefix: str,
        num_heads: int,
        kind: AttentionKind = "softmax",
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
    ):
        self.x, self.prefix, self.label = x, prefix, prefix + "attention"
        roles = tuple(f"{letter}_{role}" for role in "QKVO" for letter in "Wb")
        self.parameters = choose(params, prefix, roles)
        self.theta = self.local(self.parameters)
        self.heads = dict.fromkeys("QKV", num_heads)
        self._check(num_heads)
        size = self.theta["W_Q"].shape[1] // num_heads
        self.heads["K"] = self.heads["V"] = self.theta["W_K"].shape[1] // size
        q, k, v = (self._spread(self._project(role, x, self.theta), role) for role in "QKV")
        s = float(size) ** -0.5 if scale is None else scale
        self.at: CorePoint = core_point(q, k, v, scale=s, kind=kind, mask=mask, bias=bias)
        self.O = merge_heads(self.at.output)
        self.output = self._out(self.O)

    def jvp(self, dx: Tensor, dtheta: Tree) -> Tensor:
        d = self.local(dtheta)
        dy = self._out_weight(merge_heads(core_push(self.at, self._projection_tangents(dx, d)).dO))
        dy = dy + self.O @ d["W_O"] if "W_O" in d else dy
        return dy + d["b_O"] if "b_O" in d else dy

    def vjp(self, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        g_x, grads = self._pull_projections(core_vjp(self.at, self._head_cotangent(g)))
        return g_x, self.named(grads | {"W_O": rows(self.O).mT @ rows(g), "b_O": rows(g).sum(0)})

    def curve(self, g: Tensor, dx: Tensor, dtheta: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """Pull back the core's curvature and the change g dW_Oᵀ of its cotangent, and apply product rules."""
        d = self.local(dtheta)
        tangent, G = core_push(self.at, self._projection_tangents(dx, d)), self._head_cotangent(g)
        dG = self._split(g @ d["W_O"].mT, "Q") if "W_O" in d else None
        h_x, gradients = self._pull_projections(core_curve(self.at, G, tangent, dG))
        for role, g_role in zip("QKV", core_vjp(self.at, G), strict=True):
            g_role = self._gather(g_role, role)
            h_x = h_x + g_role @ d[f"W_{role}"].mT
            gradients[f"W_{role}"] = gradients[f"W_{role}"] + rows(dx).mT @ rows(g_role)
        gradients["W_O"] = rows(merge_heads(tangent.dO)).mT @ rows(g)
        return h_x, self.named(gradients)

    def jacobian(self) -> dict[str, Tensor]:
        J = self._through_core()
        if "W_O" in self.theta:
            W = self.theta["W_O"]
            I_o = torch.eye(W.shape[1]).to(W)
            J = torch.einsum("rvn,vo->ron", J, W)
            J[..., self._slices()["W_O"]] += torch.einsum("rv,ow->rovw", rows(self.O), I_o).flatten(2)
        if "b_O" in self.theta:
            J[..., self._slices()["b_O"]] += torch.eye(J.shape[1]).to(J)
        return {self.name(role): J[..., where].flatten(0, 1) for role, where in self._slices().items()}

    def curvature(self, g: Tensor) -> dict[str, dict[Pair, Tensor]]:
        G = self._head_cotangent(g)
        core = self._pulled_core_curvature(G)
        positions, blocks = self._slices(), {}
        inner = [role for role in positions if not role.endswith("_O")]
        for i, a in enumerate(inner):
            for b in inner[i:]:
                blocks[self.name(a), self.name(b)] = core[positions[a], positions[b]]
        return {f"{self.label}.core": blocks, f"{self.label}.bilinear": self._bilinear(g, G)}

    def _bilinear(self, g: Tensor, G: Tensor) -> dict[Pair, Tensor]:
        """K_{x,W}[i a; b c] = δ_ab (cotangent of q, k or v)_ic; K_{·,W_O}[·; v o] = Σ_i (∂O_iv/∂·) g_io."""
        blocks, I_d = {}, torch.eye(self.x.shape[-1]).to(g)
        for role, g_role in zip("QKV", core_vjp(self.at, G), strict=True):
            block = torch.einsum("ab,rc->rabc", I_d, rows(self._gather(g_role, role)))
            blocks[INPUT, self.name(f"W_{role}")] = block.reshape(self.x.numel(), -1)
        if "W_O" in self.theta:
            through = torch.einsum("rvn,ro->nvo", self._through_core(), rows(g)).flatten(1)
            for role, where in self._slices().items():
                if not role.endswith("_O"):
                    blocks[self.name(role), self.name("W_O")] = through[where]
        return blocks

    def _through_core(self) -> Tensor:
        """∂O/∂(x, θ) of the concatenated heads: (B T, h w, n), zero in the columns of W_O and b_O."""
        B, h, T, w = self.at.v.shape
        J, into = core_jacobian(self.at), self._into_core()
        product = torch.einsum("bhrm,bhmn->bhrn", J, into).reshape(B, h, T, w, -1)
        return product.permute(0, 2, 1, 3, 4).reshape(B * T, h * w, -1)

    def _pulled_core_curvature(self, G: Tensor) -> Tensor:
        into = self._into_core()
        return torch.einsum("bhmi,bhmn,bhnj->ij", into, core_curvature(self.at, G), into)

    def _into_core(self) -> Tensor:
        """∂(q, k, v)/∂(x, θ) for each sample and head: (B, h, T (2k + w), n)."""
        (B, T, _), positions = self.x.shape, self._slices()
        n = sum(where.stop - where.start for where in positions.values())
        projections = []
        for role in "QKV":
            W = self.theta[f"W_{role}"]
            P = torch.zeros(B * T, W.shape[1], n).to(W)
            eye, I_W = torch.eye(B * T).to(W), torch.eye(W.shape[1]).to(W)
            P[..., positions[INPUT]] = torch.einsum("rs,ac->rcsa", eye, W).flatten(2)
            P[..., positions[f"W_{role}"]] = torch.einsum("ra,cw->rcaw", rows(self.x), I_W).flatten(2)
            if f"b_{role}" in self.theta:
                P[..., positions[f"b_{role}"]] = I_W
            P = P.reshape(B, T, self.heads[role], -1, n).transpose(1, 2)
            P = P.repeat_interleave(self.heads["Q"] // self.heads[role], dim=1)
            projections.append(P.flatten(2, 3))
        return torch.cat(projections, dim=2)

    def _projection_tangents(self, dx: Tensor, d: Tree) -> Triple:
        """dq = dx W_Q + x dW_Q + db_Q and likewise dk, dv, for each head."""
        q, k, v = (
            self._spread(dx @ self.theta[f"W_{role}"] + self._project(role, self.x, d), role)
            for role in "QKV"
        )
        return q, k, v

    def _pull_projections(self, cotangents: Triple) -> tuple[Tensor, dict[str, Tensor]]:
        """Pull cotangents of q, k, v back to x, W and b."""
        g_x, grads = torch.zeros_like(self.x), {}
        for role, g in zip("QKV", cotangents, strict=True):
            g = self._gather(g, role)
            g_x = g_x + g @ self.theta[f"W_{role}"].mT
            grads[f"W_{role}"] = rows(self.x).mT @ rows(g)
            grads[f"b_{role}"] = rows(g).sum(0)
        return g_x, grads

    def _project(self, role: str, x: Tensor, theta: Tree) -> Tensor:
        y = x @ theta[f"W_{role}"]
        return y + theta[f"b_{role}"] if f"b_{role}" in theta else y

    def _split(self, u: Tensor, role: str) -> Tensor:
        """Reshape (B, T, h k) to (B, h, T, k)."""
        B, T, _ = self.x.shape
        return u.reshape(B, T, self.heads[role], -1).transpose(1, 2)

    def _spread(self, u: Tensor, role: str) -> Tensor:
        """Split u into heads like `_split`, with shared heads repeated for each query head."""
        return self._split(u, role).repeat_interleave(self.heads["Q"] // self.heads[role], dim=1)

    def _gather(self, u: Tensor, role: str) -> Tensor:
        """Apply the transpose of `_spread`: (B, h, T, k) to (B, T, h k), summing shared heads."""
        return merge_heads(u.unflatten(1, (self.heads[role], -1)).sum(2))

    def _head_cotangent(self, g: Tensor) -> Tensor:
        """G_h = g W_O^hᵀ: (B, h, T, w)."""
        return self._split(g @ self.theta["W_O"].mT if "W_O" in self.theta else g, "Q")

    def _out_weight(self, O: Tensor) -> Tensor:  # noqa: E741
        return O @ self.theta["W_O"] if "W_O" in self.theta else O

    def _out(self, O: Tensor) -> Tensor:  # noqa: E741
        y = self._out_weight(O)
        return y + self.theta["b_O"] if "b_O" in self.theta else y

    def _slices(self) -> dict[str, slice]:
        sizes = {role: p.numel() for role, p in self.theta.items()}
        return slices({INPUT: self.x.numel()} | sizes)

    def _check(self, num_heads: int) -> None:
        for role in ("W_Q", "W_K", "W_V"):
            if role not in self.theta:
                raise UsageError(f"attention needs {self.prefix + role!r}, got {', '.join(self.parameters)}")
        if self.x.dim() != 3 or self.x.shape[-1] != self.theta["W_Q"].shape[0]:
            raise ShapeError(
                f"expected x of shape (B, T, {self.theta['W_Q'].shape[0]}), got {tuple(self.x.shape)}",
                hint="weights are inputs × outputs",
            )
        size, rest = divmod(self.theta["W_Q"].shape[1], num_heads)
        if rest or self.theta["W_K"].shape[1] % size or num_heads % (self.theta["W_K"].shape[1] // size):
            raise ShapeError(
                f"cannot cut W_Q {tuple(self.theta['W_Q'].shape)} and W_K {tuple(self.theta['W_K'].shape)} "
                f"into {num_heads} query heads"
            )
