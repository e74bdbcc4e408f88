"""The report: one run folder, or several to compare, as one HTML page that works offline, in an e-mail or in an archive.

Python reads the folders, thins the curves and writes facts. `template.html` is the page, `page.js` draws the curves with uPlot,
whose released files are in `uplot/`.
"""

from echelon.observe.report.page import compare, render, write

__all__ = ["compare", "render", "write"]
