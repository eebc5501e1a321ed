"""The tick: schedules, executors, workers, weight slots, CUDA graphs, optimisers, devices and processes.

Knows neither environments nor algorithms: a worker is a function over state. Start reading at ``schedule.py``.
"""
