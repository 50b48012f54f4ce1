"""What ``torchdevice native build`` compiles for the installed torch: kernels of simulated devices, and calls.

May import ``errors`` and ``kernel``.
"""
