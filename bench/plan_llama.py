"""A training script of the Llama family for `echelon plan`: nothing is learned from its data, which are zeros.

echelon plan --cluster 1x8xH100 bench/plan_llama.py --size 8B --context 8192 --sequences 16
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu.llama import SIZES, Llama, Size

import echelon as ech

# Of Llama 2 (arXiv 2307.09288) and Llama 3 (arXiv 2407.21783, table 3).
SHAPES = SIZES | {
    "2-7B": Size(width=4096, depth=32, heads=32, kv_heads=32, hidden=11_008, vocabulary=32_000, context=4096),
    "2-13B": Size(width=5120, depth=40, heads=40, kv_heads=40, hidden=13_824, vocabulary=32_000, context=4096),
    "70B": Size(width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256, context=8192),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="8B")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="of an update, on all ranks")
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--recompute", choices=("none", "blocks", "selective"), default="none")
    parser.add_argument("--compile", action="store_true", help="the blocks")
    given = parser.parse_args()
    ech.init_from_env()
    with ech.on_meta():
        model = Llama(replace(SHAPES[given.size], context=given.context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = torch.zeros(1, dtype=torch.int64).expand(2 * given.sequences, given.context)
    loader = ech.Loader(torch.utils.data.TensorDataset(rows), global_batch=given.sequences)
    compiled = "blocks" if given.compile else None
    model, optimizer, loader = ech.prepare(
        model, optimizer, loader, layout=given.layout, precision="bf16", recompute=given.recompute, compile=compiled
    )
    for (tokens,) in loader:
        with ech.window(model) as window:
            window.backward(model(tokens, tokens))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
