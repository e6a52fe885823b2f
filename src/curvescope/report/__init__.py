"""The report: run folders to one self-contained HTML page. Loads no model."""

from curvescope.report.page import write_page

__all__ = ["write_page"]
