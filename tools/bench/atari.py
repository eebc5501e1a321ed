"""Atari: speed of sampling, learning and both together, compared with their bounds and with Stable-Baselines3.

Set GOMP_SPINCOUNT=10000 as ``pql`` does for its processes; this script loads torch before ``pql``.

The network is from Mnih et al. 2015; frames are the console's, four per action. Everything runs in turn, in one
process, on the same cores:

sampling  ``serial`` and ``halves`` are the collector with one and with two groups of environments: acting, stepping and
          writing to a replay. Their bound is ``raw stepping`` (only ale_py's AtariVectorEnv, random actions, as many
          threads) followed by ``bare forward`` (the network's convolutions and matrix products, as many intra-op
          threads); on CUDA only raw stepping, since the device computes concurrently. The goal is at least .9.
learning  Microseconds of a DQN update on a batch sampled before (``update``), and of one with sampling (``burst``),
          over those of its convolutions and matrix products: target network forward, network forward and backward; on
          CUDA captured in a graph, as a burst is. The goal is at most 1.25.
training  Frames/s of DQN, acting and learning, each row used eight times: 32 environments, batches of 32, 8 updates
          per step. Compared with Stable-Baselines3's DQN with the same network, optimiser, batch and number of updates
          on the same AtariVectorEnv (``SB3 vector``). The goal is 1.3.
memory    Bytes of a replay of a million frames (as an agent observes them). The goal is at most 7.2 GB.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pql.config import (
    Config,
    DqnConfig,
    EpsilonConfig,
    PlacementConfig,
    QuantileNetConfig,
    ReplayConfig,
    TaskConfig,
    ThreadsConfig,
    ValueEncoderConfig,
)
from pql.data.sizes import ReplayLayout, replay_bytes
from pql.engine.placement import available_cores
from pql.run.environment import describe_env
from tools.bench.common import (
    Round,
    Row,
    alternate,
    begun,
    close,
    compare,
    intra_op,
    microseconds,
    options,
    per_second,
    repeated,
    report,
)

SKIP = 4  # frames per action
STEPS = 16  # steps of a sampling tick
MILLION = 1_000_000
FRAMES = 7.2e9  # bytes allowed for a million frames
INTENSITY = 8  # updates that use each row
PEER = 32  # environments and batch size in the comparison with Stable-Baselines3
LIMIT = 27_000  # time limit of a game, in actions

GROUPS = {"serial": 1, "halves": 2}


def make_config(args: Any, num_envs: int, batch: int, groups: int | None = None, capacity: int = 20_000) -> Config:
    """Return the config of DQN on a game, every row used ``INTENSITY`` times, with Stable-Baselines3's Adam."""
    algo = DqnConfig(
        name="dqn",
        batch_size=batch,
        n_step=1,
        warmup_steps=32,
        v_per_step=INTENSITY * num_envs / batch,
        normalize_obs=False,
        encoder=ValueEncoderConfig("nature", features=0),
        critic=QuantileNetConfig(hidden=[512], activation="relu", lr=1e-4, weight_decay=0.0, grad_clip=10.0),
        target_period=num_envs * 1000,
        epsilon=EpsilonConfig("fixed", end=0.01),
    )
    task = TaskConfig(name="atari", game=args.game, reward_clip=1.0, kwargs={"noop_max": 30})
    threads = ThreadsConfig(args.threads, args.threads, args.threads, args.threads)
    replay, place = ReplayConfig(capacity=max(capacity, 64 * num_envs)), PlacementConfig(groups=groups, threads=threads)
    return Config(task=task, algo=algo, replay=replay, num_envs=num_envs, device=args.device, placement=place)


def rate(fn: Callable[[], Any], amount: float, args: Any) -> Round:
    """Return a round of about ``args.seconds`` that measures ``amount`` times calls of ``fn`` per second."""
    one = per_second(fn, amount, args.seconds, torch.device(args.device))

    def limited() -> float:
        with intra_op(args.threads):
            return one()

    return limited


class Products:
    """Only the convolutions and matrix products of a network's forward and backward passes.

    Shapes, strides and memory layouts are recorded in a forward pass of ``net``; every layer reads the output that the
    one before it has just written.
    """

    def __init__(self, net: nn.Module, obs: dict[str, Tensor]):
        self.layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        seen: list[Tensor] = []
        hooks = [m.register_forward_pre_hook(lambda m, given: seen.append(given[0].detach())) for m in self.layers]
        with torch.no_grad():
            net(obs)
        for hook in hooks:
            hook.remove()
        self.x = seen
        self.weights = [m.weight.detach().clone() for m in self.layers]
        self.grads = [torch.randn_like(self.product(i, x)) for i, x in enumerate(seen)]

    def product(self, i: int, x: Tensor) -> Tensor:
        layer, weight = self.layers[i], self.weights[i]
        if isinstance(layer, nn.Linear):
            return x @ weight.T
        return F.conv2d(x, weight, None, layer.stride, layer.padding)

    def forward(self) -> None:
        x = self.x[0]
        for i, like in enumerate(self.x):
            x = self.product(i, x if x.shape == like.shape else x.flatten(1))

    def backward(self) -> None:
        """Gradients of every weight and of every layer's input except the first's."""
        for i in reversed(range(len(self.layers))):
            layer, weight, x, grad = self.layers[i], self.weights[i], self.x[i], self.grads[i]
            if isinstance(layer, nn.Linear):
                grad.T @ x
                grad @ weight
            else:
                wanted = [i > 0, True, False]
                torch.ops.aten.convolution_backward(
                    grad, x, weight, None, layer.stride, layer.padding, layer.dilation, False, [0, 0], 1, wanted
                )


def raw_stepping(args: Any) -> tuple[Any, Callable[[], Any]]:
    """Return ale_py's vector environment and a function that steps it with random actions."""
    env, rng = raw_env(args, args.num_envs), np.random.default_rng(0)
    env.reset(seed=0)
    return env, lambda: env.step(rng.integers(env.single_action_space.n, size=args.num_envs))


def raw_env(args: Any, num_envs: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    plain: dict[str, Any] = {"autoreset_mode": "SameStep", "reward_clipping": False, "use_fire_reset": False}
    plain |= {"noop_max": 31, "max_num_frames_per_episode": SKIP * LIMIT}
    return AtariVectorEnv(args.game, num_envs, num_threads=args.threads, **plain)


def sampling(args: Any) -> list[Row]:
    """Compare the collector with raw stepping and the bare forward pass."""
    runs = {name: begun(make_config(args, args.num_envs, 32, g)) for name, g in GROUPS.items()}
    env, step = raw_stepping(args)
    collector, frames = runs["serial"].collector, SKIP * args.num_envs
    bare = Products(collector.actor.policy, collector.obs)
    with torch.no_grad():
        fns = {
            "raw": rate(step, frames, args),
            "forward": rate(bare.forward, frames, args),
            **{k: rate(partial(p.collector.run, STEPS), STEPS * frames, args) for k, p in runs.items()},
        }
        rates = alternate(fns, args.rounds)
    env.close()
    close(*runs.values())
    both = [1 / (1 / raw + 1 / forward) for raw, forward in zip(rates["raw"], rates["forward"], strict=True)]
    bound = rates["raw"] if args.device.startswith("cuda") else both
    case = f"sampling {args.game} n={args.num_envs}:"
    return [
        compare(f"{case} raw stepping", "frames/s", rates["raw"]),
        compare(f"{case} bare forward", "frames/s", rates["forward"]),
        compare(f"{case} serial / bound", "frames/s", rates["serial"], bound),
        compare(f"{case} halves / bound", "frames/s", rates["halves"], bound),
        compare(f"{case} halves / serial", "frames/s", rates["halves"], rates["serial"]),
    ]


def learning(args: Any) -> list[Row]:
    """Compare an update with its bare convolutions and products."""
    return [row for batch in args.batches for row in update_rows(args, batch)]


def update_rows(args: Any, batch: int) -> list[Row]:
    parts = begun(make_config(args, 2 if args.smoke else 8, batch))
    for worker in parts.workers.values():  # fills private copies and cursors
        worker.run(1)
    one, job = parts.learners["v"], parts.jobs["v"]
    (drawn,) = one.draw(1, one.gen)
    online, target = (Products(net, {k: v.clone() for k, v in drawn.obs.items()}) for net in cast(Any, one.state).nets)

    def bare() -> None:
        target.forward()
        online.forward()
        online.backward()

    device = torch.device(args.device)
    with intra_op(args.threads):
        bares = repeated(bare, job.size, device)
        fns: dict[str, Callable[[], Any]] = {"bare": bares, "burst": job.graph}
        fns["update"] = lambda: one.update(one.state, drawn, one.settings, one.gen)
        times = alternate({k: microseconds(fn, args.seconds, device) for k, fn in fns.items()}, args.rounds)
    times |= {kind: [t / job.size for t in times[kind]] for kind in ("burst", "bare")}
    close(parts)
    names = {"update": "update", "burst": f"burst of {job.size}"}
    return [
        compare(f"learning: {name} B={batch} / convolutions and products", "us", times[kind], times["bare"])
        for kind, name in names.items()
    ]


def training(args: Any) -> list[Row]:
    """Compare acting and learning together with Stable-Baselines3."""
    num_envs = 2 if args.smoke else PEER
    runs = {name: begun(make_config(args, num_envs, num_envs, g)) for name, g in GROUPS.items()}
    frames = SKIP * num_envs
    fns = {k: rate(p.schedule.tick, frames * p.counts.horizon, args) for k, p in runs.items()}
    peers = sb3_rounds(args, num_envs)
    rates = alternate({**fns, **peers}, args.rounds)
    close(*runs.values())
    case = f"training DQN on {args.game}:"
    return [
        compare(f"{case} halves / serial", "frames/s", rates["halves"], rates["serial"]),
        *(compare(f"{case} serial / {name}", "frames/s", rates["serial"], rates[name]) for name in peers),
    ]


def memory(args: Any) -> list[Row]:
    """Measure the memory of a replay of a million rows."""
    spec = describe_env(make_config(args, PEER, PEER))
    assert spec is not None
    need = replay_bytes(ReplayLayout(spec.obs, None, PEER, MILLION // PEER, 1, True, torch.float32))
    return [compare("memory: replay of 1M frames / 7.2 GB", "GB", [need / 1e9], [FRAMES / 1e9])]


def sb3_rounds(args: Any, num_envs: int) -> dict[str, Round]:
    """Return Stable-Baselines3's rounds; none, with a printed note, if it is not installed."""
    if importlib.util.find_spec("stable_baselines3") is None:
        print("training: without Stable-Baselines3, which is not installed (pip install 'pql-rl[peers]')")
        return {}
    from tools.bench import atari_sb3

    warm_up, block = 32 if args.smoke else 1024, 2 if args.smoke else atari_sb3.BLOCK
    with intra_op(args.threads):
        env = atari_sb3.AleVec(raw_env(args, num_envs))
        fn = atari_sb3.learner(env, num_envs, INTENSITY, args.device, warm_up, block)
    return {"SB3 vector": rate(fn, SKIP * block * num_envs, args)}


CASES = {"sampling": sampling, "learning": learning, "training": training, "memory": memory}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=2.0)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--game", default="pong")
    parser.add_argument("--num-envs", type=int, default=64, help="when sampling")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 512], help="when learning")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of the simulator, and intra-op")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    if args.smoke:
        args.num_envs, args.batches, args.rounds, args.seconds, args.threads = 2, [8], 1, 0.01, 1
    print(f"threads: {args.threads}, of the simulator and intra-op")
    report([row for case in args.cases for row in CASES[case](args)], args.json)


if __name__ == "__main__":
    main()
