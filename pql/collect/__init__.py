"""Collector: acts, steps the simulator and records the rows, also for env slices, late answers and non-finite values.

Uses replays and rollouts only through ``insert``, and knows no algorithm. Start reading at ``collector.py``.
"""
