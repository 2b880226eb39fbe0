"""What the Python files of a tree take from modules of the tree, and whether it is there. Nothing is imported.

`from x import name` and `x.name` where `x` is a module that the file imported count, in functions, too; so do dotted
names in strings (`patch("launcher.runtime.rank.main.build_model")`), the name in `setattr(x, "name", ...)`, and
programs that are strings. What a class or an object has is not looked at.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("launcher", "data_service", "encoder_core", "checkpoints", "tests")
_PLACES = {
    "": "",
    "launcher/maskfleet/": "maskfleet/",
    "tests/bench/": "",
}  # what modules there are called by
_DOTTED = re.compile(rf"({'|'.join(PACKAGES)})(\.[A-Za-z_]\w*)+")
_FILES = (".py", ".md", ".yaml", ".json", ".txt", ".sh", ".log")
_SETTERS = ("setattr", "delattr", "object", "getattr", "hasattr")


@dataclass(frozen=True)
class Use:
    """One name that a file takes from a module."""

    file: str
    line: int
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.module}.{self.name}"


class Tree:
    """Python files, their text by their paths from the root, and the modules that they are."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._trees = {file: ast.parse(text) for file, text in files.items()}
        self._modules = {name: file for file in self._trees for name in _module_names(file)}
        self._folders = {name.rpartition(".")[0] for name in self._modules}
        self._folders |= {parent for name in self._folders for parent in _parents(name)}
        self._names: dict[str, frozenset[str]] = {}

    def missing(self) -> list[Use]:
        """What files take that is not there."""
        return [use for use in self.uses if not self.has(use.module, use.name)]

    @cached_property
    def uses(self) -> list[Use]:
        return [use for file, tree in self._trees.items() for use in self._uses(file, tree)]

    def has(self, module: str, name: str) -> bool:
        return self.is_module(f"{module}.{name}") or name in self.names(module)

    def is_module(self, name: str) -> bool:
        return name in self._modules or name in self._folders

    def names(self, module: str) -> frozenset[str]:
        """What a module binds when it is imported. Of a folder, nothing."""
        if module not in self._names:
            file = self._modules.get(module)
            self._names[module] = frozenset(_bound(self._trees[file].body) if file else ())
        return self._names[module]

    def _uses(self, file: str, tree: ast.Module) -> Iterator[Use]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and self._ours(node.module):
                yield from (Use(file, node.lineno, str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                ours = [alias.name for alias in node.names if "." in alias.name and self._ours(alias.name)]
                yield from (Use(file, node.lineno, *_halves(name)) for name in ours)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._in_string(file, node)
        for node, module in self._attributes(tree.body, {}):
            name = node.attr if isinstance(node, ast.Attribute) else ast.literal_eval(node.args[1])
            yield Use(file, node.lineno, module, name)

    def _ours(self, module: str | None) -> bool:
        first = str(module).partition(".")[0]
        return first in PACKAGES or self.is_module(first)

    def _in_string(self, file: str, node: ast.Constant) -> Iterator[Use]:
        text = str(node.value)
        if _DOTTED.fullmatch(text) and not text.endswith(_FILES):
            module, name = _halves(text)
            while not self.is_module(module) and "." in module:
                module, name = _halves(module)
            yield Use(file, node.lineno, module, name)
        elif "\n" in text and re.search(rf"^\s*(from|import) ({'|'.join(PACKAGES)})\b", text, re.MULTILINE):
            try:
                program = ast.parse(text)
            except SyntaxError:  # a document
                return
            for use in self._uses(file, program):
                yield Use(file, node.lineno, use.module, use.name)

    def _attributes(
        self, body: list[ast.stmt], outer: Mapping[str, str], arguments: Iterable[str] = ()
    ) -> Iterator[tuple[ast.Attribute | ast.Call, str]]:
        """(`x.name` or `setattr(x, "name")`, the module that `x` is) in one scope and those inside it."""
        own, inner = _scope(body)
        taken = {name for node in own for name in _binds(node)} | set(arguments)
        known = {name: module for name, module in outer.items() if name not in taken}
        known |= {name: module for node in own for name, module in self._imports(node) if name not in taken}
        for node in own:
            if isinstance(node, ast.Attribute):
                of = node.value
            elif isinstance(node, ast.Call) and _names_a_string(node):
                of = node.args[0]
            else:
                continue
            module = self._module_of(of, known)
            if module is not None:
                yield node, module
        for scope in inner:
            if isinstance(scope, ast.ClassDef):
                yield from self._attributes(scope.body, known)
            elif isinstance(scope, ast.Lambda):
                yield from self._attributes([ast.Expr(scope.body)], known, _arguments(scope.args))
            else:
                yield from self._attributes(scope.body, known, _arguments(scope.args))

    def _imports(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """(name, module) that an import binds."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if self._ours(alias.name):
                    first = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and self._ours(node.module):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if self.is_module(module) and alias.name not in self.names(str(node.module)):
                    yield alias.asname or alias.name, module

    def _module_of(self, node: ast.expr, known: Mapping[str, str]) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self._module_of(node.value, known)
            module = f"{before}.{node.attr}"
            return module if before is not None and self.is_module(module) else None
        return None


Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef | ast.Lambda
Named = Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


def _scope(body: Iterable[ast.AST]) -> tuple[list[ast.AST], list[Scope]]:
    """The nodes of a scope without those of the scopes in it, and these. Comprehensions count as part of it."""
    own: list[ast.AST] = []
    inner: list[Scope] = []
    left = list(body)
    while left:
        node = left.pop()
        own.append(node)
        if isinstance(node, Scope):
            inner.append(node)
            outside = [
                getattr(node, part, None) for part in ("decorator_list", "bases", "keywords", "returns")
            ]
            left += [one for part in outside if part for one in (part if isinstance(part, list) else [part])]
            if not isinstance(node, ast.ClassDef):
                left.append(node.args)
        else:
            left += ast.iter_child_nodes(node)
    return own, inner


def _binds(node: ast.AST) -> Iterator[str]:
    """Names that a node binds to what is no import."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    elif isinstance(node, Named) and node.name:
        yield node.name


def _arguments(arguments: ast.arguments) -> set[str]:
    return {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}


def _names_a_string(call: ast.Call) -> bool:
    """`patch.setattr(x, "name", ...)`, `patch.object(x, "name")`, `getattr(x, "name")`."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _SETTERS or len(call.args) < 2:
        return False
    return isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str)


def _bound(body: list[ast.stmt]) -> set[str]:
    """Names that are there once the statements have run. What only type checkers import is not."""
    kept = [
        node for node in body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    own, _ = _scope(kept)
    names = {name for node in own for name in _binds(node)}
    for node in own:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign) and "__getattr__" in names and _is_all(node):
            names |= set(ast.literal_eval(node.value))
    return names | {"__file__", "__name__", "__doc__", "__path__"}


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def _module_names(file: str) -> Iterator[str]:
    """The names by which a file may be imported."""
    for place, called in _PLACES.items():
        if file.startswith(place):
            parts = Path(called + file.removeprefix(place)).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _halves(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last
