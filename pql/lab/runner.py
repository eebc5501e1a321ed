"""A runner for scripts that choose one by its class: rsl_rl's methods, without rsl_rl."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pql.engine.world import world
from pql.lab.learner import LabLearner
from pql.lab.policy import LabPolicy

ALGORITHM = ("algo", "settings", "action_bound", "final_obs")
DEFAULTS = {"num_steps_per_env": 24, "save_interval": 50}


def learner_cfg(train_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return a runner's configuration whose algorithm is pql's, with its settings from the top level."""
    own = {k: train_cfg[k] for k in ALGORITHM if k in train_cfg}
    algorithm = {**train_cfg.get("algorithm", {}), **own, "class_name": "pql.lab:Learner"}
    return {**DEFAULTS, **{k: v for k, v in train_cfg.items() if k not in ALGORITHM}, "algorithm": algorithm}


class LabRunner:
    """Trains with pql what a script hands to a runner of rsl_rl.

    Args:
        env: with the interface of rsl_rl 5.
        train_cfg: ``algo``, ``settings`` (words of ``pql train``), ``action_bound``, ``final_obs``, ``seed``,
            ``num_steps_per_env``, ``save_interval`` (iterations), ``obs_groups``; or rsl_rl's, whose names that mean
            nothing here are listed in one line.
        log_dir: for ``model_<N>.pt`` and, in ``pql``, the run; None: no models, and the run is below ``runs``.
        device: the environment's, which is used.
        ignored: arguments of other runners.
    """

    def __init__(
        self, env: Any, train_cfg: Mapping[str, Any], log_dir: str | None = None, device: str = "cpu", **ignored: Any
    ):
        self.env, self.cfg, self.device, self.log_dir = env, learner_cfg(train_cfg), device, log_dir
        self.is_distributed, self.current_learning_iteration = world().size > 1, 0
        self.logger = SimpleNamespace(log_dir=log_dir, logger_type="pql", writer=None)
        self.alg: LabLearner = LabLearner.construct_algorithm(env.get_observations(), env, self.cfg, device)
        self.alg.quiet = False

    def learn(self, num_learning_iterations: int, init_at_random_ep_len: bool = False) -> None:
        """Make ``num_learning_iterations`` x ``num_steps_per_env`` steps of every environment.

        Args:
            init_at_random_ep_len: begin at random points of the time limit, so that episodes do not end together.
        """
        if init_at_random_ep_len:
            ages = self.env.episode_length_buf
            self.env.episode_length_buf = torch.randint_like(ages, high=int(self.env.max_episode_length))
        obs, first = self.env.get_observations(), self.current_learning_iteration
        for it in range(first, first + num_learning_iterations):
            found = defaultdict[str, list[float]](list)
            for _ in range(self.cfg["num_steps_per_env"]):
                obs, *row = self.env.step(self.alg.act(obs))
                self.alg.process_env_step(obs, *row)
                for name, value in (row[2].get("log") or row[2].get("episode") or {}).items():
                    found[name].append(value)
            means = {k: float(torch.as_tensor([float(v) for v in vs]).mean()) for k, vs in found.items()}
            self.alg.update({k: v for k, v in means.items() if not k.startswith("Pql/")})
            self.current_learning_iteration = it
            if self.log_dir is not None and not world().rank and it % self.cfg["save_interval"] == 0:
                self.save(str(Path(self.log_dir) / f"model_{it}.pt"))
        if self.log_dir is not None and not world().rank:
            self.save(str(Path(self.log_dir) / f"model_{self.current_learning_iteration}.pt"))

    def close(self) -> None:
        """End the run. The end of the program does it, too."""
        if self.alg.run is not None:
            self.alg.run.close()

    # -- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str, infos: dict[str, Any] | None = None) -> None:
        """Write policy, networks and iteration; ``torch.load(path, weights_only=True)`` reads them."""
        core = getattr(self.env, "unwrapped", self.env)
        state = {k: getattr(core, k) for k in ("common_step_counter",) if hasattr(core, k)}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        known = {"iter": self.current_learning_iteration, "infos": {**(infos or {}), "env_state": state}}
        torch.save({**self.alg.save(), **known}, path)

    def load(
        self, path: str, load_cfg: dict[str, Any] | None = None, strict: bool = True, map_location: str | None = None
    ) -> Any:
        """Read a file of :meth:`save`, before learning. Returns its ``infos``.

        Args:
            load_cfg: ``{"actor": True}``: the policy only; None: everything.
        """
        found = torch.load(path, weights_only=True, map_location=map_location)
        if self.alg.load(found, load_cfg, strict):
            self.current_learning_iteration = found["iter"]
        core = getattr(self.env, "unwrapped", self.env)
        for name, value in ((found["infos"] or {}).get("env_state") or {}).items():
            setattr(core, name, value)
        return found["infos"]

    def get_inference_policy(self, device: str | None = None) -> LabPolicy:
        """Return the policy: observations by group, [N, ...] -> the simulator's actions [N, A]."""
        return self.alg.get_policy().to(device or self.device)

    def export_policy_to_onnx(self, path: str, filename: str = "policy.onnx", verbose: bool = False) -> None:
        """Write an ONNX file into the folder ``path``: ``obs`` (or the groups' names) -> ``actions``."""
        os.makedirs(path, exist_ok=True)
        model: Any = self.alg.get_policy().as_onnx(verbose)
        names = {"input_names": model.input_names, "output_names": model.output_names, "verbose": verbose}
        where = Path(path) / filename
        torch.onnx.export(model, model.get_dummy_inputs(), str(where), opset_version=18, dynamo=False, **names)

    def export_policy_to_jit(self, path: str, filename: str = "policy.pt") -> None:
        """Write a TorchScript file into the folder ``path``."""
        os.makedirs(path, exist_ok=True)
        traced: Any = self.alg.get_policy().as_jit()
        traced.save(os.path.join(path, filename))

    def add_git_repo_to_log(self, repo_file_path: str) -> None:
        """Nothing: a run directory records the state of pql and of the working directory (``git.json``)."""
