"""The steps of the library whose cost depends on the number of ranks, each run as one rank, with simulated other ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor as distributed
from bench._fake import fake_world

import echelon as ech
from echelon.checkpoint import commit, structure
from echelon.checkpoint import manifest as manifests
from echelon.checkpoint.background import Background
from echelon.checkpoint.layout import own_file, tensors_file
from echelon.checkpoint.snapshot import Planned
from echelon.checkpoint.tensors import Files, Tensors
from echelon.contracts.pulse import Phase, RankProgress
from echelon.contracts.rank import RankInfo
from echelon.diagnosis import Evidence, RankEvidence, explain
from echelon.diagnosis.failure import Failure
from echelon.parallel.axes import Axis, speaks_for
from echelon.parallel.state.partition import assign
from echelon.world import agree, rng
from echelon.world.handshake import RankSetup
from echelon.world.meeting import Facts, meet
from echelon.world.mesh import ParallelDims

__all__ = ["STEPS", "Network", "Step", "played"]

Says = Callable[[int], Any]

TENSORS = 20  # of the checkpoint


class Network:
    """torch.distributed's collectives, where only one rank exists. `says` gives the values that the others send.

    Attributes:
        bytes: bytes that this rank sent and received; an all-reduce counts once, as in a tree.
    """

    def __init__(self, ranks: int, rank: int, says: Says | None = None) -> None:
        self.ranks, self.rank, self.bytes = ranks, rank, 0
        told = [json.dumps(says(each)).encode() for each in range(ranks)] if says is not None else []
        self._told = told
        self._packed = [zlib.compress(data, 1) for data in told]
        self._about = [hashlib.sha256(d).digest() + len(p).to_bytes(8, "little") for d, p in zip(told, self._packed, strict=True)]
        self._frames = [_tensor(agree._frame(data).numpy().tobytes()) for data in told]

    def all_reduce(self, value: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        self.bytes += value.nbytes

    def broadcast(self, value: torch.Tensor, group: Any = None, group_src: int = 0, src: int = 0) -> None:
        self.bytes += value.nbytes
        if self.rank:  # rank 0 sends the number of bytes that it scatters to each rank
            value.copy_(agree._frame(json.dumps({"value": -(-TENSORS // 8)}).encode()))

    def all_gather(self, parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        self.bytes += sum(part.nbytes for part in parts)
        for rank, part in enumerate(parts):
            if self._told and len(part) == agree._FRAME:
                part.copy_(self._frames[rank])
            else:
                part.copy_(mine)

    def gather(self, mine: torch.Tensor, parts: list[torch.Tensor] | None = None, group: Any = None, group_dst: int = 0) -> None:
        self.bytes += mine.nbytes if parts is None else sum(part.nbytes for part in parts)
        for rank, part in enumerate(parts or ()):
            part.copy_(_tensor(self._about[rank]))

    def scatter(self, mine: torch.Tensor, parts: list[torch.Tensor] | None = None, group: Any = None, group_src: int = 0) -> None:
        self.bytes += mine.nbytes if parts is None else sum(part.nbytes for part in parts)
        mine.fill_(1) if parts is None else mine.copy_(parts[0])

    def send(self, value: torch.Tensor, group: Any = None, group_dst: int = 0) -> None:
        self.bytes += value.nbytes

    def recv(self, value: torch.Tensor, group: Any = None, group_src: int = 0) -> None:
        self.bytes += value.nbytes
        value.copy_(_tensor(self._packed[group_src]))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextlib.contextmanager
def played(network: Network) -> Iterator[None]:
    """Context in which that network replaces torch.distributed's collectives."""
    names = ("all_reduce", "broadcast", "all_gather", "gather", "scatter", "send", "recv")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, getattr(network, name)))
        yield


@dataclass(frozen=True)
class Step:
    """
    Args:
        name: the step and the rank that does it.
        make: takes the number of ranks and returns the function to measure; `make` itself is not measured.
        says: takes the number of ranks and returns the value that each rank sends; None if it does not matter.
        rank: the rank that is run; None is the last.
        constant: the bytes sent do not depend on the number of ranks.
    """

    name: str
    make: Callable[[int], Callable[[], Any]]
    says: Callable[[int], Says] | None = None
    rank: int | None = 0
    constant: bool = False

    @contextlib.contextmanager
    def ready(self, ranks: int) -> Iterator[tuple[Callable[[], Any], Network]]:
        rank = self.rank if self.rank is not None else ranks - 1
        network = Network(ranks, rank, self.says(ranks) if self.says is not None else None)
        with fake_world(ranks, rank), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run = self.make(ranks)
            with played(network):
                yield run, network


# --- listings of a checkpoint's pieces, as `Planned.assign` takes them


def _listing(shard: int, shards: int) -> list[Any]:
    return [
        [f"module.blocks.{i}.weight", [shard * 8, 0], [8, 512], "torch.float32", [8 * shards, 512], False] for i in range(TENSORS)
    ]


def _whole(ranks: int) -> Says:
    listing = _listing(0, 1)
    return lambda rank: listing


def _sharded(ranks: int) -> Says:
    return lambda rank: _listing(rank, ranks)


def _copies(ranks: int) -> Says:
    shards = min(8, ranks)
    return lambda rank: _listing(rank % shards, shards)


def _planning(says: Callable[[int], Says], rank: int = 0) -> Callable[[int], Callable[[], Any]]:
    def make(ranks: int) -> Callable[[], Any]:
        planned, listing = Planned(), says(ranks)(rank if rank >= 0 else ranks - 1)
        # Ranks first agree on whether any rank's pieces have changed; here all have.
        real = agree.any_rank

        def assign_() -> Any:
            with mock.patch.object(agree, "any_rank", lambda flag: real(flag) or True):
                return planned.assign(listing)

        return assign_

    return make


# --- folders


def _entry() -> dict[str, Any]:
    return {"size": 10, "crc32": ["0" * 8]}


def _files(rank: int) -> dict[str, Any]:
    return {tensors_file(rank): _entry(), own_file(rank): _entry()}


def _publish(ranks: int) -> Callable[[], Any]:
    staged = Path(".staged-step-00000001")
    staged.mkdir()
    files = {**_files(0), manifests.INDEX: _entry(), manifests.STATE: _entry()}
    return lambda: commit.publish(staged, 1, files, {"config": {}})


def _manifest(ranks: int) -> Callable[[], Any]:
    folder = Path("step-00000001")
    folder.mkdir()
    files = {name: entry for rank in range(ranks) for name, entry in _files(rank).items()}
    files |= {manifests.INDEX: _entry(), manifests.STATE: _entry()}
    (folder / manifests.MANIFEST).write_bytes(manifests.render({"step": 1, "time": 1.0, "files": files}))
    return lambda: manifests.read(folder)


def _index(ranks: int) -> tuple[Path, dict[str, Any]]:
    pieces = [[[rank * 8, 0], [8, 512], tensors_file(rank)] for rank in range(ranks)]
    index = {f"w{i}": {"dtype": "torch.float32", "shape": [8 * ranks, 512], "pieces": pieces} for i in range(TENSORS)}
    text = json.dumps(index).encode()
    Path(manifests.INDEX).write_bytes(text)
    sums = {"size": len(text), "crc32": manifests.checksums(text)}
    files = {name: entry for rank in range(ranks) for name, entry in _files(rank).items()}
    return Path(), {"files": {**files, manifests.INDEX: sums, manifests.STATE: _entry()}}


def _read_index(ranks: int) -> Callable[[], Any]:
    folder, manifest = _index(ranks)
    return lambda: structure.read_index(folder, manifest)


def _find_parts(readers: Callable[[int], int]) -> Callable[[int], Callable[[], Any]]:
    """Find one reader's parts of all tensors: torch's planner, and the file that has each part."""

    def make(ranks: int) -> Callable[[], Any]:
        folder, manifest = _index(ranks)
        saved = Tensors(Files(folder, folder, manifest))
        size = 8 * ranks // readers(ranks)
        mesh = ParallelDims.of(ranks).data_mesh(torch.device("cpu"))
        with torch.device("meta"):
            split = {
                n: distributed.empty(8 * ranks, 512, device_mesh=mesh, placements=[distributed.Shard(0)]) for n in saved.index
            }
            wanted = split if size == 8 else {n: torch.empty(8 * ranks, 512) for n in saved.index}
        file = mock.Mock(read_part=lambda *where: None)

        def find() -> None:
            with mock.patch.object(Files, "open", lambda files, name: file), mock.patch.object(saved, "forget", lambda: None):
                saved.read_into(wanted)

        return find

    return make


def _await_others(ranks: int) -> Callable[[], Any]:
    for rank in range(ranks):
        Path(f".done-{rank:05d}").write_text(json.dumps(_files(rank)))
    background = Background(lambda folder: None)
    return lambda: background._await_others(Path(), ranks)


# --- joining, meshes, data, failures


def _meet(ranks: int) -> Callable[[], Any]:
    """All ranks run the same program, but every second one has imported one more module. One of these sends its whole record."""
    store = dist.HashStore()
    kinds = [RankSetup("all", {"torch": "2.13.0", **({"module plots": "abc"} if odd else {})}, {}) for odd in range(2)]
    for rank in range(ranks):
        about = {"device": "cuda", "gpu": f"GPU-{rank}", "nccl": True, "host": f"node{rank // 8}", "world_size": ranks}
        about |= {"digest": kinds[rank % 2].digest, "other_digest": kinds[0].other_digest}
        store.set(f"facts/{rank}", json.dumps(about))
    store.set("said/1", kinds[1].to_json())
    info = RankInfo(rank=0, local_rank=0, world_size=ranks, local_world_size=8)
    mine = Facts("cuda", "", "GPU-0", True, "node0")

    def join() -> None:
        store.delete_key("came/0")
        meet(store, info, mine, timedelta(seconds=60), fresh=True, setup=kinds[0])

    return join


def _replicas(ranks: int) -> Callable[[], Any]:
    """A module that a user made parallel by hand: groups of 8 ranks share layers, and the data is split over the groups."""
    mesh = ParallelDims.of(ranks, tp=8).data_mesh(torch.device("cpu"))

    def find() -> int:
        digest = Axis.of(mesh.get_group(), "dp").digest
        told = [(rank // 8, (digest if rank % 8 == 0 else f"{rank % 8}",)) for rank in range(ranks)]
        return speaks_for(agree.gather([0, [digest]]) and told, ranks - 1)

    return find


def _loader(ranks: int) -> Callable[[], Any]:
    data = range(1 << 30)

    def first() -> Any:
        options = ech.data.LoaderOptions(dp=(ranks - 1, ranks))
        return next(iter(ech.Loader(data, 4 * ranks, seed=1, collate_fn=list, options=options)))

    return first


def _failures(ranks: int) -> Callable[[], Any]:
    failures = [Failure(rank, 1, rank, "DistBackendError", "Connection reset by peer") for rank in range(ranks)]
    known = {f.rank: RankEvidence(f.rank, f, standing=RankProgress(9 if f.rank else 8, Phase.STEP)) for f in failures}
    return lambda: explain(Evidence(ranks, ranks=known, exit_code=1))


def _agreed(act: Callable[[], Any]) -> Callable[[int], Callable[[], Any]]:
    return lambda ranks: act


_VALUE = {"max_updates": 1000, "folder": "/runs/0001"}

STEPS = [
    Step("agree: any_rank", _agreed(lambda: agree.any_rank(False)), constant=True),
    Step("agree: first_not_none, nothing to tell", _agreed(lambda: agree.first_not_none(None)), constant=True),
    Step("agree: same_on_all", _agreed(lambda: agree.same_on_all("x", _VALUE, "")), rank=None, constant=True),
    Step("agree: kinds, all the same", _agreed(lambda: agree.kinds(_VALUE)), rank=None, constant=True),
    Step("agree: from_rank0", _agreed(lambda: agree.from_rank0(lambda: _VALUE)), constant=True),
    Step("agree: gather of a short value", _agreed(lambda: agree.gather(_VALUE)), lambda ranks: lambda rank: _VALUE),
    Step("joining: rank 0 hears and compares all", _meet),
    Step("RNG streams are separated", _agreed(lambda: rng.separate(0)), rank=0),
    Step("replicas are found", _replicas),
    Step("mesh: 5 axes", lambda ranks: lambda: _mesh(ranks)),
    Step("ZeRO: 300 parameters are divided", lambda ranks: lambda: assign(list(range(300)), [0] * ranks)),
    Step("Loader: its first batch", _loader),
    Step("save plan, whole tensors: rank 0", _planning(_whole), _whole),
    Step("save plan, 8 shards and copies: rank 0", _planning(_copies), _copies),
    Step("save plan, shards: rank 0", _planning(_sharded), _sharded),
    Step("save plan, shards: another rank", _planning(_sharded, -1), _sharded, rank=None, constant=True),
    Step("commit: rank 0 writes the manifest", _publish, lambda ranks: _files),
    Step("background save: rank 0 waits for all", _await_others),
    Step("restore: the manifest is read", _manifest),
    Step("restore: the index is read", _read_index),
    Step("restore: one of as many ranks finds its parts", _find_parts(lambda ranks: ranks), rank=None),
    Step("restore: a single process finds all parts", _find_parts(lambda ranks: 1)),
    Step("a failure: who is to blame", _failures),
]


def _mesh(ranks: int) -> Any:
    dims = ParallelDims.of(ranks, pp=2, dp_replicate=2, cp=2, tp=2) if ranks >= 16 else ParallelDims.of(ranks)
    return dims.root_mesh(torch.device("cpu")), dims.samples_mesh(torch.device("cpu"))
