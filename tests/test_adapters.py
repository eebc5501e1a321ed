"""Simulators that want versions of their own, run for real in the environments that ``make test-adapters`` builds."""

from pathlib import Path

import pytest
import torch

from pql.conformance import check_env
from pql.envs.process import ProcessVec
from pql.main import main

ROOT = Path(__file__).parents[1]

CASES = {
    "playground": {"env": "CartpoleSwingup", "settings": {"impl": "jax"}, "episode_length": 12},
    "mjlab": {"task": "Mjlab-Cartpole-Balance", "settings": {"episode_length_s": 0.5}},
}


def interpreter(name):
    python = ROOT / ".adapters" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make test-adapters ADAPTERS={name} has not built {python}")
    return str(python)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_conforms_in_a_process_of_its_own(name, capsys):
    env = ProcessVec(name, 8, python=interpreter(name), kwargs=CASES[name], start_seconds=1200, step_seconds=60)
    try:
        report = check_env(env, 2 * (env.spec.max_episode_steps or 20) + 4)
        with capsys.disabled():
            print(f"\n{env.spec}\n{report}")
        assert report.ok, report
        tested = {r.name for r in report.results if r.ok}
        assert {"final_obs", "final_obs_kept", "first", "time_limit", "action_range", "buffers"} <= tested
        assert env.spec.final_obs == "always"
        obs = env.reset(0)
        for _ in range(
            3 * (env.spec.max_episode_steps or 20)
        ):  # the obs acted on and the true successor belong together
            step = env.step(torch.zeros(8, env.spec.action.size))
            jump = (step.final_obs["policy"] - obs["policy"]).abs().amax(1)
            assert jump.max() < 5.0
            obs = step.obs
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_trains_in_a_process_of_its_own(name, tmp_path, capsys):
    kwargs = [f"task.kwargs.{key}={value}".replace("'", "").replace(" ", "") for key, value in CASES[name].items()]
    words = [
        f"task={name}", *kwargs, f"task.process.python={interpreter(name)}", "scale=cpu", "device=cpu", "num_envs=8",
        "replay.capacity=4096", "algo.batch_size=32", "algo.warmup_steps=8", "budget.env_steps=400", "eval.final=false",
        "eval.every_seconds=null", "placement.watchdog_seconds=600", "task.process.step_seconds=300",
        f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(["train", *words]) == 0
    assert (tmp_path / "run" / "summary.json").exists()
