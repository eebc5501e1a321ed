"""Legged robots that follow commands: how fast their base is to move ahead, sideways, and to turn about the vertical.

What Isaac Gym's ANYmal (``isaac/anymal.py``) and Unitree's robots (``unitree.py``) share. Actions move the targets of
the joints' servos around a pose, at 50 Hz.
"""

from typing import ClassVar, NamedTuple

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import into, rotation
from pql.envs.mujoco.task import HOLD, Draw, Memory, Robot, Start, Task, Verdict
from pql.types import Obs

NET_FORCE = [1 << mujoco.mjtConDataField.mjCONDATA_FORCE.value, 3, 1]  # the force; reduced to the net one; of all
FEEL = 1.0  # N; a body on which the net contact force is larger has touched something
TRACKED = 0.25  # m/s and rad/s; a command is followed where the errors are smaller
ENOUGH = 50  # steps, a second: who follows for so long without a break succeeds


class Servo(NamedTuple):
    """A joint's drive: torque = stiffness * (target - position) - damping * velocity, within +-effort."""

    stiffness: float  # Nm/rad
    damping: float  # Nm s/rad
    effort: float  # Nm
    reach: float  # how far an action of 1 moves the target from the pose, rad, where ``action_scale`` is 1
    armature: float = 0.0  # kg m^2


class Joint(NamedTuple):
    """A driven hinge."""

    pose: float  # where an action of 0 holds it, rad
    servo: Servo


class Motion(NamedTuple):
    """Of the base, in its frame."""

    linear: Tensor  # [N, 3] velocity, m/s
    angular: Tensor  # [N, 3] velocity, rad/s
    gravity: Tensor  # [N, 3] its direction


Lack = tuple[Tensor, Tensor]
"""What velocities over the ground ([N, 2]) and around ([N]) lack of the command."""


def ground(spec: mujoco.MjSpec, over: str) -> None:
    """A chequered floor, a sky, and a light that stays above the body ``over``. Things fall on the floor whose
    ``contype`` has bit 1."""
    size = {"width": 256, "height": 256}
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=[0.6, 0.7, 0.8],
        rgb2=[0.9, 0.93, 0.95],
        **size,
    )
    spec.add_texture(
        name="floor",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.7, 0.73, 0.75],
        rgb2=[0.6, 0.62, 0.64],
        **size,
    )
    material = spec.add_material(name="floor", texrepeat=[1, 1], texuniform=True)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB.value] = "floor"
    plane = {"type": mujoco.mjtGeom.mjGEOM_PLANE, "size": [0, 0, 1], "contype": 0, "conaffinity": 1}
    spec.worldbody.add_geom(name="floor", material="floor", **plane)
    for light in list(spec.lights):
        spec.delete(light)
    above = {"pos": [-1, -1, 4], "dir": [0.25, 0.25, -1], "mode": mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM}
    spec.body(over).add_light(diffuse=[0.5, 0.5, 0.5], cutoff=80, exponent=1, **above)
    spec.visual.headlight.ambient = [0.4, 0.4, 0.4]


def bones(spec: mujoco.MjSpec, radius: float) -> None:
    """Rods from each body to the parts of limbs that hang on it, for the eye: the shapes that touch have gaps."""
    for body in spec.bodies[1:]:
        for child in body.bodies:
            limb = child.find_all(mujoco.mjtObj.mjOBJ_JOINT) or child.find_all(mujoco.mjtObj.mjOBJ_GEOM)
            if np.linalg.norm(child.pos) > radius and limb:
                body.add_geom(
                    type=mujoco.mjtGeom.mjGEOM_CAPSULE,
                    fromto=[0, 0, 0, *child.pos],
                    size=[radius, 0, 0],
                    contype=0,
                    conaffinity=0,
                    density=0,
                    rgba=[0.2, 0.2, 0.22, 1],
                )


class Velocity(Task):
    """Observations: linear and angular velocity of the base and the direction of gravity, in the base's frame; the
    command; joint positions relative to the pose, joint velocities; the last actions. All within +-5.

    Attributes:
        joints: by name, in the order of observations and actions.
        base: the body that carries the free joint.
        fragile: bodies that end the episode where they touch the ground.
        fastest: largest command ahead and sideways (m/s) and around (rad/s), in both directions.
        lasting: seconds after which a new command is drawn, on average (at random steps, so that the state need not
            hold a clock); None: it holds for the episode.
        resting: share of the commands that are to stand still.
        height: of the base where an episode begins, metres.
        spread: joints begin within this share of the pose.
        action_scale: targets are within this many times the servo's ``reach`` of the pose.
    """

    dt = 0.02
    frame_skip = 4
    metrics: ClassVar[tuple[str, ...]] = ("linear_error", "angular_error", "tracked", "success")
    outputs: ClassVar[tuple[str, ...]] = ("sensordata",)
    model = "fast"
    refused = "the robot's package has no other"
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST  # of the servos' damping, which explicit steps would overdo
    impratio = HOLD
    joints: ClassVar[dict[str, Joint]]
    base: ClassVar[str]
    fragile: ClassVar[tuple[str, ...]]
    fastest: ClassVar[tuple[float, float, float]]
    lasting: ClassVar[float | None] = None
    resting: ClassVar[float] = 0.0
    height: ClassVar[float]
    spread: ClassVar[float]
    action_scale: ClassVar[float] = 1.0

    def __init__(self, robot: Robot):
        super().__init__(robot)
        model, there = robot.model, robot.device
        hinges = [model.joint(name) for name in self.joints]
        self._q = torch.tensor([hinge.qposadr[0] for hinge in hinges], device=there)
        self._v = torch.tensor([hinge.dofadr[0] for hinge in hinges], device=there)
        self._felt = torch.tensor([model.sensor(f"{body} contact").adr[0] for body in self.fragile], device=there)
        self._felt = self._felt[:, None] + torch.arange(3, device=there)
        self._fastest = robot.tensor(self.fastest)
        self._scale = robot.tensor([2.0, 2.0, 0.25])  # of commands, as of the velocities that they are for

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        spec.option.timestep = cls.dt / cls.frame_skip
        for geom in spec.geoms:
            if geom.contype:
                geom.conaffinity = 0  # with the floor, not with one another
        ground(spec, cls.base)
        for name, (pose, servo) in cls.joints.items():
            joint = spec.joint(name)
            joint.armature, joint.damping, joint.frictionloss = servo.armature, [0, 0, 0], 0
            reach = cls.action_scale * servo.reach
            drive = spec.add_actuator(
                name=name,
                target=name,
                trntype=mujoco.mjtTrn.mjTRN_JOINT,
                ctrllimited=True,
                ctrlrange=[pose - reach, pose + reach],
                forcelimited=True,
                forcerange=[-servo.effort, servo.effort],
            )
            drive.set_to_position(kp=servo.stiffness, kv=servo.damping)
        for body in cls.fragile:
            spec.add_sensor(
                name=f"{body} contact",
                type=mujoco.mjtSensor.mjSENS_CONTACT,
                objtype=mujoco.mjtObj.mjOBJ_BODY,
                objname=body,
                intprm=NET_FORCE,
            )

    def start(self, count: int, draw: Draw) -> Start:
        robot, size = self.robot, len(self.joints)
        qpos, qvel = robot.qpos0.repeat(count, 1), robot.qvel0.repeat(count, 1)
        qpos[:, 2] = self.height
        qpos[:, self._q] = robot.ctrl_middle * draw.uniform(1 - self.spread, 1 + self.spread, count, size)
        qvel[:, self._v] = draw.uniform(-0.1, 0.1, count, size)
        action = torch.zeros(count, size, device=robot.device, dtype=robot.dtype)
        memory = {"action": action, "command": self._command(count, draw), "streak": action[:, 0].clone()}
        return Start(qpos, qvel, memory)

    def _command(self, count: int, draw: Draw) -> Tensor:
        """[K, 3]: ahead, sideways, around."""
        drawn = draw.uniform(-1.0, 1.0, count, 3) * self._fastest
        return drawn * (draw.uniform(0.0, 1.0, count) >= self.resting)[:, None]

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        streak = self._streak(self.lack(self.motion(fields), memory), memory)
        changed = {"action": self.action(fields), "streak": streak}
        if self.lasting is not None:
            count = len(changed["action"])
            over = draw.uniform(0.0, 1.0, count) < self.dt / self.lasting
            changed["command"] = torch.where(over[:, None], self._command(count, draw), memory["command"])
        return changed

    def action(self, fields: Fields) -> Tensor:
        """The actions that were applied: [N, A]."""
        return (fields["ctrl"] - self.robot.ctrl_middle) / self.robot.ctrl_half

    def touched(self, fields: Fields) -> Tensor:
        """[N] bool; whether one of ``fragile`` did, when the last physics step began."""
        force = fields["sensordata"][:, self._felt]  # [N, bodies, 3]
        return (torch.linalg.vector_norm(force, dim=2) > FEEL).any(1)

    def derive(self, fields: Fields) -> Fields:
        """``linear`` velocity of the base and direction of ``gravity`` in its frame, [N, 3] each."""
        frame = rotation(fields["qpos"][:, 3:7])
        return {"linear": into(frame, fields["qvel"][:, :3]), "gravity": -self.upward(frame)}

    def motion(self, fields: Fields) -> Motion:
        return Motion(fields["linear"], fields["qvel"][:, 3:6], fields["gravity"])

    @staticmethod
    def upward(frame: Tensor) -> Tensor:
        """The vertical in the frame of the base, whose axes ``frame`` [N, 3, 3] has as columns: [N, 3]."""
        return frame[:, 2]

    def lack(self, motion: Motion, memory: Memory) -> Lack:
        """How far the base is from its command."""
        command = memory["command"]
        return command[:, :2] - motion.linear[:, :2], command[:, 2] - motion.angular[:, 2]

    def metered(self, lack: Lack, memory: Memory) -> dict[str, Tensor]:
        """The numbers of ``metrics``: [N] each."""
        streak = self._streak(lack, memory)
        return {
            "linear_error": torch.linalg.vector_norm(lack[0], dim=1),
            "angular_error": lack[1].abs(),
            "tracked": (streak > 0).to(streak),
            "success": (streak >= ENOUGH).to(streak),
        }

    def _streak(self, lack: Lack, memory: Memory) -> Tensor:
        """For how many steps the command has been followed without a break: [N]."""
        ahead, around = lack
        return (memory["streak"] + 1) * ((torch.linalg.vector_norm(ahead, dim=1) < TRACKED) & (around.abs() < TRACKED))

    def terms_of(self, fields: Fields, memory: Memory, motion: Motion, lack: Lack) -> dict[str, Tensor]:
        """The reward's terms: [N] each."""
        raise NotImplementedError

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        motion = self.motion(fields)
        lack = self.lack(motion, memory)
        terms = self.terms_of(fields, memory, motion, lack)
        return Verdict(terms, self.touched(fields), self.metered(lack, memory))

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        motion = self.motion(fields)
        bent, pace = fields["qpos"][:, self._q] - self.robot.ctrl_middle, fields["qvel"][:, self._v]
        parts = [2.0 * motion.linear, 0.25 * motion.angular, motion.gravity, self._scale * memory["command"]]
        return {"policy": torch.cat([*parts, bent, 0.05 * pace, memory["action"]], 1).clamp(-5.0, 5.0)}
