"""The controller of ``pql.deploy``: equal to policy and simulation, and safe where measurements fail."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from far_python import NUMPY, far_python, old_python
from mujoco_runs import build, needs
from safetensors.torch import load_file

import pql
from pql.config import to_dict
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.deploy import DAMP, HOLD, RUN, Controller, Limits
from pql.run.export.writer import export_metadata, write_export
from pql.run.policy import fresh_policy

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DT, KP, KD = 0.02, [20.0, 30.0], [1.0, 2.0]
TERMS = [
    {"name": "speed", "source": "base_ang_vel", "width": 1, "scale": 0.5, "clip": [-2.0, 2.0], "history": 3},
    {"name": "actions", "source": "last_action", "width": 2, "scale": 1.0, "clip": None, "history": 0},
    {"name": "joint_pos", "source": "joint_pos_rel", "width": 2, "scale": [1.0, 3.0], "clip": None, "history": 2},
]
ROBOT = {
    "dt": DT,
    "terms": {"policy": [{**term, "flatten": True} for term in TERMS]},
    "joints": ["a", "b"],
    "default": [0.5, -1.0],
    "scale": [0.25, 0.5],
    "kp": KP,
    "kd": KD,
    "limits": [[0.0, 0.6], [-9.0, 9.0]],
}
BOUNDS = {"kind": "box", "size": 2, "low": [-2.0, -4.0], "high": [2.0, 8.0], "scaled": True}


class Session:
    """In place of ONNX Runtime: returns the actions given, and keeps its inputs."""

    def __init__(self, actions=(), size=9, **changes):
        self.actions, self.seen = list(actions), []
        entry = {"name": "obs.policy", "shape": ["batch", size], "dtype": "float32"}
        self.about = {"action": BOUNDS, "spec": {"robot": ROBOT}, "inputs": [entry], **changes}

    def get_modelmeta(self):
        return SimpleNamespace(custom_metadata_map={"pql": json.dumps(self.about)})

    def run(self, names, inputs):
        self.seen.append(inputs["obs.policy"][0].copy())
        return [np.array([self.actions.pop(0) if self.actions else [0.0, 0.0]], np.float32)]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def controller(*actions, limits=Limits(), log=None, **changes):  # noqa: B008
    session, clock = Session(actions, **changes), Clock()
    return Controller("x.onnx", limits, log, session, clock), session, clock


def terms(speed, *q):
    return {"speed": [speed], "joint_pos": q or (0.0, 0.0)}


def test_terms_are_clipped_scaled_and_remembered_oldest_first():
    one, session, _ = controller([1.0, -2.0], [3.0, 0.5])
    assert one.terms == {"speed": ("base_ang_vel", 1), "joint_pos": ("joint_pos_rel", 2)}
    first, second = one.act(terms(1.0, 0.1, 0.2)), one.act(terms(9.0, 0.3, 0.4))
    one.act(terms(-1.0, 0.5, 0.6))
    # speed: three frames, clipped at 2, halved; the last actions; positions: two frames of both joints
    assert np.array(session.seen) == pytest.approx(
        np.array(
            [
                [0.5, 0.5, 0.5, 0, 0, 0.1, 0.6, 0.1, 0.6],
                [0.5, 0.5, 1.0, 1, -2, 0.1, 0.6, 0.3, 1.2],
                [0.5, 1.0, -0.5, 3, 0.5, 0.3, 1.2, 0.5, 1.8],
            ]
        )
    )
    assert (first.target.tolist(), second.target.tolist()) == ([0.75, -2.0], [1.25, -0.75])
    assert (first.kp.tolist(), first.kd.tolist(), first.state) == (KP, KD, RUN)
    one.reset()
    one.act(terms(0.0))
    assert session.seen[-1].tolist() == [0.0] * 9


def test_targets_are_held_to_rates_and_positions_and_the_applied_action_is_observed():
    one, session, _ = controller([2.0, 8.0], [2.0, 8.0], limits=Limits(rate=[5.0, 10.0], clip=True))
    one.reset(positions=[0.5, -1.0])
    got = [one.act(terms(0.0)) for _ in range(2)]
    # 0.1 and 0.2 rad a step of 20 ms; the first joint's limit is 0.6
    assert np.array([c.target for c in got]) == pytest.approx(np.array([[0.6, -0.8], [0.6, -0.6]]))
    assert got[0].action == pytest.approx([0.4, 0.4], rel=1e-5)
    assert session.seen[1][3:5] == pytest.approx([0.4, 0.4], rel=1e-5)
    free, _, _ = controller([2.0, 8.0], limits=Limits(rate=5.0))
    assert free.act(terms(0.0)).target.tolist() == [1.0, 3.0]  # nobody said where the joints are


def test_targets_that_the_simulator_clips_leave_the_observed_action_as_it_was():
    robot = {**ROBOT, "target_clip": [[0.0, 0.75], [-9.0, 9.0]]}
    one, session, _ = controller([2.0, 8.0], spec={"robot": robot})
    command = one.act(terms(0.0))
    one.act(terms(0.0))
    assert (command.target.tolist(), session.seen[1][3:5].tolist()) == ([0.75, 3.0], [2.0, 8.0])


def test_late_or_broken_measurements_hold_and_then_damp_until_a_reset():
    one, session, clock = controller([1.0, 1.0], [0.5, 0.5], limits=Limits(hold_after=0.1, damp_after=0.3))
    before = one.act(None)
    assert (before.state, before.kp.tolist(), before.kd.tolist()) == (DAMP, [0.0, 0.0], KD)
    assert one.act(terms(0.0)).state == RUN
    clock.now += 0.2
    held = one.act(None)
    assert (held.state, held.target.tolist(), held.kp.tolist()) == (HOLD, [0.75, -0.5], KP)
    assert one.act(terms(np.nan)).state == HOLD
    assert one.act(terms(0.0), stamp=clock.now - 0.15).state == HOLD  # measured, but old
    assert one.act(terms(0.0), stamp=clock.now - 0.05).state == RUN
    assert one.act(terms(0.0), stamp=clock.now - 0.15).state == HOLD  # older than the one before
    clock.now += 0.24
    assert one.act(None).state == HOLD
    clock.now += 0.1
    assert one.act(None).state == DAMP
    assert one.act(terms(0.0)).state == DAMP  # it stays, also when measurements return
    one.reset()
    assert one.act(terms(0.0)).state == RUN
    assert len(session.seen) == 3
    session.actions = [[np.inf, 0.0]]
    assert one.act(terms(0.0)).state == HOLD  # a policy's action that is not finite


def test_a_policy_that_is_not_finite_is_held_and_then_damped():
    one, session, clock = controller([1.0, 1.0], limits=Limits(hold_after=0.3, damp_after=0.3))
    assert one.act(terms(0.0)).state == RUN
    session.actions = [[np.nan, 0.0]] * 4
    states = []
    for _ in range(4):
        clock.now += 0.1
        states.append(one.act(terms(0.0)).state)  # measurements go on
    assert states == [HOLD, HOLD, HOLD, DAMP] or states == [HOLD, HOLD, DAMP, DAMP]  # 0.3 s, rounded


@pytest.mark.parametrize("positions", [[np.nan, 0.0], [0.0, 0.0, 0.0]])
def test_wrong_positions_are_refused(positions):
    with pytest.raises(ValueError, match="expected 2 finite numbers, one for each joint"):
        controller()[0].reset(positions)


def test_a_log_needs_its_folder(tmp_path):
    with pytest.raises(ValueError, match="expected a file in a folder that exists"):
        controller(log=str(tmp_path / "none" / "x.safetensors"))


def test_the_loop_keeps_its_rate_and_damps_whatever_ends_it(monkeypatch):
    one, _, clock = controller()
    slept, written = [], []
    monkeypatch.setattr("pql.deploy.time.sleep", lambda s: (slept.append(s), setattr(clock, "now", clock.now + s)))

    def read():
        clock.now += 0.015 if len(written) != 1 else 0.03  # the second step is late
        return terms(0.0)

    used = one.run(read, written.append, 4)
    assert used == pytest.approx([0.015, 0.03, 0.015, 0.015])
    assert slept == pytest.approx([0.005, 0.0, 0.0, 0.0], abs=1e-9)
    assert clock.now == pytest.approx(100.0 + 4 * DT)
    slept.clear()
    pauses = iter([0.0, 1.0, 0.0, 0.0])  # a second's pause is not caught up with
    one.run(lambda: setattr(clock, "now", clock.now + next(pauses)), [].append, 4)
    assert slept == pytest.approx([0.02, 0.0, 0.02, 0.02])
    with pytest.raises(KeyboardInterrupt):
        one.run(lambda: (_ for _ in ()).throw(KeyboardInterrupt), written.append, 1)
    assert [c.state for c in written] == [RUN] * 4 + [DAMP]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speed": [0.0]}, r"^joint_pos is missing: expected the terms speed, joint_pos$"),
        ({**terms(0.0), "actions": [0, 0]}, r"^actions is unknown: expected the terms speed, joint_pos$"),
        ({**terms(0.0), "speed": [0, 0]}, r"^speed has 2 numbers: expected 1$"),
    ],
)
def test_wrong_terms_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        controller()[0].act(given)


BARE = {k: v for k, v in ROBOT.items() if k not in ("dt", "limits")}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"limits": Limits(rate=0.0)}, r"rate=0.0: expected rad/s above 0, for all or each of 2 joints"),
        ({"limits": Limits(rate=[1.0] * 3)}, r"rate=.*: expected rad/s"),
        ({"limits": Limits(rate=1.0), "spec": {"robot": BARE}}, r"rate=1.0: expected rad/s"),
        ({"limits": Limits(clip=True), "spec": {"robot": BARE}}, r"clip=True: expected an export with the joints'"),
        ({"limits": Limits(hold_after=1.0)}, r"hold_after=1.0: expected seconds above 0, up to 0.5"),
        ({"action": {**BOUNDS, "scaled": False}}, r"x\.onnx: expected the simulator's actions: .* scale=true"),
        ({"action": {"kind": "discrete"}}, r"x\.onnx: expected an export of pql with continuous actions"),
    ],
)
def test_wrong_files_and_limits_are_refused(made, said):
    with pytest.raises(ValueError, match=said):
        controller(**made)


def test_without_a_record_groups_are_the_terms_and_actions_the_targets():
    one, session, _ = controller([1.5, -0.5], size=3, spec={})
    assert one.terms == {"policy": ("policy", 3)}
    command = one.act({"policy": [1.0, 2.0, 3.0]})
    assert (command.target.tolist(), command.kp, one.dt) == ([1.5, -0.5], None, None)
    assert session.seen[0].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="expected a robot's record with dt"):
        one.run(dict, list, 1)


def test_the_log_is_a_file_of_transitions(tmp_path):
    path = tmp_path / "walk.safetensors"
    actions = [[2.0, 8.0], [-1.0, 2.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    one, session, _ = controller(*actions, log=str(path))
    one.save()
    assert not path.exists()
    with one:
        for i in range(3):
            one.act(terms(float(i)), reward=10.0 * i)
        one.act(None)  # what followed the third step is not known
        one.act(terms(3.0), reward=99.0)
        one.finish(terms(4.0), reward=5.0, terminated=True)
        for end in (one.finish, one.reset):
            one.act(terms(0.0), reward=77.0)  # of other episodes
            end()
    rows = load_file(path)
    assert rows["reward"].tolist() == [10.0, 20.0, 5.0]
    assert (rows["terminated"].tolist(), rows["truncated"].tolist()) == ([False, False, True], [False] * 3)
    np.testing.assert_allclose(rows["action"], [[1.0, 1.0], [-0.5, 0.0], [0.5, -1 / 6]], atol=1e-6)
    np.testing.assert_array_equal(rows["obs.policy"], np.array(session.seen)[[0, 1, 3]])
    np.testing.assert_array_equal(rows["next_obs.policy"][:2], np.array(session.seen)[[1, 2]])
    assert rows["time"].tolist() == [100.0] * 3
    assert rows["target"][0].tolist() == [1.0, 3.0]


def exported(env, path, **box):
    """Export an untrained policy of ``env``: (the policy, the file)."""
    spec = env.spec
    config = compose(["algo=ddpg", "device=cpu", "algo.policy.hidden=[16]"])
    torch.manual_seed(1)
    policy = fresh_policy(config, spec, "cpu")
    for weights in policy.net.parameters():
        weights.data.mul_(3)
    metadata = export_metadata(policy, {"config": to_dict(config)}, Path("run/checkpoints/last"), scale=True)
    return policy, write_export(policy, metadata, path, ("onnx",)).files["onnx"]


@needs("go1")
@pytest.mark.parametrize("scale", [None, "limits"])
def test_it_drives_go1_as_the_policy_does(tmp_path, scale):
    """200 steps from the simulation's state: observations, actions and servo targets of MuJoCo are the controller's."""
    env = build("go1_velocity", 1, action_scale=scale)
    policy, file = exported(env, tmp_path)
    one, log = Controller(file, log=str(tmp_path / "log.safetensors")), []
    joints = [env.model.joint(name) for name in one.all_joints]
    q, v = ([j.qposadr[0] for j in joints], [j.dofadr[0] for j in joints])
    obs = env.reset(3)
    for _ in range(200):
        fields = {**env.engine.fields, **env.task.derive(env.engine.fields)}
        measured = {
            "base_lin_vel": fields["linear"][0],
            "base_ang_vel": fields["qvel"][0, 3:6],
            "projected_gravity": fields["gravity"][0],
            "command": env._memory["command"][0],
            "joint_pos": fields["qpos"][0, q].numpy() - one.all_default,
            "joint_vel": fields["qvel"][0, v],
        }
        command = one.act(measured)
        torch.testing.assert_close(torch.tensor(command.action), policy(obs)[0], atol=2e-5, rtol=0)
        step = env.step(torch.tensor(command.action)[None])
        log.append(obs["policy"][0])
        if step.first[0]:
            one.finish()  # the simulation has restarted
        else:
            target = env.engine.fields["ctrl"][0].float()
            torch.testing.assert_close(torch.tensor(command.target), target, atol=1e-6, rtol=0)
        obs = step.obs
    one.close()
    rows = load_file(tmp_path / "log.safetensors")
    assert len(rows["reward"]) > 150
    starts = [
        i for i, seen in enumerate(log) if any(torch.allclose(seen, row, atol=2e-5) for row in rows["obs.policy"])
    ]
    assert len(starts) == len(rows["reward"])
    assert command.kp.tolist() == pytest.approx(env.spec.info["robot"]["kp"])


def test_old_python_compiles_it(tmp_path):
    """The ordinary suite's part of the next test: syntax and names, with a stand-in session."""
    code = (
        "import sys, types; sys.path.insert(0, sys.argv[1]); from pql.deploy import Controller\n"
        "class S:\n"
        "    def get_modelmeta(self): return types.SimpleNamespace(custom_metadata_map={'pql': sys.argv[2]})\n"
        "    def run(self, names, inputs): return [inputs['obs.policy'][:, :2] * 2]\n"
        "one = Controller('x', log=sys.argv[3], session=S())\n"
        "for i in range(4): command = one.act({'speed': [i / 2], 'joint_pos': [0, 0]})\n"
        "one.close(); print(*command.target, sys.version_info[1], 'torch' in sys.modules)"
    )
    about = Session().get_modelmeta().custom_metadata_map["pql"]
    words = [far_python(tmp_path / "far"), "-c", code, ROOT, about, tmp_path / "log.safetensors"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    *target, minor, torch_there = done.stdout.split()
    assert [float(x) for x in target] == [0.5 + 0.25 * 0.5, -1.0 + 0.5 * 1.0]
    assert torch_there == "False"
    assert int(minor) in (8, sys.version_info[1])
    assert load_file(tmp_path / "log.safetensors")["reward"].shape == (3,)


@pytest.mark.parametrize("reader", ["prefill", "demos"])
def test_the_replay_reads_its_log(tmp_path, capsys, reader):
    one, _, _ = controller(
        log=str(tmp_path / "log.safetensors"),
        size=3,
        spec={},
        action={**BOUNDS, "size": 1} | {"low": [-2], "high": [2]},
    )
    one._session.actions = [[i / 50] for i in range(100)]
    for i in range(100):
        one.act({"policy": [i / 100, 0.0, 1.0]}, reward=-1.0)
    one.close()
    words = ["task=pendulum", "algo=sac", "device=cpu", "num_envs=4", "budget.env_steps=64", "algo.batch_size=16"]
    more = [
        f"run_dir={tmp_path / 'run'}",
        f"replay.{reader}={one._log.path}",
        "eval.final=false",
        "replay.capacity=1000",
    ]
    pql.train(*words, *more, "algo.warmup_steps=8")
    assert ("replay starts with 99 transitions of " in capsys.readouterr().out) == (reader == "prefill")


def test_the_loop_of_the_guide_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "sim_to_real.md").read_text()
    (loop,) = (b for b in re.findall(r"```python\n(.*?)```", guide, re.S) if "Controller" in b)
    three = ("base_lin_vel", "base_ang_vel", "projected_gravity", "command")
    sizes = {**dict.fromkeys(three, 3), "joint_pos": 2, "joint_vel": 2}
    fixed = {"scale": 1.0, "clip": None, "history": 0, "flatten": True}
    terms = [{"name": k, "source": k, "width": width, **fixed} for k, width in sizes.items()]
    pose = {"all_joints": ["a", "b"], "all_default": ROBOT["default"], "dt": 1e-4, "terms": {"policy": terms}}
    box = Box(2, (-1, -1), (1, 1))
    spec = EnvSpec("made up", 1, {"policy": ObsSpec((16,))}, box, CPU, info={"robot": {**ROBOT, **pose}})
    policy, file = exported(SimpleNamespace(spec=spec), tmp_path / "export")
    file.rename("policy.onnx")
    sent = []
    q, v = np.array([0.6, -1.1]), np.array([0.3, 0.2])
    rest = {k: [0.1, 0.2, 0.3] for k in three[:3]}
    scope = {"joints": lambda: (q, v), "imu_and_estimator": lambda: rest, "servos": lambda *one: sent.append(one)}
    exec(loop.replace("rate=8.0", "rate=1e9"), scope)
    assert len(sent) == len(scope["used"]) == 500
    seen = torch.tensor([[*[0.1, 0.2, 0.3] * 3, 0.5, 0, 0, 0.1, -0.1, 0.3, 0.2]])
    want = np.array(ROBOT["default"]) + np.array(ROBOT["scale"]) * policy(seen)[0].clamp(-1, 1).numpy()
    np.testing.assert_allclose(sent[-1][0], want.clip([0, -9], [0.6, 9]), atol=1e-5)
    assert sent[-1][1].tolist() == KP
    assert load_file("walk.safetensors")["reward"].shape == (499,)


def old_environment(folder):
    """A Python 3.8 with NumPy and ONNX Runtime; None if it is not on this machine or cannot be downloaded."""
    if (python := old_python()) is None:
        return None
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    words = ["--quiet", "--retries=0", "--timeout=5", "--target", folder / "lib" / "python3.8" / "site-packages"]
    words += ["--python-version=3.8", "--only-binary=:all:", NUMPY, "onnxruntime==1.19.2"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *words], stderr=subprocess.DEVNULL)
    return None if done.returncode else str(folder / "bin" / "python")


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_needs_neither_pql_nor_torch_and_runs_on_old_python(tmp_path, old):
    """The file alone, a copy, with NumPy and ONNX Runtime."""
    python = old_environment(tmp_path / "old") if old else sys.executable
    if python is None:
        pytest.skip("no Python 3.8, or no network for its packages")
    env = SimpleNamespace(spec=EnvSpec("made up", 1, {"policy": ObsSpec((3,))}, Box(2, (-1, 0), (1, 8), (0, 2)), CPU))
    policy, file = exported(env, tmp_path / "export")
    (tmp_path / "deploy.py").write_text((ROOT / "pql" / "deploy.py").read_text())
    (tmp_path / "use.py").write_text(
        "import sys, deploy\n"
        "with deploy.Controller(sys.argv[1], log='log.safetensors') as one:\n"
        "    for i in range(3):\n"
        "        command = one.act({'policy': [i, 1.0, -1.0]})\n"
        "print(*command.target, 'torch' in sys.modules, 'pql' in sys.modules)\n"
    )
    done = subprocess.run(
        [python, "use.py", str(file)], cwd=tmp_path, capture_output=True, text=True, check=True, env={}
    )
    *target, torch_there, pql_there = done.stdout.split()
    assert (torch_there, pql_there) == ("False", "False")
    one = Controller(file)
    want = one.act({"policy": [2.0, 1.0, -1.0]}).target
    assert [float(x) for x in target] == pytest.approx(want.tolist(), abs=1e-6)
    unit = policy(torch.tensor([[2.0, 1.0, -1.0]]))[0].clamp(-1, 1)
    assert want == pytest.approx([unit[0].item(), 2 + unit[1].item() * (2 if unit[1] < 0 else 6)], abs=1e-5)
    assert load_file(tmp_path / "log.safetensors")["action"].shape == (2, 2)
