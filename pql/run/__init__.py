"""A run: built from its config, trained under a budget, evaluated, resumed; policies loaded and acted with.

Knows every room above it, and no command line. Start reading at ``build.py``, then ``session.py``.
"""
