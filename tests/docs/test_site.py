"""The site: it is built with every warning as an error, is whole, loads nothing from elsewhere, and opens without an error."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import echelon
from tests.kit import browser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
Command = Callable[..., subprocess.CompletedProcess[str]]
# Landing page, guides, reference, a long page of wide tables, plots.
OPENED = [
    "index.html",
    "start.html",
    "guides/preemption.html",
    "reference/loop.html",
    "moving/torchtnt.html",
    "benchmarks.html",
    "compared.html",
]


def test_the_reference_has_every_public_name_once() -> None:
    modules = [name for name in vars(echelon)["_MODULES"] if name != "compat"]
    known = {name: name for name in echelon.__all__}
    for module in modules:
        for name in importlib.import_module(f"echelon.{module}").__all__:
            known.setdefault(name, f"{module}.{name}")
    shown = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: echelon\.([\w.]+)$", page.read_text(), re.M)
    ]
    assert sorted(shown) == sorted(known.values())
    linked = re.findall(r"\(\w+\.md#echelon\.([\w.]+)\)", (DOCS / "reference/index.md").read_text())
    assert sorted(linked) == sorted(known.values())


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where NamedTuple looks up its annotations
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_the_plots_are_those_of_the_tables() -> None:
    drawn = script("make_plots").DRAWN
    assert {name: plot() for name, plot in drawn.items()} == {
        path.name: path.read_text() for path in (DOCS / "plots").glob("*.svg")
    }


def test_the_terminal_shows_what_its_script_runs() -> None:
    recording = script("make_terminal")
    text = re.sub(r"<[^>]+>", "", recording.DRAWING.read_text()).replace("&#160;", " ")
    assert [command for command in recording.COMMANDS if command not in text] == []
    assert "import echelon" in recording.script()


def test_links_to_other_places_are_whole() -> None:
    """By their form only: nothing is asked of a network."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for url in re.findall(r"\]\((\w+:[^)\s]*)\)", page.read_text()):
            parts = urllib.parse.urlsplit(url)
            assert parts.scheme == "https" and re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), f"{page.name}: {url}"


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser load, and its text in paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.paragraphs: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "object", "embed", "use"):
            self.urls += [value for name in ("src", "srcset", "data", "href", "xlink:href") if (value := given.get(name))]
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.urls.append(given.get("href") or "")
        self._in = tag if tag in ("p", "style") else "" if tag in ("pre", "svg") else self._in
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = "" if tag == self._in else self._in

    def handle_data(self, data: str) -> None:
        if self._in == "p":
            self.paragraphs[-1] += data
        elif self._in == "style":
            self.urls += loaded_by_css(data)


def loaded_by_css(text: str) -> list[str]:
    return [url for pair in re.findall(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""", text) for url in pair if url]


def is_elsewhere(url: str) -> bool:
    return url.startswith("//") or urllib.parse.urlsplit(url).scheme not in ("", "data")


@pytest.mark.full
def test_no_page_loads_anything_from_elsewhere_and_all_lists_and_tables_became_such(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        parsed = Loaded()
        parsed.feed(page.read_text())
        assert [url for url in parsed.urls if is_elsewhere(url)] == [], page
        if "repository" not in page.relative_to(site).parts:
            assert [text for text in parsed.paragraphs if re.search(r"^(- |\|.*\|$|```|<!--)", text, re.M)] == [], page
    for file in [*site.rglob("*.css"), *(DOCS / "assets").glob("*.svg")]:
        assert [url for url in loaded_by_css(file.read_text()) if is_elsewhere(url) and not url.startswith("#")] == [], file


@pytest.mark.full
@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_pages_open_in_a_browser_without_an_error(site: Path, tmp_path: Path) -> None:
    """Wide and light, a phone and dark: nothing in the console, nothing asked of another host, nothing wider than the window."""
    with browser.served(site) as address, browser.browser(tmp_path) as chromium:
        for page in OPENED:
            for dark, width in ((False, 1280), (True, 390)):
                seen = chromium.open(f"{address}/{page}", width=width, dark=dark)
                where = f"{page}, {width} wide, {'dark' if dark else 'light'}"
                assert seen.errors == [], where
                assert [url for url in seen.requests if browser.host_of(url) not in ("127.0.0.1", "")] == [], where
                assert len(seen.requests) > 3, where
                assert seen.overflow == 0, where
                assert seen.scheme == ("dark" if dark else "light"), where
                assert chromium.run("return document.querySelector('h1').offsetHeight") > 0, where


_TYPE = """
const field = document.querySelector('.md-search__input')
field.focus()
field.value = 'preemption'
field.dispatchEvent(new KeyboardEvent('keyup', {key: 'n'}))
"""


@pytest.mark.full
@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_the_search_finds_a_page(site: Path, tmp_path: Path) -> None:
    with browser.served(site) as address, browser.browser(tmp_path) as chromium:
        chromium.open(f"{address}/index.html", width=1280, dark=False)
        found, end = [], time.monotonic() + 60
        while not found and time.monotonic() < end:
            chromium.run(_TYPE)
            found = chromium.run("return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
        assert f"{address}/guides/preemption.html" in [link.partition("?")[0].partition("#")[0] for link in found]


@pytest.mark.full
@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_pages_open_from_the_disk_and_ask_no_host(site: Path, tmp_path: Path) -> None:
    with browser.browser(tmp_path) as chromium:
        seen = chromium.open((site / "index.html").as_uri(), width=1280, dark=False)
        assert (seen.errors, [url for url in seen.requests if browser.host_of(url)]) == ([], [])
        assert chromium.run("return document.querySelector('h1').offsetHeight") > 0


@pytest.mark.full
@pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)
def test_the_report_of_a_run_opens_in_a_browser(echelon_command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script("make_terminal").script())
    done = echelon_command("run", "--ranks", "2", "--name", "first", "train.py")
    assert done.returncode == 0, done.stderr
    with browser.browser(tmp_path) as chromium:
        for dark, width in ((False, 1280), (True, 390)):
            seen = chromium.open((tmp_path / "runs/first/report.html").as_uri(), width=width, dark=dark)
            assert (seen.errors, seen.overflow, len(seen.requests)) == ([], 0, 1)
