"""Write the corpus `sample`: a snapshot of curvescope's own source and docs, about 100 kB.

    python scripts/make_sample.py

The snapshot is fixed: results, tests and the README use it. Running this script again replaces it with
the current source; then measure all these numbers again.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SIZE = 100_000
SOURCES = [
    "docs/conventions.md",
    "src/curvescope/core/*.py",
    "src/curvescope/models/*.py",
    "src/curvescope/problem.py",
    "src/curvescope/operators/*.py",
    "src/curvescope/losses/*.py",
    "src/curvescope/algorithms/*.py",
]


def main() -> None:
    files = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    text = "\n\n".join(path.read_text(encoding="utf-8").strip() for path in files)[:SIZE]
    text = text[: text.rindex("\n")] + "\n"
    (ROOT / "src/curvescope/assets/sample.txt").write_text(text, encoding="utf-8")
    print(f"{len(text.encode())} bytes of {len(files)} files")


if __name__ == "__main__":
    main()
