"""A program that fills all of torch's disk caches. Its output must not depend on them."""

import contextlib
import os
import sys
from pathlib import Path

import cached_beside_it
import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
home = Path(os.environ["TORCH_HOME"])


def written(path: Path, text: str) -> Path:
    """Write a file, unless an earlier run has: what is compiled of it is newer than the file."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return path


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.mm(F.gelu(self.first(x)), self.weight)
        return (
            torch.softmax(hidden, -1)
            + torch.arange(16, device=x.device)
            + torch.ones(16, device=device)
        )


model = Model()
print(torch.fx.symbolic_trace(model).code.replace(device, "DEVICE"))
compiled = torch.compile(model.to(device))
for rows in (5, 7):
    loss = compiled(torch.randn(rows, 8).to(device)).pow(2).sum()
    loss.backward()
    print(rows, loss.item(), [parameter.grad.sum().item() for parameter in model.parameters()])

with torch.no_grad():
    tuned = torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False)
    print(tuned(torch.ones(64, 8, device=device)).sum().item())

hub = written(
    home / "repository" / "hubconf.py",
    "import torch\n\ndef layer():\n    return torch.nn.Linear(2, 2)\n",
)
print(torch.hub.load(str(hub.parent), "layer", source="local").to(device))
weights = home / "weights.pt"
if not weights.exists():
    torch.save({"weight": torch.ones(2, device=device)}, weights)
with contextlib.redirect_stdout(sys.stderr):  # the first time it says that it downloads
    loaded = torch.hub.load_state_dict_from_url(
        weights.as_uri(), progress=False, map_location="cpu"
    )
print(loaded)

source = written(
    home / "answering.c",
    "#include <Python.h>\n"
    "static PyObject *answer(PyObject *self, PyObject *nothing) { return PyLong_FromLong(42); }\n"
    'static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};\n'
    'static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answering", 0, -1, methods};\n'
    "PyMODINIT_FUNC PyInit_answering(void) { return PyModule_Create(&module); }\n",
)
print(cpp_extension.load("answering", [str(source)]).answer(), cached_beside_it.VALUE)
