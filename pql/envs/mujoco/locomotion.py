"""Locomotion robots of Gymnasium's MuJoCo suite, with the definitions of its ``-v5`` classes.

As after ``mj_step``, and as in Gymnasium's definitions, ``qpos`` and ``qvel`` are those after the step, derived fields
those at the start of its last substep.
"""

from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.contract.symmetry import AXIAL, POLAR, QUATERNION, SCALAR, Reflection, by_names, floating, side_by_side
from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.suite import GymTask, ctrl_cost, finite
from pql.envs.mujoco.task import Memory, Robot, Verdict
from pql.types import Obs

COUNTED = "with legacy=true rewards count cfrc_ext, which batched stepping does not compute with RK4"
NO_FORCES = "batched stepping computes no cfrc_ext with RK4 (or shipped with contact_forces=false, which needs none)"


class Runner(GymTask):
    """Rewarded for its speed along x."""

    metrics: ClassVar[tuple[str, ...]] = ("distance",)  # metres gained

    def position(self, fields: Fields) -> Tensor:
        """[N] metres along x."""
        return fields["qpos"][:, 0]

    def track(self, fields: Fields) -> Memory:
        return {"position": self.position(fields).clone()}

    def gained(self, fields: Fields, memory: Memory) -> Tensor:
        """Metres along x in this step, [N]."""
        return self.position(fields) - memory["position"]


class Joints(GymTask):
    """Observes positions, except those along the ground, and velocities. Nothing reads contact forces, so the shipped
    model can be used; rewards leave them out, as Gymnasium's ``Ant-v4`` and ``Humanoid-v4`` and EnvPool do."""

    refused = ""

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return {"policy": torch.cat((fields["qpos"][:, 2:], fields["qvel"]), 1)}


class HalfCheetah(Runner):
    name, xml, contacts = "halfcheetah", "half_cheetah.xml", (6, 24)
    frame_skip, dt = 5, 0.05
    obs_size, action_size = 17, 6
    terms = ("reward_forward", "reward_ctrl")
    noise, normal_velocity = 0.1, True

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return {"policy": torch.cat((fields["qpos"][:, 1:], fields["qvel"]), 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        gained = self.gained(fields, memory)
        terms = {"reward_forward": gained / self.dt, "reward_ctrl": ctrl_cost(fields, 0.1)}
        return Verdict(terms, None, {"distance": gained})


class Planar(Runner):
    """Runs upright in a plane; the episode ends where it is not healthy."""

    frame_skip, dt = 4, 0.008
    terms = ("reward_forward", "reward_ctrl", "reward_survive")
    noise = 5e-3

    def healthy(self, fields: Fields) -> Tensor:
        """Return [N] bool: the robot is in a healthy state."""
        raise NotImplementedError

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return {"policy": torch.cat((fields["qpos"][:, 1:], fields["qvel"].clamp(-10.0, 10.0)), 1)}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        gained, healthy = self.gained(fields, memory), self.healthy(fields)
        terms = {
            "reward_forward": gained / self.dt,
            "reward_ctrl": ctrl_cost(fields, 1e-3),
            "reward_survive": healthy.to(gained),
        }
        return Verdict(terms, ~healthy, {"distance": gained})


class Hopper(Planar):
    name, xml, contacts = "hopper", "hopper.xml", (5, 17)
    obs_size, action_size = 11, 3

    def healthy(self, fields: Fields) -> Tensor:
        height, angle = fields["qpos"][:, 1], fields["qpos"][:, 2]
        largest = torch.maximum(fields["qpos"][:, 2:].abs().amax(1), fields["qvel"].abs().amax(1))
        return (largest < 100.0) & (height > 0.7) & (angle.abs() < 0.2)


LEGS: Reflection = ((3, 4, 5, 0, 1, 2), (1,) * 6)


class Walker2d(Planar):
    """The same with its legs exchanged."""

    name, xml, contacts = "walker2d", "walker2d_v5.xml", (8, 35)
    obs_size, action_size = 17, 6

    @classmethod
    def symmetry(cls) -> dict[str, Reflection]:
        return {"policy": side_by_side(SCALAR, SCALAR, LEGS, SCALAR, SCALAR, SCALAR, LEGS), "action": LEGS}

    def coordinates(self) -> tuple[Reflection, Reflection]:
        return (side_by_side(SCALAR, SCALAR, SCALAR, LEGS),) * 2

    def healthy(self, fields: Fields) -> Tensor:
        height, angle = fields["qpos"][:, 1], fields["qpos"][:, 2]
        return (height > 0.8) & (height < 2.0) & (angle.abs() < 1.0)


def free_body(joints: Reflection) -> Reflection:
    """Return the reflection of the positions and velocities of a free body with ``joints``, without x and y."""
    return side_by_side(SCALAR, QUATERNION, joints, POLAR, AXIAL, joints)


class Ant(Runner):
    """The fast model has half the time step: with Euler's method at the shipped one Ant falls more easily, and learns
    half as fast (docs/results/ablations.md). Its friction cones are elliptic: with pyramidal ones, engines that orient
    a contact's tangents differently diverge from each other."""

    name, xml, contacts = "ant", "ant.xml", (5, 24)
    model, refused = "fast", NO_FORCES
    split = 2
    frame_skip, dt = 5, 0.05
    obs_size, action_size = 105, 8
    terms: ClassVar[tuple[str, ...]] = ("reward_forward", "reward_ctrl", "reward_contact", "reward_survive")
    noise, normal_velocity = 0.1, True
    outputs: ClassVar[tuple[str, ...]] = ("xpos", "cfrc_ext")

    @staticmethod
    def hinges(*legs: int) -> Reflection:
        """Return the reflection of hips and ankles of ``legs``, numbered as in the model; default: in its order."""
        names = [f"{part}_{leg}" for leg in legs or (1, 2, 3, 4) for part in ("hip", "ankle")]
        return by_names(names, {"_1": "_4", "_2": "_3"}, ("hip",))

    @classmethod
    def symmetry(cls) -> dict[str, Reflection]:
        bodies = side_by_side(*[side_by_side(AXIAL, POLAR)] * 13)
        others = [0, *(1 + 3 * leg + part for leg in (3, 2, 1, 0) for part in range(3))]  # torso; hip, aux, ankle
        forces = tuple(6 * body + i for body in others for i in range(6)), bodies[1]
        return {"policy": side_by_side(free_body(cls.hinges()), forces), "action": cls.hinges(4, 1, 2, 3)}

    def coordinates(self) -> tuple[Reflection, Reflection]:
        return floating(self.hinges())

    def position(self, fields: Fields) -> Tensor:
        # the reference differentiates the torso's frame, which is one substep behind qpos
        return fields["xpos"][:, 1, 0]

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        forces = fields["cfrc_ext"][:, 1:].flatten(1).clamp(-1.0, 1.0)  # [N, 13 * 6]; body 0 is the world
        return {"policy": torch.cat((fields["qpos"][:, 2:], fields["qvel"], forces), 1)}

    def healthy(self, fields: Fields) -> Tensor:
        height = fields["qpos"][:, 2]
        return finite(fields) & (height >= 0.2) & (height <= 1.0)

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        gained, healthy = self.gained(fields, memory), self.healthy(fields)
        terms = {
            "reward_forward": gained / self.dt,
            "reward_ctrl": ctrl_cost(fields, 0.5),
            "reward_survive": healthy.to(gained),
        }
        if "cfrc_ext" in self.outputs:
            forces = fields["cfrc_ext"].flatten(1).clamp(-1.0, 1.0)
            terms["reward_contact"] = forces.square_().sum(1).mul_(-5e-4)
        return Verdict(terms, ~healthy, {"distance": gained})


class AntJoints(Joints, Ant):
    """``AntEnv(include_cfrc_ext_in_observation=False, contact_cost_weight=0)``."""

    obs_size = 27
    terms: ClassVar[tuple[str, ...]] = ("reward_forward", "reward_ctrl", "reward_survive")
    outputs: ClassVar[tuple[str, ...]] = ("xpos",)

    @classmethod
    def symmetry(cls) -> dict[str, Reflection]:
        return {**super().symmetry(), "policy": free_body(cls.hinges())}


class AntLegacy(Ant):
    """As in version 0.2: physics steps as long as the shipped model's."""

    split = 1


class AntJointsLegacy(AntJoints):
    """As in version 0.2: physics steps as long as the shipped model's, and a reward that counts contact forces."""

    terms, outputs, refused, split = Ant.terms, Ant.outputs, COUNTED, 1


def _body_observe(fields: Fields) -> Obs:
    """Return the observation of both humanoids, [N, 348]."""
    parts = [fields["qpos"][:, 2:], fields["qvel"]]
    parts += [fields["cinert"][:, 1:].flatten(1), fields["cvel"][:, 1:].flatten(1)]
    parts += [fields["qfrc_actuator"][:, 6:], fields["cfrc_ext"][:, 1:].flatten(1)]
    return {"policy": torch.cat(parts, 1)}


def _impact(fields: Fields) -> Tensor:
    """Return -5e-7 * |cfrc_ext|^2, at least -10: [N]."""
    return fields["cfrc_ext"].flatten(1).square().sum(1).mul_(-5e-7).clamp_(min=-10.0)


ABDOMEN = ("abdomen_z", "abdomen_y", "abdomen_x")
LIMBS = tuple(f"{side}_{part}" for side in ("right", "left") for part in ("hip_x", "hip_z", "hip_y", "knee"))
LIMBS += tuple(f"{side}_{part}" for side in ("right", "left") for part in ("shoulder1", "shoulder2", "elbow"))


def human(*abdomen: str) -> Reflection:
    """Return the reflection of the joints of a humanoid, with those of the ``abdomen`` first."""
    return by_names([*abdomen, *LIMBS], {"left": "right"}, ("abdomen_x", "abdomen_z", "shoulder"))


class Humanoid(Runner):
    name, xml, contacts = "humanoid", "humanoid.xml", (12, 37)
    model, refused = "fast", NO_FORCES
    frame_skip, dt = 5, 0.015
    obs_size, action_size, ctrl_limit = 348, 17, 0.4
    terms: ClassVar[tuple[str, ...]] = ("reward_survive", "reward_forward", "reward_ctrl", "reward_contact")
    noise = 0.01
    outputs: ClassVar[tuple[str, ...]] = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")

    def __init__(self, robot: Robot):
        super().__init__(robot)
        mass = robot.tensor(robot.model.body_mass)
        self._share = mass / mass.sum()  # the nominal model's, also where masses are randomised

    def position(self, fields: Fields) -> Tensor:
        return (fields["xipos"][:, :, 0] * self._share).sum(1)  # the centre of mass

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return _body_observe(fields)

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        gained, height = self.gained(fields, memory), fields["qpos"][:, 2]
        healthy = (height > 1.0) & (height < 2.0)
        terms = {
            "reward_survive": healthy.to(gained) * 5.0,
            "reward_forward": gained * (1.25 / self.dt),
            "reward_ctrl": ctrl_cost(fields, 0.1),
        }
        if "cfrc_ext" in self.outputs:
            terms["reward_contact"] = _impact(fields)
        return Verdict(terms, ~healthy, {"distance": gained})


class HumanoidJoints(Joints, Humanoid):
    """``HumanoidEnv`` without cinert, cvel, qfrc_actuator and cfrc_ext, and with ``contact_cost_weight=0``."""

    obs_size = 45
    terms: ClassVar[tuple[str, ...]] = ("reward_survive", "reward_forward", "reward_ctrl")
    outputs: ClassVar[tuple[str, ...]] = ("xipos",)

    @classmethod
    def symmetry(cls) -> dict[str, Reflection]:
        return {"policy": free_body(human(*ABDOMEN)), "action": human("abdomen_y", "abdomen_z", "abdomen_x")}

    def coordinates(self) -> tuple[Reflection, Reflection]:
        return floating(human(*ABDOMEN))


class HumanoidJointsLegacy(HumanoidJoints):
    """As in version 0.2: the reward counts contact forces."""

    terms, outputs, refused = Humanoid.terms, ("xipos", "cfrc_ext"), COUNTED


class HumanoidStandup(GymTask):
    """``reward_alive`` is a constant that gymnasium adds without a name."""

    name, xml = "humanoidstandup", "humanoidstandup.xml"
    contacts = (40, 37)  # C needs 13; Warp lost some with room for 20, while the body lies on the ground
    model, refused = "fast", NO_FORCES
    frame_skip, dt = 5, 0.015
    obs_size, action_size, ctrl_limit = 348, 17, 0.4
    terms: ClassVar[tuple[str, ...]] = ("reward_linup", "reward_quadctrl", "reward_impact", "reward_alive")
    noise = 0.01
    outputs: ClassVar[tuple[str, ...]] = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return _body_observe(fields)

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        height = fields["qpos"][:, 2]
        terms = {
            "reward_linup": height / self.robot.model.opt.timestep,
            "reward_quadctrl": ctrl_cost(fields, 0.1),
            "reward_alive": torch.ones_like(height),
        }
        if "cfrc_ext" in self.outputs:
            terms["reward_impact"] = _impact(fields)
        return Verdict(terms)


class HumanoidStandupJoints(Joints, HumanoidStandup):
    """``HumanoidStandupEnv`` with the observations of :class:`HumanoidJoints` and ``impact_cost_weight=0``."""

    obs_size = 45
    terms: ClassVar[tuple[str, ...]] = ("reward_linup", "reward_quadctrl", "reward_alive")
    outputs: ClassVar[tuple[str, ...]] = ()


class HumanoidStandupJointsLegacy(HumanoidStandupJoints):
    """As in version 0.2: the reward counts contact forces."""

    terms, outputs, refused = HumanoidStandup.terms, ("cfrc_ext",), COUNTED


class Swimmer(Joints, Runner):
    name, xml, contacts = "swimmer", "swimmer.xml", (0, 2)
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST  # drag is stiff at its time step
    frame_skip, dt = 4, 0.04
    obs_size, action_size = 8, 2
    terms = ("reward_forward", "reward_ctrl")
    noise = 0.1

    @classmethod
    def symmetry(cls) -> dict[str, Reflection]:
        turned: Reflection = ((0, 1, 2), (-1, -1, -1))
        return {"policy": side_by_side(turned, SCALAR, ((0,), (-1,)), turned), "action": ((0, 1), (-1, -1))}

    def coordinates(self) -> tuple[Reflection, Reflection]:
        return (((0, 1, 2, 3, 4), (1, -1, -1, -1, -1)),) * 2

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        gained = self.gained(fields, memory)
        terms = {"reward_forward": gained / self.dt, "reward_ctrl": ctrl_cost(fields, 1e-4)}
        return Verdict(terms, None, {"distance": gained})
