"""A package of somebody else's that adds two algorithms, for the tests: a module and a YAML file for each."""
