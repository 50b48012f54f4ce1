"""The parts of a scope: its context, a thread's state, and the patches and supplied names of torch."""

from torchdevice.foundation import (
    torch_internals as torch_internals,  # checks torch's private names before they are read
)
