"""Facts that ranks exchange through the store before they join: their device, and a digest of the program they run.

A rank whose GPU is gone would compute on its CPU while the others wait for it in NCCL, and two ranks on one GPU end in NCCL's
"invalid usage". Both can be seen before any group exists, so every rank gets an error that names the ranks concerned.

Rank 0 reads the facts of all ranks and answers once, so the work of the store is proportional to the number of ranks. The store
of another launcher outlives a restart, and may still hold facts of the previous attempt. In that case no rank waits for an
answer: each rank compares itself with rank 0, and rank 0 with all, so that a rank that has changed finds the problem itself.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError, RanksDisagreeError, UsageError
from echelon.common.files import parse_object
from echelon.common.terminal import rank_ranges
from echelon.contracts.rank import RankInfo, said_by
from echelon.world.device import in_thread
from echelon.world.handshake import RankSetup, refusal_of, tellers_of, warn_of

__all__ = ["Facts", "meet", "refusal"]

logger = logging.getLogger(__name__)

# Time between two checks of which ranks have come, which also find a rank of another world size. Each is longer than the last.
_LOOK_S, _LONGEST_LOOK_S = 2.0, 30.0
_FIRST_WORD_S = 10.0  # time until the first warning about missing ranks
_BLOCK = 256  # ranks that are checked at once
_MOST_TOLD = 8  # digests
_DIGITS = 10  # every world size has fewer digits
# Time for a rank to send its whole program, which is needed only if digests differ.
_TELL = timedelta(seconds=30)
# Extra time for the answer, since rank 0 may itself have waited for the whole timeout.
_LATER = timedelta(seconds=5)


@dataclass(frozen=True)
class Facts:
    """The facts of one rank.

    Args:
        device: the type of its device.
        why: if it computes on the CPU without being told to, the reason why it has no GPU.
        gpu: a name of its GPU, unique among all machines; empty on a CPU.
        nccl: whether its group uses NCCL.
        host: its machine's name.
        error: why it cannot join at all.
        world_size: its world size.
        digest, other_digest: digests of its program (`handshake`): of the facts that must be the same, and of those that may
            differ.
    """

    device: str = "cpu"
    why: str = ""
    gpu: str = ""
    nccl: bool = False
    host: str = ""
    error: str = ""
    world_size: int = 0
    digest: str = ""
    other_digest: str = ""

    @classmethod
    def here(cls, device: torch.device, *, asked: bool, backend: str) -> Facts:
        """The facts of this rank.

        Args:
            asked: its device was named, not chosen automatically.
        """
        if device.type == "cpu":
            return cls("cpu", "" if asked else _lack(), nccl="nccl" in backend, host=socket.gethostname())
        name = f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", name)
        return cls(device.type, "", str(uuid), "nccl" in backend, socket.gethostname())

    @classmethod
    def read(cls, text: bytes) -> Facts:
        """Parse another rank's facts. Anyone can write into a store, so missing fields and wrong types give the defaults."""
        plain, known = asdict(cls()), parse_object(text) or {}
        return cls(**{name: known[name] if type(known.get(name)) is type(plain[name]) else plain[name] for name in plain})


def meet(
    store: dist.Store, info: RankInfo, facts: Facts, timeout: timedelta, *, fresh: bool, setup: RankSetup | None = None
) -> None:
    """Exchange facts and find out whether all ranks can join. Every rank calls it, once for each joining.

    Args:
        store: a store with the keys of this joining only.
        fresh: no earlier attempt has used these keys.
        setup: this rank's program, compared if `fresh`; None if the rank cannot join.
    Raises:
        LauncherEnvironmentError: on all ranks if `fresh`, else on those that see it: a rank cannot join, ranks compute on
            different types of device, or two ranks share a GPU with NCCL.
        RanksDisagreeError: on all ranks: they run different code, versions or settings.
        dist.DistStoreError: some ranks did not come in time.
    """
    if setup is not None and fresh:
        facts = replace(facts, digest=setup.digest, other_digest=setup.other_digest)
    facts = replace(facts, world_size=info.world_size)
    if fresh and store.add(f"came/{info.rank}", 1) > 1:
        raise LauncherEnvironmentError(
            f"two processes are rank {info.rank} of {info.world_size} at MASTER_ADDR={info.master_addr} "
            f"MASTER_PORT={info.master_port}. Is that port another job's, or were ranks started twice?"
        )
    store.set(f"facts/{info.rank}", json.dumps(asdict(facts)))
    if info.rank == 0:
        everyones = _everyones(store, info, timeout, fresh=fresh)
        problem, kind = _judge(everyones), "no"
        if fresh and setup is not None and not problem:
            problem, kind = _compared(store, everyones, setup), "differ"
        if fresh:
            for key in ("verdict", "answer"):  # "verdict" for ranks that have already read the answer "tell"
                store.set(key, f"{kind} {problem}" if problem else _go(everyones))
    elif fresh:
        kind, problem = _answer(store, info, setup, timeout)
    else:
        _wait(store, "facts/0", timeout)
        kind, problem = "no", _judge({0: Facts.read(store.get("facts/0")), info.rank: facts})
    if not problem:
        return
    if fresh:
        _wait_until_joined(store, info)
    if kind == "differ":
        raise RanksDisagreeError(problem)
    raise LauncherEnvironmentError(facts.error or problem)


def _answer(store: dist.Store, info: RankInfo, setup: RankSetup | None, timeout: timedelta) -> tuple[str, str]:
    """Rank 0's answer: "go" and an empty text, or the kind of problem and its text. Sends this rank's program if asked."""
    _wait(store, "answer", timeout + _LATER)
    # This rank may read a question that rank 0 has already given up on. Then its reply is not read.
    kind, _, text = _text(store.get("answer")).partition(" ")
    if kind == "tell":
        if str(info.rank) in text.split() and setup is not None:
            store.set(f"said/{info.rank}", setup.to_json())
        _wait(store, "verdict", _TELL + _LATER)
        kind, _, text = _text(store.get("verdict")).partition(" ")
    if kind != "go":
        return kind, text
    size, *known = text.split() or [""]
    if size != str(info.world_size):
        is_size = size.isdecimal() and len(size) < _DIGITS
        return "no", _sizes({0: int(size) if is_size else 0, info.rank: info.world_size})
    if setup is None or setup.digest in known or len(known) != 1:
        return kind, ""
    return "no", (
        f"rank {info.rank} runs another program than the ranks that rank 0 at MASTER_ADDR={info.master_addr} MASTER_PORT="
        f"{info.master_port} has met. Is that port another job's? Set MASTER_PORT to a free one on all ranks."
    )


def _wait(store: dist.Store, key: str, timeout: timedelta) -> None:
    """The store's own wait, in a thread: a thread that waits in C++ could not handle a stop signal."""
    ended, errors = threading.Event(), []

    def wait() -> None:
        try:
            store.wait([key], timeout)
        except Exception as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=in_thread(wait), name="echelon-meeting", daemon=True).start()
    ended.wait()
    if errors:
        raise errors[0]


def _go(everyones: Mapping[int, Facts]) -> str:
    """The answer "go", with the digests of the ranks that rank 0 has met: a reader can tell whether it is meant for it."""
    return " ".join(["go", str(len(everyones)), *sorted({facts.digest for facts in everyones.values()})[:_MOST_TOLD]])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _compared(store: dist.Store, everyones: dict[int, Facts], own_digest: RankSetup) -> str:
    """Why these ranks may not train together; empty if they may. If digests differ, a rank of each kind sends its program."""
    must, may = (tellers_of([getattr(facts, name) for facts in everyones.values()]) for name in ("digest", "other_digest"))
    asked = sorted({*must, *may} - {0}) if len(must) > 1 or len(may) > 1 else []
    if not asked:
        return ""
    store.set("answer", f"tell {' '.join(map(str, asked))}")
    setups = {0: own_digest}
    for rank in asked:
        try:
            store.wait([f"said/{rank}"], _TELL)
            setups[rank] = RankSetup.read(store.get(f"said/{rank}"))
        except dist.DistStoreError:
            return f"rank {rank} runs another program than rank 0, and did not send it within {_TELL.total_seconds():g} s."
    problem = refusal_of({t: setups[t] for t in must}, must) if len(must) > 1 else ""
    if not problem and len(may) > 1:
        warn_of({t: setups[t] for t in may}, may)
    return problem


def _everyones(store: dist.Store, info: RankInfo, timeout: timedelta, *, fresh: bool) -> dict[int, Facts]:
    """Wait for the facts of all ranks. Raises for all ranks that came if they contradict each other or some are missing."""
    ranks, at = info.world_size, f"MASTER_ADDR={info.master_addr} MASTER_PORT={info.master_port}"
    keys = [f"facts/{rank}" for rank in range(ranks)]
    until, look_s, warned_s = time.monotonic() + timeout.total_seconds(), _LOOK_S, 0.0
    patience_s = min(_FIRST_WORD_S, _LONGEST_LOOK_S)
    while True:
        left = until - time.monotonic()
        keys_there = dict(enumerate(keys)) if _are_there(store, keys, min(look_s, left)) else _came(store, keys)
        facts = {
            rank: Facts.read(text) for rank, text in zip(keys_there, store.multi_get(list(keys_there.values())), strict=True)
        }
        # In a store that is not fresh, these may be facts of a previous group of another size.
        problem = _sizes({rank: each.world_size for rank, each in facts.items() if each.world_size}) if fresh else ""
        if len(facts) == ranks and not problem:
            return facts
        missing = [rank for rank in range(ranks) if rank not in facts]
        if not problem and left <= look_s:
            problem = (
                f"{rank_ranges(missing)} of {ranks} did not come within {timeout.total_seconds():g} s. Look at their output "
                f"for how they ended; start as many ranks as WORLD_SIZE={ranks} says; and see that their hosts reach {at}."
                f"{_why_so_many(info)}"
            )
        if problem:
            store.set("answer", f"no {problem}")
            _wait_until_joined(store, RankInfo(rank=0, world_size=ranks), sorted(facts))
            raise LauncherEnvironmentError(problem)
        look_s, warned_s = min(2 * look_s, patience_s), warned_s + look_s
        if warned_s >= patience_s:
            warned_s, patience_s = 0.0, _LONGEST_LOOK_S
            logger.warning(
                "rank 0 waits for %s of %s, and gives up in %.0f s. Do they run, and can their hosts reach %s?%s",
                rank_ranges(missing), ranks, max(0.0, until - time.monotonic()), at, _why_so_many(info),
            )  # fmt: skip


def _why_so_many(info: RankInfo) -> str:
    """A sentence about the variables that set the world size: a shell may still have those of another program's launcher."""
    variables = said_by(info)
    return f" The world size {info.world_size} comes from {variables}: unset these to run one process alone." if variables else ""


def _are_there(store: dist.Store, keys: list[str], patience_s: float) -> bool:
    """Wait for keys. The store's own wait prints two warnings in C++ at each timeout."""
    until, pause_s = time.monotonic() + patience_s, 0.002
    while not store.check(keys):
        if time.monotonic() >= until:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
    return True


def _came(store: dist.Store, keys: Sequence[str]) -> dict[int, str]:
    """The keys that are set, by rank."""
    keys_there = {}
    for first in range(0, len(keys), _BLOCK):
        block = range(first, min(first + _BLOCK, len(keys)))
        if store.check([keys[rank] for rank in block]):
            keys_there.update({rank: keys[rank] for rank in block})
        else:
            keys_there.update({rank: keys[rank] for rank in block if store.check([keys[rank]])})
    return keys_there


def _sizes(setups: Mapping[int, int]) -> str:
    """Why these world sizes contradict each other; empty if all are equal."""
    having: dict[int, list[int]] = {}
    for rank, size in setups.items():
        having.setdefault(size, []).append(rank)
    if len(having) < 2:
        return ""
    shown = "; ".join(f"{rank_ranges(ranks)}: {size}" for size, ranks in sorted(having.items(), key=lambda item: len(item[1])))
    return f"the world size must be the same on all ranks, got {shown}. Start all ranks with one WORLD_SIZE, by one launcher."


def _wait_until_joined(store: dist.Store, info: RankInfo, ranks: Sequence[int] | None = None) -> None:
    """Let rank 0, which may serve the store, wait until the others, or those of them that came, have read the answer."""
    store.set(f"heard/{info.rank}", "")
    if info.rank == 0:
        try:
            store.wait([f"heard/{rank}" for rank in (range(info.world_size) if ranks is None else ranks)], _LATER)
        except dist.DistStoreError:
            return


def _judge(ranks: dict[int, Facts]) -> str:
    """Why these ranks cannot join; empty if they can."""
    for rank, facts in ranks.items():
        if facts.error:
            return f"{_at(rank, facts)} cannot join: {facts.error}"
    kinds: dict[str, list[int]] = {}
    for rank, facts in ranks.items():
        kinds.setdefault(facts.device, []).append(rank)
    if len(kinds) > 1 and any(facts.why or facts.nccl for facts in ranks.values()):
        shown = " and ".join(f"{kind} on {rank_ranges(members)}" for kind, members in kinds.items())
        lacking = [f" On {_at(rank, facts)}: {facts.why}." for rank, facts in ranks.items() if facts.why]
        return (
            f"ranks must compute on one type of device, got {shown}.{''.join(lacking[:8])} Repair or leave out that node, or "
            "let all compute on their CPUs: `echelon run --device cpu`, init_from_env(device_type='cpu')."
        )
    holders: dict[str, list[int]] = {}
    for rank, facts in ranks.items():
        if facts.nccl and facts.gpu:
            holders.setdefault(facts.gpu, []).append(rank)
    # With this variable NCCL lets ranks share a device (2.30).
    shared = next((r for r in holders.values() if len(r) > 1), None) if not os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") else None
    if shared is not None:
        facts = ranks[shared[0]]
        return (
            f"{rank_ranges(shared)} compute on one GPU, {facts.gpu} of {facts.host}, which NCCL refuses. Start fewer ranks "
            "there, give each a GPU of its own (--bind devices), or let them share it by gloo: init_from_env(pg_backend='gloo')."
        )
    return ""


def _lack() -> str:
    if torch.version.cuda is None:
        return "its torch is built without CUDA"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "its torch finds no GPU" + (f" (CUDA_VISIBLE_DEVICES={shown!r})" if shown is not None else "")


def _at(rank: int, facts: Facts) -> str:
    return f"rank {rank}{f' ({facts.host})' if facts.host else ''}"


def refusal(error: UsageError) -> Facts:
    """The facts of a rank that cannot join because of an error."""
    return Facts(host=socket.gethostname(), error=str(error))
