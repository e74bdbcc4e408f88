"""Peak rates of known devices, by torch's name for them. What is not listed is not guessed: then there is no MFU."""

from __future__ import annotations

import re

import torch

__all__ = ["peak_flops"]

_TYPES = {torch.float16: 0, torch.bfloat16: 0, "tf32": 1, torch.float32: 2}

# Dense matrix products in TFLOP/s: (16 bits, TF32, float32 without it), from the makers' data sheets, which mostly print twice as
# much, "with sparsity". The first pattern that fits counts. 0 is what a card does not have, or a sheet does not say.
_TFLOPS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"B200", (2250, 1100, 0)),  # NVIDIA HGX B200
    (r"H200 NVL", (835.5, 417.5, 60)),  # NVIDIA H200 NVL
    (r"H200|GH200", (989.4, 494.7, 66.9)),  # NVIDIA H200, GH200
    (r"H100 NVL", (835.5, 417.5, 60)),  # NVIDIA H100 NVL
    (r"H100 PCIe", (756, 378, 51.2)),  # NVIDIA H100 PCIe
    (r"H100( 80GB HBM3| SXM.*)?$", (989.4, 494.7, 66.9)),  # NVIDIA H100 SXM
    (r"H20$", (148, 74, 44)),  # NVIDIA H20
    (r"A100", (312, 156, 19.5)),  # NVIDIA A100, both forms
    (r"A30$", (165, 82, 10.3)),  # NVIDIA A30
    (r"A40$", (149.7, 74.8, 37.4)),  # NVIDIA A40
    (r"L40S", (362.05, 183, 91.6)),  # NVIDIA L40S
    (r"L40$", (181.05, 90.5, 90.5)),  # NVIDIA L40
    (r"L4$", (121, 60, 30.3)),  # NVIDIA L4
    (r"RTX 6000 Ada", (364.2, 182.1, 91.1)),  # NVIDIA RTX 6000 Ada
    (r"RTX A6000", (154.8, 77.4, 38.7)),  # NVIDIA RTX A6000
    (r"RTX 4090$", (165.2, 82.6, 82.6)),  # NVIDIA Ada whitepaper, table 2: with float32 accumulation
    (r"RTX 3090$", (71, 35.6, 35.6)),  # NVIDIA GA102 whitepaper, table 2: the same
    (r"V100-SXM", (125, 0, 15.7)),  # NVIDIA V100; no bfloat16
    (r"V100-PCIE", (112, 0, 14)),
    (r"T4$", (65, 0, 8.1)),  # NVIDIA T4; no bfloat16
    (r"MI300X", (1307.4, 653.7, 163.4)),  # AMD Instinct MI300X
)
_PART = re.compile(r"\bMIG\b|\bGRID\b|-\d+[A-Z]$")
_WITHOUT_BF16 = re.compile(r"V100|T4$")


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense matrix products in a type; in float32 those of TF32 where `torch.set_float32_matmul_precision` allows it.

    None for a device or type that is not listed, and for a part of a card (MIG, or a virtual one such as "GRID A100D-1-20C").
    """
    if _PART.search(device_name) or (dtype is torch.bfloat16 and _WITHOUT_BF16.search(device_name)):
        return None
    kind: torch.dtype | str = dtype
    if dtype is torch.float32 and _allows_tf32():
        kind = "tf32"
    column = _TYPES.get(kind)
    if column is None:
        return None
    for pattern, tflops in _TFLOPS:
        if re.search(rf"(?<![A-Z0-9]){pattern}", device_name):
            return tflops[column] * 1e12 or (tflops[2] * 1e12 if kind == "tf32" else 0) or None
    return None


def _allows_tf32() -> bool:
    """By either of torch's settings, which refuse to be read once the other was used."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"
