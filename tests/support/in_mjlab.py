"""Runs in mjlab's Python: pql behind mjlab's own commands. Prints what happened as one line of JSON.

python in_mjlab.py TASK FOLDER
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

TASK, FOLDER = sys.argv[1], Path(sys.argv[2])
os.chdir(FOLDER)

import mjlab.tasks  # noqa: E402, F401
from mjlab.envs import ManagerBasedRlEnv  # noqa: E402
from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper  # noqa: E402
from mjlab.scripts import train  # noqa: E402
from mjlab.tasks.registry import load_env_cfg, load_rl_cfg, load_runner_cls  # noqa: E402

from pql.lab.mjlab import SUFFIX  # noqa: E402

SMALL = (
    *("algo.warmup_steps=8", "algo.batch_size=32", "algo.v_per_step=1", "algo.p_per_v=1.0"),
    *("replay.capacity=4096", "placement.matmul=exact"),
)
EVERY = [
    "--env.scene.num-envs",
    "4",
    "--agent.save-interval",
    "2",
    "--agent.logger",
    "tensorboard",
    "--gpu-ids",
    "None",
]


def command(task, iterations, *words):
    """Call mjlab's ``train`` as its command line does; return the run's folder."""
    sys.argv = ["train", task, *EVERY, "--agent.max-iterations", str(iterations), *words]
    train.main()
    return max(
        (FOLDER / "logs" / "rsl_rl" / load_rl_cfg(task).experiment_name).iterdir(), key=lambda p: p.stat().st_mtime
    )


def files(folder):
    return sorted(p.name for p in folder.glob("model_*.pt"))


def play(task, model):
    """The steps of mjlab's ``play``; return the largest difference of the ONNX file's actions, the
    mean of the actions' magnitude, and the file's metadata."""
    env = RslRlVecEnvWrapper(ManagerBasedRlEnv(small(load_env_cfg(task, play=True)), device="cpu"))
    runner = (load_runner_cls(task) or MjlabOnPolicyRunner)(env, cfg_of(task), device="cpu")
    runner.load(str(model), load_cfg={"actor": True}, strict=True, map_location="cpu")
    policy, rows = runner.get_inference_policy(device="cpu"), []
    obs = env.get_observations()
    for _ in range(100):
        rows.append((obs["actor"].clone(), policy(obs)))
        obs, _, dones, _ = env.step(rows[-1][1])
        policy.reset(dones)
    env.close()
    import onnxruntime

    path = next(iter(model.parent.glob("*.onnx")), None)
    if path is None:
        runner.export_policy_to_onnx(str(model.parent), "made.onnx")
        path = model.parent / "made.onnx"
    session = onnxruntime.InferenceSession(str(path))
    worst = max(float(abs(session.run(None, {"obs": o[:1].numpy()})[0] - a[:1].numpy()).max()) for o, a in rows)
    moved = float(torch.cat([a for _, a in rows]).abs().mean())
    return worst, moved, sorted(session.get_modelmeta().custom_metadata_map)


def small(cfg):
    cfg.scene.num_envs = 4
    return cfg


def cfg_of(task):
    cfg = asdict(load_rl_cfg(task))
    if "algorithm" in cfg:
        cfg["algorithm"]["class_name"] = "pql.lab:Learner"
    return cfg


def rows_differ(task):
    """Return differences between rows that pql got and transitions of the simulator on its own, with equal actions, and
    the number of episodes' ends."""
    torch.manual_seed(0)
    env, cfg = RslRlVecEnvWrapper(ManagerBasedRlEnv(short(task), device="cpu")), cfg_of(task)
    runner, got, actions = MjlabOnPolicyRunner(env, cfg, device="cpu"), [], []
    alg, take = runner.alg, runner.alg.described.step
    alg.described.step = lambda answer: got.append(take(answer)) or got[-1]
    act = alg.act
    alg.act = lambda obs: actions.append(act(obs)) or actions[-1]
    runner.learn(4)
    alg.run.close()
    env.close()
    torch.manual_seed(0)
    own = RslRlVecEnvWrapper(ManagerBasedRlEnv(short(task), device="cpu"))
    own.get_observations(), own.get_observations()
    worst, ends = 0.0, 0
    for action, row in zip(actions, got, strict=True):
        obs, reward, done, extras = own.step(action)
        pairs = [(obs["actor"], row.obs["policy"]), (reward, row.reward), (done, row.first.long())]
        pairs += [(extras["time_outs"].long(), row.truncated.long())]
        worst = max([worst, *(float((a - b).abs().max()) for a, b in pairs)])
        ends += int(done.sum())
    own.close()
    return worst, ends


def short(task):
    cfg = small(load_env_cfg(task))
    cfg.episode_length_s, cfg.seed = 0.5, 0
    return cfg


def main():
    found, words = {}, "(" + ",".join(repr(w) for w in SMALL) + ",)"
    os.environ["PQL_SETTINGS"] = " ".join(SMALL)
    one = command(TASK, 4, "--agent.algorithm.class-name", "pql.lab:Learner")
    found["learner"] = files(one)
    found["resumed"] = files(
        command(TASK, 2, "--agent.algorithm.class-name", "pql.lab:Learner", "--agent.resume", "True")
    )
    found["played"], found["moved"], found["keys"] = play(TASK, one / "model_3.pt")
    if "Cartpole" in TASK:
        found["rows"], found["ends"] = rows_differ(TASK)
    del os.environ["PQL_SETTINGS"]
    two = command(TASK + SUFFIX, 4, "--agent.settings", words)
    found["task"] = files(two)
    found["played as task"] = play(TASK + SUFFIX, two / "model_3.pt")[0]
    print("found", json.dumps(found), flush=True)


main()
