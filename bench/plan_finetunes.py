"""Finetuning scripts for `echelon plan`: GPTs of litgpt with LoRA or adapters, and torchtune's Llama, whole or with LoRA. Nothing
is learned from the data, which are zeros. Parameters and the optimizer's state are in bfloat16, as theirs are.

echelon plan --cluster 1x1xA100-40 bench/plan_finetunes.py --model litgpt-llama-7b --method lora --context 1304 --sequences 2

Sources: Lightning-AI/litgpt of October 2023 (lit_gpt/config.py, model.py, lora.py, adapter_v2.py, finetune/lora.py, whose first
micro-batch has the longest sequence); pytorch/torchtune of 2025 (torchtune/models/llama3_2, recipes/configs/llama3_2).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._compiled_loss import compiled_cross_entropy
from bench.gpu.llama import SIZES, Llama, Size
from bench.plan_models import RECOMPUTES, SHAPES

import echelon as ech

_CHUNK = 128  # litgpt has the logits of this many tokens at a time
_CHUNKS = 8  # parts of torchtune's loss
_PROMPT, _FIRST = 10, 2  # an adapter's number of tokens, and the first block that has one


@dataclass(frozen=True)
class Shape:
    """A GPT's shape. `rotary`: the share of a head that is rotated; `norms`: of a block, 1 if attention and MLP share one."""

    width: int
    depth: int
    hidden: int
    vocabulary: int
    heads: int = 32
    rotary: float = 1.0
    norms: int = 2
    is_llama: bool = False  # attention then MLP, SwiGLU, RMSNorm, no biases; else both in parallel, GELU, LayerNorm, biases
    head_bias: bool = False


GPTS = {
    "litgpt-phi-1.5": Shape(2048, 24, 8192, 51_200, rotary=0.5, norms=1, head_bias=True),
    "litgpt-stablelm-3b": Shape(4096, 16, 16_384, 50_688, rotary=0.25),
    "litgpt-llama-7b": Shape(4096, 32, 11_008, 32_000, is_llama=True),
    "litgpt-llama-13b": Shape(5120, 40, 13_824, 32_000, heads=40, is_llama=True),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5))


class AdapterLinear(nn.Linear):
    """The linear layer of LLaMA-Adapter V2 (arXiv 2304.15010): with a bias and a scale of its own."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.adapter_bias, self.adapter_scale = nn.Parameter(torch.zeros(outputs)), nn.Parameter(torch.ones(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter_scale * (super().forward(x) + self.adapter_bias)


class LoRAQKV(nn.Linear):
    """q, k and v by one product; q and v have a LoRA update of rank 8 with dropout on its input."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, 3 * width, bias)
        self.lora_a, self.lora_b = nn.Parameter(torch.zeros(16, width)), nn.Parameter(torch.zeros(2 * width, 8))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q_and_v = F.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        q_and_v = F.conv1d(q_and_v, self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1).transpose(0, 1)
        places = torch.cat((torch.arange(self.in_features), torch.arange(2 * self.in_features, 3 * self.in_features)))
        update = x.new_zeros(q_and_v.shape[0] * q_and_v.shape[1], self.out_features)
        update = update.index_copy(1, places, q_and_v.reshape(-1, 2 * self.in_features))
        return super().forward(x) + update.view(*q_and_v.shape[:-1], -1).transpose(0, 1) * 2.0


def _linear(inputs: int, outputs: int, bias: bool, method: str) -> nn.Linear:
    return (AdapterLinear if method == "adapter_v2" else nn.Linear)(inputs, outputs, bias)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x (B, H, T, E), cos and sin (T, R). The first R features of a head are rotated."""
    part = x[..., : cos.shape[-1]]
    one, other = part.chunk(2, dim=-1)
    return torch.cat((part * cos + torch.cat((-other, one), dim=-1) * sin, x[..., cos.shape[-1] :]), dim=-1)


class Block(nn.Module):
    """x (B, T, D) -> the same."""

    def __init__(self, shape: Shape, method: str, has_prompt: bool) -> None:
        super().__init__()
        norm, bias = (RMSNorm if shape.is_llama else nn.LayerNorm), not shape.is_llama
        self.heads, self.is_llama, self.has_prompt = shape.heads, shape.is_llama, has_prompt
        self.norm_1, self.norm_2 = norm(shape.width), norm(shape.width) if shape.norms == 2 else None
        self.qkv = LoRAQKV(shape.width, bias) if method == "lora" else _linear(shape.width, 3 * shape.width, bias, method)
        self.out = _linear(shape.width, shape.width, bias, method)
        self.up = _linear(shape.width, shape.hidden, bias, method)
        self.gate = _linear(shape.width, shape.hidden, bias, method) if shape.is_llama else None
        self.down = _linear(shape.hidden, shape.width, bias, method)
        if has_prompt:
            self.adapter_prompt = nn.Parameter(torch.zeros(_PROMPT, shape.width))
            self.adapter_gate = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, T, D) -> q, k and v, each (B, H, T, E)."""
        return self.qkv(x).unflatten(2, (self.heads, 3, -1)).permute(0, 2, 3, 1, 4).unbind(2)

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(x)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.has_prompt:
            _, k, v = self._heads(self.adapter_prompt.unsqueeze(0))
            all_of_it = torch.ones(x.shape[1], _PROMPT, dtype=torch.bool)
            k, v = (each.expand(x.shape[0], -1, -1, -1) for each in (k, v))
            beside = F.scaled_dot_product_attention(q, k, v, attn_mask=all_of_it).transpose(1, 2)
            attended = attended + self.adapter_gate * beside
        return self.out(attended.flatten(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.up(x)) * self.gate(x))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first = self.norm_1(x)
        attended = self.attention(first, cos, sin)
        if self.is_llama:
            x = x + attended
            return x + self.mlp(self.norm_2(x))
        return x + attended + self.mlp(first if self.norm_2 is None else self.norm_2(x))


class GPT(nn.Module):
    """Tokens (B, T) -> the mean loss; the logits of 128 tokens are computed at a time."""

    def __init__(self, shape: Shape, method: str, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        prompts = method in ("adapter", "adapter_v2")
        self.blocks = nn.ModuleList(Block(shape, method, prompts and at >= _FIRST) for at in range(shape.depth))
        self.norm = (RMSNorm if shape.is_llama else nn.LayerNorm)(shape.width)
        self.head = _linear(shape.width, shape.vocabulary, shape.head_bias, method)
        turned = int(shape.rotary * shape.width // shape.heads)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(context, turned), persistent=False)
        for name, parameter in self.named_parameters():
            trains = any(word in name for word in _TRAINS[method])
            parameter.requires_grad_(trains)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = [self.head(part).float() for part in self.norm(x).split(_CHUNK, dim=1)]  # as Fabric casts outputs
        targets = tokens[..., 1:].split(_CHUNK, dim=1)
        logits[-1] = logits[-1][..., :-1, :]
        pairs = zip(logits, targets, strict=True)
        return torch.cat([F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="none") for a, b in pairs]).mean()


_TRAINS = {"lora": ("lora_",), "adapter": ("adapter_",), "adapter_v2": ("adapter_", "norm"), "full": ("",)}


class LoRALinear(nn.Linear):
    """torchtune's LoRA layer, without dropout."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 2.0 * self.lora_b(self.lora_a(x))


@dataclass(frozen=True)
class Tuning:
    """
    Args:
        tied: the head's weight is the embedding's.
        rank: LoRA's rank.
        places: the layers that have LoRA.
        chunks: parts of the loss.
    """

    size: Size
    tied: bool = False
    rank: int = 8
    places: tuple[str, ...] = ("q", "v", "out", "gate", "up", "down")
    chunks: int = 8


class Tuned(Llama):
    """Tokens (B, T) -> the mean loss, computed in parts."""

    def __init__(self, tuning: Tuning, method: str, *, compiled: bool) -> None:
        super().__init__(tuning.size)
        if tuning.tied:
            self.head.weight = self.tokens.weight
        self.chunks, self.compiled = tuning.chunks, compiled
        if method == "lora":
            self.requires_grad_(False)
            for block in self.blocks:
                for part in (block.attention, block.mlp):
                    for name in {*tuning.places} & {*dict(part.named_children())}:
                        made = LoRALinear(getattr(part, name), tuning.rank)
                        made.weight.requires_grad_(False)
                        setattr(part, name, made)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        parts = [self.head(part).flatten(0, 1) for part in self.norm(h).tensor_split(self.chunks, dim=1)]
        targets = [part.flatten() for part in tokens.tensor_split(self.chunks, dim=1)]
        losses = [
            compiled_cross_entropy(a, b) if self.compiled else F.cross_entropy(a.float(), b)
            for a, b in zip(parts, targets, strict=True)
        ]
        return torch.stack(losses).mean()


# From torchtune's configurations, and NVIDIA-NeMo/Automodel's (examples/llm_benchmark/qwen/qwen2_5_7b_peft_benchmark.yaml).
TUNED = {
    "torchtune-3b": Tuning(SIZES["3B"], tied=True, rank=64),
    "torchtune-8b": Tuning(SIZES["8B"]),
    "torchtune-70b": Tuning(SHAPES["70B"]),
    "2-13B": Tuning(SHAPES["2-13B"]),
    "qwen2.5-7b": Tuning(
        Size(width=3584, depth=28, heads=28, kv_heads=4, hidden=18_944, vocabulary=152_064, context=4096),
        rank=16,
        places=("q", "k", "v", "out", "gate", "up", "down"),
        chunks=1,
    ),
}


class Qwen3MoE(nn.Module):
    """Tokens (B, T) -> the mean loss, by transformers' model of Qwen/Qwen3-30B-A3B."""

    def __init__(self) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        super().__init__()
        config = Qwen3MoeConfig(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            use_cache=False,
        )
        self.model = Qwen3MoeForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())  # not in float32: `fp32_upcast: false`


# Models of transformers: width, depth, heads, hidden, vocabulary. NeMo Automodel's have LoRA of rank 16 in all linear layers but
# the head (examples/llm_benchmark/llama3_3 and qwen).
DENSE = {"llama3.3-70b": ("Llama", 8192, 80, 64, 28_672, 128_256), "qwen2.5-32b": ("Qwen2", 5120, 64, 40, 27_648, 152_064)}


class WithPEFT(nn.Module):
    """Tokens (B, T) -> the mean loss, by a model of transformers with LoRA of PEFT."""

    def __init__(self, shape: tuple[str, int, int, int, int, int]) -> None:
        import transformers as tf
        from peft import LoraConfig, get_peft_model

        super().__init__()
        kind, width, depth, heads, hidden, vocabulary = shape
        config = getattr(tf, f"{kind}Config")(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=8,
            use_cache=False,
        )
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        self.model = get_peft_model(getattr(tf, f"{kind}ForCausalLM")(config), lora)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def built(name: str, method: str, context: int, *, compiled: bool) -> nn.Module:
    if name in GPTS:
        return GPT(GPTS[name], method, context)
    if name in TUNED:
        tuning = TUNED[name]
        return Tuned(replace(tuning, size=replace(tuning.size, context=context)), method, compiled=compiled)
    return Qwen3MoE() if name == "qwen3-30b-a3b" else WithPEFT(DENSE[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*GPTS, *TUNED, *DENSE, "qwen3-30b-a3b"], default="litgpt-llama-7b")
    parser.add_argument("--method", choices=_TRAINS, default="lora")
    parser.add_argument("--context", type=int, default=1304, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="of an update, on all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an update on each rank")
    parser.add_argument("--layout", default="none")
    parser.add_argument("--recompute", choices=RECOMPUTES, default="none")
    parser.add_argument("--compile", action="store_true", help="the blocks, and the loss")
    given = parser.parse_args()
    ech.init_from_env()
    with ech.on_meta():
        model = built(given.model, given.method, given.context, compiled=given.compile)
        model = model.to(torch.bfloat16)
    rows = torch.zeros(1, dtype=torch.int64).expand(2 * given.sequences, given.context)
    unit = Unit(
        module=model,
        layout=ech.layouts.FSDPStrategy(cpu_offload=True) if given.layout == "fsdp-offload" else given.layout,
        recompute=RECOMPUTES[given.recompute],
        compile="blocks" if given.compile else None,
    )
    loader = ech.Loader(torch.utils.data.TensorDataset(rows), global_batch=given.sequences, accumulate=given.accumulate)
    ech.train(unit, loader, max_updates=2)


class Unit(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        (tokens,) = data
        return self.module(tokens), None

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-4, fused=True), None


if __name__ == "__main__":
    main()
