"""A pipeline takes modules as people write them: layers frozen in mid-training, forwards replaced, parts with two names."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon as ech
from echelon.common.errors import RankFailedError
from echelon.parallel.pipeline.stages import Unit
from echelon.parallel.pipeline.trial import Escapes
from echelon.world.thread_sampler import FRAMES
from tests.conftest import Ranks
from tests.kit.models import Batch, Net, batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.refusals import refusal
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

DATA = [batch(4, seed) for seed in range(6)]


def _unfreezes(module: nn.Module, update: int) -> None:
    """Only the last layer, then the block of each stage, then all but one: no two ranks see a change at the same time."""
    trained = {1: "last", 2: "blocks.1", 3: "blocks.0", 4: "first"}.get(update)
    for name, parameter in module.named_parameters():
        if update == 0 or update == 5:
            parameter.requires_grad_(name.startswith("last"))
        elif trained is not None and name.startswith(trained):
            parameter.requires_grad_(True)


def _plain(module: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    found = plain_training([[each] for each in DATA], module=module, **options)[0]
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def _held_by(unit: Any, *callbacks: ech.Callback) -> dict[str, torch.Tensor]:
    """Trained, the parameters that this rank holds."""
    ech.train(unit, DATA, max_epochs=1, callbacks=callbacks)
    return whole(unit.prepared)


def _all(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for values in results for name, value in values.items()}


def _compiled_parts() -> nn.Module:
    """Names have torch.compile's part in them, which its author does not write."""
    module = net()
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, backend="eager")
    return torch.compile(module, backend="eager")


class _NamedTwice(Net):
    """A block is registered in a second place, as PEFT's prompts do it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.ModuleList([self.blocks[0]])


class _Shifted(Net):
    """Parameters in containers that are read, not called, in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterDict({"early": nn.Parameter(torch.zeros(8)), "late": nn.Parameter(torch.zeros(8))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.shifts["early"]
        for block in self.blocks:
            x = x + block(x)
        return self.last(x + self.shifts["late"])


class _Turned(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).T


class _Decoding(Net):
    """Words of its own come in late, as a decoder's behind its encoder, turned; and a block is called twice.

    torch's zero-bubble schedules left out in silence the gradients of weights that never meet the inputs of their stage, and
    failed with those that meet them twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late = _Turned(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h + self.blocks[0](h)
        words = self.late(x)
        for _ in range(2):
            h = h + self.blocks[1](h)
        return self.last((h + words.T).tanh())


class _Skipping(Net):
    """What a stage sends on it has also used itself, as each level of a U-Net does.

    torch's zero-bubble schedules detach in place what was sent, before they compute the weights' gradients from it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.middle(self.first(x))
        return self.last(self.blocks[1](self.blocks[0](kept)) + kept)


class _CallsItself(nn.Sequential):
    """A function within forward that calls itself, as over a tree, is in a reference cycle with what it uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def branch(depth: int) -> torch.Tensor:
            return h if depth == 0 else h + branch(depth - 1).tanh()

        h = super().forward(x)
        return branch(2)


def _calling_themselves() -> nn.Module:
    module = net()
    module.blocks = nn.ModuleList(_CallsItself(*block) for block in module.blocks)
    return module


def _frozen_net() -> nn.Module:
    module = net()
    _unfreezes(module, 0)
    return module


def _with_forward() -> nn.Module:
    """Someone else's forward in the place of the class's own, as compilers and libraries put it."""
    module = net()
    own = module.forward
    module.forward = lambda x: own(2 * x)
    return module


def _held_for_a_moment() -> nn.Module:
    """Another thread samples this one, and holds its frames meanwhile: what is in them lives on."""
    module = net()

    def hold(part: nn.Module, args: Any, output: torch.Tensor) -> None:
        started, trains = threading.Event(), threading.get_ident()

        def look() -> None:
            with FRAMES:
                frame = sys._current_frames()[trains]
                started.set()
                time.sleep(0.05)
                del frame

        threading.Thread(target=look).start()
        started.wait()

    module.blocks[0].register_forward_hook(hold)
    return module


def _staged(schedule: str, *stages: list[str]) -> ech.Layout:
    return ech.Layout(pp=2, schedule=schedule, stages=list(stages))


# How the model is built, and its layout.
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    # A rank whose own layers stay as they are computes with the others' change all the same.
    "frozen and unfrozen": (_frozen_net, "pp=2"),
    "frozen and unfrozen, zero bubble": (_frozen_net, _staged("zero_bubble", ["first", "blocks.0"], ["blocks.1", "last"])),
    "a forward that was replaced": (_with_forward, "pp=2"),
    "compiled": (_compiled_parts, "pp=2"),
    "compiled, split": (_compiled_parts, ech.Layout(tp=2, plan=Net.tp_plan)),
    "a part with two names": (partial(seeded, _NamedTwice), "pp=2"),
    "containers of parameters": (partial(seeded, _Shifted), "pp=2"),
    "frames that another thread holds": (_held_for_a_moment, "pp=2"),
    "a function that calls itself": (_calling_themselves, "pp=2"),
    "kept without gradients": (lambda: seeded(_Kept, how="attribute", detached=True), "pp=2"),
    "zbv, decoding": (partial(seeded, _Decoding), _staged("zbv", ["first"], ["blocks.0", "late"], ["blocks.1"], ["last"])),
    "zero bubble, decoding": (
        partial(seeded, _Decoding),
        _staged("zero_bubble", ["first", "blocks.0"], ["late", "blocks.1", "last"]),
    ),
    "zbv, skipping": (partial(seeded, _Skipping), _staged("zbv", ["first"], ["middle", "blocks.0"], ["blocks.1"], ["last"])),
}


def _trained(case: str) -> dict[str, torch.Tensor]:
    make, layout = CASES[case]
    unfreezes = Hooks(on_train_step_end=lambda _, u: _unfreezes(u.prepared.unwrapped, u.train_progress.num_steps_completed))
    return _held_by(Regression(module=make(), layout=layout), *([unfreezes] if make is _frozen_net else []))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_model_trains_in_stages_as_its_author_wrote_it(ranks: Ranks, case: str) -> None:
    make, _ = CASES[case]
    want = _plain(make(), after=_unfreezes) if make is _frozen_net else _plain(make())
    assert largest_difference(_all(ranks(2, _trained, case)), want) < 1e-12


class _Loss(Regression):
    """A loss that a pipeline cannot follow, one way at a time."""

    def __init__(self, way: str) -> None:
        super().__init__(layout="pp=2", module=_Reentrant().double() if way == "reentrant" else net())
        self.way = way

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        x = data[0].clone().requires_grad_(self.way == "slope")
        out = self.module(x)
        loss = nn.functional.mse_loss(out, data[1])
        if self.way == "penalty":
            loss = loss + sum(p.abs().sum() for p in self.module.parameters() if p.requires_grad)
        if self.way == "twice":
            loss = loss + self.module(x / 2).pow(2).mean()
        if self.way == "gather":
            dist.all_gather([torch.empty_like(out), torch.empty_like(out)], out.detach())
        if self.way == "slope":
            loss = loss + torch.autograd.grad(out.sum(), x, create_graph=True)[0].pow(2).mean()
        return loss, out


class _Reentrant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def _refused(units: dict[str, Callable[[], Any]]) -> dict[str, str]:
    return {name: refusal(ech.train, make(), DATA, max_epochs=1, kind=ech.EchelonError) for name, make in units.items()}


@pytest.mark.full
def test_losses_that_a_pipeline_cannot_follow_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """A sum over all parameters had those of the last stage alone, in silence."""
    words = {
        "penalty": "stage 1 of Net uses a parameter of another stage outside of its module",
        "twice": "compute_loss must call Net once, got another call",
        "gather": "with ranks of other stages, which do not come to them, got allgather over ranks 0, 1.",
        "slope": "takes a gradient of the outputs of Net with respect to its inputs",
        "reentrant": "must have use_reentrant=False around _Reentrant.blocks.0 in a pipeline",
    }
    for found in ranks(2, lambda: _refused({way: partial(_Loss, way) for way in words})):
        for way, said in words.items():
            assert said in found[way], way


@pytest.mark.full
def test_a_penalty_on_the_last_stage_counts(ranks: Ranks) -> None:
    def loss(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(module(x), y) + module.last.weight.pow(2).sum()

    found = ranks(2, lambda: _held_by(Regression(layout="pp=2", loss=lambda module, data: loss(module, *data))))
    assert largest_difference(_all(found), _plain(net(), loss_of=loss)) < 1e-12


class _Kept(Net):
    """A block leaves something beside its output, which the root adds to what it gives."""

    def __init__(self, how: str, detached: bool = False) -> None:
        super().__init__()
        self.how, self.detached = how, detached
        self.kept: list[torch.Tensor] = []
        if how == "hook":
            self.blocks[0].register_forward_hook(lambda module, args, output: self.kept.append(output.pow(2).mean()))
        if how == "attribute":
            self.blocks[0].penalty = torch.zeros(())
            self.blocks[0][0].register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.blocks[0].penalty = (output.detach() if self.detached else output).pow(2).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        out = super().forward(x)
        more = self.kept + ([] if self.detached or self.how == "hook" else [self.blocks[0].penalty])
        return out + sum(more)


def _kept(layout: str) -> dict[str, str]:
    return _refused(
        {how: lambda how=how: Regression(module=seeded(_Kept, how=how), layout=layout) for how in ("hook", "attribute")}
    )


@pytest.mark.full
@pytest.mark.parametrize(("layout", "size"), [("pp=2", 2), ("pp=2,dp_shard=2", 4)])
def test_what_a_stage_keeps_beside_its_outputs_is_refused(ranks: Ranks, layout: str, size: int) -> None:
    """Later stages lie on other ranks: a penalty that blocks leave somewhere was left out of the loss in silence."""
    for found in ranks(size, _kept, layout):
        for said in found.values():
            assert "stage 0 of _Kept keeps something that" in said and "blocks.0" in said and "beside the outputs" in said


def _held_by_a_thread_for_moments() -> int:
    """A thread builds and drops graphs over the parameters, as one that samples frames holds them for a moment."""
    module, escaped, done = net(), 0, threading.Event()
    units = [Unit("blocks.0", module.blocks[0], stage=0)]

    def hold() -> None:
        while not done.is_set():
            _graphs = [parameter * 2 for parameter in module.blocks[0].parameters()]
            del _graphs

    thread, interval = threading.Thread(target=hold), sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            escapes = Escapes(units)
            with escapes.watched():
                module.blocks[0](torch.randn(2, 8, dtype=torch.float64))
            escaped += 1
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    return escaped


def test_a_graph_that_another_thread_lets_go_of_ends_no_pass(ranks: Ranks) -> None:
    """A KeyError on one rank, once in some hundred runs; the ranks that computed the stage with it waited for ever."""
    assert ranks(1, _held_by_a_thread_for_moments) == [300]


class _FailsOnOne(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise KeyError("planted")
        return super().forward(x)


def _fails_on_one() -> None:
    ech.train(Regression(module=_FailsOnOne().double(), layout="pp=2,dp_shard=2"), DATA, max_epochs=1)


def test_what_fails_on_one_of_a_stages_ranks_alone_ends_it(ranks: Ranks) -> None:
    """It waited for the others to hear of it, and they waited for its shards."""
    with pytest.raises(RankFailedError) as caught:
        ranks(4, _fails_on_one, timeout_s=180)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, KeyError)


class _HookedLate(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
        return super().configure_optimizers_and_lr_scheduler(module)


def _hooked_late() -> str:
    return refusal(ech.train, _HookedLate(layout="pp=2,dp_shard=2"), DATA, max_epochs=1)


def test_a_hook_that_torch_does_not_call_is_refused_in_stages_too(ranks: Ranks) -> None:
    """Of a stage that is sharded, gradients were used as they were: fsdp alone said so."""
    for said in ranks(4, _hooked_late):
        assert "is split over the ranks, and torch does not call its hook" in said


class _Catching(Regression):
    """A loss over what hooks catch in a list that lives as long as compute_loss."""

    def __init__(self, where: str, detached: bool = False) -> None:
        super().__init__(module=net(), layout="pp=2")
        self.where, self.detached = where, detached

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        caught: list[torch.Tensor] = []

        def catch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            caught.append((output.detach() if self.detached else output).pow(2).mean())

        handles = [self.module.get_submodule(name).register_forward_hook(catch) for name in self.where.split()]
        try:
            loss, out = super().compute_loss(state, data)
        finally:
            for handle in handles:
                handle.remove()
        return loss + sum(each for each in caught if each.requires_grad), out


@pytest.mark.full
def test_what_hooks_catch_for_the_loss_in_an_earlier_stage_is_refused(ranks: Ranks) -> None:
    places = ["blocks.0", "blocks.0.0 blocks.1.0", "first"]
    for found in ranks(2, lambda: _refused({where: partial(_Catching, where) for where in places})):
        for where, said in found.items():
            assert "stage 0 of Net keeps something that" in said and where.split()[0][:8] in said and "hook" in said


@pytest.mark.full
def test_hooks_that_only_look_change_nothing(ranks: Ranks) -> None:
    found = ranks(2, lambda: _held_by(_Catching("blocks.0 blocks.1.0", detached=True)))
    assert largest_difference(_all(found), _plain(net())) < 1e-12


def _held_nodes() -> bool:
    """As libraries do that hook the nodes at which gradients arrive."""
    unit = Regression(module=net(), layout="pp=2")
    held = [p.expand_as(p).grad_fn.next_functions[0][0] for p in unit.module.parameters() if p.requires_grad]
    ech.train(unit, DATA[:2], max_epochs=1)
    return len(held) > 0


@pytest.mark.full
def test_whoever_holds_the_nodes_of_parameters_keeps_nothing_of_a_pass(ranks: Ranks) -> None:
    assert ranks(2, _held_nodes) == [True, True]


# --- random numbers: those of the loss and of the author's forward are alike in all stages, each layer's its own

WIDTH = 6


class Block(nn.Module):
    """Drops, and keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(WIDTH, WIDTH), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x)
        if self.training and torch.is_grad_enabled():
            self.drawn.append(float(mask.sum()))
        return x + self.linear(x).tanh() * (mask > 0.3)


class Model(nn.Module):
    """Draws between its blocks, too, and can compute them again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks, self.drop, self.again = nn.ModuleList(Block() for _ in range(4)), nn.Dropout(0.2), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return x


class Denoiser(Regression):
    """Noise of all three kinds, of which the first stage sees the one half and the last the other."""

    def __init__(self, again: bool = False, **options: Any) -> None:
        super().__init__(module=seeded(Model, again=again), accumulate=2, lr=0.05, **options)
        self.noise = list[float]()

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        noise = torch.randn_like(data) * random.random() + float(np.random.rand())
        if not self.prepared.batches.dry_run:
            self.noise.append(float(noise.sum()))
        return (self.module(data + noise) - noise).square().mean(), None

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: ech.units.TrainStepResults) -> None:
        if dist.get_rank() == 0:  # one rank draws for itself, as for a picture
            torch.randn(3), random.random(), np.random.rand()
        torch.manual_seed(step + dist.get_rank())  # as some scripts do for their augmentation


def _batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))


def _drawn(layout: Any, again: bool = False) -> tuple[list[float], list[float], list[float], dict[str, torch.Tensor]]:
    unit = Denoiser(again, layout=layout)
    ech.train(unit, _batches(6), max_epochs=1)
    trained, unit.noise = unit.noise, []
    ech.evaluate(unit, _batches(2))
    blocks = [block for block in unit.prepared.unwrapped.blocks if next(block.parameters(recurse=True), None) is not None]
    return trained, unit.noise, [each for block in blocks for each in block.drawn[-6:]], whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("layout", [ech.Layout(pp=2), ech.Layout(pp=2, schedule="interleaved"), "pp=2,dp_shard=2"])
def test_noise_is_alike_in_all_stages_and_layers_draw_apart(ranks: Ranks, layout: Any) -> None:
    told = ranks(2 if isinstance(layout, ech.Layout) else 4, _drawn, layout)
    here, there = told[0], told[len(told) // 2 if len(told) == 4 else 1]
    assert here[:2] == there[:2]
    stages = 2 if isinstance(layout, ech.Layout) and layout.schedule == "interleaved" else 1
    assert len(set(here[0])) == len(here[0]) / stages == 6 and len(set(here[1])) == 2
    layers = [each for rank in told for each in rank[2]]
    assert len(set(layers)) == len(layers) == 24 * len(told) / 2
    if len(told) == 4:
        assert not set(told[0][0]) & set(told[1][0])


@pytest.mark.full
def test_what_is_computed_again_draws_the_same_again(ranks: Ranks) -> None:
    once, twice = (ranks(2, _drawn, ech.Layout(pp=2), again) for again in (False, True))
    for plain, again in zip(once, twice, strict=True):
        assert all(torch.equal(plain[3][name], again[3][name]) for name in plain[3])
