"""Random numbers of NVIDIA's GPUs, made on the host: a seed gives torch's numbers on a GPU.

May import ``calls`` and ``kernel``.
"""
