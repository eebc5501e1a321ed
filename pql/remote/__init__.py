"""Simulators elsewhere: actors on other machines, and a simulator's own Python in a process of its own.

``protocol.py`` and ``actor/`` need no torch, ``process/far.py`` Python 3.8 alone. Start reading at ``env.py``.
"""
