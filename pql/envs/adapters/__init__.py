"""Adapters: simulators of other projects, one file each. ``adapt.py`` has shared helpers."""
