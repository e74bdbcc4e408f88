"""Pickles that a few bytes make dear, found before they are unpickled. No code runs here: opcodes are read, and counted."""

from __future__ import annotations

import pickletools
from functools import cache
from typing import Any

__all__ = ["check"]

_PUT, _GET = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # what is there already, by its first operand
_DEEPEST = 100

# (what hashing it looks at, how deep it goes): a tuple's items count, what a list, a dict or a record holds does not.
_Cost = tuple[int, int]
_ONE: _Cost = (1, 0)


def check(data: bytes) -> None:
    """
    Raises:
        ValueError: an object that is remembered under an index beyond the file's length, up to which Python would make room at
            once; tuples within tuples, which as a dict's key take 2^n steps to hash, or more stack than there is; no pickle.
    """
    stack: list[_Cost | None] = []  # None is a mark
    memo: dict[int, _Cost] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _PUT or name == "MEMOIZE":
            index = int(argument) if name in _PUT else len(memo)
            if index > len(data):
                raise ValueError(f"it remembers an object as its {index}th, and has {len(data)} bytes")
            memo[index] = stack[-1] or _ONE
        elif name in _GET:
            stack.append(memo.get(int(argument), _ONE))
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            _apply(opcode, stack, len(data))


@cache
def _effect(opcode: Any) -> tuple[bool, int, tuple[bool, ...]]:
    """(whether it takes all down to the latest mark, how many objects besides, whether each that it leaves is a mark)."""
    before, mark = list(opcode.stack_before), pickletools.markobject
    objects = before.index(mark) if mark in before else len(before)
    return mark in before, objects, tuple(each is mark for each in opcode.stack_after)


def _apply(opcode: Any, stack: list[_Cost | None], most: int) -> None:
    to_mark, objects, leaves = _effect(opcode)
    used: list[_Cost] = []
    if to_mark:
        while (top := stack.pop()) is not None:
            used.append(top)
    used += [stack.pop() or _ONE for _ in range(objects)]
    made = _ONE
    if used and opcode.name in _FILLS:
        made = used[-1]
    elif used:
        made = sum(cost for cost, _ in used) + 1, max(depth for _, depth in used) + 1
        if made[0] > most or made[1] > _DEEPEST:
            raise ValueError("it has tuples within tuples, as no program makes them")
    stack.extend(None if is_mark else made for is_mark in leaves)
