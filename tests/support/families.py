"""Small runs of every family, as the tests of several folders use them."""

import dial
import dqn_runs
import impala_runs
import ppo_runs
import r2d2_runs
import reppo_runs
from conftest import configured
from test_pqn import BASE as PQN

PRIORITIES = {"alpha": 0.6, "beta": 0.4, "initial": "actor"}
MEMORY = {"lstm": 6, "length": 4, "burn_in": 3, "period": 2, "n_step": 2}
FAMILIES = {
    "pql": configured({}, {"normalize_reward": True, "n_step": 3, "policy": {"average": 0.01}}),
    "sac": configured({}, {"family": "sac", "normalize_reward": True, "explore": {"kind": "none"}}),
    "sac, lstm": configured({}, {**MEMORY, "family": "sac", "explore": {"kind": "none"}}),
    "ddpg, gru": configured({}, {**MEMORY, "cell": "gru", "policy": {"target": True}}),
    "squint": configured(dial.PIXELS, dial.RECIPES["squint"]),
    "rainbow": dqn_runs.config_of(dqn_runs.VARIANTS["rainbow"]),
    "ape-x": dqn_runs.config_of(dqn_runs.VARIANTS["ape-x"], {"normalize_reward": True}),
    "r2d2": r2d2_runs.config_of({"priority": PRIORITIES}, {"schedule": "concurrent"}),
    "ppo": ppo_runs.config_of(ppo_runs.VARIANTS["squashed"], {"normalize_reward": True}),
    "ppo, lstm": ppo_runs.config_of(ppo_runs.VARIANTS["lstm"]),
    "impala, lstm": impala_runs.config_of(impala_runs.VARIANTS["lstm"]),
    "pqn": configured(PQN),
    "reppo": reppo_runs.config_of(),
}
