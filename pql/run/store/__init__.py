"""Files of a run: directory, checkpoints, resume points and the lock of the writer.

Writes are atomic, and everything read is validated before use. Start reading at ``checkpoint.py``.
"""
