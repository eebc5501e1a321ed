"""MuJoCo task: a model, and pure torch functions over batched fields. Independent of engine and episodes.

A subclass of :class:`Task` sets class constants (from which the ``EnvSpec`` is built without loading the model) and
overrides some of the functions below. All of them work on any number of rows, any device and any float type, without
loops over environments and without reading values on the host. ``MujocoVec`` calls them in this order:

    start     draws states for new episodes, with their memory (goals, commands, counters)
    control   action -> controls in the model's units: targets around a pose, an open or shut gripper, torques
    derive    fields -> more fields that several functions below read: a rotation, scaled positions
    judge     fields and memory -> reward terms, termination, and metrics to log (``success`` is one)
    evolve    memory -> memory: a command redrawn after some steps, a goal after a success, a counter, the latest action
    track     fields -> memory entries that follow from the state: a position that the next ``judge`` compares with,
              quantities that ``observe`` and the next ``control`` read
    observe   fields and memory -> observations by group (``policy``, and optionally ``critic`` or images)
    expired   memory -> True where a time limit of the task, such as one per goal, has run out

How to build a task that differs from the shipped ones:

    a robot from any package   override ``source``: an ``MjSpec`` may be loaded from a URDF and given a floor,
                               actuators, a free joint. A missing package is a ``ConfigError`` with the install command.
    sensors and contacts       read contacts through sensors (``touch``, ``contact``), added in ``edit``, and name
                               ``sensordata`` in ``outputs``: contact lists differ between engines, sensors do not.
    several observations       override ``obs_spec``.
    goals in rendered images   place them in ``show``, as ``mocap`` bodies.
    names and constants        read them from the model once, in ``__init__``: ``self.robot.body("torso")``,
                               ``self.robot.tensor(model.jnt_range)``.
    difficulty                 read ``memory["level"]``, [N] in 0..1, present when the environment has a curriculum.
    success                    report a metric ``success``, above 0 on the steps on which the task is solved.

Examples: ``isaac/ant.py`` (a patched robot, sensors) and ``isaac/ball.py`` (a robot built in code, memory that actions
change, images).
"""

import warnings
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import mujoco
import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.contract.robot import RobotRecord
from pql.contract.symmetry import Reflection
from pql.envs.mujoco.engine import Fields
from pql.errors import ConfigError, nearest
from pql.types import Obs

Memory = dict[str, Tensor]
"""A task's per-episode state beyond physics: name -> [N, ...]. Tensors are replaced, never written in place."""

MODELS = ("shipped", "fast")
"""``shipped``: the model as in its package. ``fast``: the Newton solver, elliptic friction cones and a one-stage
integrator, which both engines support and which cost a fraction of RK4 or PGS."""

HOLD = 10.0
"""Value of ``Task.impratio`` under which standing or held bodies do not creep. MuJoCo's friction is soft: at its
default of 1 a standing robot's feet creep by millimetres per second (mjlab's velocity tasks use 10 as well)."""


class Start(NamedTuple):
    """Start states of episodes."""

    qpos: Tensor  # [K, nq]
    qvel: Tensor  # [K, nv]
    memory: Memory = {}  # noqa: RUF012  # name -> [K, ...]; entries of ``track`` may be missing


class Verdict(NamedTuple):
    """Reward terms, termination and metrics of one step."""

    terms: dict[str, Tensor]  # name -> [N]; the reward is their sum
    terminated: Tensor | None = None  # [N] bool; None: never
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  # name -> [N]; logged with the terms


class Draw:
    """Random numbers from one generator, on its device, in an engine's float type."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype):
        self.generator, self.dtype = generator, dtype

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.generator.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self._empty(*shape).uniform_(low, high, generator=self.generator)

    def normal(self, std: float, *shape: int) -> Tensor:
        return self._empty(*shape).normal_(0.0, std, generator=self.generator)


class Robot:
    """A compiled model's constants as tensors with an engine's device and float type."""

    def __init__(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype):
        self.model, self.device, self.dtype = model, device, dtype
        self.qpos0 = self.tensor(model.qpos0)
        self.qvel0 = torch.zeros(model.nv, device=device, dtype=dtype)
        low, high = self.tensor(model.actuator_ctrlrange).unbind(1)
        self.ctrl_middle, self.ctrl_half = (low + high) / 2, (high - low) / 2

    def tensor(self, values: object) -> Tensor:
        """Copy an array of the model to a tensor."""
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def body(self, name: str) -> int:
        """Return the row of body ``name`` in ``xpos``, ``xquat`` and other body fields."""
        return self.model.body(name).id


class Task:
    """One robot and its task: rewards, observations, episode memory. See the module docstring.

    Attributes:
        frame_skip: physics steps of the shipped model per env step; ``dt`` is the env step in seconds.
        terms: names of the reward terms, in the order of the log; ``metrics``: names of the other logged numbers.
        time_limit: default time limit in env steps.
        outputs: derived fields that the functions read.
        ctrl_limit: the model's controls are in +-this.
        model: the default of ``MODELS``.
        refused: why the shipped model cannot be used; empty if it can.
        integrator: integrator of the fast model.
        split: its physics steps for each of the shipped model, where a one-stage integrator needs shorter ones.
        impratio: MuJoCo's option of that name for the fast model, with elliptic cones: stiffness of friction relative
            to that of normal contact; None: as in the file.
        contacts: the most contacts and constraint rows that C needed for one simulation, on any model that an engine
            with buffers of fixed size can step; None: measured when one starts.
    """

    name: ClassVar[str]
    obs_size: ClassVar[int]
    action_size: ClassVar[int]
    frame_skip: ClassVar[int]
    dt: ClassVar[float]
    terms: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[str, ...]] = ()
    time_limit: ClassVar[int] = 1000
    outputs: ClassVar[tuple[str, ...]] = ()
    ctrl_limit: ClassVar[float] = 1.0
    model: ClassVar[str] = "shipped"
    refused: ClassVar[str] = ""
    integrator: ClassVar[mujoco.mjtIntegrator] = mujoco.mjtIntegrator.mjINT_EULER
    split: ClassVar[int] = 1
    impratio: ClassVar[float | None] = None
    contacts: ClassVar[tuple[int, int] | None] = None

    def __init__(self, robot: Robot):
        self.robot = robot
        unit = (robot.ctrl_middle == 0).all() and (robot.ctrl_half == 1).all()
        self._scaled = not bool(unit)

    @classmethod
    def symmetry(cls) -> dict[str, Reflection] | None:
        """Return the reflections of observation groups and ``action`` that leave the task as it is; None: unknown."""
        return None

    def coordinates(self) -> tuple[Reflection, Reflection] | None:
        """Return the reflections of ``qpos`` and ``qvel`` for which :meth:`symmetry` holds; None: unknown."""
        return None

    @classmethod
    def obs_spec(cls) -> dict[str, ObsSpec]:
        """Observation groups."""
        return {"policy": ObsSpec((cls.obs_size,))}

    @classmethod
    def action_reach(cls) -> tuple[float, ...] | None:
        """Actions of the original task per action of 1, for each dimension; None: ``ctrl_limit``."""
        return None

    @classmethod
    def robot_record(cls) -> RobotRecord | None:
        """Return the robot's record (``pql.contract.robot``), or None if there is none."""
        return None

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        """Load the model as its package ships it."""
        raise NotImplementedError

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        """Change the model, shipped or fast, before it is compiled."""

    def start(self, count: int, draw: Draw) -> Start:
        """Draw ``count`` start states."""
        raise NotImplementedError

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """Map actions [N, A] in [-1, 1] to controls [N, nu]. Default: [-1, 1] is the range of each actuator."""
        return action * self.robot.ctrl_half + self.robot.ctrl_middle if self._scaled else action

    def derive(self, fields: Fields) -> Fields:
        """Return quantities derived from the state that several functions below need. Computed once per step and added
        to their ``fields`` (except in ``control``, which runs before)."""
        return {}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        """Judge the step that led to ``fields`` (``ctrl`` as applied); ``memory`` is that before the step."""
        raise NotImplementedError

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        """Return the entries of ``memory`` [N, ...] that change in a step, as new tensors."""
        return {}

    def expired(self, memory: Memory) -> Tensor | None:
        """Return [N] bool from the memory after a step: a time limit of the task, in addition to the episode's, has run
        out, so the episode is truncated. None: there is no such limit."""
        return None

    def track(self, fields: Fields) -> Memory:
        """Return memory entries derived from the state, read by ``observe`` and in the next step. Code that sets a
        state from outside must store them in the memory."""
        return {}

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        """Return observations as new tensors; the caller rounds floats to float32."""
        raise NotImplementedError

    def show(self, data: mujoco.MjData, memory: Memory) -> None:
        """Write visual-only bodies, such as a goal's ``mocap`` body, into ``data`` before one environment is rendered;
        ``memory`` [...] is its row."""


def add_servo(spec: mujoco.MjSpec, joint: str, span: Sequence[float], effort: float, kp: float, kv: float) -> None:
    """Add a servo with targets in ``span``: force = kp (target - position) - kv velocity, within +-``effort``."""
    motor = spec.add_actuator(
        name=joint,
        target=joint,
        trntype=mujoco.mjtTrn.mjTRN_JOINT,
        ctrlrange=span,
        ctrllimited=True,
        forcerange=[-effort, effort],
        forcelimited=True,
    )
    motor.set_to_position(kp=kp, kv=kv)


def check_model(task: type[Task], model: str | None) -> str:
    """Return the model to use for the setting ``model`` (None: the task's default). Raises ``ConfigError``: no such
    model, or one that this task cannot use, with the reason."""
    chosen = task.model if model is None else model
    if chosen not in MODELS:
        raise ConfigError("model", model, f"shipped or fast{nearest(str(model), MODELS)}")
    if chosen == "shipped" and task.refused:
        raise ConfigError("model", model, f"fast: {task.refused}")
    return chosen


def physics_steps(task: type[Task], model: str | None = None) -> int:
    """Return the physics steps of an env step with the setting ``model``."""
    return task.frame_skip * (task.split if check_model(task, model) == "fast" else 1)


def load_spec(task: type[Task], model: str | None = None) -> mujoco.MjSpec:
    """Return the task's model, edited, before compilation. MuJoCo's silent restart of diverged simulations is switched
    off: it would put a start state in the middle of an episode, with a reward for the jump to it."""
    chosen = check_model(task, model)
    spec = task.source()
    spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    if chosen == "fast":
        spec.option.integrator = task.integrator
        spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON
        spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
        if task.impratio is not None:
            spec.option.impratio = task.impratio
    task.edit(spec)
    if chosen == "fast":
        spec.option.timestep /= task.split
    return spec


def load_model(task: type[Task], model: str | None = None) -> mujoco.MjModel:
    """Compile the task's model: see :func:`load_spec`."""
    with warnings.catch_warnings():  # HalfCheetah's settotalmass warns: the model is used as shipped
        warnings.filterwarnings("ignore", message=".*settotalmass.*")
        return load_spec(task, model).compile()
