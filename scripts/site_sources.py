"""Hook of mkdocs that adds files outside docs/ to the site if a page links to them.

Tests and scripts become pages with their code, notebooks pages with their outputs, stored results pages or
files, below source/ and excluded from the search. A dead link stays unchanged, so the strict build fails.
"""

from __future__ import annotations

import json
import re
from os.path import normpath, relpath
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(?=[)#])")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
CODE = {".py": "python", ".txt": "text", ".lock": "text"}
NOTEBOOK = ".ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and the files that these link to."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        for path in set(linked(*waiting.pop())) - seen:
            seen.add(path)
            files.append(made(path, config))
            if path.endswith(".md"):
                waiting.append((path, (ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links out of docs/ by links to these files in the site."""
    source = page.file.src_uri
    home = source.removeprefix("source/") if source.startswith("source/") else f"docs/{source}"

    def turned(link: re.Match[str]) -> str:
        path = resolved(home, link[0])
        if not (outside(path) or outside(home)):
            return link[0]
        return relpath(place(path), PurePosixPath(source).parent)

    return LINK.sub(turned, markdown)


def linked(home: str, text: str) -> list[str]:
    """Return the files outside docs/ that a page links to, by their paths from the root."""
    paths = [resolved(home, link) for link in LINK.findall(text)]
    return [path for path in paths if outside(path) and (ROOT / path).is_file()]


def resolved(home: str, link: str) -> str:
    return normpath(PurePosixPath(home).parent / link)


def outside(path: str) -> bool:
    return not path.startswith("docs/")


def place(path: str) -> str:
    """Return the path of a repository file in the site, in mkdocs' form."""
    if not outside(path):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if Path(path).suffix in {*CODE, NOTEBOOK} else f"source/{path}"


def made(path: str, config: MkDocsConfig) -> File:
    """Return a page for a text file, or the file itself."""
    file, suffix = ROOT / path, Path(path).suffix
    if suffix in CODE:
        text = file.read_text(encoding="utf-8")
        page = f"{HIDDEN}# {path}\n\n````{CODE[suffix]}\n{text}````\n"
        return File.generated(config, place(path), content=page)
    if suffix == NOTEBOOK:
        text = notebook_page(json.loads(file.read_text(encoding="utf-8")))
        return File.generated(config, place(path), content=HIDDEN + text)
    if suffix == ".md":
        return File.generated(config, place(path), content=HIDDEN + file.read_text(encoding="utf-8"))
    return File.generated(config, place(path), abs_src_path=str(file))


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return the Markdown of a notebook: its text, and its code with the outputs that are stored with it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        parts += map(output, cell.get("outputs", []))
    return "\n\n".join(parts) + "\n"


def output(stored: dict[str, Any]) -> str:
    """Return the Markdown of an output: its HTML, its picture, or its text."""
    data = stored.get("data", {})
    if "text/html" in data:
        return f"<div>\n{''.join(data['text/html'])}\n</div>"
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return f'<img src="data:{kind};base64,{"".join(data[kind]).strip()}" alt="figure">'
    text = "".join(stored.get("text", data.get("text/plain", ""))).rstrip()
    return f"````text\n{text}\n````"
