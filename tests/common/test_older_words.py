"""Older names of arguments are translated, exactly, with a warning that says the new one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.common.errors import UsageError
from tests.kit.models import batch, net
from tests.kit.refusals import refused

DATA = torch.utils.data.TensorDataset(*batch(8, 0))


def _trained(loader: Any, **words: Any) -> torch.Tensor:
    """The parameters of a loop of one's own after one epoch."""
    model = net()
    model, optimizer, batches = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, layout=None, **words)
    for x, y in batches:
        with ech.window(model) as window:
            window.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("older", "new"),
    [("gradient_accumulation_steps", {"accumulate": 2}), ("activation_checkpoint_params", {"recompute": "blocks"})],
)
def test_prepare_translates_older_words(older: str, new: dict[str, Any]) -> None:
    ((word, value),) = new.items()
    loader = ech.Loader(DATA, 4, accumulation=new.get("accumulate", 1))
    with pytest.warns(DeprecationWarning, match=rf"prepare\({older}=\.\.\.\) is now {word}=") as seen:
        made = _trained(loader, **{older: value})
    assert [w.filename for w in seen] == [__file__]
    assert torch.equal(made, _trained(ech.Loader(DATA, 4, accumulation=new.get("accumulate", 1)), **new))


def test_prepare_refuses_two_words_for_one_thing_and_unknown_words() -> None:
    with refused(UsageError):
        _trained(ech.Loader(DATA, 4), accumulate=1, gradient_accumulation_steps=2)
    with refused(UsageError):
        _trained(ech.Loader(DATA, 4), recomputes="blocks")


# --- AutoUnit


class _Loss:
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        x, y = data
        return ((self.module(x) - y) ** 2).mean(), None  # type: ignore[attr-defined]

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


class _Plain(_Loss, ech.AutoUnit[Any]):
    pass


OWN = {"layout": "noop", "accumulate": 2, "recompute": "blocks", "compile": ech.layouts.TorchCompileParams(disable=True)}
SWA = ech.units.SWAParams(0, 1)


@pytest.mark.parametrize(
    ("older", "new"),
    [
        ({"strategy": "noop"}, {"layout": "noop"}),
        ({"gradient_accumulation_steps": 2}, {"accumulate": 2}),
        ({"activation_checkpoint_params": "blocks"}, {"recompute": "blocks"}),
        ({"torch_compile_params": OWN["compile"]}, {"compile": OWN["compile"]}),
        ({"step_lr_interval": "step"}, {"lr_interval": "update"}),
        ({"step_lr_interval": "epoch"}, {"lr_interval": "epoch"}),
        ({"lr_interval": "epoch"}, {"lr_interval": "epoch"}),
        ({"swa_params": SWA}, {"averaging": SWA}),
        ({"device": torch.device("cpu")}, {"device": torch.device("cpu")}),
        ({"detect_anomaly": True}, {"detect_anomaly": True}),
        ({"clip_grad_value": 1.0}, {"clip_grad_value": 1.0}),
        ({"training": False}, {"training": False}),
        ({"enable_prefetch": False}, {"prefetch": False}),
        ({"zero_grad_at_train_step_start": True}, {"zero_grad_first": True}),
        ({"loss_backward_retain_graph": True}, {"retain_graph": True}),
        ({"deterministic": None}, {"deterministic": None}),
        ({"stop_after_nonfinite_losses": None}, {"stop_after_nonfinite_losses": None}),
    ],
    ids=lambda given: "-".join(given),
)
def test_a_unit_translates_older_words(older: dict[str, Any], new: dict[str, Any]) -> None:
    ((word, _),), ((name, _),) = new.items(), older.items()
    own = new if word in OWN else {"options": ech.UnitOptions(**new)}
    says = re.escape(f"AutoUnit({name}=...) is now {'' if word in OWN else 'options=UnitOptions('}{word}=")
    with pytest.warns(DeprecationWarning, match=says) as seen:
        made = _Plain(module=net(), **older)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert made.auto_options == _Plain(module=net(), **own).auto_options


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layout": "noop", "strategy": "ddp"}, "Give layout alone"),
        ({"accumulate": 2, "gradient_accumulation_steps": 2}, "Give accumulate alone"),
        ({"compile": True, "torch_compile_params": ech.layouts.TorchCompileParams()}, "Give compile alone"),
        ({"options": ech.UnitOptions(lr_interval="epoch"), "step_lr_interval": "step"}, "Give lr_interval alone"),
        ({"ema": 0.9, "swa_params": SWA}, "ema and averaging"),
        ({"ema": 0.9, "options": ech.UnitOptions(averaging=SWA)}, "ema and averaging"),
        ({"acumulate": 2}, r"no argument 'acumulate'. Is it accumulate\?"),
        ({"stratgy": 2}, r"no argument 'stratgy'. Is it strategy\?"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
@pytest.mark.filterwarnings("ignore:.* is now .*:DeprecationWarning")
def test_a_unit_refuses_two_words_for_one_thing_and_unknown_words(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _Plain(module=net(), **given)


def test_a_trainer_changes_units_by_new_and_older_words() -> None:
    with pytest.warns(DeprecationWarning, match=r"unit_options\(gradient_accumulation_steps=\.\.\.\) is now accumulate="):
        older = ech.Trainer(1, max_epochs=1, unit_options={"gradient_accumulation_steps": 2, "clip_grad_value": 0.5, "ema": 0.5})
    own = ech.UnitOptions(clip_grad_value=0.5, lr_interval="epoch")
    for trainer, interval in (
        (older, "update"),
        (ech.Trainer(1, max_epochs=1, unit_options={"accumulate": 2, "ema": 0.5, "options": own}), "epoch"),
    ):
        unit = _Plain(module=net())
        trainer.fit(unit, ech.Loader(DATA, 4, accumulation=2))
        assert (unit.clip_grad_value, unit.lr_interval, unit.gradient_accumulation_steps) == (0.5, interval, 2)
        assert unit.swa_model is not None and unit.swa_model.n_averaged == 2
    with refused(UsageError):
        ech.Trainer(1, max_epochs=1, unit_options={"acumulate": 2})


@pytest.mark.filterwarnings("error")
def test_torchtnts_own_signature_and_its_schedule_by_epochs_say_nothing() -> None:
    from echelon.compat.torchtnt.framework import AutoUnit

    class Theirs(_Loss, AutoUnit[Any]):
        pass

    unit = Theirs(
        module=net(),
        strategy="noop",
        gradient_accumulation_steps=2,
        swa_params=SWA,
        activation_checkpoint_params="blocks",
        enable_prefetch=False,
        device=torch.device("cpu"),
    )
    assert (unit.step_lr_interval, unit.gradient_accumulation_steps, unit.enable_prefetch) == ("epoch", 2, False)
    assert Theirs(module=net(), step_lr_interval="step", device=torch.device("cpu")).lr_interval == "update"
