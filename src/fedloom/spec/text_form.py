"""The text form of a method: ``fedprox(mu=0.01) + isr(points=3)``. Parsed with ``ast``; nothing is evaluated."""

from __future__ import annotations

import ast
from typing import Any

from fedloom.errors import UnknownName, UserError
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import METHODS, PLUGINS, VALUES


def parse_call(text: str, *, what: str = "method") -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Parts of ``name(args) + name + ...``: name, positional and keyword arguments of each.

    Example:
        >>> parse_call("fedprox(mu=0.01) + clip(1.0)")
        [('fedprox', (), {'mu': 0.01}), ('clip', (1.0,), {})]
    """
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{what}: expected text such as 'fedavg', got {text!r}")
    if len(text) > 4000:
        raise UserError(f"{what}: the text has {len(text)} characters; at most 4000 make sense")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise UserError(f"{what} {text!r} cannot be read: {reason}; write name(key=value) + name(...)") from None
    parts: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        parts.append(tree.right)
        tree = tree.left
    parts.append(tree)
    return [_part(node, text, what) for node in reversed(parts)]


def _part(node: ast.expr, text: str, what: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, (), {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if any(k.arg is None for k in node.keywords):
            raise UserError(f"{what} {text!r}: ** is not allowed")
        args = tuple(_value(a, text, what) for a in node.args)
        return node.func.id, args, {str(k.arg): _value(k.value, text, what) for k in node.keywords}
    raise UserError(
        f"{what} {text!r}: {ast.unparse(node)[:60]!r} is not a name or a call; write name(key=value) + name(...)"
    )


def _value(node: ast.expr, text: str, what: str) -> Any:
    """A Python literal; ``inf`` and calls such as ``gaussian(precision=2)`` are understood too."""
    if isinstance(node, ast.Name) and node.id == "inf":
        return float("inf")
    if ast.unparse(node) == "-inf":
        return float("-inf")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in VALUES:
        name, args, kwargs = _part(node, text, what)
        try:
            return VALUES[name](*args, **kwargs)
        except TypeError as error:
            raise UserError(f"{what} {text!r}: {error}") from None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UserError(
            f"{what} {text!r}: {ast.unparse(node)[:60]!r} is not a literal (number, text, list, True, None, inf)"
        ) from None


def method(text: str | Method) -> Method:
    """A method from its text form.

    Args:
        text: ``name`` or ``name(key=value)``, plug-ins joined by ``+``; a method is returned as it is.

    Example:
        >>> print(method("fedper + proximal(mu=0.1)"))
        fedper() + proximal(mu=0.1)
    """
    if isinstance(text, Method):
        return text
    (name, args, kwargs), *rest = parse_call(text)
    if name not in METHODS:
        if name in PLUGINS:
            raise UserError(
                f"{name!r} is a plug-in and cannot stand first; write for example 'fedavg + {text.strip()}'"
            )
        raise UnknownName("method", name, METHODS)
    base = METHODS[name].fn(*args, **kwargs)
    plugins = []
    for name, args, kwargs in rest:
        if name not in PLUGINS:
            if name in METHODS:
                instead = METHODS[name].plugin
                hint = f"use its plug-in {instead!r} instead" if instead else "only plug-ins can stand further right"
                raise UserError(f"{name!r} is a method and can only stand first; {hint}")
            raise UnknownName("plug-in", name, PLUGINS)
        plugins.append(PLUGINS[name].fn(*args, **kwargs))
    return compose(base, *plugins)


def can_rebuild(recipe: Method) -> bool:
    """Return whether the text form of a method names all its parts and can be parsed.

    Example:
        >>> import fedloom as fl
        >>> can_rebuild(fl.fedper()), can_rebuild(fl.fedper().claiming("the gate", "mine"))
        (True, False)
    """
    if not recipe.text_is_complete:
        return False
    try:
        method(recipe.text)
    except UserError:  # for example a prior of the user's own class as an argument
        return False
    return True
