"""Time of a critic and a policy update, compared with the bare time of their matrix products.

Presets: ``cpu`` is pql/config/presets/scale/cpu.yaml; ``wide`` the same with 256-256 networks and batch 512; ``gpu`` is
pql/config/presets/scale/gpu.yaml, on the device given by ``--device``. Observations have 17 features and
actions 6, as in HalfCheetah.
All rows are microseconds per update, so a lower ratio is better:

critic, policy               only ``update``, on batches sampled before; on CUDA launched by the host
critic burst, policy burst   a tick's work (one captured graph on CUDA): sampling, updates and metrics, per update

The baseline consists only of the matrix products of that update (see ``Products``), without bias, activation, loss or
optimiser, on CUDA captured in a graph as a burst is. They have the same shapes, thread count and precision, write to
preallocated memory, and are chained so that each finds its input in the cache, as in an update. The goal is at most
1.35 on the CPU for ``update``.

--profile prints the 25 most expensive operations of each update instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor

from pql.config import Config, DdpgConfig, changed
from pql.config.compose import compose
from pql.config.families import own
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.engine.placement import machine_of
from pql.run.components import Parts
from pql.types import Obs, Step
from tools.bench.common import Row, alternate, begun, compare, intra_op, microseconds, options, repeated, report

OBS, ACTION = 17, 6
BATCHES = 8  # sampled before, and used in turn
NAMES = {"v": "critic", "p": "policy"}
PROFILED = 50  # updates


class Blank:
    """An environment without cost: random observations and rewards, drawn once; episodes never end."""

    def __init__(self, num_envs: int, device: torch.device):
        obs = {"policy": ObsSpec((OBS,))}
        self.spec = EnvSpec("blank", num_envs, obs, Box(ACTION), device, max_episode_steps=1000, final_obs="always")
        self.obs = {"policy": torch.randn(num_envs, OBS, device=device)}
        no, yes = (torch.full((num_envs,), b, device=device) for b in (False, True))
        self.next = Step(self.obs, torch.randn(num_envs, device=device), no, no, no, self.obs, yes, yes, {})

    def reset(self, seed: int | None = None) -> Obs:
        return self.obs

    def step(self, action: Tensor) -> Step:
        return self.next

    def close(self) -> None:
        pass


class Products:
    """Only the matrix products of an MLP's forward and backward passes, chained.

    Args:
        sizes: width of the input, of every hidden layer and of the output.
        ensemble: E networks as batched products; None: one network, with weights [out, in] as in ``nn.Linear``.
    """

    def __init__(self, batch: int, sizes: Sequence[int], ensemble: int | None, device: torch.device):
        lead = () if ensemble is None else (ensemble,)
        layers = list(pairwise(sizes))
        self.product = torch.mm if ensemble is None else torch.bmm
        self.values = [torch.randn(*lead, batch, size, device=device) for size in sizes]
        self.grads = [torch.randn(*lead, batch, size, device=device) for size in sizes]
        if ensemble is None:
            self.weights = [torch.randn(o, i, device=device).mT for i, o in layers]
        else:
            self.weights = [torch.randn(ensemble, i, o, device=device) for i, o in layers]
        for (size, _), weight in zip(layers, self.weights, strict=True):
            weight.mul_(size**-0.5)  # magnitudes stay constant through the layers
        self.slopes = [torch.empty_like(weight) for weight in self.weights]

    def forward(self) -> None:
        for x, weight, y in zip(self.values, self.weights, self.values[1:], strict=False):
            self.product(x, weight, out=y)

    def backward(self, weights: bool, inputs: bool) -> None:
        """Gradients of every weight and of every layer's input (the first layer's only with ``inputs``)."""
        for i in reversed(range(len(self.weights))):
            if weights:
                self.product(self.values[i].mT, self.grads[i + 1], out=self.slopes[i])
            if inputs or i > 0:
                self.product(self.grads[i + 1], self.weights[i].mT, out=self.grads[i])


def bare_updates(config: Config, device: torch.device) -> dict[str, Callable[[], None]]:
    """Return the products of one update of each learner.

    critic: forward passes of policy (next action), target and critic; backward pass to the critic's weights.
    policy: forward passes of policy and critic; backward pass through the critic to the policy's weights.
    """
    algo = own(config, DdpgConfig)
    sizes = [OBS + ACTION, *algo.critic.hidden, algo.critic.atoms or 1]
    critic, target = (Products(algo.batch_size, sizes, algo.critic.ensemble, device) for _ in range(2))
    policy = Products(algo.batch_size, [OBS, *algo.policy.hidden, ACTION], None, device)

    def critic_update() -> None:
        policy.forward()
        target.forward()
        critic.forward()
        critic.backward(weights=True, inputs=False)

    def policy_update() -> None:
        policy.forward()
        critic.forward()
        critic.backward(weights=False, inputs=True)
        policy.backward(weights=True, inputs=False)

    return {"v": critic_update, "p": policy_update}


def updates(parts: Parts, worker: str) -> Callable[[], Any]:
    """One update on a batch sampled before."""
    one = parts.learners[worker]
    batches = cycle([batch for _ in range(BATCHES) for batch in one.draw(1, one.gen)])
    return lambda: one.update(one.state, next(batches), one.settings, one.gen)


def ready(config: Config, device: torch.device) -> Parts:
    """Return learners with private weights and a replay of random rows."""
    parts = begun(config, Blank(config.num_envs, device), own(config, DdpgConfig).n_step + 1)
    for worker in parts.workers.values():  # fills private copies and cursors
        worker.run(1)
    return parts


def bench(preset: str, config: Config, args: Any) -> list[Row]:
    """Return the rows of one preset."""
    device = torch.device(args.device)
    parts, threads, rows = ready(config, device), machine_of(config).threads, []
    for worker, bare in bare_updates(config, device).items():
        job, count = parts.jobs[worker], parts.jobs[worker].size
        with intra_op(args.threads or threads[worker]):
            bares = repeated(bare, count, device)
            fns: dict[str, Callable[[], Any]] = {"update": updates(parts, worker), "bare": bares, "burst": job.graph}
            times = alternate({k: microseconds(fn, args.seconds, device) for k, fn in fns.items()}, args.rounds)
        times |= {kind: [t / count for t in times[kind]] for kind in ("burst", "bare")}
        rows += [
            compare(f"{preset}: {NAMES[worker]}{tail} / matmuls", "us", times[kind], times["bare"])
            for kind, tail in (("update", ""), ("burst", f" burst of {count}"))
        ]
    parts.schedule.executor.close()
    return rows


def profile(preset: str, config: Config, args: Any) -> None:
    """Print the most expensive operations of each update."""
    parts, threads = ready(config, torch.device(args.device)), machine_of(config).threads
    count = 2 if args.smoke else PROFILED
    cuda = args.device.startswith("cuda")
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    for worker, name in NAMES.items():
        one = updates(parts, worker)
        with intra_op(args.threads or threads[worker]):
            for _ in range(count):
                one()
            with torch.profiler.profile(activities=kinds, acc_events=True) as recorded:
                for _ in range(count):
                    one()
        print(f"{preset}: {count} {name} updates")
        sort = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        print(recorded.key_averages().table(sort_by=sort, row_limit=25, max_name_column_width=40))
    parts.schedule.executor.close()


def presets(args: Any) -> dict[str, Config]:
    """Return name -> config, with CUDA graphs on if ``--device`` is CUDA."""
    cpu, gpu = (
        compose(["algo=pql", f"scale={scale}", f"device={args.device}", "budget.seconds=1", "algo.warmup_steps=32"])
        for scale in ("cpu", "gpu")
    )
    wider = {"algo.batch_size": 512, "algo.critic.hidden": [256, 256], "algo.policy.hidden": [256, 256]}
    wide = changed(cpu, wider)
    out = {name: {"cpu": cpu, "wide": wide, "gpu": gpu}[name] for name in args.presets}
    if args.smoke:
        out = {name: changed(c, {"num_envs": 8, "algo.batch_size": 16}) for name, c in out.items()}
    return {name: replace(c, replay=replace(c.replay, capacity=64 * c.num_envs)) for name, c in out.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=0.3)
    parser.add_argument("--presets", nargs="+", default=["cpu", "wide"], choices=["cpu", "wide", "gpu"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--threads", type=int, help="intra-op threads; default: each worker's share")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.seconds = 1, 0.01
    if args.profile:
        for name, config in presets(args).items():
            profile(name, config, args)
        return
    report([row for name, config in presets(args).items() for row in bench(name, config, args)], args.json)


if __name__ == "__main__":
    main()
