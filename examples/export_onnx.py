"""Train, export, and run the policy with ONNX Runtime and NumPy alone, as on a robot's computer.

    python examples/export_onnx.py                       # Pendulum, 30 seconds
    python examples/export_onnx.py run policy.onnx       # only the second part: needs neither pql nor torch

The file contains the normaliser of the observations and the bounds of the actions.
"""

import json
import sys

import numpy as np


def train_and_export(*overrides, out="exported"):
    import pql

    run = pql.train("task=pendulum", "algo=pql", "budget.seconds=30", *overrides)
    return run, pql.export_policy(run.run_dir, out=out, formats=["onnx"]).files["onnx"]


def swing_up(file, steps=200):
    """Control a pendulum (Gymnasium's Pendulum-v1, in NumPy) from hanging down. Returns the rewards and the torques."""
    import onnxruntime

    policy = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    about = json.loads(policy.get_modelmeta().custom_metadata_map["pql"])  # names, shapes and bounds
    assert about["inputs"][0]["shape"][1:] == [3]
    angle, speed, rewards, torques = np.pi, 0.0, [], []
    for _ in range(steps):
        obs = np.array([[np.cos(angle), np.sin(angle), speed]], np.float32)
        torque = float(policy.run(None, {"obs.policy": obs})[0][0, 0])  # in N m, already scaled to +-2
        gap = (angle + np.pi) % (2 * np.pi) - np.pi
        rewards.append(-(gap**2 + 0.1 * speed**2 + 0.001 * torque**2))
        torques.append(torque)
        speed = np.clip(speed + 0.05 * (15 * np.sin(angle) + 3 * torque), -8, 8)
        angle += 0.05 * speed
    return rewards, torques


def main(*words):
    file = words[1] if words[:1] == ("run",) else train_and_export(*words)[1]
    rewards, torques = swing_up(str(file))
    print(f"{file}: return {sum(rewards):,.0f}, torques from {min(torques):.2f} to {max(torques):.2f} N m")


if __name__ == "__main__":
    main(*sys.argv[1:])
