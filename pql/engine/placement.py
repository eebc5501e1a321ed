"""Placement of a run on hardware: devices, threads, precision of matrix products, memory."""

import contextlib
import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pql.config import Config, PlacementConfig
from pql.config.validate import resolve_device
from pql.engine.deadlines import start_limit, step_limit
from pql.engine.executors import Executor, Inline, Streams, Threads
from pql.errors import ConfigError


def replica_devices(config: Config) -> list[str]:
    """Return each replica's device: its placement, else the run's; for ``cuda`` without a number, all GPUs in turn."""
    count = config.replicas
    if config.placement.replicas is not None:
        return config.placement.replicas
    if count > 1 and resolve_device(config.device) == "cuda":
        return [f"cuda:{i % torch.cuda.device_count()}" for i in range(count)]
    return [config.device] * count


@dataclass(frozen=True)
class Machine:
    """Hardware of a run, or of one of its replicas.

    Attributes:
        devices: device of the simulator and "collector", and of each learner.
        threads: CPU threads: each worker's intra-op threads, and those of a multi-threaded "simulator".
    """

    devices: dict[str, torch.device]
    threads: dict[str, int]


def machine_of(config: Config, cores: int | None = None) -> Machine:
    """Return the devices and threads of a config.

    A worker has its own placement, else the run's device; a single learner has that of "v". Under ``lockstep`` each
    worker has all cores in turn, as does a simulator whose learners are on another device; ``replicas`` is the same
    with a replica's share of the cores. Under ``concurrent`` the V-learner and the simulator, which bound most ticks,
    get half the cores each. Another count changes the order of summation, hence bits, so counts are never chosen at
    run time.

    Args:
        cores: number of cores to divide; None: all that this process may use.
    Raises:
        ConfigError: a device that this machine does not have.
    """
    place, device, devices = config.placement, resolve_device(config.device), dict[str, torch.device]()
    wanted = {"collector": place.collector, "v": place.v_learner, "p": place.p_learner, "learner": place.v_learner}
    for worker in ("collector", *config.algo.learners):
        own = wanted[worker]
        found = torch.device(device if own is None else resolve_device(own))
        # One spelling per device, or cuda and cuda:0 would count as different devices.
        devices[worker] = torch.device("cuda", found.index or 0) if found.type == "cuda" else found
    cores = max(1, (cores or available_cores()) // config.replicas)
    alone = config.algo.schedule != "concurrent"
    one, half = (cores, cores) if alone else (1, max(1, cores // 2))
    default = {"collector": one, "v": half, "p": one, "simulator": half if device == "cpu" else cores}
    threads = {worker: getattr(place.threads, worker) or count for worker, count in default.items()}
    return Machine(devices, {**threads, "learner": threads["v"]})  # a single learner gets the threads of "v"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the CPU."""
    with contextlib.suppress(OSError, StopIteration):  # Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make_executor(place: PlacementConfig, devices: dict[str, torch.device]) -> Executor:
    """Create the executor that runs the workers of a concurrent tick."""
    on_cuda = all(d.type == "cuda" for d in devices.values())
    kind = place.executor if place.executor != "auto" else ("streams" if on_cuda else "threads")
    if kind == "streams":
        if not on_cuda:
            raise ConfigError("placement.executor", kind, "threads or inline where a worker sits on the CPU")
        return Streams(devices, place.watchdog_seconds)
    if kind == "threads":
        return Threads(list(devices), place.watchdog_seconds, place.start_seconds)
    return make_inline(place)


def make_inline(place: PlacementConfig) -> Inline:
    """Create an executor that runs the workers one after the other, under the placement's deadlines."""
    return Inline(step=step_limit(place), start=start_limit(place))


def set_precision(place: PlacementConfig) -> None:
    """Set the precision of float32 products and convolutions: TF32 on CUDA, oneDNN's reduced-precision mode on the CPU.

    The oneDNN mode rounds inputs to bfloat16 only on CPUs with matrix units (AMX); on other CPUs products stay float32
    and are faster than MKL's on some processors.
    """
    fast = place.matmul == "fast"
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = fast  # torch.export reads this older setting, and refuses one that differs from those below
    for backend in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
        backend.fp32_precision = "tf32" if fast else "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if fast else "ieee"  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv.fp32_precision = "bf16" if fast else "ieee"  # type: ignore[attr-defined]
    cudnn.deterministic = True  # else convolutions' gradients differ from run to run


def keep_freed_memory(most: int = 1 << 30) -> None:
    """Configure glibc's allocator to keep freed memory: otherwise an update's temporaries (about 0.5 MiB each) return
    to the kernel every time, and fault in again page by page. Without glibc this does nothing.

    Args:
        most: bytes that the end of each thread's heap keeps (heaps but the first have 64 MiB in all).
    """
    m_mmap_threshold, m_trim_threshold, m_top_pad = -3, -1, -2
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 32 << 20)  # the largest it accepts
        mallopt(m_trim_threshold, most)
        mallopt(m_top_pad, min(most // 2, 64 << 20))


def host_memory() -> int:
    """Return the bytes that this process can still allocate: reclaimable memory, within the container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):  # Linux: the page cache is reclaimable
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError):  # cgroup v2; "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, int(limit) - int(used))
    return free


def device_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a CUDA device, within the limit that it has set itself
    (``torch.cuda.set_per_process_memory_fraction``)."""
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    limit = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return max(0, min(free, limit - torch.cuda.memory_reserved(device)))


def available_bytes(device: torch.device) -> int:
    """Return the memory available for a replay, in bytes: free memory less a tenth."""
    if device.type == "cuda":
        free = device_memory(device)
    else:
        free = host_memory()
    return int(free * 0.9)
