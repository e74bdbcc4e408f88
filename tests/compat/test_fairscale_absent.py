"""What FairScale has and compat has not: import lines work, and a use says what to take instead."""

from __future__ import annotations

import importlib

import pytest
from torch import nn

from echelon.common.errors import NotHereError, UsageError
from echelon.compat import fairscale
from echelon.compat.fairscale.absent import ALIASES, INSTEAD


def test_import_lines_of_what_is_not_here_work_and_uses_say_what_to_take() -> None:
    for module in (*INSTEAD, "nn.pipe.balance", "nn.pipe.skip.layout", "utils.testing"):
        found = importlib.import_module(f"echelon.compat.fairscale.{module}").Something
        with pytest.raises(UsageError, match=rf"fairscale\.{module}\.Something is not part of echelon.compat. Instead: ."):
            found(1)
    for name, same in ALIASES.items():
        modules = [importlib.import_module(f"echelon.compat.fairscale.{each}") for each in (name, same)]
        assert modules[0] is modules[1]
    import echelon.compat.fairscale.nn.pipe.balance as balance

    assert balance.__name__.endswith("pipe.balance") and fairscale.__version__ == "0.4.13"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("optim", "AdaScale AdaScaleWrapper Adam GradScaler Precision"),
        ("nn", "FlattenParamsWrapper MOELayer Pipe Top2Gate"),
        ("nn.misc", "FlattenParamsWrapper ParamBucket"),
        ("nn.checkpoint", "is_checkpointing is_recomputing"),
        ("nn.checkpoint.checkpoint_activations", "disable_checkpointing"),
        ("nn.data_parallel", "TrainingState get_fsdp_instances no_pre_load_state_dict_hook"),
        ("nn.data_parallel.fully_sharded_data_parallel", "TrainingState"),
    ],
)
def test_names_that_no_program_uses_are_refused_and_no_object_is_one(module: str, names: str) -> None:
    for name in names.split():
        found = getattr(importlib.import_module(f"echelon.compat.fairscale.{module}"), name)
        with pytest.raises(NotHereError):
            found()
        assert not isinstance(nn.Linear(1, 1), found)
