"""``pql fleet``: actors on the machines of a Ray cluster, placed, watched, and placed again when they are lost."""
