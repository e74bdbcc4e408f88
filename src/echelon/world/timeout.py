"""Give groups other than the default one its timeout for collectives.

torch gives them its own default, 10 minutes for NCCL and 30 for gloo, whatever timeout `init_process_group` got: a run that asked
for one minute would hang for 30 in a mesh's axis. There is no public way to read a group's timeout, or to set it after
`init_device_mesh` has made the group. So this module uses `options._timeout` of a group's backends and `_set_pg_timeout`. Used
with torch 2.13; a test in tests/world/test_init.py notices a change. If they are missing, groups keep torch's default.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["inherit_timeout", "timeout_of_default_group"]


def timeout_of_default_group() -> timedelta | None:
    """The default group's timeout; None if torch does not provide it."""
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(dist.group.WORLD)]
    known = [timeout for timeout in timeouts if isinstance(timeout, timedelta)]
    return min(known) if known else None


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give this rank's collectives over `group` the default group's timeout."""
    timeout, put = timeout_of_default_group(), getattr(distributed_c10d, "_set_pg_timeout", None)
    if timeout is not None and put is not None and group is not dist.group.WORLD:
        put(timeout, group)


def _backends(group: Any) -> list[Any]:
    if not hasattr(group, "_device_types") or not hasattr(group, "_get_backend"):
        return []
    return [group._get_backend(device) for device in group._device_types]
