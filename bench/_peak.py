"""The peak memory of the training itself, without the memory of measurements in between."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["PeakMemory"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The peak in bytes above the start: of the device if there is a GPU, else of the process's resident memory.

    Linux records the largest resident size of a process, and resets it when "5" is written to /proc/self/clear_refs (proc(5)).
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._start = self._resident()
        self._peak = 0
        self._known = self._start is not None
        self.resume()

    def pause(self) -> None:
        """Stop counting."""
        self._peak = max(self._peak, self._high_water() or 0)

    def resume(self) -> None:
        """Count again."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            _RESET.write_text("5")
        except OSError:
            self._known = False

    def peak(self) -> int | None:
        """The peak in bytes; None if the system does not report it."""
        if not self._known or self._start is None:
            return None
        return max(0, self._peak - self._start)

    def _resident(self) -> int | None:
        return torch.cuda.memory_allocated() if self._cuda else _field("VmRSS")

    def _high_water(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self._cuda else _field("VmHWM")


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(name + ":")]
    return int(found[0].split()[1]) * 1024 if found else None
