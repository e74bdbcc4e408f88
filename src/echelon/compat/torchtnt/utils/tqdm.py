"""torchtnt.utils.tqdm: bars for loops of your own. In echelon's loops, the callback TQDMProgressBar draws them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from echelon.data.prefetch import known_length

__all__ = ["close_progress_bar", "create_progress_bar", "update_progress_bar"]


def create_progress_bar(
    dataloader: Iterable[Any],
    *,
    desc: str,
    num_epochs_completed: int,
    num_steps_completed: int,
    max_steps: int | None,
    max_steps_per_epoch: int | None,
    mininterval: float | None = None,
    file: TextIO | None = None,
) -> Any:
    """A tqdm bar for an epoch; its length is the least that loader and limits allow, or unknown.

    Args:
        num_steps_completed: where the bar begins.
        mininterval: least seconds between two drawings; by default tqdm's.
        file: where to; by default standard error.
    """
    from tqdm.auto import tqdm

    left = None if max_steps is None else max_steps - num_steps_completed
    bounds = [bound for bound in (known_length(dataloader), max_steps_per_epoch, left) if bound is not None]
    options: dict[str, Any] = {} if mininterval is None else {"mininterval": mininterval}
    return tqdm(
        desc=f"{desc} {num_epochs_completed}",
        total=min(bounds, default=None),
        initial=num_steps_completed,
        bar_format="{l_bar}{bar}{r_bar}\n",
        file=file,
        **options,
    )


def update_progress_bar(progress_bar: Any, num_steps_completed: int, refresh_rate: int) -> None:
    """Draw every `refresh_rate` steps."""
    if num_steps_completed % refresh_rate == 0:
        progress_bar.update(refresh_rate)


def close_progress_bar(progress_bar: Any, num_steps_completed: int, refresh_rate: int) -> None:
    """Draw the steps since the last drawing, and end the bar."""
    progress_bar.update(num_steps_completed % refresh_rate)
    progress_bar.close()
