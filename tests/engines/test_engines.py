"""The engine that wraps entry points: what it wraps and leaves alone, and its removal.

The contract tests run on it with ``pytest --engine wrap``; these tests are about this engine alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import sysconfig
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import failing_half_way
from processes import run_fresh_python, run_program, run_python
from torch.overrides import (
    _get_current_function_mode_stack,
    get_ignored_functions,
    get_overridable_functions,
)
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice.calls import lookup, rewriters, wrap
from torchdevice.errors import EngineUnavailableError, FidelityError
from torchdevice.kernel import thread_state
from torchdevice.kernel.lowlevel import replace_new
from torchdevice.simulation import torch_functions

pytestmark = pytest.mark.one_engine

BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType)


@pytest.fixture
def wrapped(chosen: str) -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(engine="wrap") as scope:
        yield scope


def in_thread(function: Callable[[], object]) -> Any:
    """Call a function in a thread that inherits no scope; return its result or raise its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    started = threading.Event()
    thread = threading.Thread(target=lambda: (started.wait(), run()))
    with thread_state.suspended():
        thread.start()
    started.set()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def looked_up_before() -> dict[str, Callable[[], torch.Tensor]]:
    """Return calls of functions looked up before, by what holds each function."""
    zeros, move = torch.zeros, torch.zeros(1).to
    by_name, by_number = {"make": torch.zeros}, [torch.zeros]
    an_object = types.SimpleNamespace(make=torch.zeros)

    class Holder:
        make = staticmethod(torch.zeros)

    def default(make: Any = torch.zeros) -> torch.Tensor:
        return make(1, device="cuda")

    return {
        "functools.partial": functools.partial(torch.zeros, 1, device="cuda"),
        "a closure": lambda: zeros(1, device="cuda"),
        "a default argument": default,
        "a class": lambda: Holder.make(1, device="cuda"),
        "an object": lambda: an_object.make(1, device="cuda"),
        "a dictionary": lambda: by_name["make"](1, device="cuda"),
        "a list": lambda: by_number[0](1, device="cuda"),
        "a bound method": lambda: move("cuda"),
    }


class TestWhatIsWrapped:
    def test_ordinary_calls_are_torchs_own(self) -> None:
        ordinary = (
            torch.add,
            torch.matmul,
            torch.Tensor.add,
            torch.Tensor.__matmul__,
            torch.Tensor.eq,
        )
        linear, device = torch.nn.functional.linear, inspect.getattr_static(torch.Tensor, "device")
        with torchdevice.portable("cpu", engine="wrap", half_products="target"):
            now = (
                torch.add,
                torch.matmul,
                torch.Tensor.add,
                torch.Tensor.__matmul__,
                torch.Tensor.eq,
            )
            assert all(one is other for one, other in zip(ordinary, now, strict=True))
            assert torch.nn.functional.linear is linear
            assert inspect.getattr_static(torch.Tensor, "device") is device
            assert _get_current_function_mode_stack() == []

    def test_every_function_with_a_device_in_its_schema_is_wrapped(
        self, wrapped: torchdevice.Scope
    ) -> None:
        public = [
            function for functions in get_overridable_functions().values() for function in functions
        ]
        functions = {*public, *get_ignored_functions(), *_device_constructors()}
        takers = {f for f in functions if isinstance(f, BUILTINS) and lookup.takes_device(f)}
        assert len(takers) > 40
        assert takers - {entry.original for entry in wrap._entry_points.values()} == set()

    def test_every_function_with_a_rewriter_is_wrapped(self, wrapped: torchdevice.Scope) -> None:
        reached = {torch.device, *(entry.original for entry in wrap._entry_points.values())}
        own = {
            **rewriters.REGISTERED,
            **{f: r for f, r in wrapped.runtime.rewriters.items() if callable(f)},
        }
        of_attributes = {f for f in own if isinstance(f, types.MethodWrapperType)}
        # The classes of operators are wrapped.
        operators = {
            f for f in own if isinstance(f, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        }
        # torch takes the mode off for this one; a mode beside the stack stays.
        seen_anyway = {torch._functorch.autograd_function.custom_function_call}
        # The first scope of the process wraps before the simulated device has this one; it calls
        # the wrapped __repr__.
        seen_anyway |= {torch_functions.formatted} & set(own) - reached
        assert set(own) - of_attributes - operators - reached == seen_anyway

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.Tensor.cuda(torch.ones(2)),
            lambda: next(map(torch.Tensor.cuda, [torch.ones(2)])),
            lambda: torch.ones(2).new_tensor([1.0], device="cuda"),
            lambda: torch.ones(2, device="cuda").new(2, device="cuda"),
            lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
            lambda: torch.fft.fftfreq(4, device="cuda"),
            lambda: torch.ops.aten.zeros([2], device=torch.device("cuda")),
            lambda: torch.ops.aten.zeros.default([2], device="cuda:0"),
            lambda: torch.nn.Linear(2, 2).to("cuda", torch.bfloat16).weight,
            lambda: torch.signal.windows.hann(4, device="cuda"),
            lambda: functools.partial(torch.zeros, device="cuda")(2),
        ],
    )
    def test_every_way_to_call_a_factory_or_move(
        self, wrapped: torchdevice.Scope, kind: str, make: Callable[[], torch.Tensor]
    ) -> None:
        assert make().device.type == kind

    def test_custom_operators(self, wrapped: torchdevice.Scope, kind: str) -> None:
        library = torch.library.Library("torchdevice_wrapped", "DEF")
        library.define("make(Device device, int n) -> Tensor")
        library.impl(
            "make", lambda device, n: torch.zeros(n, device=device), "CompositeExplicitAutograd"
        )
        assert torch.ops.torchdevice_wrapped.make("cuda", 3).device.type == kind
        assert (
            torch.ops.torchdevice_wrapped.make.default(torch.device("cuda"), 3).device.type == kind
        )
        library._destroy()

    def test_kernels_in_python_that_were_registered_before(self, chosen: str, kind: str) -> None:
        library = torch.library.Library("torchdevice_before", "DEF")
        library.define("double(Tensor x) -> Tensor")
        library.impl(
            "double", lambda x: x + torch.ones(2, device="cuda"), "CompositeExplicitAutograd"
        )
        with torchdevice.portable(engine="wrap"):
            assert (
                torch.ops.torchdevice_before.double(torch.ones(2, device="cuda")).device.type
                == kind
            )
        library._destroy()

    def test_dispatch_modes_of_the_program(self, wrapped: torchdevice.Scope, kind: str) -> None:
        made: list[torch.Tensor] = []

        class Own(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                made.append(torch.zeros(1, device="cuda"))
                return func(*args, **(kwargs or {}))

        x = torch.ones(2, device="cuda")
        with Own():
            torch.add(x, x)
        assert made[0].device.type == kind

    @pytest.mark.parametrize("holder", sorted(looked_up_before()))
    def test_functions_held_before_the_scope_are_not_reached(self, holder: str) -> None:
        """Only a stacked mode would see their calls: no module's names contain them."""
        call = looked_up_before()[holder]
        with torchdevice.portable("cpu", engine="mode"):
            assert call().device.type == "cpu"
        with (
            torchdevice.portable("cpu", engine="wrap"),
            pytest.raises((RuntimeError, AssertionError)),
        ):
            call()

    def test_torch_function_of_a_subclass_gets_another_object_than_the_name(self) -> None:
        seen = []

        class Own(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append((func is torch.zeros_like, func == torch.zeros_like))
                return super().__torch_function__(func, types, args, kwargs or {})

        for engine in ("mode", "wrap"):
            with torchdevice.portable("cpu", engine=engine):  # type: ignore[arg-type]
                torch.zeros_like(torch.ones(2).as_subclass(Own))
        assert seen == [(True, True), (False, True)]

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_a_text_of_torchs_dispatcher_names_the_target(self) -> None:
        """No wrapper sees the error of an operator without a device, which a mode rewords."""
        for engine, name in (("mode", "NestedTensorCUDA"), ("wrap", "NestedTensorsimulated")):
            with torchdevice.simulate("cuda", engine=engine):  # type: ignore[arg-type]
                nested = torch.nested.nested_tensor(
                    [torch.ones(2, 2), torch.ones(1, 2)], device="cuda"
                )
                with pytest.raises(NotImplementedError, match=name):
                    torch.logsumexp(nested, 1)

    @pytest.mark.lacked_by("simulated:mps", "choice among kernels of attention")
    def test_attention_calls_the_mode_only_where_torch_has_no_kernel(self) -> None:
        with torchdevice.portable("cpu", engine="wrap") as scope:
            q = torch.randn(1, 1, 4, 8, device="cuda")
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
            assert any("attention" in entry.requested for entry in scope.journal.degraded)
            with pytest.raises(RuntimeError, match=r"shape|size|dimension"):
                torch.nn.functional.scaled_dot_product_attention(q, q[..., :3], q)

    def test_strict(self, chosen: str) -> None:
        with (
            torchdevice.portable(engine="wrap", strict=True),
            pytest.raises((FidelityError, torch.AcceleratorError)),
        ):
            torch.zeros(1, device="cuda:7")

    def test_memory_that_ordinary_operators_lack_is_torchs_own_error(self) -> None:
        """Only calls of wrapped functions are seen, so only their errors are reworded as CUDA's."""
        column, huge = torch.ones(1 << 22, 1), 1 << 44
        for engine, expected in (("mode", torch.OutOfMemoryError), ("wrap", RuntimeError)):
            with torchdevice.portable("cpu", engine=engine, half_products="target"):  # type: ignore[arg-type]
                with pytest.raises(RuntimeError) as raised:
                    column @ column.T
                assert type(raised.value) is expected
                with pytest.raises(torch.OutOfMemoryError):
                    torch.empty(huge, device="cuda")

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize("engine", ["mode", "wrap"])
    def test_memory_that_ordinary_operators_lack_is_caught_by_the_name_of_cudas_error(
        self, engine: Any
    ) -> None:
        observed: list[tuple[Any, ...]] = []
        with torchdevice.portable("cpu", engine=engine):
            torch._C._cuda_attach_out_of_memory_observer(lambda *facts: observed.append(facts))
            column = torch.ones(1 << 22, 1, device="cuda")
            try:
                # A matrix product is wrapped where half products are computed in float32.
                column * column.T
            except torch.cuda.OutOfMemoryError as error:
                assert isinstance(error, torch.cuda.OutOfMemoryError)
                assert (
                    str(error)
                    == "CUDA out of memory. Tried to allocate 65536.00 GiB. (cpu stands in.)"
                )
            assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
        assert len(observed) == 1
        assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError

    @pytest.mark.parametrize("engine", ["mode", "wrap"])
    @pytest.mark.parametrize("raised", [RuntimeError(), RuntimeError(1)])
    def test_errors_without_a_text_pass(self, raised: RuntimeError, engine: Any) -> None:
        def fail(grad: torch.Tensor) -> None:
            raise raised

        with torchdevice.portable("cpu", engine=engine), pytest.raises(RuntimeError) as caught:
            x = torch.ones(1, requires_grad=True)
            x.register_hook(fail)
            x.backward()
        assert caught.value is raised

    @pytest.mark.parametrize("engine", ["mode", "wrap"])
    @pytest.mark.parametrize(
        "raised", [RuntimeError("another"), ValueError("DefaultCPUAllocator: not enough memory")]
    )
    def test_other_errors_are_not_caught_by_it(self, raised: Exception, engine: Any) -> None:
        with torchdevice.portable("cpu", engine=engine), pytest.raises(type(raised)) as caught:
            try:
                raise raised
            except torch.cuda.OutOfMemoryError:
                pytest.fail("caught")
        assert caught.value is raised


class TestEntryPoints:
    """An entry point compares, hashes, pickles and inspects as the function that it wraps."""

    @pytest.mark.parametrize("find", [lambda: torch.zeros, lambda: torch.Tensor.to])
    def test_an_entry_point_equals_its_original(self, find: Callable[[], Any]) -> None:
        original = find()
        with torchdevice.portable("cpu", engine="wrap"):
            entry = find()
            assert entry is not original and issubclass(type(entry), wrap.EntryPoint)
            assert entry == original and original == entry and hash(entry) == hash(original)
            assert entry in [original] and original in {entry} and {original: 1}[entry] == 1
            assert entry != torch.ones
            assert isinstance(entry, type(original)) and repr(entry) == repr(original)
            assert (entry.__name__, entry.__doc__) == (original.__name__, original.__doc__)
            assert (
                pickle.loads(pickle.dumps(entry)) == original and copy.deepcopy(entry) == original
            )
            assert inspect.unwrap(entry) is original
        assert find() is original

    @pytest.mark.parametrize("name", ["__repr__", "is_shared", "double"])
    def test_copies_of_methods_are_the_methods(self, name: str) -> None:
        """torch's operator database copies functions; two methods here are written in Python."""
        with torchdevice.simulate("cuda", engine="wrap"):
            entry = getattr(torch.Tensor, name)
            assert copy.copy(entry) is copy.deepcopy([entry])[0] is entry
            assert pickle.loads(pickle.dumps(entry)) == entry

    def test_torch_function_of_a_subclass_gets_the_originals(
        self, wrapped: torchdevice.Scope
    ) -> None:
        seen = []

        class Own(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        x = torch.ones(2).as_subclass(Own)
        x.to("cuda")
        torch.zeros_like(x, device="cuda")
        assert torch.Tensor.to in seen and torch.zeros_like in seen

    def test_functions_that_torchs_own_modules_ask_for_by_name(
        self, wrapped: torchdevice.Scope, kind: str
    ) -> None:
        assert torch._VF.empty((1,), device="cuda").device.type == kind  # type: ignore[attr-defined]
        assert set(vars(torch._VF)) >= {"vf"} and "empty" not in vars(torch._VF)
        cell = torch.nn.LSTMCell(2, 3).cuda()
        assert cell(torch.ones(1, 2, device="cuda"))[0].device.type == kind

    def test_lazy_modules(self, wrapped: torchdevice.Scope, kind: str) -> None:
        layer = torch.nn.LazyLinear(3).to("cuda")
        assert layer(torch.ones(2, 4, device="cuda")).device.type == kind

    def test_fx_graphs_name_the_originals(self) -> None:
        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.zeros_like(x) + x

        def code() -> str:
            return torch.fx.symbolic_trace(Model()).code

        plain = code()
        with torchdevice.portable("cpu", engine="wrap"):
            assert code() == plain
            assert in_thread(code) == plain

    def test_torchscript_compiles_entry_points(self, wrapped: torchdevice.Scope, kind: str) -> None:
        def made(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x) + torch.ones(2, device="cuda")

        assert torch.jit.script(made)(torch.ones(2, device="cuda")).device.type == kind


class TestDevice:
    """``torch.device`` stays the same class; its constructor calls the mode."""

    def test_all_forms(self, wrapped: torchdevice.Scope, kind: str) -> None:
        made = [
            torch.device("cuda"),
            torch.device("cuda", 0),
            torch.device(type="cuda", index=0),
            torch.device(0),
        ]
        assert {device.type for device in made} == {kind}
        assert torch.ones(1, device="cuda").device == torch.device("cuda", 0) or kind == "cpu"
        assert torch.device("cpu").type == "cpu" and torch.device("meta").type == "meta"
        assert torch.device("cpu:-1").type == "cpu" and torch.device("cuda").type == "cpu"

    def test_torch_device_stays_the_same_class(self) -> None:
        original, new = torch.device, vars(torch.device)["__new__"]
        with torchdevice.portable("cpu", engine="wrap"):
            assert torch.device is original and type(torch.device("cuda")) is original
            assert isinstance(torch.device("cuda"), original)
            assert (torch.device | None) == (original | None)
            assert pickle.loads(pickle.dumps(torch.device("cpu"))) == torch.device("cpu")
        assert vars(torch.device)["__new__"] is new
        assert torch.device("cuda", 1).type == "cuda"

    def test_torchs_own_errors(self) -> None:
        wrong: list[tuple[Any, ...]] = [("nonsense",), (), (1.5,), ("cuda", "x"), ("cuda:x",)]
        plain = []
        for arguments in wrong:
            with pytest.raises(Exception) as raised:
                torch.device(*arguments)
            plain.append((raised.type, str(raised.value)))
        with torchdevice.portable("cpu", engine="wrap"):
            for arguments, (kind, text) in zip(wrong, plain, strict=True):
                with pytest.raises(kind) as raised:
                    torch.device(*arguments)
                assert str(raised.value) == text

    def test_a_free_threaded_python_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
        with pytest.raises(EngineUnavailableError, match=r"is free-threaded.* Use engine='mode'"):
            replace_new.Constructor(torch.device, wrap._new_device).install()

    def test_a_sub_interpreter_is_refused(self, tmp_path: Path) -> None:
        """A sub-interpreter cannot import torch, and shares the class if it ever can."""
        if sys.version_info[:2] == (3, 12):
            pytest.skip(
                "a sub-interpreter of Python 3.12 cannot import ctypes, nor the module that "
                "refuses it"
            )
        interpreters = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
        # In which extension modules can be imported.
        kind = "'legacy'" if sys.version_info >= (3, 13) else ""
        inside = (
            "from torchdevice.kernel.lowlevel import replace_new; print(replace_new.refusal(), "
            "flush=True)"
        )
        program = f"""
            import {interpreters} as interpreters
            {inside}
            error = interpreters.run_string(interpreters.create({kind}), {inside!r})
            assert error is None, error
        """
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        ran = run_python(str(path))
        assert ran.returncode == 0, ran.stderr
        assert (
            ran.stdout.splitlines()[0] == "None"
            and "this is a sub-interpreter" in ran.stdout.splitlines()[1]
        )

    def test_a_python_with_another_layout_of_classes_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        patch = replace_new.Constructor(torch.device, wrap._new_device)
        monkeypatch.setattr(sys, "implementation", types.SimpleNamespace(name="pypy"))
        with pytest.raises(EngineUnavailableError, match="Use engine='mode'"):
            patch.install()
        monkeypatch.undo()
        monkeypatch.setattr(replace_new, "offsets", lambda *_: [312, 320])
        with pytest.raises(EngineUnavailableError, match="cannot be determined"):
            patch.install()
        assert torch.device("cuda").type == "cuda"


_MOVES: dict[str, Callable[[Any], Any]] = {
    "by text": lambda x: x.to("cuda"),
    "by ordinal": lambda x: x.to("cuda:0"),
    "by device": lambda x: x.to(torch.device("cuda")),
    "by the class": lambda x: torch.Tensor.to(x, "cuda"),
    "cuda()": lambda x: x.cuda(),
    "cuda of the class": lambda x: torch.Tensor.cuda(x),
}

_SCOPES: dict[str, Callable[..., torchdevice.Scope]] = {
    "cpu": lambda **options: torchdevice.portable("cpu", **options),
    "several": lambda **options: torchdevice.portable("cpu", devices=2, **options),
    "simulated": lambda **options: torchdevice.simulate(**options),
}


class _Subclass(torch.Tensor):
    pass


_STAYING: dict[str, Callable[[], Any]] = {
    "made there": lambda: torch.ones(2, 2, device="cuda"),
    "moved there": lambda: torch.ones(2, 2).to("cuda"),
    "of the host": lambda: torch.ones(2, 2),
    "unknown": lambda: torch.ones(2, 2, device="cuda").cos(),
    "a view": lambda: torch.ones(2, 2, device="cuda")[0],
    "a leaf": lambda: torch.ones(2, 2, device="cuda", requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2, 2, device="cuda")),
    "a subclass": lambda: torch.ones(2, 2, device="cuda").as_subclass(_Subclass),
    "sparse": lambda: torch.eye(2, device="cuda").to_sparse(),
}
"""Tensors that are moved, made in a scope."""


class TestNaming:
    """Calls that name a device which the thread has named before do what the first one does."""

    @pytest.mark.parametrize(
        "enter", [lambda **o: torchdevice.portable("cpu", **o), torchdevice.simulate]
    )
    def test_each_call_is_reported_at_its_line(self, enter: Any) -> None:
        counts = {}
        for engine in ("mode", "wrap"):
            with enter(engine=engine) as scope:
                for _ in range(5):
                    torch.zeros(3, device="cuda").cos().to("cuda")
                    torch.ones(3).to("cuda")
                    torch.device("cuda")
            counts[engine] = [
                (each.site, each.requested, each.count) for each in scope.journal.entries
            ]
        assert counts["wrap"] == counts["mode"]
        assert any(count >= 5 for *_, count in counts["wrap"])

    def test_moves_copy_as_the_first_one_does(self, wrapped: torchdevice.Scope) -> None:
        for _ in range(3):
            host = torch.zeros(3)
            moved = host.to("cuda")
            assert moved is not host
            assert moved.to("cuda") is moved
            assert torch.ones(3, device="cuda").to("cuda").data_ptr() != moved.data_ptr()
            made = torch.ones(3, device="cuda")
            assert made.to("cuda") is made
            assert made.cpu() is not made

    @pytest.mark.parametrize("where", [*_STAYING])
    @pytest.mark.parametrize("enter", [*_SCOPES])
    @pytest.mark.parametrize("move", [*_MOVES])
    def test_a_move_that_needs_no_mode_does_what_the_mode_does(
        self, move: str, enter: str, where: str
    ) -> None:
        """The result, whether it is the tensor itself or shares its memory, and what is counted."""
        seen = {}
        for engine in ("mode", "wrap"):
            with _SCOPES[enter](engine=engine) as scope:
                given = _STAYING[where]()
                results = [_MOVES[move](given) for _ in range(3)]
            kinds = [(result is given, type(result), result.requires_grad) for result in results]
            seen[engine] = (
                kinds,
                [
                    (each.site.function, each.requested, each.count)
                    for each in scope.journal.entries
                ],
            )
        assert seen["wrap"] == seen["mode"]

    @pytest.mark.parametrize("move", [*_MOVES])
    def test_who_records_torchs_calls_sees_a_move(
        self, move: str, wrapped: torchdevice.Scope
    ) -> None:
        x = torch.ones(2, device="cuda")
        for _ in range(2):  # the first one names the device
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                _MOVES[move](x)
            assert "aten::to" in {event.key for event in profile.key_averages()}
            traced = torch.jit.trace(lambda x: _MOVES[move](x) + 1, x)
            assert "aten::to" in str(traced.inlined_graph)
            assert torch.func.vmap(_MOVES[move])(torch.ones(2, 3, device="cuda")).shape == (2, 3)

    @pytest.mark.parametrize("name", ["to", "cuda", "cpu", "new_zeros"])
    def test_the_method_of_a_tensor_is_described_as_torchs_own(self, name: str) -> None:
        def described() -> tuple[Any, ...]:
            method = getattr(torch.ones(2), name)
            with pytest.raises(ValueError, match="no signature found"):
                inspect.signature(method)
            again = pickle.loads(pickle.dumps(method))
            return (
                method.__name__,
                method.__doc__,
                method.__self__.shape,
                again.__name__,
                again.__self__.shape,
            )

        plain = described()
        with torchdevice.portable("cpu", engine="wrap"):
            assert described() == plain

    @pytest.mark.parametrize(
        "call",
        [lambda: torch.zeros(-1, device="cuda"), lambda: torch.zeros(2).to("cuda", 5, 6, 7, 8)],
    )
    def test_a_call_that_fails_has_the_text_of_the_first(
        self, call: Any, wrapped: torchdevice.Scope
    ) -> None:
        texts = set()
        for _ in range(3):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                call()
            assert caught.value.__context__ is sys.exc_info()[1], "what was being handled before"
            texts.add(str(caught.value))
            torch.zeros(2, device="cuda").to("cuda")
        assert len(texts) == 1

    def test_the_cpu_that_a_scope_is_sent_to_counts(self, wrapped: torchdevice.Scope) -> None:
        torch.zeros(2, device="cuda").to("cuda")
        torch.device("cpu:-1")
        assert torch.zeros(2, device="cuda").to("cuda").device.type == "cpu"

    def test_a_dispatch_mode_sees_the_call_without_the_mode(
        self, wrapped: torchdevice.Scope
    ) -> None:
        seen = []

        class Looks(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(thread_state.state.mode)
                return func(*args, **(kwargs or {}))

        torch.zeros(2, device="cuda")
        with Looks():
            torch.zeros(2, device="cuda")
        assert seen == [None]
        assert thread_state.state.mode is not None


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(1 << 24, device="cuda"),
        lambda: torch.rand(1 << 24, device="cuda"),
        lambda: torch.zeros(1 << 24).to("cuda"),
        lambda: torch.zeros(1 << 24).cuda(),
        lambda: torch.ones(1 << 12, 1, device="cuda") @ torch.ones(1, 1 << 12, device="cuda"),
    ],
    ids=["factory", "random", "move", "cuda", "product"],
)
def test_a_call_that_runs_out_of_memory_is_made_once(call: Callable[[], Any]) -> None:
    with torchdevice.simulate(memory="20MiB", context=0, engine="wrap"):
        torch.empty(1, device="cuda"), torch.ones(1).cuda()  # names the device
        with pytest.raises(torch.OutOfMemoryError):
            call()
        assert torch.cuda.memory_stats()["num_ooms"] == 1


class TestImportedByValue:
    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        module = types.ModuleType("torchdevice_program")
        exec(
            "from torch import zeros, device, tensor\nfrom torch.nn.functional import linear",
            vars(module),
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    def test_before_the_scope(self, chosen: str, kind: str, module: types.ModuleType) -> None:
        original, linear = module.zeros, module.linear
        for _ in range(2):
            with torchdevice.portable(engine="wrap", half_products="target") as scope:
                assert module.zeros(2, device="cuda").device.type == kind
                assert module.tensor([1.0], device=module.device("cuda")).device.type == kind
                assert (module.linear is linear) is (scope.runtime.refusing_key is None)
            assert module.zeros is original

    def test_a_module_that_is_imported_again_between_two_scopes(
        self, chosen: str, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(2):
            module = types.ModuleType("torchdevice_program")
            exec("from torch import zeros", vars(module))
            monkeypatch.delitem(sys.modules, module.__name__, raising=False)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            with torchdevice.portable(engine="wrap"):
                assert module.zeros(2, device="cuda").device.type == kind

    def test_functions_that_only_some_scopes_wrap(self, tmp_path: Path) -> None:
        """They are found at the first entry, and are torch's again in scopes without wrappers."""
        program = """
            import torch
            from torch.nn.functional import linear
            import torchdevice
            from torchdevice.calls.wrap import EntryPoint

            for products, wraps in (("float32", True), ("target", False), ("float32", True)):
                with torchdevice.portable("cpu", engine="wrap", half_products=products):
                    assert issubclass(type(linear), EntryPoint) is wraps, products
            print("done")
        """
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        ran = run_python(str(path))
        assert ran.returncode == 0 and ran.stdout == "done\n", ran.stderr

    def test_a_name_that_was_deleted_or_rebound_since(
        self, chosen: str, module: types.ModuleType
    ) -> None:
        with torchdevice.portable(engine="wrap"):
            pass
        del module.zeros
        module.tensor = "another thing"
        with torchdevice.portable(engine="wrap"):
            assert not hasattr(module, "zeros") and module.tensor == "another thing"
        assert not hasattr(module, "zeros") and module.tensor == "another thing"

    def test_in_a_scope(self, chosen: str, kind: str) -> None:
        module = types.ModuleType("torchdevice_program")
        with torchdevice.portable(engine="wrap"):
            exec("from torch import zeros", vars(module))
        assert module.zeros(2).device.type == "cpu"
        with pytest.raises((RuntimeError, AssertionError)):
            module.zeros(2, device="cuda")
        with torchdevice.portable(engine="wrap"):
            assert module.zeros(2, device="cuda").device.type == kind

    @pytest.mark.sampled(1)
    def test_a_program(self, tmp_path: Path, chosen: str) -> None:
        program = """
            from torch import device, tensor, zeros
            import torch, torchdevice

            with torchdevice.portable() as scope:
                made = zeros(3, device=device("cuda"))
                assert made.device.type == scope.target.type, made.device
                assert scope.options.engine == "wrap"
            print("done", torch.zeros is zeros)
        """
        ran = run_program(tmp_path, program, options=["--engine", "wrap"])
        assert ran.returncode == 0 and "done True" in ran.stdout, ran.stderr


class TestThreads:
    def test_a_thread_without_a_scope_sees_torchs_own(self, wrapped: torchdevice.Scope) -> None:
        assert in_thread(lambda: torch.device("cuda").type) == "cuda"
        assert in_thread(lambda: torch.zeros(2).to("cpu").device.type) == "cpu"
        with pytest.raises((RuntimeError, AssertionError)):
            in_thread(lambda: torch.zeros(2, device="cuda"))

    def test_another_engine_in_another_thread(self, wrapped: torchdevice.Scope, kind: str) -> None:
        def other() -> list[str]:
            with torchdevice.portable(engine="mode"):
                assert len(_get_current_function_mode_stack()) == 1
                x = torch.ones(2)
                return [
                    made.device.type
                    for made in (
                        torch.zeros(2, device="cuda"),
                        x.to("cuda"),
                        x.cuda(),
                        torch.nn.Linear(1, 1).cuda().bias,
                    )
                ]

        assert set(in_thread(other)) == {kind}

    def test_a_started_thread_inherits_the_engine(
        self, wrapped: torchdevice.Scope, kind: str
    ) -> None:
        seen: list[Any] = []
        thread = threading.Thread(
            target=lambda: seen.extend(
                [torch.ones(2).cuda().device.type, _get_current_function_mode_stack()]
            )
        )
        thread.start()
        thread.join()
        assert seen == [kind, []]


class TestNesting:
    @pytest.mark.parametrize("inner", ["mode", "wrap"])
    @pytest.mark.parametrize("outer", ["mode", "wrap"])
    def test_the_outer_engine_serves_the_inner_scope(self, outer: Any, inner: Any) -> None:
        with torchdevice.portable("cpu", engine=outer):
            depth = len(_get_current_function_mode_stack())
            with torchdevice.portable("simulated:cuda", engine=inner, identity="program"):
                assert len(_get_current_function_mode_stack()) == depth
                x = torch.ones(2, device="cuda")
                assert x.device.type == "cuda" and x.is_cuda
            assert torch.ones(2, device="cuda").device.type == "cpu"
            assert str(x.device) == "simulated:0"

    def test_a_scope_entered_while_the_mode_handles_a_call(
        self, wrapped: torchdevice.Scope, kind: str
    ) -> None:
        def kernel(device: torch.device) -> torch.Tensor:
            assert thread_state.state.mode is None
            with torchdevice.portable(engine="wrap"):
                return torch.ones(2, device="cuda")

        library = torch.library.Library("torchdevice_nested", "DEF")
        library.define("make(Device device) -> Tensor")
        # A kernel registered in a scope would run with the mode active.
        with thread_state.suspended():
            library.impl("make", kernel, "CompositeExplicitAutograd")
        assert torch.ops.torchdevice_nested.make("cuda").device.type == kind
        assert torch.ones(2, device="cuda").device.type == kind
        library._destroy()

    def test_disabled_torch_functions(self, wrapped: torchdevice.Scope, kind: str) -> None:
        with torch._C.DisableTorchFunction():
            assert torch.device("cuda").type == "cuda"
        assert torch.device("cuda").type == kind


class TestUndo:
    def test_failure_half_way_through_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with torchdevice.portable("cpu", engine="wrap"):
            pass
        for _ in failing_half_way(wrap._FOR_EVERY_SCOPE, monkeypatch):
            with pytest.raises(RuntimeError, match="half-way"):
                torchdevice.portable("cpu", engine="wrap").__enter__()
            assert (
                torch.device("cuda").type == "cuda"
                and type(torch.zeros) is types.BuiltinFunctionType
            )
            assert torchdevice.current() is None

    def test_an_exception_in_a_call(self, wrapped: torchdevice.Scope, kind: str) -> None:
        with pytest.raises(RuntimeError):
            torch.zeros(-1, device="cuda")
        assert torch.zeros(1, device="cuda").device.type == kind

    def test_a_function_that_the_program_replaced_before_the_scope(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, chosen: str
    ) -> None:
        def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.ones(*args, **kwargs)

        monkeypatch.setattr(torch, "zeros", zeros)
        with torchdevice.portable(engine="wrap"):
            assert torch.zeros(1, device="cuda").cpu().item() == 1
        assert torch.zeros is zeros


def test_an_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"engine='fast' is not known. Use 'auto', 'mode' or 'wrap'"
    ):
        torchdevice.portable(engine="fast")  # type: ignore[call-overload]
    monkeypatch.setenv("TORCHDEVICE_ENGINE", "fast")
    with pytest.raises(ValueError, match=r"TORCHDEVICE_ENGINE='fast'.*unset the variable"):
        torchdevice.portable()


def test_the_environment_variable_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEVICE_ENGINE", "wrap")
    assert torchdevice.portable().options.engine == torchdevice.simulate().options.engine == "wrap"
    assert torchdevice.portable(engine="mode").options.engine == "mode"


USED = "torchdevice.current()._resolved().options.engine"


class TestAuto:
    """``engine="auto"``: wrap if nothing can have kept a function of torch, else mode."""

    @pytest.fixture(autouse=True)
    def auto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TORCHDEVICE_ENGINE")

    def used(self, folder: Path, program: str, *words: str, **variables: str) -> list[str]:
        """Run a program in a process of its own; return what it prints."""
        path = folder / "program.py"
        path.write_text(textwrap.dedent(program))
        ran = run_fresh_python(*words, str(path), cwd=folder, **variables)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split()

    def test_run_and_the_processes_that_it_starts(self, tmp_path: Path) -> None:
        program = f"""
            import subprocess, sys
            import torch, torchdevice

            print({USED})
            with torchdevice.portable():
                print({USED})
            if len(sys.argv) == 1:
                subprocess.run([sys.executable, __file__, "child"], check=True, stdout=sys.stdout)
        """
        found = self.used(
            tmp_path,
            f"import sys; sys.stdout.reconfigure(line_buffering=True)\n{textwrap.dedent(program)}",
            "-m",
            "torchdevice",
            "run",
        )
        assert found == ["wrap", "mode"] * 2

    def test_the_switch(self, tmp_path: Path) -> None:
        """``TORCHDEVICE=1`` enables a scope on torch's import, also by a program's module."""
        (tmp_path / "model.py").write_text("import torch")
        program = f"import model, torchdevice; print({USED})"
        assert self.used(tmp_path, program, TORCHDEVICE="1") == ["wrap"]

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize(
        ("before", "expected"),
        [
            ("import torch", "wrap"),
            ("from torch import zeros, nn, Tensor", "wrap"),
            ("import torch, json, numpy; from pathlib import Path; rate, name = 0.1, 'x'", "wrap"),
            ("import plain", "wrap"),
            ("import of_module", "mode"),
            ("import of_function", "mode"),
            ("import of_class", "mode"),
            ("import of_submodule", "mode"),
            ("import torch\ndef f(make=torch.zeros): ...", "mode"),
            ("import torch\nclass Model(torch.nn.Module): ...", "mode"),
            ("import torch, functools; make = functools.partial(torch.zeros, 2)", "mode"),
            ("import torch; makers = [torch.zeros]", "mode"),
        ],
    )
    def test_enable_after(self, tmp_path: Path, before: str, expected: str) -> None:
        for name, text in (
            ("plain", "import json"),
            ("of_module", "import torch"),
            ("of_function", "from torch import zeros"),
            ("of_class", "from torch import Tensor"),
            ("of_submodule", "import torch.nn.functional as F"),
        ):
            (tmp_path / f"{name}.py").write_text(text)
        program = f"{before}\nimport torchdevice\ntorchdevice.enable()\nprint({USED})"
        assert self.used(tmp_path, program) == [expected]

    def test_a_block_and_a_decorated_function(self) -> None:
        def used() -> str:
            scope = torchdevice.current()
            assert scope is not None and scope.options.engine == "auto"
            return scope._resolved().options.engine

        with torchdevice.portable("cpu"):
            assert used() == "mode"
        assert torchdevice.portable("cpu")(used)() == "mode"

    def test_a_python_whose_classes_cannot_be_changed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wrap, "may_be_held", lambda: False)
        assert wrap.automatic() == "wrap"
        monkeypatch.setattr(replace_new, "refusal", lambda: "a reason")
        assert wrap.automatic() == "mode"


ENTERING = """
import sys, torch, torchdevice
exec(sys.argv[1])

for engine in ("mode", "wrap"):
    for target in ("cpu", "simulated:cuda"):
        scope = torchdevice.portable(target, engine=engine)
        for counted in (False, False, True):
            found = []
            sys.setprofile((lambda frame, event, argument: found.append(event)) if counted else None)
            scope.__enter__()
            scope.__exit__(None, None, None)
            sys.setprofile(None)
        print(f"{engine} {target}", found.count("call"), sep="\\t")
"""


@pytest.mark.one_engine
@pytest.mark.parametrize(
    ("imported", "more"), [("", 0), ("import torch._dynamo", 90)], ids=["torch", "Dynamo"]
)
def test_entering_again_takes_few_frames_of_python(
    tmp_path: Path, imported: str, more: int
) -> None:
    # In a process of its own: entering changes some 150 attributes with "mode" and 350 with "wrap",
    # together, and looks for the modules that a program may import later by one finder. Triton,
    # where it is installed, adds a few. It also looks for what `torchdevice native build` compiles;
    # there is nothing, whatever other tests have built.
    options = {
        "TORCHDEVICE_ENGINE": "",
        "TORCHDEVICE_NATIVE": "auto",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = run_python("-c", ENTERING, imported, **options)
    assert done.returncode == 0, done.stderr
    counted = {
        name: int(frames)
        for name, _, frames in (line.partition("\t") for line in done.stdout.splitlines())
    }
    most = {
        "mode cpu": 165,
        "mode simulated:cuda": 200,
        "wrap cpu": 195,
        "wrap simulated:cuda": 240,
    }
    assert counted.keys() == most.keys(), done.stdout
    beyond = [name for name, frames in counted.items() if not 100 < frames <= most[name] + more]
    assert not beyond, done.stdout


FIRST_IN_ANOTHER = """
import torch, torchdevice

def moves(**options):
    with torchdevice.simulate(engine="wrap", **options) as scope:
        return torch.nn.Linear(2, 2).to(scope.options.written_for).weight.device

def wrapped():
    with torchdevice.simulate("mps", written_for="mps", engine="wrap"):
        return type(vars(torch.Tensor).get("data")).__name__

if OUTER:
    with torchdevice.simulate(engine="wrap"), torchdevice.simulate("mps", written_for="mps", engine="wrap"):
        pass
    with torchdevice.simulate("mps", engine="wrap"), torchdevice.portable("mps", engine="wrap"):
        pass
print(wrapped(), moves(profile="mps", written_for="mps"), moves())
"""


@pytest.mark.one_engine
def test_a_scope_that_is_first_entered_inside_another_wraps_what_it_needs() -> None:
    found = [run_python("-c", f"OUTER = {outer}\n{FIRST_IN_ANOTHER}") for outer in (False, True)]
    assert all(each.returncode == 0 for each in found), [each.stderr for each in found]
    assert found[0].stdout == found[1].stdout == "_Attribute mps:0 cuda:0\n"
