"""Uses tensors whose storage was resized, each in a scope of its own, and prints what came of it.

The argument is the option ``native`` of the scopes.
"""

import io
import sys

import torch
import torch.nn.functional as F

import torchdevice

USES = {
    "added": lambda x, y: x + y,
    "added to": lambda x, y: y + x,
    "written": lambda x, y: x.add_(1),
    "filled": lambda x, y: x.fill_(1),
    "zeroed": lambda x, y: x.zero_(),
    "copied to": lambda x, y: x.copy_(y),
    "copied from": lambda x, y: y.copy_(x),
    "copied from the host": lambda x, y: x.copy_(torch.ones(100, 100)),
    "copied to the host": lambda x, y: x.cpu(),
    "as a list": lambda x, y: x.tolist(),
    "cloned": lambda x, y: x.clone(),
    "another dtype": lambda x, y: x.half(),
    "bits of another dtype": lambda x, y: x.view(torch.int32) + 1,
    "out": lambda x, y: torch.add(y, 1, out=x),
    "multiplied": lambda x, y: x @ y,
    "a list of tensors": lambda x, y: torch.cat([y, x]),
    "for each": lambda x, y: torch._foreach_add([y, x], 1),
    "in place for each": lambda x, y: torch._foreach_add_([y, x], 1),
    "summed": lambda x, y: x.sum(),
    "compared": lambda x, y: torch.equal(x, y),
    "sorted": lambda x, y: x.sort(),
    "indexed": lambda x, y: x[torch.tensor([0], device="cuda")],
    "as an index": lambda x, y: y[x.view(torch.int32).long()],
    "scattered": lambda x, y: x.index_fill_(0, torch.tensor([0], device="cuda"), 1.0),
    "random": lambda x, y: x.uniform_(),
    "dropped": lambda x, y: F.dropout(x, 0.5),
    "normalized": lambda x, y: F.layer_norm(x, (100,)),
    "convolved": lambda x, y: F.conv2d(
        x.view(1, 1, 100, 100), torch.ones(1, 1, 2, 2, device="cuda")
    ),
    "attended": lambda x, y: F.scaled_dot_product_attention(*[x.view(1, 1, 100, 100)] * 3),
    "sparse": lambda x, y: x.to_sparse(),
    "differentiated": lambda x, y: (x.requires_grad_() * y).sum().backward(),
    "an optimizer's": lambda x, y: torch._fused_sgd_(
        [x],
        [y],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
}

# torch itself compares the sizes of these views with the storage's.
REFUSED = {
    "printed": lambda x, y: str(x),
    "transposed": lambda x, y: x.t() + 1,
    "a row": lambda x, y: x[0],
}

UNHARMED = {
    "a view": lambda x, y: x.view(-1),
    "a shape": lambda x, y: (x.shape, x.stride(), x.untyped_storage().nbytes()),
    "the like": lambda x, y: torch.empty_like(x).stride(),
    "zeros like it": lambda x, y: torch.zeros_like(x).sum().item(),
    "numbers like it": lambda x, y: (
        torch.rand_like(x),
        torch.full_like(x, 2.0),
        torch.ones_like(x, dtype=torch.half),
    ),
    "new ones": lambda x, y: (
        x.new_ones(3),
        x.new_empty(2),
        x.new_full((2,), 1.0),
        x.new_empty_strided((2,), (1,)),
    ),
    "saved": lambda x, y: torch.save(x, io.BytesIO()),
    "detached": lambda x, y: x.detach(),
    "its size again": lambda x, y: x.untyped_storage().resize_(40_000) and x.fill_(2).sum().item(),
    "another geometry": lambda x, y: x.resize_(0) + 1,
}


def free(x, size):
    x.untyped_storage().resize_(size)


def run(use, size, **options):
    with torchdevice.simulate(**options):
        x, y = torch.rand(100, 100, device="cuda"), torch.rand(100, 100, device="cuda")
        free(x, size)
        try:
            use(x, y)
            torch.cuda.synchronize()
            (y + 1).sum().item()
        except Exception as error:
            text = str(error)
            try:
                (y + 1).sum().item()
            except torch.AcceleratorError:
                lost = "lost"
            else:
                lost = "alive"
            # Errors of Python 3.10 have no notes.
            notes = (
                "".join(getattr(error, "__notes__", []))
                if sys.version_info >= (3, 11)
                else f"{__file__} in free"
            )
            place = " with the line" if __file__ in notes and "in free" in notes else ""
            return f"{type(error).__name__}: {text.splitlines()[0]}, {lost}{place}"
        return "fine"


for size in (0, 4):
    for name, use in (USES | REFUSED | UNHARMED).items():
        print(size, name, run(use, size, native=sys.argv[1]), sep="|", flush=True)
