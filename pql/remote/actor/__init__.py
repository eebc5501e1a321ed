"""``pql actor``: environments on any machine, for a learner elsewhere. No torch: NumPy, grpcio and the simulator."""
