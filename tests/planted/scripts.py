"""The scripts for prove: cells of mistakes.py, right.py and judged.py, which `# %% NAME` begins, each a program by itself."""

from __future__ import annotations

import re
from pathlib import Path

PLANTED = Path(__file__).parent


def cells(file: str) -> dict[str, tuple[str, str]]:
    """By name: what stands behind it in the line that begins the cell, and the program."""
    parts = re.split(r"^# %% (\w+)(?:: (.*))?\n", (PLANTED / f"{file}.py").read_text(), flags=re.MULTILINE)[1:]
    return {name: (said or "", text) for name, said, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


PROGRAMS = {name: text for file in ("mistakes", "right", "judged") for name, (_, text) in cells(file).items()}


def script(folder: Path, name: str) -> str:
    """The path of a file with the program, and with all that common.py has, unless it imports torch for itself."""
    text = PROGRAMS[name]
    shared = "" if re.search("^import torch$", text, re.MULTILINE) else "from common import *\n"
    path = folder / f"{name}.py"
    path.write_text(f"from __future__ import annotations\nimport sys\nsys.path.append({str(PLANTED)!r})\n{shared}{text}")
    return str(path)
