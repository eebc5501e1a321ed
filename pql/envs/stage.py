"""Simulators on the host as environments of tensors: what steps in NumPy arrays is written once, for learners and for
remote actors without torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.contract.shapes import FLAGS
from pql.types import Obs, Step


class Handover:
    """Converts arrays that a simulator allocates at every step to device tensors, by name: without a copy on the CPU,
    through pinned buffers on CUDA. Each call waits for the copies of the one before."""

    def __init__(self, device: torch.device):
        self._device, self._pinned = device, dict[str, Tensor]()
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Convert arrays, or dicts of them, which must not be written to again; one that comes twice is copied once."""
        sent: dict[int, Tensor] = {}

        def send(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {k: send(f"{name}.{k}", v) for k, v in value.items()}
            if id(value) not in sent:
                sent[id(value)] = self._send(name, value)
            return sent[id(value)]

        if self._event is None:
            return {name: send(name, value) for name, value in fields.items()}
        self._event.synchronize()
        found = {name: send(name, value) for name, value in fields.items()}
        self._event.record()
        return found

    def _send(self, name: str, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._event is None:
            return tensor
        if name not in self._pinned:
            self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._pinned[name].copy_(tensor).to(self._device, non_blocking=True, copy=True)


class Tensors:
    """``VecEnv`` of a NumPy simulator (``pql.contract.plain``), whose arrays [N, ...] become tensors on ``device``.

    ``reset_where`` exists if the simulator has it. The simulator returns new arrays from each call.
    """

    def __init__(self, sim: Any, device: torch.device):
        self.sim, self.spec, self._hand = sim, tensor_spec(sim.spec, device), Handover(device)
        self.reset_where: Callable[[Tensor], Obs]
        if hasattr(sim, "reset_where"):
            self.reset_where = lambda mask: self.shown(sim.reset_where(mask.cpu().numpy()))

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments; return their observations, [N, ...]."""
        return self.shown(self.sim.reset(seed))

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A] or [N]."""
        return self.stepped(self.sim.step(action.detach().cpu().numpy()))

    def close(self) -> None:
        self.sim.close()

    def shown(self, obs: Mapping[str, np.ndarray]) -> Obs:
        """Convert observations [N, ...]."""
        return self._hand({"obs": obs})["obs"]

    def stepped(self, step: Any) -> Step:
        """Convert a step with fields of [N, ...]."""
        flags = np.stack([getattr(step, name) for name in FLAGS])  # one copy instead of five
        rest = {k: v for k, v in step._asdict().items() if k not in FLAGS}
        sent = self._hand({"flags": flags, **rest})
        return Step(**dict(zip(FLAGS, sent.pop("flags").unbind(0), strict=True)), **sent)


def tensor_spec(spec: Any, device: str | torch.device, **changes: Any) -> EnvSpec:
    """Return the ``EnvSpec`` of a NumPy simulator's tensors on ``device``, with other ``changes``."""
    obs = {k: replace(s, dtype=getattr(torch, str(s.dtype))) for k, s in spec.obs.items()}
    return replace(spec, obs=obs, device=torch.device(device), **changes)
