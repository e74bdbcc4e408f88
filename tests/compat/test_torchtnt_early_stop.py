"""EarlyStopChecker in TorchTNT's types. What is expected was seen in TorchTNT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.compat.torchtnt.utils.early_stop_checker import EarlyStopChecker
from echelon.errors import UsageError
from tests.kit.refusals import refused


def test_thresholds_and_state_are_tensors() -> None:
    checker = EarlyStopChecker("min", 2, 0.5, stopping_threshold=0.25, divergence_threshold=3.0)
    assert (checker.min_delta, checker.stopping_threshold, checker.divergence_threshold) == (-0.5, 0.25, 3.0)
    assert isinstance(checker.min_delta, torch.Tensor) and isinstance(checker.stopping_threshold, torch.Tensor)
    assert checker.state_dict() == {"patience_count": 0, "best_value": torch.tensor([float("inf")])}
    assert not checker.check(torch.tensor([2.0])) and not checker.check(1.75)
    other = EarlyStopChecker("min", 2)
    other.load_state_dict(checker.state_dict())
    assert other.state_dict() == {"patience_count": 1, "best_value": torch.tensor([2.0])} == checker.state_dict()
    other.reset()
    assert other.state_dict()["best_value"] == float("inf")


@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        ({"mode": "min", "patience": 1, "min_delta": 0.1}, [0.8, 0.7], [False, True]),  # 0.7 is no more than 0.1 less
        ({"mode": "max", "patience": 2}, [0.1, 0.1, 0.1], [False, False, True]),
        ({"mode": "min", "patience": 9, "stopping_threshold": 0.2}, [0.2, 0.1], [False, True]),
        ({"mode": "min", "patience": 9, "divergence_threshold": 0.8}, [0.8, 0.9], [False, True]),
        ({"mode": "max", "patience": 9, "divergence_threshold": 0.0}, [0.1, -0.1], [False, True]),
        ({"mode": "min", "patience": 2, "check_finite": False}, [1.0, float("nan"), float("inf")], [False, False, True]),
        ({"mode": "min", "patience": 1, "min_delta": 0.5, "threshold_mode": "rel"}, [1.0, 0.4, 0.3], [False, False, True]),
    ],
)
def test_when_it_stops(options: dict[str, Any], values: list[float], stops: list[bool]) -> None:
    assert [EarlyStopChecker(**options).check(values[0])] == stops[:1]
    checker = EarlyStopChecker(**options)
    assert [checker.check(torch.tensor([value])) for value in values] == stops


def test_errors_have_torchtnts_words() -> None:
    with refused(UsageError):
        EarlyStopChecker("foo", 1)  # type: ignore[arg-type]
    with refused(UsageError):
        EarlyStopChecker("min", 1, -1)
    with refused(UsageError):
        EarlyStopChecker("min", 1, threshold_mode="q")  # type: ignore[arg-type]
    with refused(UsageError):
        EarlyStopChecker("min", 1).check(torch.ones(2))
