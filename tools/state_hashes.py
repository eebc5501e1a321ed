"""Hashes of every algorithm's state after 200 ticks, to show that a refactoring changes no number.

    python tools/state_hashes.py --json before.json     # on the commit before
    python tools/state_hashes.py --against before.json  # on the commit after: exit status 1 if they differ

Every algorithm trains on a small task under each schedule that it allows; the hash is of all tensors of its resume
point (networks, optimisers, statistics, generators, replay), whatever their names are. Hashes depend on the machine and
on torch's version, so both calls have to be made on one machine.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DISCRETE = ("dqn", "c51", "rainbow", "eps_rainbow", "btr", "apex", "r2d2", "pqn")
ROLLOUT = ("ppo", "a2c", "a3c", "appo", "impala", "reppo")
ALGORITHMS = ("pql", "pql_d", "pql_sac", "ddpg", "td3", "sac", *ROLLOUT, *DISCRETE)
SCHEDULES = ("concurrent", "lockstep")
TICKS, ENVS = 200, 8
WORDS = (
    f"device=cpu scale=cpu num_envs={ENVS} seed=3 budget.seconds=null budget.env_steps={TICKS * ENVS} eval.final=false "
    "eval.every_seconds=null checkpoint.every_seconds=null placement.executor=inline logger=none "
    "algo.critic.hidden=[16,16]"
).split()


def state_hash(algorithm: str, schedule: str) -> str:
    """Return the hash after ``TICKS`` ticks, or the reason of a refusal."""
    words = [*WORDS, f"algo={algorithm}", f"algo.schedule={schedule}"]
    words.append(f"algo.warmup_steps={32 if algorithm == 'r2d2' else 8}")  # R2D2 needs at least the rows of a sequence
    words += ["task=catch"] if algorithm in DISCRETE else ["task=pendulum", "algo.policy.hidden=[16,16]"]
    words += ["algo.batch_size=32"] if algorithm not in ("pqn", "r2d2", *ROLLOUT) else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "pql", "train", *words, f"run_dir={run}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return "refused: " + (done.stderr.strip() or "no message").splitlines()[-1]
        return tensors_hash(run / "checkpoints" / "last" / "tensors.safetensors")


def tensors_hash(file: Path) -> str:
    """Return a hash of all tensors of a file, sorted by their own hashes, since names may change."""
    from safetensors.numpy import load_file

    found = load_file(file)
    parts = sorted(hashlib.sha256(f"{a.dtype} {a.shape}".encode() + a.tobytes()).digest() for a in found.values())
    return f"{len(parts)} tensors, {hashlib.sha256(b''.join(parts)).hexdigest()}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Hashes of every algorithm's state after 200 ticks.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the hashes there")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with the hashes of another commit")
    args = parser.parse_args()
    before = json.loads(args.against.read_text()) if args.against else {}
    found, different = {}, 0
    for algorithm in ALGORITHMS:
        for schedule in SCHEDULES:
            name = f"{algorithm} {schedule}"
            found[name] = state_hash(algorithm, schedule)
            wrong = bool(before) and before.get(name) != found[name]
            if wrong and found[name].startswith("refused") and str(before.get(name)).startswith("refused"):
                wrong = False
            different += wrong
            print(f"{name:22} {found[name][:100]}{'  DIFFERENT' if wrong else ''}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
