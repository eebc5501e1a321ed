"""Velocity tasks: legged robots that follow commanded velocities, ahead, sideways, and about the vertical.

Base of Isaac Gym's ANYmal (``isaac/anymal.py``) and of Unitree's robots (``unitree.py``). Actions move the targets of
the joints' servos around a pose, at 50 Hz.
"""

from typing import ClassVar, NamedTuple

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.contract.robot import Numbers, RobotRecord, Term
from pql.contract.symmetry import AXIAL, COMMAND, POLAR, Reflection, by_names, floating, side_by_side
from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import into, rotation
from pql.envs.mujoco.task import HOLD, Draw, Memory, Robot, Start, Task, Verdict, add_servo
from pql.errors import ConfigError
from pql.types import Obs

NET_FORCE = [1 << mujoco.mjtConDataField.mjCONDATA_FORCE.value, 3, 1]  # force only; net force; of all contacts
FEEL = 1.0  # N; a body with a larger net contact force counts as touching
TRACKED = 0.25  # m/s and rad/s; a command counts as followed where both errors are smaller
COMMAND_SCALE = [2.0, 2.0, 0.25]  # as for the observed velocities
LARGEST = 5.0  # of observations
ENOUGH = 50  # steps (one second) of following without a break that count as success


class Servo(NamedTuple):
    """A joint's drive: torque = stiffness * (target - position) - damping * velocity, within +-effort."""

    stiffness: float  # Nm/rad
    damping: float  # Nm s/rad
    effort: float  # Nm
    reach: float  # rad by which an action of 1 moves the target from the pose at ``action_scale`` 1
    armature: float = 0.0  # kg m^2


class Joint(NamedTuple):
    """A driven hinge."""

    pose: float  # target angle for an action of 0, rad
    servo: Servo


class Motion(NamedTuple):
    """Motion of the base, in its frame."""

    linear: Tensor  # [N, 3] velocity, m/s
    angular: Tensor  # [N, 3] velocity, rad/s
    gravity: Tensor  # [N, 3] direction of gravity


Lack = tuple[Tensor, Tensor]
"""Differences between command and velocity: planar [N, 2] and yaw rate [N]."""


def furthest(joint: mujoco.MjsJoint, pose: float) -> float:
    """Return the distance of a joint's further limit from ``pose``, rad."""
    return max(abs(float(end) - pose) for end in joint.range)


def ground(spec: mujoco.MjSpec, over: str) -> None:
    """Add a chequered floor, a sky, and a light that stays above the body ``over``. Geoms collide with the floor if
    their ``contype`` has bit 1."""
    sky = {"type": mujoco.mjtTexture.mjTEXTURE_SKYBOX, "builtin": mujoco.mjtBuiltin.mjBUILTIN_GRADIENT}
    tiles = {"type": mujoco.mjtTexture.mjTEXTURE_2D, "builtin": mujoco.mjtBuiltin.mjBUILTIN_CHECKER}
    spec.add_texture(name="sky", rgb1=[0.6, 0.7, 0.8], rgb2=[0.9, 0.93, 0.95], width=256, height=256, **sky)
    spec.add_texture(name="floor", rgb1=[0.7, 0.73, 0.75], rgb2=[0.6, 0.62, 0.64], width=256, height=256, **tiles)
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
    """Add visual rods between the bodies of limbs, because the collision shapes have gaps."""
    for body in spec.bodies[1:]:
        for child in body.bodies:
            limb = child.find_all(mujoco.mjtObj.mjOBJ_JOINT) or child.find_all(mujoco.mjtObj.mjOBJ_GEOM)
            if np.linalg.norm(child.pos) > radius and limb:
                shape = {"type": mujoco.mjtGeom.mjGEOM_CAPSULE, "size": [radius, 0, 0], "rgba": [0.2, 0.2, 0.22, 1]}
                body.add_geom(fromto=[0, 0, 0, *child.pos], contype=0, conaffinity=0, density=0, **shape)


def _term(name: str, source: str, width: int, scale: Numbers) -> Term:
    """Return a term of the robot's record. Its clip comes before the scale; observations are clamped after it."""
    far: Numbers = [LARGEST / x for x in scale] if isinstance(scale, list) else LARGEST / scale
    near: Numbers = [-x for x in far] if isinstance(far, list) else -far
    parts = {"name": name, "source": source, "width": width, "scale": scale}
    return {**parts, "clip": [near, far], "history": 0, "flatten": True}  # type: ignore[typeddict-item]


class Velocity(Task):
    """Observations: linear and angular velocity of the base and the direction of gravity, in the base's frame; the
    command; joint positions relative to the pose, joint velocities; the last actions. All within +-5.

    Attributes:
        joints: by name, in the order of observations and actions.
        base: the body that carries the free joint.
        fragile: bodies that end the episode by touching the ground, unless ``down`` is overridden.
        fastest: largest command ahead and sideways (m/s) and around (rad/s), in both directions.
        lasting: mean seconds until a new command is drawn (at random steps, so that the state needs no clock); None: a
            command holds for the episode.
        resting: share of the commands that are zero.
        height: height of the base at the start of an episode, metres.
        spread: joints start within this share of the pose.
        gravity: name, source, width and scale of its term in the robot's record.
        action_scale: targets are within this many times the servo's ``reach`` of the pose; ``limits``: an action of 1
            reaches the limit of the joint that is further from the pose (FastSAC; arXiv 2512.01996).
        sides, odd: see :func:`pql.contract.symmetry.by_names`.
    """

    frame_skip, dt = 4, 0.02
    metrics: ClassVar[tuple[str, ...]] = ("linear_error", "angular_error", "tracked", "success")
    outputs: ClassVar[tuple[str, ...]] = ("sensordata",)
    model, refused = "fast", "this task has no other model"
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST  # explicit steps overshoot with the servos' damping
    impratio = HOLD
    joints: ClassVar[dict[str, Joint]]
    base: ClassVar[str]
    fragile: ClassVar[tuple[str, ...]] = ()
    fastest: ClassVar[tuple[float, float, float]]
    lasting: ClassVar[float | None] = None
    resting: ClassVar[float] = 0.0
    height: ClassVar[float]
    spread: ClassVar[float]
    action_scale: ClassVar[float | str] = 1.0
    gravity: ClassVar[tuple[str, str, int, float]] = ("projected_gravity", "projected_gravity", 3, 1.0)
    sides: ClassVar[dict[str, str]]
    odd: ClassVar[tuple[str, ...]]

    def __init__(self, robot: Robot):
        super().__init__(robot)
        model, there = robot.model, robot.device
        hinges = [model.joint(name) for name in self.joints]
        self._q = torch.tensor([hinge.qposadr[0] for hinge in hinges], device=there)
        self._v = torch.tensor([hinge.dofadr[0] for hinge in hinges], device=there)
        felt = [model.sensor(f"{body} contact").adr[0] for body in self.fragile]
        self._felt = torch.tensor(felt, device=there, dtype=torch.int64)[:, None] + torch.arange(3, device=there)
        self._fastest = robot.tensor(self.fastest)
        low, high = robot.model.actuator_ctrlrange.T
        reaches = [joint.servo.reach for joint in self.joints.values()]
        self._reach = robot.tensor((high - low) / 2 / reaches)  # of an action of 1, in the original's units, [A]
        self._scale = robot.tensor(COMMAND_SCALE)

    @classmethod
    def action_reach(cls) -> tuple[float, ...]:
        if not isinstance(cls.action_scale, str):
            return (cls.action_scale,) * len(cls.joints)
        spec = cls.source()
        return tuple(furthest(spec.joint(name), joint.pose) / joint.servo.reach for name, joint in cls.joints.items())

    @classmethod
    def robot_record(cls) -> RobotRecord | None:
        try:
            spec = cls.source()
        except ConfigError:  # the model is not installed, which whoever builds the task is told
            return None
        joints, servos = list(cls.joints), [joint.servo for joint in cls.joints.values()]
        pose = [joint.pose for joint in cls.joints.values()]
        commands = ("command", "generated_commands", 3, COMMAND_SCALE)
        wide = ("base_lin_vel", "base_lin_vel", 3, 2.0), ("base_ang_vel", "base_ang_vel", 3, 0.25)
        bent = ("joint_pos", "joint_pos_rel", len(joints), 1.0), ("joint_vel", "joint_vel_rel", len(joints), 0.05)
        last = ("actions", "last_action", len(joints), 1.0)
        return {
            "runtime": "pql",
            "dt": cls.dt,
            "terms": {"policy": [_term(*one) for one in (*wide, cls.gravity, commands, *bent, last)]},
            "commands": ["velocity"],
            "joints": joints,
            "default": pose,
            "scale": [cls.reach_of(spec, name) for name in joints],
            "kp": [servo.stiffness for servo in servos],
            "kd": [servo.damping for servo in servos],
            "effort": [servo.effort for servo in servos],
            "limits": [[float(end) for end in spec.joint(name).range] for name in joints],
            "all_joints": joints,
            "all_default": pose,
        }

    @classmethod
    def reach_of(cls, spec: mujoco.MjSpec, name: str) -> float:
        """Return by how many radians an action of 1 moves a joint's target."""
        (pose, servo), far = cls.joints[name], cls.action_scale
        return furthest(spec.joint(name), pose) if isinstance(far, str) else far * servo.reach

    @classmethod
    def symmetry(cls) -> dict[str, Reflection]:
        joints = by_names(list(cls.joints), cls.sides, cls.odd)
        return {"policy": side_by_side(POLAR, AXIAL, POLAR, COMMAND, joints, joints, joints), "action": joints}

    def coordinates(self) -> tuple[Reflection, Reflection]:
        model = self.robot.model
        return floating(by_names([model.joint(i).name for i in range(1, model.njnt)], self.sides, self.odd))

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        spec.option.timestep = cls.dt / cls.frame_skip
        for geom in spec.geoms:
            if geom.contype:
                geom.conaffinity = 0  # they collide with the floor, not with each other
        ground(spec, cls.base)
        for name, (pose, servo) in cls.joints.items():
            joint = spec.joint(name)
            joint.armature, joint.damping, joint.frictionloss = servo.armature, [0, 0, 0], 0
            reach = cls.reach_of(spec, name)
            add_servo(spec, name, [pose - reach, pose + reach], servo.effort, servo.stiffness, servo.damping)
        for body in cls.fragile:
            of = {"objtype": mujoco.mjtObj.mjOBJ_BODY, "objname": body, "intprm": NET_FORCE}
            spec.add_sensor(name=f"{body} contact", type=mujoco.mjtSensor.mjSENS_CONTACT, **of)

    def start(self, count: int, draw: Draw) -> Start:
        robot, size = self.robot, len(self.joints)
        qpos, qvel = robot.qpos0.repeat(count, 1), robot.qvel0.repeat(count, 1)
        qpos[:, 2].fill_(self.height)  # an assignment would copy the number to the device
        qpos[:, self._q] = robot.ctrl_middle * draw.uniform(1 - self.spread, 1 + self.spread, count, size)
        qvel[:, self._v] = draw.uniform(-0.1, 0.1, count, size)
        action = torch.zeros(count, size, device=robot.device, dtype=robot.dtype)
        memory = {"action": action, "command": self._command(count, draw), "streak": action[:, 0].clone()}
        return Start(qpos, qvel, memory)

    def _command(self, count: int, draw: Draw) -> Tensor:
        """Draw commands [K, 3]: ahead, sideways, around."""
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
        """Return the applied actions [N, A], from the controls."""
        return (fields["ctrl"] - self.robot.ctrl_middle) / self.robot.ctrl_half

    def touched(self, fields: Fields) -> Tensor:
        """Return [N] bool: a body of ``fragile`` touched something at the start of the last physics step."""
        force = fields["sensordata"][:, self._felt]  # [N, bodies, 3]
        return (torch.linalg.vector_norm(force, dim=2) > FEEL).any(1)

    def down(self, fields: Fields, motion: Motion) -> Tensor:
        """Return [N] bool: the robot has fallen, which ends the episode."""
        return self.touched(fields)

    def derive(self, fields: Fields) -> Fields:
        """Return ``linear`` velocity of the base and direction of ``gravity`` in its frame, [N, 3] each."""
        frame = rotation(fields["qpos"][:, 3:7])
        return {"linear": into(frame, fields["qvel"][:, :3]), "gravity": -self.upward(frame)}

    def motion(self, fields: Fields) -> Motion:
        return Motion(fields["linear"], fields["qvel"][:, 3:6], fields["gravity"])

    @staticmethod
    def upward(frame: Tensor) -> Tensor:
        """Return the vertical [N, 3] in the base's frame, whose axes are the columns of ``frame`` [N, 3, 3]."""
        return frame[:, 2]

    def lack(self, motion: Motion, memory: Memory) -> Lack:
        """Return command minus velocity of the base."""
        command = memory["command"]
        return command[:, :2] - motion.linear[:, :2], command[:, 2] - motion.angular[:, 2]

    def metered(self, lack: Lack, memory: Memory) -> dict[str, Tensor]:
        """Return the ``metrics``: [N] each."""
        streak = self._streak(lack, memory)
        return {
            "linear_error": torch.linalg.vector_norm(lack[0], dim=1),
            "angular_error": lack[1].abs(),
            "tracked": (streak > 0).to(streak),
            "success": (streak >= ENOUGH).to(streak),
        }

    def _streak(self, lack: Lack, memory: Memory) -> Tensor:
        """Return the steps [N] for which the command has been followed without a break."""
        ahead, around = lack
        return (memory["streak"] + 1) * ((torch.linalg.vector_norm(ahead, dim=1) < TRACKED) & (around.abs() < TRACKED))

    def terms_of(self, fields: Fields, memory: Memory, motion: Motion, lack: Lack) -> dict[str, Tensor]:
        """Return the reward terms: [N] each."""
        raise NotImplementedError

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        motion = self.motion(fields)
        lack = self.lack(motion, memory)
        terms = self.terms_of(fields, memory, motion, lack)
        return Verdict(terms, self.down(fields, motion), self.metered(lack, memory))

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        motion = self.motion(fields)
        bent, pace = fields["qpos"][:, self._q] - self.robot.ctrl_middle, fields["qvel"][:, self._v]
        parts = [2.0 * motion.linear, 0.25 * motion.angular, motion.gravity, self._scale * memory["command"]]
        return {"policy": torch.cat([*parts, bent, 0.05 * pace, memory["action"]], 1).clamp(-LARGEST, LARGEST)}
