"""MuJoCo task: a model, and pure torch functions over batched fields. Independent of engine and episodes.

A subclass of :class:`Task` gives class constants (enough for the ``EnvSpec``, so nothing need be loaded to know it) and
some of the functions below, all of which work on any number of rows, any device and any float type, without a loop over
environments and without reading a value on the host. In the order in which ``MujocoVec`` calls them:

    start     draws states for new episodes, and the memory that goes with them (goals, commands, counters)
    control   action -> controls in the model's units: targets around a pose, a gripper that opens or shuts, torques
    derive    fields -> more fields, which several of the functions below read: a rotation, positions within a range
    judge     fields and memory -> reward terms, whether the task ended, and other numbers to log (``success`` is one)
    evolve    memory -> memory: a command drawn anew after so many steps, a goal after it was reached, a counter, the
              action just taken
    track     fields -> the part of the memory that follows from the state: what the next ``judge`` compares with,
              such as a position; what ``observe`` and the next ``control`` both read
    observe   fields and memory -> observations by group (``policy``, and ``critic`` or images where there are any)
    expired   memory -> whether a time limit of the task's own has run out, such as the time for one goal

Where a task differs from the shipped ones:

    a robot from any package   override ``source``: an ``MjSpec`` may be loaded from a URDF, given a floor, actuators, a
                               free joint. A missing package is a ``ConfigError`` that says what to install.
    sensors and contacts       read contacts through sensors (``touch``, ``contact``), added in ``edit``, and name
                               ``sensordata`` in ``outputs``: engines lay contact lists out differently, sensors alike.
    several observations       override ``obs_spec``.
    goals in pictures          ``show`` puts them there, as ``mocap`` bodies.
    names and constants        read them from the model once, in ``__init__``: ``self.robot.body("torso")``,
                               ``self.robot.tensor(model.jnt_range)``.
    difficulty                 ``memory["level"]``, [N] in 0..1, is there wherever an environment has a curriculum.
    success                    a metric named ``success``, above 0 on the steps on which the task is solved.

``isaac/ant.py`` (a patched robot, sensors) and ``isaac/ball.py`` (a robot of its own, a memory that actions move,
pictures) are examples.
"""

import warnings
from typing import ClassVar, NamedTuple

import mujoco
import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.envs.mujoco.engine import Fields
from pql.errors import ConfigError, nearest
from pql.types import Obs

Memory = dict[str, Tensor]
"""What a task keeps of an episode beyond physics: name -> [N, ...]. Replaced as a whole, never written into."""

MODELS = ("shipped", "fast")
"""``shipped``: the model as its package has it. ``fast``: Newton's solver, elliptic friction cones and a one-stage
integrator, which both engines have and which cost a fraction of RK4 or PGS."""

HOLD = 10.0
"""``Task.impratio`` under which what stands or is held stays where it is. MuJoCo's friction is soft: at its default of
1 a standing robot's feet creep by millimetres a second (mjlab's velocity tasks take 10 as well)."""


class Start(NamedTuple):
    """States that episodes begin in."""

    qpos: Tensor  # [K, nq]
    qvel: Tensor  # [K, nv]
    memory: Memory = {}  # noqa: RUF012  # name -> [K, ...]; what ``track`` gives need not be here


class Verdict(NamedTuple):
    """Reward terms, termination and metrics of one step."""

    terms: dict[str, Tensor]  # name -> [N]; the reward is their sum
    terminated: Tensor | None = None  # [N] bool; None: never
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  # name -> [N]; logged with the terms


class Draw:
    """Random numbers of one generator, on its device, in an engine's float type."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype):
        self.generator, self.dtype = generator, dtype

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.generator.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self._empty(*shape).uniform_(low, high, generator=self.generator)

    def normal(self, std: float, *shape: int) -> Tensor:
        return self._empty(*shape).normal_(0.0, std, generator=self.generator)


class Robot:
    """A compiled model's constants as tensors of an engine's device and float type."""

    def __init__(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype):
        self.model, self.device, self.dtype = model, device, dtype
        self.qpos0 = self.tensor(model.qpos0)
        self.qvel0 = torch.zeros(model.nv, device=device, dtype=dtype)
        low, high = self.tensor(model.actuator_ctrlrange).unbind(1)
        self.ctrl_middle, self.ctrl_half = (low + high) / 2, (high - low) / 2

    def tensor(self, values: object) -> Tensor:
        """A copy of an array of the model."""
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def body(self, name: str) -> int:
        """The row of body ``name`` in ``xpos`` and its like."""
        return self.model.body(name).id


class Task:
    """One robot and what is asked of it; see the module's docstring.

    Attributes:
        frame_skip: physics steps per env step; ``dt`` is the env step in seconds.
        terms: names of the reward terms, and of the numbers to log beside them (``metrics``), in the order of the log.
        time_limit: in env steps, unless another is asked for.
        outputs: derived fields that the functions read.
        ctrl_limit: the model's controls are within +-this.
        model: which of ``MODELS`` is used unless asked for another.
        refused: why the shipped model cannot be used; empty: it can.
        integrator: of the fast model.
        impratio: of the fast model: how much stiffer friction is than what keeps bodies apart (MuJoCo's option of that
            name, with elliptic cones); None: as the file has it.
        contacts: the most contacts and constraint rows of one simulation that C was seen to have, on any of the models,
            for an engine with buffers of fixed size; None: to be measured when one starts.
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
    impratio: ClassVar[float | None] = None
    contacts: ClassVar[tuple[int, int] | None] = None

    def __init__(self, robot: Robot):
        self.robot = robot
        whole = (robot.ctrl_middle == 0).all() and (robot.ctrl_half == 1).all()
        self._scaled = not bool(whole)

    @classmethod
    def obs_spec(cls) -> dict[str, ObsSpec]:
        """Observation groups."""
        return {"policy": ObsSpec((cls.obs_size,))}

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        """The model as its package ships it."""
        raise NotImplementedError

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        """Change the model, whichever it is, before it is compiled."""

    def start(self, count: int, draw: Draw) -> Start:
        """Draw ``count`` start states."""
        raise NotImplementedError

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """[N, A] in [-1, 1] -> [N, nu]. Unless overridden: [-1, 1] is the range of each actuator."""
        return action * self.robot.ctrl_half + self.robot.ctrl_middle if self._scaled else action

    def derive(self, fields: Fields) -> Fields:
        """Return quantities derived from the state that several functions below need. Computed once per step and added
        to their ``fields`` (except in ``control``, which runs before)."""
        return {}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        """Of the step that led to ``fields`` (``ctrl`` as applied); ``memory`` is from before it."""
        raise NotImplementedError

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        """Return the entries of ``memory`` [N, ...] that change in a step, as new tensors."""
        return {}

    def expired(self, memory: Memory) -> Tensor | None:
        """[N] bool of the memory after a step: a time limit of the task's own has run out, beside that of the whole
        episode, so it is truncated. None: there is no such limit."""
        return None

    def track(self, fields: Fields) -> Memory:
        """Return memory entries derived from the state, read by ``observe`` and in the next step. Code that sets a
        state from outside must store them in the memory."""
        return {}

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        """New tensors; floats are rounded to float32 by the caller."""
        raise NotImplementedError

    def show(self, data: mujoco.MjData, memory: Memory) -> None:
        """Put what only the eye sees into ``data``, for a picture of one environment (``memory`` [...] is its row):
        a goal, as a ``mocap`` body."""


def check_model(task: type[Task], model: str | None) -> str:
    """The model to use where ``model`` was asked for (None: the task's own choice).

    Raises:
        ConfigError: no such model, or one that this task cannot use; says why.
    """
    chosen = task.model if model is None else model
    if chosen not in MODELS:
        raise ConfigError("model", model, f"shipped or fast{nearest(str(model), MODELS)}")
    if chosen == "shipped" and task.refused:
        raise ConfigError("model", model, f"fast: {task.refused}")
    return chosen


def load_spec(task: type[Task], model: str | None = None) -> mujoco.MjSpec:
    """The task's model, edited, before compilation.

    MuJoCo's silent restart of diverged simulations is switched off: it would put a start state in the middle of an
    episode, with a reward for having moved there.
    """
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
    return spec


def load_model(task: type[Task], model: str | None = None) -> mujoco.MjModel:
    """Compile the task's model: see :func:`load_spec`."""
    with warnings.catch_warnings():  # HalfCheetah's settotalmass: the model is used as shipped
        warnings.filterwarnings("ignore", message=".*settotalmass.*")
        return load_spec(task, model).compile()
