"""Execution of ticks: schedules, executors, workers, weight slots, CUDA graphs, optimisers, devices and processes.

Does not depend on environments or algorithms: a worker is a function over state. Start with ``schedule.py``.
"""
