"""MuJoCo Playground's environments (0.2), JAX to torch by DLPack: ``task=playground task.kwargs.env=CartpoleSwingup``.

Playground needs its own versions of JAX and MuJoCo, so it is best run in a separate Python environment:
``task.process.python``. A task's metrics, such as its reward terms, are logged.

Playground's wrappers reset in the same step and overwrite the final observation. Here a wrapper between its time limit
and its reset keeps the state before the reset (``Before``), so the final observation is always available. Environment i
always begins in the same state, unless ``full_reset`` draws new ones.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.envs.adapters.adapt import change
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step

GROUPS = {"state": "policy", "privileged_state": "critic"}


class PlaygroundVec:
    """``num_envs`` environments of one of Playground's tasks.

    Args:
        num_envs: N.
        device: device of the tensors; JAX must run on the same kind of device.
        env: its name in Playground's registry.
        settings: its configuration, by dotted name; ``{"impl": "jax"}`` on a machine without a GPU.
        episode_length: time limit in steps; None: the task's.
        full_reset: start every episode in a new state.
    Raises:
        ConfigError: no such environment or setting, a number out of range, or JAX is on another kind of device.
    """

    def __init__(
        self,
        num_envs: int = 1024,
        device: str | torch.device = "cuda:0",
        env: str = "CartpoleSwingup",
        settings: Mapping[str, Any] | None = None,
        episode_length: int | None = None,
        full_reset: bool = False,
    ):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would allocate most of a GPU's memory
        import jax

        self.jax, self.device = jax, torch.device(device)
        if (jax.default_backend() == "cpu") != (self.device.type == "cpu"):
            raise ConfigError("device", device, f"a device of the kind that JAX uses: {jax.default_backend()}")
        wrapped, step, limit, dt = load(env, settings or {}, episode_length, full_reset)
        self._reset, self._step = jax.jit(wrapped.reset), jax.jit(step)
        self._key: Any = jax.random.PRNGKey(0)
        self._state: Any = None
        self._n = num_envs
        obs = {k: ObsSpec(tuple(v.shape[1:]), v.dtype) for k, v in self.reset(0).items()}
        more: dict[str, Any] = {"final_obs": "always", "log": tuple(self._log()), "info": {"dt": dt}}
        more["deterministic"] = self.device.type == "cpu"
        self.spec = EnvSpec(env, num_envs, obs, Box(int(wrapped.action_size)), self.device, limit, **more)

        for _ in range(2):  # compile for both inputs: the state of a reset and that of a step
            self.step(torch.zeros(num_envs, self.spec.action.size))  # type: ignore[union-attr]

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._key = self.jax.random.PRNGKey(seed % 2**31)
        self._key, now = self.jax.random.split(self._key)
        self._state = self._reset(self.jax.random.split(now, self._n))
        return self._groups(self._state.obs)

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A]."""
        # Cloned: JAX may still read it when the caller writes its next action.
        given = self.jax.dlpack.from_dlpack(action.clamp(-1, 1).clone().contiguous())
        self._state, final, late = self._step(self._state, given)
        over = self._tensor(self._state.done) != 0
        truncated = (self._tensor(late) != 0) & over  # not truncated if the task terminated as well
        yes, seen, ends = torch.ones_like(over), self._groups(self._state.obs), self._groups(final)
        reward = self._tensor(self._state.reward).float()
        return Step(seen, reward, over & ~truncated, truncated, over, ends, yes, yes.clone(), self._log())

    def close(self) -> None:
        self._state = None

    def _tensor(self, array: Any) -> Tensor:
        """Copy to a tensor: JAX may reuse the memory of a view."""
        return torch.from_dlpack(array).to(self.device, copy=True)

    def _log(self) -> dict[str, Tensor]:
        return {name: self._tensor(value).float() for name, value in self._state.metrics.items()}

    def _groups(self, obs: Any) -> Obs:
        if not isinstance(obs, Mapping):
            return {"policy": self._tensor(obs)}
        return {GROUPS.get(str(name), str(name)): self._tensor(value) for name, value in obs.items()}


def load(
    name: str, settings: Mapping[str, Any], episode_length: int | None, full_reset: bool
) -> tuple[Any, Any, int, float]:
    """Load Playground's environment inside brax's wrappers.

    Returns:
        The environment; its step, (state, action) -> (state, final observation, truncation flag); the time limit;
        seconds per step.
    """
    from brax.envs.wrappers import training
    from mujoco_playground import registry, wrapper

    if name not in (known := list(registry.ALL_ENVS)):
        raise ConfigError("env", name, f"one of {', '.join(known)}{nearest(name, known)}")
    config = registry.get_default_config(name)
    change(config, settings)
    limit = int(config.episode_length if episode_length is None else episode_length)
    if limit < 1:
        raise ConfigError("episode_length", limit, "at least 1")
    bare = registry.load(name, config=config)

    class Before(wrapper.Wrapper):
        """Keeps the step's state before the outer reset replaces its observation (and, if full, its info)."""

        shown: Any = None

        def step(self, state: Any, action: Any) -> Any:
            self.shown = self.env.step(state, action)
            return self.shown

    before = Before(training.EpisodeWrapper(training.VmapWrapper(bare), limit, 1))
    wrapped = wrapper.BraxAutoResetWrapper(before, **({"full_reset": True} if full_reset else {}))

    def step(state: Any, action: Any) -> Any:
        after = wrapped.step(state, action)
        shown, before.shown = before.shown, None  # a tracer, which must not outlive the trace
        return after, shown.obs, shown.info["truncation"]

    return wrapped, step, limit, float(bare.dt)
