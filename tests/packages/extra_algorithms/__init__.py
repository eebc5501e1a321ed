"""A third-party package with two algorithms, for the tests: a module and a YAML file for each."""
