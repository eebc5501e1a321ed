"""Two algorithms on one task, five seeds each, and the page that compares them.

    python examples/compare_algorithms.py                                # Pendulum, ten runs of 20 seconds
    python examples/compare_algorithms.py task=hopper budget.seconds=120

On the command line: pql train -m task=pendulum algo=pql2,ppo seed=1,2,3,4,5 multirun_dir=runs/x; pql compare runs/x
"""

import sys
from pathlib import Path

import pql


def main(*overrides, folder="runs/compare_algorithms", algorithms=("pql2", "ppo"), seeds=range(1, 6)):
    """Train what is missing in ``folder``, then compare. Returns the page's numbers."""
    for algo in algorithms:
        for seed in seeds:
            run_dir = Path(folder) / f"{algo}-{seed}"
            if not (run_dir / "summary.json").exists():
                words = f"algo={algo}", f"seed={seed}", f"run_dir={run_dir}"
                pql.train("task=pendulum", "budget.seconds=20", "eval.every_seconds=2", *overrides, *words)
    return pql.compare(folder, out=Path(folder) / "comparison", x="seconds")


if __name__ == "__main__":
    found = main(*sys.argv[1:])
    for task in found["tasks"]:
        for group in task["groups"]:
            iqm = group["score"]["iqm"]
            print(f"{task['task']} {group['label']}: {iqm['value']:,.0f}, 95 % {iqm['low']:,.0f} to {iqm['high']:,.0f}")
    print(found["page"])
