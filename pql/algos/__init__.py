"""Algorithms: one file each, with its update functions and its registry entry, plus the wiring of each data source.

Does not depend on run directories, logs or the command line. Start with ``registry.py``, then ``off_policy.py`` and
``ddpg.py``.
"""
