"""The parts of a scope: its context, a thread's state, and the patches and supplied names of torch.

The names that most files need are here.
"""

from torchdevice.foundation import torch_internals  # checks torch's private names before they are read
from torchdevice.core.bindings import REPLACED, later, replaces, supplied_function, supplied_value
from torchdevice.core.context import Context, WhileInside
from torchdevice.core.patching import Installation, Patch, Replaced, per_context, replaced_function, without_original
from torchdevice.core.patching import ABSENT, Added, Callback, ReplacedItem, in_every_thread, original_of, without_cache
from torchdevice.core.thread_state import ContextMode, Entry, state, undo
from torchdevice.foundation.fidelity import Fidelity
