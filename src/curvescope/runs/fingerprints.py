"""Fingerprint of a result: a digest of the contents of its model and data, whatever their names are.

The digest also carries the descriptions of the models, which a run folder saves in `model.json`.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self, final

import torch
from torch import Tensor

from curvescope.data.batches import Batches
from curvescope.models.description import Description, describe
from curvescope.models.model import Model
from curvescope.runs.model_structure import structure_bytes, without_addresses
from curvescope.tokenizers import Tokenizer, as_tokenizer

Part = Model | Batches | Tensor | str | None


@final
class Fingerprint(str):
    """Digest as text, with one description per model."""

    models: tuple[Description, ...]

    def __new__(cls, digest: str, models: tuple[Description, ...]) -> Self:
        """Create the text and attach the descriptions."""
        text = super().__new__(cls, digest)
        text.models = models
        return text


def fingerprint(*parts: Part) -> Fingerprint:
    """Digest of everything that the results may depend on: 32 hexadecimal digits.

    For a model, the digest covers parameters and buffers with their names, types and shapes, the text of its
    module and configuration, its attributes and code (`runs.model_structure`), its facts and its tokenizer.
    For data it covers every tensor of every batch, and for a text the text. A sharded model, for which all
    ranks must call this, has the same digest as the full model.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for label, content in _contents(part):
            digest.update(f"{label}:{len(content)};".encode())
            digest.update(content)
    return Fingerprint(digest.hexdigest(), tuple(_descriptions(parts)))


def _descriptions(parts: Iterable[Part]) -> Iterator[Description]:
    """Return the descriptions of the models, each once, including those inside other fingerprints."""
    seen = []
    for part in parts:
        descriptions = part.models if isinstance(part, Fingerprint) else ()
        for description in (describe(part),) if isinstance(part, Model) else descriptions:
            if description not in seen:
                seen.append(description)
                yield description


def _contents(part: Part) -> Iterator[tuple[str, memoryview | bytes]]:
    """Yield labeled bytes; equal sequences mean equal contents."""
    if part is None:
        yield "nothing", b""
    elif isinstance(part, str):
        yield "text", part.encode("utf-8", "surrogateescape")
    elif isinstance(part, Tensor):
        yield _labeled("tensor", part)
    elif isinstance(part, Batches):
        yield "batches", str(len(part)).encode()
        for batch in part:
            names = list(batch.inputs) if isinstance(batch.inputs, Mapping) else None
            yield "batch", repr((names, batch.weights is None)).encode()
            for tensor in batch.tensors():
                yield _labeled("tensor", tensor)
    else:
        yield from _model_contents(part)


def _model_contents(model: Model) -> Iterator[tuple[str, memoryview | bytes]]:
    module = model.module
    configs = [getattr(module, name, None) for name in ("cfg", "config")]  # zoo, Hugging Face
    words = repr((module, configs, sorted(model.facts.items()), sorted(model.options.items())))
    yield "module", without_addresses(words).encode()
    yield from structure_bytes(model)
    for kind, tensors in (("parameter", model.whole_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            yield _labeled(f"{kind} {name}", tensor)
    if model.tokenizer is not None:
        yield from _tokenizer_contents(as_tokenizer(model.tokenizer))


def _tokenizer_contents(tokenizer: Tokenizer) -> Iterator[tuple[str, memoryview | bytes]]:
    """Yield the files that a tokenizer saves, or the text of every id if it cannot be saved."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save(Path(folder) / "tokenizer")
        except (AttributeError, NotImplementedError):
            texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
            yield f"tokenizer {tokenizer.name}", repr(texts).encode()
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            yield f"tokenizer {tokenizer.name} {path.name}", path.read_bytes()


def _labeled(label: str, tensor: Tensor) -> tuple[str, memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{label} {tensor.dtype} {tuple(tensor.shape)}", flat.view(torch.uint8).numpy().data
