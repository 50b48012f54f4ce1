"""The rules: what each finds in a source, a syntax tree with resolved names, for a target.

A rule is a function of a node that yields findings.
"""

from __future__ import annotations

import ast
import enum
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchdevice.check.names import Names
from torchdevice.check.target import Target


class Verdict(enum.Enum):
    """The meaning of a line for a target, the most important first."""

    CHANGE = "change"
    """The program must be changed, or raises an error."""
    APPROXIMATE = "approximate"
    """The program runs. It may compute or read other numbers, or take another branch."""
    HANDLED = "handled"
    """The program runs as it is, with the same meaning."""


class Finding(NamedTuple):
    """Something at a line of a source that concerns a target.

    Attributes:
        path: The file.
        line: Line number in the file, from 1.
        rule: The name of the rule that found it.
        verdict: What it means.
        remedy: What is done about it or what to do, in one sentence.
        column: Column of the first character, from 1.
        text: The source of the line.
        cell: Number of the code cell of a notebook, from 1; 0 elsewhere.
        first: Number of the first line of the statement.
        last: Number of the last line of the statement, or of its header where it has a body.
        leaves_trace: Whether a report of the program's run shows it when the line runs.
    """

    path: str
    line: int
    rule: str
    verdict: Verdict
    remedy: str
    column: int = 1
    text: str = ""
    cell: int = 0
    first: int = 0
    last: int = 0
    leaves_trace: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the finding's fields for ``--json``."""
        names = ("path", "line", "rule", "verdict", "remedy", "column", "text")
        return {**{name: getattr(self, name) for name in names}, "verdict": self.verdict.value}


class Found(NamedTuple):
    """The result of a rule at a node.

    Attributes:
        verdict: What it means.
        remedy: What is done about it or what to do, in one sentence.
        leaves_trace: Whether a report of the program's run shows it when the line runs.
    """

    verdict: Verdict
    remedy: str
    leaves_trace: bool = True


def without_trace(remedy: str) -> Found:
    """Return the finding of an approximation that no report of the program's run shows."""
    return Found(Verdict.APPROXIMATE, remedy, leaves_trace=False)


class Rule(NamedTuple):
    """A rule.

    Attributes:
        name: Its name in ``--select`` and in comments.
        finds: The calls that it finds and their effect, in a few sentences.
        kinds: The kinds of nodes that it looks at.
        look: Yields its findings at a node.
        of_cuda: Whether it looks for code that needs CUDA, so that nothing is found for CUDA
            itself.
        of_lacks: Whether it looks for what the target's profile lacks, so that nothing is found
            without one.
    """

    name: str
    finds: str
    kinds: tuple[type[ast.AST], ...]
    look: Callable[[ast.AST, View], Iterator[Found]]
    of_cuda: bool
    of_lacks: bool


RULES: dict[str, Rule] = {}


Look = Callable[..., Iterator[Found]]
"""Yields the findings of a rule at a node, in a view."""


def rule(
    name: str, *kinds: type[ast.AST], of_cuda: bool = False, of_lacks: bool = False
) -> Callable[[Look], Look]:
    """Register a function as a rule for kinds of nodes. Its docstring describes the findings."""

    def register(look: Look) -> Look:
        RULES[name] = Rule(
            name, " ".join((look.__doc__ or "").split()), kinds, look, of_cuda, of_lacks
        )
        return look

    return register


SYNTAX = "syntax"
"""The rule of files that cannot be checked."""


@rule(SYNTAX)
def _syntax(node: ast.AST, view: View) -> Iterator[Found]:
    """A file that is no Python 3: a syntax error, bytes that are no text, a notebook that is no
    JSON.
    """
    yield from ()


# The names that rules have for functions, methods and arguments.

FUNCTIONS_OF_WORDS = frozenset(
    {
        "AssertionError",
        "Exception",
        "RuntimeError",
        "ValueError",
        "add_argument",
        "count",
        "debug",
        "delattr",
        "endswith",
        "error",
        "find",
        "get_device_module",
        "getattr",
        "hasattr",
        "import_module",
        "index",
        "info",
        "isinstance",
        "log",
        "print",
        "replace",
        "setattr",
        "split",
        "startswith",
        "strip",
        "warning",
        "write",
    }
)

CLASSES_OF_DEVICES = frozenset(["torch.Generator", "torch.device", "torch.set_default_device"])

PUT_ON_A_DEVICE = frozenset(
    [
        "cuda",
        "new_empty",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
        "to",
        "to_empty",
        "type",
    ]
)

KEYWORDS_OF_WORDS = frozenset(["backend", "choices", "help", "msg", "sort_by"])

FUNCTIONS_OF_RANKS = frozenset(
    [
        "torch.cuda.current_device",
        "torch.distributed.get_node_local_rank",
        "torch.distributed.get_rank",
    ]
)

TAKE_A_DTYPE = frozenset(
    ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to", "type"]
)

FUNCTIONS_ABOUT_DTYPES = frozenset(["torch.can_cast", "torch.finfo", "torch.promote_types"])

KEEP_THE_DTYPE = frozenset(
    {
        "clone",
        "contiguous",
        "detach",
        "permute",
        "requires_grad_",
        "reshape",
        "squeeze",
        "transpose",
        "unsqueeze",
        "view",
    }
)

FUNCTIONS_OF_ARRAYS = frozenset(
    ["torch.as_tensor", "torch.asarray", "torch.from_numpy", "torch.tensor"]
)

FUNCTIONS_THAT_MAKE_FLOAT64 = frozenset(
    {
        "numpy.empty",
        "numpy.eye",
        "numpy.linspace",
        "numpy.logspace",
        "numpy.ones",
        "numpy.random.normal",
        "numpy.random.rand",
        "numpy.random.randn",
        "numpy.random.random",
        "numpy.random.uniform",
        "numpy.zeros",
    }
)

CAUGHT = frozenset(["BaseException", "Exception", "ImportError", "ModuleNotFoundError"])

OPERATORS = frozenset(
    ["torch", "torch.fft", "torch.linalg", "torch.nn.functional", "torch.special"]
)

NO_TENSORS = frozenset(
    {
        "allclose",
        "autocast",
        "compile",
        "device",
        "dtype",
        "enable_grad",
        "equal",
        "finfo",
        "get_default_dtype",
        "get_num_threads",
        "get_rng_state",
        "iinfo",
        "inference_mode",
        "initial_seed",
        "is_complex",
        "is_floating_point",
        "is_tensor",
        "load",
        "manual_seed",
        "meshgrid",
        "no_grad",
        "numel",
        "save",
        "seed",
        "set_default_device",
        "set_default_dtype",
        "set_default_tensor_type",
        "set_float32_matmul_precision",
        "set_grad_enabled",
        "set_num_threads",
        "set_printoptions",
        "typename",
        "use_deterministic_algorithms",
        "vmap",
    }
)

_MAX_DEPTH = 12
"""How deep an expression, and the assignments to its variables, are followed."""


class View(Names):
    """A parsed source and a target.

    Args:
        tree: The source.
        target: The device that stands in.
        path: The file of the source.
    """

    def __init__(self, tree: ast.Module, target: Target, path: str = ""):
        super().__init__(tree)
        self.target = target
        self._path = Path(os.path.abspath(path))

    def is_inside(self, package: str) -> bool:
        """Return whether the source is a part of a package, by the folders that it is in."""
        return any(
            folder.name == package and (folder / "__init__.py").is_file()
            for folder in self._path.parents
        )

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that a node is a part of."""
        return self.parents.get(node)

    def called(self, node: ast.AST) -> str:
        """Return the dotted name of the function that a call calls; empty for anything else."""
        return (self.dotted(node.func) or "") if isinstance(node, ast.Call) else ""

    def method(self, node: ast.AST) -> str:
        """Return the name of the method that a call calls; "" for a module's function."""
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and self.dotted(node.func) is None
        ):
            return node.func.attr
        return ""

    def is_guarded(self, node: ast.AST) -> bool:
        """Return whether the program goes on where the line of a node raises an ``ImportError``."""
        for part, each in self.upwards(node):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return False
            if (
                isinstance(each, ast.Try)
                and part in each.body
                and any(map(_catches, each.handlers))
            ):
                return True
        return False

    def is_tensor(self, node: ast.AST) -> bool:
        """Return whether an expression is surely a tensor: from a torch function or a tensor."""

        def of_call(call: ast.Call) -> Any:
            function = self.called(call)
            return _makes_tensors(function) if function else getattr(call.func, "value", False)

        return bool(self.surely(node, of_call))

    def surely(
        self, node: ast.AST, of_call: Callable[[ast.Call], Any], depth: int = 0, known: Any = None
    ) -> Any:
        """Return a fact that holds for all possible values of an expression, from the calls behind
        it.

        Args:
            node: The expression.
            of_call: Returns the fact about a call's result, false if there is none; or an
                expression with the same fact.
            depth: How deep the expression is.
            known: The answers so far: many ways lead to an expression, and each step would multiply
                them.
        """
        known = {} if known is None else known
        if depth > _MAX_DEPTH or node in known:
            return known.get(node, False)
        known[node] = False  # where values go in a circle
        inner = None
        if isinstance(node, ast.Call):
            inner = of_call(node)
        elif isinstance(node, ast.Subscript):
            inner = node.value
        if inner and not isinstance(inner, ast.AST):
            known[node] = inner
        elif isinstance(node, ast.BinOp):
            sides = (
                self.surely(side, of_call, depth + 1, known) for side in (node.left, node.right)
            )
            known[node] = next(filter(None, sides), False)
        else:
            sources = [inner] if inner else self.flowing(node)
            found = [self.surely(each, of_call, depth + 1, known) for each in sources]
            known[node] = found[-1] if found and all(found) else False
        return known[node]

    def texts(self, node: ast.AST | None) -> Iterator[ast.Constant]:
        """Yield the literal texts of an expression, by its branches and variables."""
        seen: set[ast.AST] = set()  # many ways lead to an expression
        ahead = [node]
        while ahead:
            each = ahead.pop()
            if each is None or each in seen:
                continue
            seen.add(each)
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each
            elif isinstance(each, ast.IfExp):
                ahead += each.orelse, each.body
            else:
                ahead += reversed(
                    each.values if isinstance(each, ast.BoolOp) else self.values(each)
                )


def names_option(call: ast.AST, word: str) -> bool:
    """Return whether a call that adds an option of the command line has a word in its names."""
    return any(
        isinstance(each, ast.Constant) and word in str(each.value)
        for each in getattr(call, "args", [])
    )


def _catches(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or getattr(kind, "id", getattr(kind, "attr", "")) in CAUGHT for kind in kinds
    )


def _makes_tensors(function: str) -> bool:
    module, _, name = function.rpartition(".")
    return module in OPERATORS and name[:1].islower() and name not in NO_TENSORS
