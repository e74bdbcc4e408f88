"""Parts that work alone, together: savers with evaluations, loaders with evaluations, other programs' loaders, moving folders."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torchmetrics import SumMetric

import echelon as ech
from echelon.checkpoint import commit, manifest
from echelon.checkpoint.policy import BestCheckpointConfig
from echelon.common.errors import CheckpointError, CheckpointMismatchError
from echelon.loop.records.metrics import join_shares, share_of
from echelon.world import rng
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.saving import Held, goes_on, of_all
from tests.kit.units import KINDS, Hooks, Regression, under_each

pytestmark = pytest.mark.standing_ranks

Saver = ech.DistributedCheckpointSaver
DATA = torch.utils.data.TensorDataset(*batch(48, 0), torch.arange(48))


class Numbered(Regression):
    """Remembers which samples it trained on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(module=net(dropout=options.pop("dropout", 0.0)), optimizer="AdamW", **options)
        self.seen: list[int] = []

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        if self.module.training:
            self.seen += data[2].tolist()
        return super().compute_loss(state, data[:2])


@pytest.mark.full
def test_an_evaluation_on_the_same_loader_changes_neither_the_samples_nor_what_is_saved(tmp_path: Path) -> None:
    """The last, short batch of each epoch is looked up after an evaluation, which is in an epoch of its own."""
    data = torch.utils.data.Subset(DATA, range(46))
    unit, loader = Numbered(), ech.Loader(data, 8, seed=1)
    saver = Saver(tmp_path, save_every_n_updates=5)
    ech.fit(unit, loader, loader, max_epochs=3, evaluate_every_n_updates=2, evaluate_every_n_epochs=None, callbacks=[saver])
    assert set(Counter(unit.seen).values()) == {3}
    again, loader = Numbered(), ech.Loader(data, 8, seed=1)
    Saver.restore(tmp_path / "step-00000010", again, train_dataloader=loader)
    ech.fit(again, loader, loader, max_epochs=3, evaluate_every_n_updates=2, evaluate_every_n_epochs=None)
    assert again.seen == unit.seen[78:]
    assert largest_difference(whole(again.module), whole(unit.module)) == 0


def _streams_after_looking_at_the_loader() -> tuple[int, int]:
    ech.seed(7)
    loader = ech.Loader(DATA, 8)
    before = torch.initial_seed()
    loader.state_dict()  # its fingerprint reads samples
    assert torch.initial_seed() == before
    rng.separate(dist.get_rank())
    return dist.get_rank(), torch.initial_seed()


def test_to_look_at_a_loader_leaves_ranks_without_a_stream_of_their_own(ranks: Ranks) -> None:
    """Else the ranks of a resumed run would drop the same units of different samples."""
    (_, first), (_, second) = ranks(2, _streams_after_looking_at_the_loader)
    assert first == 7 and second != first


class Foreign:
    """Another program's loader: every rank has shards, and a position, of its own."""

    def __init__(self, samples: int) -> None:
        self.samples, self.at = samples, 0

    def __len__(self) -> int:
        return 6 - self.at

    def __iter__(self) -> Iterator[Any]:
        while self.at < 6:
            self.at += 1
            yield tuple(t[:4] for t in DATA[self.samples : self.samples + 4])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "shard": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.samples = state["at"], state["shard"]


def _with_shards(folder: Path) -> tuple[int, int]:
    ech.train(Numbered(layout="ddp"), Foreign(4 * dist.get_rank()), max_updates=2, callbacks=[Saver(folder)])
    loader = Foreign(40)
    Saver.restore_from_latest(folder, Numbered(layout="ddp"), train_dataloader=loader)
    return loader.at, loader.samples


@pytest.mark.full
def test_a_foreign_loader_with_a_state_of_each_rank_gets_its_own_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _with_shards, tmp_path / "c") == [(2, 0), (2, 4)]
    with refused(CheckpointMismatchError):
        Saver.restore_from_latest(tmp_path / "c", Numbered(layout="none"), train_dataloader=Foreign(0))


def test_a_program_that_changes_its_folder_saves_where_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    unit, saver = Numbered(), Saver("c", save_every_n_updates=2)
    unit.on_train_epoch_start = lambda state: os.chdir("elsewhere")  # type: ignore[method-assign]
    ech.train(unit, ech.Loader(DATA, 8, seed=1), max_updates=4, callbacks=[saver])
    assert [p.name for p in commit.committed(tmp_path / "c")] == ["step-00000002", "step-00000004"]
    assert not (tmp_path / "elsewhere" / "c").exists()


def test_a_save_before_the_first_batch_after_a_restore_knows_the_position(tmp_path: Path) -> None:
    ech.train(Numbered(), Foreign(0), max_updates=2, callbacks=[Saver(tmp_path / "a")])
    unit, loader = Numbered(), Foreign(0)
    Saver.restore_from_latest(tmp_path / "a", unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=4, callbacks=[Hooks(on_train_start=Saver(tmp_path / "b").save)])
    loader = Foreign(0)
    Saver.restore_from_latest(tmp_path / "b", Numbered(), train_dataloader=loader)
    assert loader.at == 2


def test_the_metric_of_a_checkpoint_is_that_of_its_weights(tmp_path: Path) -> None:
    """Both are due at step 3: the evaluation comes first. At the end of training, no evaluation comes any more."""
    unit, best = Numbered(), BestCheckpointConfig("eval_loss", "min")
    evaluated: dict[int, float] = {}
    unit.on_eval_epoch_end = lambda state: evaluated.update({unit.train_progress.num_steps_completed: unit.eval_loss})  # type: ignore[method-assign]
    saver = Saver(tmp_path, save_every_n_updates=3, best_checkpoint_config=best)
    loaders = ech.Loader(DATA, 8, seed=1), ech.Loader(DATA, 8)
    ech.fit(unit, *loaders, max_updates=6, evaluate_every_n_updates=3, evaluate_every_n_epochs=None, callbacks=[saver])
    told = {commit.step_of(p): manifest.read(p)["metrics"]["eval_loss"] for p in commit.committed(tmp_path)}
    assert told == evaluated and list(told) == [3, 6]
    # A newer one may only repeat a number that was not measured since.
    assert best.best_first({1: {"eval_loss": 2.0}, 2: {"eval_loss": 1.0}, 3: {"eval_loss": 1.0}, 4: {}}) == [2, 3, 1]


class Besides(Regression):
    """Trains what is in no module among its attributes: a parameter, and modules in a list."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(5)
        self.weight_of_loss = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.heads = [torch.nn.Linear(1, 1).double() for _ in range(2)]
        super().__init__(**options)

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        out = self.module(data[0])
        out = (self.heads[0](out) + self.heads[1](out)) * self.weight_of_loss
        return torch.nn.functional.mse_loss(out, data[1]), None

    def besides(self) -> list[torch.nn.Parameter]:
        return [self.weight_of_loss, *(p for head in self.heads for p in head.parameters())]

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> Any:
        return torch.optim.AdamW([*module.parameters(), *self.besides()], lr=0.05), None


def _trained_besides(layout: str, folder: Path, steps: list[int]) -> list[Any]:
    """In as many runs, of which each but the first goes on from the last one's checkpoint."""
    for step in steps:
        unit, loader = Besides(layout=layout), ech.Loader(DATA, 8, seed=1)
        saver = Saver(folder / f"{layout}-{len(steps)}", save_every_n_updates=100)
        saver.restore_from_latest(folder / f"{layout}-{len(steps)}", unit, train_dataloader=loader)
        ech.train(unit, loader, max_updates=step, callbacks=[saver])
    return [p.tolist() for p in (*whole(unit.module).values(), *unit.besides())]


def _both_ways(layout: str, folder: Path) -> bool:
    return _trained_besides(layout, folder, [6]) == _trained_besides(layout, folder, [2, 6])


@pytest.mark.full
def test_what_an_optimizer_trains_besides_the_modules_goes_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for of_rank in ranks(2, under_each, KINDS, _both_ways, tmp_path):
        assert of_rank == dict.fromkeys(KINDS, True)
    alone = Besides()  # on another number of ranks
    Saver.restore_from_latest(tmp_path / "fsdp-1", alone)
    assert [p.tolist() for p in alone.besides()] != [p.tolist() for p in Besides().besides()]
    assert dict(alone.optimizer.state[alone.weight_of_loss])["step"] == 6


class InContainers(ech.TrainUnit[Any], ech.EvalUnit[Any]):
    """Its modules are in a list, its optimizers and schedules in dicts, a metric in a tuple; it draws from generators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.nets: list[Any] = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), torch.nn.Linear(4, 1)]
        self.last = self.nets[1]  # found once
        self.first: list[Any] = [self.nets[0][0], None, "layer"]
        self.optimizers = {f".{i}": torch.optim.Adam(net.double().parameters()) for i, net in enumerate(self.nets)}
        self.schedules = {name: torch.optim.lr_scheduler.StepLR(each, 2) for name, each in self.optimizers.items()}
        self.means = (ech.Mean(),)
        self.evaluated: list[float] = []
        self.torchs, self.pythons = torch.Generator().manual_seed(1), random.Random(2)
        kinds = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
        self.numpys: list[Any] = [np.random.RandomState(3), *(np.random.Generator(kind(4)) for kind in kinds)]

    def draw(self) -> float:
        drawn = [torch.rand((), generator=self.torchs).item(), self.pythons.gauss(0, 1), *(each.normal() for each in self.numpys)]
        return float(sum(drawn))

    def _loss(self, data: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.nets[1](self.nets[0](data[0])), data[1])

    def train_step(self, state: ech.State, data: Any) -> None:
        loss = self._loss(data)
        (loss * self.draw()).backward()
        self.means[0].update(loss.detach())
        for name, optimizer in self.optimizers.items():
            optimizer.step()
            optimizer.zero_grad()
            self.schedules[name].step()

    def eval_step(self, state: ech.State, data: Any) -> None:
        self.evaluated.append(self._loss(data).item())


def test_what_a_units_lists_and_dicts_hold_goes_on(tmp_path: Path) -> None:
    ended = []
    for folder, ends in (("once", [6]), ("again", [3, 6])):
        for end in ends:
            unit = InContainers()
            ech.train(unit, ech.Loader(DATA, 8, seed=1), max_updates=end, checkpoints=str(tmp_path / folder))
        ech.evaluate(unit, [DATA[:8]] * 2)
        values = [p.tolist() for net in unit.nets for p in net.parameters()]
        ended.append((values, unit.means[0].compute(), [each.get_last_lr() for each in unit.schedules.values()], unit.draw()))
        assert unit.evaluated[0] == unit.evaluated[1]
    assert ended[0] == ended[1]
    names = {f"{kind}[%2E{i}]" for kind in ("optimizers", "schedules") for i in range(2)}
    names |= {"torchs", "pythons", *(f"numpys[{i}]" for i in range(5))}
    assert set(unit.app_state()) == {"nets[0]", "last", "means[0]", "train_progress", "eval_progress", *names}


class Counts(ech.Callback):
    steps = 0

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.steps = state_dict["steps"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_callbacks_state_goes_on_with_the_unit_or_a_line_says_that_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_kept: bool
) -> None:
    for end in (2, 5):
        unit, counts = Numbered(), Counts()
        if is_kept:
            unit.counts = counts
        ech.train(unit, ech.Loader(DATA, 8, seed=1), max_updates=end, checkpoints=str(tmp_path), callbacks=[counts])
    assert counts.steps == (5 if is_kept else 3)
    assert any("the callback Counts is in no checkpoint" in line for line in caplog.messages) is not is_kept


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.Philox])
def test_a_position_outside_of_a_generators_table_is_refused(kind: Any) -> None:
    """numpy would read there."""
    state = rng.state_of(np.random.Generator(kind(0)))
    place = state["state"] if kind is np.random.MT19937 else state
    place["pos" if kind is np.random.MT19937 else "buffer_pos"] = -1
    with pytest.raises(ValueError, match="position -1"):
        rng.set_state(np.random.Generator(kind(0)), state)


def _drawing_before_it_trains(folder: Path, steps: list[int]) -> dict[str, torch.Tensor]:
    """As a script that evaluates first: to iterate over a torch DataLoader draws a number, whether it shuffles or not."""
    for step in steps:
        ech.seed(3)
        unit, loader = Numbered(dropout=0.4, layout="ddp"), ech.Loader(DATA, 8, seed=1)
        saver = Saver(folder / str(len(steps)))
        saver.restore_from_latest(saver.dirpath, unit, train_dataloader=loader)
        ech.evaluate(unit, torch.utils.data.DataLoader(DATA, 8))
        ech.train(unit, loader, max_updates=step, callbacks=[saver])
        ech.train(unit, loader, max_updates=step + 2)  # that goes on from where it is
    return whole(unit.module)


@pytest.mark.full
def test_what_a_script_draws_before_it_resumes_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    once, again = (ranks(2, _drawing_before_it_trains, tmp_path, steps) for steps in ([8], [3, 8]))
    assert [largest_difference(a, b) for a, b in zip(once, again, strict=True)] == [0, 0]


def test_a_run_that_takes_weights_only_sets_nothing_aside(tmp_path: Path) -> None:
    ech.train(Numbered(), ech.Loader(DATA, 8), max_updates=2, callbacks=[Saver(tmp_path)])
    unit = Numbered()
    Saver.restore_from_latest(tmp_path, unit, restore_options=ech.callbacks.RestoreOptions.weights_only())
    with refused(CheckpointError):
        ech.train(unit, ech.Loader(DATA, 8), max_updates=2, callbacks=[Saver(tmp_path)])
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000002"]


def _restored_twice(folder: Path) -> list[float]:
    """From a checkpoint of this number of ranks, and then from one of another number, which has no streams for them."""
    unit = Numbered(layout="ddp")
    Saver.restore(folder / "two/step-00000002", unit)
    Saver.restore(folder / "one/step-00000002", unit)
    drawn = torch.random.get_rng_state()
    before = torch.rand(2).tolist()
    torch.random.set_rng_state(drawn)
    seen: list[float] = []

    class Look(ech.Callback):
        def on_train_step_start(self, state: ech.State, unit: Any) -> None:
            seen.extend(torch.rand(2).tolist())

    ech.train(unit, ech.Loader(DATA, 8), max_updates=3, callbacks=[Look()])
    return [*before, *seen]


def _two_steps(folder: Path) -> None:
    ech.seed(5)
    ech.train(Numbered(layout="ddp"), ech.Loader(DATA, 8), max_updates=2, callbacks=[Saver(folder)])


@pytest.mark.full
def test_the_streams_of_a_checkpoint_that_was_left_again_are_not_taken_up(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _two_steps, tmp_path / "two")
    ranks(1, _two_steps, tmp_path / "one")
    (*first, a, b), _ = ranks(2, _restored_twice, tmp_path)
    assert first == [a, b]


class Sums(Regression):
    """Adds up what its rank has seen, in an object of its own, which decides how it trains."""

    def __init__(self, layout: str = "ddp") -> None:
        super().__init__(layout=layout)
        self.seen, self.alike = Held(torch.zeros(3, dtype=torch.float64)), Held(0)

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        x, y = data
        loss, out = super().compute_loss(state, (x + 0.01 * self.seen.value.tanh().sum(), y))
        self.seen.value = self.seen.value + x.detach().sum()
        self.alike.value += 1
        return loss, out


def _sums(folder: Path | None, until: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    unit = goes_on(folder, Sums(), until, batch=12)
    return of_all(unit), unit.seen.value, unit.alike.value


def test_what_each_rank_has_in_objects_of_a_scripts_own_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """All went on with rank 0's, in silence. On another number of ranks they do, and are told."""
    want = ranks(2, _sums, None, 9)
    ranks(2, _sums, tmp_path, 4)
    got = ranks(2, _sums, tmp_path, 9)
    assert not torch.equal(want[0][1], want[1][1]) and got[0][2] == 9
    for (values, seen, alike), (wanted, its, number) in zip(got, want, strict=True):
        assert largest_difference(values, wanted) == 0 and torch.equal(seen, its) and alike == number


def test_on_another_number_of_ranks_all_have_rank_0s(ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = ranks(2, _sums, tmp_path, 4)
    unit = Sums(layout="none")
    assert ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    assert torch.equal(unit.seen.value, first[0][1]) and "the state of seen differed" in caplog.text


class CountsRows(Regression):
    """Logs how many rows it saw, by a metric object and as a sum; so does `CountsItself`, over an epoch."""

    def __init__(self) -> None:
        super().__init__(module=net(), accumulate=2, layout="ddp" if dist.is_initialized() else None)
        self.rows = SumMetric()

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        if self.module.training:
            self.rows.update(len(data[0]))
            state.log("rows", self.rows)
            state.log("sum", data[0].sum(), reduce="sum")
        return super().compute_loss(state, data[:2])


class CountsItself(ech.TrainUnit[Any], ech.EvalUnit[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.rows = net(), SumMetric()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        self.rows.update(len(data[0]))
        state.log("rows", self.rows)
        state.log("sum", data[0].sum(), reduce="sum")
        state.log("most", data[0].max(), reduce="max")
        state.log("mean", data[0].mean(), weight=len(data[0]))

    def eval_step(self, state: ech.State, data: Any) -> None:
        state.log("y", data[1].mean())


def _killed(state: ech.State, unit: Any, *_: Any) -> None:
    """In the second epoch, of three."""
    if unit.train_progress.num_epochs_completed >= 1 and unit.train_progress.num_updates_completed >= 10:
        raise KeyError("killed")


KILLED_AT = ["on_train_step_end", "on_train_epoch_end", "on_eval_start", "on_eval_end", "on_train_end"]


def _trained(kind: Any, every: int | str, *callbacks: Any, epochs: int = 3, **options: Any) -> dict[str, float]:
    rows = list(torch.utils.data.TensorDataset(*batch(48, 0)))
    loader = ech.Loader(rows, 8 if kind is CountsRows else 4, shuffle=True)
    evaluation = [batch(4, 1)]
    return ech.train(kind(), loader, eval=evaluation, eval_every=every, max_epochs=epochs, callbacks=[*callbacks], **options)


def _numbers_after_a_kill(folder: str, kind: Any, every: int | str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The numbers of a whole run; and by the place of a kill, those of a run that went on from there."""
    found = {}
    for at in KILLED_AT:
        saved = ech.Checkpoints(f"{folder}/{kind.__name__} {at} {every}", every=3)
        with pytest.raises(KeyError):
            _trained(kind, every, Hooks(**{at: _killed}), checkpoints=saved)
        found[at] = _trained(kind, every, checkpoints=saved)
    return _trained(kind, every), found


@pytest.mark.parametrize("kind", [CountsRows, CountsItself])
@pytest.mark.parametrize("every", ["epoch", pytest.param(3, marks=pytest.mark.full)])
def test_the_numbers_of_a_run_are_the_same_after_any_kill(ranks: Ranks, tmp_path: Path, kind: Any, every: int | str) -> None:
    """A metric object of an epoch, an epoch's totals, and the latest numbers, which a run that is done has, too."""
    for whole_run, found in ranks(2, _numbers_after_a_kill, str(tmp_path), kind, every):
        assert found == dict.fromkeys(KILLED_AT, whole_run)


def _killed_late(state: ech.State, unit: Any) -> None:
    """In the second epoch, the last one."""
    if unit.train_progress.num_epochs_completed >= 1 and unit.train_progress.num_steps_completed_in_epoch >= 8:
        raise KeyError("killed")


def _until_killed(folder: str, kind: Any, every: int | str) -> None:
    with pytest.raises(KeyError):
        _trained(kind, "epoch", Hooks(on_train_step_end=_killed_late), checkpoints=ech.Checkpoints(folder, every=every), epochs=2)


def _gone_on(folder: str, kind: Any) -> dict[str, float]:
    """The numbers of a run that goes on, and then of one that is done."""
    first = _trained(kind, "epoch", checkpoints=folder, epochs=2)
    assert _trained(kind, "epoch", checkpoints=folder, epochs=2) == first
    return first


@pytest.mark.parametrize("kind", [CountsRows, CountsItself])
@pytest.mark.parametrize("every", [3, pytest.param("epoch", marks=pytest.mark.full)])
def test_the_numbers_of_a_run_are_the_same_on_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, kind: Any, every: int | str
) -> None:
    """An epoch's totals and metrics began anew with the rest of the epoch, and a run that was done returned nothing."""
    whole_run = _trained(kind, "epoch", epochs=2)
    for before, after in ((2, 1), (1, 2)):
        folder = str(tmp_path / str(before))
        ranks(before, _until_killed, folder, kind, every)
        for found in ranks(after, _gone_on, folder, kind):
            assert found == pytest.approx(whole_run)


class OfTheirOwn(torchmetrics.Metric):
    """Whose state of two ranks cannot be joined without knowing what it means."""

    full_state_update = False

    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(()), dist_reduce_fx=how)

    def update(self, values: torch.Tensor) -> None:
        self.seen = values.mean() / self.update_count + self.seen * (1 - 1 / self.update_count)

    def compute(self) -> torch.Tensor:
        return self.seen


@pytest.mark.parametrize(
    ("make", "joins"),
    [
        (torchmetrics.SumMetric, True),
        (torchmetrics.MeanMetric, True),
        (torchmetrics.CatMetric, True),
        (lambda: torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MeanMetric()]), True),
        (lambda: OfTheirOwn("mean"), False),
        (torchmetrics.PearsonCorrCoef, False),
    ],
)
def test_a_metrics_shares_of_several_ranks_are_joined_or_begin_anew(make: Callable[[], Any], joins: bool) -> None:
    values = [batch(4, number)[0][:, :1].flatten() for number in range(5)]
    data = [(each, each.roll(1)) if make is torchmetrics.PearsonCorrCoef else (each,) for each in values]
    whole_epoch, rest, shares = make(), make(), []
    for part in (data[:1], data[1:4], []):
        one = make()
        for each in part:
            one.update(*each)
        shares.append(share_of(one))
    rest.update(*data[0])  # is dropped
    assert join_shares(rest, shares) is joins
    for each in data:
        whole_epoch.update(*each)
    rest.update(*data[4])
    if joins:
        got, want = rest.compute(), whole_epoch.compute()
        if make is torchmetrics.CatMetric:
            got, want = got.sort().values, want.sort().values
        torch.testing.assert_close(got, want)
        assert getattr(rest, "update_count", 5) == 5
    assert join_shares(rest, []) and getattr(rest, "update_count", 0) == 0
