"""What a product costs on several ranks: operations, bytes sent, memory, as functions of sizes.

For a decoder with n parameters in each of L layers and n₀ outside of them (embedding, head), D tokens in all,
R ranks, B batches and b bytes a number, one product with a vector takes on each rank

    data parallel   (12 n L + 12 n_U) D/R operations   2 (R−1)/R · (n L + n₀) b   sent, graphs kept
                    (18 n L + 18 n_U) D/R                the same                  graphs built anew
    sharded         (28 n L + 18 n_U) D/R operations     (R−1)/R · (9 n L + 4 n₀) b B sent

with n_U those of the head, whose matrix is multiplied while an embedding is looked up. Of the operations for
a layer's matrix, in units of 2 n D: a product with the graph of the gradient kept takes 6 (four in the
derivative of the gradient and two on the way back). A sharded one computes the layer again: forward 1;
gradient 3, forward included; the derivative of the gradient 3 + 4; the way back 3. Every time a layer is
computed it gathers its parameters, and every gradient is summed: 5 messages of n b bytes gather and 4 sum,
with 2 and 2 for what is outside, for every batch. Attention's scores are left out, T / 6d of the operations.
Further vectors in one product share the first forward and gradient: 20 n L, and 6 messages for layers. So do
later products of an algorithm, where what the first one found (inputs and cotangents of layers) is kept.

Constants of memory were measured: activations with the graph kept, and with layers computed again, on a card
(GPT-2 124M); copies of a layer by `benchmarks/sharded_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from curvescope.models.model import Model
from curvescope.models.sources import repeated_layers

GATHERS, SUMS = (5, 2), (4, 2)  # messages of a layer, and of what is outside, for a product with one vector
MORE_GATHERS, MORE_SUMS = (3, 1), (3, 1)  # for each further vector
KEPT = 54  # numbers that the kept graph holds for each token, layer and unit of width
BOUNDARY = 2  # and where layers are computed again: inputs and cotangents
LAYER_COPIES = 4  # of a whole layer at the peak: parameters, direction, gradient, and a message
OUTSIDE_COPIES = 4  # of what is outside of the layers
VECTORS = 3  # beside the parameters: a vector, the gradient and the product


@dataclass(frozen=True)
class Decoder:
    """A decoder by its sizes."""

    layers: int
    width: int
    layer: int  # parameters of one layer
    outside: int  # parameters outside of the layers: embedding, head, last norm
    head: int  # parameters of the head alone, tied or not

    @property
    def parameters(self) -> int:
        """Of all."""
        return self.layers * self.layer + self.outside


class Cost(NamedTuple):
    """Of one product, on each rank."""

    flops: float
    moved: float  # bytes sent
    memory: float  # bytes at the peak


def decoder_of(model: Model, *, head: str = "U") -> Decoder:
    """The sizes of a model; the head is the block of that name, or the embedding E where it is tied."""
    layers = repeated_layers(model.module)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    inside, count = sum(sizes), max(len(layers), 1)
    blocks = model.blocks if model.sharding is None else model.sharding.blocks
    own = blocks.get(head) or blocks.get("E")
    width = int(model.facts.get("d_model", 0) or model.facts.get("width", 0))
    outside = model.num_parameters - inside
    return Decoder(len(layers), width, inside // count, outside, own.size if own is not None else 0)


def data_parallel(
    decoder: Decoder,
    *,
    tokens: int,
    ranks: int,
    batches: int = 1,
    vectors: int = VECTORS,
    element: int = 4,
    kept: bool = True,
) -> Cost:
    """Parameters and vectors whole on every rank, each with its share of the tokens.

    Args:
        decoder: Its sizes.
        tokens: D, on all ranks together.
        ranks: R.
        batches: That the tokens of a rank come in.
        vectors: That are held beside the parameters: 3 for a product, more for an algorithm.
        element: Bytes of a number.
        kept: Whether the graphs of all batches are kept, as they are while memory allows; else one is there
            at a time, and is built anew for every product.
    """
    n, D = decoder.parameters, tokens / ranks
    flops = (12 if kept else 18) * (decoder.layers * decoder.layer + decoder.head) * D
    graphs = KEPT * decoder.layers * decoder.width * D / (1 if kept else batches)
    return Cost(flops, 2 * (ranks - 1) / ranks * n * element, ((1 + vectors) * n + graphs) * element)


def sharded(
    decoder: Decoder,
    *,
    tokens: int,
    ranks: int,
    batches: int = 1,
    vectors: int = VECTORS,
    columns: int = 1,
    element: int = 4,
    kept: bool = False,
) -> Cost:
    """Parameters and vectors in pieces, layers gathered where they are computed.

    Args:
        decoder: Its sizes.
        tokens: D, on all ranks together.
        ranks: R.
        batches: That the tokens come in: one is in memory at a time, and gathers the layers anew.
        vectors: That are held beside the parameters, in pieces: 3 for a product, more for an algorithm.
        columns: Vectors in one product.
        element: Bytes of a number.
        kept: Whether it is not the first product inside `frozen()`, and the first one's graphs are kept.
    """
    inside, D = decoder.layers * decoder.layer, tokens / ranks
    first, more = (0, columns) if kept else (1, columns - 1)
    flops = ((8 * first + 20 * columns) * inside + (6 * first + 12 * columns) * decoder.head) * D
    layer_messages, outside_messages = (
        first * (GATHERS[i] + SUMS[i]) + more * (MORE_GATHERS[i] + MORE_SUMS[i]) for i in (0, 1)
    )
    moved = batches * (ranks - 1) / ranks * (layer_messages * inside + outside_messages * decoder.outside)
    pieces = (1 + vectors) * decoder.parameters / ranks
    whole = LAYER_COPIES * decoder.layer + OUTSIDE_COPIES * decoder.outside
    activations = (BOUNDARY * decoder.layers + KEPT) * decoder.width * D / batches
    return Cost(flops, moved * element, (pieces + (whole if ranks > 1 else 0) + activations) * element)


# ------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Card:
    """What is assumed of a card, by default an H200: measured rates, not those of a data sheet."""

    memory: float = 141e9  # bytes
    rate: float = 150e12  # operations each second in float32 with TF32, as products of GPT-2 124M reach
    near: float = 300e9  # bytes each second to the cards of the same machine
    far: float = 40e9  # and to others: 400 Gbit/s a card, and what is lost of it
    near_ranks: int = 8  # cards of one machine


class Prediction(NamedTuple):
    """A model on some cards: what a product takes, and whether it fits."""

    model: str
    ranks: int
    way: str
    memory: float  # bytes on a card
    fits: bool
    seconds: float  # computing and sending one after the other
    sending: float  # of which sending


MODELS = {
    "7 B": Decoder(32, 4096, 202_383_360, 262_144_000 + 4096, 131_072_000),
    "70 B": Decoder(80, 8192, 855_654_400, 524_288_000 + 8192, 262_144_000),
    "1 T": Decoder(128, 25_600, 7_864_371_200, 2 * 3_276_800_000, 3_276_800_000),
}
"""Llama 2's shapes, and a dense one of 12 d² a layer with 128 000 words."""


def predictions(
    *,
    tokens: int = 2**20,
    at_once: int = 4096,
    ranks: tuple[int, ...] = (8, 64, 1024),
    card: Card | None = None,
) -> Iterator[Prediction]:
    """The models on so many cards, both ways, for a product over so many tokens.

    Args:
        tokens: D.
        at_once: Tokens of one batch on a rank.
        ranks: R.
        card: What is assumed of one.
    """
    card = card or Card()
    for name, decoder in MODELS.items():
        for count in ranks:
            batches = max(1, tokens // (count * at_once))
            sizes: dict[str, Any] = {"tokens": tokens, "ranks": count, "batches": batches}
            whole = data_parallel(decoder, **sizes, kept=True)
            if whole.memory > card.memory:
                whole = data_parallel(decoder, **sizes, kept=False)
            for way, found in (("data parallel", whole), ("sharded", sharded(decoder, **sizes))):
                link = card.near if count <= card.near_ranks else card.far
                sending = found.moved / link
                fits = found.memory <= card.memory
                yield Prediction(
                    name, count, way, found.memory, fits, found.flops / card.rate + sending, sending
                )


def table(*, tokens: int = 2**20, card: Card | None = None) -> str:
    """The predictions as a table in Markdown."""
    lines = [
        "| model | cards | way | GB on a card | fits | seconds a product | of which sending |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in predictions(tokens=tokens, card=card):
        fits = "yes" if p.fits else "no"
        numbers = f"{p.memory / 1e9:,.0f} | {fits} | {_rounded(p.seconds)} | {_rounded(p.sending)}"
        lines.append(f"| {p.model} | {p.ranks} | {p.way} | {numbers} |")
    return "\n".join(lines)


def _rounded(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
