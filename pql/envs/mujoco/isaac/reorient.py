"""In-hand reorientation: base of the Shadow Hand, Allegro Hand and D'Claw tasks.

A cube falls into an open hand and has to be turned to the goal orientation; each success draws the next goal. The
definitions are those of Isaac Gym's ShadowHand and AllegroHand (Makoviychuk et al. 2021). Differences from Isaac's
tasks, in addition to those in each hand's module:

- MuJoCo's contacts, with the Newton solver and elliptic cones.
- Start joint angles are clamped to the joints' limits (Isaac: the first physics step does that).
- An episode restarts in the step that ends it (Isaac: one step later, with an action for the dead state), so it has 599
  steps and its first observation is returned.
- The cube has no angular damping (Isaac: .5 / s).

The mean number of successes in finished episodes is ``episode/success``; Isaac's ``consecutive_successes`` is a running
mean of it.
"""

import math
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import conjugate, product, rotation, unscale
from pql.envs.mujoco.task import HOLD, Draw, Memory, Robot, Start, Task, Verdict
from pql.types import Obs

OBJECT = ("pose", "motion", "goal", "error")  # parts of observations about cube and goal
DISPLAYED = (-0.2, -0.06, 0.12)  # offset of the displayed goal from the cube's start, metres


def xyzw(quat: Tensor) -> Tensor:
    """Convert MuJoCo's quaternions (w, x, y, z) to the observations' order (x, y, z, w): [..., 4]."""
    return quat.roll(-1, -1)


def orientations(count: int, draw: Draw) -> Tensor:
    """Draw rotations about y, then about x, by angles uniform on the circle (not uniform on SO(3)): [count, 4]."""
    x, y = draw.uniform(-math.pi / 2, math.pi / 2, count, 2).unbind(1)
    return torch.stack((x.cos() * y.cos(), x.sin() * y.cos(), x.cos() * y.sin(), x.sin() * y.sin()), 1)


def angle_between(left: Tensor, right: Tensor) -> Tensor:
    """Return the angle in 0..pi of the rotation between unit quaternions, [N, 4] each -> [N]."""
    apart = torch.linalg.vector_norm(product(left, conjugate(right))[:, 1:], dim=1)
    return 2 * apart.clamp(max=1.0).asin()


class Reorient(Task):
    """A hand whose joints come first in the model, and one cube on a free joint, the last.

    reward = -10 d + 1 / (a + .1) - .0002 |action|^2 + 250 on success, where d is the cube's distance from its place
    above the palm and a the angle to the goal. Success: a <= .1, at any position of the cube. Ends where d >= .24.

    The observation of a successful step still shows the goal just reached; the next goal applies from the beginning of
    the next step, whose action was therefore chosen for the old goal.

    Attributes:
        place: start position of the cube, +-1 cm; the place used by the reward is 4 cm below.
        parts: entries of :meth:`measure` that the policy observes, in this order; all clamped to +-5.
        tolerance: angle to the goal that counts as success.
        fall: distance from its place at which the cube is lost.
    """

    time_limit = 599
    terms: ClassVar[tuple[str, ...]] = ("distance", "rotation", "action_cost", "bonus")
    metrics = ("success",)
    model, refused = "fast", "the task sets contacts and integrator itself"
    integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    impratio = HOLD
    place: ClassVar[tuple[float, float, float]]
    parts: ClassVar[tuple[str, ...]]
    tolerance: ClassVar[float] = 0.1
    fall: ClassVar[float] = 0.24

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self.joints = robot.model.njnt - 1
        self.low, self.high = robot.tensor(robot.model.jnt_range[: self.joints]).unbind(1)
        self._begin = robot.tensor(self.place)
        self.goal_place = self._begin - robot.tensor([0.0, 0.0, 0.04])

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        spec.option.timestep = cls.dt / cls.frame_skip
        # C has a dedicated box-box collision function; Warp has a copy, used only with this flag, and agrees only then
        spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_NATIVECCD.value

    # -- episodes and goals -------------------------------------------------------------------------------------------

    def start(self, count: int, draw: Draw) -> Start:
        share = draw.uniform(-1.0, 1.0, count, self.joints)
        hand = (0.2 * (self.low + (self.high - self.low) * share)).clamp(self.low, self.high)
        place = self._begin + draw.uniform(-0.01, 0.01, count, 3)
        qpos = torch.cat((hand, place, orientations(count, draw)), 1)
        no = torch.zeros(count, dtype=torch.bool, device=hand.device)
        memory = {
            "goal": orientations(count, draw),
            "next": orientations(count, draw),  # the goal after this one
            "reached": no,  # the latest step reached the goal
            "begun": no,  # an action has been taken
            "action": hand.new_zeros(count, self.action_size),
        }
        return Start(qpos, self.robot.qvel0.repeat(count, 1), memory)

    def goal(self, memory: Memory) -> Tensor:
        """Return the step's goal orientation [N, 4], from the memory before the step."""
        return torch.where(memory["reached"][:, None], memory["next"], memory["goal"])

    def cube(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Return the cube's position [N, 3] and orientation [N, 4]."""
        return fields["qpos"][:, self.joints : self.joints + 3], fields["qpos"][:, self.joints + 3 :]

    def solved(self, fields: Fields, memory: Memory) -> Tensor:
        """Return [N] bool: the step reached its goal."""
        return angle_between(self.cube(fields)[1], self.goal(memory)) <= self.tolerance

    def taken(self, fields: Fields, memory: Memory) -> Tensor:
        """Return the latest step's action, [N, A] in -1..1, recovered from the controls that it set."""
        return (fields["ctrl"] - self.robot.ctrl_middle) / self.robot.ctrl_half

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        goal = self.goal(memory)
        return {
            "goal": goal,
            "next": orientations(len(goal), draw),
            "reached": self.solved(fields, memory),
            "begun": torch.ones_like(memory["begun"]),
            "action": self.taken(fields, memory),
        }

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        place, quat = self.cube(fields)
        distance = torch.linalg.vector_norm(place - self.goal_place, dim=1)
        angle = angle_between(quat, self.goal(memory))
        solved = angle <= self.tolerance
        terms = {
            "distance": -10 * distance,
            "rotation": 1 / (angle + 0.1),
            "action_cost": -0.0002 * self.taken(fields, memory).square().sum(1),
            "bonus": 250 * solved.to(angle),
        }
        return Verdict(terms, distance >= self.fall, {"success": solved})

    # -- observations -------------------------------------------------------------------------------------------------

    def measure(self, fields: Fields, memory: Memory) -> dict[str, Tensor]:
        """Return all possible parts of the observations, by name: [N, ...]. World frame, metres."""
        qpos, qvel, joints = fields["qpos"], fields["qvel"], self.joints
        place, quat = self.cube(fields)
        spin = (rotation(quat) * qvel[:, None, joints + 3 :]).sum(2)  # from the cube's frame into the world's
        return {
            "joints": unscale(qpos[:, :joints], self.low, self.high),
            "joint_speeds": 0.2 * qvel[:, :joints],
            "place": place,
            "pose": torch.cat((place, xyzw(quat)), 1),
            "motion": torch.cat((qvel[:, joints : joints + 3], 0.2 * spin), 1),
            "goal": torch.cat((self.goal_place.expand(len(quat), 3), xyzw(memory["goal"])), 1),
            "error": xyzw(product(quat, conjugate(memory["goal"]))),
            "action": memory["action"],
        }

    def observe(self, fields: Fields, memory: Memory) -> Obs:
        return {"policy": pick(self.measure(fields, memory), self.parts)}

    def show(self, data: mujoco.MjData, memory: Memory) -> None:
        """Set the orientation of the goal displayed next to the hand."""
        data.mocap_quat[0] = memory["goal"].cpu().numpy()


def pick(measured: dict[str, Tensor], parts: tuple[str, ...]) -> Tensor:
    """Concatenate ``parts``, clamped to +-5: [N, D]."""
    return torch.cat([measured[name] for name in parts], 1).clamp(-5.0, 5.0)


def look(spec: mujoco.MjSpec, place: tuple[float, float, float]) -> None:
    """Set the camera so that the image shows the cube, the hand around it, and the goal next to it."""
    spec.stat.center, spec.stat.extent = [place[0] - 0.08, place[1] + 0.04, place[2] - 0.01], 0.33
    spec.visual.global_.azimuth, spec.visual.global_.elevation = 115.0, -30.0


def furnish(spec: mujoco.MjSpec, place: tuple[float, float, float], half: float, density: float) -> None:
    """Add a cube of edge 2 ``half`` metres and ``density`` kg/m^3, the displayed goal, and a visual floor and light."""
    world = spec.worldbody
    spec.visual.headlight.ambient = [0.4, 0.4, 0.4]
    world.add_light(pos=[0, 0, 2], dir=[0, 0, -1])
    floor = world.add_geom(name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[1, 1, 0.1], rgba=[0.75, 0.78, 0.8, 1])
    floor.contype = floor.conaffinity = 0
    cube = world.add_body(name="object", pos=place)
    cube.add_freejoint(name="object")
    goal = world.add_body(name="goal", pos=[a + b for a, b in zip(place, DISPLAYED, strict=True)], mocap=True)
    for body, touches in ((cube, 1), (goal, 0)):
        block = body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=[half] * 3, density=density, rgba=[0.9, 0.9, 0.9, 1])
        block.friction, block.condim = [1, 0.005, 0.001], 4
        block.contype = block.conaffinity = touches
        for axis in range(3):  # a red, a green and a blue mark, so that no two orientations look alike
            mark = [float(axis == other) for other in range(3)]
            size = [0.001 if axis == other else 0.7 * half for other in range(3)]
            place_of_mark = [half * one for one in mark]
            body.add_site(type=mujoco.mjtGeom.mjGEOM_BOX, pos=place_of_mark, size=size, rgba=[*mark, 1.0])
