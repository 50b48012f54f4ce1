"""C++ kernels are put at one moment, and threads' first calls of operators change nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import run_python

from torchdevice.native import building

pytestmark = pytest.mark.one_engine

OPERATORS = """
import faulthandler, threading, warnings
import torch, torchdevice

faulthandler.enable()
warnings.simplefilter("ignore")

def operators():
    '''Return the operators of ATen that compute a tensor of one or two small ones.'''
    found = []
    for schema in torch._C._jit_get_all_schemas():
        needed = [each for each in schema.arguments if not each.has_default_value()]
        takes_tensors = len(needed) in (1, 2) and all(str(each.type) == "Tensor" for each in needed)
        if not schema.name.startswith("aten::") or not takes_tensors or any(each.alias_info for each in needed):
            continue
        op = getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")
        try:
            result = op(*[torch.ones(2, 2)] * len(needed))
        except Exception:  # many take no matrices, or no floats
            continue
        if isinstance(result, torch.Tensor) and "rand" not in schema.name:
            found.append((op, len(needed)))
    assert len(found) > 300
    return found

def answer(call):
    try:
        result = call()
        return tuple(result.shape), str(result.dtype)
    except Exception as error:
        return type(error), str(error)

def compute(found, wait=lambda: None):
    x = torch.ones(2, 2, device="cuda")
    answers = []
    for op, count in found:
        wait()
        answers.append([answer(lambda: op(*[x] * count)) for _ in range(3)])
    return answers

every = operators()
"""

TABLES = """
def tables():
    return {name: torch._C._dispatch_dump_table(name) for name in torch._C._dispatch_get_all_op_names()}

with torchdevice.simulate(native=first):
    torch.ones(1, device="cuda")
    before = tables()
    compute(every)
with torchdevice.simulate(native="always"):
    compute(every)
after = tables()
assert "torchdevice" in after["aten::add.Tensor"]
print([name for name, table in before.items() if after[name] != table])
"""


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("first", ["always", "never"])
def test_a_first_call_leaves_the_dispatchers_tables_as_they_are(first: str) -> None:
    """Another thread may be looking an operator up in them."""
    ran = run_python("-c", f"{OPERATORS}\nfirst = {first!r}\n{TABLES}")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == "[]\n"


THREADS = """
with torchdevice.simulate(native="never"):
    expected = compute(every)

import random
random.Random(seed).shuffle(order := list(range(len(every))))
mixed, expected = [every[i] for i in order], [expected[i] for i in order]
barrier, answers, ended = threading.Barrier(3), [], threading.Event()

def computes():
    with torchdevice.simulate(native="always"):
        answers.append(compute(mixed, barrier.wait))

def enters():
    while not ended.is_set():
        for target in ("mps", "cuda"):
            with torchdevice.simulate(target):
                torch.ones(2, device=target) + 1

threads = [threading.Thread(target=computes) for _ in range(3)]
other = threading.Thread(target=enters)
for each in (*threads, other):
    each.start()
for each in threads:
    each.join()
ended.set()
other.join()
assert len(answers) == 3
print([str(mixed[i][0]) for i, each in enumerate(expected) if any(found[i] != each for found in answers)])
"""


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("seed", range(20))
def test_threads_call_each_operator_first_at_the_same_time(seed: int) -> None:
    """While another thread enters and leaves scopes: no crash, and each operator's own answer."""
    ran = run_python("-c", f"{OPERATORS}\nseed = {seed}\n{THREADS}")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == "[]\n"


LATE = """
import shutil, sys, threading
from pathlib import Path
import torch, torchdevice
from torchdevice.errors import NativeKernelsError
from torchdevice.native import building

entered, may_leave = threading.Event(), threading.Event()

def computes():
    with torchdevice.simulate():
        entered.set()
        may_leave.wait(60)

thread = threading.Thread(target=computes)
thread.start()
entered.wait(60)
shutil.copytree(sys.argv[1], building.folder(), dirs_exist_ok=True)
with torchdevice.simulate():  # by kernels in Python
    assert torch.ones(2, device="cuda").add(1).tolist() == [2, 2]
try:
    with torchdevice.simulate(native="always"):
        raise AssertionError("kernels were put in place beside a thread that may compute")
except NativeKernelsError as error:
    print(error)
may_leave.set()
thread.join()
with torchdevice.simulate(native="always"):
    assert torch.ones(2, device="cuda").add(1).tolist() == [2, 2]
"""


def test_kernels_that_are_built_late_wait_for_other_threads(
    native_kernels: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    kept = tmp_path / "built"
    for folder in (kept, cache):
        folder.mkdir(mode=0o700)
    for file in (native_kernels, building._digest_of(native_kernels)):
        shutil.copy2(file, kept)
    ran = run_python("-c", LATE, str(kept), XDG_CACHE_HOME=str(cache))
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "enter this scope before the threads start" in ran.stdout
