"""Cores, threads, device and network interface of each rank of a node, as pure functions of the node's hardware.

Binding is optional (`--bind cores`, `--bind devices`). By default, two jobs that share a node, or a job beside a server, would be
bound to the same first cores while other cores are idle, and data workers inherit their rank's cores. Slurm and Dragon bind by
themselves; the cores that they leave to this process are divided here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.common.errors import LaunchError, require
from echelon.common.machine import DEVICE_VARIABLE, visible_devices

__all__ = ["bound", "cores_near", "cores_of_gpus", "cores_of_rank", "interfaces", "numa_nodes", "parse_cpu_list"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def cores_of_rank(cores: Sequence[int], local_rank: int, local_ranks: int, numa: Sequence[Sequence[int]] = ()) -> list[int]:
    """The cores of one rank: nearly equal, disjoint shares, with neighbouring ranks on the same NUMA node.

    A rank has cores of two NUMA nodes only if there are fewer ranks than nodes. With more ranks than cores, all ranks share all
    cores.

    Args:
        cores: the cores that the ranks may use.
        local_rank: 0 <= local_rank < local_ranks.
        numa: the cores of each NUMA node; cores in none of them form a node of their own. Empty is one node.
    """
    require(0 <= local_rank < local_ranks, "local_rank", f"between 0 and {local_ranks - 1}", local_rank, kind=LaunchError)
    allowed = sorted(set(cores))
    nodes = [kept for node in numa if (kept := [c for c in sorted(set(node)) if c in set(allowed)])]
    known = {c for node in nodes for c in node}
    if rest := [c for c in allowed if c not in known]:
        nodes.append(rest)
    if local_ranks > len(allowed):
        return allowed
    if local_ranks < len(nodes):
        return _share([c for node in nodes for c in node], local_rank, local_ranks)
    first = 0
    for node, count in zip(nodes, _ranks_per_node([len(node) for node in nodes], local_ranks), strict=True):
        if local_rank < first + count:
            return _share(node, local_rank - first, count)
        first += count
    raise AssertionError("every rank has a node")


def _ranks_per_node(sizes: Sequence[int], ranks: int) -> list[int]:
    """Ranks of each node: at least one, at most its number of cores. Each further rank goes where a rank then has most cores."""
    counts = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        fullest = max((i for i in range(len(sizes)) if counts[i] < sizes[i]), key=lambda i: (sizes[i] / (counts[i] + 1), -i))
        counts[fullest] += 1
    return counts


def _share(cores: Sequence[int], index: int, parts: int) -> list[int]:
    return list(cores[index * len(cores) // parts : (index + 1) * len(cores) // parts])


def numa_nodes(root: str | os.PathLike[str] = "/sys/devices/system/node") -> list[list[int]]:
    """The cores of each NUMA node as Linux reports them; empty elsewhere."""
    folders = [p for p in Path(root).glob("node*") if re.fullmatch(r"node\d+", p.name)]
    nodes = []
    for folder in sorted(folders, key=lambda p: int(p.name[4:])):
        try:
            nodes.append(parse_cpu_list((folder / "cpulist").read_text()))
        except (OSError, ValueError):
            return []
    return [node for node in nodes if node]


def parse_cpu_list(text: str) -> list[int]:
    """Cores from the kernel's "0-3,8,10-11"."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores


def bound(
    local_rank: int, local_ranks: int, env: Mapping[str, str], *, cores: bool = False, devices: bool = False
) -> tuple[list[int], dict[str, str]]:
    """(cores, variables) of a rank of this machine; empty cores are all cores.

    Args:
        env: the rank's environment; a thread count in it is kept.
        cores: the rank has cores of its own, on the NUMA node of its GPU if it has one, and as many threads.
        devices: the rank sees only its GPU. By default ranks see all GPUs, as NCCL's direct copies between devices need.
    Raises:
        UsageError: there are fewer GPUs than ranks.
    """
    own: list[int] = []
    variables = {}
    if cores:
        every = sorted(os.sched_getaffinity(0))
        own = _near_its_gpu(every, local_rank, local_ranks, env) or cores_of_rank(every, local_rank, local_ranks, numa_nodes())
        threads = len(own) if local_ranks <= len(every) else 1  # otherwise all ranks share all cores
        variables = {} if "OMP_NUM_THREADS" in env else {"OMP_NUM_THREADS": str(threads)}
    if devices:
        visible = visible_devices(env)
        if local_ranks > len(visible):
            setting = f" (CUDA_VISIBLE_DEVICES={env[_VISIBLE]})" if _VISIBLE in env else ""
            raise LaunchError(f"{local_ranks} ranks need a GPU each, but {len(visible)} are visible here{setting}.")
        variables[_VISIBLE] = visible[local_rank]
    return own, variables


def _near_its_gpu(cores: Sequence[int], local_rank: int, local_ranks: int, env: Mapping[str, str]) -> list[int]:
    """A share of the cores on the NUMA node of this rank's GPU; empty unless it is known for every rank's GPU."""
    if env.get(DEVICE_VARIABLE) == "cpu":
        return []
    return cores_near(cores, cores_of_gpus(visible_devices(env))[:local_ranks], local_rank, local_ranks)


def cores_near(cores: Sequence[int], near: Sequence[Sequence[int]], local_rank: int, local_ranks: int) -> list[int]:
    """A rank's share of the cores near its GPU, divided among the ranks with GPUs on the same NUMA node.

    Args:
        cores: the cores that the ranks may use.
        near: for each local rank's GPU, the cores on its NUMA node.
    Returns:
        Empty if a GPU has no cores nearby, or fewer than ranks need, or if GPUs' nodes overlap in part; also if all cores are
            near to all GPUs, where `cores_of_rank` knows as much.
    """
    homes = [tuple(core for core in sorted(set(cores)) if core in set(every)) for every in near]
    kinds = set(homes)
    if len(homes) < local_ranks or len(kinds) == 1 or sum(map(len, kinds)) != len({core for home in kinds for core in home}):
        return []
    if any(homes.count(home) > len(home) for home in kinds):
        return []
    node = homes[local_rank]
    return _share(node, homes[:local_rank].count(node), homes.count(node))


def cores_of_gpus(
    names: Sequence[str],
    driver: str | os.PathLike[str] = "/proc/driver/nvidia/gpus",
    devices: str | os.PathLike[str] = "/sys/bus/pci/devices",
) -> list[list[int]]:
    """The cores on the NUMA node of each GPU, named as in CUDA_VISIBLE_DEVICES; empty for a GPU that is not found.

    A number counts in the order of PCI addresses, as CUDA numbers GPUs of one kind.

    Args:
        driver: where NVIDIA's driver has a folder for each GPU, named by PCI address.
        devices: where Linux lists the cores near each PCI device.
    """
    cores: dict[str, list[int]] = {}
    for number, folder in enumerate(sorted(Path(driver).glob("*:*"))):
        try:
            node = int((Path(devices) / folder.name / "numa_node").read_text())
            near = parse_cpu_list((Path(devices) / folder.name / "local_cpulist").read_text()) if node >= 0 else []
            uuid = re.search(r"GPU UUID:\s*(GPU-\S+)", (folder / "information").read_text())
        except (OSError, ValueError):
            continue
        cores[str(number)] = near
        if uuid is not None:
            cores[uuid[1]] = near
    # A UUID may be cut short, as long as it names one GPU.
    return [
        cores.get(name) or next((cores[k] for k in cores if name.startswith("GPU-") and k.startswith(name)), []) for name in names
    ]


def interfaces(way: str | None, network: str | os.PathLike[str] = "/sys/class/net") -> dict[str, str]:
    """Variables by which gloo and NCCL choose a network interface. They are defaults; the user's own take precedence.

    Args:
        way: the interface towards the other nodes, empty if it has no name; None for one node. Then no port is opened to the
            network, and no host name is resolved, which fails in many containers.
        network: where Linux lists its interfaces.
    """
    known = [path.name for path in Path(network).glob("*")]
    if way is None:
        way = "lo" if "lo" in known else ""
    if not way:
        return {}
    # gloo would resolve the host's own name, to loopback on many clusters. NCCL would take the first interface that is neither
    # loopback nor docker's, such as a bridge of virtual machines; but it knows InfiniBand, and when to prefer it.
    infiniband = way != "lo" and any(name.startswith("ib") for name in known)
    return {"GLOO_SOCKET_IFNAME": way} | ({} if infiniband else {"NCCL_SOCKET_IFNAME": f"={way}"})
