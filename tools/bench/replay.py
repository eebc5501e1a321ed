"""Replay: sampling, observation sampling and inserting, each compared with bare copies of the same bytes.

A ring of a million transitions is filled with random data; episodes end at random, one row in 500. All rows are
microseconds per call, so a lower ratio is better:

sample      ``Replay.sample`` (n = 3) over ``index_select`` of the same cells from the same stores into preallocated
            memory: observations, next observations, actions, n rewards, n + 1 flags. The goal is at most 2.
sample_obs  the same for a policy update's batch: observations and flags.
insert      one row of every environment over ``copy_`` of the same fields into whole rows.

The excess over 1 is drawing indices, finding the ends of windows, and launching operations. The bare copies rotate
among index sets, so that their cells are not in the cache.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Generator, Tensor

from pql.config import Config
from pql.contract.env import ObsSpec
from pql.data.flags import NEXT_FIRST, TERMINATED, VALID
from pql.data.replay import Cursor, Replay
from pql.data.sizes import ReplayLayout
from pql.engine.placement import machine_of
from pql.types import Step
from tools.bench.common import Row, alternate, compare, intra_op, microseconds, options, report

N_STEP, GAMMA, HORIZON = 3, 0.99, 1
ROTATED = 2**18  # windows whose cells a bare copy reads before it repeats them
SIZES = ((17, 6), (60, 8))  # features D and actions A of HalfCheetah and of a larger robot


def filled(size: int, actions: int, num_envs: int, capacity: int, device: torch.device) -> tuple[Replay, Cursor]:
    """Return a ring that has been filled once, and a reader's view of it."""
    obs = {"policy": ObsSpec((size,))}
    replay = Replay(ReplayLayout(obs, actions, num_envs, capacity // num_envs, 2 * HORIZON + 1, True), device)
    for store in (replay.obs["policy"], replay.action, replay.reward):
        store.normal_()
    ended = torch.rand(replay.flags.shape, device=device) < 1 / 500
    replay.flags.copy_(VALID + ended * (TERMINATED | NEXT_FIRST))
    replay.live.head.fill_(replay.rows + replay.rows // 2)
    cursor = Cursor(num_envs, device)
    for mine, live in zip(cursor.tensors(), replay.live.tensors(), strict=True):
        mine.copy_(live)
    return replay, cursor


def bare_select(pairs: Sequence[tuple[Tensor, list[Tensor]]]) -> Callable[[], None]:
    """Return a function with one ``index_select`` for each (store, index sets), into preallocated memory."""
    outs = [store.new_empty(len(sets[0]), *store.shape[1:]) for store, sets in pairs]
    turns = cycle(range(len(pairs[0][1])))

    def one() -> None:
        i = next(turns)
        for (store, sets), out in zip(pairs, outs, strict=True):
            torch.index_select(store, 0, sets[i], out=out)

    return one


def cells(replay: Replay, batch: int, steps: int) -> list[Tensor]:
    """Return random sets of [batch * steps] cells, ``steps`` rows of a column each; together larger than the caches."""
    out = []
    for _ in range(ROTATED // batch):
        row = torch.randint(replay.rows, (batch,), device=replay.device)
        column = torch.randint(replay.num_envs, (batch,), device=replay.device)
        rows = row + torch.arange(steps, device=replay.device).unsqueeze(1)  # [steps, batch]
        out.append((rows % replay.rows * replay.num_envs + column).flatten())
    return out


def bench_reads(replay: Replay, cursor: Cursor, batch: int, args: Any) -> list[Row]:
    """Measure sampling of windows, and of observations only."""
    gen, obs = Generator(replay.device).manual_seed(0), replay.obs["policy"]
    pairs = [
        (obs, [torch.cat(pair) for pair in zip(*(cells(replay, batch, 1) for _ in range(2)), strict=True)]),
        (replay.action, cells(replay, batch, 1)),
        (replay.reward, cells(replay, batch, N_STEP)),
        (replay.flags, cells(replay, batch, N_STEP + 1)),
    ]
    few = [(obs, cells(replay, batch, 1)), (replay.flags, cells(replay, batch, 1))]
    fns = {
        "sample": lambda: replay.sample(cursor, batch, N_STEP, GAMMA, gen),
        "bare sample": bare_select(pairs),
        "sample_obs": lambda: replay.sample_obs(cursor, batch, gen),
        "bare sample_obs": bare_select(few),
    }
    times = alternate({k: microseconds(fn, args.seconds, replay.device) for k, fn in fns.items()}, args.rounds)
    tail = f"B={batch} D={obs.shape[1]} / index_select"
    return [compare(f"{k} {tail}", "us", times[k], times[f"bare {k}"]) for k in ("sample", "sample_obs")]


def random_step(replay: Replay) -> Step:
    """Return a random step of all environments."""
    n, device, store = replay.num_envs, replay.device, replay.obs["policy"]
    no, yes = torch.zeros(n, dtype=torch.bool, device=device), torch.ones(n, dtype=torch.bool, device=device)
    obs, final = ({"policy": torch.randn(n, *store.shape[1:], device=device)} for _ in range(2))
    return Step(obs, torch.randn(n, device=device), no, no, no, final, yes, yes, {})


def bench_insert(replay: Replay, args: Any) -> list[Row]:
    """Measure inserting one row of every environment."""
    n, step = replay.num_envs, random_step(replay)
    action = torch.rand(n, replay.action.shape[1], device=replay.device)
    sources = (step.obs["policy"], step.final_obs["policy"], action, step.reward, step.valid.to(torch.uint8))
    stores = (*[replay.obs["policy"]] * 2, replay.action, replay.reward, replay.flags)
    rows = cycle(range(0, replay.rows * n - 2 * n, n))

    def bare() -> None:
        start = next(rows)
        for store, source in zip(stores, sources, strict=True):
            store[start : start + n].copy_(source)

    fns = {"insert": lambda: replay.insert(action, step), "bare": bare}
    times = alternate({k: microseconds(fn, args.seconds, replay.device) for k, fn in fns.items()}, args.rounds)
    tail = f"N={n} D={sources[0].shape[1]}"
    return [
        compare(f"insert {tail} / copy_", "us", times["insert"], times["bare"]),
        compare(f"insert {tail}", "transitions/s", [n / t * 1e6 for t in times["insert"]]),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=0.3)
    parser.add_argument("--batches", nargs="+", type=int, default=[512, 8192])
    parser.add_argument("--num-envs", type=int, default=128)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    threads = machine_of(Config()).threads["v"]
    parser.add_argument("--threads", type=int, default=threads, help="intra-op threads; default: the V-learner's")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    if args.smoke:
        args.batches, args.num_envs, args.capacity, args.rounds, args.seconds = [2048], 4, 400, 1, 0.005
    rows: list[Row] = []
    with intra_op(args.threads):
        for size, actions in SIZES:
            replay, cursor = filled(size, actions, args.num_envs, args.capacity, torch.device(args.device))
            for batch in args.batches:
                rows += bench_reads(replay, cursor, batch, args)
            rows += bench_insert(replay, args)
    print(f"intra-op threads: {args.threads}")
    report(rows, args.json)


if __name__ == "__main__":
    main()
