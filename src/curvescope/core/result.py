"""Results: frozen dataclasses of arrays, vectors and scalars, saved as JSON + NPZ, never pickled."""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
import zlib
from dataclasses import dataclass, fields
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import with_error

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
NOT_FINITE = "not_finite"
"""In result.json: JSON pointers (RFC 6901) to each null that stands for NaN, Infinity or -Infinity."""
MAX_SHOWN = 6  # entries
SOURCE = Path(__file__).parents[1]
RENAMED_IN = {
    "studies.landscape": {
        "Curve": "IncrementCurve",
        "Growth": "IncrementGrowth",
        "Budget": "SampleBudget",
        "Direct": "PairedLosses",
        "Norms": "SpectralNorms",
        "Subspace": "EigenSubspace",
        "Losses": "SampleLosses",
        "Curvature": "SampleCurvature",
    },
    "papers.petrov2025.convergence": {"Curve": "NetworkCurve"},
    "studies.optimizers": {
        "Course": "TrainingRun",
        "Search": "RateSearch",
        "Compared": "OptimizerComparison",
    },
    "papers.petrov2025.propagation": {"Spectrum": "DenseSpectrum", "Sweeps": "PropagationSweeps"},
    "studies.prune": {
        "Heads": "HeadRemovals",
        "Minimum": "BlockMinimum",
        "Samples": "RemovalSamples",
        "Sets": "RemovalSets",
    },
    "studies.scaling": {"Law": "PowerLaw", "Needed": "NeededSamples", "Cell": "GridCell"},
    "studies.sinks": {
        "Lines": "RitzLines",
        "Moved": "SinkSpectra",
        "Heads": "SinkHeads",
        "Effort": "SinkEffort",
        "Blocks": "SinkBlocks",
    },
    "studies.taylor": {"Descent": "DescentRun"},
    "studies.why_adam": {"Blocks": "BlockSpectra", "Tuned": "TunedRuns", "Measured": "CurvatureMeasures"},
    "papers.singh2025.gap": {"Course": "TrainedModel", "Gaps": "FamilyGaps"},
    "papers.ormaniec2025.heatmap": {"Columns": "BlockColumns"},
    "papers.ormaniec2025.growth": {"Growth": "GrowthCurves", "Sweep": "GrowthSweep", "Points": "SweepPoints"},
    "papers.ormaniec2025.beyond": {"Scale": "ScaleNorms"},
    "papers.ormaniec2025.reviewers": {
        "Sweep": "NormSweep",
        "Trained": "TrainingLosses",
        "Heads": "HeadBlockNorms",
    },
    "papers.ormaniec2025.statements": {"Group": "StatementGroup"},
}
"""Current class name by package and class name in older results."""
RENAMED = {
    "curvescope.studies.blocks_heterogeneity.Heterogeneity": "curvescope.algorithms.Heterogeneity",
    "curvescope.studies.blocks_probes.OwnProbes": "curvescope.algorithms.OwnProbes",
    "curvescope.studies.weight_norms.ranks.Correlation": "curvescope.algorithms.Correlation",
    "curvescope.algorithms.block_map.BlockMap": "curvescope.algorithms.BlockNorms",
    "curvescope.algorithms.Share": "curvescope.algorithms.SpectrumShare",
    "curvescope.operators.taylor.line.Line": "curvescope.operators.LossLine",
    "curvescope.operators.taylor.plane.Plane": "curvescope.operators.LossPlane",
    "curvescope.studies.optimisers.course.Course": "curvescope.studies.optimizers.TrainingRun",
    "curvescope.studies.optimisers.study.Compared": "curvescope.studies.optimizers.OptimizerComparison",
    "curvescope.studies.optimisers.tuning.Search": "curvescope.studies.optimizers.RateSearch",
    "curvescope.studies.quantise.rounding.Roundings": "curvescope.studies.quantize.Roundings",
    "curvescope.studies.quantise.study.Quantised": "curvescope.studies.quantize.Quantized",
} | {
    f"curvescope.{package}.{old}": f"curvescope.{package}.{new}"
    for package, classes in RENAMED_IN.items()
    for old, new in classes.items()
}
"""Current name of each result class that was moved or renamed, by its saved name."""
RENAMED_FIELDS = {"centre": "center", "centred": "centered", "normalise": "normalize", "way": "method"}
"""Current name of each renamed field, by its name in older results."""
_CLASSES: dict[str, type[Result]] = {}


class UnreadableResult(CurvescopeError):
    """Raised if the files of a saved result are missing or damaged."""


@dataclass(frozen=True)
class Result:
    """Base of all results.

    Fields are numpy arrays, torch tensors, numbers, strings, booleans, None, lists or dicts of these, or
    results. Vectors of an operator are tensors on its device; eigenvalues, residuals and other numbers are
    numpy arrays. `save(folder)` writes `result.json` (everything but arrays) and `arrays.npz` (the arrays,
    keyed by their path in the result); `load` of the same class reads them back, tensors as tensors on the
    CPU. JSON has no NaN and no infinity: such a number is null, and `not_finite` at the end of the file
    names its value.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Result.__repr__  # otherwise dataclass defines its own
        _CLASSES[saved_name(cls)] = cls

    def __repr__(self) -> str:
        """Return the fields in short: the shape and type of an array, the first entries of a long list."""
        shown = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self))
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        """HTML for a notebook: numbers, the first rows of the table or the fields, and the figure."""
        from curvescope.viz import notebook

        result: Any = self
        parts = [lambda: notebook.facts(_numbers(self))]
        if hasattr(self, "to_frame"):
            parts.append(lambda: notebook.frame(result.to_frame()))
        else:
            rest = [[f.name, _short(getattr(self, f.name))] for f in fields(self)]
            parts.append(lambda: notebook.table(["field", "value"], rest))
        if hasattr(self, "plot"):
            parts.append(lambda: notebook.picture(lambda: result.plot().figure, type(self).__name__))
        return notebook.box(self, type(self).__name__, *parts)

    def save(self, folder: str | Path) -> Path:
        """Write result.json and arrays.npz to `folder`, each completely or not at all; return the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, np.ndarray] = {}
        tree = strict_json({"schema": SCHEMA, **_pack(self, "", arrays)})
        partial = folder / "arrays.npz.partial"
        with partial.open("wb") as file:
            _write_npz(file, arrays)
        partial.replace(folder / "arrays.npz")
        partial = folder / "result.json.partial"
        partial.write_text(json.dumps(tree, indent=1, allow_nan=False), encoding="utf-8")
        partial.replace(folder / "result.json")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the result that `save` wrote to `folder`."""
        folder = Path(folder)
        try:
            tree = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            with np.load(folder / "arrays.npz", allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            _restore_not_finite(tree)
            if tree.get("schema") != SCHEMA:
                raise CurvescopeError(f"expected schema {SCHEMA} in {folder}, found {tree.get('schema')}")
            result = _unpack(tree, arrays)
        except (
            OSError,
            ValueError,
            EOFError,
            LookupError,
            TypeError,
            AttributeError,
            NotImplementedError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            killed = "a run that was killed has a state/ folder and no result; run it again to resume"
            damaged = "a file is damaged or missing: the command that wrote it computes it again"
            raise UnreadableResult(
                f"expected a folder with result.json and arrays.npz, could not read {folder}: {error}",
                hint=damaged if (folder / "result.json").exists() else killed,
            ) from error
        if not isinstance(result, cls):
            raise CurvescopeError(
                f"expected a saved {cls.__name__} in {folder}, found {type(result).__name__}"
            )
        return result


def _numbers(result: Result) -> dict[str, Any]:
    """Fields that are one number or word; `value` includes its standard error."""
    values: dict[str, Any] = {f.name: getattr(result, f.name) for f in fields(result)}
    single = bool | int | float | str | np.generic
    numbers = {name: x for name, x in values.items() if isinstance(x, single) and x != ""}
    if "value" in numbers and "stderr" in numbers:
        numbers["value"] = with_error(numbers["value"], numbers.pop("stderr"))
    return numbers


def _short(value: Any) -> str:
    """Describe a value of a result in a few words."""
    if _is_tensor(value):
        return f"tensor of {tuple(value.shape)} {value.dtype}"
    if isinstance(value, np.ndarray) and (value.ndim > 1 or value.size > MAX_SHOWN):
        return f"array of {value.shape} {value.dtype}"
    if isinstance(value, np.ndarray):
        shown = [f"{x:.6g}" if isinstance(x, float) else repr(x) for x in value.reshape(-1).tolist()]
        return f"[{', '.join(shown)}]" if value.ndim else shown[0]
    if isinstance(value, list | tuple):
        shown = [_short(x) for x in value[: MAX_SHOWN // 2 if len(value) > MAX_SHOWN else MAX_SHOWN]]
        return f"[{', '.join([*shown, *([f'… of {len(value)}'] if len(value) > MAX_SHOWN else [])])}]"
    if isinstance(value, dict):
        shown = ", ".join(f"{key!r}: {_short(x)}" for key, x in value.items())
        return f"{{{shown}}}" if len(value) <= MAX_SHOWN else f"{{{len(value)} entries}}"
    return repr(value)


def _is_tensor(value: Any) -> bool:
    """Return True if the value is a torch tensor, without importing torch."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def _write_npz(file: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """Write an npz file like np.savez_compressed, but with any array names and never a pickle."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _pack(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """Convert `value` to JSON and store its arrays in `arrays` by their path."""
    if isinstance(value, Result):
        packed = {f.name: _pack(getattr(value, f.name), _join(path, f.name), arrays) for f in fields(value)}
        return {"@class": saved_name(type(value)), "fields": packed}
    if _is_tensor(value):
        arrays[path] = value.detach().cpu().numpy()
        return {"@tensor": path}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"a result holds arrays of numbers and text; {path} is an array of objects")
        arrays[path] = value
        return {"@array": path}
    if isinstance(value, dict):
        return {str(key): _pack(item, _join(path, str(key)), arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, _join(path, str(i)), arrays) for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a result holds arrays, numbers and text; {path} is a {type(value).__name__}")


def strict_json(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities in a JSON object by null and name them under `not_finite`."""
    words: dict[str, str] = {}

    def strict(value: Any, pointer: str) -> Any:
        if isinstance(value, dict):
            escaped = {key: str(key).replace("~", "~0").replace("/", "~1") for key in value}
            return {key: strict(item, f"{pointer}/{escaped[key]}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [strict(item, f"{pointer}/{i}") for i, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            words[pointer] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            return None
        return value

    strict_tree = strict(tree, "")
    return {**strict_tree, NOT_FINITE: words} if words else strict_tree


def _restore_not_finite(tree: dict[str, Any]) -> None:
    """Undo `strict_json` in a tree that was just read: put NaN and infinities back."""
    for pointer, word in tree.pop(NOT_FINITE, {}).items():
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        container: Any = tree
        for part in parents:
            container = container[int(part) if isinstance(container, list) else part]
        container[int(last) if isinstance(container, list) else last] = float(word)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _unpack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "@array" in value:
        return arrays[value["@array"]]
    if "@tensor" in value:
        import torch

        return torch.from_numpy(arrays[value["@tensor"]])
    if "@class" in value:
        cls = result_class(value["@class"])
        written: dict[str, Any] = value["fields"]
        saved = {RENAMED_FIELDS.get(name, name): item for name, item in written.items()}
        known = {p.name: p.default is p.empty for p in signature(cls).parameters.values()}
        if saved.keys() - known or any(needed and name not in saved for name, needed in known.items()):
            raise CurvescopeError(
                f"expected a {cls.__name__} with the fields {', '.join(known)}, found {', '.join(saved)}",
                hint="another version wrote it: run it again",
            )
        return cls(**{name: _unpack(item, arrays) for name, item in saved.items()})
    return {key: _unpack(item, arrays) for key, item in value.items()}


def saved_name(cls: type[Result]) -> str:
    """Name of a class in saved results: its package and name, so that files may move inside the package."""
    package = cls.__module__.split(".")
    if package[0] == "curvescope":
        package = package[: {"studies": 3, "papers": 4}.get(package[1], 2)]
    return ".".join([*package, cls.__qualname__])


def result_class(name: str) -> type[Result]:
    """Result class with a saved name; imports only modules of this package that define it."""
    name = RENAMED.get(name, name)
    if name in _CLASSES:
        return _CLASSES[name]
    package, _, short = name.rpartition(".")
    ours = package.startswith("curvescope.")
    parts = package.split(".")[1:] if ours else []
    while parts:  # search the files of the package, then those of its parent packages
        renamed = RENAMED.get(".".join(["curvescope", *parts, short]))
        if renamed is not None:  # saved under the name of an old module
            return result_class(renamed)
        candidates = [getattr(import_module(module), short) for module in _defining(parts, short)]
        results = [cls for cls in candidates if issubclass(cls, Result)]
        if len(results) == 1:
            return results[0]
        parts.pop()
    fix = "another version wrote it: run it again" if ours else "import the module that defines it"
    raise CurvescopeError(f"this version has no result class {name}", hint=fix)


def _defining(parts: list[str], short: str) -> list[str]:
    """Modules of a package that define a class with this name."""
    folder = SOURCE.joinpath(*parts)
    file = folder.with_suffix(".py")
    files = [file] if file.is_file() else sorted(folder.rglob("*.py"))
    defining = [f for f in files if re.search(rf"^class {short}\(", f.read_text(encoding="utf-8"), re.M)]
    names = [".".join(f.relative_to(SOURCE.parent).with_suffix("").parts) for f in defining]
    return [name.removesuffix(".__init__") for name in names]


@dataclass(frozen=True)
class Tabular(Result):
    """A result that can be shown as a table."""

    def table(self) -> Any:
        """Return the columns by name, or a list of rows."""
        raise NotImplementedError

    def to_frame(self) -> pd.DataFrame:
        """Return the table as a data frame."""
        import pandas as pd

        return pd.DataFrame(self.table())
