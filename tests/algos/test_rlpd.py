"""RLPD (Ball et al. 2023, arXiv 2302.02948): with demonstrations, the same learner needs a fifth of the env steps."""

import pytest
import torch
from conftest import start
from gates import score

from pql.config.compose import compose
from pql.contract.env import make_env
from pql.data.transitions import save_rows
from pql.run.episodes import EpisodeRules, run_episodes
from pql.run.record import TapedEnv, rows_of_episodes

GOAL, EVERY = -200, 50  # mean greedy return of 32 episodes (the best possible is about -150); env steps
LEARNER = [
    *("task=pendulum", "task.reward_scale=0.1", "algo=sac", "num_envs=2", "device=cpu"),
    *("algo.alpha=0.1", "algo.gamma=0.95", "algo.n_step=5", "algo.batch_size=256", "algo.warmup_steps=25"),
    *("algo.v_per_step=8", "algo.p_per_v=1", "replay.capacity=20000", "placement.executor=inline"),
    *("algo.critic.layer_norm=true", "algo.critic.hidden=[64,64]", "algo.critic.lr=0.003", "algo.critic.tau=0.05"),
    *("algo.policy.hidden=[64,64]", "algo.policy.lr=0.003"),
]


def swing_up(obs):
    """Pump energy until the pendulum is near the top, then hold it there: [N, 3] -> [N, 1]."""
    cos, sin, speed = obs["policy"].unbind(1)
    missing = 15 - speed.square() / 2 - 15 * cos  # energy, 15 at rest at the top
    pump = 0.3 * missing * torch.where(speed < 0, -1, 1)
    hold = -10 * torch.atan2(sin, cos) - 2 * speed
    return (torch.where(cos > 0.8, hold, pump) / 2).clamp(-1, 1)[:, None]


def steps_to_the_goal(most, *words):
    """Env steps until two consecutive measurements reach the goal; None: not within ``most``."""
    parts, reached = start(compose([*LEARNER, *words])), 0
    for mark in range(EVERY, most + 1, EVERY):
        while parts.env_steps < mark:
            parts.schedule.tick()
        reached = reached + 1 if score(parts) >= GOAL else 0
        if reached == 2:
            break
    parts.close()
    return mark - EVERY if reached == 2 else None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demonstrations_save_four_fifths_of_the_env_steps(tmp_path, learns):
    tape = TapedEnv(make_env("pendulum", 16), 0.0, 0)
    shown = run_episodes(tape, swing_up, 3, EpisodeRules(16))
    assert shown.mean > GOAL
    save_rows(rows_of_episodes(tape.first_episodes(dict.fromkeys(range(16), 200))), tmp_path / "demos.safetensors")
    learns(lambda seed: saving(f"replay.demos={tmp_path / 'demos.safetensors'}", f"seed={seed}"), 5)


def saving(demos, seed):
    """Env steps without demonstrations, up to a little over five times those with them, over those with them."""
    steps = steps_to_the_goal(600, demos, seed)
    assert steps is not None
    return (steps_to_the_goal(5 * steps, seed) or 5 * steps + EVERY) / steps
