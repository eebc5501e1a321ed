"""Estimated GPU seconds of runs that were made on CPU cores, and of ticks with given settings.

A tick learns as much on two cores as on a GPU, which only decides how long it takes. This tool estimates that for one
H100 or H200 from what was measured on one (docs/results/gpu.md):

    update   kernels * launch + rows * (operations / rate + elements / bandwidth)
    step     seconds with 4,096 environments * (FIXED + (1 - FIXED) * environments / 4,096)
    tick     concurrent: the longest worker + OVERLAP * the others, since they share the device; lockstep: the sum (12 %
             below what was measured with PQL on swing-up)
    PPO      horizon * step + LEARN * rows / 65,536

Every figure is an estimate. Updates count as compiled, in bfloat16 and captured in a CUDA graph, whatever algo.amp,
placement.compile and graphs say; PPO's as they were measured, before they were compiled.

    python tools/gpu/price.py task=ant algo=pql2 scale=gpu algo.v_per_step=72
    python tools/gpu/price.py RUN... --out DIR && pql compare DIR x=seconds

The first prints what a tick takes, with scale=gpu unless another scale is given. The second prints the evaluations of
runs, or of all runs below a folder, at estimated seconds, and writes copies with these in place of measured seconds.
"""

import argparse
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pql.config import Config, from_dict, to_dict
from pql.config.compose import compose
from pql.errors import ConfigError, show
from pql.reports.runs import find, flat, read_config, read_rows


class Cost(NamedTuple):
    """Kernels of an update without hidden layers, and of each layer with LayerNorm and without; us per kernel; per us:
    operations of products, and elements of everything else (infinite: contained in the rate of the products)."""

    kernels: int
    per_layer: int
    per_plain_layer: int
    launch: float
    rate: float
    elements: float = math.inf


COSTS = {
    # By Inductor, bfloat16: PQL2's critics take 484 us with 8,192 rows (of them products 150, normalisations and
    # activations 106, projection and softmax of 51 atoms 47), 236 us with 2,048, 144 us with two layers of 128.
    "compiled": Cost(23, 16, 11, 2.16, 184e6, 140e3),
    # What compiled updates were to reach before they were measured: 450 us with 8,192 rows, 160 us with 2,048.
    "goal": Cost(20, 10, 10, 1.25, 71.5e6),
}
PROJECTION = 8  # elements of an atom in the critics' update: 47 us for 51 atoms, 106 for the 896 units of the layers
SOFTMAX = 2  # in the policy's
PLAIN = 0.5  # elements of a unit without LayerNorm: 362 us instead of 484

# Env steps per second with 4,096 environments. The H200 ran the former Ant, Humanoid and HalfCheetah with random
# actions. Estimates: swing-up from its 145 kernels; Ant's ten physics steps from the former five, which took 4.2 ms of
# a step's 5.5; the others are HalfCheetah's, times the ratio of bare steps on a CPU core.
STEPS = {"ant": 422e3, "legacy ant": 742e3, "humanoid": 561e3, "halfcheetah": 1535e3, "cartpole_swingup": 16e6}
STEPS |= {"hopper": 770e3, "walker2d": 497e3, "go1_velocity": 497e3, "anymal": 514e3, "isaac_ant": 2015e3}
STEPS |= {"ballbalance": 1319e3, "allegro_hand": 415e3, "shadow_hand": 190e3}

MEASURED = (4096, 65_536)  # environments of the former Ant; of Humanoid up to 16,384
FIXED = 0.6  # the former Ant: 5.5 ms with 4,096 environments, 11.8 with 16,384, 37.1 with 65,536; Humanoid 7.3, 16.1
OVERLAP = 0.5  # PQL on swing-up: 8.8 ms, of which critics 7.3, policies 2.5, steps .25
LEARN = 13.2e3  # us of PPO's 8 updates of 32,768 rows: 17.3 ms on swing-up, of which 16 steps take 4.1
PPO = {"policy.hidden": [256, 128, 64], "critic.hidden": [256, 128, 64], "epochs": 4, "minibatches": 2}  # then
MLP = {"critic.trunk": "mlp", "policy.trunk": "mlp", "critic.batch_norm": False, "lstm": None}  # as counted
MLP |= {"critic.unit_weights": "none", "policy.unit_weights": "none"}
PLAIN_LOSS = {"symmetry.augment": "off", "symmetry.mirror_coef": 0.0, "rnd.weight": 0.0}


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
    units = {}
    kernels = {}
    for part in ("critic", "policy"):
        normed = settings[f"algo.{part}.layer_norm"]
        kernels[part], units[part] = (cost.per_layer, 1.0) if normed else (cost.per_plain_layer, PLAIN)

    def us(part: str, operations: float, elements: float) -> float:
        row = operations / cost.rate + elements / cost.elements
        launched = cost.kernels + kernels[part] * len(settings[f"algo.{part}.hidden"])
        return launched * cost.launch + settings["algo.batch_size"] * row

    learned, acting = units["critic"] * sum(hidden), units["policy"] * sum(own)

    # The critics' update has targets and gradients; the policy's goes through the critics without their gradients.
    v = us("critic", 4 * critic + policy, heads * (learned + PROJECTION * outputs))
    p = us("policy", 3 * policy + 2 * critic, acting + heads / 2 * (learned + SOFTMAX * outputs))
    return v, p


def step_us(settings: Mapping[str, Any]) -> float:
    """Return the us of a step of all environments. Raises ``ConfigError``: the task's speed is not known."""
    name, kwargs = settings["task.name"], settings.get("task.kwargs") or {}
    for where, model in (("task.model", settings.get("task.model")), ("task.kwargs.model", kwargs.get("model"))):
        if model:
            raise ConfigError(where, model, "none: speeds are known of each task's default model")
    if (engine := kwargs.get("engine", "auto")) not in ("auto", "warp"):
        raise ConfigError(
            "task.kwargs.engine", engine, "auto or warp: speeds are of MuJoCo Warp, which auto is on a GPU"
        )
    if kwargs.get("legacy") and f"legacy {name}" in STEPS:
        name = f"legacy {name}"
    if name not in STEPS:
        raise ConfigError("task", name, f"one whose speed is known here: {', '.join(STEPS)}")
    return 1e6 * 4096 / STEPS[name] * (FIXED + (1 - FIXED) * settings["num_envs"] / 4096)


def together(workers: Sequence[float], schedule: str) -> float:
    """Return the time of a tick from those of its workers."""
    *others, longest = sorted(workers)
    return longest + (OVERLAP if schedule == "concurrent" else 1.0) * sum(others)


def check(settings: Mapping[str, Any]) -> None:
    """Refuse what this tool has no figures for.

    Raises:
        ConfigError: an algorithm that is neither PPO nor an off-policy actor-critic, other networks, further losses, or
            demonstrations.
    """
    needed = {"algo.v_per_step", "algo.critic.hidden", "algo.policy.hidden"}
    if settings["algo.name"] != "ppo" and not needed <= {*settings}:
        raise ConfigError("algo", settings["algo.name"], "an off-policy actor-critic, or PPO")
    known = (PPO if settings["algo.name"] == "ppo" else {}) | MLP | PLAIN_LOSS
    for name, priced in ({f"algo.{name}": value for name, value in known.items()} | {"replay.demos": None}).items():
        if (value := settings.get(name, priced)) != priced:
            raise ConfigError(name, value, f"{show(priced)}: the time of this one is known")


def tick_us(settings: Mapping[str, Any], obs: int, actions: int, cost: Cost) -> float:
    """Return the us of a tick, or of a rollout with its updates; arguments as those of :func:`update_us`."""
    step = step_us(settings)
    if settings["algo.name"] == "ppo":
        horizon = settings["algo.horizon"]
        return float(horizon * step + LEARN * horizon * settings["num_envs"] / 65_536)
    v, p = update_us(settings, obs, actions, cost)
    updates = settings["algo.v_per_step"]
    return together((v * updates, p * updates * settings["algo.p_per_v"], step), settings["algo.schedule"])


def env_steps_per_second(settings: Mapping[str, Any], obs: int, actions: int, cost: Cost) -> float:
    steps = settings["num_envs"] * (settings["algo.horizon"] if settings["algo.name"] == "ppo" else 1)
    return float(1e6 * steps / tick_us(settings, obs, actions, cost))


def beyond(settings: Mapping[str, Any]) -> str:
    """Return a warning if steps of so many environments were not measured, else nothing."""
    low, high = MEASURED
    if low <= settings["num_envs"] <= high:
        return ""
    return (
        f" (steps of {settings['num_envs']:,} environments are extrapolated: measured with {low:,} to {high:,} of Ant)"
    )


def sizes_of(config: Config) -> tuple[int, int]:
    """Return the sizes of the observations and actions of a run's task."""
    from pql.engine.placement import machine_of
    from pql.run.environment import describe_env

    spec = describe_env(config, machine_of(config))
    assert spec is not None
    return math.prod(spec.obs["policy"].shape), math.prod(spec.action.shape)


def price(run: Path, cost: Cost) -> tuple[list[dict[str, float]], str]:
    """Return a run's rows at estimated seconds, and :func:`beyond`. Raises ``ConfigError``: no price is known, or the
    run has no rows."""
    config = from_dict({**read_config(run), "device": "cpu"})
    settings = flat(to_dict(config))
    check(settings)
    rate = env_steps_per_second(settings, *sizes_of(config), cost)
    rows, _ = read_rows(run / "metrics.jsonl")
    if not rows:
        raise ConfigError("run", run, "a run with metrics")
    return [{**row, "time/seconds": row["steps/env"] / rate} for row in rows], beyond(settings)


def write_copy(run: Path, rows: Sequence[Mapping[str, float]], copy: Path, warning: str) -> None:
    """Write a run with these rows; its page names the machine as an estimate, with the warning."""
    copy.mkdir(parents=True)
    for name in ("config.yaml", "summary.json"):
        if (run / name).exists():
            shutil.copy(run / name, copy)
    (copy / "env.json").write_text(json.dumps({"gpu": f"estimated seconds of one H100 or H200{warning}"}))
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def show_runs(words: Sequence[str], cost: Cost, out: Path | None) -> None:
    """Print the evaluations of runs at estimated seconds; write copies of the runs below ``out``.

    Raises:
        ConfigError: no price is known, a run has no rows, or ``out`` cannot have a copy of this name. Nothing is
            written unless all runs have a price.
    """
    priced: dict[str, tuple[Path, list[dict[str, float]], str]] = {}
    for run in find(words)[0]:
        name = run.resolve().name
        if out is not None and (name in priced or (out / name).exists() or out.is_file()):
            raise ConfigError("--out", out / name, "a folder without a run of this name")
        priced[name if out is not None else str(run)] = (run, *price(run, cost))
    for name, (run, rows, warning) in priced.items():
        if out is not None:
            write_copy(run, rows, out / name, warning)
        print(f"{run.resolve().name}: seconds, env steps, critic updates, return{warning}")
        for row in rows:
            if math.isfinite(row.get("eval/return_mean", math.nan)):
                wanted = ("steps/env", "updates/v", "eval/return_mean")
                print(f"{row['time/seconds']:8.1f} " + " ".join(f"{row[k]:12,.0f}" for k in wanted if k in row))


def show_tick(words: Sequence[str], cost: Cost) -> None:
    """Print the prices of the parts of a tick with the settings ``words``."""
    words = [word for word in words if not word.startswith("device=")]
    scale = [] if any(word.startswith("scale=") for word in words) else ["scale=gpu"]
    config = compose(["device=cpu", *scale, *words])
    settings = flat(to_dict(config))
    check(settings)
    step = step_us(settings)
    sizes = sizes_of(config)
    batch = f", batches of {settings['algo.batch_size']:,}" if "algo.batch_size" in settings else ""
    print(f"{settings['num_envs']:,} environments{batch}{beyond(settings)}")
    if settings["algo.name"] != "ppo":
        v, p = update_us(settings, *sizes, cost)
        print(f"critic update   {v:9.0f} us x {settings['algo.v_per_step']:g}")
        print(f"policy update   {p:9.0f} us x {settings['algo.v_per_step'] * settings['algo.p_per_v']:g}")
    print(f"step            {step:9.0f} us")
    print(f"tick            {tick_us(settings, *sizes, cost):9.0f} us")
    print(f"env steps/s     {env_steps_per_second(settings, *sizes, cost):9,.0f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RUN|SETTING", help="run directories, or settings of one tick")
    parser.add_argument("--kernels", choices=list(COSTS), default="compiled")
    parser.add_argument("--out", type=Path, help="folder for copies of the runs")
    args = parser.parse_args(argv)
    cost = COSTS[args.kernels]
    kernels = "updates compiled in bfloat16" if args.kernels == "compiled" else "the goals set for updates"
    print(f"estimates for one H100 or H200, {kernels}: docs/results/gpu.md")
    settings = [word for word in args.words if "=" in word and not Path(word).is_dir()]
    try:
        if settings:
            if len(settings) < len(args.words) or args.out:
                raise ConfigError("run", settings[0], "a run directory beside others and with --out")
            show_tick(settings, cost)
        else:
            show_runs(args.words, cost, args.out)
    except (ConfigError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
