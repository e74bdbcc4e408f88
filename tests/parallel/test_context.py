"""Context parallelism: the numbers of one process, in every kind of batch and model; what it cannot split is refused."""

from __future__ import annotations

import re
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon as ech
from echelon.common.errors import ContextParallelError, UsageError
from tests.conftest import Ranks
from tests.kit import models
from tests.kit.context_models import LM, Language, Tokenwise, lm, loss_of, plain, tokens
from tests.kit.models import largest_difference, seeded, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import Regression, under_each

pytestmark = pytest.mark.standing_ranks

UPDATES = 8


class Reentrant(LM):
    """Has its blocks computed again by torch itself."""

    def body(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h


class Routed(LM):
    """With a layer of experts, which have the tokens in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        width = self.norm.normalized_shape[0]
        experts = [nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(4)]
        self.routed = ech.nn.MoE(width, experts, top_k=2, balance=None)

    def body(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        h = super().body(h, mask)
        return h + self.routed(h)


class RoutedByHand(LM):
    """Experts that somebody else wrote: each has its own tokens, then an activation has all, one expert after another."""

    def __init__(self) -> None:
        super().__init__()
        width = self.norm.normalized_shape[0]
        self.router = nn.Linear(width, 4)
        self.up, self.activation = nn.ModuleList(nn.Linear(width, width) for _ in range(4)), nn.SiLU()

    def body(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        h = super().body(h, mask)
        flat = h.flatten(0, 1)
        shares, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        made = torch.cat([up(flat[chosen == number]) for number, up in enumerate(self.up)])
        return h + (self.activation(made)[order.argsort()] * shares[:, None]).view_as(h)


# What test_directions.py has not: (make the model, options of a batch, options of the unit)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "not causal": (lambda: lm(causal=False), {}, {}),
    "packed documents": (lm, {"packed": True}, {"optimizer": "AdamW"}),
    "rows, with ignored targets": (lm, {"ignored": 0.6}, {"clip_grad_norm": 0.3}),
    "blocks computed again by torch": (partial(seeded, Reentrant), {}, {}),
    "experts": (partial(seeded, Routed), {}, {}),
    "divided experts": (partial(seeded, Routed), {}, {}),
    "experts by hand": (partial(seeded, RoutedByHand), {}, {}),
    "checkpointed": (lm, {"packed": True}, {"activation_checkpoint_params": "blocks"}),
}


def _windows(options: dict[str, Any]) -> list[list[dict[str, torch.Tensor]]]:
    """By update and micro-batch: other rows and lengths each time. The last window is short."""
    made = [tokens(2 + seed % 2, 8 * (1 + seed % 2), 100 * seed, **options) for seed in range(1, 2 * UPDATES)]
    return [made[i : i + 2] for i in range(0, len(made), 2)]


def _train(case: str) -> tuple[float, float, float]:
    """How far parameters, norms and losses are from plain PyTorch."""
    make, batch, options = CASES[case]
    windows, clip = _windows(batch), options.get("clip_grad_norm", float("inf"))
    layout = ech.Layout(cp=2, ep=2 if case == "divided experts" else 1)
    unit = Language(module=make(), layout=layout, accumulate=2, **{"clip_grad_norm": clip, **options})
    ech.train(unit, [micro for window in windows for micro in window], max_epochs=1)
    want, norms, losses = plain(make(), windows, clip=clip, optimizer=options.get("optimizer", "SGD"))
    far = [max(abs(a / b - 1) for a, b in zip(x, y, strict=True)) for x, y in ((unit.norms, norms), (unit.losses, losses))]
    return largest_difference(whole(unit.module), want), *far


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_one_sequence_train_like_one_process(ranks: Ranks, case: str) -> None:
    """Accumulation, and a short last window, included."""
    for far in ranks(2, _train, case):
        assert max(far) < 1e-11, (case, far)


# --- one attention


def _attention(cp: int) -> dict[str, float]:
    """How far one attention of parts, and its gradients, are from that of the whole, by kind of mask."""
    from echelon.parallel.context.attention import SplitAttention, over
    from echelon.parallel.context.batch import SequenceParts

    parts, length = SequenceParts.over(None), 8 * cp
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, length, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    w, bias = torch.randn(2, 4, length, 4, dtype=torch.float64), torch.randn(2, 1, length, length, dtype=torch.float64)
    padding = torch.arange(length)[None, None, None] < torch.tensor([length, length - 5])[:, None, None, None]
    masks: dict[str, tuple[Any, Any]] = {
        "causal": (None, None),
        "none": (None, None),
        "whole, of which it takes its rows": (bias, bias),
        "rows of its queries": (bias, parts.cut(bias, 2)),
        "padding of its keys": (padding, parts.cut(padding, 3)),
        "padding, expanded": (padding, parts.cut(padding, 3).expand(2, 1, length // cp, length // cp)),
        "causal_upper_left": (
            nn.attention.bias.causal_upper_left(length, length),
            nn.attention.bias.causal_upper_left(length // cp, length // cp),
        ),
    }
    found = {}
    for name, (mask, mine) in masks.items():
        options: dict[str, Any] = {"enable_gqa": True, "is_causal": name == "causal", "scale": 0.3}
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        want_grads = torch.autograd.grad((want * w).sum(), (q, k, v))
        local = [parts.cut(x.detach(), 2).requires_grad_() for x in (q, k, v)]
        with over(parts), SplitAttention():
            got = F.scaled_dot_product_attention(*local, attn_mask=mine, **options)
        grads = torch.autograd.grad((got * parts.cut(w, 2)).sum(), local)
        pairs = [(got, want), *zip(grads, want_grads, strict=True)]
        found[name] = max(float((a - parts.cut(b, 2)).abs().max()) for a, b in pairs)
    return found


def test_attention_of_parts_is_that_of_the_whole(ranks: Ranks) -> None:
    for found in ranks(4, _attention, 4):
        assert max(found.values()) < 1e-13, found


# --- what else a model may ask of its sequence


def _between_passes() -> dict[str, Any]:
    """Outside of a step, generation for example, everything is as in one process."""
    unit = Language(module=lm(), layout="cp=2")
    x = tokens(2, 7, 0)["inputs"]  # a length that does not divide
    with torch.no_grad():
        same = bool((unit.module(x) - lm()(x)).abs().max() < 1e-14)
    return {"same": same, "positions": ech.nn.positions(x).tolist(), "whole": ech.nn.whole_sequence(x) is x}


def test_without_a_step_under_way_nothing_is_split(ranks: Ranks) -> None:
    for found in ranks(2, _between_passes):
        assert found == {"same": True, "positions": list(range(7)), "whole": True}


def _evaluated() -> tuple[float, float, list[float]]:
    batches = [tokens(2 + i % 2, 16, i, ignored=0.5) for i in range(4)]
    unit, module = Language(module=lm(), layout="cp=2", by_tokens=True), lm()
    ech.evaluate(unit, batches)
    weights = [int((batch["targets"] != -100).sum()) for batch in batches]
    total = sum(float(loss_of(module, batch)) * weight for batch, weight in zip(batches, weights, strict=True))

    class Predicts(ech.units.AutoPredictUnit[torch.Tensor]):
        def on_predict_step_end(self, state: ech.State, data: torch.Tensor, step: int, outputs: torch.Tensor) -> None:
            far.append(float((outputs - module(data)).abs().max()))

    far: list[float] = []
    ech.predict(Predicts(module=lm(), layout="cp=2"), [b["inputs"] for b in batches])
    return unit.eval_loss, total / sum(weights), far


@pytest.mark.full
def test_an_evaluation_is_exact_and_a_prediction_whole(ranks: Ranks) -> None:
    for got, want, far in ranks(2, _evaluated):
        assert got == pytest.approx(want, rel=1e-13)
        assert len(far) == 4 and max(far) < 1e-13


def _own_loop() -> float:
    batches = [tokens(2, 16, i, ignored=0.3) for i in range(6)]
    module = lm()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    model, optimizer, loader = ech.prepare(module, optimizer, batches, layout="cp=2", accumulate=2)
    for batch in loader:
        with ech.window(model, weight=int((batch["targets"] != -100).sum())) as window:
            window.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    want, _, _ = plain(lm(), [batches[i : i + 2] for i in range(0, 6, 2)], optimizer="AdamW", by_tokens=True)
    return largest_difference(whole(model), want)


@pytest.mark.full
def test_a_loop_of_ones_own_trains_like_one_process(ranks: Ranks) -> None:
    assert max(ranks(2, _own_loop)) < 1e-11


def _dropout() -> tuple[list[float], list[float], bool]:
    """Masks of one layer for equal tokens; what the loaders draw stays alike."""
    unit = Language(module=lm(dropout=0.5), layout="cp=2")
    same = torch.zeros(1, 16, dtype=torch.long)
    drawn: list[float] = []
    unit.module.blocks[0].mlp[2].register_forward_hook(
        lambda m, i, o: drawn.append(float((o == 0).double().mul(torch.arange(32)).sum()))
    )
    torch.manual_seed(3)
    ech.train(unit, [{"inputs": same, "targets": same}] * 2, max_epochs=1)
    after = torch.rand(3).tolist()
    return drawn[-2:], after, drawn[-1] != drawn[-2]


@pytest.mark.full
def test_ranks_of_one_sequence_drop_other_units(ranks: Ranks) -> None:
    (first, after, moves), (second, also, _) = ranks(2, _dropout)
    assert first != second and moves
    assert after == also, "what is drawn outside of the steps, by data for example, is alike"


def _resumed(folder: str, stop: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    unit = Language(module=lm(dropout=0.3), layout="cp=2", optimizer="AdamW")
    loader = ech.Loader([tokens(1, 16, i) for i in range(12)], 2, seed=0, collate_fn=_rows)
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=3)
    ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=stop or 6, callbacks=[saver])
    return whole(unit.module)


def _rows(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.full
def test_a_resumed_run_with_dropout_is_bit_equal(ranks: Ranks, tmp_path: Path) -> None:
    through = ranks(2, _resumed, str(tmp_path / "a"), None)[0]
    ranks(2, _resumed, str(tmp_path / "b"), 3)
    again = ranks(2, _resumed, str(tmp_path / "b"), None)[0]
    assert largest_difference(through, again) == 0.0


# --- what cannot be split is refused, on all ranks, before the first update


class Pooled(Tokenwise):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, -1:].expand(-1, x.shape[1], -1)


class Recomputed(Tokenwise):
    """Has a function computed again, of which torch tells no module."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(lambda m, h: checkpoint(self._attention, h[:, None], use_reentrant=reentrant)[:, 0])

    def _attention(self, h: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(h, h, h, is_causal=True)


def _masks_local_keys(m: Any, h: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], attn_mask=mask)[:, 0]


def _attends(m: Any, h: torch.Tensor) -> torch.Tensor:
    """Without torch's function: it sees the local tokens."""
    return (h @ h.mT).softmax(-1) @ h


def _shifts_itself(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["inputs"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["inputs"][:, 1:].flatten())


def _loss_by_hand(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen = module(batch["inputs"])[:, :-1].log_softmax(-1).gather(2, batch["inputs"][:, 1:, None])
    return -chosen.mean()


def _cuts_inputs(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch["inputs"][:, :-1]).flatten(0, 1), batch["inputs"][:, 1:].flatten())


class Timed(nn.Module):
    """A model that is told how noisy a sequence is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = lm()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.model(x) * time[:, None, None]


def _draws_time(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["inputs"], torch.rand(len(batch["inputs"])).double())
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _with_part(mix: Any, part: Any = nn.Identity) -> Any:
    return lambda: Tokenwise(mix, part=part())


PLACES = _with_part(lambda m, h: h + m.part(torch.arange(h.shape[1])), lambda: nn.Embedding(64, 16))
MULTIHEAD = _with_part(
    lambda m, h: m.part(h, h, h, need_weights=False)[0], lambda: nn.MultiheadAttention(16, 2, batch_first=True)
)
NEAR = _with_part(lambda m, h: m.part(h.mT).mT, lambda: nn.Conv1d(16, 16, 3, padding=1))
IMAGES = {**tokens(2, 16, 0), "image": torch.zeros(2, 3, 16)}
CANNOT_SHIFT = r"2 x 7 targets were taken of this rank's 2 x 8 tokens"
NESTED = {"inputs": torch.nested.nested_tensor([torch.arange(8), torch.arange(12)], layout=torch.jagged)}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "attention by hand": (_with_part(_attends), {}, r"Tokenwise.head \(Linear\) gets other .*scaled_dot_product_attention"),
    "local positions": (PLACES, {}, r"Tokenwise\.part .*echelon.nn.positions"),
    "pooling": (lambda: Pooled(lambda m, h: h), {}, "Pooled gives other outputs"),
    "a mask of local keys": (_with_part(_masks_local_keys), {}, r"over all 16 keys .* got 8 x 8 .*is_causal=True"),
    "MultiheadAttention": (MULTIHEAD, {}, r"over 2 ranks cannot split nn\.MultiheadAttention"),
    "convolution": (NEAR, {}, r"Tokenwise\.part \(Conv1d\) gives other outputs"),
    "computed again": (partial(Recomputed, reentrant=False), {}, r"call Recomputed\._attention again .*checkpoint\(bl"),
    "again, reentrant": (
        partial(Recomputed, reentrant=True),
        {},
        r"call Recomputed\._attention again .*recompute='blocks'",
    ),
    "length": (lm, {"length": 18}, r"dimension 1 of inputs, of shape \(2, 18\), must .* 2 x cp = 4 divides.* 16 or 20"),
    "shift in the loss": (lm, {"loss": _shifts_itself}, CANNOT_SHIFT),
    "shift in a loss by hand": (lm, {"loss": _loss_by_hand}, CANNOT_SHIFT),
    "shift of the inputs": (lm, {"loss": _cuts_inputs}, CANNOT_SHIFT),
    "a draw for each sequence": (Timed, {"loss": _draws_time}, r"Timed must get the same argument 1 .* of shape \(2,\)"),
    "no sequence": (lm, {"batch": {"x": torch.zeros(3)}}, r"no tensor of the batch has one"),
    "a tuple": (lm, {"batch": (torch.zeros(2, 7, dtype=torch.int64),)}, r"dimension 1 of item 0 of the batch, of shape \(2, 7\)"),
    "rows of their own lengths": (lm, {"batch": NESTED}, r"inputs must have rows of one length, got a nested .*to_padded_tensor"),
    "ambiguous": (lm, {"batch": IMAGES}, r'image of shape \(2, 3, 16\) has that many in another .*"targets": 1, "image": None\}'),
}


def _refused(case: str) -> str:
    make, how, _ = REFUSED[case]
    torch.manual_seed(0)
    unit = Language(module=make().double(), layout="cp=2", **({"loss": how["loss"]} if "loss" in how else {}))
    batch = how.get("batch") or tokens(2, how.get("length", 16), 0)
    said = refusal(ech.train, unit, [batch, batch], max_epochs=1)
    assert unit.window.updates == 0
    return said


@pytest.mark.full
def test_what_cannot_be_split_is_refused(ranks: Ranks) -> None:
    for messages in ranks(2, under_each, [*REFUSED], _refused, timeout_s=180):
        for case, message in messages.items():
            assert re.search(REFUSED[case][2], message), (case, message)


class Weighs(Language):
    """Counts by a function that is given."""

    def __init__(self, count: Any, **options: Any) -> None:
        super().__init__(**options)
        self.count = count

    def weight(self, data: Any) -> Any:
        return self.count(data)


# What a unit counts, in batches of which a part of the targets is ignored, and what is said of it.
WEIGHTS: dict[str, tuple[Any, float, str | None]] = {
    "targets": (lambda data: (data["targets"] != -100).sum(), 0.3, None),
    "rows": (lambda data: len(data["inputs"]), 0.0, r"weight\(\) of the 2 parts .* whole, 2, got 2 \+ 2\. .*leave weight"),
    "all but each row's first": (lambda data: (data["targets"][:, 1:] != -100).sum(), 0.3, r"of the 2 parts of a .* must add up"),
}


def _weighs(name: str) -> tuple[float, str]:
    count, ignored, _ = WEIGHTS[name]
    batches = [tokens(2, 16, i, ignored=ignored) for i in range(4)]
    unit = Weighs(count, module=lm(), layout="cp=2")
    try:
        ech.train(unit, batches, max_epochs=1)
    except UsageError as error:
        return 0.0, str(error)
    want, _, _ = plain(lm(), [[batch] for batch in batches], by_tokens=True)
    return largest_difference(whole(unit.module), want), ""


@pytest.mark.full
def test_weights_of_parts_that_are_not_those_of_the_whole_are_refused(ranks: Ranks) -> None:
    """Within a part a row's first target is no row's first."""
    for found in ranks(2, under_each, [*WEIGHTS], _weighs):
        for name, (far, said) in found.items():
            assert far < 1e-11, name
            assert re.search(WEIGHTS[name][2] or "^$", said), (name, said)


def _compiled() -> tuple[str, float]:
    options: dict[str, Any] = {"compile": ech.layouts.TorchCompileParams(backend="aot_eager"), "layout": "cp=2"}
    said = refusal(Language, module=lm(), activation_checkpoint_params="blocks", **options)
    batches, unit = [tokens(2, 16, 0), tokens(2, 16, 1)], Language(module=lm(), **options)
    ech.train(unit, batches, max_epochs=1)
    return said, largest_difference(whole(unit.module), plain(lm(), [[batch] for batch in batches])[0])


@pytest.mark.full
def test_compiled_models_train_alike_and_do_not_recompute(ranks: Ranks) -> None:
    for message, far in ranks(2, _compiled):
        assert message.startswith("context parallelism takes compile or recompute, got both")
        assert far < 1e-11


@pytest.mark.full
@pytest.mark.parametrize("which", ["flex_attention", "varlen_attn"])
def test_other_kernels_are_refused(which: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.attention.varlen import varlen_attn

    from echelon.parallel.context.attention import SplitAttention, over
    from echelon.parallel.context.batch import SequenceParts

    ends = torch.tensor([0, 128], dtype=torch.int32)
    with over(SequenceParts(0, 2)), SplitAttention(), refused(ContextParallelError):
        if which == "flex_attention":
            flex_attention(*[torch.randn(1, 1, 128, 16)] * 3)
        else:
            varlen_attn(*[torch.randn(128, 1, 16)] * 3, ends, ends, 128, 128)


def _unchecked() -> list[list[int]]:
    """Without the check, and with dimensions that are said, a batch that would be refused goes through."""
    layout = ech.Layout(cp=2, sequence_dim={"inputs": 1, "targets": 1, "image": None}, check_context=False)
    unit = Language(module=lm(), layout=layout)
    batch = {**tokens(2, 16, 0), "image": torch.zeros(2, 3, 16)}
    part = unit.prepared.batches.part_of(batch)
    ech.train(unit, [batch], max_epochs=1)
    return [list(t.shape) for t in part.values()]


@pytest.mark.full
def test_dimensions_can_be_said(ranks: Ranks) -> None:
    assert ranks(2, _unchecked) == [[[2, 8], [2, 8], [2, 3, 16]]] * 2


def _flat() -> float:
    """Documents one after another, without a dim of rows."""

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(module(batch["inputs"][None], batch["documents"][None])[0], batch["targets"])

    made = [tokens(1, 16, seed, packed=True, ignored=0.3) for seed in range(2)]
    batches = [{name: t[0] for name, t in batch.items()} for batch in made]
    unit = Language(module=lm(), layout=ech.Layout(cp=2, sequence_dim=0), loss=loss, by_tokens=True)
    ech.train(unit, batches, max_epochs=1)
    return largest_difference(whole(unit.module), plain(lm(), [[b] for b in batches], loss=loss, by_tokens=True)[0])


@pytest.mark.full
def test_a_batch_of_one_dim_is_one_sequence(ranks: Ranks) -> None:
    assert max(ranks(2, _flat)) < 1e-11


def _no_sequence(phase: str) -> tuple[str, bool]:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    unit = Regression(module=module, layout="cp=2")
    with pytest.raises(UsageError) as caught:
        if phase == "train":
            ech.train(unit, [models.batch(8, 0)], max_epochs=1)
        else:
            ech.evaluate(unit, [models.batch(8, 0)])
    lines = traceback.format_tb(caught.tb)
    return str(caught.value), any("in compute_loss" in line for line in lines)


@pytest.mark.full
def test_features_taken_for_a_sequence_are_named_with_the_line_of_the_user(ranks: Ranks) -> None:
    for found in ranks(2, under_each, ["train", "evaluate"], _no_sequence):
        for said, shows_line in found.values():
            assert "0 (dim 1)" in said and "Layout(sequence_dim=...)" in said and "torch says: mat1 and mat2" in said
            assert shows_line


def _recomputed_elsewhere() -> float:
    """On a GPU a backward pass recomputes in a thread of torch's own, where a mode of this thread does not act."""
    unit = Language(module=lm(), layout="cp=2", recompute="blocks")
    part = unit.prepared.batches.part_of(tokens(2, 16, 0))
    block, made = unit.module.blocks[0], []
    with unit.prepared.accumulate(True):
        x = torch.randn(2, 8, 16, dtype=torch.float64)
        here = block(x)
        thread = threading.Thread(target=lambda: made.append(block(x)))
        thread.start()
        thread.join()
    del part
    return float((here - made[0]).abs().max())


@pytest.mark.full
def test_another_thread_attends_to_all_keys_too(ranks: Ranks) -> None:
    assert ranks(2, _recomputed_elsewhere) == [0.0, 0.0]


@pytest.mark.full
def test_a_step_of_ones_own_cannot_follow_parts_of_sequences(ranks: Ranks) -> None:
    for said in ranks(2, refusal, ech.layouts.prepare_module, nn.Linear(2, 2), torch.device("cpu"), layout="cp=2"):
        assert "prepare_module must have a layout without cp, pp" in said
