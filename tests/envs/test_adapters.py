"""Simulators with their own package versions, run in the environments that ``make test-adapters`` builds."""

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import rows

from pql.cli.main import main
from pql.config import to_dict
from pql.config.compose import compose
from pql.contract.conformance import check_env
from pql.deploy import Controller
from pql.errors import ConfigError
from pql.remote.process.near import ProcessVec
from pql.run.export.writer import export_metadata, write_export
from pql.run.policy import fresh_policy

ROOT = Path(__file__).parents[2]

PLAYGROUND = {"env": "CartpoleSwingup", "episode_length": 12}
CASES = {
    "playground": PLAYGROUND,
    "playground, full resets": {**PLAYGROUND, "full_reset": True},
    "mjlab": {"task": "Mjlab-Cartpole-Balance", "settings": {"episode_length_s": 0.5}},
    "mjlab, several actions": {"settings": {"episode_length_s": 0.5}},
    "envpool": {"kwargs": {"max_episode_steps": 12}},
    "maniskill": {},
}
COUNT = {"maniskill": 1}  # what its simulation on the CPU holds


def interpreter(name):
    python = ROOT / ".adapters" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make test-adapters ADAPTERS={name} has not built {python}")
    return str(python)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_conforms_in_a_process_of_its_own(case, capsys):
    name = case.partition(",")[0]
    env = ProcessVec(
        name, COUNT.get(name, 8), python=interpreter(name), kwargs=CASES[case], start_seconds=1200, step_seconds=60
    )
    try:
        limit = env.spec.max_episode_steps or 20
        report = check_env(env, 2 * limit + 4)
        with capsys.disabled():
            print(f"\n{env.spec}\n{report}")
        assert report.ok, report
        end = "final_obs_kept" if env.spec.autoreset == "same_step" else "filler_flags"
        tested = {r.name for r in report.results if r.ok}
        assert {"final_obs", end, "first", "time_limit", "action_range", "buffers"} <= tested
        assert env.spec.final_obs == ("on_done" if name == "maniskill" else "always")
        check_successors(env, 3 * limit)
    finally:
        env.close()


@pytest.mark.slow
def test_mjlab_logs_its_own_numbers_and_evaluates_at_the_stage_in_play(tmp_path, capfd):
    """The Go1: shares of ends add up to one; commands reach 1 m/s at first and 2 m/s from 120,000 steps on, here times
    2.5e-4; play has no curriculum."""
    words = [
        *("task=mjlab", "task.kwargs.task=Mjlab-Velocity-Flat-Unitree-Go1"),
        *(f"task.process.python={interpreter('mjlab')}", "scale=cpu", "device=cpu", "num_envs=8"),
        *("task.kwargs.settings.episode_length_s=0.6", "task.kwargs.curriculum_scale=2.5e-4", "algo.warmup_steps=8"),
        *("algo.batch_size=32", "replay.capacity=4096", "eval.num_envs=2", "eval.every_seconds=null"),
        *("placement.watchdog_seconds=600", "task.process.step_seconds=300", "logger.every_seconds=1e5"),
        *("budget.seconds=null", f"run_dir={tmp_path / 'run'}"),
    ]
    assert main(["train", *words, "budget.env_steps=320", "eval.play=false"]) == 0
    said = capfd.readouterr()
    assert "Module" not in said.out + said.err
    assert "Active" not in said.out  # its tables
    train, evaluated = rows(tmp_path / "run")[-2:]
    reasons = ("Episode_Termination/time_out", "Episode_Termination/fell_over")
    for row, name in ((train, "episode"), (evaluated, "eval/episode")):
        assert sum(row[f"{name}/{k}"] for k in reasons) == pytest.approx(1.0)
    assert 1.0 <= train["episode/Curriculum/command_vel/lin_vel_x_max"] <= 2.0
    for row, name in ((train, "step"), (evaluated, "eval/step")):
        assert 0 < row[f"{name}/Metrics/slip_velocity_mean"] < 5  # m/s
    assert evaluated["stage/common_step_counter"] == pytest.approx(40 / 2.5e-4)
    assert evaluated["eval/episode/Curriculum/command_vel/lin_vel_x_max"] == 2.0
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=640", "eval.play=null", "--trust"]) == 0
    assert "evaluations have the simulator's configuration for play" in capfd.readouterr().out
    evaluated = rows(tmp_path / "run")[-1]
    assert evaluated["stage/common_step_counter"] == pytest.approx(80 / 2.5e-4)
    assert evaluated["eval/length_mean"] <= 30  # the time limit of training, not play's of years
    assert not any("Curriculum" in name for name in evaluated if name.startswith("eval/"))


@pytest.mark.slow
def test_mjlab_restarts_draws_and_continues_its_stage():
    short = {"episode_length_s": 2.0}  # 100 steps: not every robot falls
    kwargs = {"render_mode": "rgb_array", "random_lengths": False, "settings": short}
    env = ProcessVec("mjlab", 4, python=interpreter("mjlab"), kwargs=kwargs)
    try:
        env.reset(0)
        before = env.step(torch.zeros(4, 12)).obs["policy"]
        obs = env.reset_where(torch.tensor([False, True, False, False]))["policy"]
        assert (obs != before).any(1).tolist() == [False, True, False, False]
        assert (env.render().shape, env.render().std() > 1) == ((240, 320, 3), True)
        env.load_progress({"common_step_counter": 10_000 * 24})
        env.reset(0)
        ends = [env.step(torch.rand(4, 12) * 2 - 1) for _ in range(120)]
        (most,) = {v for s in ends for v in s.log["Curriculum/command_vel/lin_vel_x_max"].tolist() if v}
        assert most == 3.0
        assert env.progress() == {"common_step_counter": 10_000 * 24 + 120}
    finally:
        env.close()


@pytest.mark.slow
def test_playground_saves_draws_and_randomises():
    kwargs = {**PLAYGROUND, "full_reset": True, "render_mode": "rgb_array"}
    env = ProcessVec("playground", 4, python=interpreter("playground"), kwargs=kwargs, start_seconds=1200)
    try:
        env.reset(0)
        env.step(torch.zeros(4, 1))
        saved = env.state_dict()
        one = [env.step(torch.ones(4, 1)).obs["policy"] for _ in range(20)]
        env.load_state_dict(saved)
        assert all(torch.equal(a, env.step(torch.ones(4, 1)).obs["policy"]) for a in one)  # through resets
        before = env.step(torch.zeros(4, 1)).obs["policy"]
        obs = env.reset_where(torch.tensor([False, True, False, False]))["policy"]
        assert (obs != before).any(1).tolist() == [False, True, False, False]
        assert (env.render().shape, env.render(1, 64, 48).shape) == ((240, 320, 3), (48, 64, 3))
        assert env.render().std() > 1
    finally:
        env.close()
    with pytest.raises(ConfigError, match="randomize=true: expected false: the registry has no domain randomiser"):
        ProcessVec("playground", 4, python=interpreter("playground"), kwargs={**PLAYGROUND, "randomize": True})


@pytest.mark.slow
def test_playground_says_what_to_place_where_if_nothing_can_be_downloaded(monkeypatch):
    """git is not found on this PATH. With the models there, the robot's models are drawn."""
    python = interpreter("playground")
    monkeypatch.setenv("PATH", "/nowhere")
    kwargs = {"env": "Go1JoystickFlatTerrain", "randomize": True}
    found = []
    with contextlib.suppress(ConfigError), contextlib.ExitStack() as opened:
        opened.push(lambda kind, error, trace: found.append(str(error)))
        env = ProcessVec("playground", 2, python=python, kwargs=kwargs, start_seconds=1200)
        opened.callback(env.close)
        env.reset(0)
        assert env.step(torch.zeros(2, 12)).reward.isfinite().all()
    how = r"None|.*download failed .*: git clone https://\S+ (\S+/mujoco_menagerie) && git -C \1 checkout \w+"
    assert re.fullmatch(how, found[0])


def check_successors(env, steps):
    """An observation and its true successor are one step apart, at the end of an episode as in its middle."""
    obs, gen = env.reset(0)["policy"], torch.Generator().manual_seed(0)
    middle, end = [], []
    for _ in range(steps):
        step = env.step(torch.rand(env.spec.num_envs, env.spec.action.size, generator=gen) * 2 - 1)
        moved = (step.final_obs["policy"] - obs).abs().mean(1)
        over = (step.terminated | step.truncated) & step.valid
        middle.append(moved[step.valid & ~over])
        end.append(moved[over])
        obs = step.obs["policy"]
    assert torch.cat(end).mean() < 1.5 * torch.cat(middle).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["playground", "mjlab", "envpool", "maniskill"])
def test_it_trains_in_a_process_of_its_own(name, tmp_path, capsys):
    kwargs = [f"task.kwargs.{key}={value}".replace("'", "").replace(" ", "") for key, value in CASES[name].items()]
    words = [
        f"task={name}",
        *kwargs,
        f"task.process.python={interpreter(name)}",
        "scale=cpu",
        "device=cpu",
        f"num_envs={COUNT.get(name, 8)}",
        "replay.capacity=4096",
        "algo.batch_size=32",
        "algo.warmup_steps=8",
        "budget.env_steps=400",
        "eval.final=false",
        "eval.every_seconds=null",
        "placement.watchdog_seconds=600",
        "task.process.step_seconds=300",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert main(["train", *words]) == 0
    assert (tmp_path / "run" / "summary.json").exists()


def numbers(text):
    """The numbers of an entry of an ONNX file, which separates lists by commas and pairs by semicolons."""
    return [float(x) for x in text.replace(";", ",").split(",")]


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["limits", "limits_asym"])
@pytest.mark.parametrize("task", ["Mjlab-Velocity-Flat-Unitree-Go1", "Mjlab-Lift-Cube-Yam"])
def test_an_export_drives_mjlab_as_the_policy_does(task, bound, tmp_path, monkeypatch):
    """200 steps: the metadata are mjlab's own exporter's, actions the policy's, targets those of the simulator."""
    onnx = pytest.importorskip("onnx")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    kwargs = {"task": task, "action_bound": bound}
    env = ProcessVec(
        "far_mjlab:watched", 1, python=interpreter("mjlab"), kwargs=kwargs, start_seconds=1200, step_seconds=60
    )
    try:
        config = compose(["algo=ddpg", "device=cpu", "algo.policy.hidden=[32]"])
        policy = fresh_policy(config, env.spec, "cpu")
        for weights in policy.net.parameters():
            weights.data.mul_(2)
        about = export_metadata(policy, {"config": to_dict(config)}, Path("run/checkpoints/last"), scale=True)
        file = write_export(policy, about, tmp_path, ("onnx",)).files["onnx"]
        mine = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
        theirs = json.loads(env.spec.info["exporter"])
        assert {*mine} == {"pql", *theirs}
        names = {k for k in theirs if k.endswith("names")} | {"run_path"}
        assert all(mine[k] == theirs[k] for k in names - {"run_path"})
        for k in theirs.keys() - names:
            assert numbers(mine[k]) == pytest.approx(numbers(theirs[k]), abs=5.01e-4), k
        drive(env, policy, Controller(file))
    finally:
        env.close()


def drive(env, policy, controller):
    """Step 200 times with the controller's commands; its terms are taken from the observations."""
    box, layout = env.spec.action, env.spec.info["robot"]["terms"]["policy"]
    low, high = (torch.tensor(end) for end in box.bounds)
    middle = (low + high) / 2 if box.center is None else torch.tensor(box.center)
    obs = env.reset(0)
    for _ in range(200):
        parts = obs["policy"][0].split([term["width"] for term in layout])
        terms = {t["name"]: x.numpy() / t["scale"] for t, x in zip(layout, parts, strict=True)}
        np.testing.assert_allclose(terms.pop("actions"), controller._action, atol=2e-5)
        command = controller.act(terms)
        raw = torch.tensor(command.action)
        unit = (raw - middle) / torch.where(raw < middle, middle - low, high - middle)
        torch.testing.assert_close(unit, policy(obs)[0].clamp(-1, 1), atol=2e-5, rtol=0)
        step = env.step(unit[None])
        np.testing.assert_allclose(command.target, step.final_obs["target"][0], atol=1e-5)
        if step.first[0]:
            controller.reset()
        obs = step.obs


METADATA = """action_scale command_names default_joint_pos joint_damping joint_names joint_stiffness observation_names
observation_terms_clip observation_terms_flatten_history_dim observation_terms_history_length observation_terms_scale
run_path"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "keys"), [("Mjlab-Cartpole-Balance", ""), ("Mjlab-Velocity-Flat-Unitree-Go1", METADATA)]
)
def test_mjlabs_own_commands_train_with_pql(task, keys, tmp_path):
    python, dist = interpreter("mjlab"), tmp_path / "pql_rl-0.2.0.dist-info"
    if subprocess.run([python, "-c", "import hydra, safetensors, onnxruntime"], capture_output=True).returncode:
        pytest.skip("make test-adapters ADAPTERS=mjlab built this environment before pql needed more packages in it")
    dist.mkdir()  # as an installation has it
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: pql-rl\nVersion: 0.2.0\n")
    (dist / "entry_points.txt").write_text("[mjlab.tasks]\npql = pql.lab.mjlab\n")
    about = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "MJLAB_WARP_QUIET": "1", "WANDB_MODE": "disabled"}
    command = [python, str(ROOT / "tests" / "support" / "in_mjlab.py"), task, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **about}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]  # with four runs that nobody closed
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("found ")).removeprefix("found "))
    assert found["learner"] == found["task"] == ["model_0.pt", "model_2.pt", "model_3.pt"]
    assert found["resumed"] == ["model_4.pt"]
    assert max(found["played"], found["played as task"]) <= 1e-5
    assert found["moved"] > 1e-3
    assert found["keys"] == keys.split()
    if "rows" in found:  # through all resets
        assert (found["rows"], found["ends"]) == (0.0, 48)
