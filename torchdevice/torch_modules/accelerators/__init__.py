"""Modules of accelerators beside CUDA: ``torch.xpu``, ``torch.mps`` and ``torch.accelerator``."""
