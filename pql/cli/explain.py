"""``pql train --cfg``, ``--help algo=NAME``, ``--dry-run``: what a run would be, without running it."""

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pql.cli.tables import table
from pql.config import BudgetConfig, Config, leaves
from pql.config.compose import trace
from pql.config.fields import Setting, condition_text, is_read, settings
from pql.config.layers import Layer
from pql.config.validate import likely_device
from pql.errors import show

if TYPE_CHECKING:
    from pql.run.components import Parts

SCHEMA = "schema"


def print_config(overrides: Sequence[str]) -> int:
    """Print every setting of the run as ``name=value`` with the layer that sets it, and return 0. A setting whose
    condition does not hold is marked as not read. Raises ``ConfigError``: a wrong setting."""
    config, layers = trace(overrides, likely_device)
    sources = sources_of(config, layers)
    notes = (f"# {sources[one.name]}{unread(config, one)}" for one in settings(config))
    emit(table([[f"{one.name}={shown(one.value)}", note] for one, note in zip(settings(config), notes, strict=True)]))
    return 0


def emit(text: str) -> None:
    """Print ``text``; a closed pipe (``| head``) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sources_of(config: Config, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the last layer that sets each setting, by name."""
    found = {name: SCHEMA for name, _ in leaves(config)}
    for layer in layers:
        for name in _set_by(layer.tree):
            if name in found:
                found[name] = layer.source
            else:  # below a setting that is a mapping, such as task.kwargs
                above = next((known for known in found if name.startswith(f"{known}.")), None)
                if above:
                    found[above] = layer.source
    return found


def _set_by(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _set_by(value, f"{prefix}{key}.")
        yield f"{prefix}{key}"


def unread(config: Config, one: Setting) -> str:
    """Return a note if another setting disables this one, else ""."""
    return "" if is_read(config, one) else f"; not read without {condition_text(one)}"


def print_settings(overrides: Sequence[str]) -> int:
    """Print the settings of the chosen algorithm, with values here, allowed values and comments, and return 0. Raises
    ``ConfigError``: a wrong setting."""
    config, _ = trace(overrides, likely_device)
    read = ("algo.",) if config.algo.data == "rollout" else ("algo.", "replay.")
    rows = [["setting", "here", "allowed", ""]]
    for one in settings(config):
        if one.name.startswith(read):
            rows.append([one.name, shown(one.value), allowed(one), f"{one.declaration.doc}{condition(one)}"])
    about = f"algo={config.algo.name} on {config.task.title}, at the chosen scale"
    rest = "Settings of every run (task, num_envs, budget, eval, ...): pql train --cfg, docs/settings.md."
    emit(f"Settings that {about}, reads:\n\n{table(rows)}\n\n{rest}")
    return 0


def allowed(one: Setting) -> str:
    """Return the choices or the range of a setting, or its type."""
    declaration = one.declaration
    if declaration.choices:
        return "|".join(declaration.choices)
    if declaration.range is not None:
        return str(declaration.range)
    return {bool: "true|false", str: "text", list: "list", dict: "mapping"}.get(type(one.value), "")


def condition(one: Setting) -> str:
    return f" With {condition_text(one)}." if one.declaration.when else ""


def shown(value: Any) -> str:
    """Format ``value`` as on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    return show(value)


def dry_run(overrides: Sequence[str]) -> int:
    """Build the run, warm up, run two ticks; print sizes, ratios, memory and estimated time. Returns 0. Nothing is
    written. Raises ``ConfigError``: a wrong setting, or a run that does not fit into memory."""
    from pql.config.compose import compose
    from pql.engine.watchdog import guarded
    from pql.run.build import build
    from pql.run.log.console import opening
    from pql.run.log.sinks import memory

    config = compose(overrides)
    print(opening(config, None), flush=True)
    with guarded():
        times = [time.perf_counter()]
        parts = build(config)
        try:
            parts.prepare()
            parts.start()
            times.append(time.perf_counter())
            parts.warm_up(config.algo.warmup_steps)
            parts.begin()
            parts.schedule.tick()
            with parts.schedule.executor.exclusive():  # after all work queued by the first tick
                steps = parts.env_steps
            times.append(time.perf_counter())
            parts.schedule.tick()
            with parts.schedule.executor.exclusive():
                steps = parts.env_steps - steps
            times.append(time.perf_counter())
        finally:
            parts.close()
    building, starting, tick = (later - earlier for earlier, later in itertools.pairwise(times))
    spec, held = parts.env.spec, memory(parts.env.spec.device)
    held |= {"replay": sum(map(tensor_bytes, parts.collector.replays)) / 2**30}
    rows = [
        ["observations", ", ".join(f"{name} {list(group.shape)}" for name, group in spec.obs.items())],
        ["actions", str(spec.action)],
        ["parameters", ", ".join(f"{name} {count:,}" for name, count in parameters(parts).items())],
        ["ratios", ", ".join(f"{k}={v:g}" for k, v in config.algo.ratios.items()) or "one rollout a tick"],
        ["memory", ", ".join(f"{k.removeprefix('memory/').removesuffix('_gib')} {v:.2f} GiB" for k, v in held.items())],
        ["start-up", f"{building:.1f} s to build, {starting:.1f} s of warm-up and first tick"],
        ["a tick", f"{tick:.3g} s for {steps:,} env steps: {steps / tick:,.0f} env steps/s"],
        ["the run", estimate(config.budget, steps / tick)],
    ]
    print(table(rows))
    return 0


def parameters(parts: "Parts") -> dict[str, int]:
    """Return the number of trained parameters of each learner, by name."""
    from pql.engine.flat import Flat
    from pql.run.policy import networks_of

    out = {}
    for name, learner in parts.learners.items():
        modules = (net.module if isinstance(net, Flat) else net for net in networks_of(learner.state).values())
        trained = {id(p): p.numel() for module in modules for p in module.parameters() if p.requires_grad}
        out[name] = sum(trained.values())
    return out


def tensor_bytes(holder: Any) -> int:
    """Return the bytes of the tensors in an object, a mapping or a sequence."""
    import torch

    if isinstance(holder, torch.Tensor):
        return holder.numel() * holder.element_size()
    if isinstance(holder, dict):
        return sum(map(tensor_bytes, holder.values()))
    if isinstance(holder, list | tuple):
        return sum(map(tensor_bytes, holder))
    return sum(map(tensor_bytes, vars(holder).values())) if type(holder).__module__.startswith("pql.data") else 0


def estimate(budget: BudgetConfig, rate: float) -> str:
    """Return the estimated duration of the budget at ``rate`` env steps a second, from one tick."""
    if budget.env_steps is not None and (budget.seconds is None or budget.env_steps / rate <= budget.seconds):
        return f"{budget.env_steps:,} env steps take about {budget.env_steps / rate:,.0f} s at this rate"
    if budget.seconds is not None:
        return f"{budget.seconds:,.0f} s make about {budget.seconds * rate:,.0f} env steps at this rate"
    return "ends when budget.target_return is reached"
