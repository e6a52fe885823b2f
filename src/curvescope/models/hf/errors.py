"""What went wrong while loading with transformers, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator

from curvescope.core.errors import CurvescopeError, UsageError

_CAUSES: dict[str, tuple[str, str | None]] = {
    "GatedRepoError": (
        "expected access to {source}, which is gated",
        "accept its conditions on its page, then log in: hf auth login",
    ),
    "RevisionNotFoundError": (
        "expected a revision of {source}, got {revision!r}, which it does not have",
        None,
    ),
    "RepositoryNotFoundError": (
        "expected a model of the hub, got {source!r}, which is not there or is private",
        "check the name; for a folder, give its path",
    ),
    "LocalEntryNotFoundError": (
        "{source!r} is not in the cache, and the hub cannot be reached",
        "give a folder, or load it once with a network",
    ),
    "OfflineModeIsEnabled": (
        "{source!r} is not in the cache, and HF_HUB_OFFLINE is set",
        "give a folder, or load it once with a network",
    ),
}
_WORDS: dict[str, tuple[str, str | None]] = {
    "safetensors": ("expected whole weights in {source}, could not read them", "the file may be cut short"),
    "trust_remote_code": (
        "{source} needs code of its own, which is never run",
        "build the module yourself and pass it: cs.load(module)",
    ),
    "does not recognize this architecture": (
        "{source} is of a type that this transformers does not know",
        "pip install --upgrade transformers",
    ),
    "couldn't connect": _CAUSES["LocalEntryNotFoundError"],
    "Cannot send a request": _CAUSES["OfflineModeIsEnabled"],
    "does not appear to have a file named": (
        "expected a model with config.json and weights, {source} lacks one of them",
        None,
    ),
    "size mismatch": ("the weights in {source} do not fit the configuration beside them", None),
    "ignore_mismatched_sizes": ("the weights in {source} do not fit the configuration beside them", None),
    "Weights only load failed": (
        "expected weights only, {source} holds a pickle with other Python objects, which are never run",
        "convert it to safetensors",
    ),
}


def one_sentence(error: Exception, source: str, revision: str | None = None) -> CurvescopeError:
    """The error that says what a person can do about `error`."""
    if isinstance(error, CurvescopeError):
        return error
    chain = list(_chain(error))
    kinds = {c.__name__ for e in chain for c in type(e).__mro__}
    for name, (message, hint) in _CAUSES.items():
        if name in kinds:
            return UsageError(message.format(source=source, revision=revision), hint=hint)
    for word, (message, hint) in _WORDS.items():
        if any(word.lower() in f"{type(e).__module__} {e}".lower() for e in chain):
            return CurvescopeError(message.format(source=source, revision=revision), hint=hint)
    first = str(error).strip().split("\n", 1)[0][:200].rstrip(". ")
    return CurvescopeError(
        f"expected a model that transformers can load, {source} gave {type(error).__name__}: {first}"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, last cause last."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
