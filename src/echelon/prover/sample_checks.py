"""What the samples of a row show by themselves: whose they are, and what reading them draws."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from echelon.common.errors import RankFailedError
from echelon.prover.matrix import Row
from echelon.prover.micro import digest
from echelon.prover.on_ranks import OnRanks
from echelon.prover.proof import Result
from echelon.prover.ran import Ran
from echelon.prover.rank import Replay, run_epoch, run_samples
from echelon.prover.samples import Epoch, Seen, note_on, of_updates, unlike_an_epoch, unlike_one_process

__all__ = ["SampleChecks"]

_SAME_LOSS = 1e-4


class SampleChecks:
    """Holds the samples of rows against those of one process, which are read once."""

    def __init__(self, on_ranks: OnRanks, folder: Path) -> None:
        self._on_ranks, self.folder = on_ranks, folder
        self._epochs: list[Epoch | None] = []  # of one process, once it was read
        self._samples_of_one: list[Seen] | None = None
        self._size: int | None = None  # of its data set
        self._depends_on_hash: bool | None = None
        self._depends_on_seed: str | None = None
        self._keeps: str | None = None  # what reading changes of the data set, if samples depend on it

    def causes(self, result: Result, ran: Ran, *, joined: bool) -> list[tuple[str, str]]:
        """Those that the samples of a row show; notes go to the result.

        Args:
            joined: the reference trained on joined batches.
        """
        ranks = [r for r in ran.records if not r["is_replica"]]
        if len(ranks) < 2:
            return []
        replay = self._on_ranks.replay(ran, self.folder)
        if (drew := ranks[0]["drew_unseeded"]) and (seen := self._by_seed(ran)):
            return [("an RNG without a seed", f"{seen}: from {' and '.join(sorted(drew))}, which it draws from before it trains")]
        if ranks[0]["hashes"] and self._by_hash(replay):
            seen = "the first batches or initial parameters are others under another PYTHONHASHSEED, as ranks of other nodes have"
            return [("samples that depend on the rank", seen)]
        others = None
        if ranks[0]["loader"] == "Loader":
            updates = of_updates(ranks) if joined and not ranks[0]["left_out"] else []
            others = unlike_one_process(updates, self._of_one_process(replay, sum(len(seen.rows) for seen in updates)))
            others = self._divided_before(ranks) or others
        divided = ranks[0]["loader"] == "Loader"
        if joined and not self._samples_of_one and (epoch := self._epoch(replay)) is not None:  # whose loader may be another
            others = others or unlike_an_epoch(ranks if divided else ranks[:1], epoch)
        if self._keeps is not None:
            others = f"the data set's {self._keeps} changes as samples are read, and what they are depends on it"
        if others is not None:
            return [("samples that depend on the rank", others)]
        note = note_on(ranks, lambda: self._epoch(replay))
        if note is not None and note.startswith("samples overlap"):
            return [("samples that ranks share", note)]
        if note is not None:
            result.notes.append(note)
        return []

    def _divided_before(self, ranks: list[dict[str, Any]]) -> str | None:
        """Whether ranks have data sets of their own, of which a Loader gives each a share."""
        other = next((r for r in ranks if self._size not in (None, r["size"])), None)
        looks = [r["seen_of_data"] for r in ranks]
        found = None
        if other is not None:
            found = f"rank {other['rank']}: the data set has {other['size']} samples, and {self._size} in one process"
        elif None not in looks and any(look != looks[0] for look in looks):
            found = "ranks have data sets with other samples"
        return f"{found}; echelon.Loader divides by itself what is the same on all ranks" if found else None

    def _by_seed(self, ran: Ran) -> str:
        """What is another on a rank where RNGs that the script does not seed are seeded alike before it trains."""
        if self._depends_on_seed is None:
            self._depends_on_seed, again = "", self.folder / "seeded-alike"
            with contextlib.suppress(RankFailedError):
                alike = self._on_ranks.row(replace(ran.row, seeded_alike=True, brief=True), again, ran.dtype)
                apart = [_apart(*both) for both in zip(ran.records, alike.records, strict=True)]
                if not apart[0]:  # rank 0 has the same seeds both times: if it draws others, nothing can be told
                    self._depends_on_seed = next((f"rank {rank} {what}" for rank, what in enumerate(apart) if what), "")
            shutil.rmtree(again, ignore_errors=True)
        return self._depends_on_seed

    def _by_hash(self, replay: Replay) -> bool:
        """Whether training begins otherwise with another order of sets of strings. Ranks that are forked have the same one."""
        if self._depends_on_hash is None:
            file = self.folder / "begin.pkl"
            file.write_bytes(cloudpickle.dumps(replace(replay, row=Row("none", 1))))
            code = "import sys; from echelon.prover.rank import print_begin; print_begin(sys.argv[1])"
            path = os.pathsep.join(p for p in sys.path if p)

            def begun(*seeds: str) -> list[str]:
                runs = [
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", code, str(file)],
                        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        text=True,
                    )
                    for seed in seeds
                ]
                return [run.communicate()[0].strip().rpartition("\n")[2] for run in runs]

            one, other = begun("1", "2")
            self._depends_on_hash = "" != one != other != "" and begun("1") == [one]
        return self._depends_on_hash

    def _epoch(self, replay: Replay) -> Epoch | None:
        """What one process reads; None where it has no end in sight."""
        if not self._epochs:
            try:
                found = self._on_ranks.launch(run_epoch, 1, replay)
                self._epochs.append(found.get("epoch"))
                self._keeps = found.get("keeps")
            except RankFailedError:
                self._epochs.append(None)
        return self._epochs[0]

    def _of_one_process(self, replay: Replay, count: int) -> list[Seen]:
        """The first samples of one process."""
        if self._samples_of_one is None or 0 < sum(len(each.rows) for each in self._samples_of_one) < count:
            self._samples_of_one = []
            with contextlib.suppress(RankFailedError):
                found = self._on_ranks.launch(run_samples, 1, replay, count)
                self._samples_of_one, self._keeps, self._size = found["seen"], found["keeps"], found["size"]
        return self._samples_of_one


def _apart(one: dict[str, Any], other: dict[str, Any]) -> str:
    """What is another in two runs of one rank."""
    mine, others = ([m for update in record["updates"] for m in update] for record in (one, other))
    if any(digest(a.plain) != digest(b.plain) for a, b in zip(mine, others, strict=False)):
        return "has samples of its own"
    first, second = (micros[0].loss if micros else None for micros in (mine, others))
    is_apart = first is not None and second is not None and abs(first - second) > _SAME_LOSS * abs(second)
    return "computes its loss with numbers of its own" if is_apart else ""
