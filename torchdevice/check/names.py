"""Resolves names of a source: the dotted name each was imported as, and the values it was given.

Python's rules of scopes hold: a function's own names hide those of the file, and a class's names
are not those of its methods. Nothing is evaluated. A name that is imported anywhere in its scope
means the import, because programs set it to None where the import fails.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SPLIT = frozenset({*_FUNCTIONS, ast.ClassDef})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = frozenset({ast.Module, *_SPLIT, *_COMPREHENSIONS})

_LEAVES = frozenset({ast.Name, ast.Constant})
"""Nodes whose parts are of no interest."""

_BIND_NOTHING = _LEAVES | {
    ast.Attribute,
    ast.keyword,
    ast.arg,
    ast.Expr,
    ast.Subscript,
    ast.Compare,
    ast.If,
    ast.Tuple,
}
"""The most frequent nodes that give no name a value."""

_MAX_STEPS = 20
"""The most assignments that are followed from a name to its meaning."""


class _Given(NamedTuple):
    """One way in which a name gets a value.

    Attributes:
        imported: The dotted name that was imported; or empty.
        value: The expression that was assigned; None for one that is not known.
    """

    imported: str = ""
    value: ast.expr | None = None


class _Scope:
    def __init__(self, node: ast.AST, around: _Scope | None):
        self.node = node
        self.around = around
        self.given: defaultdict[str, list[_Given]] = defaultdict(list)
        self.elsewhere: set[str] = set()
        self.stars: list[str] = []

    def owner(self, name: str) -> _Scope | None:
        """Return the scope whose name this is, seen from here."""
        scope: _Scope | None = self
        while scope is not None:
            visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if visible and name in scope.given and name not in scope.elsewhere:
                return scope
            scope = scope.around
        return None


class Names:
    """The meanings of the names in a parsed source.

    Args:
        tree: The source.

    Attributes:
        nodes: All nodes, in the order of the source.
        parents: Node -> the node that it is a part of.
        attributes: Name of an attribute -> the expressions that the source assigns to attributes of
            that name.
        defined: The names of all functions, methods and classes that the source defines.
        returned: Name of a function or method -> the expressions that the source returns from it.
        uses_torch: Whether the source imports torch or a part of it.
    """

    def __init__(self, tree: ast.Module):
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.attributes: dict[str, list[ast.expr]] = {}
        self.defined: set[str] = set()
        self.returned: dict[str, list[ast.expr]] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self.uses_torch = False
        self._scopes: dict[ast.AST, _Scope] = {}
        self._dotted: dict[ast.AST, str | None] = {}
        self._read(tree)

    def _read(self, tree: ast.Module) -> None:
        """Visit every node without recursion: sources may be nested deeper than Python's stack."""
        stack: list[tuple[ast.AST, _Scope | None]] = [(tree, None)]
        while stack:
            node, scope = stack.pop()
            kind = type(node)  # found in a set sooner than by isinstance() among many classes
            inner = _Scope(node, scope) if kind in _SCOPES else scope
            assert inner is not None
            self.nodes.append(node)
            self._scopes[node] = inner if scope is None else scope
            if kind in _LEAVES:
                continue
            if kind not in _BIND_NOTHING:
                self._note(node, inner, scope)
            is_split = scope is not None and kind in _SPLIT
            for child in reversed(list(ast.iter_child_nodes(node))):
                if not isinstance(child, ast.expr_context):
                    self.parents[child] = node
                    stack.append((child, scope if is_split and _is_outside(node, child) else inner))

    def _note(self, node: ast.AST, inner: _Scope, scope: _Scope | None) -> None:
        """Note the names that a node binds."""
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and scope is not None
        ):
            scope.given[node.name].append(_Given())
            self.defined.add(node.name)
        if isinstance(node, _FUNCTIONS):
            for name, default in _parameters(node.args):
                inner.given[name].append(_Given(value=default))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            roots = {name.partition(".")[0] for name in _note_import(node, inner)}
            self.uses_torch |= "torch" in roots
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            inner.elsewhere.update(node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            inner.given[node.name].append(_Given())
        elif isinstance(node, ast.Call):
            self._calls.setdefault(_own_function(node), []).append(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned.setdefault(getattr(inner.node, "name", ""), []).append(node.value)
        self._note_assignments(node, inner)

    def _note_assignments(self, node: ast.AST, inner: _Scope) -> None:
        for target, value in _assignments(node):
            if isinstance(target, ast.Name):
                inner.given[target.id].append(_Given(value=value))
            elif isinstance(target, ast.Attribute) and value is not None:
                self.attributes.setdefault(target.attr, []).append(value)

    # ---- questions -------------------------------------------------------------------------------

    def dotted(self, node: ast.AST | None) -> str | None:
        """Return an expression's dotted name, by imports and aliases: ``torch.nn.functional.pad``.

        Returns None for anything else, such as a variable that holds a tensor.
        """
        if not isinstance(node, (ast.Attribute, ast.Name)):
            return None
        if node not in self._dotted:  # many rules ask for one name
            self._dotted[node] = self._find_dotted(node)
        return self._dotted[node]

    def _find_dotted(self, node: ast.AST | None) -> str | None:
        words: list[str] = []
        for _ in range(_MAX_STEPS):
            while isinstance(node, ast.Attribute):
                words.append(node.attr)
                node = node.value
            if not isinstance(node, ast.Name):
                return None
            meant = self._meant(node)
            if isinstance(meant, str):
                return ".".join([meant, *reversed(words)])
            node = meant
        return None

    def _meant(self, node: ast.Name) -> str | ast.expr | None:
        """Return the dotted name a name was imported as, or the one expression assigned to it."""
        scope = self._scopes[node].owner(node.id)
        if scope is None:
            starred: _Scope | None = self._scopes[node]
            while starred is not None and not starred.stars:
                starred = starred.around
            return f"{starred.stars[-1]}.{node.id}" if starred is not None else None
        given = scope.given[node.id]
        imported = [each.imported for each in given if each.imported]
        if imported:
            return imported[-1]
        return given[0].value if len(given) == 1 else None

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that a source assigns to the variable or attribute read."""
        if isinstance(node, ast.Attribute):
            return self.attributes.get(node.attr, [])
        if not isinstance(node, ast.Name):
            return []
        scope = self._scopes[node].owner(node.id)
        if scope is not None:
            return [each.value for each in scope.given[node.id] if each.value is not None]
        return []

    def flowing(self, node: ast.AST) -> list[ast.expr]:
        """Return :meth:`values` of a node, and what flows there through functions of the source.

        That is what calls pass to a parameter, and what the function that is called returns.
        Functions that call themselves make circles.
        """
        if isinstance(node, ast.Call):
            if self.dotted(node.func) is None:
                return self.returned.get(_own_function(node), [])
            return []
        scope = self._scopes[node].owner(node.id) if isinstance(node, ast.Name) else None
        found = self.values(node)
        if (
            isinstance(node, ast.Name)
            and scope is not None
            and isinstance(scope.node, ast.FunctionDef)
        ):
            names = [name for name, _ in _parameters(scope.node.args) if name != "self"]
            for call in self._calls.get(scope.node.name, []) if node.id in names else ():
                passed = argument(call, names.index(node.id), node.id)
                found = [*found, passed] if passed is not None else found
        return found

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that a node is a part of, the innermost first."""
        return (whole for _, whole in self.upwards(node))

    def upwards(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield the nodes around a node, innermost first, each with its part that holds it."""
        while node in self.parents:
            part, node = node, self.parents[node]
            yield part, node


def argument(call: ast.Call, position: int | None, *names: str) -> ast.expr | None:
    """Return a call's argument by position or one of its names; None if it is missing."""
    for keyword in call.keywords:
        if keyword.arg in names:
            return keyword.value
    positional = call.args[: (position or 0) + 1]
    if (
        position is None
        or len(positional) <= position
        or any(isinstance(each, ast.Starred) for each in positional)
    ):
        return None
    return positional[position]


def _own_function(call: ast.Call) -> str:
    """Return the name of the function, or of ``self``'s method, that a call may call; else ""."""
    of_self = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "self"
    return call.func.attr if of_self else getattr(call.func, "id", "")  # type: ignore[attr-defined]


def _is_outside(node: Any, child: ast.AST) -> bool:
    """Return whether part of a definition is in the outer scope: decorators, bases, defaults."""
    body = node.body if isinstance(node.body, list) else [node.body]
    return child not in body and not isinstance(child, ast.arguments)


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the parameters of a function, with their defaults."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    given = zip(positional, missing + list(arguments.defaults), strict=True)
    for argument, default in (
        *given,
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ):
        yield argument.arg, default
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            yield rest.arg, None


def _note_import(node: ast.Import | ast.ImportFrom, scope: _Scope) -> Iterator[str]:
    """Note the names that an import binds, and yield the modules that it imports."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            first = alias.name.partition(".")[0]
            scope.given[alias.asname or first].append(_Given(alias.name if alias.asname else first))
            yield alias.name
            continue
        module = f"{'.' * node.level}{node.module or ''}"
        yield module
        if alias.name == "*":
            scope.stars.append(module)
        else:
            scope.given[alias.asname or alias.name].append(_Given(f"{module}.{alias.name}"))


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the targets a node assigns to, with the value if it is one expression."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield node.target, node.value
    elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _unpacked(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _unpacked(node.optional_vars, None)


def _unpacked(
    target: ast.expr, value: ast.expr | None
) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield (target.value if isinstance(target, ast.Starred) else target), value
        return
    # Such as major, minor = get_device_capability().
    parts = value if isinstance(value, ast.Call) else None
    values: list[ast.expr | None] = [parts] * len(target.elts)
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        values = list(value.elts)
    for each, part in zip(target.elts, values, strict=True):
        yield from _unpacked(each, part)
