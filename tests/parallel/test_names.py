"""A module as its author wrote it: names, class and Prepared, whatever wraps it; recognised once."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from echelon.loop.checkpointing.changes import facts
from echelon.parallel import patching, resolve
from echelon.parallel.names import plain_buffers, plain_names, unwrapped
from echelon.prover.values import named_values, parameters_of
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, seeded, whole
from tests.kit.own_loops import told
from tests.kit.units import KINDS, Own, Regression

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
        with ech.window(model) as window:
            window.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


@pytest.mark.full
def test_what_is_split_along_two_axes_takes_whole_weights_and_states(ranks: Ranks) -> None:
    """It was refused, where an axis alone was taken."""
    for given in ranks(4, _given, SPLIT_TWICE):
        assert largest_difference(given, _given("none")) < 1e-12
