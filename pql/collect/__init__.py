"""The collector: acts, steps the simulator and writes what came back, in groups, late or not finite.

Knows replays and rollouts by their ``insert`` alone, and no algorithm. Start reading at ``collector.py``.
"""
