"""The random numbers of NVIDIA's GPUs, made on the host: a seed gives what torch prints on such a
GPU.

May import ``calls`` and ``kernel``.
"""
