"""pql as an algorithm of rsl_rl's runners (version 5): ``algorithm.class_name = "pql.lab:Learner"``.

The runner owns environments, loop, log and files; it calls ``act`` and ``process_env_step`` once a step, in which a run
(``pql.drive``) collects the row and makes its updates. What the runner calls an update reads the run's metrics.
"""

import itertools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from pql.algos.registry import family_of
from pql.api import drive, driven_words
from pql.config import Config, leaves
from pql.config.compose import compose
from pql.config.trust import NETWORKS
from pql.contract.env import Box
from pql.contract.spec_json import spec_to_dict
from pql.engine.world import world
from pql.errors import ConfigError
from pql.lab.describe import Described
from pql.lab.policy import LabPolicy
from pql.run.driven import Driven
from pql.run.log.displays import Row
from pql.run.policy import fresh_policy, policy_of
from pql.run.session import Session
from pql.run.store import checkpoint
from pql.run.store.manifest import config_entries
from pql.run.store.run_dir import holds_run

VARIABLE = "PQL_SETTINGS"
"""Environment variable with settings: words of the command line, the last to be applied."""
OWN = ("algo", "settings", "action_bound", "final_obs", "class_name", "rnd_cfg")
SAME = {"gamma": "algo.gamma"}  # settings of rsl_rl's algorithms that mean the same here
LOGGED = ("value/", "policy/", "grad_norm/", "replay/", "throughput/updates_per_s")
"""Metrics that the runner logs beside the losses, as ``Pql/NAME``."""


class LabLearner:
    """See the module; made by :meth:`construct_algorithm`.

    Args:
        described: the environment, ``env``.
        words: settings of the run.
        steps: of every environment in an iteration: the length of a rollout, in algorithms that have them.

    Attributes:
        rnd, intrinsic_rewards: None: there is no intrinsic reward.
        learning_rate: of the policy, as configured.
        run: the run, from the first action on.
        quiet: the run prints nothing beside what the runner prints.
    """

    rnd = None
    intrinsic_rewards = None
    quiet = True

    def __init__(self, described: Described, words: Sequence[str], env: Any, steps: int | None = None):
        self.described, self.words, self.env = described, list(words), env
        self.run: Driven | None = None
        self.config = self._compose()
        if steps is not None and "algo.horizon" in dict(leaves(self.config)):
            self.words.insert(1, f"algo.horizon={steps}")
            self.config = self._compose()
        rates = [v for k, v in leaves(self.config) if k in ("algo.policy.lr", "algo.lr")]
        self.learning_rate = float(rates[0]) if rates else 0.0
        family, device = family_of(self.config), described.spec.device
        family.check(self.config, described.spec, family.counts(self.config), device)
        fresh = fresh_policy(self.config, described.spec, device)
        if self.config.checkpoint.replay and world().size > 1:  # which all ranks would have to save at once
            raise ConfigError("checkpoint.replay", True, "false with several processes: only the first one saves")
        self._policy = LabPolicy(fresh, described)
        self._policy.std = self._std
        self._state: dict[str, Any] | None = None
        self._action, self._obs = torch.zeros(0), dict[str, Tensor]()
        self._metrics: dict[str, float] = {}
        self._row: Row = {}  # the last one of the run's log
        self._follow = False  # copy the policy after every tick: when it is asked for, learners may be at work

    def _compose(self) -> Config:
        return compose(driven_words(Driven(self.described.spec).env, self.words))

    @staticmethod
    def construct_algorithm(obs: Mapping[str, Tensor], env: Any, cfg: dict[str, Any], device: str) -> "LabLearner":
        """Make a learner from a runner's configuration, whose keys docs/guides/robot_stacks.md lists.

        Raises:
            ConfigError: settings that are wrong, or an environment that pql does not support.
        """
        algorithm = cfg["algorithm"]
        algorithm.setdefault("rnd_cfg", None)  # rsl_rl's loop and log look it up
        if algorithm["rnd_cfg"]:
            raise ConfigError("algorithm.rnd_cfg", "given", "null: the setting algo.rnd.weight has its place")
        bound, final = (algorithm.get(k) or "auto" for k in ("action_bound", "final_obs"))
        described = Described(env, obs, cfg.get("obs_groups"), bound, final)
        words, idle = words_of_cfg({**cfg, "seed": of_first(cfg.get("seed"))})
        learner = LabLearner(described, [*words[:1], *described.words, *words[1:]], env, cfg.get("num_steps_per_env"))
        if not world().rank:
            learner.say(idle)
        return learner

    def say(self, idle: Sequence[str]) -> None:
        """Print what will be trained, and settings of the runner that have no meaning here."""
        spec, d = self.described.spec, self.described
        print(
            f"pql: algo={self.config.algo.name}, {spec.num_envs} environments, actions of {spec.action.size} numbers "  # type: ignore[union-attr]
            f"(action_bound={d.bound}), final observations: {d.source}"
        )
        if idle:
            print(f"pql: not used: {', '.join(idle)}")

    # -- the runner's loop ----------------------------------------------------------------------------------------

    def act(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Return the simulator's actions [N, A] for its observations [N, ...] by group."""
        self._obs = self.described.obs(obs)
        if self.run is None:
            self._open()
            assert self.run is not None
            self._action = self.run.begin(self._obs)
        else:
            self._action = self.run.act()
        return self.described.actions(self._action)

    def process_env_step(self, obs: Any, rewards: Tensor, dones: Tensor, extras: dict[str, Any]) -> None:
        """Take the row of the last actions: observations [N, ...], rewards [N], dones [N]. The learners' updates of a
        tick are made here."""
        if self.run is None:
            raise RuntimeError("process_env_step() before act()")
        self.run.record(self.described.step((obs, rewards, dones, extras)))
        if self._follow and self.run.paused:
            self.run.policy(self._policy.policy)
        if self._metrics:
            name = "episode" if "episode" in extras else "log"
            extras[name] = {**(extras.get(name) or {}), **self._metrics}
            self._metrics = {}

    def compute_returns(self, obs: Any) -> None:
        """Nothing: updates are made in every tick."""

    def update(self, more: Mapping[str, float] | None = None) -> dict[str, float]:
        """Log the metrics since the last call, and ``more``; return the losses by name."""
        if self.run is not None:
            self.run.soon(lambda session: session.report(more))
        self._metrics = {f"Pql/{k}": v for k, v in self._row.items() if k.startswith(LOGGED)}
        return {k.removeprefix("loss/"): v for k, v in self._row.items() if k.startswith("loss/")}

    def _logged(self, session: Session, row: Row) -> None:
        self._row = row

    def train_mode(self) -> None: ...

    def eval_mode(self) -> None: ...

    def broadcast_parameters(self) -> None:
        """Nothing: a run copies its first weights to all ranks."""

    def get_policy(self) -> LabPolicy:
        """Return the model that acts, with the weights of now."""
        if self.run is not None and self.run.going:
            self._follow |= not self.run.readable
        if self.run is not None and self.run.readable:
            self.run.policy(self._policy.policy)
        return self._policy

    def _std(self) -> Tensor:
        """Return the deviation of the last actions from the mean action, [A]."""
        actions, policy = self.described.actions, self._policy.policy
        if policy.state_shapes or not self._obs:
            return torch.zeros(actions.spec.size)
        return (actions(self._action) - actions(policy(self._obs))).square().mean(0).sqrt()

    def _open(self) -> None:
        where = run_dir(self.env)
        words = [*([] if where is None else [f"run_dir={where}"]), *self.words]
        self.run = drive(*words, spec=self.described.spec, state=self._state, callbacks=self._logged, quiet=self.quiet)

    # -- files ----------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Return the run's networks, statistics and settings, of tensors and text (``weights_only`` loads them).

        With ``checkpoint.replay=true`` it also writes a resume point into the run directory, with the replay.
        """
        if self.run is None or not self.run.paused:
            spec = spec_to_dict(self.described.spec)
            facts = {"kind": "policy", **config_entries(self.config), "spec": spec, "counters": {}, "ranks": 1}
            tensors = checkpoint.flatten(self.get_policy().policy.state_dict())
            copied = {k: v.to("cpu", copy=True) for k, v in tensors.items()}
            return {"pql": {"tensors": copied, "manifest": json.dumps(facts)}}
        state = self.run.state(replay=False)
        saved = {"tensors": state["tensors"], "manifest": json.dumps(state["manifest"])}
        if self.config.checkpoint.replay:
            saved["point"] = str(self.run.at_pause(lambda session: session.save_point()).absolute())
        return {"pql": saved}

    def load(self, loaded_dict: dict[str, Any], load_cfg: dict[str, Any] | None, strict: bool = True) -> bool:
        """Load what :meth:`save` returned; with ``load_cfg={"actor": True}`` only the policy. Returns whether the
        runner's iteration is to continue.

        Raises:
            ConfigError: not a file of this learner, or one of another task or other settings.
        """
        if "pql" not in loaded_dict:
            raise ConfigError("checkpoint", "/".join(loaded_dict), "a file that pql.lab:Learner saved")
        if self.run is not None:
            raise ConfigError("checkpoint", "loaded", "nothing after the first action: load before learning")
        tensors, manifest = loaded_dict["pql"]["tensors"], json.loads(loaded_dict["pql"]["manifest"])
        policy = policy_of(tensors, manifest, self.described.spec.device, given=NETWORKS)  # of the file's settings
        self._policy = LabPolicy(policy, self.described)
        self._policy.std = self._std
        if load_cfg is None or load_cfg.get("critic"):
            point = Path(loaded_dict["pql"].get("point", ""))
            if "point" in loaded_dict["pql"] and point.exists():
                tensors, manifest = checkpoint.load(point, ("resume",))
            self._state = {"tensors": tensors, "manifest": manifest}
        else:
            self.described.act_within(cast(Box, policy.spec.action))
        return load_cfg is None or bool(load_cfg.get("iteration"))


def words_of_cfg(cfg: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return settings of a run from a runner's configuration, and names in it that have no meaning here."""
    algorithm = cfg["algorithm"]
    words = [f"algo={algorithm.get('algo') or 'pql2'}", f"seed={cfg.get('seed') or 0}"]
    # Rows when the runner logs, files when it saves.
    words += ["logger.every_seconds=1e6", "checkpoint.every_seconds=null", "checkpoint.replay=false"]
    words += [f"{new}={algorithm[old]}" for old, new in SAME.items() if old in algorithm]
    given = algorithm.get("settings") or ()
    words += shlex.split(given) if isinstance(given, str) else list(given)
    words += shlex.split(os.environ.get(VARIABLE, ""))
    idle = [f"algorithm.{k}" for k in algorithm if k not in (*OWN, *SAME)]
    return words, idle + [k for k in ("actor", "critic") if k in cfg]


def of_first(seed: int | None) -> int | None:
    """Return rank 0's seed: stacks add the rank to it, as a run does itself."""
    seeds = [seed]
    if world().size > 1 and dist.is_initialized():
        dist.broadcast_object_list(seeds)
    return seeds[0]


def run_dir(env: Any) -> Path | None:
    """Return the run's directory: ``pql`` in the runner's log directory, or None if there is none.

    Isaac Lab's configuration has it. rsl_rl's runner does not hand it over, so it is read from the runner.
    """
    if given := getattr(getattr(env, "cfg", None), "log_dir", None):
        return unused(Path(given))
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        runner = frame.f_locals.get("self")
        if getattr(runner, "env", None) is env and (log := getattr(runner, "logger", None)) is not None:
            return None if log.log_dir is None else unused(Path(log.log_dir))
    return None


def unused(folder: Path) -> Path:
    """Return a directory below ``folder`` that holds no run: ``pql``, else ``pql-2`` and so on."""
    names = itertools.chain(["pql"], (f"pql-{i}" for i in itertools.count(2)))
    return next(folder / name for name in names if not holds_run(folder / name))
