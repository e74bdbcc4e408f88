"""RankInfo: five launchers' environments become the same nine facts; one that is half-set is refused with the remedy."""

from __future__ import annotations

import dataclasses
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.common.errors import LauncherEnvironmentError
from echelon.common.hostlist import expand_hostlist
from echelon.contracts.rank import RankInfo
from tests.kit.refusals import refused

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "2",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_RUN_ID": "job-7",
}

# Recorded on Slurm 22.05, four nodes (research notes: the Slurm lab), without what says nothing about ranks.
# `srun -N2 -n4 env`, task 3, whose nodes took three tasks and one:
SRUN = {
    "SLURM_JOBID": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "3,1",
}
SRUN_OF_RANK_2 = {**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
# The shell of `sbatch -N2 -n4`: it has a task's variables but is no task.
BATCH = {
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
# The shell of `salloc -N2 -n4` where LaunchParameters=use_interactive_step: a step that is none.
INTERACTIVE = {
    **BATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-99@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_ID": "1"}
DRAGON = {
    "_DRAGON_CG_RANK": "3",
    "_DRAGON_CG_LOCAL_RANK": "1",
    "_DRAGON_CG_GROUP_RANK": "1",
    "_DRAGON_CG_WORLD_SIZE": "4",
    "_DRAGON_CG_LOCAL_WORLD_SIZE": "2",
    "_DRAGON_CG_MASTER_ADDR": "nid001",
    "_DRAGON_CG_MASTER_PORT": "29500",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in names}


# ---- each launcher ----------------------------------------------------------------------------------------------------------


PMI2 = {"PMI_FD": "11", "PMI_JOBID": "3.0", "PMI_RANK": "3", "PMI_SIZE": "4"}  # by `srun --mpi=pmi2`, beside SRUN
# Hydra starts one proxy per node by srun; the proxies' Slurm variables are not the ranks'.
PROXY = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "node1"}
# `export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS`, as many job scripts do, says nothing about the node.
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "2000"}

# What is read: rank, local rank, node rank, world size, local world size, address; and whatever else that launcher says.
READ: dict[str, tuple[dict[str, str], tuple[int | str, ...], dict[str, int | str]]] = {
    "torchrun": (TORCHRUN, (5, 1, 2, 6, 2, "10.0.0.1"), {"master_port": 4711, "restart_count": 3, "run_id": "job-7"}),
    "torchrun inside srun": ({**SRUN, **TORCHRUN}, (5, 1, 2, 6, 2, "10.0.0.1"), {"master_port": 4711, "run_id": "job-7"}),
    "dragon": (DRAGON, (3, 1, 1, 4, 2, "nid001"), {"master_port": 29500, "restart_count": 0, "run_id": "dragon"}),
    "dragon's spellings": (DRAGON, (), {"my_rank": 3, "my_local_rank": 1, "my_node_rank": 1, "my_local_world_size": 2}),
    "no launcher": ({"PATH": "/bin", "MASTER_ADDR": "left.over"}, (0, 0, 0, 1, 1), {"restart_count": 0}),
    "empty variables": ({"RANK": "", "WORLD_SIZE": " "}, (0, 0, 0, 1, 1), {}),
    "open mpi": ({**OPEN_MPI, "MASTER_ADDR": "host1"}, (3, 1, 1, 4, 2, "host1"), {}),
    "pmi on one node": (HYDRA, (1, 1, 0, 2, 2, "127.0.0.1"), {}),
    "srun": (SRUN, (3, 0, 1, 4, 1, "node1"), {"run_id": "1"}),
    "srun, the first node": (SRUN_OF_RANK_2, (2, 2, 0, 4, 3, "node1"), {}),
    "srun on one node": ({**SRUN, "SLURM_STEP_NODELIST": "node7"}, (3, 0, 1, 4, 1, "127.0.0.1"), {}),
    "srun with an address": ({**SRUN, "MASTER_ADDR": "ib", "MASTER_PORT": "1234"}, (3, 0, 1, 4, 1, "ib"), {"master_port": 1234}),
    "srun, requeued": ({**SRUN, "SLURM_RESTART_COUNT": "2"}, (3, 0, 1, 4, 1, "node1"), {"restart_count": 2}),
    "srun with pmi2": ({**SRUN, **PMI2}, (3, 0, 1, 4, 1, "node1"), {"run_id": "1"}),
    "pmi below srun": (
        {**PROXY, "PMI_RANK": "7", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"},
        (7, 3, 1, 8, 4, "node1"),
        {},
    ),
    "by hand in srun": ({**SRUN, **BY_HAND}, (3, 0, 1, 4, 1, "node1"), {"master_port": 2000}),
    "one process of a batch script": ({**BATCH, "RANK": "0", "WORLD_SIZE": "1"}, (0, 0, 0, 1, 1), {}),
    "a job of one task": ({**BATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, (0, 0, 0, 1, 1), {"run_id": "4"}),
}


@pytest.mark.parametrize("launcher", READ)
def test_the_facts_of_each_launcher(launcher: str) -> None:
    env, places, more = READ[launcher]
    info = RankInfo.from_env(env)
    found = info.rank, info.local_rank, info.node_rank, info.world_size, info.local_world_size, info.master_addr
    assert found[: len(places)] == places and {name: getattr(info, name) for name in more} == more


def test_all_ranks_of_a_step_find_the_same_port_and_those_of_another_job_or_step_another() -> None:
    first, second = RankInfo.from_env(SRUN), RankInfo.from_env(SRUN_OF_RANK_2)
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    for changed in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        assert first.master_port != RankInfo.from_env({**SRUN, changed: "17"}).master_port


def test_a_computed_port_lies_below_those_the_kernel_gives_away() -> None:
    assert all(1024 < RankInfo.from_env({**SRUN, "SLURM_JOB_ID": str(n)}).master_port < 32768 for n in range(500))


@pytest.mark.parametrize(("per_node", "node", "expected"), [("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4", 0, 4)])
def test_slurms_tasks_per_node_are_understood(per_node: str, node: int, expected: int) -> None:
    env = {
        **SRUN, "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node),
    }  # fmt: skip
    assert RankInfo.from_env(env).local_world_size == expected


# ---- srun forgotten ---------------------------------------------------------------------------------------------------------


# `sbatch -N2` without -n sets no SLURM_NTASKS.
BY_NODES = {**without(BATCH, "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize("env", [BATCH, INTERACTIVE, BY_NODES, OPEN_MPI], ids=["sbatch", "salloc", "sbatch -N2", "no address"])
def test_several_tasks_without_srun_or_an_address_are_an_error_with_the_remedy(env: dict[str, str]) -> None:
    with refused(LauncherEnvironmentError):
        RankInfo.from_env(env)


# ---- half-set, contradictory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "RANK", "WORLD_SIZE"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT"]),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), ["MASTER_ADDR and MASTER_PORT"]),
        ({**TORCHRUN, "RANK": "6"}, ["RANK=6", "WORLD_SIZE=6"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "7"}, ["LOCAL_WORLD_SIZE=7", "WORLD_SIZE=6"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1"]),
        ({**SRUN, "SLURM_LOCALID": "1"}, ["the local rank must be", "SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=3,1"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2", "MASTER_ADDR": "h"}, ["OMPI_COMM_WORLD_LOCAL_RANK=2"]),
        ({**DRAGON, "_DRAGON_CG_LOCAL_WORLD_SIZE": "5"}, ["_DRAGON_CG_LOCAL_WORLD_SIZE=5"]),
        ({**TORCHRUN, "RANK": "five"}, ["RANK must be a whole number, got 'five'"]),
        (
            {**TORCHRUN, "RANK": "five", "MASTER_PORT": "http"},
            ["RANK must be a whole number, got 'five', MASTER_PORT must be a whole number, got 'http' (torchrun's variables)."],
        ),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT must be a whole number, got 'http'"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["70000", "65535"]),
        (without(DRAGON, "_DRAGON_CG_RANK"), ["_DRAGON_CG_WORLD_SIZE=4", "_DRAGON_CG_RANK"]),
        (without(DRAGON, "_DRAGON_CG_MASTER_ADDR"), ["_DRAGON_CG_MASTER_ADDR"]),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE"]),
        (without(HYDRA, "PMI_RANK"), ["PMI_SIZE=2", "PMI_RANK"]),
        (without(SRUN, "SLURM_PROCID"), ["SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID"]),
        (without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ["SLURM_PROCID=3", "SLURM_NTASKS"]),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"), ["SLURM_STEP_NODELIST"]),
    ],
)  # fmt: skip
def test_a_half_set_environment_is_an_error_that_names_the_variables(env: dict[str, str], names: list[str]) -> None:
    with pytest.raises(LauncherEnvironmentError) as caught:
        RankInfo.from_env(env)
    assert all(name in str(caught.value) for name in names), str(caught.value)


HOSTILE = ["x", "-5", "2.0", "1_0", "٣", "²", "9" * 5000, "1\nRANK=2", "0x1", "nan", "\udcff", "\x1b[31m", "1(x99999999999)"]
HOSTILE += ["n[1-999999][1-999999]", "n[1-99999999]"]


@pytest.mark.parametrize("env", [TORCHRUN, DRAGON, OPEN_MPI, HYDRA, SRUN], ids=["torchrun", "dragon", "mpi", "pmi", "slurm"])
def test_a_hostile_variable_is_named_with_its_value_in_one_short_line(env: dict[str, str]) -> None:
    for name, value in itertools.product(env, HOSTILE):
        try:
            info = RankInfo.from_env({"MASTER_ADDR": "host", **env, name: value})
        except LauncherEnvironmentError as error:
            text = str(error)
            assert name in text and text.isprintable() and len(text) < 900, (name, value, text)
        else:
            numbers = (info.rank, info.local_rank, info.node_rank, info.world_size, info.local_world_size, info.restart_count)
            assert all(0 <= number < 10 for number in numbers), (name, value, info)


NUMBERS = st.one_of(st.integers(-2, 9).map(str), st.sampled_from(["", " ", "x", "1.5", "0x1"]))
NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]

SLURM_NAMES = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"]


@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS), st.booleans())
def test_whatever_torchruns_variables_hold_the_answer_is_consistent_or_names_one(env: dict[str, str], address: bool) -> None:
    _consistent_or_named({**env, **({"MASTER_ADDR": "host"} if address else {})})


@given(
    st.dictionaries(st.sampled_from(SLURM_NAMES), NUMBERS),
    st.sampled_from(["1", "2(x2)", "3,1", "(x", ""]),
    st.sampled_from(["n[1-2]", "n1", "n[1", "", "[]"]),
)
def test_whatever_slurms_variables_hold_the_answer_is_consistent_or_names_one(
    env: dict[str, str], per_node: str, nodes: str
) -> None:
    _consistent_or_named({**env, "SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": per_node, "SLURM_JOB_NODELIST": nodes})


def _consistent_or_named(env: dict[str, str]) -> None:
    try:
        info = RankInfo.from_env(env)
    except LauncherEnvironmentError as error:
        shown = [name for name in env if name in str(error)] or [value for value in env.values() if repr(value) in str(error)]
        assert shown, str(error)
        return
    assert 0 <= info.rank < info.world_size
    assert 0 <= info.local_rank < info.local_world_size <= info.world_size
    for name, value in (("RANK", info.rank), ("WORLD_SIZE", info.world_size), ("LOCAL_RANK", info.local_rank)):
        assert not env.get(name, "").strip() or int(env[name]) == value


# ---- the value --------------------------------------------------------------------------------------------------------------


@st.composite
def infos(draw: st.DrawFn) -> RankInfo:
    world = draw(st.integers(1, 10_000))
    local_world = draw(st.integers(1, world))
    return RankInfo(
        rank=draw(st.integers(0, world - 1)),
        local_rank=draw(st.integers(0, local_world - 1)),
        node_rank=draw(st.integers(0, 999)),
        world_size=world,
        local_world_size=local_world,
        master_addr=draw(st.sampled_from(["127.0.0.1", "node1", "::1"])),
        master_port=draw(st.integers(1, 65535)),
        restart_count=draw(st.integers(0, 9)),
        run_id=draw(st.text("abc-7", min_size=1)),
    )


@given(infos())
def test_what_a_launcher_writes_a_rank_reads(info: RankInfo) -> None:
    assert RankInfo.from_env(info.to_env()) == info


def test_without_arguments_it_reads_the_environment_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert RankInfo() == RankInfo.from_env(TORCHRUN) and dict(os.environ) == before
    monkeypatch.setenv("RANK", "nonsense")
    info = RankInfo(rank=1, world_size=2)
    assert info.rank == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.rank = 0  # type: ignore[misc]
    with refused(LauncherEnvironmentError):
        RankInfo(rank=1)


# ---- node lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,07],login", ["n01", "n02", "n03", "n07", "login"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster.org", ["n1.cluster.org", "n2.cluster.org"]),
        ("gpu-a[1,3],gpu-b2", ["gpu-a1", "gpu-a3", "gpu-b2"]),
        ("", []),
    ],
)
def test_a_node_list_is_expanded_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n]1[", "n[]", "n[1-]", "n[a-b]", "n[3-1]", "n[1[2]]", "n[1-99999999999]"])
def test_a_node_list_that_cannot_be_read_is_shown(text: str) -> None:
    with pytest.raises(LauncherEnvironmentError) as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)


@given(st.text("n1-2[],", max_size=12))
def test_no_node_list_does_anything_but_expand_or_say_so(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except LauncherEnvironmentError:
        return
    assert all(host and not set(host) & set("[],") for host in hosts)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=4), st.integers(1, 4))
def test_ranges_expand_to_every_number_with_its_zeros(ranges: list[tuple[int, int]], width: int) -> None:
    text = ",".join(f"{low:0{width}}-{low + more:0{width}}" if more else f"{low:0{width}}" for low, more in ranges)
    want = [f"n{k:0{max(width, len(str(low)))}}" for low, more in ranges for k in range(low, low + more + 1)]
    assert expand_hostlist(f"n[{text}]") == want
