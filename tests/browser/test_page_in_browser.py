"""The page in a real browser: everything is drawn, nothing is asked of a network, nobody is left out."""

from collections.abc import Iterator

import pytest
from visits import NARROW, WIDE, Visit, draw_everything, faults, try_every_choice, visit

SECTIONS = ["findings", "model", "spectra", "block-map", "blocks", "propagation", "landscape", "geometry"]
LOOKS = {WIDE: "light", NARROW: "dark"}


@pytest.fixture(scope="module", params=LOOKS)
def opened(request, browser, page_file) -> Iterator[tuple[int, Visit]]:
    """The page with everything drawn, wide and light or narrow and dark."""
    width = request.param
    with visit(browser, page_file, width=width, color_scheme=LOOKS[width]) as found:
        draw_everything(found.page)
        yield width, found


@pytest.fixture(scope="module")
def page(browser, page_file):
    """A wide page, drawn where it was looked at."""
    with visit(browser, page_file, color_scheme="light") as (page, complaints, _):
        yield page
        assert complaints == []


def test_the_page_opens_without_a_network_or_a_complaint(opened):
    width, (page, complaints, requests) = opened
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in SECTIONS:
        assert page.locator(f"#{name}").bounding_box()["height"] > 100, name
    assert page.locator(".scene .main-svg").count() >= page.locator(".scene").count() > 5


@pytest.mark.parametrize("width", LOOKS)
def test_axe_finds_no_serious_fault(browser, page_file, width):
    with visit(browser, page_file, width=width, color_scheme=LOOKS[width], bypass_csp=True) as (page, *_):
        assert faults(page) == []


def test_every_choice_of_every_switch_changes_its_figure(page):
    found = try_every_choice(page)
    assert [one for one in found if not one["changed"]] == []
    assert len({one["figure"] for one in found}) == page.locator("figure .controls").count() > 5


def test_a_person_with_a_keyboard_gets_to_the_content_and_to_a_switch(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.locator("figure .controls input:checked").first.focus()
    before = page.evaluate("document.activeElement.value")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.checked && document.activeElement.value") not in (
        False,
        before,
    )
    outline = "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert page.evaluate(outline) == "solid"


def test_a_table_is_sorted_by_keyboard(page):
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    table = page.locator("table:has(th button)").first
    table.locator("th button").first.focus()
    page.keyboard.press("Enter")
    assert table.locator("th[aria-sort]").first.get_attribute("aria-sort") in ("ascending", "descending")


def test_the_look_is_switched_and_kept_to_the_page(page):
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) != before
