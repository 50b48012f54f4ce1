"""``torchdevice native build`` compiles this: kernels and storages of simulated devices, in C++.

May import ``errors`` and ``kernel``.
"""
