"""The contract of a simulator: ``VecEnv``, ``EnvSpec``, the rules that both must keep, and the registry of names.

Knows no configuration, network or algorithm; ``plain.py`` and this file need no torch. Start reading at ``env.py``.
"""
