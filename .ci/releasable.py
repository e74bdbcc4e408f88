"""Whether a tag may be published: it is the version, the change log has its date, and the project says where its home is.

python .ci/releasable.py v0.1.0
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def reasons(tag: str) -> list[str]:
    """Why not; empty if it may."""
    source = (ROOT / "src/echelon/contracts/version.py").read_text()
    version = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    assert version is not None
    found = []
    if tag != f"v{version[1]}":
        found.append(f"the tag must be v{version[1]}, the version in src/echelon/contracts/version.py, got {tag}")
    heading = rf"^## \[{re.escape(version[1])}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md must have the line `## [{version[1]}] - YYYY-MM-DD`")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    if not {"Repository", "Changelog"} <= urls.keys():
        found.append("pyproject.toml must have [project.urls] with Repository and Changelog: where the project's home is")
    return found


if __name__ == "__main__":
    why = reasons(sys.argv[1])
    print("\n".join(why) or "may be published")
    sys.exit(bool(why))
