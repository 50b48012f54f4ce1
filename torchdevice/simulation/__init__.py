"""A simulated accelerator: real values on a device separate from the CPU, on any machine.

Its tensors are plain ``torch.Tensor`` objects in CPU memory, with the device type that torch
reserves for one out-of-tree backend. Operators run torch's CPU kernels. The registrations of
``backend.py`` with torch stay for the life of the process; only operators on tensors of the device
reach it. The simulation checks where tensors are, the operators and dtypes that a device supports,
the size of its memory and the number of devices. It shows nothing of a chip's speed, rounding or
memory layout.

May import ``calls``, ``errors``, ``kernel``, ``native``, ``random_numbers`` and ``torch_modules``.
"""
