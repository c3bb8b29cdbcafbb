"""GPUS: what the planner knows of each device.

Memory (decimal GB, as printed; drivers show up to 6 % more, ECC cards a little less), memory bandwidth, dense FP16 or BF16 tensor
FLOPS with FP32 accumulation, dense INT8 tensor OPS (datasheets print twice as much, "with sparsity") and compute capability.
Sources, per row: NVIDIA's datasheets of H100 SXM, H200 SXM, A100 80GB SXM, L40S, L4 and A10; NVIDIA's Ada and Ampere GA102
whitepapers for RTX 4090 and RTX 3090; the Blackwell architecture brief for HGX B200 (1000 W). Compute capabilities:
developer.nvidia.com/cuda-gpus. `cpu` is no measurement but an assumption, for `--measured` to replace: a desktop with 64 GB in two
channels of DDR5-4800 (76.8 GB/s) and 8 AVX2 cores at 4 GHz.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One device. bytes, bytes/s, operations/s; a multiplication and an addition are two operations."""

    name: str
    label: str
    memory: float
    bandwidth: float
    flops: float
    int8_ops: float
    capability: str | None  # None: not CUDA

    @property
    def is_cpu(self) -> bool:
        return self.capability is None


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", "NVIDIA H100 SXM 80 GB", 80e9, 3.35e12, 989e12, 1979e12, "9.0"),
        Gpu("h200", "NVIDIA H200 SXM 141 GB", 141e9, 4.8e12, 989e12, 1979e12, "9.0"),
        Gpu("a100-80", "NVIDIA A100 SXM 80 GB", 80e9, 2.039e12, 312e12, 624e12, "8.0"),
        Gpu("l40s", "NVIDIA L40S 48 GB", 48e9, 864e9, 362e12, 733e12, "8.9"),
        Gpu("l4", "NVIDIA L4 24 GB", 24e9, 300e9, 121e12, 242e12, "8.9"),
        Gpu("a10", "NVIDIA A10 24 GB", 24e9, 600e9, 125e12, 250e12, "8.6"),
        Gpu("rtx4090", "NVIDIA RTX 4090 24 GB", 24e9, 1.008e12, 165.2e12, 660.6e12, "8.9"),
        Gpu("rtx3090", "NVIDIA RTX 3090 24 GB", 24e9, 936e9, 71e12, 284e12, "8.6"),
        Gpu("b200", "NVIDIA B200 180 GB", 180e9, 8e12, 2250e12, 4500e12, "10.0"),
        Gpu("cpu", "CPU (assumed: 64 GB, 77 GB/s, 1 TFLOPS)", 64e9, 76.8e9, 1e12, 2e12, None),
    )
}

DRIVER_NAMES = {
    "h100": ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM2e"),
    "h200": ("NVIDIA H200",),
    "a100-80": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    "l40s": ("NVIDIA L40S",),
    "l4": ("NVIDIA L4",),
    "a10": ("NVIDIA A10",),
    "rtx4090": ("NVIDIA GeForce RTX 4090",),
    "rtx3090": ("NVIDIA GeForce RTX 3090",),
    "b200": ("NVIDIA B200",),
}
"""What nvidia-smi calls each, and other cards of its memory: for that they stand in, not for speed."""


def find_gpu(driver_name: str) -> Gpu | None:
    """Return the device of a name that nvidia-smi prints."""
    return next((GPUS[name] for name, known in DRIVER_NAMES.items() if driver_name in known), None)
