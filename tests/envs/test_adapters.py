"""Simulators with their own package versions, run in the environments that ``make test-adapters`` builds."""

from pathlib import Path

import pytest
import torch

from pql.cli.main import main
from pql.contract.conformance import check_env
from pql.remote.process.near import ProcessVec

ROOT = Path(__file__).parents[2]

PLAYGROUND = {"env": "CartpoleSwingup", "settings": {"impl": "jax"}, "episode_length": 12}
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
