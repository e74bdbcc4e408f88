"""Which cores each rank has."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.contracts.errors import UsageError
from echelon.launcher.placement import bound, cores_of_rank, numa_nodes, parse_cpu_list


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """(allowed cores, NUMA nodes, ranks)."""
    cores = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    home = draw(st.lists(st.integers(0, 3), min_size=len(cores), max_size=len(cores)))
    numa = [[c for c, h in zip(cores, home, strict=True) if h == node] for node in range(draw(st.integers(0, 4)))]
    return cores, numa, draw(st.integers(1, 24))


@given(nodes())
def test_shares_are_disjoint_and_together_all_that_is_allowed(case: tuple[list[int], list[list[int]], int]) -> None:
    cores, numa, ranks = case
    shares = [cores_of_rank(cores, rank, ranks, numa) for rank in range(ranks)]
    assert all(shares)
    if ranks <= len(cores):
        assert sorted(c for share in shares for c in share) == sorted(cores)
    else:
        assert all(share == sorted(cores) for share in shares)


@given(nodes())
def test_no_rank_crosses_a_numa_node_where_there_are_ranks_for_all(case: tuple[list[int], list[list[int]], int]) -> None:
    cores, numa, ranks = case
    rest = set(cores) - {c for node in numa for c in node}
    sets = [set(node) for node in (*numa, rest) if node]
    if len(sets) <= ranks <= len(cores):
        for rank in range(ranks):
            assert any(set(cores_of_rank(cores, rank, ranks, numa)) <= node for node in sets)


@given(st.integers(1, 64), st.integers(1, 64))
def test_on_one_node_shares_differ_by_one_core_at_most(cores: int, ranks: int) -> None:
    sizes = {len(cores_of_rank(range(cores), rank, ranks)) for rank in range(ranks)}
    assert max(sizes) - min(sizes) <= 1


def test_cores_that_are_not_allowed_are_left_alone() -> None:
    assert cores_of_rank([2, 3, 6, 7], 0, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [2, 3]
    assert cores_of_rank([2, 3, 6, 7], 1, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [6, 7]


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(UsageError, match="local rank 2 of 2"):
        cores_of_rank([0, 1], 2, 2)


def test_the_kernels_lists_are_read(tmp_path: Path) -> None:
    for node, text in (("node0", "0-1,4\n"), ("node10", "8\n"), ("node2", "2-3\n"), ("node3", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    assert numa_nodes(tmp_path) == [[0, 1, 4], [2, 3], [8]]
    assert numa_nodes(tmp_path / "absent") == []
    assert parse_cpu_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]


def test_echelon_run_binds_ranks_if_asked(tmp_path: Path, echelon_command: Any) -> None:
    (tmp_path / "where.py").write_text(
        "import os, pathlib\npathlib.Path('rank' + os.environ['RANK']).write_text(repr(sorted(os.sched_getaffinity(0))))\n"
    )
    mine = sorted(os.sched_getaffinity(0))
    for bind in ("none", "cores"):
        done = echelon_command("run", "--ranks", "2", "--bind", bind, "where.py")
        assert done.returncode == 0, done.stderr
        seen = [ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
        want = [mine, mine] if bind == "none" else [cores_of_rank(mine, rank, 2, numa_nodes()) for rank in range(2)]
        assert seen == want


def test_this_machines_cores_become_threads_and_devices() -> None:
    mine = sorted(os.sched_getaffinity(0))
    cores, variables = bound(0, 1, {})
    assert sorted(cores) == mine and variables == {"OMP_NUM_THREADS": str(len(mine))}
    assert bound(1, 2, {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "4,6"}, devices=True)[1] == {"CUDA_VISIBLE_DEVICES": "6"}
    with pytest.raises(UsageError, match="has 1 devices"):
        bound(1, 2, {"CUDA_VISIBLE_DEVICES": "4"}, devices=True)
