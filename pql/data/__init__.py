"""Storage of transitions: replay, sequences, priorities, rollouts; returns, normalisation and transition files.

Knows rows and flags, no policy and no simulator that makes them. Start reading at ``replay.py`` or ``rollout.py``.
"""
