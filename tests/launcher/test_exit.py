"""A rank that has failed and does not end must not hold the others."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import RankFailedError
from echelon.launcher.local import attempt
from tests.conftest import Ranks


def _fails_and_stays() -> None:
    if dist.get_rank() == 1:
        atexit.register(time.sleep, 600)
        raise ValueError("bad data")
    dist.all_reduce(torch.ones(1))


@pytest.mark.full
def test_a_rank_stuck_in_its_exit_is_named_and_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_EXIT_WAIT_S", 0.2)
    with pytest.raises(RankFailedError, match="rank 1 failed first") as caught:
        ranks(2, _fails_and_stays)
    assert isinstance(caught.value.__cause__, ValueError)


FORKS = """
import os, sys
import echelon as ech
ech.init_from_env()
child = os.fork()
if child == 0:
    sys.exit(7)
print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_child_that_a_rank_has_forked_ends_as_it_wants(echelon_command: Callable[..., Any], tmp_path: Path, ranks: str) -> None:
    """An ordinary end of the interpreter would wait there for the group's threads, which only the rank has."""
    (tmp_path / "t.py").write_text(FORKS)
    said = echelon_command("run", "--device", "cpu", "--ranks", ranks, "t.py")
    assert said.returncode == 0 and "the child ended with 7" in said.stdout, said.stderr
