"""Files of a run: its directory, checkpoints, resume points, and who may write to them.

Every write is whole or absent, and every read is checked before it is used. Start reading at ``checkpoint.py``.
"""
