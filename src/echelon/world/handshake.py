"""Refuse ranks that run different code, versions or settings, before they compute. The error is raised on all of them.

Every rank sends a digest of its `program` (32 digits), which shows whether all are equal. Only if they differ, one rank of each
kind sends the whole program. Ranks that join by `init_from_env` compare through the store, before there is a group (`meeting`).
If the group was made in another way, the first `train` or `prepare` compares them by one small collective.

ECHELON_HANDSHAKE is "all"; "versions", if ranks run different scripts or arguments on purpose; or "none".
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError, RanksDisagreeError, UsageError, require
from echelon.common.files import parse_object
from echelon.common.terminal import one_line, rank_ranges
from echelon.contracts.rank import RankInfo
from echelon.world import agree
from echelon.world.program import MODULE, SETTINGS, build, program

__all__ = ["VARIABLE", "RankSetup", "check_same_setup", "differences", "greeted", "refusal_of", "tellers_of", "warn_of"]

logger = logging.getLogger(__name__)

VARIABLE = "ECHELON_HANDSHAKE"
MODES = ("all", "versions", "none")
# Limits: kinds of ranks that send their program, lines of an error, characters of a value, entries and bytes that are read.
_MOST_KINDS, _MOST_LINES, _LONGEST, _MOST_ENTRIES, _MOST_BYTES = 8, 20, 80, 4000, 1 << 20

# Groups whose ranks are already compared.
_greeted: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class RankSetup:
    """A rank's program and settings, to be compared.

    Args:
        mode: how much is compared, one of `MODES`.
        values: by name, the facts that must be the same.
        may_differ: by name, the facts whose difference is only a warning.
        host: the name of its host.
    """

    mode: str
    values: Mapping[str, str]
    may_differ: Mapping[str, str]
    host: str = ""

    @classmethod
    def here(cls, info: RankInfo, device: torch.device, backend: str = "gloo") -> RankSetup:
        """The setup of this rank.

        Args:
            device: where it computes.
            backend: the backend of its group.
        Raises:
            UsageError: the variable is not one of `MODES`.
        """
        mode = os.environ.get(VARIABLE) or "all"
        require(mode in MODES, VARIABLE, "'all', 'versions' or 'none'", mode, kind=LauncherEnvironmentError)
        values = program(info, nccl="nccl" in backend) if mode != "none" else {}
        if mode == "versions":
            values = {name: value for name, value in values.items() if not name.startswith(SETTINGS)}
        return cls(mode, values, build(device) if mode != "none" else {}, socket.gethostname())

    def to_json(self) -> str:
        return json.dumps({"mode": self.mode, "values": self.values, "may_differ": self.may_differ, "host": self.host})

    @classmethod
    def read(cls, text: bytes | str) -> RankSetup:
        """Parse another rank's setup. Anyone can write into a store, so fields of a wrong type are dropped."""
        fields = (parse_object(text) if len(text) <= _MOST_BYTES else None) or {}
        mode, host = fields.get("mode"), fields.get("host")
        return cls(
            mode if isinstance(mode, str) and mode in MODES else "all",
            _texts(fields.get("values")),
            _texts(fields.get("may_differ")),
            host if isinstance(host, str) else "",
        )

    @property
    def digest(self) -> str:
        return _digest(self.values)

    @property
    def other_digest(self) -> str:
        """The digest of `may_differ`."""
        return _digest(self.may_differ)


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in list(value.items())[:_MOST_ENTRIES] if isinstance(k, str) and isinstance(v, str)}


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()[:32]


def tellers_of(digests: Sequence[object]) -> dict[int, list[int]]:
    """Group ranks by digest: the ranks of each kind, by the first of them. At most the eight largest kinds."""
    kinds: dict[object, list[int]] = {}
    for rank, digest in enumerate(digests):
        kinds.setdefault(digest, []).append(rank)
    largest = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks[0]))[:_MOST_KINDS]
    return {ranks[0]: ranks for ranks in sorted(largest)}


def differences(
    setups: Mapping[int, Mapping[str, str]], kinds: Mapping[int, Sequence[int]], hosts: Mapping[int, str]
) -> list[str]:
    """A line for each name with several values, with the ranks that have each value.

    Args:
        setups: by the first rank of each kind, the values of its kind.
        kinds: by the first rank of each kind, all ranks of its kind.
        hosts: by the first rank of each kind, its host.
    """
    lines = []
    for name in sorted(
        {name for values in setups.values() for name in values}, key=lambda n: (n.startswith(MODULE), n.startswith(SETTINGS), n)
    ):
        having: dict[str, list[int]] = {}
        for teller, values in setups.items():
            if name in values or not name.startswith(MODULE):  # a module that some ranks have not imported is no difference
                having.setdefault(values.get(name, "none"), []).extend(kinds[teller])
        if len(having) < 2:
            continue
        groups = sorted(having.items(), key=lambda item: (len(item[1]), item[1][0]))
        rest = len(groups[-1][1]) > len(groups[-2][1])  # the largest group, if there is one, is "the others"
        shown = [f"{_who(ranks, hosts)}: {_value(value)}" for value, ranks in (groups[:-1] if rest else groups)[:_MOST_KINDS]]
        lines.append(f"{_value(name)}: {'; '.join(shown)}" + (f"; the others: {_value(groups[-1][0])}" if rest else ""))
    return lines


def refusal_of(setups: Mapping[int, RankSetup], kinds: Mapping[int, Sequence[int]]) -> str:
    """The error for all ranks; empty if they may go on, because they differ only in facts that are not compared."""
    least = max((setup.mode for setup in setups.values()), key=MODES.index)
    if least == "none":
        return ""
    compared = {
        teller: {n: v for n, v in setup.values.items() if least == "all" or not n.startswith(SETTINGS)}
        for teller, setup in setups.items()
    }
    lines = differences(compared, kinds, {teller: setup.host for teller, setup in setups.items()})
    if not lines:
        return ""
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    listed = "".join(f"\n  {line}" for line in [*lines[1:_MOST_LINES], *more])  # the first line is what summaries show
    settings = any(line.startswith(SETTINGS) for line in lines)
    remedy = "Start all ranks from the same installation and code, with the same arguments." + (
        f" If they differ on purpose, set {VARIABLE}=versions for every rank, and only versions are compared." if settings else ""
    )
    return f"ranks must run the same program, got {lines[0]}{listed}\n{remedy}"


def _who(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    host = one_line(hosts.get(ranks[0], ""))[:_LONGEST] if len(ranks) == 1 else ""
    return f"{rank_ranges(ranks)}{f' ({host})' if host else ''}"


def _value(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def warn_of(setups: Mapping[int, RankSetup], kinds: Mapping[int, Sequence[int]]) -> None:
    """Log differences of facts that may differ."""
    lines = differences({t: s.may_differ for t, s in setups.items()}, kinds, {t: s.host for t, s in setups.items()})
    if lines and agree.is_rank0():
        logger.warning("ranks differ, which costs speed or the last digits: %s", "; ".join(lines[:_MOST_LINES]))


def greeted() -> None:
    """Note that the ranks of the default group are compared."""
    if dist.group.WORLD is not None:
        _greeted[dist.group.WORLD] = True


def check_same_setup(device: torch.device | None = None) -> None:
    """Compare this rank with the others of the default group, once for each group. Collective over it.

    Args:
        device: where this rank computes; by default its current GPU, if it uses any.
    Raises:
        RanksDisagreeError: on all ranks, with the differences; or on the others, if a rank cannot determine its setup.
        UsageError: on that rank, see `RankSetup.here`.
    """
    if not agree.is_joined() or dist.group.WORLD in _greeted:
        return
    info = RankInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    own_device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    failure: UsageError | None = None
    setup = RankSetup("none", {}, {})
    try:
        setup = RankSetup.here(info, device or own_device, str(dist.get_backend_config()))
    except UsageError as error:  # raised after the collective, in which the others wait
        failure = error
    own_digests = [setup.digest, setup.other_digest, str(failure or "")]
    if agree.is_same(own_digests) and failure is None:
        greeted()
        return
    digests = [each if isinstance(each, list) and len(each) == 3 else ["", "", ""] for each in agree.gather(own_digests)]
    if failure is not None:
        raise failure
    if failing := [rank for rank, each in enumerate(digests) if each[2]]:
        raise RanksDisagreeError(f"{rank_ranges(failing)} cannot join: {one_line(str(digests[failing[0]][2]))}")
    for which, judge in ((0, _refuse), (1, warn_of)):
        kinds = tellers_of([str(each[which]) for each in digests])
        if len(kinds) > 1:
            judge({teller: RankSetup.read(agree.from_one(teller, setup.to_json)) for teller in kinds}, kinds)
    greeted()


def _refuse(setups: Mapping[int, RankSetup], kinds: Mapping[int, Sequence[int]]) -> None:
    if problem := refusal_of(setups, kinds):
        raise RanksDisagreeError(problem)
