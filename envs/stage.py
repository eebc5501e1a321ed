"""Host arrays to device tensors, for simulators that live on the host."""

import numpy as np
import torch
from torch import Tensor


class Stage:
    """Host arrays to new device tensors, through one reused host buffer (pinned for CUDA)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._device = device
        self._host = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self._host.numpy()

    def send(self) -> Tensor:
        """What ``array`` holds, as a new tensor; do not write to ``array`` before that copy has happened."""
        return self._host.to(self._device, non_blocking=True, copy=True)


class Handover:
    """Arrays that a simulator makes anew at every step -> device tensors, by name: as they are on the CPU, through
    pinned buffers on CUDA.

    ``wait()``, then any number of ``send``, then ``sent()``: the next ``wait`` is for these copies to have happened.
    """

    def __init__(self, device: torch.device):
        self._device, self._stages = device, dict[str, Stage]()
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def send(self, name: str, array: np.ndarray) -> Tensor:
        """``array``, which nobody may write to again, as a tensor."""
        tensor = torch.from_numpy(array)
        if self._event is None:
            return tensor
        if name not in self._stages:
            self._stages[name] = Stage(tuple(array.shape), tensor.dtype, self._device)
        np.copyto(self._stages[name].array, array)
        return self._stages[name].send()

    def sent(self) -> None:
        if self._event is not None:
            self._event.record()
