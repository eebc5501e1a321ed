"""Environment contract: ``VecEnv``, ``EnvSpec``, the rules that ``check_env`` tests, and the registry of task names.

Imports no configuration, network or algorithm; ``plain.py``, ``shapes.py`` and this file need no torch. Start at
``env.py``.
"""
