"""Algorithms: one file for each, with its updates and its declaration; the wiring of each data source beside them.

Knows no run directory, log or command line. Start reading at ``registry.py``, then ``off_policy.py`` and ``ddpg.py``.
"""
