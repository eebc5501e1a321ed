"""``pql actor``: steps environments for a remote learner. Needs NumPy, grpcio and the simulator; no torch."""
