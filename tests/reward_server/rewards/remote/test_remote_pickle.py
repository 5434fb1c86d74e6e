"""The restricted unpickler: plain data and numeric arrays of any numpy, and nothing that runs."""

import collections
import datetime
import os
import pickle
import pickletools
import subprocess

import numpy as np
import pytest

from reward_server.rewards._remote_http import RemoteError
from reward_server.rewards._remote_pickle import loads

PLAIN = {"scores": [1.0, -10.0, None, True], "group": {"a": (1, 2**70)}, "text": "ü", "bytes": b"\x00\xff"}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_and_arrays(protocol):
    arrays = {
        "float32": np.array([[1.5, -2.0], [0.25, np.inf]], np.float32),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "big-endian": np.array([1.0, 2.0], ">f8"),
        "bool": np.array([True, False]),
        "empty": np.zeros((0,), np.float64),
        "scalar": [np.float32(0.5), np.int64(-3)],
    }
    if protocol == 2:  # writes bytes as latin-1 text, to be encoded by a function: refused
        with pytest.raises(RemoteError, match=r"_codecs.encode"):
            loads(pickle.dumps(arrays, protocol))
        return
    read = loads(pickle.dumps(PLAIN | arrays, protocol))
    assert {key: read[key] for key in PLAIN} == PLAIN
    assert read["float32"] == [[1.5, -2.0], [0.25, float("inf")]]
    assert read["fortran"] == [[0, 1, 2], [3, 4, 5]]
    assert read["big-endian"] == [1.0, 2.0]
    assert read["bool"] == [True, False]
    assert read["empty"] == []
    assert read["scalar"] == [0.5, -3]


def test_numpy_1_names_its_functions_otherwise():
    body = pickle.dumps({"outputs": np.array([0.5, 2.0])}, protocol=3).replace(b"numpy._core", b"numpy.core")
    assert b"numpy.core" in body
    assert loads(body) == {"outputs": [0.5, 2.0]}


class Calls:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "hostile",
    [
        Calls(os.system, "exit 1"),
        Calls(eval, "1 / 0"),
        Calls(getattr, "", "join"),
        Calls(subprocess.Popen, "true"),
        Calls(np.load, "x.npy"),
        Calls(np.fromfile, "x"),
        collections.defaultdict(list),
        datetime.date(2026, 1, 1),
        np.array([PLAIN, None], dtype=object),
        np.array(["text"]),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1.0], [True]),
    ],
)
def test_anything_else_is_refused(hostile, protocol):
    with pytest.raises(RemoteError, match="refused: "):
        loads(pickle.dumps([hostile], protocol))


def test_arrays_that_lie_about_their_size_are_refused():
    array = pickle.dumps(np.array([1.0, 2.0]), protocol=3)
    assert array.count(b"K\x02\x85") == 1  # the shape (2,)
    with pytest.raises(RemoteError, match=r"shape \(255,\) in 16 bytes"):
        loads(array.replace(b"K\x02\x85", b"K\xff\x85"))


def test_damaged_pickles_are_refused():
    whole = pickle.dumps({"scores": [1.0, 2.0], "array": np.arange(3.0)})
    for length in range(len(whole)):
        with pytest.raises(RemoteError):
            loads(whole[:length])
    rng = np.random.default_rng(0)
    names = set()
    for _ in range(2000):  # flipped bytes: refused, or plain data all the same
        body = bytearray(whole)
        body[rng.integers(len(body))] = rng.integers(256)
        try:
            names.add(type(loads(bytes(body))).__name__)
        except RemoteError:
            names.add("refused")
    assert "refused" in names
    assert "dict" in names


def test_what_a_pickle_names_is_what_this_test_thinks_it_names():
    body = pickle.dumps(np.array([1.0]), protocol=3)
    named = [argument for opcode, argument, _ in pickletools.genops(body) if opcode.name == "GLOBAL"]
    assert named[:2] == ["numpy._core.multiarray _reconstruct", "numpy ndarray"]
