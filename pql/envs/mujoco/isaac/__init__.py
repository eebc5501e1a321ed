"""The tasks of Isaac Gym's environments that the PQL paper used, rebuilt on MuJoCo."""
