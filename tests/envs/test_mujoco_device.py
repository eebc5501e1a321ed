"""Requirements of the MuJoCo tasks on a GPU, tested without one: the engine that steps, no transfer to the device in a
step, and no float32 matrix product, which may have a mantissa of 10 bits there."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from conftest import NoNarrowProducts
from mujoco_runs import ROBOT_OF, build, random_actions, task

from pql.envs.mujoco import hopper
from pql.envs.mujoco.engine import BatchEngine, Rows
from pql.envs.mujoco.engines import EngineOptions, choose, make_engine
from pql.envs.mujoco.task import load_model
from pql.errors import ConfigError, PqlWarning

pytestmark = pytest.mark.usefixtures("scratch")


def test_where_warp_is_missing_c_steps_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pql.envs.mujoco.engines.importlib.util.find_spec", lambda name: None)
    assert choose("auto", torch.device("cuda")) == choose("auto", torch.device("cpu")) == "batch"
    with pytest.raises(ConfigError, match=r"engine=warp: expected batch; .*'mujoco_warp' is not installed: pip"):
        hopper.describe(2, engine="warp")
    with pytest.warns(PqlWarning, match=r"physics runs on the CPU: .*pip install 'pql-rl\[warp\]'"):
        engine = make_engine(hopper.task, load_model(hopper.task), 2, torch.device("cuda"), EngineOptions(1))
    assert isinstance(engine, BatchEngine)


class NothingSent(TorchFunctionMode):
    """Refuses what a GPU would be sent, and waited for: an index that is a list, values that are no tensors yet."""

    MADE = (torch.tensor, torch.as_tensor, torch.from_numpy)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list | np.ndarray) for part in index), index
        assert func not in self.MADE, func
        return func(*args, **(kwargs or {}))


TASKS = [*map(task, ("reacher", "pusher", "humanoid", "isaac_ant", "isaac_humanoid", "ballbalance_pixels", *ROBOT_OF))]


@pytest.mark.parametrize("name", TASKS)
def test_a_step_sends_nothing(name: str) -> None:
    env = build(name, 2, max_episode_steps=2)
    env.reset(seed=0)
    actions = random_actions(env, 3).unbind(0)
    with NothingSent():
        for action in actions:
            env.step(action)


class Narrow(Mapping[str, Tensor]):
    """Fields as a GPU has them: float32."""

    def __init__(self, wide: Mapping[str, Tensor]):
        self._wide = wide

    def __getitem__(self, name: str) -> Tensor:
        return self._wide[name].float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._wide)

    def __len__(self) -> int:
        return len(self._wide)


class Single(BatchEngine):
    """C, but what it is given and shows is float32."""

    dtype = torch.float32

    def __init__(self, model: mujoco.MjModel, num_envs: int, outputs: Any):
        super().__init__(model, num_envs, 1, outputs)
        self._wide = self.fields
        self.fields: Any = Narrow(self._wide)

    def step(self, ctrl: Tensor, substeps: int) -> None:
        self._wide["ctrl"].copy_(ctrl)
        self._guarded(lambda: self.batch.step(nstep=substeps))

    def reset(self, rows: Rows, qpos: Tensor, qvel: Tensor) -> None:
        super().reset(rows, qpos.double(), qvel.double())


@pytest.mark.parametrize("name", TASKS)
def test_a_step_multiplies_no_float32_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pql.envs.mujoco.env.make_engine", lambda task, model, n, *rest: Single(model, n, task.outputs))
    env = build(name, 2, max_episode_steps=2)
    env.reset(seed=0)
    actions = random_actions(env, 3).unbind(0)
    with NoNarrowProducts():
        for action in actions:
            env.step(action)
