"""What replaces forwards and classes tells of whom, goes in one order, and is taken away in the reverse."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from echelon.parallel import patching


class Adds:
    def __init__(self, module: nn.Module, number: int) -> None:
        self.forward, self.number = module.forward, number

    def __call__(self, x: Any) -> Any:
        return self.forward(x) + self.number


class Doubles(nn.Module):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def test_replacements_lie_around_each_other_and_are_undone_from_the_outside() -> None:
    module, x = nn.Identity(), torch.tensor(1.0)
    first = patching.replace(module, "forward", "one", Adds(module, 10))
    second = patching.replace(module, "forward", "two", Adds(module, 100))
    assert module(x) == 111 and patching.replaced(module) == [("forward", "one"), ("forward", "two")]
    with pytest.raises(RuntimeError, match="Identity by one must be taken away after that by two"):
        first()
    second()
    assert module(x) == 11
    first()
    first()  # nothing more
    assert module(x) == 1 and "forward" not in vars(module) and patching.replaced(module) == []


def test_a_class_goes_in_front_for_a_while_with_the_same_name() -> None:
    module, x = nn.Identity(), torch.tensor(1.0)
    with patching.class_for_now([module], "doubles", lambda kind: patching.in_front_of(kind, Doubles)):
        assert module(x) == 2 and type(module).__name__ == "Identity"
        assert patching.replaced(module) == [("class", "doubles")]
    with pytest.raises(ValueError, match="within"), patching.class_for_now([module], "doubles", lambda kind: Doubles):
        raise ValueError("within")
    assert type(module) is nn.Identity and patching.replaced(module) == []


def test_a_module_that_was_replaced_in_is_freed_and_a_copy_was_not() -> None:
    module = nn.Linear(1, 1)
    patching.replace(module, "forward", "one", Adds(module, 1))
    assert patching.replaced(copy.deepcopy(module)) == []
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
