"""Entering and leaving a scope, and choosing its target."""
