"""HalfCheetah, Hopper, Walker2d and Ant with the definitions of Gymnasium's ``-v5`` environments (default arguments).

A ``Task`` is a model plus pure torch functions over batched fields: no loop over environments, no host read, any
device and dtype. They know nothing of episodes or of the engine that fills the fields.
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields

Terms = dict[str, Tensor]
"""Reward terms by name, each [N]; the reward is their sum."""


@dataclass(frozen=True)
class Task:
    """One robot and what is asked of it.

    Attributes:
        xml: model file of the installed gymnasium package.
        frame_skip: physics steps per env step; ``dt`` is the env step in seconds.
        terms: names of the reward terms, in the order ``reward`` gives them.
        noise: scale of the start state's perturbation. Coordinates are uniform in +-noise around the model's
            default; velocities likewise, or normal with this standard deviation where ``normal_velocity``.
        outputs: derived fields that the functions read.
        observe: fields -> [N, obs_size].
        position: fields -> [N] metres along x; its change over ``dt`` is the forward velocity.
        reward: fields (``ctrl`` as applied), forward velocity [N] in m/s, healthy [N] bool -> terms.
        healthy: fields -> [N] bool; False terminates. None: the task never terminates.
        edit: change to the model before it is compiled.
        ctrl_limit: the model's controls are within +-this.
    """

    name: str
    xml: str
    frame_skip: int
    dt: float
    obs_size: int
    action_size: int
    terms: tuple[str, ...]
    noise: float
    normal_velocity: bool
    observe: Callable[[Fields], Tensor]
    position: Callable[[Fields], Tensor]
    reward: Callable[[Fields, Tensor, Tensor | None], Terms]
    healthy: Callable[[Fields], Tensor] | None = None
    outputs: tuple[str, ...] = ()
    edit: Callable[[mujoco.MjSpec], None] | None = None
    ctrl_limit: float = 1.0


def load_model(task: Task) -> mujoco.MjModel:
    """Compile the task's model: see :func:`load_spec`."""
    with warnings.catch_warnings():  # HalfCheetah's settotalmass: the model is used as shipped
        warnings.filterwarnings("ignore", message=".*settotalmass.*")
        return load_spec(task).compile()


def load_spec(task: Task) -> mujoco.MjSpec:
    """The task's model, edited, before compilation.

    MuJoCo's silent restart of diverged simulations is switched off: it would put a start state in the middle of an
    episode, with a reward for having moved there.
    """
    spec = mujoco.MjSpec.from_file(str(ASSETS / task.xml))
    spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    if task.edit is not None:
        task.edit(spec)
    return spec


def start_states(
    task: Task, qpos0: Tensor, qvel0: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` start states around the defaults ``qpos0`` [nq], ``qvel0`` [nv]: [count, nq], [count, nv]."""

    qpos, qvel = qpos0.expand(count, -1).clone(), qvel0.expand(count, -1).clone()
    qpos += torch.empty_like(qpos).uniform_(-task.noise, task.noise, generator=generator)
    if task.normal_velocity:
        qvel += torch.empty_like(qvel).normal_(0.0, task.noise, generator=generator)
    else:
        qvel += torch.empty_like(qvel).uniform_(-task.noise, task.noise, generator=generator)
    return qpos, qvel


def _assets() -> Path:
    """Gymnasium's models. Raises ``ModuleNotFoundError`` where it is not installed."""
    # find_spec does not run the package: importing gymnasium takes longer than building the environment
    found = importlib.util.find_spec("gymnasium")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")
    return Path(found.origin).parent / "envs" / "mujoco" / "assets"


ASSETS = _assets()  # now: without gymnasium these tasks are not there at all


def _ctrl_cost(d: Fields, weight: float) -> Tensor:
    return d["ctrl"].square().sum(1).mul_(-weight)


def _planar_position(d: Fields) -> Tensor:
    return d["qpos"][:, 0]


def _cheetah_observe(d: Fields) -> Tensor:
    return torch.cat((d["qpos"][:, 1:], d["qvel"]), 1)


def _cheetah_reward(d: Fields, velocity: Tensor, healthy: Tensor | None) -> Terms:
    return {"reward_forward": velocity, "reward_ctrl": _ctrl_cost(d, 0.1)}


def _walker_observe(d: Fields) -> Tensor:
    return torch.cat((d["qpos"][:, 1:], d["qvel"].clamp(-10.0, 10.0)), 1)


def _walker_reward(d: Fields, velocity: Tensor, healthy: Tensor | None) -> Terms:
    assert healthy is not None
    return {"reward_forward": velocity, "reward_ctrl": _ctrl_cost(d, 1e-3), "reward_survive": healthy.to(velocity)}


def _walker_healthy(d: Fields) -> Tensor:
    height, angle = d["qpos"][:, 1], d["qpos"][:, 2]
    return (height > 0.8) & (height < 2.0) & (angle.abs() < 1.0)


def _hopper_healthy(d: Fields) -> Tensor:
    height, angle = d["qpos"][:, 1], d["qpos"][:, 2]
    largest = torch.maximum(d["qpos"][:, 2:].abs().amax(1), d["qvel"].abs().amax(1))
    return (largest < 100.0) & (height > 0.7) & (angle.abs() < 0.2)


def _ant_edit(spec: mujoco.MjSpec) -> None:
    """Make what the task reads computable, and alike, in every engine.

    - Euler instead of RK4: with RK4 the batched C engine never computes ``cfrc_ext``; it is also 4 times faster.
    - Elliptic friction cones: with pyramidal ones, engines that rotate a contact's tangents differently diverge.
    - An accelerometer: contact forces are computed only for models with a sensor that needs them.
    """
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.body("torso").add_site(name="torso_imu")
    spec.add_sensor(
        name="torso_accel",
        type=mujoco.mjtSensor.mjSENS_ACCELEROMETER,
        objtype=mujoco.mjtObj.mjOBJ_SITE,
        objname="torso_imu",
    )


def _ant_observe(d: Fields) -> Tensor:
    forces = d["cfrc_ext"][:, 1:].flatten(1).clamp(-1.0, 1.0)  # [N, 13 * 6]; body 0 is the world
    return torch.cat((d["qpos"][:, 2:], d["qvel"], forces), 1)


def _ant_position(d: Fields) -> Tensor:
    # the torso's frame, one substep behind qpos, is what the reference definition differentiates
    return d["xpos"][:, 1, 0]


def _ant_reward(d: Fields, velocity: Tensor, healthy: Tensor | None) -> Terms:
    assert healthy is not None
    forces = d["cfrc_ext"].flatten(1).clamp(-1.0, 1.0)
    return {
        "reward_forward": velocity,
        "reward_ctrl": _ctrl_cost(d, 0.5),
        "reward_contact": forces.square_().sum(1).mul_(-5e-4),
        "reward_survive": healthy.to(velocity),
    }


def _ant_healthy(d: Fields) -> Tensor:
    height = d["qpos"][:, 2]
    # one element that is not finite makes the sum so, and a sum is cheaper than testing each
    finite = (d["qpos"].sum(1) + d["qvel"].sum(1)).isfinite()
    return finite & (height >= 0.2) & (height <= 1.0)


HALFCHEETAH = Task(
    name="halfcheetah",
    xml="half_cheetah.xml",
    frame_skip=5,
    dt=0.05,
    obs_size=17,
    action_size=6,
    terms=("reward_forward", "reward_ctrl"),
    noise=0.1,
    normal_velocity=True,
    observe=_cheetah_observe,
    position=_planar_position,
    reward=_cheetah_reward,
)

HOPPER = Task(
    name="hopper",
    xml="hopper.xml",
    frame_skip=4,
    dt=0.008,
    obs_size=11,
    action_size=3,
    terms=("reward_forward", "reward_ctrl", "reward_survive"),
    noise=5e-3,
    normal_velocity=False,
    observe=_walker_observe,
    position=_planar_position,
    reward=_walker_reward,
    healthy=_hopper_healthy,
)

WALKER2D = Task(
    name="walker2d",
    xml="walker2d_v5.xml",
    frame_skip=4,
    dt=0.008,
    obs_size=17,
    action_size=6,
    terms=("reward_forward", "reward_ctrl", "reward_survive"),
    noise=5e-3,
    normal_velocity=False,
    observe=_walker_observe,
    position=_planar_position,
    reward=_walker_reward,
    healthy=_walker_healthy,
)

ANT = Task(
    name="ant",
    xml="ant.xml",
    frame_skip=5,
    dt=0.05,
    obs_size=105,
    action_size=8,
    terms=("reward_forward", "reward_ctrl", "reward_contact", "reward_survive"),
    noise=0.1,
    normal_velocity=True,
    observe=_ant_observe,
    position=_ant_position,
    reward=_ant_reward,
    healthy=_ant_healthy,
    outputs=("xpos", "cfrc_ext"),
    edit=_ant_edit,
)
