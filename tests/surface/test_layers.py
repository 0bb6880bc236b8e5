"""The layers of the package: imports go downwards only.

All imports are read, those inside functions and under TYPE_CHECKING too, and modules that
`importlib.import_module` gets by name. A package or module may import what stands in its own line
of LAYERS or in a line before it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedloom

HOME = Path(fedloom.__file__).parent
NAME = fedloom.__name__

LAYERS = """
    errors version tensors devices torch_internals
    ops rng
    tasks
    spec
    plugins
    methods
    data
    models
    network
    clients
    store
    engines
    rounds
    runs
    api
    contract
    gpu
    theory
    comparison
    flower
    reports
    cli __main__
"""
RANK = {name: rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}

# Exceptions, of three kinds.
PUBLIC = {""}
"""Modules that may import everything: the package itself, which lists the public names.

The command line needs no exception, since it is the highest layer.
"""

LOADERS = {("engines.load", "load"): {"gpu", "flower"}}
"""Functions that load an optional package: (module, function) -> packages."""

MOST_PACKAGES, MOST_MODULES = 21, 7


@dataclass(frozen=True)
class Import:
    """One import of a module of the package by another."""

    importer: str
    imported: str
    function: str  # the outermost function that it stands in, or empty
    place: str  # file:line


def modules() -> dict[str, Path]:
    """Modules of the package by dotted name, without the package's own."""
    found = {}
    for path in sorted(HOME.rglob("*.py")):
        parts = path.relative_to(HOME).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(module: str, tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """What a module imports: module, the function that it stands in, line."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name == NAME or alias.name.startswith(f"{NAME}."):
                        yield alias.name[len(NAME) + 1 :], function, child.lineno
            elif isinstance(child, ast.ImportFrom):
                source = child.module or ""
                if child.level:  # relative imports are not used here; they would be read wrongly
                    raise AssertionError(f"{module}:{child.lineno}: a relative import")
                if source == NAME or source.startswith(f"{NAME}."):
                    base = source[len(NAME) + 1 :]
                    for alias in child.names:
                        inner = f"{base}.{alias.name}" if base else alias.name
                        yield inner if inner in MODULES else base, function, child.lineno
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module") and child.args:
                given = child.args[0]
                if isinstance(given, ast.Constant) and str(given.value).startswith(f"{NAME}."):
                    yield str(given.value)[len(NAME) + 1 :], function, child.lineno
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not function
            yield from visit(child, child.name if inside else function)

    yield from visit(tree, "")


def all_imports() -> list[Import]:
    found = []
    for module, path in MODULES.items():
        for imported, function, line in imports_of(module, ast.parse(path.read_text(encoding="utf-8"))):
            found.append(Import(module, imported, function, f"{path.relative_to(HOME.parent)}:{line}"))
    return found


IMPORTS = all_imports()


def top(module: str) -> str:
    return module.partition(".")[0]


def is_upward(item: Import) -> bool:
    """Whether an import points at a higher layer; the package itself counts as the highest."""
    if item.importer in PUBLIC:
        return False
    if top(item.imported) in LOADERS.get((item.importer, item.function), ()):
        return False
    highest = max(RANK.values()) + 1
    return RANK.get(top(item.imported), highest) > RANK.get(top(item.importer), -1)


def test_every_package_and_module_has_a_layer() -> None:
    names = {top(m) for m in MODULES} - {""}
    assert names - set(RANK) == set(), "these have no layer"


def test_imports_go_downwards_only() -> None:
    wrong = [i for i in IMPORTS if is_upward(i)]
    lines = [f"{i.place}: {i.importer} -> {i.imported or NAME}" for i in wrong]
    assert not wrong, f"{len(wrong)} upward imports:\n" + "\n".join(lines)


def test_the_top_is_small() -> None:
    packages = {top(m) for m, path in MODULES.items() if path.name == "__init__.py" and m}
    loose = {m for m in MODULES if m and "." not in m} - packages - {"__main__"}
    assert len(packages) <= MOST_PACKAGES, sorted(packages)
    assert len(loose) <= MOST_MODULES, sorted(loose)


def cycles(package: str) -> list[list[str]]:
    """Cycles of modules inside a package (strongly connected components, by Tarjan's algorithm)."""
    inside = {m for m in MODULES if top(m) == package and m != package}  # the package's own file re-exports
    edges: dict[str, set[str]] = {m: set() for m in inside}
    for i in IMPORTS:
        if i.importer in inside and i.imported in inside and i.importer != i.imported:
            edges[i.importer].add(i.imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def walk(m: str) -> None:
        index[m] = low[m] = len(index)
        stack.append(m)
        for n in sorted(edges[m]):
            if n not in index:
                walk(n)
                low[m] = min(low[m], low[n])
            elif n in stack:
                low[m] = min(low[m], index[n])
        if low[m] == index[m]:
            part = stack[stack.index(m) :]
            del stack[stack.index(m) :]
            if len(part) > 1:
                found.append(sorted(part))

    for m in sorted(inside):
        if m not in index:
            walk(m)
    return found


@pytest.mark.parametrize("package", sorted({top(m) for m in MODULES if "." in m}))
def test_no_cycle_inside_a_package(package: str) -> None:
    assert cycles(package) == []


if __name__ == "__main__":
    for pair in sorted({(i.importer, i.imported) for i in IMPORTS if is_upward(i)}):
        print(f"    {pair},".replace("'", '"'))  # noqa: T201
    for name in sorted({top(m) for m in MODULES if "." in m}):
        for cycle in cycles(name):
            print("    # a cycle:", ", ".join(cycle))  # noqa: T201
