"""What this machine has: memory we may use, and whether it computes in bfloat16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import torch

_CGROUP_LIMITS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def choose_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(wanted: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and on CPUs that multiply bfloat16 in hardware (AVX512_BF16, AMX), else float32.

    With the instructions a step of the embedded model takes a third of float32's time (`benchmarks/local_engine.py`);
    without them bfloat16 is emulated and slower. The flag decides, not a measurement, so that a machine always gives
    the same answers.
    """
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    return torch.bfloat16 if device.type == "cuda" or _multiplies_bfloat16() else torch.float32


def available_memory_bytes() -> int:
    """What can be allocated now without swapping, as far as the system tells; a container's limit counts."""
    free = _meminfo_available() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit_file, usage_file in _CGROUP_LIMITS:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(limit - usage, 0))
    return free


def _multiplies_bfloat16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such cgroup, or "max"
        return None
