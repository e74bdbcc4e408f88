"""Headless Chromium for tests of pages, driven by chromedriver over the W3C's WebDriver protocol: no package, only two programs.

Both must be there: `apt-get install chromium chromium-driver` on Debian, which `.ci/run` does.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MISSING = "needs Chromium and its driver: apt-get install --no-install-recommends chromium chromium-driver"

_ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class Seen(NamedTuple):
    """What a page did as it was opened."""

    errors: list[str]  # of the console, and requests that failed
    requests: list[str]  # all URLs that were asked for
    overflow: int  # pixels by which the page is wider than its window
    scheme: str  # light or dark


def is_there() -> bool:
    return shutil.which("chromedriver") is not None and (shutil.which("chromium") or shutil.which("google-chrome")) is not None


class Browser:
    """One session. `open` goes to a page in a window of a given width and scheme, and says what happened."""

    def __init__(self, address: str, profile: Path) -> None:
        self._address = address
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {name: value for name, value in options.items() if value},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._session = ""
        self._session = "/session/" + self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]

    def open(self, url: str, *, width: int, dark: bool, height: int = 900) -> Seen:
        self._ask("POST", "/url", {"url": "about:blank"})  # a page that saw the colours change would store them, maybe late
        self._size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        parts = urllib.parse.urlsplit(url)
        self._command("Storage.clearDataForOrigin", origin=f"{parts.scheme}://{parts.netloc}", storageTypes="all")
        self._logs()
        self._ask("POST", "/url", {"url": url})
        overflow, scheme_seen = self.run(_OVERFLOW), self.run(_SCHEME)
        errors, requests = self._logs()  # last: what the page had to say comes before its answers
        return Seen(errors, requests, overflow, scheme_seen)

    def resized(self, width: int, height: int = 900) -> int:
        """Give the window another width; by how many pixels the page is wider, once it was drawn again."""
        self._size(width, height)
        self.run("return new Promise(then => requestAnimationFrame(() => requestAnimationFrame(then)))")
        return int(self.run(_OVERFLOW))

    def _size(self, width: int, height: int) -> None:
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def run(self, script: str) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def close(self) -> None:
        self._ask("DELETE", "")

    def _command(self, name: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _logs(self) -> tuple[list[str], list[str]]:
        errors = [f"{line['level']}: {line['message']}" for line in self._ask("POST", "/se/log", {"type": "browser"})]
        requests = []
        for line in self._ask("POST", "/se/log", {"type": "performance"}):
            message = json.loads(line["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.loadingFailed" and not message["params"].get("canceled"):
                errors.append(f"a request failed: {message['params']['errorText']}")
        return errors, requests

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._address}{self._session}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"chromedriver refuses {path}: {error.read().decode()[:500]}") from None


_OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
_SCHEME = "return document.body.getAttribute('data-md-color-scheme') == 'slate' ? 'dark' : 'light'"


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    driver, port = _started_driver()
    try:
        opened = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield opened
        finally:
            opened.close()
    finally:
        _end(driver)


def _started_driver(tries: int = 5) -> tuple[subprocess.Popen[str], int]:
    """A chromedriver and its port. It asks for a free one in IPv6 and ends at once if another process has that one in IPv4."""
    printed: list[str] = []
    for _ in range(tries):
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            printed.append(line)
            if found := re.search(r"started successfully on port (\d+)", line):
                return driver, int(found[1])
        _end(driver)
    raise RuntimeError(f"chromedriver ended {tries} times before it listened: {''.join(printed)}")


def _end(driver: subprocess.Popen[str]) -> None:
    driver.terminate()
    driver.wait(30)
    if driver.stdout is not None:
        driver.stdout.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server for the files of a folder, on this machine only."""
    handler = lambda *arguments: _Quiet(*arguments, directory=str(folder))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="site")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def host_of(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or ""
