"""How ranks agree: by value, by name, without pickle, and never one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch.distributed as dist

from echelon.checkpoint import commit, store
from echelon.common.errors import CheckpointCorruptError, EchelonError, RanksDisagreeError
from echelon.world import agree, rank0
from tests.conftest import Ranks
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks


def _gather() -> list[Any]:
    rank = dist.get_rank()
    return agree.gather({"rank": rank, "text": "ü" * rank, "none": None})


def test_values_of_any_length_are_gathered_by_rank(ranks: Ranks) -> None:
    want = [{"rank": r, "text": "ü" * r, "none": None} for r in range(4)]
    assert ranks(4, _gather) == [want] * 4


LENGTHS = [0, 1, 245, 246, 247, 248, 249, 5000]


def _lengths() -> tuple[list[list[int]], list[int], list[int]]:
    """What arrives of texts around the length that one message holds, from all ranks and from the first; and the collectives."""
    counted, gathered, told = [], [], []
    real = dist.all_gather
    with mock.patch("torch.distributed.all_gather", lambda *a, **k: counted.append(1) or real(*a, **k)):
        for length in LENGTHS:
            gathered.append([len(text) for text in agree.gather("x" * (length if dist.get_rank() else 3))])
            told.append(len(agree.from_rank0(lambda n=length: "y" * n)))  # type: ignore[misc]
    return gathered, told, counted


def test_short_messages_take_one_collective_and_long_ones_two(ranks: Ranks) -> None:
    for gathered, told, counted in ranks(2, _lengths):
        assert gathered == [[3, length] for length in LENGTHS] and told == LENGTHS
        assert len(counted) == len(LENGTHS) + 4  # quotes take two of the 248 bytes


def _any(flags: list[bool]) -> bool:
    return agree.any_rank(flags[dist.get_rank()])


def test_one_rank_is_enough(ranks: Ranks) -> None:
    assert ranks(2, _any, [False, True]) == [True, True]
    assert ranks(2, _any, [False, False]) == [False, False]


def _same(values: list[int]) -> int:
    return agree.same_on_all("the number of steps", values[dist.get_rank()], "Mend it.")


def _differ(values: list[int]) -> None:
    with refused(RanksDisagreeError, name="the number of steps", values=values):
        _same(values)


def test_disagreement_is_raised_on_every_rank_with_every_value(ranks: Ranks) -> None:
    assert ranks(2, _same, [3, 3]) == [3, 3]
    ranks(2, _differ, [3, 4])


def _told(values: list[Any]) -> tuple[Any, list[Any], bool]:
    """What each says first, the different values, and whether the first of these took nothing that grows with the ranks."""
    mine, gathers, real = values[dist.get_rank()], [], dist.all_gather
    with mock.patch("torch.distributed.all_gather", lambda *a, **k: gathers.append(1) or real(*a, **k)):
        return agree.first_not_none(mine), agree.kinds(mine), not gathers


@pytest.mark.parametrize(
    ("values", "first_one", "different"),
    [
        ([None] * 4, None, [None]),
        ([None, None, "x" * 500, "y"], "x" * 500, [None, "x" * 500, "y"]),
        ([[1, "x" * 500]] * 4, [1, "x" * 500], [[1, "x" * 500]]),
        ([2, 1, 2, 1], 2, [2, 1]),
        ([0, "", [], {}], 0, [0, "", [], {}]),
    ],
)
def test_the_first_value_and_the_different_ones(ranks: Ranks, values: list[Any], first_one: Any, different: list[Any]) -> None:
    assert ranks(4, _told, values) == [(first_one, different, len(different) == 1)] * 4


def _any_of_each(count: int) -> tuple[list[bool], int]:
    """Rank 0 sets every third flag, rank 1 every fifth. Also how many numbers were sent."""
    step, sent = (3, 5)[dist.get_rank()], list[int]()
    real = dist.all_reduce
    with mock.patch("torch.distributed.all_reduce", lambda value, **how: (sent.append(value.numel()), real(value, **how))[1]):
        return agree.any_ranks([number % step == 0 for number in range(count)]), sum(sent)


@pytest.mark.parametrize(("count", "sent"), [(1, 1), (62, 1), (63, 2), (200, 4)])
def test_flags_are_agreed_on_one_by_one_in_few_numbers(ranks: Ranks, count: int, sent: int) -> None:
    want = [number % 3 == 0 or number % 5 == 0 for number in range(count)]
    assert ranks(2, _any_of_each, count) == [(want, sent)] * 2
    assert agree.any_ranks([False, True]) == [False, True]


def _with_a_number() -> tuple[list[bool], int]:
    rank = dist.get_rank()
    return agree.any_ranks_and_number([rank == 1, False], 2**32 - 1 - rank)


def test_a_number_of_rank_0_goes_with_the_flags(ranks: Ranks) -> None:
    assert ranks(2, _with_a_number) == [([True, False], 2**32 - 1)] * 2
    assert agree.any_ranks_and_number([True], 7) == ([True], 7)


def _to_first(values: list[Any]) -> Any:
    told = rank0.gather(values[dist.get_rank()])
    return None if told is None else (list(told[0]), told[1])


def test_rank_0_alone_is_told_each_different_value_once(ranks: Ranks) -> None:
    long = [["w", [i], "torch.float32"] for i in range(5000)]
    assert ranks(4, _to_first, [long, "b", long, "b"]) == [([long, "b"], [0, 1, 0, 1]), None, None, None]
    assert ranks(4, _to_first, [{}, {}, {}, {}]) == [([{}], [0, 0, 0, 0]), None, None, None]
    one = rank0.gather(5)
    assert one is not None and (list(one[0]), one[1]) == ([5], [0])


def _handed(lengths: list[int], fails: bool) -> Any:
    def make() -> list[bytes]:
        assert dist.get_rank() == 0, "only rank 0 makes them"
        if fails:
            raise ValueError("no plan")
        return [bytes([65 + rank]) * length for rank, length in enumerate(lengths)]

    try:
        return rank0.scatter(make)
    except Exception as error:
        return type(error).__name__, str(error)


def test_each_rank_is_given_its_own_or_the_error(ranks: Ranks) -> None:
    assert ranks(2, _handed, [1, 3], False) == [b"A\0\0", b"BBB"]
    assert ranks(2, _handed, [0, 0], False) == [b"", b""]
    assert ranks(2, _handed, [1, 1], True) == [("ValueError", "no plan"), ("EchelonError", "rank 0 failed: ValueError: no plan")]
    assert rank0.scatter(lambda: [b"x"]) == b"x"


def _read(fails: bool) -> Any:
    def read() -> str:
        assert dist.get_rank() == 0, "only rank 0 looks"
        if fails:
            raise FileNotFoundError("the folder is gone")
        return "seen"

    try:
        return agree.from_rank0(read)
    except Exception as error:
        return type(error).__name__, str(error)


def test_rank_0_looks_and_its_answer_or_error_reaches_all(ranks: Ranks) -> None:
    assert ranks(2, _read, False) == ["seen", "seen"]
    first, second = ranks(2, _read, True)
    assert first == ("FileNotFoundError", "the folder is gone")
    assert second == ("EchelonError", "rank 0 failed: FileNotFoundError: the folder is gone")


def _told_by_one(way: str) -> Any:
    wrong = CheckpointCorruptError("a file is cut off", path="step-2/a", sizes=(1, 2))

    def act() -> None:
        raise wrong

    try:
        if way == "rank 0":
            agree.from_rank0(act)
        elif way == "commit":
            commit.on_rank0(act)
        elif way == "each":
            store.on_each(Path("step-2"), act if dist.get_rank() == 0 else lambda: None)
        else:
            agree.fail_together(wrong if dist.get_rank() == 0 else None, way)
    except EchelonError as error:
        return type(error).__name__, str(error), error.fields["path"]


@pytest.mark.parametrize("way", ["rank 0", "commit", "each", "a stage"])
def test_an_error_of_one_rank_has_its_class_and_its_fields_on_all(ranks: Ranks, way: str) -> None:
    assert ranks(2, _told_by_one, way) == [("CheckpointCorruptError", "a file is cut off", "step-2/a")] * 2


class _Validation(ValueError):
    """Another library's, which has `fields`, too."""

    fields: ClassVar = {("a", "b"): "missing"}


@pytest.mark.parametrize("error", [_Validation("a.b is missing"), EchelonError("a.b is missing", where={("a", "b"): 1})])
def test_fields_that_json_cannot_hold_leave_nobody_waiting(ranks: Ranks, error: Exception) -> None:
    assert all("a.b is missing" in said for said in ranks(2, _failing_on_one, error))


def _failing_on_one(error: Exception) -> str:
    try:
        agree.fail_together(error if dist.get_rank() == 0 else None, "a stage")
    except (ValueError, EchelonError) as told:
        return str(told)
    return ""


def test_a_world_of_one_agrees_with_itself_without_a_group() -> None:
    assert agree.gather(5) == [5] and agree.any_rank(True) and agree.same_on_all("x", 1, "") == 1
    with pytest.raises(FileNotFoundError):
        agree.from_rank0(lambda: open("/absent"))
