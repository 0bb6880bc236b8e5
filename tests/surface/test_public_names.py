"""`fedloom.__all__` is the public surface: it must be true, sorted, and safe from its own submodules."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedloom

SUBMODULES = {module.name for module in pkgutil.iter_modules(fedloom.__path__)}


def imported_as_modules(source: str) -> set[str]:
    """The submodules that the text of an `__init__.py` imports as modules, not for a name inside them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedloom.")}
        elif isinstance(node, ast.ImportFrom):
            whole = (node.level, node.module) in {(0, "fedloom"), (1, None)}
            found |= {alias.asname or alias.name for alias in node.names if whole}
    return found


def clashes(public: set[str], submodules: set[str], source: str) -> set[str]:
    """Public objects, other than submodules made public on purpose, that share a submodule's name."""
    return (public & submodules) - imported_as_modules(source)


@pytest.mark.parametrize("name", fedloom.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert hasattr(fedloom, name), f"fedloom.__all__ names {name!r}, which fedloom does not have"


def test_names_are_sorted_and_unique() -> None:
    assert list(fedloom.__all__) == sorted(set(fedloom.__all__))


def test_every_public_object_is_listed() -> None:
    found = {n for n, v in vars(fedloom).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert found - {"annotations"} <= set(fedloom.__all__)


def test_no_submodule_bears_the_name_of_a_public_function() -> None:
    # Importing fedloom.x sets the attribute x of fedloom: a function x would silently become a module,
    # and only in some order of imports. So the text is judged, not the objects of this process.
    source = Path(fedloom.__file__).read_text(encoding="utf-8")
    assert clashes(set(fedloom.__all__), SUBMODULES, source) == set()


@pytest.mark.parametrize(
    ("public", "source", "expected"),
    [
        ({"fit"}, "from fedloom.run import fit", set()),
        ({"data", "models"}, "from fedloom import data\nfrom . import models", set()),
        ({"fit", "run"}, "from fedloom.run import fit, run", {"run"}),
        ({"data", "run"}, "import fedloom.data\nfrom .elsewhere import run", {"run"}),
    ],
)
def test_the_rule_sees_a_clash(public: set[str], source: str, expected: set[str]) -> None:
    assert clashes(public, {"data", "elsewhere", "models", "run"}, source) == expected


def test_import_leaves_the_optional_packages_alone() -> None:
    optional = ["flwr", "matplotlib", "PIL", "pydantic", "scipy", "sklearn", "torchmetrics", "torchvision"]
    code = f"import sys, fedloom; sys.exit(' '.join(m for m in {optional!r} if m in sys.modules) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`import fedloom` also imports: {done.stderr.strip()}"
