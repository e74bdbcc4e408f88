"""A rank that has failed and does not end must not hold the others."""

from __future__ import annotations

import atexit
import time

import pytest
import torch
import torch.distributed as dist

from echelon.contracts.errors import RankFailedError
from echelon.launcher.local import attempt
from tests.conftest import Ranks


def _fails_and_stays() -> None:
    if dist.get_rank() == 1:
        atexit.register(time.sleep, 100)
        raise ValueError("bad data")
    dist.all_reduce(torch.ones(1))


def test_a_rank_stuck_in_its_exit_is_named_and_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_EXIT_WAIT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed first") as caught:
        ranks(2, _fails_and_stays)
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - began < 30
