"""Cost of a product on several ranks: operations, bytes sent and memory, from the sizes of model and data.

For a decoder with n parameters in each of L layers and n₀ outside of them (embedding, head), D tokens in all,
R ranks, B batches and b bytes a number, one product with a vector takes on each rank

    data parallel, cached graphs    (12 n L + 12 n_U) D/R operations   2 (R−1)/R · (n L + n₀) b     sent
    data parallel, rebuilt graphs   (18 n L + 18 n_U) D/R operations   2 (R−1)/R · (n L + n₀) b     sent
    sharded                         (28 n L + 18 n_U) D/R operations   (R−1)/R · (9 n L + 4 n₀) b B sent

with n_U parameters of the head. (Its matrix is multiplied; an embedding is only looked up.)
Operations for a layer's matrix are counted in units of 2 n D. With the graph of the gradient cached, a
product takes 6: four in the derivative of the gradient and two in the backward pass. A sharded product
recomputes the layer: 1 forward, 3 for the gradient including its forward, 3 + 4 for the derivative of the
gradient, and 3 backward. Each time a layer is computed it gathers its parameters, and every gradient is
summed. Per batch and layer, 5 messages of n b bytes gather and 4 sum; parameters outside the layers take 2
and 2. Attention scores, a share T / 6d of the operations, are not counted. Further vectors in one product
share the first forward pass and gradient: 20 n L, and 6 messages per layer. So do later products of an
algorithm if the inputs and cotangents of layers are cached.

The memory constants were measured on a GPU with GPT-2 124M: activations with a cached graph, and with
recomputed layers. `benchmarks/sharded_memory.py` measures the copies of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.model import Model

GATHERS, SUMS = (5, 2), (4, 2)  # messages of a layer and of parameters outside the layers, for one vector
MORE_GATHERS, MORE_SUMS = (3, 1), (3, 1)  # for each further vector
CACHED_NUMBERS = 54  # numbers in the cached graph per token, layer and unit of width
BOUNDARY = 2  # the same with recomputed layers: inputs and cotangents
LAYER_COPIES = 4  # copies of a full layer at the peak: parameters, direction, gradient, message
OUTSIDE_COPIES = 4  # copies of parameters outside the layers
VECTORS = 3  # vectors besides the parameters: one vector, the gradient and the product


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder."""

    layers: int
    width: int
    layer: int  # parameters of one layer
    outside: int  # parameters outside of the layers: embedding, head, last norm
    head: int  # parameters of the head alone, tied or not

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer + self.outside


class ProductCost(NamedTuple):
    """Cost of one product on each rank."""

    flops: float
    moved: float  # bytes sent
    memory: float  # bytes at the peak


def decoder_of(model: Model, *, head: str = "U") -> Decoder:
    """Return the sizes of a model; its head is the block of that name, or the embedding E if tied."""
    layers = repeated_layers(model.module)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    inside, count = sum(sizes), max(len(layers), 1)
    blocks = model.blocks if model.sharding is None else model.sharding.blocks
    head_block = blocks.get(head) or blocks.get("E")
    width = int(model.facts.get("d_model", 0) or model.facts.get("width", 0))
    outside = model.num_parameters - inside
    return Decoder(
        len(layers), width, inside // count, outside, head_block.size if head_block is not None else 0
    )


def data_parallel(
    decoder: Decoder,
    *,
    tokens: int,
    ranks: int,
    batches: int = 1,
    vectors: int = VECTORS,
    element: int = 4,
    cached: bool = True,
) -> ProductCost:
    """Cost if every rank has all parameters and full vectors, and its share of the tokens.

    Args:
        decoder: Its sizes.
        tokens: D, on all ranks together.
        ranks: R.
        batches: Number of batches per rank.
        vectors: Vectors in memory besides the parameters: 3 for a product, more for an algorithm.
        element: Bytes of a number.
        kept: True if the graphs of all batches are cached, as they are if memory allows; else each is
            rebuilt for every product, one at a time.
    """
    n, D = decoder.parameters, tokens / ranks
    flops = (12 if cached else 18) * (decoder.layers * decoder.layer + decoder.head) * D
    graphs = CACHED_NUMBERS * decoder.layers * decoder.width * D / (1 if cached else batches)
    return ProductCost(flops, 2 * (ranks - 1) / ranks * n * element, ((1 + vectors) * n + graphs) * element)


def sharded(
    decoder: Decoder,
    *,
    tokens: int,
    ranks: int,
    batches: int = 1,
    vectors: int = VECTORS,
    columns: int = 1,
    element: int = 4,
    cached: bool = False,
) -> ProductCost:
    """Cost if parameters and vectors are sharded, and each layer is gathered to be computed.

    Args:
        decoder: Its sizes.
        tokens: D, on all ranks together.
        ranks: R.
        batches: Number of batches: one is in memory at a time, and each gathers the layers again.
        vectors: Sharded vectors in memory besides the parameters: 3 for a product, more for an algorithm.
        columns: Vectors in one product.
        element: Bytes of a number.
        kept: True for a later product inside `frozen()` that uses the cached graphs of the first one.
    """
    inside, D = decoder.layers * decoder.layer, tokens / ranks
    num_first, num_further = (0, columns) if cached else (1, columns - 1)
    flops = ((8 * num_first + 20 * columns) * inside + (6 * num_first + 12 * columns) * decoder.head) * D
    layer_messages, outside_messages = (
        num_first * (GATHERS[i] + SUMS[i]) + num_further * (MORE_GATHERS[i] + MORE_SUMS[i]) for i in (0, 1)
    )
    bytes_sent = (
        batches * (ranks - 1) / ranks * (layer_messages * inside + outside_messages * decoder.outside)
    )
    pieces = (1 + vectors) * decoder.parameters / ranks
    full_parameters = LAYER_COPIES * decoder.layer + OUTSIDE_COPIES * decoder.outside
    activations = (BOUNDARY * decoder.layers + CACHED_NUMBERS) * decoder.width * D / batches
    return ProductCost(
        flops, bytes_sent * element, (pieces + (full_parameters if ranks > 1 else 0) + activations) * element
    )


# ------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class GpuRates:
    """Rates of a GPU, by default measured on an H200 rather than taken from its data sheet."""

    memory: float = 141e9  # bytes
    rate: float = 150e12  # operations each second in float32 with TF32, as products of GPT-2 124M reach
    near: float = 300e9  # bytes per second to GPUs of the same machine
    far: float = 40e9  # bytes per second to other machines: 400 Gbit/s per GPU, minus losses
    near_ranks: int = 8  # GPUs of one machine


class Prediction(NamedTuple):
    """Cost of a product of a model on some GPUs, and if it fits into memory."""

    model: str
    ranks: int
    way: str
    memory: float  # bytes per GPU
    fits: bool
    seconds: float  # computing and sending one after the other
    sending: float  # seconds of sending


MODELS = {
    "7 B": Decoder(32, 4096, 202_383_360, 262_144_000 + 4096, 131_072_000),
    "70 B": Decoder(80, 8192, 855_654_400, 524_288_000 + 8192, 262_144_000),
    "1 T": Decoder(128, 25_600, 7_864_371_200, 2 * 3_276_800_000, 3_276_800_000),
}
"""Shapes of Llama 2, and a dense decoder with 12 d² parameters per layer and a vocabulary of 128,000."""


def predictions(
    *,
    tokens: int = 2**20,
    at_once: int = 4096,
    ranks: tuple[int, ...] = (8, 64, 1024),
    card: GpuRates | None = None,
) -> Iterator[Prediction]:
    """Predict the cost of a product for each model and number of GPUs, data parallel and sharded.

    Args:
        tokens: D.
        at_once: Tokens of one batch on a rank.
        ranks: R.
        card: Assumed rates of a GPU.
    """
    card = card or GpuRates()
    for name, decoder in MODELS.items():
        for count in ranks:
            batches = max(1, tokens // (count * at_once))
            sizes: dict[str, Any] = {"tokens": tokens, "ranks": count, "batches": batches}
            parallel_cost = data_parallel(decoder, **sizes, cached=True)
            if parallel_cost.memory > card.memory:
                parallel_cost = data_parallel(decoder, **sizes, cached=False)
            for way, cost in (("data parallel", parallel_cost), ("sharded", sharded(decoder, **sizes))):
                link = card.near if count <= card.near_ranks else card.far
                sending = cost.moved / link
                fits = cost.memory <= card.memory
                yield Prediction(
                    name, count, way, cost.memory, fits, cost.flops / card.rate + sending, sending
                )


def table(*, tokens: int = 2**20, card: GpuRates | None = None) -> str:
    """Return the predictions as a Markdown table."""
    lines = [
        "| model | GPUs | method | GB per GPU | fits | seconds per product | of which sending |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in predictions(tokens=tokens, card=card):
        fits = "yes" if p.fits else "no"
        numbers = f"{p.memory / 1e9:,.0f} | {fits} | {_rounded(p.seconds)} | {_rounded(p.sending)}"
        lines.append(f"| {p.model} | {p.ranks} | {p.way} | {numbers} |")
    return "\n".join(lines)


def _rounded(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
