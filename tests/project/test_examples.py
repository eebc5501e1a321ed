"""Every example of ``examples/`` runs, with a small budget, and does what it says."""

import ast
import csv
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import pql

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
NETS = ["algo.batch_size=32", "algo.critic.hidden=[16,16]", "algo.policy.hidden=[16,16]", "algo.warmup_steps=16"]
STEPS = ["device=cpu", "budget.seconds=null", "budget.env_steps=2048", "num_envs=32", "eval.num_envs=4"]
SMALL = [*STEPS, *NETS]
LONGER = {"sac_by_hand": 150}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Run in a folder of its own; examples import themselves by name, as where they lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave the pictures of reports out, which take ten seconds: other tests draw them."""
    draw = pytest.importorskip("pql.reports.draw")
    monkeypatch.setattr(draw, "png", lambda figure: b"")


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def rows(run):
    return [json.loads(line) for line in (Path(run.run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short_says_how_to_run_it_and_is_listed(path):
    text = path.read_text()
    assert len(text.splitlines()) < LONGER.get(path.stem, 60)
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


def test_own_simulator_keeps_the_contract_and_trains():
    report, run = example("own_simulator")["main"]("algo=pql", *SMALL)
    assert report.ok, str(report)
    assert (run.env_steps, run.episodes) == (2048, 4)
    assert run.success is not None
    env = pql.make_env("own_simulator:Dock", num_envs=2)
    env.reset(seed=1)
    step = env.step(torch.zeros(2, 2))
    assert step.reward == pytest.approx(1 - step.final_obs["policy"][:, :2].norm(dim=1).tanh())
    for _ in range(60):
        step = env.step(torch.full((2, 2), -1.0))
        if step.terminated.any():
            assert step.final_obs["policy"][step.terminated][0, :2].norm() > 2
            return
    raise AssertionError("nothing ended a mass that flew away")


def test_own_curriculum_is_evaluated_and_resumed_at_its_stage():
    main = example("own_curriculum")["main"]
    run = main("algo=pql", *SMALL, "eval.every_seconds=null")
    (row,) = [r for r in rows(run) if "eval/return_mean" in r]
    assert row["stage/steps"] == run.env_steps / 32 == 64
    assert 0.2 + 0.8 * 64 / 2000 <= row["eval/episode/reach"] <= 0.2 + 0.8 * (64 + 100) / 2000
    with pytest.warns(pql.errors.PqlWarning, match="its curriculum continues at steps 64$"):
        again = pql.resume(run.run_dir, "budget.env_steps=4096", trust=True, quiet=True)
    assert [r["stage/steps"] for r in rows(again) if "eval/return_mean" in r] == [64, again.env_steps / 32]


def test_own_mujoco_task_rewards_a_ball_in_the_middle():
    pytest.importorskip("mujoco")
    scope = example("own_mujoco_task")
    assert pql.check_env(scope["beam"](8), steps=60).ok
    env = pql.make_env("own_mujoco_task:beam", num_envs=64)
    returns = {}
    for name, gain in {"still": (0.0, 0.0), "held": (3.0, 1.5)}.items():
        obs, total = env.reset(seed=0)["policy"], 0.0
        for _ in range(100):
            action = -gain[0] * obs[:, 1:2] - gain[1] * obs[:, 3:4]
            step = env.step(action.clamp(-1, 1))
            obs, total = step.obs["policy"], total + step.reward.mean().item()
        returns[name] = total
    assert returns["held"] > 85 > 70 > returns["still"]
    run = scope["main"]("algo=pql", *SMALL, "task.kwargs.randomize.mass=[0.5,2]")
    assert run.env_steps == 2048
    assert "eval/step/distance" in rows(run)[-1]


def test_own_network_is_the_one_that_learns():
    run = example("own_network")["main"](*SMALL)
    saved = load_file(next(Path(run.checkpoint).glob("*.safetensors")))
    shapes = {name: list(value.shape) for name, value in saved.items() if "waves" in name}
    assert list(shapes.values()) == [[16], [16, 3]] or list(shapes.values()) == [[16, 3], [16]]
    assert pql.load_policy(run.run_dir, trust=True)(torch.randn(5, 3)).abs().max() <= 1


@pytest.fixture
def unregistered(monkeypatch):
    """Forgets algorithms that a program registers."""
    from pql.algos import registry
    from pql.config import families, layers

    for table in (registry._registered, families.registered, layers.registered):
        for name in {*table}:
            monkeypatch.delitem(table, name)
    yield
    for table in (registry._registered, families.registered, layers.registered):
        table.clear()


def test_own_algorithm_makes_a_smoother_policy(unregistered):
    scope = example("own_algorithm")
    last = {}
    for weight in (0, 100):
        run = scope["main"](*SMALL, f"algo.smoothness={weight}", "algo.policy.lr=1e-2")
        last[weight] = [row["policy/roughness"] for row in rows(run) if "policy/roughness" in row][-1]
    assert last[100] < 0.5 * last[0]
    with pytest.raises(pql.ConfigError, match="smoothness"):
        scope["main"](*SMALL, "algo.smoothness=-1")


def test_sac_by_hand_swings_the_pendulum_up():
    scope = example("sac_by_hand")
    assert scope["evaluate"](scope["Agent"](pql.make_env("pendulum", num_envs=2).spec), seed=1) < -700
    assert scope["main"](seed=0) > -250


def test_a_loop_of_its_own_learns_to_drive_to_the_middle():
    words = ["algo.v_per_step=4", "algo.batch_size=64", "algo.critic.hidden=[64,64]", "algo.policy.hidden=[32,32]"]
    summary, rewards = example("own_loop")["main"](*words, "budget.env_steps=8_000")
    assert (summary.env_steps, len(rewards)) == (8_000, 500)
    assert np.mean(rewards[-100:]) > np.mean(rewards[:100]) / 2  # of negative rewards: less than half the distance


class Session:
    """Stands in for a run in a test of a callback."""

    stop = False

    def say(self, text):
        self.text = text


def test_the_callback_ends_a_run_that_no_longer_improves():
    scope = example("callback")
    stop, session, stopped = scope["StopOnPlateau"]("log.csv", patience=2), Session(), []
    for step, value in enumerate([1.0, 3.0, 2.0, 4.0, 4.0, 3.9]):
        stop(session, {"steps/env": 10.0 * step, "eval/return_mean": value})
        stop(session, {"steps/env": 10.0 * step})
        stopped.append(session.stop)
    assert stopped == [False] * 5 + [True]
    with open("log.csv") as file:
        assert list(csv.reader(file))[-2:] == [["40", "4.0"], ["50", "3.9"]]
    # A policy that does not change cannot improve, so a run without end ends.
    still = ["algo.policy.lr=1e-12", "algo.normalize_obs=false", "eval.every_seconds=0.05"]
    small = [word for word in SMALL if not word.startswith("budget")]
    stop, run = scope["main"](*small, *still, "budget.seconds=60", patience=2)
    assert stop.worse >= 2
    assert run.seconds < 30
    assert stop.history[0][1] == stop.best


def test_an_exported_policy_acts_with_onnx_alone(capsys):
    pytest.importorskip("onnxruntime")
    scope = example("export_onnx")
    run, file = scope["train_and_export"](*SMALL)
    rewards, torques = scope["swing_up"](str(file), steps=50)
    hanging = pql.load_policy(run.run_dir)(torch.tensor([[-1.0, 0.0, 0.0]])).item()  # in [-1, 1]
    assert torques[0] == pytest.approx(2 * hanging, abs=1e-4)
    assert max(abs(t) for t in torques) <= 2
    assert rewards[0] == pytest.approx(-(np.pi**2) - 0.001 * torques[0] ** 2)
    scope["main"]("run", str(file))
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{file}: return -")


def test_two_algorithms_are_compared(monkeypatch, no_pictures):
    scope = example("compare_algorithms")
    # An evaluation before the last one, on a busy machine, would change interpolated scores.
    short = [*STEPS, "budget.env_steps=600", "num_envs=8", "eval.every_seconds=null", "algo.warmup_steps=16"]
    found = scope["main"]("task=lqr", *short, folder="runs/x", algorithms=("pql", "ppo"), seeds=(1, 2))
    groups = {group["label"]: group for group in found["tasks"][0]["groups"]}
    assert groups.keys() == {"pql", "ppo"}
    assert all(group["seeds"] == [1, 2] for group in groups.values())
    for path in Path("runs/x").glob("p*-*/summary.json"):
        summary = json.loads(path.read_text())
        scores = groups[path.parent.name[:3]]["scores"]
        assert any(score == pytest.approx(summary["return_mean"]) for score in scores)
    assert "pql" in Path(found["page"]).read_text()
    monkeypatch.setattr(pql, "train", None)  # nothing is missing: no run is made again
    scope["main"]("task=lqr", folder="runs/x", algorithms=("pql", "ppo"), seeds=(1, 2))


def test_a_sweep_finds_settings_for_its_own_objective():
    pytest.importorskip("optuna")
    scope = example("sweep")
    study = scope["main"](*SMALL, trials=2)
    assert len(study.trials) == 2
    assert all(1e-4 <= trial.params["algo.critic.lr"] <= 1e-2 for trial in study.trials)
    runs = [json.loads(path.read_text()) for path in Path("runs").glob("*/summary.json")]
    prices = [run["return_mean"] - trial.value for run, trial in zip(sorted_by_age(runs), study.trials, strict=True)]
    assert all(0 <= price <= 500 for price in prices)  # the mean square of actions in [-1, 1], times 500
    steady = scope["effort"](lambda obs: torch.full((len(obs), 1), 0.5), pql.make_env("pendulum", num_envs=3), steps=4)
    assert steady == pytest.approx(0.25)


def sorted_by_age(runs):
    return sorted(runs, key=lambda run: Path(run["checkpoint"]).stat().st_mtime)


def test_demonstrations_are_good_and_fill_the_replay():
    shown, run = example("demonstrations")["main"](*SMALL)
    assert shown > -200  # random actions: about -1,200
    columns = load_file("demonstrations.safetensors")
    assert columns["obs.policy"].shape == columns["next_obs.policy"].shape == (12_800, 3)
    inner = ~columns["truncated"][:-1]
    assert torch.equal(columns["next_obs.policy"][:-1][inner], columns["obs.policy"][1:][inner])
    assert columns["truncated"].sum() == 64
    assert run.env_steps == 2048


def test_a_student_with_a_memory_continues_by_reward():
    small = ["device=cpu", "algo.batch_size=32", "algo.policy.hidden=[16,16]", "eval.num_envs=4", "algo.length=8"]
    runs = example("student")["main"](*small, env_steps=4096)
    teacher, student, tuned = (yaml.safe_load((Path(run.run_dir) / "config.yaml").read_text()) for run in runs)
    assert [run.env_steps for run in runs] == [4096] * 3
    assert student["algo"]["teacher"] == runs[0].run_dir
    assert tuned["init_from"] == runs[1].run_dir
    assert (student["algo"]["lstm"], tuned["algo"]["lstm"], teacher["algo"]["lstm"]) == (32, 32, None)


def test_the_page_of_an_evaluation(no_pictures):
    pytest.importorskip("imageio")
    scope = example("evaluation_page")
    run = pql.train("task=pendulum", "algo=pql", *SMALL, quiet=True)
    page = scope["main"](run.run_dir, episodes=8)
    text = page.read_text()
    returns = pql.evaluate(run.run_dir, episodes=8)["returns"]
    assert f"8 episodes: mean return {np.mean(returns):,.1f}" in text
    assert (page.parent / re.findall('href="([^"]+)"', text)[0]).exists()
    heights = re.findall(r'height="([\d.]+)"', scope["bars"]([1.0, 2.0, 2.0, 3.0], count=2))
    assert heights == ["13.33", "40.00"]


NOTEBOOKS = sorted(EXAMPLES.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_has_its_output_and_runs_anywhere(path):
    """``make test`` executes them; this is what it cannot see."""
    text = path.read_text()
    assert len(text) < 300_000
    assert f"(notebooks/{path.name})" in (EXAMPLES / "README.md").read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "find_spec" in "".join(code[0]["source"])
    assert code[0]["source"] == json.loads(NOTEBOOKS[0].read_text())["cells"][1]["source"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"/(tmp|home|root|work|content|Users)\b", str([o for o in outputs if "data" not in o]))


def test_robot_walks_an_export_with_deploy_alone(monkeypatch, capsys):
    pytest.importorskip("mujoco")
    robots = pytest.importorskip("pql.envs.mujoco.robots")
    try:
        robots.model_file("go1")
    except pql.ConfigError as error:
        pytest.skip(str(error))
    made = example("robot")
    monkeypatch.setattr("pql.deploy.time.sleep", lambda seconds: None)
    robot = made["main"](*SMALL, "seed=1")
    assert robot.data.time == pytest.approx(250 * 0.02)
    assert 0.05 < robot.data.qpos[2] < 0.5
    assert capsys.readouterr().out.splitlines()[-1].startswith("5.0 s: ")
    columns = load_file("walk.safetensors")
    assert columns["obs.policy"].shape == (249, 48)
    assert columns["target"].diff(dim=0).abs().max() <= 30.0 * 0.02 + 1e-5
    run = pql.train("task=go1_velocity", *SMALL, "replay.prefill=walk.safetensors")
    assert run.env_steps == 2048
