"""MuJoCo tasks on MuJoCo's C thread pool or on MuJoCo Warp: Gymnasium's suite, the PQL paper's, velocity tasks.

env = halfcheetah(num_envs=128, device="cpu", threads=0, max_episode_steps=1000, model="fast")
spec = halfcheetah.describe(num_envs=128, device="cpu")
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pql.contract.env import EnvSpec
from pql.contract.registry import takes
from pql.envs.mujoco import control, locomotion, unitree
from pql.envs.mujoco.curriculum import make_curriculum
from pql.envs.mujoco.env import MujocoVec, Options, describe
from pql.envs.mujoco.isaac import allegro_hand as allegro_hands
from pql.envs.mujoco.isaac import ant as isaac_ants
from pql.envs.mujoco.isaac import anymal as anymals
from pql.envs.mujoco.isaac import ball, franka, shadow_openai
from pql.envs.mujoco.isaac import dclaw as dclaws
from pql.envs.mujoco.isaac import humanoid as isaac_humanoids
from pql.envs.mujoco.isaac import shadow_hand as shadow_hands
from pql.envs.mujoco.randomize import Randomize
from pql.envs.mujoco.task import Task
from pql.envs.mujoco.velocity import Velocity
from pql.errors import ConfigError


@dataclass(frozen=True)
class MujocoSettings:
    """Keywords of the MuJoCo tasks.

    Attributes:
        threads: physics threads, 0 for one per core; the results do not depend on it.
        max_episode_steps: time limit; None: the task's.
        model: ``shipped``, ``fast``, or None for the task's default.
        randomize: keywords of ``randomize.Randomize``: masses, friction, gains, pushes, observation noise and delay.
        curriculum: ``{"kind": NAME, ...}``: how episodes get harder, see ``curriculum.py``.
        engine: ``batch`` (MuJoCo's C threads), ``warp`` (MuJoCo Warp), or ``auto``: Warp on CUDA if it is installed.
        stagger: start the first episodes at random points of the time limit, so that not all end on the same step.
        contacts: the most contacts and constraint rows of one simulation, (N, N), for Warp's buffers; None: the task's.
        contact_forces: false: observe positions and velocities, and leave contact forces out of the reward; for tasks
            with a ``joints`` variant.
        action_scale: for velocity tasks: factor on how far an action of 1 moves a servo's target, relative to the
            original task; or ``limits``: as far as the joint's limit. None: the task's.
        legacy: as in version 0.2, to repeat its figures: the reward, commands and ends of episodes of Unitree's robots,
            Ant's longer physics steps, contact forces in the reward of ``contact_forces=False``. Runs of that version
            are resumed, evaluated and played with it.
    """

    threads: int = 0
    max_episode_steps: int | None = None
    model: str | None = None
    randomize: Mapping[str, Any] | None = None
    curriculum: Mapping[str, Any] | None = None
    stagger: bool = False
    engine: str = "auto"
    contacts: Sequence[int] | None = None
    contact_forces: bool = True
    action_scale: float | str | None = None
    legacy: bool = False


@dataclass(frozen=True)
class Maker:
    """Environment factory of one task: call it for the ``VecEnv``, or ``describe`` it for its spec.

    Keywords: those of :class:`MujocoSettings`.

    Raises:
        ConfigError: a value out of range, or a setting that the task does not support.
    """

    task: type[Task]
    joints: type[Task] | None = None  # variant that observes only positions and velocities
    legacy: Mapping[type[Task], type[Task]] = field(default_factory=dict)  # those of them that were another task before

    @takes(MujocoSettings)
    def __call__(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> MujocoVec:
        settings = MujocoSettings(**keywords)
        return MujocoVec(self.variant(settings), num_envs, torch.device(device), _options(num_envs, settings))

    def describe(self, num_envs: int = 64, device: str | torch.device = "cpu", **keywords: Any) -> EnvSpec:
        """Return the specification of ``self(...)`` without loading the model."""
        settings = MujocoSettings(**keywords)
        return describe(self.variant(settings), num_envs, torch.device(device), _options(num_envs, settings))

    def variant(self, settings: MujocoSettings) -> type[Task]:
        """Return the task class with or without contact forces, as before or as today, with ``action_scale``."""
        chosen = self.task
        for name, usual, kind in (("contact_forces", True, "joints"), ("legacy", False, "legacy")):
            value = getattr(settings, name)
            if not isinstance(value, bool):
                raise ConfigError(name, value, "true or false")
            if value is usual:
                continue
            variant = self.joints if kind == "joints" else self.legacy.get(chosen, chosen if self.legacy else None)
            if variant is None:
                others = ", ".join(task for task, maker in TASKS.items() if getattr(maker, kind))
                raise ConfigError(name, value, f"{str(usual).lower()}: only {others} have both forms")
            chosen = variant
        return scaled(chosen, settings.action_scale)


def scaled(task: type[Task], action_scale: float | str | None) -> type[Task]:
    """Return ``task`` with ``action_scale`` as its class constant (None: unchanged). Raises ``ConfigError``: neither a
    number above 0 nor ``limits``, or a task whose actions are not servo targets."""
    if action_scale is None:
        return task
    if not issubclass(task, Velocity):
        raise ConfigError("action_scale", action_scale, f"nothing with {task.name}: it is for velocity tasks")
    if action_scale == "limits":
        return type(task.__name__, (task,), {"action_scale": action_scale, "__doc__": task.__doc__})
    if isinstance(action_scale, (bool, str)) or not 0 < action_scale < math.inf:
        raise ConfigError("action_scale", action_scale, "a number above 0, or limits")
    return type(task.__name__, (task,), {"action_scale": float(action_scale), "__doc__": task.__doc__})


def _options(num_envs: int, settings: MujocoSettings) -> Options:
    """Check the keywords."""
    threads, limit, contacts = settings.threads, settings.max_episode_steps, settings.contacts
    for name, value, least in (
        ("num_envs", num_envs, 1),
        ("threads", threads, 0),
        ("max_episode_steps", 1 if limit is None else limit, 1),
    ):
        if not _whole(value, least):
            raise ConfigError(name, value, f"an integer >= {least}")
    if not isinstance(settings.stagger, bool):
        raise ConfigError("stagger", settings.stagger, "true or false")
    pair = isinstance(contacts, list | tuple) and len(contacts) == 2
    if contacts is not None and not (pair and all(_whole(most, 1) for most in contacts)):
        raise ConfigError("contacts", contacts, "[contacts, constraint rows], whole numbers above 0")
    for name in ("randomize", "curriculum"):
        group = getattr(settings, name)
        if group is not None and not isinstance(group, Mapping):
            raise ConfigError(name, group, f"settings below it: {name}.key=value")
    pair_of = None if contacts is None else (contacts[0], contacts[1])
    drawn, curriculum = Randomize.parse(settings.randomize), make_curriculum(settings.curriculum)
    return Options(threads, settings.engine, pair_of, limit, settings.model, drawn, curriculum, settings.stagger)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


halfcheetah = Maker(locomotion.HalfCheetah)
hopper = Maker(locomotion.Hopper)
walker2d = Maker(locomotion.Walker2d)
ant = Maker(
    locomotion.Ant,
    locomotion.AntJoints,
    {locomotion.Ant: locomotion.AntLegacy, locomotion.AntJoints: locomotion.AntJointsLegacy},
)
humanoid = Maker(
    locomotion.Humanoid, locomotion.HumanoidJoints, {locomotion.HumanoidJoints: locomotion.HumanoidJointsLegacy}
)
humanoidstandup = Maker(
    locomotion.HumanoidStandup,
    locomotion.HumanoidStandupJoints,
    {locomotion.HumanoidStandupJoints: locomotion.HumanoidStandupJointsLegacy},
)
swimmer = Maker(locomotion.Swimmer)
reacher = Maker(control.Reacher)
pusher = Maker(control.Pusher)
invertedpendulum = Maker(control.InvertedPendulum)
inverteddoublependulum = Maker(control.InvertedDoublePendulum)
isaac_ant = Maker(isaac_ants.IsaacAnt)
isaac_humanoid = Maker(isaac_humanoids.IsaacHumanoid)
anymal = Maker(anymals.Anymal)
ballbalance = Maker(ball.BallBalance)
ballbalance_pixels = Maker(ball.BallBalancePixels)
go1_velocity = Maker(unitree.Go1, legacy={unitree.Go1: unitree.Go1Legacy})
g1_velocity = Maker(unitree.G1, legacy={unitree.G1: unitree.G1Legacy})
shadow_hand = Maker(shadow_hands.ShadowHand)
shadow_hand_full = Maker(shadow_hands.ShadowHandFull)
shadow_hand_full_no_vel = Maker(shadow_hands.ShadowHandFullNoVel)
shadow_hand_openai = Maker(shadow_openai.ShadowHandOpenAI)
allegro_hand = Maker(allegro_hands.AllegroHand)
dclaw = Maker(dclaws.DClaw)
franka_cube_stack = Maker(franka.FrankaCubeStack)
franka_cube_stack_torque = Maker(franka.FrankaCubeStackTorque)

TASKS = {name: value for name, value in globals().items() if isinstance(value, Maker)}
"""Factory by task name."""
