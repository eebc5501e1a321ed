"""Transfer of host arrays to device tensors, for simulators on the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.types import Obs, Step


class Stage:
    """Copies host arrays to new device tensors through one reused host buffer (pinned for CUDA)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._device = device
        self._host = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self._host.numpy()

    def send(self) -> Tensor:
        """Copy ``array`` to a new device tensor; do not write to ``array`` before the copy has finished."""
        return self._host.to(self._device, non_blocking=True, copy=True)


class Handover:
    """Converts arrays that a simulator allocates at every step to device tensors, by name: without a copy on the CPU,
    through pinned buffers on CUDA. Call ``wait()``, then any number of ``send``, then ``sent()``; the next ``wait``
    waits for these copies."""

    def __init__(self, device: torch.device):
        self._device, self._stages = device, dict[str, Stage]()
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def send(self, name: str, array: np.ndarray) -> Tensor:
        """Convert ``array``, which must not be written to again, to a device tensor of the same shape."""
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


class Tensors:
    """``VecEnv`` of a NumPy simulator (``pql.contract.plain``), whose arrays [N, ...] become tensors on ``device``."""

    def __init__(self, env: Any, device: torch.device):
        self.env, self.spec = env, replace(env.spec, device=device)
        self._hand = Handover(device)

    def reset(self, seed: int | None = None) -> Obs:
        return self._sent({"obs": self.env.reset(seed)})["obs"]

    def step(self, action: Tensor) -> Step:
        return Step(**self._sent(self.env.step(action.cpu().numpy())._asdict()))

    def close(self) -> None:
        self.env.close()

    def _sent(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert arrays, or dicts of them, to tensors."""
        self._hand.wait()
        out = {
            name: {k: self._hand.send(f"{name}.{k}", v) for k, v in value.items()}
            if isinstance(value, dict)
            else self._hand.send(name, value)
            for name, value in fields.items()
        }
        self._hand.sent()
        return out
