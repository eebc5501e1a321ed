"""Remote simulators: actors on other machines, and simulators in a separate process with another Python.

``protocol.py`` and ``actor/`` need no torch, ``process/far.py`` only Python 3.8 and NumPy. Start at ``env.py``.
"""
