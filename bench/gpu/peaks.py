"""Peak rates of known cards, by torch's name for them. What is not known is not guessed: then no MFU is given."""

from __future__ import annotations

__all__ = ["peak_flops"]

# Dense bf16 (fp16 where a card has no bf16), TFLOP/s, from NVIDIA's data sheets. The first name that is contained counts.
_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of bf16 matrix products without sparsity; None for a name that is not listed, or a part of a card (MIG)."""
    words = device_name.replace("-", " ").split()
    for name, tflops in _TFLOPS:
        if all(word in words for word in name.split()) and "MIG" not in words:
            return tflops * 1e12
    return None
