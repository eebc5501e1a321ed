"""Adapters: simulators of other projects, one file each. ``adapt.py`` has what several of them need."""
