"""A runner in two processes that has set up ``torch.distributed`` itself."""

import os

import pytest
import torch
from pairs import pair
from torch import distributed as dist

pytest.importorskip("rsl_rl")

import pql
from pql.envs.toy import Counter
from pql.lab import Runner, from_rsl_rl

WORDS = ["algo.warmup_steps=4", "replay.capacity=2048", "algo.batch_size=16", "algo.v_per_step=2", "algo.p_per_v=0.5"]
WORDS += ["placement.executor=inline"]


def weights(run_dir):
    return {k: v for part in pql.load_policy(run_dir).state_dict().values() for k, v in part.items()}


def own(run_dir):
    words = [*WORDS, "algo=pql", "seed=3", "eval.every_seconds=null", "eval.final=false", f"run_dir={run_dir}"]
    env = from_rsl_rl(pql.wrap.rsl_rl(Counter(4)))
    pql.train(*words, "budget.env_steps=240", env=env, quiet=True)
    return weights(run_dir)


def in_a_stack(log_dir):
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    rank = int(os.environ["RANK"])
    cfg = {"algo": "pql", "settings": (*WORDS, f"run_dir={log_dir}/pql"), "seed": 3 + rank, "num_steps_per_env": 6}
    runner = Runner(pql.wrap.rsl_rl(Counter(4)), cfg, log_dir)
    runner.learn(5)
    runner.close()
    assert dist.is_initialized()  # the stack's
    return weights(f"{log_dir}/pql"), sorted(x for x in os.listdir(log_dir) if x.startswith("model"))


def test_two_ranks_in_a_runner_are_two_ranks_of_train(tmp_path):
    with pair() as both:
        alone = both(own, str(tmp_path / "own"))[0]
    with pair() as both:
        (stacked, files), _ = both(in_a_stack, str(tmp_path / "stack"))
    assert files == ["model_0.pt", "model_4.pt"]  # rank 0's
    assert all(torch.equal(v, alone[k]) for k, v in stacked.items())
