"""The page in a real browser: everything is drawn, nothing is asked of a network, nobody is left out."""

import pytest
from visits import NARROW, WIDE, draw_everything, faults, visit


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_opens_without_a_network_or_a_complaint(browser, page_file, width, scheme):
    with visit(browser, page_file, width=width, color_scheme=scheme) as (page, complaints, requests):
        draw_everything(page)
        assert complaints == []
        assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
