"""What a result belongs to: a digest of the contents of a model and its data, whatever their names are.

The digest knows what the models are made of, so that a run folder can say it (`model.json`).
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
from curvescope.runs.model_structure import address_free, made_of
from curvescope.tokenizers import Tokenizer, as_tokenizer

Part = Model | Batches | Tensor | str | None


@final
class Fingerprint(str):
    """A digest as text, with descriptions of the models in it, each once."""

    models: tuple[Description, ...]

    def __new__(cls, digest: str, models: tuple[Description, ...]) -> Self:
        """The text, and what goes with it."""
        made = super().__new__(cls, digest)
        made.models = models
        return made


def fingerprint(*parts: Part) -> Fingerprint:
    """A digest of everything that numbers may depend on: 32 hexadecimal digits.

    Of a model its parameters and buffers, their names, types and shapes, the words of its module and of its
    configuration, its attributes and its code (`runs.model_structure`), its facts and its tokenizer; of data
    every tensor of every batch; of a text the text. A model that is spread over ranks, all of which ask, has
    the digest of the whole one.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for label, content in _contents(part):
            digest.update(f"{label}:{len(content)};".encode())
            digest.update(content)
    return Fingerprint(digest.hexdigest(), tuple(_described(parts)))


def _described(parts: Iterable[Part]) -> Iterator[Description]:
    """What the models are made of, those inside other fingerprints too; one like another is told once."""
    told = []
    for part in parts:
        found = part.models if isinstance(part, Fingerprint) else ()
        for one in (describe(part),) if isinstance(part, Model) else found:
            if one not in told:
                told.append(one)
                yield one


def _contents(part: Part) -> Iterator[tuple[str, memoryview | bytes]]:
    """Labeled bytes; equal sequences of them mean equal contents."""
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
        yield from _of_model(part)


def _of_model(model: Model) -> Iterator[tuple[str, memoryview | bytes]]:
    module = model.module
    own = [getattr(module, name, None) for name in ("cfg", "config")]  # of the zoo, of Hugging Face
    words = repr((module, own, sorted(model.facts.items()), sorted(model.options.items())))
    yield "module", address_free(words).encode()
    yield from made_of(model)
    for kind, tensors in (("parameter", model.whole_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            yield _labeled(f"{kind} {name}", tensor)
    if model.tokenizer is not None:
        yield from _of_tokenizer(as_tokenizer(model.tokenizer))


def _of_tokenizer(tokenizer: Tokenizer) -> Iterator[tuple[str, memoryview | bytes]]:
    """The files it saves; of an object of others that cannot be saved, the text of every id."""
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
