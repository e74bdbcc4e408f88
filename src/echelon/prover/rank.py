"""What runs in the processes that prove starts: the user's script, with the recorder or the reference in place of `train`."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import random
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import torch

import echelon
from echelon.contracts.errors import UsageError
from echelon.contracts.overrides import Overrides, impose
from echelon.loop import run as entry_points
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.strategy import Prepared, Strategy
from echelon.parallel.strategy import resolve as resolve_strategy
from echelon.parallel.tensor import TPStrategy
from echelon.parallel.zero import ZeROStrategy
from echelon.prover.matrix import Row
from echelon.prover.mistakes import mistakes_of
from echelon.prover.probe import probe
from echelon.prover.record import Enough, Recorder
from echelon.prover.reference import How, Reference, Shake, reference_of
from echelon.prover.samples import checksums
from echelon.prover.sources import GLOBAL
from echelon.prover.streams import on_host, plain, widened
from echelon.world import streams

__all__ = ["Target", "run_epoch", "run_mistakes", "run_probe", "run_reference", "run_row", "with_options_of"]

_EPOCH_S = 10.0  # for counting what one process sees in an epoch


@dataclass(frozen=True)
class Target:
    """What is run: a script with its arguments, or two functions.

    Args:
        script: path of a Python file that calls `train` or `fit`.
        args: its command line.
        make_unit, make_data: in place of a script.
    """

    script: str = ""
    args: Sequence[str] = ()
    make_unit: Callable[[], Any] | None = None
    make_data: Callable[[], Any] | None = None

    def run(self) -> None:
        if self.make_unit is not None and self.make_data is not None:
            echelon.init_from_env()
            entry_points.train(self.make_unit(), self.make_data(), max_epochs=10**6)
            return
        path = Path(self.script).resolve()
        sys.argv = [self.script, *self.args]
        sys.path.insert(0, str(path.parent))
        main = types.ModuleType("__main__")
        loader = SourceFileLoader("__main__", str(path))
        main.__dict__.update(__file__=str(path), __builtins__=builtins, __cached__=None, __loader__=loader, __annotations__={})
        sys.modules["__main__"] = main
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)


class _Noted(Strategy):
    """The strategy of a row. It tells afterwards whether it was used: a module that a script wrapped by hand stays as it is."""

    def __init__(self, row: Row) -> None:
        given = resolve_strategy(row.strategy)
        assert given is not None
        self.by_name, self._strategy, self.name = isinstance(row.strategy, str), given, given.name
        self.used = self.has_plan = False

    def __call__(self, own: Strategy | None) -> Strategy:
        """In place of the script's own strategy."""
        if self.by_name and own is not None:
            self._strategy = with_options_of(own, self._strategy)
        self.has_plan = isinstance(own, TPStrategy) and own.plan is not None
        return self

    def prepare(self, module: Any, world: Any, recipe: Any) -> Prepared[Any]:
        self.used = True
        return self._strategy.prepare(module, world, recipe)


def with_options_of(own: Strategy, given: Strategy) -> Strategy:
    """`given`, a strategy that was only named, with the options of the script's own strategy, if it is one of the same family.

    They tell what the model needs: that parameters stay unused, which modules are blocks. Mixed precision is left out.
    """
    ddp = own.options if isinstance(own, ZeROStrategy) else own
    fsdp = replace(ddp, mixed_precision=None) if isinstance(ddp, FSDPStrategy) else None
    if isinstance(given, DDPStrategy) and isinstance(ddp, DDPStrategy):
        return ddp
    if isinstance(given, ZeROStrategy) and given.stage == 1 and isinstance(ddp, DDPStrategy):
        return replace(given, options=ddp)
    if isinstance(given, ZeROStrategy) and given.stage > 1 and fsdp is not None:
        return replace(given, options=replace(fsdp, sharding_strategy=None, reshard_after_forward=None))
    if isinstance(given, FSDPStrategy) and fsdp is not None:
        return fsdp
    return own if type(own) is type(given) and not isinstance(own, ZeROStrategy) else given


def run_row(target: Target, row: Row, folder: str, updates: int, dtype: torch.dtype, seed: int, every: int = 1) -> dict[str, Any]:
    """Run the target as `row` says, on this rank, and leave what it did in `folder`."""
    noted = _Noted(row) if row.strategy is not None else None
    decided = Overrides(noted, "fp32", row.accumulation, False, row.parts, observes=True)
    recorder = Recorder(Path(folder), updates, dtype, every)

    def watch(unit: Any, dataloader: Any) -> list[Any]:
        _adapt(unit, row)
        recorder.attach(unit, dataloader, unseeded=set(GLOBAL) - seeded)
        recorder.record.overridable = noted is not None and noted.used
        recorder.record.has_plan |= noted is not None and noted.has_plan
        return [recorder]

    with _in_place_of_training(watch, decided, dtype, seed) as seeded:
        try:
            target.run()
        except Enough:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        return recorder.close()


def run_reference(
    target: Target,
    row: Row,
    data: Sequence[str],
    folder: str,
    dtype: torch.dtype,
    seed: int,
    how: How = "right",
    shake: Shake | None = None,
) -> dict[str, Any]:
    """Train the target's unit in plain PyTorch, in this one process, on the micro-batches that `data` holds.

    Args:
        row: its optimizer is used.
        data: files of the ranks whose data it is.
        how, shake: see `prover/reference.py`.
    """
    return _with_reference(target, row, data, folder, dtype, seed, lambda reference: reference.run(), how, shake)


def run_mistakes(
    target: Target, row: Row, data: Sequence[str], folder: str, dtype: torch.dtype, seed: int, k: int
) -> dict[str, Any]:
    """What likely mistakes would give at update k."""

    def work(reference: Reference) -> dict[str, Any]:
        reference.run_until(k)
        return mistakes_of(reference, k)

    return _with_reference(target, row, data, folder, dtype, seed, work)


def run_probe(target: Target, row: Row, data: Sequence[str], folder: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """See `prover/probe.py`."""
    return _with_reference(target, row, data, folder, dtype, seed, probe)


def run_epoch(target: Target, row: Row, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """`rows`: how often one process sees each row in an epoch, by checksum; not there if it has no end in sight."""

    def count(unit: Any, dataloader: Any) -> dict[str, Any]:
        counts: Counter[int] = Counter()
        ends = time.monotonic() + _EPOCH_S
        for batch in dataloader:
            counts.update(checksums(plain(widened(on_host(batch), dtype))))
            if time.monotonic() > ends:
                return {}
        return {"rows": counts}

    return _instead_of_training(target, row, dtype, seed, count)


def _with_reference(
    target: Target,
    row: Row,
    data: Sequence[str],
    folder: str,
    dtype: torch.dtype,
    seed: int,
    work: Callable[[Reference], dict[str, Any]],
    how: How = "right",
    shake: Shake | None = None,
) -> dict[str, Any]:
    def with_unit(unit: Any, dataloader: Any) -> dict[str, Any]:
        records = [torch.load(path, weights_only=False) for path in data]
        return work(reference_of(unit, records, Path(folder), dtype, how, shake or Shake()))

    return _instead_of_training(target, row, torch.float64 if how == "wide" else dtype, seed, with_unit)


def _instead_of_training(
    target: Target,
    row: Row,
    dtype: torch.dtype,
    seed: int,
    work: Callable[[Any, Any], dict[str, Any]],
) -> dict[str, Any]:
    """Run the target up to its first `train` or `fit`, and return what `work(unit, dataloader)` does there."""
    found: dict[str, Any] = {}

    def replace_training(unit: Any, dataloader: Any) -> list[Any]:
        _adapt(unit, row)
        found.update(work(unit, dataloader))
        raise Enough

    with _in_place_of_training(replace_training, Overrides("noop", "fp32", 1, False, None, observes=True), dtype, seed):
        try:
            target.run()
        except Enough:
            return found
    raise UsageError(f"{target.script or 'the functions'} never called echelon's train or fit: there is nothing to compare.")


@contextlib.contextmanager
def _in_place_of_training(
    watch: Callable[[Any, Any], list[Any]], decided: Overrides, dtype: torch.dtype, seed: int
) -> Iterator[set[str]]:
    """Call `watch(unit, dataloader)` when the script begins to train; the callbacks that it returns are added to the script's.

    Yields the global random streams that the script has seeded itself so far.
    """
    originals = {name: getattr(entry_points, name) for name in ("train", "fit")}

    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def entry(unit: Any, *args: Any, callbacks: Any = None, **options: Any) -> None:
            loader = args[0] if args else options.get("dataloader", options.get("train_dataloader"))
            kept = [c for c in callbacks or [] if not isinstance(c, DistributedCheckpointSaver)]  # a few updates: none to keep
            original(unit, *args, callbacks=[*kept, *watch(unit, loader)], **options)

        return entry

    def install(functions: dict[str, Callable[..., None]], starts: dict[str, Callable[..., Any]]) -> None:
        for name, function in functions.items():
            setattr(entry_points, name, function)
        for name, function in {**functions, **starts}.items():
            setattr(echelon, name, function)

    before = torch.get_default_dtype()
    impose(decided)
    torch.set_default_dtype(dtype)
    streams.seed(seed)  # a script that seeds itself does so again
    torch.manual_seed(_torch_seed(seed))
    starts = {"launch": echelon.launch, "spawn": echelon.spawn}
    seeded: set[str] = set()
    stack = contextlib.ExitStack()
    stack.enter_context(_noting_seeds(seeded))
    stack.enter_context(_without_autocast())
    install({name: wrapped(original) for name, original in originals.items()}, dict.fromkeys(starts, _refuse_ranks))
    try:
        yield seeded
    finally:
        stack.close()
        install(originals, starts)
        torch.set_default_dtype(before)
        impose(None)


@contextlib.contextmanager
def _noting_seeds(seeded: set[str]) -> Iterator[None]:
    """Add "torch", "numpy" or "python" to `seeded` when the script seeds that stream itself."""
    places = {"torch": (torch, "manual_seed"), "numpy": (np.random, "seed"), "python": (random, "seed")}
    originals = {stream: getattr(*place) for stream, place in places.items()}

    def noting(stream: str) -> Callable[..., Any]:
        @functools.wraps(originals[stream])
        def seed(*args: Any, **options: Any) -> Any:
            seeded.add(stream)
            return originals[stream](*args, **options)

        return seed

    for stream, place in places.items():
        setattr(*place, noting(stream))
    try:
        yield
    finally:
        for stream, place in places.items():
            setattr(*place, originals[stream])


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Also where a script casts by itself: a type with few digits would hide what a strategy does to them."""
    original = torch.autocast.__init__
    signature = inspect.signature(original)

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options).arguments
        original(**{**given, "enabled": False})

    torch.autocast.__init__ = disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def _refuse_ranks(*args: Any, **options: Any) -> None:
    raise UsageError(
        "the script starts ranks itself, with launch or spawn: prove has to start them. Let it call train or fit in every "
        "process, as under `echelon run`, or call echelon.prove with the functions that make its unit and its data."
    )


def _torch_seed(seed: int) -> int:
    """One that no script would choose: so it shows whether the script seeds torch itself."""
    return (0xEC4E1011 << 31) + seed


def _adapt(unit: Any, row: Row) -> None:
    """What rows and reference change in a unit alike."""
    if row.optimizer == "sgd":
        _with_sgd(unit)
    averages = getattr(unit, "swa_params", None)
    if averages is not None:  # averages only look on, but their schedule of learning rates would not
        unit.swa_params = replace(averages, swalr_params=None)


def _with_sgd(unit: Any) -> None:
    """Give an AutoUnit SGD with momentum over the groups of its own optimizer; learning rates and schedule stay."""
    configure = getattr(unit, "configure_optimizers_and_lr_scheduler", None)
    if configure is None:
        raise UsageError(f"{type(unit).__name__} makes its own optimizer: there is no row with SGD for it.")

    def with_sgd(module: Any) -> tuple[torch.optim.Optimizer, None]:
        own, _ = configure(module)
        groups = [{"params": group["params"], "lr": 0.1} for group in own.param_groups]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9), None

    unit.configure_optimizers_and_lr_scheduler = with_sgd
