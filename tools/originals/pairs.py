"""Conversion of our tasks' states to IsaacGymEnvs' tensors: a :class:`Pair` for each task of ``check.py``.

A pair fills the original's tensors from our fields and memory, and reads from both the quantities to compare. The pairs
of the hands are in ``hands.py``.
"""

import math
from pathlib import Path
from typing import Any, ClassVar

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.contract.env import make_env
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.isaac.franka import EFFORT, GRIP, LARGE, SMALL, TOP, WIDER
from pql.envs.mujoco.isaac.measure import rotation
from pql.envs.mujoco.task import Memory, Start
from tools.originals.by_hand import stacker
from tools.originals.isaac_stub import DOUBLE, Scene, build, settings

Fields = dict[str, Tensor]
Sides = tuple[Tensor, Tensor]  # theirs and ours, [N, D] each


def body(fields: Fields, q: int = 0, v: int = 0) -> Tensor:
    """Free body in Isaac Gym's layout: position, (x, y, z, w), velocity and angular velocity, world frame: [N, 13]."""
    qpos, qvel = fields["qpos"][:, q : q + 7], fields["qvel"][:, v : v + 6]
    spin = (rotation(qpos[:, 3:]) @ qvel[:, 3:, None]).squeeze(-1)
    return torch.cat((qpos[:, :3], qpos[:, 3:].roll(-1, 1), qvel[:, :3], spin), 1)


def still(n: int, place: tuple[float, float, float]) -> Tensor:
    """Return a body at rest without rotation: [n, 13]."""
    return torch.tensor([[*place, 0, 0, 0, 1, *[0] * 6]], dtype=DOUBLE).repeat(n, 1)


def quats(n: int, gen: torch.Generator, size: float) -> Tensor:
    """Return rotations by about ``size`` radians about random axes, (w, x, y, z): [n, 4]."""
    axis = torch.randn(n, 3, generator=gen, dtype=DOUBLE) * size / 2
    return torch.nn.functional.normalize(torch.cat((torch.ones(n, 1, dtype=DOUBLE), axis), 1), dim=1)


class Pair:
    """Our task ``ours`` and class ``theirs`` of module ``module`` with settings ``config``."""

    ours: ClassVar[str]
    module: ClassVar[str]
    theirs: ClassVar[str]
    config: ClassVar[str]
    changed: ClassVar[dict[str, Any]] = {}  # overrides of the section ``env``
    envs, steps = 32, 128

    def __init__(self, root: Path, num_envs: int):
        made = make_env(self.ours, num_envs, "cpu", threads=1)
        assert isinstance(made, MujocoVec)
        self.n, self.env, self.model = num_envs, made, made.model
        self.task: Any = made.task
        config = settings(root, self.config)
        config["env"] |= self.changed
        self.clip = float(config["env"].get("clipObservations", math.inf))
        self.scene = self.make_scene(num_envs)
        self.original = build(root, self.module, self.theirs, config, self.scene)

    def make_scene(self, n: int) -> Scene:
        raise NotImplementedError

    def show(self, fields: Fields, memory: Memory) -> None:
        """Copy one of our states to the original's tensors."""
        raise NotImplementedError

    def clear(self, memory: Memory) -> None:
        """Set the original's counters and flags to their values before one of our steps."""
        self.original.reset_buf.zero_()
        self.original.progress_buf.zero_()

    def scatter(self, gen: torch.Generator) -> None:
        """Make the next states more varied than random actions would."""

    def act(self, obs: Tensor, gen: torch.Generator) -> Tensor:
        return torch.rand(self.n, self.task.action_size, generator=gen) * 2 - 1

    def controls(self, fields: Fields) -> Sides:
        """Return the motor commands of the step that led to ``fields``."""
        raise NotImplementedError

    def starts(self, start: Start) -> Sides:
        """Return states after the original's ``reset_idx``, and ours."""
        raise NotImplementedError

    def begin(self) -> None:
        """Reset every episode of the original."""
        self.original.reset_idx(torch.arange(self.n))

    def ended(self, terminated: Tensor, memory: Memory) -> Tensor:
        """Return the flags [N] that correspond to the original's ``reset``, without time limits."""
        return terminated

    def joints(self, fields: Fields, columns: slice, first: int = 0) -> Tensor:
        """Return positions and velocities in Isaac Gym's layout [N, J, 2]; ``first``: offset of the free joint."""
        at, pace = fields["qpos"][:, columns], fields["qvel"][:, columns.start - first : columns.stop - first]
        return torch.stack((at, pace), 2)

    def throw(self, gen: torch.Generator, lift: float) -> None:
        """Throw a fifth of the robots into the air, rotated and moving, joints anywhere in or slightly beyond range."""
        env, n = self.env, self.n
        qpos, qvel = env.engine.fields["qpos"].clone(), env.engine.fields["qvel"].clone()
        some = torch.rand(n, generator=gen) < 0.2
        low, high = torch.tensor(self.model.jnt_range[1:], dtype=DOUBLE).clamp(-3, 3).unbind(1)
        share = torch.rand(n, len(low), generator=gen, dtype=DOUBLE) * 1.04 - 0.02
        thrown = torch.cat((qpos[:, :3], quats(n, gen, 1.0), low + share * (high - low)), 1)
        thrown[:, 2] += lift * (torch.rand(n, generator=gen) - 0.3)
        rate = 2 * torch.randn(qvel.shape, generator=gen, dtype=DOUBLE)
        qpos, qvel = torch.where(some[:, None], thrown, qpos), torch.where(some[:, None], rate, qvel)
        env.engine.reset(env.engine.rows(torch.ones(n, dtype=torch.bool)), qpos, qvel)
        self.tracked()

    def tracked(self) -> None:
        """Update the memory to a state that was written from outside."""
        fields = dict(self.env.engine.fields)
        fields |= self.task.derive(fields)
        self.env._memory = {**self.env._memory, **self.task.track(fields)}


class Run(Pair):
    sensors: ClassVar[int]

    def make_scene(self, n: int) -> Scene:
        task, j = self.task, self.task.action_size
        gear = torch.tensor(self.model.actuator_gear[:, 0], dtype=DOUBLE)
        tensors = {
            "actor_root_state": still(n, (0, 0, task.height)),
            "dof_state": torch.zeros(n * j, 2, dtype=DOUBLE),
            "force_sensor": torch.zeros(n * self.sensors, 6, dtype=DOUBLE),
            "dof_force": torch.zeros(n * j, dtype=DOUBLE),
        }
        known = {"num_dof": j, "dof_limits_lower": task.low, "dof_limits_upper": task.high}
        known |= {"joint_gears": gear, "motor_efforts": gear, "max_motor_effort": float(gear.max())}
        known["start_rotation"] = torch.tensor([0.0, 0, 0, 1], dtype=DOUBLE)
        return Scene(n, tensors, known)

    def show(self, fields: Fields, memory: Memory) -> None:
        given = self.scene.tensors
        given["actor_root_state"][:] = body(fields)
        given["dof_state"][:] = self.joints(fields, slice(7, None), 1).flatten(0, 1)
        given["force_sensor"][:] = self.task.wrenches(fields).view(-1, 6)
        if "qfrc_actuator" in fields:
            given["dof_force"][:] = fields["qfrc_actuator"][:, 6:].flatten()

    def joints(self, fields: Fields, columns: slice, first: int = 0) -> Tensor:
        return torch.stack((fields["qpos"][:, 7:], fields["qvel"][:, 6:]), 2)

    def scatter(self, gen: torch.Generator) -> None:
        self.throw(gen, 0.5)

    def controls(self, fields: Fields) -> Sides:
        sent = self.scene.sent["set_dof_actuation_force_tensor"]
        return sent, fields["ctrl"] * self.scene.known["motor_efforts"]

    def starts(self, start: Start) -> Sides:
        theirs = torch.cat((self.original.initial_root_states[:, :3], self.original.dof_pos, self.original.dof_vel), 1)
        return theirs, torch.cat((start.qpos[:, :3], start.qpos[:, 7:], start.qvel[:, 6:]), 1)


class Ant(Run):
    ours, module, theirs, config, sensors = "isaac_ant", "ant", "Ant", "Ant", 4


class Humanoid(Run):
    ours, module, theirs, config, sensors = "isaac_humanoid", "humanoid", "Humanoid", "Humanoid", 2


class Anymal(Pair):
    ours, module, theirs, config = "anymal", "anymal", "Anymal", "Anymal"

    def make_scene(self, n: int) -> Scene:
        tensors = {
            "actor_root_state": still(n, (0, 0, 0)),
            "dof_state": torch.zeros(n * 12, 2, dtype=DOUBLE),
            "net_contact_force": torch.zeros(n * 5, 3, dtype=DOUBLE),
            "dof_force": torch.zeros(n * 12, dtype=DOUBLE),
        }
        known = {"num_dof": 12, "dof_names": [*self.task.joints], "base_index": 0, "knee_indices": torch.arange(1, 5)}
        return Scene(n, tensors, known)

    def show(self, fields: Fields, memory: Memory) -> None:
        given, task = self.scene.tensors, self.task
        given["actor_root_state"][:] = body(fields)
        given["dof_state"][:] = torch.stack((fields["qpos"][:, task._q], fields["qvel"][:, task._v]), 2).flatten(0, 1)
        given["net_contact_force"][:] = fields["sensordata"][:, task._felt].flatten(0, 1)
        given["dof_force"][:] = fields["qfrc_actuator"][:, task._v].flatten()
        self.original.commands[:] = memory["command"]

    def scatter(self, gen: torch.Generator) -> None:
        self.throw(gen, 0.3)

    def controls(self, fields: Fields) -> Sides:
        return self.scene.sent["set_dof_position_target_tensor"], fields["ctrl"]

    def starts(self, start: Start) -> Sides:
        one, task = self.original, self.task
        theirs = torch.cat((one.initial_root_states[:, :3], one.dof_pos, one.dof_vel, one.commands), 1)
        mine = (start.qpos[:, :3], start.qpos[:, task._q], start.qvel[:, task._v], start.memory["command"])
        return theirs, torch.cat(mine, 1)


class BallBalance(Pair):
    ours, module, theirs, config = "ballbalance", "ball_balance", "BallBalance", "BallBalance"
    KNEES: ClassVar[list[int]] = [1, 3, 5]

    def make_scene(self, n: int) -> Scene:
        root = torch.stack((still(n, (0, 0, 0.559117)), still(n, (0.2, 0, 2.0))), 1).flatten(0, 1)
        tensors = {
            "actor_root_state": root,
            "dof_state": torch.zeros(n * 6, 2, dtype=DOUBLE),
            "force_sensor": torch.zeros(n * 3, 6, dtype=DOUBLE),
        }
        joints = [self.model.joint(f"{part}_leg{i}").range for i in range(3) for part in ("upper", "lower")]
        low, high = torch.tensor(np.array(joints), dtype=DOUBLE).unbind(1)
        known = {"bbot_dof_lower_limits": low, "bbot_dof_upper_limits": high, "ball_radius": 0.1}
        return Scene(n, tensors, known)

    def show(self, fields: Fields, memory: Memory) -> None:
        given, task = self.scene.tensors, self.task
        parts = [self.model.joint(name) for name in ("tray", "ball")]
        root = [body(fields, int(part.qposadr[0]), int(part.dofadr[0])) for part in parts]
        given["actor_root_state"][:] = torch.stack(root, 1).flatten(0, 1)
        knees = torch.stack((fields["qpos"][:, task._knees], fields["qvel"][:, task._knee_speeds]), 2)
        given["dof_state"].view(-1, 6, 2)[:, self.KNEES] = knees
        force, torque = task._wrench.read(fields)
        felt = torch.cat((force.expand(-1, 3, -1), task._wrench.about(force, torque, task._rim)), 2)
        given["force_sensor"][:] = felt.flatten(0, 1)
        self.original.dof_position_targets[:, self.KNEES] = memory["target"]

    def controls(self, fields: Fields) -> Sides:
        return self.scene.sent["set_dof_position_target_tensor"][:, self.KNEES], fields["ctrl"]

    def starts(self, start: Start) -> Sides:
        one, task = self.original, self.task
        mine = (start.qpos[:, task._ball_qpos], start.qvel[:, task._ball_qvel])
        return torch.cat((one.ball_positions, one.ball_linvels), 1), torch.cat(mine, 1)


class FrankaCubeStack(Pair):
    """Franka's cube stacking; the arm's pose, Jacobian and inertia are MuJoCo's, not the task's own computation."""

    ours, module, theirs, config = "franka_cube_stack", "franka_cube_stack", "FrankaCubeStack", "FrankaCubeStack"
    envs, steps = 23, 180  # in which a stack is finished

    def make_scene(self, n: int) -> Scene:
        rows = {"cubeA": still(n, (0, 0, 1.05)), "cubeB": still(n, (0, 0, 1.05))}
        tensors = {
            "actor_root_state": torch.stack([still(n, (0, 0, 0))] * 5, 1).flatten(0, 1),
            "dof_state": torch.zeros(n * 9, 2, dtype=DOUBLE),
            "rigid_body_state": torch.zeros(n * 4, 13, dtype=DOUBLE),
            "jacobian": torch.eye(6, 9, dtype=DOUBLE).repeat(n, 1, 1, 1),
            "mass_matrix": torch.eye(9, dtype=DOUBLE).repeat(n, 1, 1),
        }
        low, high = torch.tensor(self.model.jnt_range[:9], dtype=DOUBLE).unbind(1)
        known = {
            "num_dofs": 9,
            "envs": [None],
            "_cubeA_id": 3,
            "_cubeB_id": 4,
            "cubeA_size": SMALL,
            "cubeB_size": LARGE,
            "bodies": {"panda_grip_site": 1, "panda_leftfinger_tip": 2, "panda_rightfinger_tip": 3},
            "franka_dof_lower_limits": low,
            "franka_dof_upper_limits": high,
            "_franka_effort_limits": torch.tensor([*EFFORT, 200.0, 200.0], dtype=DOUBLE),
            "_table_surface_pos": np.array([0.0, 0.0, TOP]),
            "_init_cubeA_state": rows["cubeA"],
            "_init_cubeB_state": rows["cubeB"],
        }

        def begin(task: Any) -> None:
            task.reward_settings["table_height"] = TOP
            task.init_data()

        return Scene(n, tensors, known, begin)

    def show(self, fields: Fields, memory: Memory) -> None:
        given, model = self.scene.tensors, self.model
        root = given["actor_root_state"].view(self.n, 5, 13)
        for row, name in ((3, "cube_a"), (4, "cube_b")):
            joint = model.joint(name)
            root[:, row] = body(fields, int(joint.qposadr[0]), int(joint.dofadr[0]))
        given["dof_state"][:] = torch.stack((fields["qpos"][:, :9], fields["qvel"][:, :9]), 2).flatten(0, 1)
        data, parts = mujoco.MjData(model), given["rigid_body_state"].view(self.n, 4, 13)
        jacobian, mass, at = np.zeros((6, model.nv)), np.zeros((model.nv, model.nv)), model.body("hand").id
        for i in range(self.n):
            data.qpos[:], data.qvel[:] = fields["qpos"][i].numpy(), fields["qvel"][i].numpy()
            mujoco.mj_forward(model, data)
            place, frame, quat = data.xpos[at], data.xmat[at].reshape(3, 3), data.xquat[at]
            grip = place + frame @ (0, 0, GRIP)
            mujoco.mj_jac(model, data, jacobian[:3], jacobian[3:], grip, at)
            motion = jacobian[:, :7] @ data.qvel[:7]
            parts[i, 1] = torch.tensor([*grip, *np.roll(quat, -1), *motion])
            for row, side, finger in ((2, 1.0, 7), (3, -1.0, 8)):
                tip = grip + frame @ (0.0, side * (data.qpos[finger] + WIDER), 0.0)
                parts[i, row, :3] = torch.tensor(tip)
            mujoco.mj_jac(model, data, jacobian[:3], jacobian[3:], place, at)
            mujoco.mj_fullM(model, data, mass)
            given["jacobian"][i, 0] = torch.tensor(jacobian[:, :9])
            given["mass_matrix"][i] = torch.tensor(mass[:9, :9])

    def act(self, obs: Tensor, gen: torch.Generator) -> Tensor:
        """Return actions: a third random, a third of the stacking policy, a third of the hovering one."""
        chance, third = super().act(obs, gen), self.n // 3
        if self.task.action_size != 7:
            return chance
        return torch.cat((chance[:third], stacker(obs[third : 2 * third]), stacker(obs[2 * third :], keep=True)))

    def controls(self, fields: Fields) -> Sides:
        one = self.original
        sent = torch.cat((one._arm_control, one._gripper_control), 1)
        return sent.double(), fields["ctrl"]

    def starts(self, start: Start) -> Sides:
        one, qpos, sides = self.original, start.qpos, []
        a, b = (int(self.model.joint(name).qposadr[0]) for name in ("cube_a", "cube_b"))
        cubes = [cube for at in (a, b) for cube in (qpos[:, at : at + 2], qpos[:, at + 3 : at + 7].roll(-1, 1))]
        for state in (one._cubeA_state, one._cubeB_state):
            sides += [state[:, :2], state[:, 3:7]]
        return torch.cat((one._q, *sides), 1), torch.cat((qpos[:, :9], *cubes), 1)


class FrankaCubeStackTorque(FrankaCubeStack):
    ours = "franka_cube_stack_torque"
    changed: ClassVar[dict[str, Any]] = {"controlType": "joint_tor"}
