"""Recipes stay small: half of them at most 30 lines of code, none over 80."""

from __future__ import annotations

import ast
import inspect
import statistics
import textwrap

from fedloom.spec.registry import METHODS


def code_lines(fn: object) -> int:
    """Lines of a function, decorators and signature included, without docstring, comments and blank lines."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(fn)))  # type: ignore[arg-type]
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    first = node.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    spoken = range(first.lineno, (first.end_lineno or first.lineno) + 1) if text else range(0)
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for i, line in lines if i not in spoken and line.strip() and not line.strip().startswith("#"))


def test_the_count_counts_code() -> None:
    def sample(x: int) -> int:
        """Two lines

        that do not count.
        """
        # nor does this
        return x

    assert code_lines(sample) == 2


def test_recipes_are_small() -> None:
    sizes = {
        name: code_lines(entry.fn) for name, entry in METHODS.items() if entry.fn.__module__.startswith("fedloom.")
    }
    assert len(sizes) >= 43
    assert statistics.median(sizes.values()) <= 30
    assert {name: size for name, size in sizes.items() if size > 80} == {}
