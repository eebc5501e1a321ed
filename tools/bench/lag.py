"""Effect of policy lag: returns with a collector ``--lag`` updates late over returns without lag, by correction.

python tools/bench/lag.py [--lag 8] [--seeds 0 1 2 3 4] [--steps 600000] [--task NAME] [--smoke] [--json PATH] [W ...]

IMPALA under ``lockstep``, one update per rollout, with three corrections (``algo.correction``): ``vtrace``;
``one_step``, importance weights only in the policy gradient; ``none``, which is A2C and treats old data as fresh.
A run's return is the mean over the training episodes of the last two fifths of its
env steps, so that a collapse after learning is visible. ``value`` and ``baseline`` are means over seeds, ``ratio`` is
their quotient. Without lag all three corrections are equal and run once. The goals: V-trace keeps .9 or more, ``none``
loses a quarter or more. Settings such as ``algo.policy.lr=1e-3`` apply to all runs.

Ball balance shows the difference because its three-dimensional Gaussian actions have densities that change fast. All
runs have the same settings. The learning rate is one with which runs without lag learn steadily, while eight updates
change the policy substantially. Rollouts are short, since truncated V-trace carries rewards back over fewer rows than
runs without lag do and would learn more slowly on long ones.
"""

import statistics
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pql.config.compose import compose
from pql.engine.worker import WeightSlot
from pql.run.build import build
from pql.run.components import Parts
from tools.bench.common import Row, options, report, row

CORRECTIONS = ("vtrace", "one_step", "none")
LAST = 0.4  # share of a run's ticks whose episodes count
FIXED = (
    *("device=cpu", "algo=impala", "algo.schedule=lockstep", "algo.anneal_steps=null", "graphs=off"),
    *("placement.matmul=exact", "placement.threads.collector=1", "placement.threads.v=1"),
)
OWN = ("algo.policy.lr=1.5e-3", "num_envs=256", "algo.horizon=5")  # ball balance's, for all runs


class LateSlot(WeightSlot):
    """A slot whose reader, which pulls once per publication, gets the weights of ``lag`` publications before."""

    def __init__(self, slot: WeightSlot, lag: int):
        super().__init__(slot.name, slot.source)
        self.pulled: deque[tuple[int, list[Tensor]]] = deque(maxlen=lag + 1)

    def pull(self, target: Sequence[Tensor], version: int) -> int:
        super().pull(target, version)
        self.pulled.append((version, [t.clone() for t in target]))
        version, late = self.pulled[0]
        for t, s in zip(target, late, strict=True):
            t.copy_(s)
        return version


def delay(parts: Parts, lag: int) -> None:
    """Let the collector act with the policy of ``lag`` updates before."""
    workers, late = parts.workers.values(), LateSlot(parts.slots["policy"], lag)
    for worker in workers:
        worker.pulls = [(late if slot.name == late.name else slot, t) for slot, t in worker.pulls]
        worker.publishes = [late if slot.name == late.name else slot for slot in worker.publishes]


def final_return(words: Sequence[str], lag: int, steps: int) -> float:
    """Mean return of the episodes that ended in the last part of a run of about ``steps`` env steps."""
    parts = build(compose([*FIXED, *words]))
    delay(parts, lag)
    parts.start()
    parts.warm_up(parts.config.algo.warmup_steps)
    parts.begin()
    ticks = max(2, steps // (parts.counts.horizon * parts.config.num_envs))
    for tick in range(ticks):
        if tick == int(ticks * (1 - LAST)):
            parts.collector.episodes.drain()
        parts.schedule.tick()
    out = parts.collector.episodes.drain()
    parts.close_envs()
    return float(out["train/return_mean"])


def measure(words: Sequence[str], correction: str, lag: int, seeds: Sequence[int], steps: int) -> list[float]:
    """Return one return per seed."""
    own = (*words, f"algo.correction={correction}")
    returns = [final_return([*own, f"seed={seed}"], lag, steps) for seed in seeds]
    print(f"{correction}, lag {lag}:", *(f"{r:.1f}" for r in returns), flush=True)
    return returns


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--lag", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=600_000)
    parser.add_argument("--task", default="ball_balance")
    parser.add_argument("words", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    if args.smoke:
        args.seeds, args.steps = [0], 30_000  # so that episodes end
    torch.set_num_threads(1)
    own = OWN if args.task == "ball_balance" else ()
    words = [f"task={args.task}", *own, *args.words]
    fresh = measure(words, "vtrace", 0, args.seeds, args.steps)
    rows: list[Row] = []
    for correction in CORRECTIONS:
        late = measure(words, correction, args.lag, args.seeds, args.steps)
        value, baseline = statistics.mean(late), statistics.mean(fresh)
        ratio = value / baseline if min(value, baseline) > 0 else None
        name = f"{args.task}: {correction}, lag {args.lag} / 0"
        rows.append(row(name, value, "return", len(late), baseline, ratio))
    report(rows, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
