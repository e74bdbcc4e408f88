"""Peak memory and seconds of a language model's last layer with its loss, forward and backward: each way in a process of its own.

python bench/vocabulary_loss.py [--rows 4096 --words 32000 --features 512]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

WAYS = ("torch", "torch, chunked", "echelon", "echelon, 128", "echelon, 2048")


def measure(way: str, rows: int, words: int, features: int) -> str:
    import psutil
    import torch
    import torch.nn.functional as F

    import echelon as ech

    torch.manual_seed(0)
    hidden = torch.randn(rows, features, requires_grad=True)
    weight = (torch.randn(words, features) * 0.05).requires_grad_()
    target = torch.randint(0, words, (rows,))
    name, _, chunk = way.partition(", ")

    def run(n: int) -> None:
        if way == "torch":
            loss = F.cross_entropy(F.linear(hidden[:n], weight), target[:n])
        elif name == "torch":
            loss = F.linear_cross_entropy(hidden[:n], weight, target[:n], options=torch.nn.LinearCrossEntropyOptions())
        else:
            chunk_tokens = int(chunk) if chunk else None
            loss = ech.nn.linear_cross_entropy(hidden[:n], weight, target[:n], chunk_tokens=chunk_tokens)
        loss.backward()
        hidden.grad = weight.grad = None

    run(8)  # loads code and libraries
    before = psutil.Process().memory_info().rss
    begin = time.perf_counter()
    run(rows)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return f"{way:16s} {peak / 2**20:7.0f} MiB  {seconds:6.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 4096), ("words", 32_000), ("features", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        print(measure(args.way, args.rows, args.words, args.features))
        return
    for way in WAYS:
        subprocess.run([sys.executable, *sys.argv, "--way", way], check=True)


if __name__ == "__main__":
    main()
