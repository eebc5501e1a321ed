"""R2D2 on the T-maze, compared with DQN (which has no memory) and with R2D2 without stored states.

Every run trains for the same number of env steps; its figure is the share of correct turns in separate episodes. A
row's value is the mean over seeds; its name has the lowest and the highest.

R2D2 / DQN              the presets on ``task=tmaze``, DQN with R2D2's gamma. The goals: at least .9, and at most .6
                        (guessing gives .5).
stored / zero state     sequences of 12 rows without burn-in, which seldom contain both the sign and the turn: with zero
                        states an agent learns only from those that do, with stored states from all.
"""

from collections.abc import Sequence
from statistics import fmean

from pql.config import Config
from pql.config.compose import compose
from pql.run.environment import build_env
from pql.run.episodes import run_episodes
from pql.run.policy import fresh_policy, snapshot
from tools.bench.common import Row, begun, close, options, report, row

SHORT = ("algo.burn_in=0", "algo.length=12", "algo.period=6", "algo.replay_ratio=3")
VARIANTS = {
    "R2D2": ("algo=r2d2",),
    "DQN": ("algo=dqn", "algo.gamma=0.9"),
    "stored state": ("algo=r2d2", *SHORT),
    "zero state": ("algo=r2d2", *SHORT, "algo.stored_state=false"),
}
PAIRS = (("R2D2", "DQN"), ("stored state", "zero state"))


def success(config: Config, episodes: int) -> float:
    """Train for the config's budget of env steps and return the share of correct turns."""
    parts = begun(config)
    try:
        while parts.env_steps < (config.budget.env_steps or 0):
            parts.schedule.tick()
        env = build_env(config, episodes)
        policy = fresh_policy(config, env.spec, env.spec.device)
        policy.load_state_dict(snapshot(parts))
        return run_episodes(env, policy, seed=config.seed + 1000).success or 0.0
    finally:
        close(parts)


def against(name: str, other: str, shares: dict[str, list[float]]) -> Row:
    spread = " against ".join(f"{k} ({min(shares[k]):.2f} to {max(shares[k]):.2f})" for k in (name, other))
    value, baseline, known = fmean(shares[name]), fmean(shares[other]), any(shares[name]) and any(shares[other])
    numbers = (baseline, value / baseline) if known else (None, None)
    return row(f"right turns: {spread}", value, "share", len(shares[name]), *numbers)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--env-steps", type=int, default=60_000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    seeds, steps = (1, 1_600) if args.smoke else (args.seeds, args.env_steps)
    words = ("task=tmaze", "scale=cpu", f"device={args.device}", f"budget.env_steps={steps}")
    shares: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for seed in range(1, seeds + 1):
        for name, own in VARIANTS.items():
            shares[name].append(success(compose([*words, *own, f"seed={seed}"]), args.episodes))
            print(f"seed {seed}: {name} {shares[name][-1]:.3f}", flush=True)
    report([against(*pair, shares) for pair in PAIRS], args.json)


if __name__ == "__main__":
    main()
