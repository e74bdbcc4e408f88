"""Right, though float32 cannot show it: see gates.py."""

from __future__ import annotations

from gates import train

train()
