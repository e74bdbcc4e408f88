"""Record the terminal of the landing page: `python docs/make_terminal.py` writes docs/assets/terminal.svg.

The commands really run, in an empty folder, on the first script of docs/start.md; what they print is drawn by rich, as it
is. Only the names of folders with a date are shortened. Fonts are those of the reader's machine: the file loads nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
DRAWING = ROOT / "docs/assets/terminal.svg"
COMMANDS = [
    "echelon run --ranks 2 --name first train.py",
    "echelon prove --layouts ddp,fsdp,zero1 --ranks 1,2 --accumulation 1 --no-sgd train.py",
    "echelon ckpt ls checkpoints",
]
COLUMNS = 106

# rich's own frame, without the web font that it asks another host for.
FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#10151c" x="0" y="0" width="{width}" height="{height}" rx="10"/>
<g transform="translate({terminal_x}, 18)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def script() -> str:
    """The first script of docs/start.md."""
    found = re.search(r'```python title="train.py"\n(.*?)```', (ROOT / "docs/start.md").read_text(), re.DOTALL)
    if found is None:
        raise ValueError('docs/start.md must have a block with title="train.py"')
    return found[1]


def recorded(folder: Path) -> list[tuple[str, str]]:
    """Each command, and what it printed."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": str(COLUMNS),
    }
    (folder / "train.py").write_text(script())
    shown = []
    for command in COMMANDS:
        done = subprocess.run(
            shlex.split(command), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}")
        shown.append((command, re.sub(r"-\d{8}-\d{6}", "", done.stdout)))
    return shown


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for command, output in recorded(Path(folder)):
            console.print(Text("$ ", style="#7db8f0") + Text(command, style="bold #ffffff"))
            console.print(Text(output.rstrip() + "\n", style="#c9d4df"))
        DRAWING.write_text(console.export_svg(title="", code_format=FRAME, unique_id="terminal"))
    print(DRAWING.relative_to(ROOT))


if __name__ == "__main__":
    main()
