"""Write docs/packages.md from the registry of stand-ins, or compare it (--check)."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import write_or_check

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.packages import missing, registry

PAGE = Path(__file__).with_name("packages.md")

RESULTS = PAGE.parents[1] / "benchmarks" / "package_tests.json"

LIBRARIES = (
    (
        "transformers 5.24.0",
        "`find_spec` and the version",
        "no flash_attn, mamba_ssm, causal_conv1d, apex",
        "it has torch's attention and paths of its own; "
        '`attn_implementation="flash_attention_2"` and remote code get flash_attn',
    ),
    (
        "diffusers 0.42.1",
        "`find_spec` and the version",
        "no xformers, flash_attn",
        "it has torch's attention; `enable_xformers_memory_efficient_attention()` gets xformers",
    ),
    (
        "timm 1.0.31",
        "`import` in a `try`",
        "no apex",
        'it has norms of its own; `create_optimizer_v2(model, opt="fusedadam")` gets apex\'s optimizer',
    ),
    (
        "accelerate 1.15.0",
        "`find_spec` and the version",
        "no DeepSpeed, Transformer Engine, MS-AMP",
        "nothing stands in for them",
    ),
    (
        "PEFT 0.21.2",
        "`find_spec`",
        "no bitsandbytes, Transformer Engine",
        "bitsandbytes works where it is installed",
    ),
    (
        "TRL 1.16.0",
        "`find_spec`",
        "no DeepSpeed, vllm, Liger kernels",
        "nothing stands in for them",
    ),
)
"""The rows of the table of libraries."""

HEADER = """# Packages that exist only for CUDA

<!-- Made by python docs/make_packages.py from torchdevice/packages; do not edit. -->

`import flash_attn` is the line at which many CUDA programs stop on a Mac or a CPU. In a scope the packages below have
stand-ins: the same functions, on torch's own operators and on the target's device, with gradients.

```python
import torch
import torchdevice

with torchdevice.portable(target="cpu"):
    from flash_attn import flash_attn_func

    q = torch.randn(1, 6, 4, 8, device="cuda")
    k = torch.randn(1, 6, 2, 8, device="cuda")
    out = flash_attn_func(q, k, k, causal=True)
```

## Who gets a stand-in

- An installed package wins, and its kernels need a GPU. With `packages="instead"` (`--packages instead`) the stand-in
  takes its place, unless the program imported it before the scope.
- **A program gets it**, by `import` and by `find_spec`. So does its remote code, which transformers checks and imports.
- **A library that can do without the package does without it**: one that asks `find_spec` or `importlib.metadata`, or
  imports the package in a `try` statement whose handler goes on. It keeps its own kernels.
- **A library that the program asks for the package gets it**: `attn_implementation="flash_attention_2"` of
  transformers, `enable_xformers_memory_efficient_attention()` of diffusers, an optimizer of apex that timm makes by
  name.
- On CUDA itself, in programs written for another accelerator, and with `packages="absent"`
  (`--packages absent`, `TORCHDEVICE_PACKAGES=absent`), there are no stand-ins.

What libraries find, by their own functions, in a scope on `simulated:a100` with torch 2.14.1, on 30 November 2026:

| library | how it looks | what it finds | why, and what a program can ask for |
|---|---|---|---|
<libraries>

The modules end with the last scope of the process, and `sys.modules` is then as it was. Until then another thread of
the process, in no scope, finds a module that the program has imported.

The kernels of a package refuse some inputs: flash_attn's float32, for example, causal_conv1d's a width of 5, and those
of xformers keys with fewer heads. On simulated GPUs the stand-ins of these packages, and of mamba_ssm, apex,
torch_scatter, mmcv and Deformable DETR, refuse them in the package's words. On other targets they take them. Dropout
draws torch's numbers, which is reported as approximate, so `strict=True` refuses it. Calls appear in the
[report](report.md#the-report) at the program's line.

A stand-in takes 1.0 to 1.2 times as long as torch's operators for the same mathematics. It is measured by
`python -m benchmarks --packages`.

mmcv-lite, and a detectron2 that was installed without its compiled part, get their kernels from the stand-in. A kernel
that it lacks raises an error that names it. TorchScript calls stand-ins, and cannot save such a program.

[`torchdevice check`](report.md#static-check) finds the imports. A package that nothing stands in for raises Python's
`ModuleNotFoundError`, and the last line of the traceback shows what to use
([below](#packages-that-nothing-stands-in-for)).

Triton has wheels for Linux only. On other systems a program can import `triton` and define kernels, and a kernel that
is launched raises an error. On Linux install it, and its [kernels run in NumPy](simulation.md#triton-kernels).

bitsandbytes has kernels of its own for CPUs. It chooses them while it is imported, so a scope lets it see the machine
as it is. Its 4-bit and 8-bit layers and its 8-bit optimizers then compute on the CPU, also for simulated GPUs. The
library `kernels` takes builds for the target, or for CPUs where the target is simulated. torchao, torchaudio and
torchvision need no change. deepspeed can be imported, and its compiled operators raise an error that names them.
vllm 0.33.0 can be imported, finds no GPU, since it asks NVIDIA's library itself, and an error that it raises shows
what to use.

On simulated GPUs `pynvml` shows the devices of the scope with their memory, also where nvidia-ml-py is installed. What
would have to be measured raises NVML's "Not Supported". Processes that a program starts under `torchdevice run` find
an `nvidia-smi` that answers `--query-gpu`, `-q` (also as XML, or with `-d MEMORY`), `-L`, `--version` and the plain
table. Its memory figures are those at the beginning of the run. GPUtil reads it, and needs `includeNan=True`, because
no load is measured. On other targets NVML finds no driver, unless `devices=` gives devices.
"""

TABLES = """
## What there is

All of them since torchdevice 0.1.
The fidelities are those of [all supplied names](reference.md#supplied-names-and-their-fidelity).
"""

TESTED = """
## The packages' own tests

A sample of the cases of each test, drawn by a seed, run as the package has them:
`python -m benchmarks.package_tests SOURCES`. The functions that a test compares with are taken from the package's
source. In the three cases that failed on the CPU such a function's own error is beyond the tolerance: it rounds the
state, and the kernel and the stand-in do not. Causal-conv1d's case that failed took longer than 120 s
on a busy machine.

Of 49 cases of flash-attention's `test_rotary.py` 48 passed on `simulated:a100`, and one asks for a kernel in Triton
that is not stood in for. Of 40 short cases of its `test_flash_attn.py` 33 passed there, 3 were skipped, and 4 failed:
they compare the weights of `return_attn_probs` with dropout, which the package scales by the blocks of its kernel, and
which are normalized here.

The case of `test_dropout_layer_norm.py` that failed exceeds a bound of 1e-4 in float32 gradients by less than 5e-5,
where torch's own norm is compared with itself. Flash-attention's `test_cross_entropy.py` was not run, because a case
takes 20 GiB. The case of `test_fused_novograd.py` that failed compares a number of 1e-9 by its relative error; the
absolute one is 1e-7. Tests of mmcv ran with mmcv-lite. Those that failed read a file beside the folder from which
mmcv's tests are started, or took longer than 120 s with 1025 channels. Tests of torch-sparse's class SparseTensor were
not run. xformers' tests get from its source what the stand-in lacks. Of the 15 cases of `test_mem_eff_attention.py`
that failed on `simulated:a100` 12 import triton, one asks for a mask with pages, and two for refusals of combined
kernels and strides that are taken here. The CPU refuses nothing, and one case took longer than 30 s there.
Deformable DETR's `ops/test.py` passed on both targets, with gradients of heads of 30 and 32 numbers.

| package | tests | target | run | passed | failed | skipped |
|---|---|---|---|---|---|---|
"""

MISSING = """
## Packages that nothing stands in for

| package | what the error shows |
|---|---|
"""


def rows(package: str) -> Iterator[str]:
    """Yield a row of Markdown for each name of a package, aliases together."""
    known: dict[int, list[str]] = {}
    found: dict[int, registry.Name] = {}
    for module in sorted(name for name in registry.MODULES if registry.package_of(name) == package):
        for name, each in registry.MODULES[module].items():
            if is_listed(name, each):
                known.setdefault(id(each.value), []).append(f"{module}.{name}")
                found[id(each.value)] = each
    for key, names in known.items():
        each = found[key]
        what = each.note if each.fidelity is Fidelity.UNSUPPORTED else first_sentence(each.value)
        yield (
            f"| {', '.join(f'`{name}`' for name in sorted(names, key=len)[:2])} | "
            f"{each.fidelity.value} | {what} |\n"
        )


def is_listed(name: str, registered: registry.Name) -> bool:
    """Return whether a program uses a name as a function or a class, other than an error."""
    if name == "__getattr__":  # Python calls it, for names that the module lacks
        return False
    value = registered.value
    return callable(value) and not (isinstance(value, type) and issubclass(value, BaseException))


def first_sentence(value: Any) -> str:
    """Return the first paragraph of what a function or a class does, as one line."""
    summary = (inspect.getdoc(value) or "").partition("\n\n")[0]
    line = " ".join(summary.split()).replace("|", "\\|")
    return re.sub(r":func:`(\w+)`", r"`\1`", line.replace("``", "`"))


def tested() -> Iterator[str]:
    """Yield a row of Markdown for each recorded run of a package's tests."""
    for row in json.loads(RESULTS.read_text()):
        counts = f"{row['passed']} | {row['failed']} | {row['skipped']}"
        yield (
            f"| {row['package']} {row['version']} | `{row['file']}` | {row['target']} | "
            f"{row['date']} | {counts} |\n"
        )


def page() -> str:
    """Return the page."""
    libraries = "\n".join(f"| {' | '.join(row)} |" for row in LIBRARIES)
    parts = [HEADER.replace("<libraries>", libraries), TABLES]
    for package, known in registry.PACKAGES.items():
        registry.names_of(package)
        parts.append(f"\n### {package}\n\nAs release {known.version} of {known.distribution}.\n\n")
        parts.append("| name | fidelity | what it does |\n|---|---|---|\n")
        parts.extend(rows(package))
    parts += [TESTED, *tested()]
    parts.append(MISSING)
    parts.extend(f"| `{name}` | {missing.note_of(name)} |\n" for name in missing.MISSING)
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
