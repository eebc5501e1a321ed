"""MuJoCo Playground's environments (0.2), JAX to torch by DLPack: ``task=playground task.kwargs.env=CartpoleSwingup``.

Playground needs its own versions of JAX and MuJoCo, so it is best run in a separate Python environment:
``task.process.python``. A task's metrics, such as its reward terms, are logged.

Playground's wrappers reset in the same step and overwrite the final observation. Here a wrapper between its time limit
and its reset keeps the state before the reset (``Before``), so the final observation is always available. Environment i
always begins in the same state, unless ``full_reset`` draws new ones.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.envs.adapters.adapt import change
from pql.envs.adapters.quiet import quiet
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step

MENAGERIE = "https://github.com/google-deepmind/mujoco_menagerie"
DRAWN = ("qpos", "qvel", "mocap_pos", "mocap_quat", "xfrc_applied")  # the part of a state that an image shows
GROUPS = {"state": "policy", "privileged_state": "critic"}


class PlaygroundVec:
    """``num_envs`` environments of one of Playground's tasks.

    Args:
        num_envs: N.
        device: device of the tensors; JAX must run on the same kind of device.
        env: its name in Playground's registry.
        settings: its configuration, by dotted name. Without a GPU, ``impl`` is ``jax`` unless it is given.
        episode_length: time limit in steps; None: the task's.
        full_reset: start every episode in a new state.
        randomize: draw each environment's model once, with the registry's domain randomiser for this task; a number
            other than 1 draws others.
        render_mode: ``rgb_array`` makes ``render`` work without a screen.
    Raises:
        ConfigError: no such environment, setting or randomiser, a number out of range, models that cannot be
            downloaded, or JAX is on another kind of device.
    """

    def __init__(
        self,
        num_envs: int = 1024,
        device: str | torch.device = "cuda:0",
        env: str = "CartpoleSwingup",
        settings: Mapping[str, Any] | None = None,
        episode_length: int | None = None,
        full_reset: bool = False,
        randomize: bool | int = False,
        render_mode: str | None = None,
    ):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would allocate most of a GPU's memory
        if render_mode is not None and sys.platform.startswith("linux"):
            os.environ.setdefault("MUJOCO_GL", "egl")
        import jax

        self.jax, self.device = jax, torch.device(device)
        if (jax.default_backend() == "cpu") != (self.device.type == "cpu"):
            raise ConfigError("device", device, f"a device of the kind that JAX uses: {jax.default_backend()}")
        keys = jax.random.split(jax.random.PRNGKey(int(randomize)), num_envs) if randomize else None
        usual = {"impl": "jax"} if self.device.type == "cpu" else {}  # Warp compiles for minutes there
        with quiet():
            wrapped, step, limit, dt = load(Wanted(env, settings or {}, usual, episode_length, full_reset, keys))
        self._reset, self._step, self._restart = jax.jit(wrapped.reset), jax.jit(step), jax.jit(self._replaced)
        self._draw = wrapped.render
        self._key: Any = jax.random.PRNGKey(0)
        self._state: Any = None
        self._n = num_envs
        obs = {k: ObsSpec(tuple(v.shape[1:]), v.dtype) for k, v in self.reset(0).items()}
        info = {"dt": dt, "time_limit": "episode_length"}
        more: dict[str, Any] = {"final_obs": "always", "log": tuple(self._log()), "info": info}
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

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` [N] bool, in new states; return all observations."""
        if mask.any():
            self._key, now = self.jax.random.split(self._key)
            chosen = self.jax.dlpack.from_dlpack(mask.int())
            self._state = self._restart(self._state, self.jax.random.split(now, self._n), chosen)
        return self._groups(self._state.obs)

    def _replaced(self, state: Any, keys: Any, mask: Any) -> Any:
        """Return ``state`` with new environments where ``mask`` [N] is above 0."""

        def pick(new: Any, old: Any) -> Any:
            if new.shape[:1] != mask.shape:
                return old
            return self.jax.numpy.where(mask.reshape(-1, *(1,) * (new.ndim - 1)) > 0, new, old)

        return self.jax.tree.map(pick, self._reset(keys), state)

    def state_dict(self) -> dict[str, Any]:
        """Return the key and all arrays of the simulator's state; ``uint32`` becomes ``int32`` of the same bits."""
        arrays = [np.array(leaf) for leaf in self.jax.tree.leaves((self._key, self._state))]
        signed = (array.view(np.int32) if array.dtype == np.uint32 else array for array in arrays)
        return {"arrays": [torch.from_numpy(array) for array in signed]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        leaves, structure = self.jax.tree.flatten((self._key, self._state))
        saved = [given.cpu().numpy() for given in state["arrays"]]
        kinds = [np.asarray(leaf).dtype for leaf in leaves]
        bits = [array.view(kind) if kind == np.uint32 else array for array, kind in zip(saved, kinds, strict=True)]
        self._key, self._state = self.jax.tree.unflatten(structure, [self.jax.device_put(array) for array in bits])

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Return an image of environment ``index``, uint8 [H, W, 3], by default of 320 x 240 pixels. Randomised models
        are shown as the nominal one."""
        row = {name: np.asarray(getattr(self._state.data, name))[index] for name in DRAWN}
        return np.asarray(
            self._draw(SimpleNamespace(data=SimpleNamespace(**row)), height or 240, width or 320), np.uint8
        )

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


class Wanted(NamedTuple):
    """Arguments of :func:`load`.

    Attributes:
        settings: changes of the task's configuration.
        usual: the same, where the user has not set them and the configuration has them.
        keys: random keys, one for the model of each environment; None: all have the task's.
    """

    name: str
    settings: Mapping[str, Any]
    usual: Mapping[str, Any]
    episode_length: int | None
    full_reset: bool
    keys: Any


def load(wanted: Wanted) -> tuple[Any, Any, int, float]:
    """Load Playground's environment inside brax's wrappers.

    Returns:
        The environment; its step, (state, action) -> (state, final observation, truncation flag); the time limit;
        seconds per step.
    """
    from brax.envs.wrappers import training
    from mujoco_playground import registry, wrapper

    name = wanted.name
    if name not in (known := list(registry.ALL_ENVS)):
        raise ConfigError("env", name, f"one of {', '.join(known)}{nearest(name, known)}")
    config = registry.get_default_config(name)
    change(config, wanted.usual, known_only=True)
    change(config, wanted.settings)
    limit = int(config.episode_length if wanted.episode_length is None else wanted.episode_length)
    if limit < 1:
        raise ConfigError("episode_length", limit, "at least 1")
    bare = with_models(name, lambda: registry.load(name, config=config))
    each: Any = training.VmapWrapper
    if (keys := wanted.keys) is not None:
        if (draw := registry.get_domain_randomizer(name)) is None:
            raise ConfigError("randomize", True, f"false: the registry has no domain randomiser for {name}")
        each = lambda env: wrapper.BraxDomainRandomizationVmapWrapper(env, lambda model: draw(model, keys))  # noqa: E731

    class Before(wrapper.Wrapper):
        """Keeps the step's state before the outer reset replaces its observation (and, if full, its info)."""

        shown: Any = None

        def step(self, state: Any, action: Any) -> Any:
            self.shown = self.env.step(state, action)
            return self.shown

    before = Before(training.EpisodeWrapper(each(bare), limit, 1))
    wrapped = wrapper.BraxAutoResetWrapper(before, **({"full_reset": True} if wanted.full_reset else {}))

    def step(state: Any, action: Any) -> Any:
        after = wrapped.step(state, action)
        shown, before.shown = before.shown, None  # a tracer, which must not outlive the trace
        return after, shown.obs, shown.info["truncation"]

    return wrapped, step, limit, float(bare.dt)


def with_models(name: str, load: Callable[[], Any]) -> Any:
    """Return what ``load`` returns. Raises ``ConfigError``: it could not download the models of robots, in one line
    that says from where and to where."""
    try:
        return load()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        place: Any = importlib.import_module("mujoco_playground._src.mjx_env")
        if place.MENAGERIE_PATH.exists():
            raise
        path, commit = place.MENAGERIE_PATH, place.MENAGERIE_COMMIT_SHA
        how = f"git clone {MENAGERIE} {path} && git -C {path} checkout {commit}"
        raise ConfigError(
            "env", name, f"the models of mujoco_menagerie, whose download failed ({error}): {how}"
        ) from error
