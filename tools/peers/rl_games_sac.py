"""rl_games in ``compare.py``: its SAC on environments of this library."""

import contextlib
import io
import tempfile
from typing import Any, cast

import torch
from torch import Tensor

import pql
from pql.contract.env import VecEnv
from pql.types import Obs
from pql.wrap.rows import SameStep
from tools.peers.course import FOREVER, Act, Course, Over
from tools.peers.settings import Settings


class RlGamesEnv:
    """A ``VecEnv`` as rl_games' ``IVecEnv``, with tensors; only the members that its SAC reads.

    ``step`` returns the next episode's observation where an episode ended, and ``infos["time_outs"]``. There rl_games
    stores the observation before the step as the next one, without an end: it bootstraps from V(s_t).
    """

    def __init__(self, env: VecEnv, seed: int):
        from pql.wrap.to_gymnasium import action_space, box

        self._rows, self._seed = SameStep(env), seed
        self.info = {"observation_space": box(env.spec.obs["policy"]), "action_space": action_space(env.spec)}

    def reset(self) -> Tensor:
        """Restart all environments: [N, D]."""
        return self._rows.reset(self._seed)["policy"]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Step with actions [N, A]; return (observations [N, D], rewards [N], dones [N] bool, infos)."""
        row = self._rows.step(actions)
        return row.obs["policy"], row.reward, row.done, {"time_outs": row.time_out}


def rl_games_agent(env: VecEnv, seed: int, settings: Settings, folder: str, observer: Any = None) -> tuple[Any, Act]:
    """Build rl_games' SAC agent, without checkpoints and prints, and its deterministic policy.

    Args:
        folder: for its TensorBoard files.
        observer: its ``AlgoObserver``.
    """
    from rl_games.torch_runner import Runner

    wrapped, runner = RlGamesEnv(env, seed), Runner(observer)
    silent = {"print_stats": False, "save_best_after": FOREVER, "train_dir": folder, "name": "run", "env_name": "pql"}
    mlp = {"units": settings["units"], "activation": settings["activation"], "initializer": {"name": "default"}}
    network = {"name": "soft_actor_critic", "separate": True, "space": {"continuous": None}, "mlp": mlp}
    params = {
        "seed": seed,
        "torch_threads": 0,  # torch's own number, which is what rl_games would set, or OMP_NUM_THREADS
        "algo": {"name": "sac"},
        "model": {"name": "soft_actor_critic"},
        "network": {**network, "log_std_bounds": settings["log_std_bounds"]},
        "config": {**settings["config"], **silent, "device": "cpu", "env_info": wrapped.info},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner.load({"params": params})
        agent = runner.algo_factory.create("sac", base_name="run", params=runner.params)
    agent.vec_env = wrapped

    @torch.no_grad()
    def act(obs: Obs) -> Tensor:
        agent.set_eval()
        return cast(Tensor, agent.act(obs["policy"], None, sample=False))

    return agent, act


def train_rl_games(task: str, seed: int, course: Course, settings: Settings) -> None:
    from rl_games.common.algo_observer import AlgoObserver

    class Clock(AlgoObserver):
        """Observer that ends the run, since rl_games has no time budget."""

        def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
            if course.over(frame, agent.update_counter, act):
                raise Over

    env = pql.make_env(task, num_envs=settings["config"]["num_actors"])
    with tempfile.TemporaryDirectory() as folder:
        agent, act = rl_games_agent(env, seed, settings, folder, Clock())
        course.begin()
        with contextlib.suppress(Over):
            agent.train()
        agent.writer.close()
