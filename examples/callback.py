"""A callback that writes evaluations to a CSV file and ends the run when they have stopped improving.

python examples/callback.py                 # Pendulum, at most two minutes
python examples/callback.py task=hopper eval.every_seconds=10 budget.seconds=600
"""

import csv
import sys

import pql


class StopOnPlateau:
    """Ends a run after ``patience`` evaluations in a row that were not better than the best one so far.

    Attributes:
        history: (env steps, mean return) of every evaluation.
    """

    def __init__(self, path, patience=5, least=0.0):
        self.path, self.patience, self.least = path, patience, least
        self.history, self.best, self.worse = [], float("-inf"), 0

    def __call__(self, session, row):
        """Called with every row of metrics.jsonl, in the process that trains."""
        if "eval/return_mean" not in row:
            return
        value = row["eval/return_mean"]
        self.history.append((int(row["steps/env"]), value))
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerows([("env_steps", "return_mean"), *self.history])
        self.worse = 0 if value > self.best + self.least else self.worse + 1
        self.best = max(self.best, value)
        if self.worse >= self.patience:
            session.say(f"no better evaluation than {self.best:,.1f} in {self.patience}: the run ends")
            session.stop = True


def main(*overrides, path="evaluations.csv", patience=5):
    stop = StopOnPlateau(path, patience)
    settings = "task=pendulum", "algo=pql", "eval.every_seconds=2", "budget.seconds=120"
    return stop, pql.train(*settings, *overrides, callbacks=stop)


if __name__ == "__main__":
    stop, run = main(*sys.argv[1:])
    print(f"{len(stop.history)} evaluations in {run.seconds:.0f} s, the best {stop.best:,.1f}: {stop.path}")
