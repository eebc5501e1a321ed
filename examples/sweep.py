"""A search for settings with Optuna and an objective of your own: return minus a price for the effort of the actions.

    python examples/sweep.py                        # 20 trials of 10 seconds on Pendulum
    python examples/sweep.py budget.seconds=30

To search for the highest return, `pql sweep task=pendulum 'algo.critic.lr=interval(1e-4,1e-2)' trials=20` is enough: it
runs trials in processes of their own, on several seeds, and continues where it was interrupted.
"""

import sys

import optuna
import torch

import pql


def effort(policy, env, steps=200):
    """Mean square of the actions [N, A] over ``steps`` steps of all environments."""
    obs, total = env.reset(seed=0), 0.0
    for _ in range(steps):
        action = policy(obs["policy"])
        total += action.square().mean().item()
        obs = env.step(action).obs
    return total / steps


def main(*overrides, trials=20):
    def objective(trial):
        settings = {
            "algo.critic.lr": trial.suggest_float("algo.critic.lr", 1e-4, 1e-2, log=True),
            "algo.policy.lr": trial.suggest_float("algo.policy.lr", 1e-4, 1e-2, log=True),
            "algo.n_step": trial.suggest_int("algo.n_step", 1, 5),
        }

        def prune(session, row):
            if "eval/return_mean" in row:
                trial.report(row["eval/return_mean"], int(row["time/seconds"]))
                session.stop = trial.should_prune()

        run = pql.train("task=pendulum", "algo=pql", "budget.seconds=10", settings, *overrides, callbacks=prune)
        with torch.no_grad():
            spent = effort(pql.load_policy(run.run_dir), pql.make_env("pendulum", num_envs=16))
        return run.return_mean - 500 * spent

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    study = main(*sys.argv[1:])
    print(study.best_value, *(f"{key}={value:.3g}" for key, value in study.best_params.items()))
