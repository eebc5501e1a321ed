"""The command line and its twin in Python: commands, completion, multirun, sweeps and the doctor.

Imports torch and the packages below it only when a command needs them. Start reading at ``main.py``.
"""
