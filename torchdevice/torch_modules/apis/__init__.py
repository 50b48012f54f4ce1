"""The parts of torch, beside the accelerators' modules, that handle devices. Each file replaces
names of torch.
"""
