"""A module as its author wrote it: names, class, buffers and Prepared, whatever wraps it; recognised once."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from echelon.compat.torchtnt.framework import fit as fit_by_steps
from echelon.loop.checkpointing.changes import facts
from echelon.parallel import patching, resolve
from echelon.parallel.names import plain_buffers, plain_names, unwrapped
from echelon.prover.values import named_values, parameters_of
from tests.conftest import Ranks
from tests.kit.models import Batch, Net, batch, largest_difference, net, seeded, whole
from tests.kit.own_loops import step, told
from tests.kit.units import KINDS, Hooks, Own, Regression

pytestmark = pytest.mark.standing_ranks


class Holder(nn.Module):
    """Its author calls a layer `module`, as DistributedDataParallel calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x))


NAMES = ["module.weight", "module.bias", "norm.weight", "norm.bias"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def _seen() -> dict[str, Any]:
    seen = {}
    for name, wrap in {"plain": lambda m: m, "ddp": DistributedDataParallel, "fsdp": fully_shard, "dp": nn.DataParallel}.items():
        module: nn.Module = wrap(Holder())
        described = Own(module).prepared_modules()["module"].describe()
        names = [n for n, _ in plain_names(module)], [n for n, _ in parameters_of(Own(module))]
        buffers = [n for n, _ in plain_buffers(module)], list(named_values(Own(module)))
        within = [n for n, _ in plain_names(nn.Sequential(module))]
        seen[name] = *names, *buffers, within, type(unwrapped(module)).__name__.removeprefix("FSDP"), described["layout"]
    return seen


def test_names_are_the_authors_even_where_a_layer_is_called_as_a_wrapper_calls_it(ranks: Ranks) -> None:
    for seen in ranks(2, _seen):
        for wrap, found in seen.items():
            within = [f"0.{name}" for name in NAMES]
            assert found == (NAMES, NAMES, BUFFERS, BUFFERS, within, "Holder", None if wrap == "plain" else wrap)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.scale = net(), nn.Linear(1, 1, dtype=torch.float64), 2.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def _choose(how: str, module: Any) -> torch.optim.Optimizer:
    """Gives parts of the module rates of their own, in one of the ways in which scripts find these."""
    if how == "names":
        named = list(module.named_parameters())
        backbone = [p for n, p in named if n.startswith("backbone.")]
        head = [p for n, p in named if not n.startswith("backbone.")]
    else:
        inner = getattr(module, "module", module) if how == "wrapper" else module
        backbone, head = list(inner.backbone.parameters()), list(inner.head.parameters())
    return torch.optim.SGD([{"params": backbone, "lr": 0.01}, {"params": head, "lr": 0.1}])


def _rates(layouts: list[str]) -> dict[tuple[str, str], tuple[dict[str, float], Any]]:
    found = {}
    for layout in layouts:
        for how in ("names", "attributes", "wrapper"):
            unit = Regression(module=Parts(), layout=layout, optimizer=partial(_choose, how))
            names = {p: n for n, p in unit.prepared.named_parameters()}
            rates = {names[p]: group["lr"] for group in unit.optimizer.param_groups for p in group["params"]}
            found[layout, how] = rates, (unit.module.scale, hasattr(unit.module, "nothing"))
    return found


@pytest.mark.full
def test_parts_of_the_module_are_found_alike_under_every_strategy(ranks: Ranks) -> None:
    """Under ddp all parameters had the head's rate, and `module.head` was an AttributeError: the wrapper has neither."""
    wanted = {n: 0.01 if n.startswith("backbone.") else 0.1 for n, _ in Parts().named_parameters()}
    results = ranks(2, _rates, KINDS)
    for key in results[0]:
        assert {**results[0][key][0], **results[1][key][0]} == wanted, key  # zero1 divides the optimizer
        assert all(found[key][1] == (2.0, False) for found in results)


def _encoded(layout: str) -> dict[str, torch.Tensor]:
    def loss(module: Any, data: Any) -> torch.Tensor:
        return nn.functional.mse_loss(module.head(module.encode(data[0])), data[1])

    unit = Regression(module=seeded(Parts), layout=layout, loss=loss)
    ech.train(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(8, 0)), 4), max_epochs=1)
    return whole(unit.prepared)


@pytest.mark.full
def test_methods_of_the_module_are_reached_through_a_wrapper(ranks: Ranks) -> None:
    wanted = _encoded("none")
    for layout in ("ddp", "zero1"):
        assert all(largest_difference(got, wanted) < 1e-12 for got in ranks(2, _encoded, layout))


def test_names_in_a_compiled_module_are_the_authors() -> None:
    assert [n for n, _ in plain_names(torch.compile(Holder(), backend="eager"))] == NAMES


def test_a_module_is_recognised_once_and_a_copy_of_a_unit_recognises_its_own() -> None:
    unit = Own(net())
    first = unit.prepared_modules()["module"]
    ech.train(unit, [batch(4, 0)], max_epochs=1)
    assert unit.prepared_modules()["module"] is first
    unit.module = net(seed=1)
    assert unit.prepared_modules()["module"].module is unit.module
    for twin in (copy.deepcopy(unit), pickle.loads(pickle.dumps(unit))):
        assert twin.prepared_modules()["module"].module is twin.module is not unit.module


def test_a_manifest_says_the_strategy_as_it_was_given_or_as_it_was_done_by_hand() -> None:
    said = [facts(unit, None)["layout"] for unit in (Regression(layout="none"), Regression(layout=resolve("none")))]
    assert said == ["none", "none"]
    assert [facts(Own(m), None)["layout"] for m in (nn.DataParallel(net()), net())] == ["dp", None]
    assert facts(Own(nn.DataParallel(Holder())), None)["modules"] == {"module": "Holder"}


def _on_rank_0_alone() -> bool:
    if torch.distributed.get_rank() == 0:
        return not Regression(layout="none").prepared.data.is_replica and not Regression().prepared.data.is_replica
    return True


def test_one_rank_may_make_a_unit_that_is_not_parallel(ranks: Ranks) -> None:
    assert ranks(2, _on_rank_0_alone) == [True, True]


def test_a_module_whose_forward_was_replaced_is_freed_and_a_copy_has_its_own() -> None:
    module = nn.Linear(1, 1)
    patching.replace(module, "forward", "one", partial(lambda forward, x: forward(x) + 1, module.forward))
    assert patching.replaced(copy.deepcopy(module)) == []
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


# --- torch.save of what has a rank's part only: one warning by name, with what to do; nothing of what is whole


def _saved(layout: str) -> dict[str, list[str]]:
    def heard() -> list[str]:
        return [text.split(".")[0] for text in texts if "is being pickled" in text]

    with told() as texts:
        unit = Regression(layout=layout, optimizer="AdamW")
        ech.train(unit, [batch(4, 0)], max_epochs=1)
        module: Any = unit.prepared.module
        best = copy.deepcopy(module.state_dict())
        module.load_state_dict(best)
        unit.optimizer.load_state_dict(copy.deepcopy(copy.copy(unit.optimizer.state_dict())))
        torch.save(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), io.BytesIO())
        found = {"read": heard()}
        for _ in range(2):
            torch.save({"model": best, "epoch": 1}, io.BytesIO())
            torch.save({"model": module.state_dict(), "epoch": 1}, io.BytesIO())
        found["module"] = heard()[len(found["read"]) :]
        torch.save(unit.optimizer.state_dict(), io.BytesIO())
        return found | {"all": heard()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "module", "every"),
    [("ddp", [], []), ("zero1", [], ["AdamW"]), ("fsdp", ["Net"], ["Net", "AdamW"]), ("tp", ["Net"], ["Net", "AdamW"])],
)
def test_what_holds_a_part_says_so_once_when_it_is_pickled(
    ranks: Ranks, layout: str, module: list[str], every: list[str]
) -> None:
    for found in ranks(2, _saved, layout):
        assert found == {"read": [], "module": module, "all": every}


def _read(layout: str) -> bool:
    unit = Regression(layout=layout)
    file = io.BytesIO()
    torch.save(unit.prepared.module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    return type(state).__name__ == "OrderedDict" and hasattr(state, "_metadata") and "__reduce_ex__" not in vars(state)


def test_what_is_pickled_is_what_it_was(ranks: Ranks) -> None:
    assert ranks(2, _read, "fsdp") == [True, True]


# --- whole tensors are given to what is split

SPLIT_TWICE = ech.Layout(dp_shard=2, tp=2, plan=Net.tp_plan)


def _given(layout: Any) -> dict[str, torch.Tensor]:
    model, data = net(), torch.utils.data.TensorDataset(*batch(16, 0))
    pretrained = {name: value + 0.1 for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # whose constructor makes its state
    loader = torch.utils.data.DataLoader(data, 8)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout)
    model.load_state_dict(pretrained)
    for x, y in loader:
        step(model, optimizer, x, y)
    return whole(model)


@pytest.mark.full
def test_what_is_split_along_two_axes_takes_whole_weights_and_states(ranks: Ranks) -> None:
    """It was refused, where an axis alone was taken."""
    for given in ranks(4, _given, SPLIT_TWICE):
        assert largest_difference(given, _given("none")) < 1e-12


# --- buffers: every layout evaluates one function, the one that ddp evaluates, and checkpoints hold it


CPU = torch.device("cpu")
PARALLEL = ("ddp", "zero1", "fsdp", "zero2", "hsdp")


class Queue(nn.Module):
    """Of the newest rows, as contrastive learning keeps them; it takes part in the forward pass. Counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 6))
        self.register_buffer("full", torch.tensor(False))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + 0.1 * self.rows.mean(0) + self.table
        if self.training:
            self.rows = torch.cat([x.detach()[:2], self.rows])[:4]  # another tensor each time
            self.passes += 1
            self.full.fill_(bool(self.passes > 2))
        return out


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2))
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.queue = Queue()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.queue(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x[:, None])[:, 0])


def _unit(layout: Any, **options: Any) -> Regression:
    return Regression(module=Norms().double(), layout=layout, lr=0.02, **options)


def _buffers(unit: Any) -> dict[str, torch.Tensor]:
    return {n: b.detach().double().clone() for n, b in unit.prepared.unwrapped.named_buffers()}


def _outputs(unit: Any) -> dict[str, torch.Tensor]:
    """What it computes now on the same rows: on all ranks the same, if it is the same function."""
    unit.module.eval()
    with torch.no_grad():
        return {"out": unit.module(batch(3, 99)[0]).clone()}


def _rows(count: int) -> list[Batch]:
    return [batch(3 + dist.get_rank(), 10 * i + dist.get_rank()) for i in range(count)]


def _fit(layouts: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    done = {}
    for layout in layouts:
        unit, seen, losses = _unit(layout, **options), list[dict[str, torch.Tensor]](), list[float]()
        unit.on_eval_step_end = lambda state, data, step, loss, outputs, losses=losses: losses.append(float(loss))
        # Every evaluation's buffers and loss, as its last step had them.
        look = Hooks(on_eval_end=lambda _, u, seen=seen: seen.append({**_buffers(u), "loss": torch.tensor(u.eval_loss)}))
        same = [batch(3, 500 + i) for i in range(2)]  # the same rows on all ranks: so the losses are the function's
        # TorchTNT's counts micro-batches: in the middle of a window as well as at its end.
        fit = (
            partial(fit_by_steps, evaluate_every_n_steps=3)
            if "accumulate" in options
            else partial(ech.fit, evaluate_every_n_updates=3)
        )
        fit(unit, _rows(7), same, max_epochs=1, evaluate_every_n_epochs=None, callbacks=[look])
        assert len(seen) == 2
        after = _outputs(unit)  # the forward pass of which makes the buffers equal
        told = {"losses": torch.tensor(losses, dtype=torch.float64)}
        done[str(layout)] = seen, told | whole(unit.module), after, _buffers(unit)
    return done


def _alike(first: dict[str, Any], second: dict[str, Any], like: str) -> None:
    for layout, (evaluations, parameters, out, buffers) in first.items():
        want, want_parameters, want_out, want_buffers = first[like]
        others, other_parameters, other_out, other_buffers = second[layout]
        assert largest_difference(parameters, other_parameters) == 0, layout
        for mine, theirs, right in zip(evaluations, others, want, strict=True):
            assert largest_difference(mine, theirs) == 0, layout
            assert largest_difference(mine, right) < 1e-11, layout
        assert largest_difference(parameters, want_parameters) < 1e-11, layout
        assert largest_difference(out, other_out) == 0 and largest_difference(out, want_out) < 1e-11, layout
        assert largest_difference(buffers, other_buffers) == 0 and largest_difference(buffers, want_buffers) < 1e-11, layout


class _BeginsWithout(nn.Module):
    """Its only buffer is None until it has seen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = x.detach().mean(0)
            self.mean = seen if self.mean is None else 0.9 * self.mean + 0.1 * seen
        return self.last(x - self.mean)


def _begins_without(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unit = Regression(module=_BeginsWithout().double(), layout=layout, lr=0.02)
    ech.train(unit, _rows(4), max_epochs=1)
    return _outputs(unit) | _buffers(unit)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_a_buffer_that_begins_as_none_is_one_function_too(ranks: Ranks, layout: str) -> None:
    first, second = ranks(2, _begins_without, layout)
    assert first.keys() == second.keys() == {"out", "mean"} and largest_difference(first, second) == 0


class _Repeats(nn.Module):
    """Its buffers are a table of positions as PyTorch's tutorial makes it, and one number for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)
        self.register_buffer("positions", torch.arange(20.0).view(5, 4).unsqueeze(0).transpose(0, 1).double())
        self.register_buffer("scale", torch.tensor(2).expand(4))  # torch broadcasts each dtype by itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * self.scale + self.positions[0])


def _resumed(folder: str, layouts: Sequence[str]) -> list[float]:
    differences = []
    for layout in layouts:
        torch.manual_seed(0)
        units = [Regression(module=_Repeats().double(), layout=layout, lr=1e-5) for _ in range(2)]
        ech.train(units[0], [batch(3, i) for i in range(2)], max_epochs=1, checkpoints=f"{folder}/{layout}")
        ech.DistributedCheckpointSaver.restore_from_latest(f"{folder}/{layout}", units[1])
        differences.append(largest_difference(*(_buffers(unit) | whole(unit.module) for unit in units)))
    return differences


def test_buffers_that_repeat_their_elements_are_broadcast_and_restored(ranks: Ranks, tmp_path: Path) -> None:
    assert _resumed(str(tmp_path), ["none"]) == [0]
    assert ranks(2, _resumed, str(tmp_path), ["ddp", "local_sgd", "fsdp"]) == [[0] * 3] * 2


def _left_by_training() -> dict[str, dict[str, torch.Tensor]]:
    left = {}
    for layout in PARALLEL:
        unit = _unit(layout)
        ech.train(unit, _rows(4), max_epochs=1)
        left[layout] = _buffers(unit)
    return left


def test_ranks_have_the_same_buffers_when_training_has_ended(ranks: Ranks) -> None:
    """Each had what its own rows of the last step made of them."""
    first, second = ranks(2, _left_by_training)
    for layout in PARALLEL:
        assert largest_difference(first[layout], second[layout]) == 0, layout


# TorchTNT's fit counts micro-batches: where they accumulate, in the middle of a window, too.
@pytest.mark.full
@pytest.mark.parametrize(
    ("layouts", "options"),
    [
        (PARALLEL, {}),
        (("ddp", "zero1"), {"accumulate": 2}),
        (("fsdp", "hsdp"), {"accumulate": 2}),
    ],
)
def test_every_strategy_evaluates_with_the_buffers_that_ddp_has(
    ranks: Ranks, layouts: tuple[str, ...], options: dict[str, Any]
) -> None:
    _alike(*ranks(2, _fit, layouts, options), like=layouts[0])


@pytest.mark.full
def test_averaged_buffers_are_one_function_too(ranks: Ranks) -> None:
    averages = {"swa_params": ech.units.SWAParams(0, 1, use_in_evaluation=True), "step_lr_interval": "step"}
    first, second = ranks(2, _fit, ["ddp", "fsdp"], averages)
    for layout, (_, losses, *_) in first.items():
        assert largest_difference(losses, second[layout][1]) == 0, layout
        assert largest_difference(losses, first["ddp"][1]) < 1e-11, layout


def _by_hand() -> list[dict[str, torch.Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    module = ech.layouts.prepare_fsdp(Norms().double(), CPU)
    own = Own(module, torch.optim.SGD(module.parameters(), lr=0.02))
    ech.train(own, _rows(4), max_epochs=1)
    found = [_outputs(own)]
    for wrap in (fully_shard, lambda m: FullyShardedDataParallel(m, device_id=CPU)):
        module = Norms().double()
        module.queue.table += dist.get_rank()  # that nobody made equal yet
        unit = Regression(module=wrap(module), lr=0.02)
        ech.train(unit, _rows(4), max_epochs=1)
        found.append(_outputs(unit))
    return found


@pytest.mark.full
def test_modules_that_were_sharded_by_hand_too(ranks: Ranks) -> None:
    first, second = ranks(2, _by_hand)
    for mine, theirs in zip(first, second, strict=True):
        assert largest_difference(mine, theirs) == 0
    assert largest_difference(first[1], first[2]) < 1e-11


def _saved_buffers(folder: str, layout: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Saved right after a step, when each rank has taken its own rows into account; and read again by all."""
    unit = _unit(layout, swa_params=ech.units.SWAParams(0, 1), step_lr_interval="step")
    ech.train(unit, _rows(3), max_epochs=1, callbacks=[ech.DistributedCheckpointSaver(folder)])
    again = _unit("ddp", swa_params=ech.units.SWAParams(0, 1), step_lr_interval="step")
    ech.DistributedCheckpointSaver.restore_from_latest(folder, again)

    def buffers(unit: Any) -> dict[str, torch.Tensor]:
        averaged = {n: t.double().clone() for n, t in unit.swa_model.state_dict().items() if n.startswith("buffers.")}
        return _buffers(unit) | averaged

    return buffers(unit), buffers(again)


@pytest.mark.full
def test_a_checkpoint_holds_the_first_ranks_buffers_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """Not some of each rank's: a mean from one and a variance from another belong to no data."""
    for i, layout in enumerate(("ddp", "fsdp", ech.DDPStrategy(broadcast_buffers=False))):
        (mine, read), (theirs, _) = ranks(2, _saved_buffers, str(tmp_path / str(i)), layout)
        assert largest_difference(mine, theirs) > 0
        assert largest_difference(mine, read) == 0, layout


class Table(Norms):
    """Its one buffer is a table that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = self.queue = nn.Identity()
        self.register_buffer("table", torch.arange(6.0))


def _traffic() -> int:
    unit = Regression(module=Table().double(), layout="fsdp")
    watched = mock.patch("torch.distributed.broadcast", side_effect=dist.broadcast)
    sent: list[Any] = []
    ech.train(unit, _rows(5), max_epochs=1, callbacks=[Hooks(on_train_start=lambda *_: sent.append(watched.start()))])
    watched.stop()
    return sent[0].call_count


@pytest.mark.full
def test_what_never_changes_is_never_sent(ranks: Ranks) -> None:
    assert ranks(2, _traffic) == [0, 0]
