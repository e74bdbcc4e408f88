"""What records say of the device: FLOPs by shapes against torch's counter, peaks by name, and nothing that is a guess."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import echelon as ech
from echelon.loop.records.record import Recorder
from echelon.loop.records.utilization import LanguageModel, Utilization, peak_flops
from tests.conftest import Ranks
from tests.kit.language import Language
from tests.kit.language import Unit as LanguageUnit

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
HEADS, SIZE, LAYERS, WORDS = 2, 8, 2, 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Nothing but matrix products, which torch counts, and a configuration by the usual names."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.config = SimpleNamespace(num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=width)
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Unit(ech.AutoUnit[torch.Tensor]):
    weight_unit = "tokens"

    def weight(self, data: torch.Tensor) -> int:
        return data.numel()

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.cross_entropy(self.module(data).flatten(0, 1), data.flatten()), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def words(rows: int = 3, length: int = 10) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % WORDS


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts(tied: bool) -> None:
    module, data = Decoder(tied), words()
    with FlopCounterMode(display=False) as counter:
        module(data).sum().backward()
    assert LanguageModel(module).flops(data) == counter.get_total_flops()


def test_what_is_frozen_costs_no_gradient_of_its_own() -> None:
    """An adapter: all but the inputs of the first frozen layers, which get no gradient either."""
    module, data = Decoder(), words(1, 4)
    whole = LanguageModel(module).flops(data)
    for block in module.blocks:
        block.requires_grad_(False)
    frozen = sum(p.numel() for p in module.blocks.parameters())
    assert whole is not None and LanguageModel(module).flops(data) == whole - 2 * frozen * data.numel()


@pytest.mark.parametrize(
    ("change", "data"),
    [
        (lambda m: setattr(m.config, "num_local_experts", 8), words()),
        (lambda m: None, torch.randn(3, 10)),
        (lambda m: None, [torch.zeros(3)]),
        (lambda m: m.__delattr__("words"), words()),
        (lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(7))), words()),
    ],
    ids=["experts", "no whole numbers", "no rows", "no embedding", "a part of a layer"],
)
def test_what_shapes_do_not_tell_is_not_guessed(change: Any, data: Any) -> None:
    module = Decoder()
    change(module)
    assert LanguageModel(module).flops(data) is None


def test_tokens_are_found_in_batches_of_any_kind() -> None:
    want = LanguageModel(Decoder()).flops(words())
    for batch in ((words(), words()), {"mask": torch.ones(3, 10).bool(), "input_ids": words()}, SimpleNamespace(x=[words()])):
        assert LanguageModel(Decoder()).flops(batch) == want


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5),
        ("NVIDIA L40S", torch.bfloat16, 362.05),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("GRID A100D-1-20C", torch.bfloat16, None),
        ("NVIDIA L40S-12Q", torch.bfloat16, None),
        ("NVIDIA H100 64GB HBM2", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
        ("NVIDIA GB200", torch.bfloat16, None),
    ],
)
def test_peaks_are_of_the_very_device_and_type(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    found = peak_flops(name, dtype)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_float32_is_as_fast_as_its_products_may_be_by_either_of_torchs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) == pytest.approx(494.7e12)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert peak_flops("Tesla T4", torch.float32) == pytest.approx(8.1e12)


class _Kept:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def records(self, records: list[dict[str, Any]]) -> None:
        self.seen += records

    def event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _records(peak: float | None, layout: str, accumulation: int) -> list[dict[str, Any]]:
    unit = Unit(module=Decoder(), options=ech.UnitOptions(device=CPU), layout=layout, accumulate=accumulation)
    unit.peak_flops = peak
    return _records_of(unit, [words(), words(2, 10)] * 2)


def _records_of(unit: Any, batches: list[Any]) -> list[dict[str, Any]]:
    kept = _Kept()
    with mock.patch("echelon.loop.reporting.reporting.default_sinks", lambda: [kept]):
        ech.train(unit, batches, max_epochs=1)
    return kept.seen


@pytest.mark.full
def test_a_record_has_what_its_update_used(ranks: Ranks) -> None:
    """Over a window: FLOPs of both micro-batches of this rank, in the window's time."""
    both = LanguageModel(Decoder()).flops(words(5, 10))
    assert both is not None
    for layout in ("ddp", "fsdp"):
        records = ranks(2, _records, 1e15, layout, 2)[0]
        assert len(records) == 2
        for record in records:
            seconds = 2 * 50 / record["tokens_per_s"]
            assert record["mfu"] == pytest.approx(both / seconds / 1e15)
            assert record["tokens_per_s_per_device"] == pytest.approx(record["tokens_per_s"] / 2)
            assert "memory_peak_bytes" not in record


def _language() -> Language:
    torch.manual_seed(0)
    module = Language(2)
    module.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=16)  # type: ignore[assignment]
    return module


def _of_language(layout: str, flops: float | None) -> list[dict[str, Any]]:
    unit = LanguageUnit("SGD", _language(), layout=layout, options=ech.UnitOptions(device=CPU))
    unit.peak_flops = 1e15
    if flops is not None:
        unit.flops = lambda data: flops * data["words"].numel()  # type: ignore[method-assign]
    return _records_of(unit, [{"words": words(2, 16) % 24, "targets": words(2, 16) % 24}] * 2)


@pytest.mark.full
@pytest.mark.parametrize(("axis", "flops"), [("cp", None), ("cp", 5e3), ("pp", None), ("pp", 5e3), ("tp", None), ("tp", 5e3)])
def test_ranks_that_share_samples_count_the_whole_work(ranks: Ranks, axis: str, flops: float | None) -> None:
    """Of parts of sequences, too. A rank of a pipeline knows its own stage's parameters alone, so that nothing can be said."""
    whole = LanguageModel(_language()).flops(words(2, 16)) if flops is None else flops * 32
    assert whole is not None
    for record in ranks(2, _of_language, f"{axis}=2", flops)[0]:
        if axis == "pp" and flops is None:
            assert "mfu" not in record
        else:
            seconds = 32 / record["samples_per_s"]
            assert record["mfu"] == pytest.approx(whole / seconds / 2e15, rel=1e-6, abs=0)


def test_an_unknown_peak_leaves_mfu_out_and_so_does_an_impossible_one() -> None:
    for peak in (None, 1.0):
        records = _records(peak, "none", 1)
        assert len(records) == 4 and all("mfu" not in record for record in records)
        assert all("tokens_per_s_per_device" not in record for record in records)  # one device: it is tokens_per_s


def test_memory_of_a_gpu_is_read_from_the_allocators_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a second, into the last record of a batch."""
    counters = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_alloc_retries": 1}
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: asked.append(device) or counters)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "unheard of")
    unit: Any = Unit(module=Decoder(), options=ech.UnitOptions(device=CPU))
    unit.device = torch.device("cuda", 0)
    kept = _Kept()
    recorder = Recorder([kept], "tokens")
    recorder.utilization = Utilization(unit)
    for step in range(3):
        recorder.update(step, step, 1.0, 1.0, 0.1, None)
        recorder.flush()
    assert len(asked) == 1
    assert [kept.seen[0][k] for k in ("memory_peak_bytes", "memory_reserved_bytes", "alloc_retries")] == [5, 7, 1]
    assert "memory_peak_bytes" not in kept.seen[1]
