"""Gymnasium environments: N copies, in this process or one process each, or a vector environment of the user.

Runs on the host: every step waits for the actions, steps the environments and copies the results (for a CUDA device
through pinned buffers). Episode ends and observations follow ``pql.types.Step`` in both of gymnasium's autoreset modes.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from pql.contract.env import EnvSpec
from pql.contract.registry import takes
from pql.envs.adapters import gymnasium_host as host
from pql.envs.adapters.gymnasium_copies import GymnasiumSim, make_copies
from pql.envs.stage import Tensors, tensor_spec


class GymnasiumVec(Tensors):
    """``num_envs`` copies of a registered gymnasium environment.

    Observations become float32; bytes stay uint8. A Dict space needs a ``policy`` entry; its keys become observation
    groups. Actions in [-1, 1] are clamped and rescaled to the environment's bounds. ``reset(seed)`` gives each copy a
    seed from numpy's ``SeedSequence``. ``reset_where`` exists with gymnasium's own vector classes.

    Args:
        num_envs: N.
        device: where the tensors go; the environments run on the host.
        keywords: fields of :class:`GymnasiumSettings`.
    Raises:
        ConfigError: unknown id, unsupported space, or a value out of range.
    """

    @takes(host.GymnasiumSettings)
    def __init__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any):
        device = torch.device(device)
        # A forked child would inherit a CUDA context that it cannot use.
        spawn = device.type == "cuda"
        super().__init__(make_copies(host.GymnasiumSettings(**keywords), num_envs, "next_step", spawn), device)

    @classmethod
    def of(cls, envs: VectorEnv, device: str | torch.device = "cpu") -> "GymnasiumVec":
        """Return the environments of a ``gymnasium.vector.VectorEnv``, which this object owns. Raises ``ConfigError``:
        an unsupported space or autoreset mode."""
        self = cls.__new__(cls)
        spec = host.spec_of_vector(envs, "env", type(envs.unwrapped).__name__)
        Tensors.__init__(self, GymnasiumSim(envs, spec), torch.device(device))
        return self

    @classmethod
    def describe(cls, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec | None:
        """Return the ``EnvSpec`` of an environment with these arguments; makes one copy to read its spaces. None with
        ``vector_entry_point``, which may be a simulator that a process can hold only once."""
        settings = host.GymnasiumSettings(**keywords)
        host.check_settings(num_envs, settings)
        if settings.vectorization == host.OWN:
            return None
        return tensor_spec(host.spec_of_copies(settings, num_envs, "next_step"), device)

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Render copy ``index``, as :meth:`GymnasiumSim.render` does."""
        return self.sim.render(index, width, height)
