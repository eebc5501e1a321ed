"""Simulators in a child process with another Python. ``near.py`` is the parent's side (start there), ``far.py`` the
child's."""
