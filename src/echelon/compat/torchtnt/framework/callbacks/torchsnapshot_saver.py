"""torchtnt.framework.callbacks.torchsnapshot_saver: its successor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from echelon.compat.torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver, without_effect
from echelon.world import agree

__all__ = ["TorchSnapshotSaver"]

logger = logging.getLogger(__name__)


class TorchSnapshotSaver(DistributedCheckpointSaver):
    """torchsnapshot is no longer maintained, so this saves as DistributedCheckpointSaver does, and says so once.

    Snapshots that torchsnapshot has written cannot be read.
    """

    _told = False

    def __init__(
        self,
        dirpath: str | Path,
        *,
        async_checkpoint: bool = True,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not TorchSnapshotSaver._told and agree.is_rank0():
            TorchSnapshotSaver._told = True
            logger.warning(
                "TorchSnapshotSaver saves in the format of DistributedCheckpointSaver: torchsnapshot is not maintained"
            )
        without_effect("TorchSnapshotSaver", replicated=replicated, storage_options=storage_options)
        super().__init__(dirpath, async_checkpoint=async_checkpoint, **options)
