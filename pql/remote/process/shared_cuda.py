"""Device memory shared by two processes, through CUDA IPC handles of the driver library.

Both processes use this file, with any versions of Python (3.8 or newer) and torch. The writer waits for the device
before it wakes the other process (:func:`wait`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class Handle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]  # as ctypes reads it


def usable(device: Any) -> bool:
    """Return True if this process can share tensors on ``device``; the other process checks for itself."""
    return getattr(device, "type", None) == "cuda"


def allocate(size: int, device: Any) -> tuple[int, str]:
    """Allocate ``size`` bytes on ``device``; return the address and the handle for :func:`attach` in another process.
    Raises ``OSError``: the driver cannot share memory, on virtualised or partitioned devices for example."""
    address, handle = ctypes.c_uint64(), Handle()
    with _driver(device) as driver:
        _check(driver, driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        status = driver.cuIpcGetMemHandle(ctypes.byref(handle), address)
        if status:
            driver.cuMemFree_v2(address)
        _check(driver, status)
    return address.value, bytes(handle).hex()


def attach(handle: str, device: Any) -> int:
    """Return the address of memory that another process allocated, valid until that process frees it or ends. Raises
    ``OSError``: error of the driver."""
    address, given = ctypes.c_uint64(), Handle.from_buffer_copy(bytes.fromhex(handle))
    with _driver(device) as driver:
        _check(driver, driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS)))
    return address.value


def free(address: int, device: Any) -> None:
    """Free memory of :func:`allocate`, which neither process may use any more."""
    with _driver(device) as driver:
        driver.cuMemFree_v2(ctypes.c_uint64(address))


def shared_tensors(address: int, places: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Views of the memory at ``address``: name -> tensor. ``places``: name -> (NumPy type, shape, offset)."""
    import numpy as np
    import torch

    found = {}
    for name, (dtype, shape, offset) in places.items():
        size = int(np.prod(shape, dtype=np.int64))
        view = _View(address + offset, tuple(shape), np.dtype(dtype).str)
        found[name] = torch.as_tensor(view, device=device) if size else torch.empty(shape, device=device)
    return found


def wait(device: Any) -> None:
    """Wait for the work on the current stream of ``device``."""
    import torch

    torch.cuda.current_stream(device).synchronize()


class _View:
    """Memory with CUDA's array interface. A tensor made from it keeps this object alive but does not own the memory."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype, "version": 2}


@contextlib.contextmanager
def _driver(device: Any) -> Iterator[Any]:
    """Yield the driver library, with torch's context on ``device`` current."""
    import torch

    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # the first use makes the context
        yield ctypes.CDLL("libcuda.so.1")


def _check(driver: Any, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise OSError((name.value or b"CUDA error %d" % status).decode())
