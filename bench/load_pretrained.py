"""What a rank reads and holds while a model's safetensors are loaded into shards, against loading all of it and sharding that.

    python bench/load_pretrained.py [--mb 1000] [--ranks 4] [--layout fsdp]

"Load, then shard" is `from_pretrained` on every rank, then torch's `fully_shard` by hand. Both run on the same folder, one after
the other, each in its own processes. Bytes are those that the kernel gave to read calls (`rchar` of /proc/self/io); memory is
the growth of the largest resident size (VmHWM) since before the load. Targets, for four shards: at most 0.3 of the bytes of
the files, at most 0.35 of the memory of the other way. Both are ratios, so they do not depend on the machine.

If the files have the model's own dtype, transformers 5 maps the tensors, and `fully_shard` copies a rank's part of each. So
"load, then shard" holds its shards and the pages that it touched. "Read, then shard" is `load_state_dict(load_file(...))`, which
holds the whole model.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from _timing import emit, machine, options, versions
from torch import nn

import echelon as ech

WIDTH, VOCABULARY = 1024, 16_000


class Tuned(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        return self.module(**data).loss, None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def config(megabytes: int, itemsize: int) -> tf.PretrainedConfig:
    """The configuration of a Llama of about this size in float32."""
    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * 3 * WIDTH
    layers = max(1, round((megabytes * 1e6 / itemsize - 2 * VOCABULARY * WIDTH) / layer))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": VOCABULARY}
    return tf.LlamaConfig(hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=layers, **heads)


def number(file: str, name: str) -> int:
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def straight(folder: str, layout: str) -> nn.Module:
    with ech.on_meta(on_device=True):
        module = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    unit = Tuned(module=module, layout=layout)
    ech.DistributedCheckpointSaver.restore(folder, unit)
    return unit.prepared.unwrapped


def load_then_shard(folder: str, layout: str) -> nn.Module:
    return _sharded(tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def read_then_shard(folder: str, layout: str) -> nn.Module:
    from safetensors.torch import load_file

    module = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for file in sorted(Path(folder).glob("*.safetensors")):
        module.load_state_dict(load_file(file), strict=False)
    return _sharded(module)


def _sharded(module: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    return module


WAYS = {"straight into shards": straight, "load, then shard": load_then_shard, "read, then shard": read_then_shard}


def measure(way: str, folder: str, layout: str) -> dict[str, float]:
    torch.set_num_threads(1)
    ech.init_from_env()
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    # Load a small model in the same way first, so that lazily loaded code does not count.
    WAYS[way](f"{folder}/small", layout)
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest resident size
    read, held, began = number("/proc/self/io", "rchar"), number("/proc/self/status", "VmRSS"), time.perf_counter()
    module = WAYS[way](f"{folder}/model", layout)
    seconds = time.perf_counter() - began
    return {
        "read": float(number("/proc/self/io", "rchar") - read),
        "peak": (number("/proc/self/status", "VmHWM") - held) * 1024.0,
        "seconds": seconds,
        "sum": float(sum(float(p.detach().double().sum().full_tensor()) for p in module.parameters())),  # type: ignore[attr-defined]
    }


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--mb", type=int, default=1000, help="of weights, in float32 (default 1000)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--dtype", default="bfloat16", help="of the files; the model is float32 (default bfloat16, as most are)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="echelon-load-"))
    try:
        for name, megabytes in (("small", 1), ("model", args.mb)):
            made = tf.AutoModelForCausalLM.from_config(
                config(megabytes, getattr(torch, args.dtype).itemsize), dtype=getattr(torch, args.dtype)
            )
            made.save_pretrained(folder / name, max_shard_size="400MB")
            del made
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        found = {way: ech.launch(measure, ranks=args.ranks, args=(way, str(folder), args.layout)) for way in WAYS}
    finally:
        shutil.rmtree(folder)
    ours, *others = (ranks[0]["sum"] for ranks in found.values())
    assert all(abs(ours - other) < 1e-6 * abs(other) for other in others), "the ways load different values"
    most = {way: {k: max(each[k] for each in ranks) for k in ranks[0]} for way, ranks in found.items()}
    bytes_ratio = most["straight into shards"]["read"] / size
    peak = most["straight into shards"]["peak"]
    memory_ratio, read_ratio = peak / most["load, then shard"]["peak"], peak / most["read, then shard"]["peak"]
    shards = size * 4 / getattr(torch, args.dtype).itemsize / args.ranks
    rows = [
        [
            way,
            f"{each['read'] / 1e6:.0f}" if way in list(WAYS)[:1] else "all, mapped",
            f"{each['peak'] / 1e6:.0f}",
            f"{each['seconds']:.1f}",
        ]
        for way, each in most.items()
    ]
    notes = [
        f"bytes: {bytes_ratio:.3f} of the files' {size / 1e6:.0f} MB (target 0.3 for 4 ranks)",
        f"memory: {memory_ratio:.3f} of loading, then sharding (target 0.35); {read_ratio:.3f} of reading, then sharding",
        f"the shards of a rank alone are {shards / 1e6:.0f} MB",
    ]
    facts = {
        "machine": machine(),
        "versions": versions("torch", "transformers", "safetensors"),
        "found": found,
        "bytes_ratio": bytes_ratio,
        "memory_ratio": memory_ratio,
        "memory_ratio_of_read": read_ratio,
        "size": size,
    }
    title = f"{size / 1e6:.0f} MB of safetensors into {args.ranks} ranks ({args.layout}), the rank with most of each"
    emit(args, title, ["way", "MB read", "MB held", "s"], rows, notes=notes, facts=facts)


if __name__ == "__main__":
    main()
