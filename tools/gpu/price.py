"""Estimated GPU seconds of runs that were made on CPU cores.

A tick learns as much on two cores as on a GPU, which only decides how long it takes. This tool estimates that for one
H100 or H200 from what was measured on one (docs/results/gpu.md):

    update   kernels * launch + rows * (operations / rate + elements / bandwidth)
    step     environments / env steps per second of the simulator
    tick     the longest worker + OVERLAP * the others, since they share the device; PPO: env steps / SHARE of the rate

Every figure is an estimate. ``python tools/gpu/price.py RUN... --out DIR`` prints them, and writes copies of the runs
with estimated seconds in place of measured ones, for ``pql compare DIR x=seconds``.
"""

import argparse
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pql.errors import ConfigError
from pql.reports.runs import flat, read_config


class Cost(NamedTuple):
    """Kernels of an update without hidden layers, and of each layer; us per kernel; per us: operations of products,
    and elements of everything else (infinite: contained in the rate of the products)."""

    kernels: int
    per_layer: int
    launch: float
    rate: float
    elements: float = math.inf


COSTS = {
    "first": Cost(168, 40, 2.54, 19.5e6),  # eager: PQL2's critics 2,150 us with 8,192 rows, 1,086 with 2,048
    # By Inductor, bfloat16: with 8,192 rows 484 us, of them products 150, normalisations and activations 106, the
    # projection and softmax of 51 atoms 47; with 2,048 rows 236 us, and 144 with two layers of 128.
    "compiled": Cost(23, 16, 2.16, 184e6, 140e3),
    "goal": Cost(20, 10, 1.0, 69e6),  # 450 and 160 us
}
PROJECTION = 8  # elements of an atom in the critics' update: 47 us for 51 atoms, 106 for the 896 units of the layers
SOFTMAX = 2  # in the policy's

# Env steps per second with 4,096 environments. Measured on the H200: the former Ant (in a run, without contact forces),
# Humanoid, HalfCheetah; swing-up from its 145 kernels; Ant's ten physics steps from the former five, which took 4.2 ms
# of a step's 5.5; the others are HalfCheetah's, times the ratio of bare steps on a CPU core.
STEPS = {"ant": 422e3, "legacy ant": 742e3, "humanoid": 561e3, "halfcheetah": 1535e3, "cartpole_swingup": 16e6}
STEPS |= {"hopper": 770e3, "walker2d": 497e3, "go1_velocity": 497e3, "anymal": 514e3, "isaac_ant": 2015e3}
STEPS |= {"ballbalance": 1319e3, "allegro_hand": 415e3, "shadow_hand": 190e3}

OVERLAP = 0.5  # PQL on swing-up: 8.8 ms, of which critics 7.3, policies 2.5, steps .25
SHARE = 0.75  # PPO on Ant: 558,000 of 742,000 env steps per second


def operations(inputs: int, hidden: Sequence[int], outputs: int) -> float:
    """Return the multiplications and additions of a row's forward pass."""
    sizes = [inputs, *hidden, outputs]
    return 2.0 * sum(a * b for a, b in itertools.pairwise(sizes))


def update_us(settings: Mapping[str, Any], obs: int, actions: int, cost: Cost) -> tuple[float, float]:
    """Return the us of a critic update and of a policy update.

    Args:
        settings: the run's, with dotted names.
        obs, actions: sizes of an observation and an action.
    """
    hidden, own = settings["algo.critic.hidden"], settings["algo.policy.hidden"]
    heads, atoms = settings["algo.critic.ensemble"], settings["algo.critic.atoms"]
    outputs = atoms or 1
    critic = heads * operations(obs + actions, hidden, outputs)
    policy = operations(obs, own, 2 * actions)

    def us(layers: int, operations: float, elements: float) -> float:
        row = operations / cost.rate + elements / cost.elements
        return (cost.kernels + cost.per_layer * layers) * cost.launch + settings["algo.batch_size"] * row

    # The critics' update has targets and gradients; the policy's goes through the critics without their gradients.
    v = us(len(hidden), 4 * critic + policy, heads * (sum(hidden) + PROJECTION * outputs))
    p = us(len(own), 3 * policy + 2 * critic, sum(own) + heads / 2 * (sum(hidden) + SOFTMAX * outputs))
    return v, p


def steps_of(settings: Mapping[str, Any]) -> float:
    """Return the env steps per second of a run's task. Raises ``ConfigError``: it is not known."""
    name, kwargs = settings["task.name"], settings.get("task.kwargs") or {}
    if kwargs.get("model"):
        raise ConfigError("task.kwargs.model", kwargs["model"], "none: speeds are known of each task's default model")
    if kwargs.get("legacy") and f"legacy {name}" in STEPS:
        name = f"legacy {name}"
    if name not in STEPS:
        raise ConfigError("task", name, f"one whose speed is known here: {', '.join(STEPS)}")
    return STEPS[name]


def tick_seconds(settings: Mapping[str, Any], obs: int, actions: int, cost: Cost) -> float:
    """Return the seconds of a tick of an off-policy run; arguments as those of :func:`update_us`."""
    v, p = update_us(settings, obs, actions, cost)
    updates = settings["algo.v_per_step"]
    step = 1e6 * settings["num_envs"] / steps_of(settings)
    *others, longest = sorted((v * updates, p * updates * settings["algo.p_per_v"], step))
    return 1e-6 * (longest + OVERLAP * sum(others))


def seconds_of(row: Mapping[str, Any], settings: Mapping[str, Any], sizes: tuple[int, int], cost: Cost) -> float:
    """Return the estimated seconds up to a row of metrics; ``sizes``: of an observation and an action."""
    steps = row["steps/env"]
    if "algo.v_per_step" not in settings:
        return float(steps / (SHARE * steps_of(settings)))
    return float(steps / settings["num_envs"] * tick_seconds(settings, *sizes, cost))


def sizes_of(run: Path) -> tuple[int, int]:
    """Return the sizes of a run's observations and actions, from its task."""
    from pql.config import from_dict
    from pql.engine.placement import machine_of
    from pql.run.environment import describe_env

    config = from_dict(read_config(run))
    spec = describe_env(config, machine_of(config))
    assert spec is not None
    return math.prod(spec.obs["policy"].shape), math.prod(spec.action.shape)


def price(run: Path, cost: Cost, out: Path | None) -> list[dict[str, float]]:
    """Return a run's evaluations at estimated seconds; write a copy of it below ``out``."""
    settings, sizes = flat(read_config(run)), sizes_of(run)
    if "algo.v_per_step" in settings and "algo.policy.hidden" not in settings:
        raise ConfigError("algo", settings["algo.name"], "an actor-critic, or PPO")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["time/seconds"] = seconds_of(row, settings, sizes, cost)
    if out is not None:
        copy = out / run.name
        copy.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "summary.json"):
            if (run / name).exists():
                shutil.copy(run / name, copy)
        (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = ("time/seconds", "steps/env", "updates/v", "eval/return_mean")
    return [{k: row[k] for k in wanted if k in row} for row in rows if "eval/return_mean" in row]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--kernels", choices=list(COSTS), default="compiled")
    parser.add_argument("--out", type=Path, help="folder for copies of the runs")
    args = parser.parse_args(argv)
    for run in args.runs:
        try:
            rows = price(run, COSTS[args.kernels], args.out)
        except ConfigError as error:
            parser.error(f"{run}: {error}")
        print(f"{run.name}: estimated GPU seconds, env steps, critic updates, return")
        for row in rows:
            first, *others = row.values()
            print(f"{first:8.1f} " + " ".join(f"{value:12,.0f}" for value in others))


if __name__ == "__main__":
    main()
