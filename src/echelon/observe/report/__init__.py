"""The report: one run folder as one HTML page that works offline, in an e-mail or in an archive; or several runs, compared.

Python reads the folders, thins the curves and writes facts; `template.html` has the page, `page.js` draws the curves with uPlot,
which `uplot/` has as it was released.
"""

from echelon.observe.report.page import compare, render, write

__all__ = ["compare", "render", "write"]
