"""Runs: build, train under a budget, evaluate and resume; load trained policies.

It does not depend on the command line. Start reading at ``build.py``, then ``session.py``.
"""
