"""Patches alone, on the tests' modules and classes: installed and restored states and times."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from logs import logged

from torchdevice.errors import TorchVersionError
from torchdevice.kernel import patching
from torchdevice.kernel.patching import (
    Added,
    Callback,
    Guarded,
    Installation,
    OwnModule,
    Replaced,
    ReplacedItem,
    Together,
)
from torchdevice.kernel.supplied_members import SuppliedMembers
from torchdevice.scope import installed

pytestmark = pytest.mark.one_engine


@pytest.fixture
def owner() -> types.ModuleType:
    module = types.ModuleType("a_module_of_torch")
    module.__dict__.update(name="torch's", other="torch's other")
    return module


def doubled(original: Any) -> Any:
    return original, original


class TestReplaced:
    def test_it_is_there_from_installation_to_removal(self, owner: Any) -> None:
        patch = Replaced(owner, "name", doubled)
        assert owner.name == "torch's"
        for _ in range(2):
            patch.install()
            assert owner.name == ("torch's", "torch's")
        for _ in range(2):
            patch.remove()
            assert owner.name == "torch's"

    def test_what_was_made_is_used_again_while_the_original_is_the_same(self, owner: Any) -> None:
        patch = Replaced(owner, "name", lambda original: [original])
        patch.install()
        first = owner.name
        patch.remove()
        patch.install()
        assert owner.name is first
        patch.remove()
        owner.name = "somebody's"
        patch.install()
        assert owner.name == ["somebody's"]
        patch.remove()
        assert owner.name == "somebody's"

    def test_what_somebody_has_set_meanwhile_stays_and_is_said_once(self, owner: Any) -> None:
        patch = Replaced(owner, "name", doubled)
        patch.install()
        owner.name = "somebody's"
        with logged() as messages:
            patch.remove()
            patch.remove()
        assert owner.name == "somebody's"
        (message,) = messages
        assert message.endswith(".name was set to something else during the scope and stays so")

    def test_removing_what_was_never_installed_says_nothing(self, owner: Any) -> None:
        with logged() as messages:
            Replaced(owner, "name", doubled).remove()
        assert owner.name == "torch's" and not messages

    def test_an_installation_puts_it_back_over_what_somebody_has_set(self, owner: Any) -> None:
        patch = Replaced(owner, "name", doubled)
        patch.install()
        owner.name = "somebody's"
        patch.install()
        assert owner.name == ("somebody's", "somebody's")
        patch.remove()
        assert owner.name == "somebody's"

    def test_an_inherited_attribute_is_inherited_again(self) -> None:
        class Above:
            name = "inherited"

        class Below(Above):
            pass

        patch = Replaced(Below, "name", doubled)
        patch.install()
        assert Below.name == ("inherited", "inherited") and Above.name == "inherited"
        patch.remove()
        assert "name" not in vars(Below) and Below.name == "inherited"

    def test_what_was_made_of_an_inherited_attribute_is_used_again(self) -> None:
        class Above:
            name = "inherited"

        class Below(Above):
            pass

        patch = Replaced(Below, "name", lambda original: [original])
        patch.install()
        first = Below.name
        patch.remove()
        patch.install()
        assert Below.name is first
        patch.remove()

    def test_an_attribute_that_may_be_absent_is_absent_again(self, owner: Any) -> None:
        patch = Replaced(owner, "new", doubled, may_be_absent=True)
        patch.install()
        assert owner.new == (None, None)
        patch.remove()
        assert not hasattr(owner, "new")

    def test_an_attribute_that_must_exist_is_looked_for_at_once(self, owner: Any) -> None:
        with pytest.raises(TorchVersionError, match=r"a_module_of_torch\.new"):
            Replaced(owner, "new", doubled)

    def test_what_comes_between_reading_and_installing_is_what_is_replaced(self) -> None:
        """A destructor or a signal handler may run at any line, and set the same attribute."""
        came: list[str] = []

        class Interrupted(types.ModuleType):
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if name == "name" and not came and armed:
                    came.append(name)
                    self.name = "somebody's"
                return value

        armed: list[bool] = []
        module = Interrupted("a_module_of_torch")
        module.name = "torch's"  # type: ignore[attr-defined]
        patch = Replaced(module, "name", doubled)
        armed.append(True)
        patch.install()
        assert came and module.name == ("somebody's", "somebody's")
        patch.remove()
        assert module.name == "somebody's"


class Stubborn(types.ModuleType):
    """A module whose attributes that begin with ``bad`` cannot be set back."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("bad") and value == "torch's":
            raise RuntimeError(name)
        super().__setattr__(name, value)


def test_each_is_removed_even_if_one_fails_and_the_first_error_is_raised() -> None:
    module = Stubborn("a_module_of_torch")
    names = ["first", "bad one", "bad two", "last"]
    vars(module).update(dict.fromkeys(names, "torch's"))
    patches = [Replaced(module, name, doubled) for name in names]
    patching.put_in(patches)
    with pytest.raises(RuntimeError, match="bad two"):
        patching.take_out(patches)
    assert vars(module)["first"] == vars(module)["last"] == "torch's"


def test_patches_of_one_name_are_removed_in_reverse_order(owner: Any) -> None:
    patches = [Replaced(owner, "name", lambda original: f"{original}, first"),
               Replaced(owner, "name", lambda original: f"{original}, second")]  # fmt: skip
    patching.put_in(patches)
    assert owner.name == "torch's, first, second"
    patching.take_out(patches)
    assert owner.name == "torch's"


class TestReplacedItem:
    def test_it_is_there_from_installation_to_removal(self) -> None:
        table = {"name": "torch's"}
        patch = ReplacedItem(table, "name", doubled)
        assert table == {"name": "torch's"}
        patch.install()
        assert table == {"name": ("torch's", "torch's")}
        patch.remove()
        assert table == {"name": "torch's"}

    def test_what_somebody_has_set_meanwhile_stays(self) -> None:
        table = {"name": "torch's"}
        patch = ReplacedItem(table, "name", doubled)
        patch.install()
        table["name"] = "somebody's"
        patch.remove()
        assert table == {"name": "somebody's"}


class TestAdded:
    @pytest.mark.parametrize(
        ("before", "entries"), [({"torch's": 1}, {"ours": 2}), ({"torch's"}, {"ours"})]
    )
    def test_entries_are_there_from_installation_to_removal(
        self, before: Any, entries: Any
    ) -> None:
        container = before.copy()
        patch = Added(container, entries)
        assert container == before
        patch.install()
        assert container == before | entries
        for _ in range(2):  # somebody may have removed them meanwhile
            patch.remove()
            assert container == before


def test_the_module_of_a_class_is_hidden_from_its_instances() -> None:
    class Hidden:
        __module__ = OwnModule("a_module")

    class Below(Hidden):
        pass

    assert Hidden.__module__ == "a_module"
    assert super(Below, Below).__module__ == "a_module"
    with pytest.raises(AttributeError, match=r"^__module__$"):
        _ = Hidden().__module__


def test_a_function_for_every_thread_looks_like_the_original() -> None:
    def original(first: int, *, second: int = 2) -> int:
        """Torch's documentation."""
        return first + second

    made = patching.in_every_thread(lambda called, *args, **kwargs: (called, args, kwargs))(
        original
    )
    assert made(1, second=3) == (original, (1,), {"second": 3})
    assert made.__name__ == "original" and made.__doc__ == original.__doc__
    assert inspect.signature(made) == inspect.signature(original)


class TestReplacedFunction:
    @pytest.mark.parametrize(
        ("made", "name"),
        [
            (types.ModuleType("a_module"), "module 'a_module'"),
            (type("Above", (), {}), "type object 'Above'"),
        ],
    )
    def test_one_that_torch_lacks_is_absent_outside_of_contexts(self, made: Any, name: str) -> None:
        patch = patching.replaced_function(made, "new", doubled, may_be_absent=True)
        patch.install()
        with pytest.raises(AttributeError, match=f"^{name} has no attribute 'new'$"):
            made.new()
        patch.remove()
        assert not hasattr(made, "new")

    def test_by_default_torch_must_have_it(self, owner: Any) -> None:
        with pytest.raises(TorchVersionError, match=r"a_module_of_torch\.new"):
            patching.replaced_function(owner, "new", doubled)


class TestReplacedInImporters:
    @pytest.fixture
    def modules(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., types.ModuleType]]:
        monkeypatch.setattr(patching, "_imported_names", set(patching._imported_names))
        patching._importers.cache_clear()

        def imported(name: str, **content: Any) -> types.ModuleType:
            module = types.ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
            return module

        yield imported
        patching._importers.cache_clear()

    def test_it_is_replaced_wherever_torch_holds_it(self, modules: Any) -> None:
        def function() -> str:
            return "torch's"

        source = modules("torch._a_source", a_rare_name=function)
        importer = modules("torch._an_importer", a_rare_name=function)
        namesake = modules("torch._a_namesake", a_rare_name="another thing")
        programs = modules("a_program", a_rare_name=function)
        patch = patching.ReplacedInImporters(source, "a_rare_name", doubled)
        patch.install()
        assert source.a_rare_name == importer.a_rare_name == (function, function)
        assert namesake.a_rare_name == "another thing" and programs.a_rare_name is function
        searches = patching._importers.cache_info().misses
        patch.places()
        assert patching._importers.cache_info().misses == searches, (
            "torch's modules are searched again"
        )
        later = modules("torch._a_later_importer", a_rare_name=function)
        patch.install()
        assert later.a_rare_name == (function, function)
        patch.remove()
        assert source.a_rare_name is importer.a_rare_name is later.a_rare_name is function

    def test_a_name_that_another_patch_looks_for_later_is_found(self, modules: Any) -> None:
        source = modules("torch._a_source", a_rare_name=len, another_rare_name=abs)
        first = patching.ReplacedInImporters(source, "a_rare_name", doubled)
        first.install()
        second = patching.ReplacedInImporters(source, "another_rare_name", doubled)
        second.install()
        assert source.another_rare_name == (abs, abs)
        second.remove()
        first.remove()
        assert (source.a_rare_name, source.another_rare_name) == (len, abs)

    def test_it_is_one_patch_with_those_beside_it(self, modules: Any, owner: Any) -> None:
        source = modules("torch._a_source", a_rare_name=len)
        callback = Callback(lambda: None, lambda: None)
        patches = [
            Replaced(owner, "name", doubled),
            patching.ReplacedInImporters(source, "a_rare_name", doubled),
        ]
        after = [Replaced(owner, "other", doubled), Replaced(owner, "other", doubled)]
        run, other = patching.together([*patches, callback, *after])
        assert other is callback and isinstance(run, Together) and run.patches == [*patches, *after]
        run.install()
        assert owner.name == ("torch's", "torch's") and source.a_rare_name == (len, len)
        later = modules("torch._a_later_importer", a_rare_name=len)
        run.install()
        assert later.a_rare_name == (len, len)
        run.remove()
        assert owner.name == "torch's" and source.a_rare_name is later.a_rare_name is len


class Context:
    """What patches read of a context."""

    def __init__(self, family: str = "cpu", machine: Any = None):
        self.names = types.SimpleNamespace(family=family, families=frozenset(), answered_by=machine)
        self.supplied = SuppliedMembers(self)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    state = types.SimpleNamespace(context=None)
    monkeypatch.setattr(patching, "state", state)
    return lambda context: setattr(state, "context", context)


class TestPerContext:
    def test_the_replacement_is_called_where_a_context_is_active(self, active: Any) -> None:
        def original(value: int, *, by: int = 1) -> Any:
            """Torch's."""
            return value + by

        function = patching.per_context(
            original, lambda context, original, *args, **kwargs: (context, args, kwargs)
        )
        assert function(1, by=2) == 3
        context = Context()
        active(context)
        assert function(1, by=2) == (context, (1,), {"by": 2})
        assert (function.__name__, function.__doc__) == ("original", "Torch's.")
        assert inspect.signature(function) == inspect.signature(original)
        assert (
            patching.original_of(function) is original
            and patching.original_of(original) is original
        )
        assert function.__prepare_scriptable__() is original  # type: ignore[attr-defined]

    @pytest.mark.parametrize("machine", [None, Context("cpu")], ids=["alone", "on a machine"])
    def test_where_it_is_native_torchs_own_is_called_or_the_machine_answers(
        self, machine: Any, active: Any
    ) -> None:
        function = patching.per_context(
            lambda: "torch's", lambda context, original: context, native_to="mps"
        )
        active(Context("mps", machine))
        assert function() == (machine or "torch's")
        other = Context("cpu", machine)
        active(other)
        assert function() is other

    def test_native_to_nothing_is_native_to_no_context(self, active: Any) -> None:
        context = Context("cpu", Context("mps"))
        active(context)
        assert (
            patching.per_context(lambda: "torch's", lambda context, original: context)() is context
        )


class TestSubclassInPlaceOf:
    def test_it_means_the_original(self) -> None:
        class Original:
            """Torch's."""

        class Further:
            pass

        stand_in = patching.subclass_in_place_of(Original, lambda cls: Original(), also=(Further,))
        assert type(stand_in()) is Original and isinstance(Original(), stand_in)
        assert (
            issubclass(Original, stand_in)
            and issubclass(Further, stand_in)
            and not issubclass(int, stand_in)
        )
        assert not isinstance(1, stand_in)
        assert stand_in == Original and stand_in == stand_in and stand_in != Further
        assert {Original: 1}[stand_in] == 1
        assert (stand_in.__name__, stand_in.__module__, stand_in.__doc__) == (
            "Original",
            __name__,
            "Torch's.",
        )


class TestGuarded:
    @pytest.fixture
    def module(self, owner: Any) -> Any:
        patch = Guarded(
            {owner: {"name": lambda context: context.names.family, "added": self.added}}
        )
        patch.install()
        yield owner
        patch.remove()
        assert type(owner) is types.ModuleType

    @staticmethod
    def added(context: Any) -> Any:
        return patching.TORCHS_OWN if context.names.family == "cpu" else context.names.family

    def test_a_thread_without_a_context_sees_torchs_own(self, module: Any) -> None:
        assert module.name == "torch's" and module.other == "torch's other"
        with pytest.raises(
            AttributeError, match="module 'a_module_of_torch' has no attribute 'added'"
        ):
            _ = module.added
        module.name = "set"
        assert vars(module)["name"] == "set"
        del module.name
        assert "name" not in vars(module)
        with pytest.raises(AttributeError, match="'name'"):
            del module.name

    def test_a_context_sees_its_own(self, module: Any, active: Any) -> None:
        active(Context("xpu"))
        assert (module.name, module.added) == ("xpu", "xpu")
        active(None)
        assert module.name == "torch's"

    def test_a_kept_value_is_read_in_the_place_of_the_function(
        self, module: Any, active: Any
    ) -> None:
        context = Context("xpu")
        context.supplied.values[self.added] = "kept"
        active(context)
        assert module.added == "kept"

    def test_what_a_program_sets_is_a_value_of_its_context(self, module: Any, active: Any) -> None:
        context = Context("xpu")
        active(context)
        module.name = "the program's"
        assert module.name == "the program's" and vars(module)["name"] == "torch's"
        assert module.added == "xpu"
        active(Context("mps"))
        assert module.name == "mps"
        active(context)
        del module.name
        with pytest.raises(AttributeError, match="'name'"):
            _ = module.name
        module.name = "xpu"  # what was there: monkeypatch puts it back
        assert module.name == "xpu" and not context.supplied.written

    def test_what_mock_found_in_the_dictionary_is_put_back(self, module: Any, active: Any) -> None:
        context = Context("xpu")
        active(context)
        module.name = "torch's"  # not what the program read: a value like any other
        assert module.name == "torch's" and context.supplied.written
        module.name = "torch's"
        assert module.name == "xpu" and not context.supplied.written

    def test_torchs_own_is_set_and_deleted_where_torch_answers(
        self, module: Any, active: Any
    ) -> None:
        context = Context("cpu")
        active(context)
        module.added = 1
        assert vars(module)["added"] == 1 and not context.supplied.written
        assert module.added == 1
        del module.added
        assert not hasattr(module, "added")

    def test_the_machines_context_answers_in_the_place_of_torch(
        self, module: Any, active: Any
    ) -> None:
        machine = Context("mps")
        active(Context("cpu", machine))
        assert (module.name, module.added) == ("cpu", "mps")
        module.added = "the program's"
        assert module.added == "the program's" and machine.supplied.written
        del module.added
        assert not hasattr(module, "added")

    def test_a_module_of_another_class_is_left_alone(self, owner: Any) -> None:
        patch = Guarded({owner: {"name": lambda context: context.names.family}})
        patch.install()
        patch.install()

        class Programs(types.ModuleType):
            pass

        owner.__class__ = Programs
        patch.remove()
        assert type(owner) is Programs

    def test_the_class_shows_the_descriptor(self, module: Any) -> None:
        assert type(module).name is vars(type(module))["name"]


class Recorded:
    """A patch that notes what is done with it."""

    def __init__(self, name: str, log: list[str], then: Callable[[], None] = lambda: None):
        self.name, self.log, self.then = name, log, then

    def install(self) -> None:
        self.log.append(f"+{self.name}")
        then, self.then = self.then, lambda: None
        then()

    def remove(self) -> None:
        self.log.append(f"-{self.name}")


class TestInstallation:
    def test_it_is_in_place_while_somebody_holds_it(self) -> None:
        log: list[str] = []
        built: list[int] = []

        def build() -> list[Any]:
            built.append(1)
            return [Recorded("a", log), Recorded("b", log)]

        installation = Installation(build)
        assert not built
        installation.drop("nobody")
        assert not log
        installation.hold("first")
        installation.hold("second")
        installation.drop("first")
        assert log == ["+a", "+b"] and built == [1]
        for _ in range(2):
            installation.drop("second")
            assert log == ["+a", "+b", "-b", "-a"]
        installation.hold("third")
        assert log[4:] == ["+a", "+b"] and built == [1]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_a_forked_child_does_not_wait_for_a_thread_that_it_lacks(self) -> None:
        """Another thread installs at the fork. In the child, nobody releases its lock."""
        # No locks, which a fork might find held.
        (begun, says_begun), (go_on, says_go_on) = os.pipe(), os.pipe()

        class Slow:
            def install(self) -> None:
                os.write(says_begun, b"1")
                os.read(go_on, 1)

            def remove(self) -> None: ...

        installation = Installation(lambda: [Slow()])
        other = threading.Thread(target=installation.hold, args=("other",))
        other.start()
        os.read(begun, 1)
        pid = os.fork()
        os.write(says_go_on, b"1")
        if pid == 0:
            signal.alarm(10)  # ends a child that waits
            installation.hold("child")
            os._exit(0)
        other.join()
        assert os.waitpid(pid, 0)[1] == 0
        for end in (begun, says_begun, go_on, says_go_on):
            os.close(end)

    def test_who_leaves_while_it_is_installed_gets_it_removed(self) -> None:
        log: list[str] = []
        installation = Installation(
            lambda: [Recorded("a", log, lambda: installation.drop("me")), Recorded("b", log)]
        )
        installation.hold("me")
        assert log[-2:] == ["-b", "-a"]

    def test_who_comes_and_goes_while_it_is_installed_leaves_it_installed(self) -> None:
        log: list[str] = []

        def another() -> None:
            installation.hold("another")
            installation.drop("another")

        installation = Installation(lambda: [Recorded("a", log, another), Recorded("b", log)])
        installation.hold("me")
        assert log[-2:] == ["+a", "+b"]
        log.clear()
        installation.drop("me")
        assert log == ["-b", "-a"]

    def test_an_error_is_raised_and_leaving_removes_what_was_installed(self) -> None:
        log: list[str] = []

        def fail() -> None:
            raise RuntimeError("half-way")

        installation = Installation(
            lambda: [Recorded("a", log), Recorded("b", log, fail), Recorded("c", log)]
        )
        with pytest.raises(RuntimeError, match="half-way"):
            installation.hold("me")
        installation.drop("me")
        assert log == ["+a", "+b", "-c", "-b", "-a"]
        installation.hold("me")
        assert log[5:] == ["+a", "+b", "+c"]


def test_every_step_is_done_and_the_first_error_is_raised() -> None:
    done: list[tuple[str, int]] = []

    def step(name: str) -> Callable[[int], None]:
        def do(argument: int) -> None:
            done.append((name, argument))
            if name in ("b", "c"):
                raise RuntimeError(name)

        return do

    with pytest.raises(RuntimeError, match="b"):
        patching.do_all([step(name) for name in "abcd"], 7)
    assert done == [(name, 7) for name in "abcd"]
    patching.do_all([step("a")], 1)


def test_no_two_patches_change_one_name() -> None:
    """The patches are installed in the order in which their files are found."""
    found = [place for patch in installed._patches() for place in getattr(patch, "places", tuple)()]
    assert len(found) > 100 and len({(id(each.owner), each.name) for each in found}) == len(found)
