"""Final observations from environments with rsl_rl's interface, which returns the next episode's first ones instead.

A source is installed in the simulator below the wrappers, so that what records videos or clips actions stays in place.
After a step in which an episode ended, ``extras[name]`` has the observations before the resets, by group.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pql.envs.adapters.isaaclab import group_with_history
from pql.errors import ConfigError
from pql.types import chosen

KEYS = ("final_obs", "terminal_obs", "time_outs_obs", "final_observations")
"""Entries of ``extras`` in which simulators and their forks return them."""
SOURCES = ("auto", "resets", "computed", "extras", "intercepted", "never")


def install(env: Any, source: str = "auto") -> str:
    """Make ``env`` return final observations in ``extras``, if it can. Returns the source used, "never" without one.

    Args:
        env: with rsl_rl's interface; changed in place.
        source: ``resets``: resets are done here, after the step (mjlab, ``cfg.auto_reset``); ``computed``: the
            simulator's own, switched on (Isaac Lab 3, ``cfg.compute_final_obs``); ``extras``: it returns them already;
            ``intercepted``: computed before ``_reset_idx`` (Isaac Lab 2's managers); ``never``: none; ``auto``: the
            first possible one of these, in this order.
    Raises:
        ConfigError: an unknown source, or one that this environment does not have.
    """
    core = getattr(env, "unwrapped", env)
    cfg, manager = getattr(core, "cfg", None), getattr(core, "observation_manager", None)
    history = group_with_history(cfg)
    reasons = {
        "resets": "" if hasattr(cfg, "auto_reset") else "its configuration has no auto_reset",
        "computed": (history and f"{history} keeps a history") or _lacks(cfg, "compute_final_obs"),
        "extras": "" if _returned(env) else f"its extras have none of {', '.join(KEYS)}",
        "intercepted": _not_interceptable(core, manager, history),
        "never": "",
    }
    if source not in SOURCES:
        raise ConfigError("final_obs", source, f"one of {', '.join(SOURCES)}")
    if source != "auto" and reasons[source]:
        raise ConfigError("final_obs", source, f"auto: {reasons[source]}")
    used = source if source != "auto" else next(name for name, why in reasons.items() if not why)
    if used == "resets":
        cfg.auto_reset = False  # type: ignore[union-attr]
        core.step = _resetting(core, core.step)
    elif used == "computed":
        cfg.compute_final_obs = True  # type: ignore[union-attr]
    elif used == "intercepted":
        core._reset_idx = _observing(core, core._reset_idx, manager)
    return used


def given_final(extras: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the final observations in ``extras``, name -> [N, ...]; valid in rows that ended an episode."""
    return next((extras[k] for k in KEYS if extras.get(k) is not None), None)


def _lacks(cfg: Any, name: str) -> str:
    return "" if hasattr(cfg, name) else f"its configuration has no {name}"


def _returned(env: Any) -> bool:
    """Return True if ``env`` says so, as pql's own wrapper does: before an episode ends, extras do not."""
    return bool(getattr(env, "returns_final_obs", False))


def _not_interceptable(core: Any, manager: Any, history: str | None) -> str:
    if not (hasattr(core, "_reset_idx") and hasattr(manager, "compute")):
        return "it has no _reset_idx and observation_manager"
    groups = getattr(getattr(core.cfg, "observations", None), "__dict__", {})
    delayed = next((name for name, group in groups.items() if _delays(group)), None)
    if history or delayed:
        return f"{history or delayed} keeps a history or a delay, which another observation would advance"
    return ""


def _delays(group: Any) -> bool:
    return any((getattr(term, "delay_max_lag", 0) or 0) > 0 for term in getattr(group, "__dict__", {}).values())


def _resetting(core: Any, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return ``step`` [N, A] with the resets of mjlab's environment after it instead of within it."""

    def stepped(action: Tensor) -> Any:
        obs, reward, terminated, time_outs, extras = step(action)
        over, metrics = terminated | time_outs, dict(extras.get("log") or {})
        kept = reward.clone(), terminated.clone(), time_outs & ~terminated
        ids = over.nonzero().flatten()  # synchronises with the device, as the simulator's own reset does
        extras.pop("final_obs", None)
        if len(ids):
            final = {k: v.clone() for k, v in obs.items()}
            new, extras = core.reset(env_ids=ids)
            obs = core.obs_buf = chosen(over, new, final)
            extras["final_obs"], extras["log"] = final, {**metrics, **(extras.get("log") or {})}
        return (obs, *kept, extras)

    return stepped


def _observing(core: Any, reset: Callable[[Any], Any], manager: Any) -> Callable[[Any], Any]:
    """Return ``_reset_idx`` of Isaac Lab's environment with an observation before it."""

    def observed(ids: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            core.extras["final_obs"] = {k: v.clone() for k, v in manager.compute().items()}
        return reset(ids, *args, **kwargs)

    return observed
