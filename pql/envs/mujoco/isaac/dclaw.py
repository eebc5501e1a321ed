"""D'Claw: four three-motor fingers above a table turn a cube to a goal orientation. An approximation.

The PQL paper's task came from dexenv (Chen et al. 2022, Visual Dexterity), whose robot and objects are a separate
download. The definition is dexenv's; the robot is four copies of the finger of ROBEL's three-fingered D'Claw (Ahn et
al. 2019, Apache 2.0), from the package ``robel``. Known differences from dexenv:

- One cube of 6 cm (dexenv: many shapes).
- A success ends the episode, and cube and fingers restart (dexenv: the cube stays and a new goal is drawn).
- Nothing is randomised and nothing pushes the cube unless configured.
- An episode has 119 steps and restarts in the step that ends it.
- ROBEL's boxes and tips touch cube and table; among each other, only the tips do.

Chosen here, for lack of a source: the fingers' placement (on a circle of ROBEL's radius, bent outwards at the middle
joint), masses and damping (ROBEL's), the spread of start poses, fingers without weight, and the norms in the success
test.
"""

import copy
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.isaac.measure import add_sensors
from pql.envs.mujoco.isaac.reorient import Reorient, angle_between, furnish, xyzw
from pql.envs.mujoco.isaac.shadow_hand import MOTION, ORDER
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Draw, Memory, Robot, Start, Verdict, add_servo

FINGERS = 4
RADIUS, HEIGHT = 0.06, 0.25  # of the circle of fingers; of the plate above the table: metres
# of each finger's joints, from the plate outwards
STIFFNESS, DAMPING, EFFORT = (2.77, 3.56, 3.56), (0.274, 0.382, 0.382), 2.6
POSE = (0.0, -0.8, 1.1)  # start angles, radians; outwards at the second joint, inwards at the third
SPREAD = 0.1  # of the start angles around ``POSE``, radians
HALF, DENSITY = 0.03, 400.0  # of the cube: half its edge, metres; kg/m^3
CUBE, TABLE, LINK, TIP = 1, 2, 4, 8  # collision bits


def _included(file: Path) -> list[ET.Element]:
    """Return the elements of a ROBEL file, whose XML declaration follows a comment, which parsers refuse."""
    return list(ET.fromstring(file.read_text().partition("?>")[2]))


def _finger(first: ET.Element, index: int) -> ET.Element:
    """Return copy ``index`` of ROBEL's first finger, at its place on the plate."""
    finger, angle = copy.deepcopy(first), 2 * math.pi * index / FINGERS
    for element in finger.iter():
        if name := element.get("name"):
            element.set("name", name.replace("FF", f"F{index}"))
    finger.set("pos", f"{RADIUS * math.cos(angle)} {RADIUS * math.sin(angle)} 0.003")
    finger.set("euler", f"0 0 {angle + math.pi / 2}")
    return finger


def _claw() -> mujoco.MjSpec:
    """Return ROBEL's plate with four of its fingers, hanging above the origin."""
    file = model_file("dclaw")
    (plate,) = _included(file)
    fingers = [body for body in plate.findall("body") if (body.get("name") or "").endswith("base")]
    for finger in fingers:
        plate.remove(finger)
    plate.extend(_finger(fingers[0], index) for index in range(FINGERS))
    plate.set("pos", f"0 0 {HEIGHT}")
    root = ET.Element("mujoco", model="dclaw")
    parts = _included(file.parent / "dependencies3xh.xml")
    root.extend(part for part in parts if part.tag not in ("actuator", "sensor"))  # they belong to the removed fingers
    ET.SubElement(root, "worldbody").append(plate)
    spec = mujoco.MjSpec.from_string(ET.tostring(root, encoding="unicode"))
    spec.meshdir = str(file.parent.parent)
    return spec


class DClaw(Reorient):
    """Observation (109): for each of 12 joints the position scaled to its range and 0.2 x velocity; the cube's
    position, orientation, velocity and 0.2 x angular velocity; the goal's orientation, and the rotation from goal to
    cube; for each of four fingertips position, orientation, velocity and angular velocity; the action. All clamped to
    +-5, in the world frame, quaternions (x, y, z, w). Action (12): each joint's target is its position + 0.29 rad x
    (0.8 x action + 0.2 x the previous step's displacement).

    reward = -(mean distance of fingertips and cube) + 1 / (a + .1) - 20 min(sum |torque x speed|, 10) + 800 on success
    - 100 if the cube is 0.15 m or more from its place; a is the angle to the goal. Success: a <= .4, and joints, cube
    and targets nearly at rest. Success and a lost cube end the episode.
    """

    name, contacts = "dclaw", (24, 96)
    obs_size, action_size = 109, 12
    frame_skip, dt = 20, 0.08335
    time_limit = 119
    terms: ClassVar[tuple[str, ...]] = ("distance", "rotation", "energy", "bonus", "fall")
    outputs = ("sensordata", "qfrc_actuator")
    place = (0.0, 0.0, 0.12)
    tolerance = 0.4
    fall = 0.15
    parts = ("joints", "joint_speeds", "pose", "motion", "goal_turn", "error", "fingertips", "action")
    STRIDE: ClassVar[float] = 3.5 * 0.0833
    SMOOTH: ClassVar[float] = 0.2
    RATES: ClassVar[tuple[float, float, float]] = (0.25, 0.04, 0.5)  # success bounds: joints rad/s, cube m/s and rad/s

    def __init__(self, robot: Robot):
        super().__init__(robot)
        self._pose = robot.tensor(POSE * FINGERS)
        first = robot.model.sensor(f"F0tip {MOTION[0]}").adr[0]
        order = torch.tensor(ORDER, device=robot.device)
        self._tips = first + 13 * torch.arange(FINGERS, device=robot.device)[:, None] + order  # [4, 13] columns

    @classmethod
    def source(cls) -> mujoco.MjSpec:
        spec = _claw()
        for geom in spec.geoms:
            touches = geom.type != mujoco.mjtGeom.mjGEOM_MESH
            tip = geom.type == mujoco.mjtGeom.mjGEOM_CAPSULE
            geom.contype, geom.conaffinity = (LINK | TIP * tip, TIP * tip) if touches else (0, 0)
            geom.condim = 3
            if not touches:
                geom.mass = geom.density = 0  # visual only; the collision shapes have the masses
        spec.compiler.inertiagrouprange = [0, 5]
        for body in spec.bodies[1:]:
            body.gravcomp = 1
        for finger in range(FINGERS):
            for joint in range(3):
                _drive(spec, finger, joint)
        furnish(spec, cls.place, HALF, DENSITY)
        spec.geom("floor").contype, spec.geom("floor").conaffinity = TABLE, CUBE | LINK
        cube = spec.body("object").geoms[0]
        cube.contype, cube.conaffinity = CUBE, LINK
        spec.stat.center, spec.stat.extent = [-0.03, 0.0, 0.12], 0.4
        spec.visual.global_.azimuth, spec.visual.global_.elevation = 115.0, -20.0
        return spec

    @classmethod
    def edit(cls, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for finger in range(FINGERS):
            add_sensors(spec, MOTION, mujoco.mjtObj.mjOBJ_SITE, f"F{finger}tip")

    # -- episodes -----------------------------------------------------------------------------------------------------

    def start(self, count: int, draw: Draw) -> Start:
        """Start fingers near their pose and the cube between them, cube and goal orientations uniform on SO(3)."""
        hand = self._pose + draw.uniform(-SPREAD, SPREAD, count, self.joints)
        place = self._begin + draw.uniform(-0.01, 0.01, count, 3)
        qpos = torch.cat((hand, place, _random_orientations(count, draw)), 1)
        still = hand.new_zeros(count, self.action_size)
        memory = {"goal": _random_orientations(count, draw), "action": still, "done": still}
        return Start(qpos, self.robot.qvel0.repeat(count, 1), memory)

    def goal(self, memory: Memory) -> Tensor:
        return memory["goal"]

    def track(self, fields: Fields) -> Memory:
        return {"angles": fields["qpos"][:, : self.joints].clone()}

    def control(self, action: Tensor, fields: Fields, memory: Memory) -> Tensor:
        """Joint targets [N, nu] from ``action`` [N, A]."""
        stride = (1 - self.SMOOTH) * action + self.SMOOTH * memory["done"]
        return (memory["angles"] + self.STRIDE * stride).clamp(self.low, self.high)

    def done(self, fields: Fields, memory: Memory) -> Tensor:
        """Return the applied distance of targets from joints, as a share of the largest: [N, 12] in -1..1."""
        return ((fields["ctrl"] - memory["angles"]) / self.STRIDE).clamp(-1.0, 1.0)

    def evolve(self, fields: Fields, memory: Memory, draw: Draw) -> Memory:
        done = self.done(fields, memory)
        # where a joint's limit clamped the target, the action that gives the clamped target
        action = ((done - self.SMOOTH * memory["done"]) / (1 - self.SMOOTH)).clamp(-1.0, 1.0)
        return {"done": done, "action": action}

    def judge(self, fields: Fields, memory: Memory) -> Verdict:
        place, quat = self.cube(fields)
        hand, speeds = slice(self.joints), fields["qvel"]
        tips = fields["sensordata"][:, self._tips[:, :3]]  # [N, 4, 3]
        angle = angle_between(quat, self.goal(memory))
        power = (fields["qfrc_actuator"][:, hand] * speeds[:, hand]).abs().sum(1)
        fell = torch.linalg.vector_norm(place - self.goal_place, dim=1) >= self.fall
        solved = (angle <= self.tolerance) & self._rests(fields, memory)
        terms = {
            "distance": -torch.linalg.vector_norm(tips - place[:, None], dim=2).mean(1),
            "rotation": 1 / (angle + 0.1),
            "energy": -20 * power.clamp(max=10.0),
            "bonus": 800 * solved.to(angle),
            "fall": -100 * fell.to(angle),
        }
        return Verdict(terms, fell | solved, {"success": solved})

    def _rests(self, fields: Fields, memory: Memory) -> Tensor:
        """Return [N] bool: joints, cube and targets are nearly at rest."""
        j, speeds = self.joints, fields["qvel"]
        parts = (speeds[:, :j], speeds[:, j : j + 3], speeds[:, j + 3 :], self.done(fields, memory))
        rates = [torch.linalg.vector_norm(part, dim=1) for part in parts]
        return torch.stack([rate <= most for rate, most in zip(rates, (*self.RATES, 1.0), strict=True)]).all(0)

    def measure(self, fields: Fields, memory: Memory) -> dict[str, Tensor]:
        tips = fields["sensordata"][:, self._tips].flatten(1)
        return {**super().measure(fields, memory), "goal_turn": xyzw(memory["goal"]), "fingertips": tips}


def _random_orientations(count: int, draw: Draw) -> Tensor:
    """Draw orientations uniform on SO(3): [count, 4] unit quaternions."""
    return torch.nn.functional.normalize(draw.normal(1.0, count, 4), dim=1)


def _drive(spec: mujoco.MjSpec, finger: int, joint: int) -> None:
    """Add a position servo, and remove the passive damping that ROBEL gives the joint in addition."""
    hinge = spec.joint(f"F{finger}J1{joint}")
    hinge.damping = [0, 0, 0]
    add_servo(spec, hinge.name, hinge.range, EFFORT, STIFFNESS[joint], DAMPING[joint])
