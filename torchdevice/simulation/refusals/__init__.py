"""Calls that an accelerator refuses and the CPU accepts, and the accelerator's errors."""
