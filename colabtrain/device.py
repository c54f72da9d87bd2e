"""Leaf: what the machine has. Nothing here changes its state."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BFLOAT16_CAPABILITY = (8, 0)  # Ampere; older cards only emulate it, whatever torch.cuda.is_bf16_supported() says


def machine() -> dict[str, str | int]:
    """What bit-identical numbers depend on beside the run's own settings; saved with each checkpoint."""
    import torch

    described: dict[str, str | int] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # asking an idle card would take memory on it
        described["gpu"] = torch.cuda.get_device_name()
    return described


def precision(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the large matrix products, dtype of everything else) that suits `device`.

    bfloat16 throughout from compute capability 8.0 on; below, float16 products in a float32 residual stream, because
    Gemma 3n's activations exceed float16's 65,504; float32 throughout on anything but CUDA.
    """
    import torch

    if device.type != "cuda":
        return torch.float32, torch.float32
    if torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY:
        return torch.bfloat16, torch.bfloat16
    return torch.float16, torch.float32


def memory_bytes() -> dict[str, int]:
    """Memory of this process now and at its peak: ram, ram_peak, and gpu, gpu_peak where CUDA is in use."""
    memory = _ram_bytes()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        memory["gpu"] = int(torch.cuda.memory_allocated())
        memory["gpu_peak"] = int(torch.cuda.max_memory_allocated())
    return memory


def _ram_bytes() -> dict[str, int]:
    try:
        import resource
    except ImportError:  # Windows has no such gauge in the standard library
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    memory = {"ram_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    statm = Path("/proc/self/statm")
    if statm.exists():
        memory["ram"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return memory
