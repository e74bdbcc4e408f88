"""What a GPU would hold where a CPU that traces holds something else: the caching allocator's segments, and fused kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from echelon.planner.allocator import Allocator, expands
from echelon.planner.pretended import pretended_world, without_values
from echelon.planner.stand_ins import stand_ins
from echelon.planner.steps import Operator
from echelon.planner.trace import Trace, Traced

KIB, MIB = 2**10, 2**20


def test_segments_are_those_of_the_caching_allocator() -> None:
    """As its source has them: of 2 MiB for small blocks, of 20 MiB below 10 MiB, else of a multiple of 2 MiB."""
    allocator = Allocator()
    small = allocator.take(3 * KIB, "")
    assert allocator.reserved == 2 * MIB and small.size == 3 * KIB
    allocator.take(MIB, "")
    assert allocator.reserved == 2 * MIB, "both are small"
    middle = allocator.take(5 * MIB, "")
    allocator.take(15 * MIB, "")  # has what is left of a segment
    assert allocator.reserved == 22 * MIB
    large = allocator.take(11 * MIB + 1, "")
    assert allocator.reserved == 34 * MIB and large.size == 12 * MIB, "what is left of it is too little for a large block"
    allocator.give(middle)
    allocator.give(large)
    assert allocator.take(4 * MIB, "").address == middle.address, "the smallest that fits"
    allocator.take(12 * MIB, "")
    assert allocator.reserved == 34 * MIB
    allocator.take(12 * MIB, "another stream's")
    assert allocator.reserved == 46 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_free_neighbours_become_one_block(expandable: bool) -> None:
    allocator = Allocator(expandable)
    blocks = [allocator.take(2 * MIB, "") for _ in range(10)]
    assert allocator.reserved == 20 * MIB
    for each in (blocks[4], blocks[6], blocks[5], blocks[9], blocks[8], blocks[7]):
        allocator.give(each)
    assert allocator.take(12 * MIB, "").address == blocks[4].address
    allocator.take(2 * MIB, "")
    assert allocator.reserved == 40 * MIB


def test_a_segment_that_expands_grows_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(expandable=True)
    first, last = allocator.take(30 * MIB, ""), allocator.take(6 * MIB, "")
    assert allocator.reserved == 40 * MIB
    allocator.give(last)
    grown = allocator.take(25 * MIB, "")  # from the free end
    assert grown.address == first.address + first.size and allocator.reserved == 60 * MIB
    allocator.give(first)
    allocator.take(2 * MIB, "")
    assert allocator.take(28 * MIB, "").size == 28 * MIB and allocator.reserved == 60 * MIB, "no end is taken while a hole fits"
    assert not expands()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert expands()


def _traced(step: Callable[[torch.Tensor], torch.Tensor], *, gpus: int) -> Traced:
    """A forward and a backward pass over 8 MiB."""
    with pretended_world(2) as mode, stand_ins(mode, gpus=gpus):
        trace = Trace()
        try:
            with mode:
                x = torch.empty(4, 1024, 512, requires_grad=True)
            mode.on_host = trace.on_host
            with mode, trace:
                step(x).sum().backward()
            return trace.result()
        finally:
            trace.close()


def _attends(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(2, (8, 64)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)


def _attends_with_bias(x: torch.Tensor) -> torch.Tensor:
    """As T5 does, whose bias is learned."""
    bias = torch.zeros(1, 8, x.shape[1], x.shape[1], requires_grad=True)
    heads = x.unflatten(-1, (8, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (lambda x: F.rms_norm(x, (512,), torch.ones(512), 1e-5), 3 * 8),  # its input and output, and a gradient
        (nn.Dropout(0.1), 2 + 2 * 8),  # a mask of bytes
        (_attends, 6 * 8 + 1),  # the output, its gradient, and those of the three, two of them added up
        (_attends_with_bias, 6 * 8 + 5 * 32),  # a bias of 32, and a gradient of it for each sequence
        (lambda x: nn.TransformerEncoderLayer(512, 8, 1024, 0.1, batch_first=True)(x).sum(), 200),
    ],
    ids=["rms_norm", "dropout", "attention", "bias", "layer"],
)
def test_a_kernel_keeps_what_that_of_a_gpu_keeps(step: Callable[[torch.Tensor], torch.Tensor], most: int) -> None:
    """Traced with a CPU's, which are several, an encoder layer's dropout alone kept all the weights of its attention."""
    on_gpus = _traced(step, gpus=1)
    assert on_gpus.peak <= (most + 0.5) * MIB < _traced(step, gpus=0).peak
    assert on_gpus.peak <= on_gpus.reserved <= 2 * on_gpus.peak


def test_what_is_saved_on_the_host_is_not_on_the_device() -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.sin()
        return x

    def on_host(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return layers(x)

    there, here = _traced(on_host, gpus=1), _traced(layers, gpus=1)
    assert there.peak <= 40.5 * MIB < 64 * MIB <= here.peak
    assert [step.host for step in there.steps if isinstance(step, Operator) and step.host] == [8 * MIB] * 12  # there and back


def test_a_reduction_of_shards_is_allocated_in_a_stream_of_its_own() -> None:
    with pretended_world(2) as mode, mode, Trace() as trace:
        whole, part = torch.empty(16 * MIB), torch.empty(8 * MIB)
        dist.reduce_scatter_tensor(part, whole)
        del whole
        again = torch.empty(8 * MIB)
        result = trace.result()
        trace.close()
    assert again.nbytes == 32 * MIB and result.reserved == result.peak == 96 * MIB


@pytest.mark.parametrize(("options", "made"), [({}, 4), ({"fused": True}, 0), ({"foreach": False}, 3)])
def test_an_optimizer_steps_all_parameters_together_where_it_would_on_a_gpu(options: dict[str, bool], made: int) -> None:
    with pretended_world(2) as mode, stand_ins(mode, gpus=1), mode, Trace() as trace:
        parameters = [nn.Parameter(torch.zeros(MIB // 4)) for _ in range(4)]
        optimizer = torch.optim.AdamW(parameters, **options)
        trace.watch(nn.ParameterList(parameters), [optimizer])
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        peak, read = trace.result().peak, mode.read
        trace.close()
    assert peak == (4 * 4 + made) * MIB + 4 * 512 and read == 0  # with counts of steps


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_transformers_attends_as_on_a_gpu(padded: bool) -> None:
    """It had a mask of its own where nothing was to be hidden, and twice the work of a causal one."""
    tf = pytest.importorskip("transformers")
    size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**size, use_cache=False))
    tokens, mask = torch.zeros(2, 32, dtype=torch.int64), torch.ones(2, 32, dtype=torch.int64)
    mask[0, 20:] = 0
    with pretended_world(2) as mode, stand_ins(mode, gpus=1):
        without_values(model, mode)
        with mode, Trace() as trace:
            model(input_ids=tokens + 0, attention_mask=mask + 0 if padded else None)
        steps = trace.so_far().steps
        trace.close()
    attends = [step.shape for step in steps if isinstance(step, Operator) and step.kind == "attention"]
    assert attends == [(2 * 4, 32, 32 if padded else 16, 16)] * 2
