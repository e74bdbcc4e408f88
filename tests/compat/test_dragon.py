"""Dragon's modules by their paths, without its runtime. Its page runs in test_programs, and on the runtime in test_group."""

from __future__ import annotations

import os
import socket

import torch

import echelon as ech
from echelon.common.errors import UsageError
from echelon.compat.dragon.ai.collective_group import CollectiveGroup, RankInfo
from echelon.compat.dragon.infrastructure.policy import Policy
from echelon.compat.dragon.native.machine import Node, System, cpu_count, current
from tests.kit.refusals import refused


def where(factor: int) -> tuple[int, int, int, int, list[int]]:
    info = RankInfo()
    places = info.my_rank * factor, info.my_local_rank, info.my_node_rank, info.world_size
    return *places, sorted(os.sched_getaffinity(0))


def test_a_groups_arguments_are_in_dragons_order() -> None:
    cores = current().cpus
    by_name = Policy(placement=Policy.Placement.HOST_NAME, host_name=socket.gethostname(), cpu_affinity=[cores[0]])
    by_number = Policy(Policy.Placement.HOST_ID, "", 0, Policy.Distribution.BLOCK, [cores[-1]])
    group = CollectiveGroup(where, (10,), None, None, False, 29500, [by_name, by_number])
    group.init()
    group.start()
    group.join()
    group.close()
    assert group.values == [(0, 0, 0, 2, [cores[0]]), (10, 1, 0, 2, [cores[-1]])]
    assert len(CollectiveGroup(where, (1,), nprocs=3).policies) == 3


def test_policies_are_built_from_nodes() -> None:
    """As Dragon's users do it by hand."""
    system = System()
    nodes = [Node(number) for number in system.nodes]
    assert [node.hostname for node in nodes] == [socket.gethostname()] and nodes[0].is_primary
    assert system.primary_node.name == current().hostname and not system.restarted
    assert nodes[0].num_cpus == len(os.sched_getaffinity(0)) == cpu_count() == system.cpu_count()
    assert nodes[0].num_gpus == torch.cuda.device_count() == len(system.gpu_policies())
    assert [p.host_name for p in system.hostname_policies()] == system.hosts
    for wrong in (1, "elsewhere"):
        with refused(UsageError):
            Node(wrong)
    with refused(UsageError):
        Policy(host_id=7)
    assert isinstance(system, ech.launching.System) and isinstance(Policy(), ech.launching.Policy)
