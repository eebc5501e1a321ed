"""``pql fleet``: starts actors on the machines of a Ray cluster, and restarts those that are lost."""
