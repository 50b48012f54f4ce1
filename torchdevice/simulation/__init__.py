"""A simulated accelerator: real values, a device of its own, on any machine.

Its tensors are plain ``torch.Tensor`` objects whose memory is the CPU's, on the device type that torch keeps for one
out-of-tree backend. Kernels are torch's own CPU kernels. What is registered for it stays for the life of the process
and is reached by nothing but tensors of the device: see ``backend.py``.

It rehearses where tensors are, which operators and dtypes a device has, how much memory it has and how many there are.
It shows nothing of a chip's speed, of the races of asynchronous work, of another chip's rounding or of memory layout.
"""
