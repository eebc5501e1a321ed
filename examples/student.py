"""Teacher and student: the teacher sees the pendulum's velocity, the student has a memory instead, as a robot might.

    python examples/student.py                  # a teacher, its student, fine-tuning: two minutes on two CPU cores
    python examples/student.py algo.cell=gru    # settings of the student

A student's actions are regressed on its teacher's, which needs no rewards. Returns are about -170, -210 and -190.
"""

import sys
import tempfile
from pathlib import Path

import pql

TASK = ("task=pendulum", "num_envs=32", "task.kwargs.velocity=false")  # the groups: policy, without it, and critic
MEMORY = ("algo.lstm=32", "algo.warmup_steps=32", "algo.batch_size=256", "algo.policy.hidden=[64,64]")


REWARDS = ("algo=pql2", "algo.alpha=0.01")


def main(*overrides, env_steps=40_000):
    """Train all three. Returns their summaries."""
    here, common = Path(tempfile.mkdtemp()), (*TASK, f"budget.env_steps={env_steps}")
    teacher = pql.train(*common, *REWARDS, "algo.policy.obs=[critic]", f"run_dir={here / 'teacher'}")
    words = (*common, *MEMORY, *overrides)
    student = pql.train(*words, "algo=distill", f"algo.teacher={teacher.run_dir}", f"run_dir={here / 'student'}")
    tuned = pql.train(*words, *REWARDS, f"init_from={student.run_dir}", f"run_dir={here / 'tuned'}")
    return teacher, student, tuned


if __name__ == "__main__":
    for name, run in zip(("teacher", "student", "fine-tuned"), main(*sys.argv[1:]), strict=True):
        print(f"{name}: return {run.return_mean:,.0f} after {run.env_steps:,} env steps")
