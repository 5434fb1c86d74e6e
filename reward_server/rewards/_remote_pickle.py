"""Pickles of the flow_grpo family's reward servers, read without running anything that they name.

A pickle is a program: it names functions, which ``pickle.loads`` imports and calls. Here it may name those of a numpy
array and no others, and even these are replaced by the stand-ins below, so that the most a reply can build is lists,
tuples, dicts, strings, bytes, numbers and lists of numbers.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, ClassVar

import numpy as np

from reward_server.rewards._remote_http import MAX_REPLY_BYTES, RemoteError

_NUMERIC = "biuf"
"""Kinds of numpy types that are read: booleans, signed and unsigned integers, floats"""


class _Dtype:
    """Stands in for ``numpy.dtype``."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = str(code), "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def real(self) -> np.dtype[Any]:
        """The type it stands for, if it is numeric."""
        if not (2 <= len(self.code) <= 3 and self.code[0] in _NUMERIC and self.code[1:].isdigit()):
            raise pickle.UnpicklingError(f"an array of type {self.code!r}; only numbers are read")
        return np.dtype((">" if self.order == ">" else "<") + self.code)


class _Array(list[Any]):
    """Stands in for ``numpy.ndarray``: its values as (nested) lists."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        self[:] = _values(data, dtype, shape, "F" if fortran else "C")


def _values(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: str) -> list[Any]:
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("an array of objects; only numbers are read")
    kind = dtype.real()
    if math.prod(shape) * kind.itemsize != len(data) or not shape:
        raise pickle.UnpicklingError(f"an array of shape {shape} in {len(data)} bytes")
    values: list[Any] = np.frombuffer(data, kind).reshape(shape, order="F" if order == "F" else "C").tolist()
    return values


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: str, *_: Any) -> list[Any]:
    return _values(bytes(data), dtype, shape, order)


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return _values(data, dtype, (1,), "C")[0]


class _Unpickler(pickle.Unpickler):
    STAND_INS: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        **{  # numpy.core before numpy 2
            (f"numpy.{core}.{module}", name): stand_in
            for core in ("core", "_core")
            for module, name, stand_in in (
                ("multiarray", "_reconstruct", _reconstruct),
                ("multiarray", "scalar", _scalar),
                ("numeric", "_frombuffer", _frombuffer),
            )
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data") from None


def loads(body: bytes) -> Any:
    """The plain data of a pickle; numpy arrays of numbers become lists, numpy scalars become numbers.

    Raises:
        RemoteError: it is damaged, or names anything else than a numpy array of numbers (which is not run).
    """
    if len(body) > MAX_REPLY_BYTES:
        raise RemoteError(f"a pickle of {len(body)} bytes; at most {MAX_REPLY_BYTES} are read")
    try:
        return _Unpickler(io.BytesIO(body)).load()
    except Exception as error:  # hostile bytes raise whatever they like: from the stand-ins, from the pickle machine
        raise RemoteError(f"the reply's pickle is refused: {type(error).__name__}: {error}") from error


def dumps(request: dict[str, Any]) -> bytes:
    """A request, as those servers' ``pickle.loads`` reads it."""
    return pickle.dumps(request, protocol=4)
