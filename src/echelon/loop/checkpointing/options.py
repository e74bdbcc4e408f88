"""Less usual options of saving and restoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from echelon.common.arguments import Given
from echelon.common.errors import CheckpointOptionError

__all__ = ["RestoreOptions", "SaveOptions", "check_group"]

_given = Given(CheckpointOptionError)


@dataclass(frozen=True)
class SaveOptions:
    """Further options of a DistributedCheckpointSaver.

    Args:
        keep_every_n_updates: checkpoints of every n-th update are never removed.
        on_busy: if a save is due while an asynchronous one is being written: "wait" for it, or "skip" the new save.
        tolerated_failures: how many saves in a row may fail because of the storage (a full disk, a permission) with an error in
            the log; one more ends the run. The save at the end of training must always succeed. 0 tolerates none.
        only_trained: leave out parameters that are frozen from the beginning, such as the base model of an adapter: the script
            builds them each time. A restore compares their checksums, and refuses another base. Buffers are saved.
        restart: set checkpoints aside that are ahead of this run, instead of refusing to start.
    """

    keep_every_n_updates: int | None = None
    on_busy: Literal["wait", "skip"] = "wait"
    tolerated_failures: int = 3
    only_trained: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        _given.flags_of(self)
        _given.require(self.on_busy in ("wait", "skip"), "on_busy", "'wait' or 'skip'", self.on_busy)
        _given.whole("tolerated_failures", self.tolerated_failures, at_least=0)
        if self.keep_every_n_updates is not None:
            _given.whole("keep_every_n_updates", self.keep_every_n_updates, at_least=1, or_none="for none")


@dataclass(frozen=True)
class RestoreOptions:
    """What to take from a checkpoint.

    Args:
        strict: False ignores state that only the unit or only the checkpoint has; both are logged.
        allow_changes: names of intended changes that are not harmless, such as "global_batch"; also names of states that only the
            checkpoint has, to ignore them, or only the unit has, to leave them as they are.
        rename: for renamed parts, the beginning of a name in the checkpoint and its name here, such as
            `{"module.encoder": "module.backbone"}`. It also applies to an optimizer's state.
        show_changes: log a table of changes since the save, harmless ones too.
    """

    restore_modules: bool = True
    restore_train_progress: bool = True
    restore_eval_progress: bool = True
    restore_predict_progress: bool = True
    restore_optimizers: bool = True
    restore_lr_schedulers: bool = True
    strict: bool = True
    allow_changes: tuple[str, ...] = ()
    restore_metrics: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    show_changes: bool = True

    def __post_init__(self) -> None:
        _given.flags_of(self)
        names = _given.several("allow_changes", self.allow_changes, "a list of names", lambda name: isinstance(name, str))
        object.__setattr__(self, "allow_changes", names)
        renames = isinstance(self.rename, Mapping) and all(isinstance(name, str) for pair in self.rename.items() for name in pair)
        _given.require(renames, "rename", "a dict from names in the checkpoint to names here", self.rename)

    @classmethod
    def weights_only(cls, *, strict: bool = True) -> RestoreOptions:
        """Restore only modules, for fine-tuning."""
        return cls(True, False, False, False, False, False, strict)

    @property
    def takes_weights_only(self) -> bool:
        return not (self.restore_train_progress or self.restore_optimizers or self.restore_lr_schedulers)


def check_group(process_group: dist.ProcessGroup | None) -> None:
    """
    Raises:
        UsageError: some ranks would not take part in a save.
    """
    if process_group is None:
        return
    is_group = isinstance(process_group, dist.ProcessGroup) or process_group == dist.GroupMember.NON_GROUP_MEMBER
    _given.require(is_group, "process_group", "None or a group of all ranks", process_group)
    size, all_ranks = dist.get_world_size(process_group), dist.get_world_size()
    if size != all_ranks:
        raise CheckpointOptionError(f"process_group must be None or a group of all {all_ranks} ranks, got one of {max(size, 0)}.")
