"""What ranks tell each other through the store before they join: on what each computes.

A rank whose GPU is gone would compute on its CPU while the others wait for it in NCCL, and two ranks on one GPU end in NCCL's
"invalid usage". Both are known before any group exists, so every rank is told, with the names of those concerned.

Rank 0 reads what all have said and answers once: the store does work in proportion to the ranks. The store of a launcher that
is not ours outlives a restart, and may still hold the last attempt's words. There nobody waits for an answer: each rank compares
itself with rank 0, and rank 0 with all, so that a rank which is another than before sees it by itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.contracts.errors import LauncherEnvironmentError, UsageError
from echelon.contracts.rank import RankInfo

__all__ = ["Facts", "meet", "refusal"]

# An answer must still come when rank 0 itself has waited its whole time for somebody.
_LATER = timedelta(seconds=5)


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself.

    Args:
        device: the type of the device that it computes on.
        why: for a rank on its CPU that was not told to be: what it lacks.
        gpu: names one GPU of all machines; empty on a CPU.
        nccl: whether its tensors on that GPU travel by NCCL.
        host: its machine's name.
        error: why it cannot join at all.
    """

    device: str = "cpu"
    why: str = ""
    gpu: str = ""
    nccl: bool = False
    host: str = ""
    error: str = ""

    @classmethod
    def here(cls, device: torch.device, *, asked: bool, backend: str) -> Facts:
        """Of this rank.

        Args:
            asked: its device was named, and not found by looking.
        """
        if device.type == "cpu":
            return cls("cpu", "" if asked else _lack(), nccl="nccl" in backend, host=socket.gethostname())
        name = f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", name)
        return cls(device.type, "", str(uuid), "nccl" in backend, socket.gethostname())

    @classmethod
    def read(cls, text: bytes) -> Facts:
        """Of another rank. What is not there, or of another kind, is as by default: anyone can write into a store."""
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        plain = asdict(cls())
        known = said if isinstance(said, dict) else {}
        return cls(**{name: known[name] if type(known.get(name)) is type(plain[name]) else plain[name] for name in plain})


def meet(store: dist.Store, info: RankInfo, facts: Facts, timeout: timedelta, *, fresh: bool) -> None:
    """Tell the others, and hear whether all can join. Every rank calls it, once for each joining.

    Args:
        store: for these ranks' keys of this joining.
        fresh: no earlier ranks used these keys.
    Raises:
        LauncherEnvironmentError: on all ranks if `fresh`, else on those that see it: some rank cannot join, or they compute on
            different types of device, or two of them on one GPU by NCCL.
        dist.DistStoreError: some did not come in time.
    """
    store.set(f"facts/{info.rank}", json.dumps(asdict(facts)))
    if info.rank == 0:
        problem = _judge(_everyones(store, info.world_size, timeout))
        if fresh:
            store.set("answer", problem)
    elif fresh:
        store.wait(["answer"], timeout + _LATER)
        problem = store.get("answer").decode("utf-8", "replace")
    else:
        store.wait(["facts/0"], timeout)
        problem = _judge({0: Facts.read(store.get("facts/0")), info.rank: facts})
    if not problem:
        return
    if fresh:
        _see_off(store, info)
    raise LauncherEnvironmentError(facts.error or problem)


def _everyones(store: dist.Store, ranks: int, timeout: timedelta) -> dict[int, Facts]:
    keys = [f"facts/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            problem = f"{_named(missing)} of {ranks} did not come within {timeout.total_seconds():g} s. Does every rank run?"
            store.set("answer", problem)
            raise LauncherEnvironmentError(problem) from None
        raise
    return {rank: Facts.read(text) for rank, text in enumerate(store.multi_get(keys))}


def _see_off(store: dist.Store, info: RankInfo) -> None:
    """Rank 0 may serve the store: it stays until the others have their answer."""
    store.set(f"heard/{info.rank}", "")
    if info.rank == 0:
        try:
            store.wait([f"heard/{rank}" for rank in range(info.world_size)], _LATER)
        except dist.DistStoreError:
            return


def _judge(ranks: dict[int, Facts]) -> str:
    """Why these cannot join; empty if they can."""
    for rank, facts in ranks.items():
        if facts.error:
            return f"{_at(rank, facts)} cannot join: {facts.error}"
    kinds: dict[str, list[int]] = {}
    for rank, facts in ranks.items():
        kinds.setdefault(facts.device, []).append(rank)
    if len(kinds) > 1 and any(facts.why or facts.nccl for facts in ranks.values()):
        shown = " and ".join(f"{kind} on {_named(members)}" for kind, members in kinds.items())
        lacking = [f" On {_at(rank, facts)}: {facts.why}." for rank, facts in ranks.items() if facts.why]
        return (
            f"ranks must compute on one type of device, got {shown}.{''.join(lacking[:8])} Mend or leave out such a node, or let "
            "all compute on their CPUs: `echelon run --device cpu`, init_from_env(device_type='cpu')."
        )
    holders: dict[str, list[int]] = {}
    for rank, facts in ranks.items():
        if facts.nccl and facts.gpu:
            holders.setdefault(facts.gpu, []).append(rank)
    # NCCL's own variable, with which it lets ranks share a device (2.30).
    shared = next((r for r in holders.values() if len(r) > 1), None) if not os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") else None
    if shared is not None:
        facts = ranks[shared[0]]
        return (
            f"{_named(shared)} compute on one GPU, {facts.gpu} of {facts.host}, which NCCL refuses. Start fewer ranks there, "
            "give each a GPU of its own (--bind devices), or let them share it by gloo: init_from_env(pg_backend='gloo')."
        )
    return ""


def _lack() -> str:
    if torch.version.cuda is None:
        return "its torch is built without CUDA"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "its torch finds no GPU" + (f" (CUDA_VISIBLE_DEVICES={shown!r})" if shown is not None else "")


def _at(rank: int, facts: Facts) -> str:
    return f"rank {rank}{f' ({facts.host})' if facts.host else ''}"


def _named(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0-2, 5"."""
    every = sorted(ranks)
    runs: list[list[int]] = []
    for rank in every:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ("rank " if len(every) == 1 else "ranks ") + ", ".join(shown[:16]) + (", ..." if len(shown) > 16 else "")


def refusal(error: UsageError) -> Facts:
    """Of a rank that cannot even tell its device."""
    return Facts(host=socket.gethostname(), error=str(error))
