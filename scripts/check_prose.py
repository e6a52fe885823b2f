"""Check the English of docstrings, comments, messages and pages against the project's own small vocabulary.

    python scripts/check_prose.py [FILES OR FOLDERS]

Codespell checks the spelling. This script finds docstrings that do not begin with
a verb or a quantity, sentences that begin with a relative clause, and words that mean something else here
than everywhere else. Each finding is a line `file:line: text → advice`; the exit code is 1 if there are any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
CODE = ("src/**/*.py", "benchmarks/*.py", "scripts/*.py", "notebooks/*.py")
MESSAGE_WORDS = 4  # a string of fewer words is a name or a label, not a sentence

OPENINGS = (
    "what whether how which who whose where of as from for by at on in with that every when why than "
    "because only also not so"
)
DOCSTRING_OPENING = re.compile(rf"(?:{'|'.join(OPENINGS.split())})\b", re.IGNORECASE)
SENTENCE_OPENING = re.compile(r"(?:What|Whether|Whose|Who|Of|Which)\s(?!.*\?$)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")

VOCABULARY = {
    r"\b(?:is|are|was|were|has|have) no (?:place|part|member|error|reason of|word|sign of)\b": "“is not a …”",
    r"\b(?:rooms?|houses?|house rules?|stand-?ins?)\b": "package, module, replacement",
    r"\bless (?:that|those) of\b": "“minus”",
    r"\bby heart\b": "memorized",
    r"\bwhat (?:is|was|are) (?:kept|told|said|asked|met|there)\b": "name the thing",
    r"\b(?:the|a) state that is (?:kept|told)\b": "name the state",
    r"\b(?:whole|of one's own) (?:said|told)\b": "name the thing",
    r"\bwho (?:asks|reads|wants|has|trains|knows)\b": "name the actor: “a user who …”",
    r"(?<!such )\bas (?:that|those) of\b": "“like …”, “the same as …”",
    r"\b(?:is|are|was|were) (?:looked at|gone through|thought of)\b": "name the actor and use a verb",
    r"\bof which (?:the|none|each|all)\b": "split the sentence",
    r"\bwhere (?:there (?:is|are|was|were)|nothing|none|no one|that is|it is not|one is)\b": "“if”",
    r"\bstones? in\b": "obstacles",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b)": "“is not a …”",
    r"\bless (?:the|its|their)\b": "“minus”",
    r"\bg(?:o|oes|oing|one|ent) on\b": "continue, resume",
    r"\b(?:put right|mended)\b": "corrected",
    r"\basked for\b": "requested, or name what the user chose",
    r"\bcannot be had\b": "“is not available”",
}
VOCABULARY_PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in VOCABULARY.items()]


class Passage(NamedTuple):
    """A piece of English: where it begins, and if it is a docstring."""

    line: int
    text: str
    is_docstring: bool = False


def passages_of_code(source: str) -> Iterator[Passage]:
    """Return docstrings, comments, and string constants long enough to be sentences."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                constant = node.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
                docstrings.add(constant)
                yield Passage(constant.lineno, text, True)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in docstrings and len(node.value.split()) >= MESSAGE_WORDS:
            yield Passage(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], token.string.lstrip("#: "))


def passages_of_page(source: str) -> Iterator[Passage]:
    """Return the paragraphs and list items of a Markdown page, without code, tables and headings."""
    start, lines, in_code = 1, [], False
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_prose = not in_code and line.strip() and not line.lstrip().startswith(("|", "#", "```", "!["))
        begins_item = re.match(r"\s*(?:[-*]|\d+\.) ", line) is not None
        if lines and (begins_item or not is_prose):
            yield Passage(start, " ".join(lines))
            lines = []
        if is_prose:
            start = number if not lines else start
            lines.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line).strip())


def findings(passage: Passage) -> Iterator[str]:
    """Return what is wrong with a passage."""
    text = re.sub(r"`[^`]*`|\$[^$]*\$", "X", passage.text)
    if passage.is_docstring and DOCSTRING_OPENING.match(text):
        yield f"{text.split()[0]} … → begin with a verb or the quantity"
    elif not passage.is_docstring or "\n\n" in text:
        for sentence in SENTENCE_END.split(" ".join(text.split())):
            if SENTENCE_OPENING.match(sentence):
                yield f"{sentence[:50]} → begin with the subject"
    for pattern, advice in VOCABULARY_PATTERNS:
        match = pattern.search(text)
        if match:
            yield f"“{' '.join(match.group().split())}” → {advice}"


def check(path: Path) -> list[str]:
    """Return the findings in a file, one line each."""
    source = path.read_text(encoding="utf-8")
    passages = passages_of_code(source) if path.suffix == ".py" else passages_of_page(source)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [f"{name}:{passage.line}: {finding}" for passage in passages for finding in findings(passage)]


def files_below(path: Path) -> list[Path]:
    """Return the path itself, or the Python files and pages in a folder."""
    return (
        sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md")) if path.is_dir() else [path]
    )


def main(arguments: list[str]) -> int:
    """Check the files that are named, or all."""
    paths = [path for name in arguments for path in files_below(Path(name).resolve())]
    paths = paths or sorted(path for pattern in (*PAGES, *CODE) for path in ROOT.glob(pattern))
    lines = [line for path in paths for line in check(path)]
    print("\n".join([*lines, f"{len(lines)} findings in {len(paths)} files"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
