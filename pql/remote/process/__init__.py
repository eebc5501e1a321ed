"""A simulator in a process, and a Python, of its own. Start reading at ``near.py``; ``far.py`` is the other end."""
