"""The page in a real browser: everything is drawn, nothing is asked of a network, nobody is left out."""

import pytest
from visits import NARROW, WIDE, draw_everything, faults, visit

SECTIONS = ["findings", "model", "spectra", "block-map", "blocks", "propagation", "landscape", "geometry"]


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_the_page_opens_without_a_network_or_a_complaint(browser, page_file, width, scheme):
    with visit(browser, page_file, width=width, color_scheme=scheme) as (page, complaints, requests):
        draw_everything(page)
        assert complaints == []
        assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in SECTIONS:
            assert page.locator(f"#{name}").bounding_box()["height"] > 100, name
        assert page.locator(".scene .main-svg").count() >= page.locator(".scene").count() > 5


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_axe_finds_no_serious_fault(browser, page_file, width, scheme):
    with visit(browser, page_file, width=width, color_scheme=scheme, bypass_csp=True) as (page, *_):
        assert faults(page) == []


def test_a_switch_changes_its_figure(browser, page_file):
    with visit(browser, page_file) as (page, *_):
        draw_everything(page)
        frame = page.locator("figure:has(.scene):has(input[type=radio])").first
        frame.scroll_into_view_if_needed()
        before = frame.locator(".scene").inner_html()
        choices = frame.locator("input[type=radio]:not(:checked)")
        choices.first.check(force=True)
        page.wait_for_timeout(300)
        assert frame.locator(".scene").inner_html() != before


def test_a_table_is_sorted_by_keyboard(browser, page_file):
    with visit(browser, page_file) as (page, *_):
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        table = page.locator("table:has(th button)").first
        button = table.locator("th button").first
        button.focus()
        page.keyboard.press("Enter")
        assert table.locator("th[aria-sort]").first.get_attribute("aria-sort") in ("ascending", "descending")


def test_the_look_is_switched_and_kept_to_the_page(browser, page_file):
    with visit(browser, page_file, color_scheme="light") as (page, complaints, _):
        background = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(background)
        page.locator("#theme").click()
        assert page.evaluate(background) != before
        assert complaints == []
