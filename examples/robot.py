"""Train Go1, export the policy, and walk with ``pql.deploy``: a simulation takes the place of the robot.

    python examples/robot.py budget.seconds=600            # needs the robot's model: make robots
    python examples/robot.py run exported/policy.onnx      # only the second part

On a robot only ``read`` and ``write`` differ; ``pql/deploy.py`` is copied there and needs neither pql nor torch.
"""

import sys

import mujoco

import pql
from pql.deploy import Controller, Limits


class Robot:
    """The robot's drivers: measurements, and servos of the joints. Here a simulation by MuJoCo."""

    def __init__(self, controller, velocity=(0.8, 0.0, 0.0)):
        self.model = pql.make_env("go1_velocity", 1).model
        self.data, self.velocity, self.pose = mujoco.MjData(self.model), velocity, controller.all_default
        joints = [self.model.joint(name) for name in controller.all_joints]
        self.q, self.v = [j.qposadr[0] for j in joints], [j.dofadr[0] for j in joints]
        self.data.qpos[2], self.data.qpos[self.q] = 0.35, self.pose

    def read(self):
        """Return the terms of the observation."""
        mujoco.mj_kinematics(self.model, self.data)
        base = self.data.body("trunk").xmat.reshape(3, 3).T  # world -> base
        qpos, qvel = self.data.qpos, self.data.qvel
        motion = {"base_lin_vel": base @ qvel[:3], "base_ang_vel": qvel[3:6], "projected_gravity": -base[:, 2]}
        return {**motion, "command": self.velocity, "joint_pos": qpos[self.q] - self.pose, "joint_vel": qvel[self.v]}

    def write(self, command):
        """Command the servos for one step of 20 ms."""
        self.model.actuator_gainprm[:, 0], self.model.actuator_biasprm[:, 1] = command.kp, -command.kp
        self.model.actuator_biasprm[:, 2], self.data.ctrl[:] = -command.kd, command.target
        mujoco.mj_step(self.model, self.data, nstep=4)


def walk(file, steps=250):
    with Controller(file, Limits(rate=30.0), log="walk.safetensors") as controller:
        robot = Robot(controller)
        controller.reset(positions=robot.data.qpos[robot.q])
        used = controller.run(robot.read, robot.write, steps)
    print(f"{steps * controller.dt:.1f} s: {robot.data.qpos[0]:.2f} m ahead, at most {1e3 * max(used):.1f} ms a step")
    return robot


def main(*words):
    if words[:1] == ("run",):
        return walk(words[1])
    run = pql.train("task=go1_velocity", *words)
    return walk(pql.export_policy(run.run_dir, "exported", ["onnx"]).files["onnx"])


if __name__ == "__main__":
    main(*sys.argv[1:])
