"""What ``torchdevice native build`` compiles for the installed torch: kernels and storages of
simulated devices.

May import ``errors`` and ``kernel``.
"""
