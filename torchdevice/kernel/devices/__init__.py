"""The devices that can stand in: one file for each kind, behind the interface in ``runtime.py``."""
