"""A part in a new interpreter: `runner` starts it where a fork cannot use the device."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.gpu.parts import PARTS
from bench.gpu.runner import Setting, perform

if __name__ == "__main__":
    name, device, small, folder, limit_s = sys.argv[1:]
    (part,) = (part for part in PARTS if part.name == name)
    perform(part, Setting(device, small == "1", Path(folder), float(limit_s), fresh=True))
