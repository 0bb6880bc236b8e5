"""Arrays inside an object array of an npz file, read without unpickling.

PFLlib stores each client as `np.savez_compressed(file, data={"x": ..., "y": ...})`. numpy writes such a
dictionary as a pickle, and loading a pickle can run any code. This reader never does: `pickletools` splits
the stream into opcodes (it only parses), and the small machine below knows the dozen opcodes that numbers,
lists, dictionaries and numpy arrays need. A global is a name, never an import; the only "calls" are the four
that describe a numpy array, and they are carried out here, on plain numeric types. Everything else is
refused.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.sets.download import DAMAGED
from fedloom.errors import UserError

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_RECONSTRUCT = {f"{m} _reconstruct" for m in _MODULES}
_SCALAR = {f"{m} scalar" for m in _MODULES}
_ENCODE = {"_codecs encode"}
_DTYPE, _NDARRAY = "numpy dtype", "numpy ndarray"
_EMPTY = "__builtin__ bytes"
_KNOWN = _RECONSTRUCT | _SCALAR | _ENCODE | {_DTYPE, _NDARRAY, _EMPTY}

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS))
_SKIPPED = frozenset(("PROTO", "FRAME"))
_BROKEN = (*DAMAGED, IndexError, TypeError, AttributeError, OverflowError, struct.error)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Refused(Exception):
    """The stream holds something that is not numbers in lists, dictionaries and arrays."""


class _Name(str):
    """A global that the stream names."""


class _Mark:
    """Where a run of items begins on the stack."""


class _Dtype:
    """A plain numeric or object type under construction."""

    def __init__(self, code: str) -> None:
        self.type = np.dtype(code)
        if self.type.kind not in "biufO" or self.type.hasobject != (self.type.kind == "O"):
            raise _Refused(f"values of type {code!r}")

    def build(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise _Refused(f"byte order {order!r}")
        if order in "<>" and self.type.kind != "O":
            self.type = self.type.newbyteorder(order)


class _Array:
    """An array under construction."""

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] | list[Any] = []

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not all(isinstance(n, int) for n in shape):
            raise _Refused("an array without type or shape")
        if dtype.type.kind == "O":
            if not isinstance(data, list) or len(shape) > 2 or len(data) != math.prod(shape):
                raise _Refused("an array of objects that is no list")
            width = shape[1] if len(shape) == 2 else 0
            self.value = [data[i * width : (i + 1) * width] for i in range(shape[0])] if width else data
        else:
            flat = np.frombuffer(data, dtype.type)
            self.value = flat.reshape(shape, order="F" if fortran else "C")


def _plain(value: Any) -> Any:
    """Arrays under construction replaced by what they are."""
    if isinstance(value, _Array):
        return value.value if isinstance(value.value, np.ndarray) else _plain(value.value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, (_Name, _Dtype, _Mark)):
        raise _Refused(f"a bare {type(value).__name__.strip('_').lower()}")
    return value


class _Machine:
    """Interprets the stream on a stack of plain values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return _plain(self.stack.pop())
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                self.stack.append(argument)
            elif name in _TUPLES:
                self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
            elif name not in _SKIPPED:
                step = getattr(self, f"_{name.lower()}", None)
                if step is None:
                    raise _Refused(f"the instruction {name}")
                step(argument)
        raise _Refused("no end")

    def _items(self) -> list[Any]:
        """The items since the last mark, which are taken off the stack."""
        start = max(i for i, item in enumerate(self.stack) if isinstance(item, _Mark))
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _global(self, argument: str) -> None:
        if argument not in _KNOWN:
            raise _Refused(f"the name {argument!r}")
        self.stack.append(_Name(argument))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._global(f"{module} {name}")

    def _reduce(self, _: Any) -> None:
        given, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Name) or not isinstance(given, tuple):
            raise _Refused("a call")
        if function in _RECONSTRUCT and len(given) == 3 and given[0] == _NDARRAY:
            self.stack.append(_Array())
        elif function == _DTYPE and given and isinstance(given[0], str):
            self.stack.append(_Dtype(given[0]))
        elif function in _SCALAR and len(given) == 2 and isinstance(given[0], _Dtype) and isinstance(given[1], bytes):
            self.stack.append(np.frombuffer(given[1], given[0].type)[0].item())
        elif function in _ENCODE and len(given) == 2 and given[1] == "latin1" and isinstance(given[0], str):
            self.stack.append(given[0].encode("latin1"))
        elif function == _EMPTY and given == ():
            self.stack.append(b"")
        else:
            raise _Refused(f"a call of {function!s}")

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, (_Array, _Dtype)) or not isinstance(state, tuple):
            raise _Refused("a state of something that is no array")
        target.build(state)

    def _mark(self, _: Any) -> None:
        self.stack.append(_Mark())

    def _tuple(self, _: Any) -> None:
        items = self._items()
        self.stack.append(tuple(items))

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        self._list().append(item)

    def _appends(self, _: Any) -> None:
        items = self._items()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        if not isinstance(self.stack[-1], list):
            raise _Refused("items of something that is no list")
        return self.stack[-1]

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._entries([key, value])

    def _setitems(self, _: Any) -> None:
        self._entries(self._items())

    def _entries(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in items[::2]):
            raise _Refused("entries of something that is no dictionary of names")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binput(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    _long_binput = _binput

    def _binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    _long_binget = _binget


def read_objects(path: Path, name: str = "data") -> Any:
    """What the object array `name` of an npz file holds, as numbers, lists, dictionaries and numpy arrays.

    Args:
        path: The npz file.
        name: The array's name in it.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            form = np.lib.format
            first = form.read_magic(file) == (1, 0)
            shape, _, dtype = (form.read_array_header_1_0 if first else form.read_array_header_2_0)(file)
            if dtype.kind != "O" or shape != ():
                raise _Refused(f"an array of type {dtype} and shape {shape}")
            content = _Machine().read(file.read())
            return content[0] if isinstance(content, list) and len(content) == 1 else content
    except _Refused as problem:
        raise UserError(
            f"{path} holds more than numbers and arrays: {problem}. It is not read, as loading it could run "
            "code. "
            'If you trust it, convert it once: python -c "import numpy as np; '
            f"d = np.load({str(path)!r}, allow_pickle=True)['data'].item(); "
            f"np.savez_compressed({str(path)!r}, x=d['x'], y=d['y'])\""
        ) from None
    except _BROKEN as error:
        raise UserError(f"cannot read {path}: {error}. Is the file complete?") from None
