"""Operators of torch's MPS build that give wrong results, and what is done about each while a scope is active."""
