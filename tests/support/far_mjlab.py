"""mjlab's environments, with what a test compares with: joint targets as observations, and its exporter's entries."""

import json
from dataclasses import replace

from pql.contract.env import ObsSpec
from pql.envs.adapters.mjlab import mjlab


def watched(num_envs, device, task, action_bound):
    """Make ``task``; ``info["exporter"]`` has mjlab's own entries for ONNX, group ``target`` [N, A] its targets in rad
    (those of the step before)."""
    from mjlab.rl.exporter_utils import get_base_metadata, list_to_csv_str

    env = mjlab(num_envs, device, task, action_bound)
    entries = get_base_metadata(env.env, "run")
    text = {k: list_to_csv_str(v) if isinstance(v, list) else str(v) for k, v in entries.items()}
    term = env.env.action_manager.get_term("joint_pos")
    groups = {**env.spec.obs, "target": ObsSpec((term.action_dim,))}
    env.spec = replace(env.spec, obs=groups, info={**env.spec.info, "exporter": json.dumps(text)})
    reset, step = env.reset, env.step

    def shown(obs):
        return {**obs, "target": term._processed_actions.clone()}

    def stepped(action):
        row = step(action)
        return row._replace(obs=shown(row.obs), final_obs=shown(row.final_obs))

    env.reset, env.step = lambda seed=None: shown(reset(seed)), stepped
    return env
