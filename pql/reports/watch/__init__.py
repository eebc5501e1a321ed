"""A page on the loopback that shows runs while they train: ``pql watch``.

It reads run directories, which may be anybody's, and writes nothing. Start reading at ``server.py``.
"""
