"""A page as a person opens it: from a file, without a network, with every complaint kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, NARROW = 1280, 390
SERIOUS = ("serious", "critical")


class Visit(NamedTuple):
    """An open page, what its console complained of and what it asked the network for."""

    page: Page
    complaints: list[str]
    requests: list[str]


@contextmanager
def visit(browser: Browser, file: Path, *, width: int = WIDE, **options: Any) -> Iterator[Visit]:
    """Open the file with networking off; `options` are the browser context's (`color_scheme="dark"`)."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(file.as_uri(), timeout=120_000)  # milliseconds: a busy machine is slow, not wrong
    yield Visit(page, complaints, requests)
    context.close()


def draw_everything(page: Page) -> None:
    """Scroll through the page, so that whatever waits to be seen is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 700):
        page.evaluate(f"window.scrollTo(0, {y})")
        page.wait_for_timeout(20)
    page.wait_for_timeout(200)


EVERY_CHOICE = """
() => [...document.querySelectorAll("figure .controls")].flatMap((form) => {
  const scene = form.closest("figure").querySelector(".scene");
  const shown = () => {
    const { title, xaxis, yaxis } = scene.layout;
    return JSON.stringify([scene.data, title, xaxis?.type, xaxis?.title, yaxis?.type, yaxis?.title]);
  };
  const choose = (one, value) => {
    const button = [...one.querySelectorAll("input")].find((each) => each.value === value);
    if (button) button.checked = true; else one.querySelector("select").value = value;
    form.dispatchEvent(new Event("change"));
    return shown();
  };
  return [...form.children].flatMap((one) => {
    const [first, ...others] = [...one.querySelectorAll("input, option")].map((each) => each.value);
    const found = others.map((value) => {
      const before = choose(one, first), after = choose(one, value);
      return { figure: scene.closest("figure").id, choice: value, changed: after !== before };
    });
    return [...found, { figure: scene.closest("figure").id, choice: first,
                        changed: !others.length || shown() !== choose(one, first) }];
  });
})
"""


def try_every_choice(page: Page) -> list[dict[str, Any]]:
    """Every choice of every switch, one switch at a time: its figure, and whether what is drawn changed."""
    return page.evaluate(EVERY_CHOICE)


def faults(page: Page) -> list[str]:
    """What axe-core calls serious or critical: rule, words and the first place."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
        for one in found
        if one["impact"] in SERIOUS
    ]
