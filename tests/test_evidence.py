"""What a run leaves in its folder when it fails or hangs: positions, stacks, flight records, last collectives."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.contracts.errors import RankFailedError
from echelon.launcher.functions.run import launch
from echelon.launcher.local import flight
from echelon.launcher.records import exit_record, flight_record, rank_record


def _folders(runs: Path) -> tuple[Path, Path]:
    """Of the only run there: its first attempt, and what was gathered of it."""
    (run,) = runs.iterdir()
    return run / "attempts" / "000", run / "dumps" / "000"


def _raises() -> None:
    ech.init_from_env()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        raise ValueError("bad")
    dist.all_reduce(torch.ones(4))
    os.kill(os.getpid(), signal.SIGKILL)  # never: it has lost its peer


def test_a_rank_that_raises_leaves_its_flight_record_and_so_do_those_that_lose_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ValueError: bad"):
        launch(_raises, ranks=2, run_dir=tmp_path)
    attempt, dumps = _folders(tmp_path)
    records = [flight_record(dumps / f"flight.rank{rank}.json") for rank in (0, 1)]
    assert all(records)
    calls = [[(e["profiling_name"], e["collective_seq_id"], e["input_sizes"]) for e in r["entries"]] for r in records if r]
    assert calls[1] == [("gloo:all_reduce", n, [[4]]) for n in (1, 2, 3)]
    assert calls[0] == [*calls[1], ("gloo:all_reduce", 4, [[4]])]
    said = rank_record(attempt / "exit.rank1.json") or {}
    assert said["collectives"] == {"0": "all_reduce #3"}
    ended = exit_record(attempt / "exit.json") or {}
    assert ended["world_size"] == 2 and ended["hang"] is None and set(ended["seen"]) == {"0", "1"}
