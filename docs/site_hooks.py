"""What MkDocs needs beside the pages: links that leave docs/ for a file of the repository lead to a page that shows it.

The pages are read in the repository too, so their links are paths there. Each such file becomes a page under `repository/`:
Markdown is rendered, other files are shown as they are, a folder is listed. Plots are put into the page, so that they take its
colours, and comments for the tests of code blocks are left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from echelon.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\])\(([^()\s:#]+)(#[\w-]+)?\)")
_PLOT = re.compile(r"^!\[([^\]]*)\]\(([\w./]*plots/[\w.]+\.svg)\)$", re.MULTILINE)
_COMMENT = re.compile(r"^<!-- code: .*? -->\n", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the repository that a page, or such a page, links to."""
    waiting = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    known = set(waiting)
    while waiting:
        source = waiting.pop()
        for target in _outside(source):
            if target not in known:
                known.add(target)
                files.append(File.generated(config, _page_of(target), content=_shown(target)))
                waiting += [target] if target.endswith(".md") else []
    files.append(File.generated(config, "repository/commands.md", content=_commands()))
    return files


def _commands() -> str:
    """What `--help` of each command says."""
    text = "# Commands\n\n`echelon COMMAND --help` says the same.\n"
    for verb, purpose in VERBS.items():
        parser = argparse.ArgumentParser(f"echelon {verb}", formatter_class=_formatter)
        importlib.import_module(f"echelon.cli.{verb}").add_arguments(parser)
        text += f"\n## echelon {verb}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n```text\n{parser.format_help().rstrip()}\n```\n"
    return text


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=80)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    if source.startswith("repository/"):
        return markdown  # already written for the site
    return _for_site(markdown, f"docs/{source}")


@event_priority(-100)  # after the search index was written
def on_post_build(config: MkDocsConfig) -> None:
    """The search index as a script, too: a page that is opened from the disk may not read other files."""
    index = Path(config.site_dir, "search/search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def _for_site(markdown: str, source: str) -> str:
    """The text of a page, `source` being its path in the repository."""
    here = posixpath.dirname(_page_of(source))

    def link(found: re.Match[str]) -> str:
        target = _target(source, found[1])
        if target is None or not (target == source or _is_page(target)):
            return found[0]
        return f"({posixpath.relpath(_page_of(target), here or '.')}{found[2] or ''})"

    markdown = _PLOT.sub(lambda found: _drawn(found[1], (ROOT / source).parent / found[2]), _COMMENT.sub("", markdown))
    return _LINK.sub(link, markdown)


def _outside(source: str) -> Iterator[str]:
    for link in _LINK.finditer((ROOT / source).read_text()):
        target = _target(source, link[1])
        if target is not None and not target.startswith("docs/"):
            yield target


def _target(source: str, link: str) -> str | None:
    """The path in the repository to which a link leads; None if nothing is there, which MkDocs then says."""
    path = os.path.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _is_page(target: str) -> bool:
    return target.endswith(".md") or not target.startswith("docs/")


def _page_of(path: str) -> str:
    """Where in the site a file of the repository is shown."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _shown(path: str) -> str:
    file = ROOT / path
    if path.endswith(".md"):
        return _for_site(file.read_text(), path)
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.suffix in _LANGUAGES)
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"{head}``````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n``````\n"


def _drawn(words: str, plot: Path) -> str:
    """A plot as part of the page, whose text colour it takes."""
    svg = re.sub(r"\s*\n\s*", "", plot.read_text())
    return f'<div class="plot" role="img" aria-label="{words}">{svg}</div>'
