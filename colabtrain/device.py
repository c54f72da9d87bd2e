"""Leaf: what the machine has, and what an error says of it. Importing this loads no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BFLOAT16_CAPABILITY = (8, 0)  # Ampere; older cards only emulate it, whatever torch.cuda.is_bf16_supported() says
OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA, HIP and MPS, raised by the allocator or by the driver
    "can't allocate memory",  # the CPU's allocator
    "not enough memory: you tried to allocate",  # the same on Windows
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cublas_status_not_initialized",  # a handle found no room
    "cudnn_status_not_initialized",
)
DEAD_DEVICE_TEXTS = ("device-side assert", "cuda error", "hip error", "cublas_status_execution_failed", "cudnn_status_execution_failed")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it was raised from, what that was raised from, and so on."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may help: an allocator's refusal in any of its shapes, or an error raised from one."""
    return any(isinstance(cause, MemoryError) or _says(cause, OUT_OF_MEMORY_TEXTS) for cause in causes(error))


def is_dead(error: BaseException) -> bool:
    """Whether the accelerator is lost to this process (a device-side assert, an illegal access): touch it no more."""
    return not is_out_of_memory(error) and any(_says(cause, DEAD_DEVICE_TEXTS) for cause in causes(error))


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    # torch.OutOfMemoryError and torch.AcceleratorError are RuntimeErrors
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def forget(error: BaseException) -> None:
    """Take from `error` and all it was raised from what would keep the tensors of the failed call alive."""
    for cause in list(causes(error)):
        cause.__traceback__ = cause.__cause__ = cause.__context__ = None


def forget_last_error(package: str) -> None:
    """Drop what the interpreter and IPython keep of the last error, where its frames passed through `package`.

    They keep it apart: after a syntax error in a cell, IPython still has the traceback of the error before.
    """
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    formatter: Any = getattr(shell, "InteractiveTB", None)
    errors: list[Any] = [getattr(sys, "last_value", None), getattr(getattr(shell, "last_execution_result", None), "error_in_exec", None)]
    ours = [error for error in errors if error is not None and _kept(package, error)]
    if _kept(package, None, getattr(formatter, "tb", None)):
        formatter.tb = None
    if errors[0] in ours or _kept(package, None, getattr(sys, "last_traceback", None)):
        for name in ("last_exc", "last_value", "last_type", "last_traceback"):
            sys.__dict__.pop(name, None)
    for error in ours:
        forget(error)


def _kept(package: str, error: BaseException | None, trace: TracebackType | None = None) -> bool:
    """Whether `error`, what it was raised from, or `trace` holds frames of `package`."""
    traces = [trace, *(cause.__traceback__ for cause in causes(error))]
    return any(
        frame.f_globals.get("__name__", "").partition(".")[0] == package for trace in traces for frame, _ in traceback.walk_tb(trace)
    )


def release_memory() -> None:
    """Give back what nothing holds any more: cycles to Python, cached blocks to the accelerator's driver, the rest to the system."""
    gc.collect()
    if _cuda_in_use():
        sys.modules["torch"].cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc keeps what a thread freed, tensors of megabytes too
        trim(0)


def accelerator_bytes() -> int:
    """Bytes of the accelerator's memory that tensors hold now; 0 where there is none."""
    return int(sys.modules["torch"].cuda.memory_allocated()) if _cuda_in_use() else 0


def free_bytes(device: torch.device) -> int | None:
    """Bytes that new tensors on `device` may take; None where that is not known."""
    if device.type != "cuda":
        return None
    import torch

    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _cuda_in_use() -> bool:
    torch = sys.modules.get("torch")  # asking an idle card would take memory on it
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


def machine() -> dict[str, str | int]:
    """What bit-identical numbers depend on beside the run's own settings; saved with each checkpoint."""
    import torch

    described: dict[str, str | int] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if _cuda_in_use():
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
    if _cuda_in_use():
        memory["gpu"] = accelerator_bytes()
        memory["gpu_peak"] = int(sys.modules["torch"].cuda.max_memory_allocated())
    return memory


def host_bytes_available() -> int | None:
    """Bytes of memory that a new allocation of this process may take on the host; None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def sync_to_disk(path: Path) -> None:
    """Return when what is in the file, or which names are in the folder, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; its renames are in the journal
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
