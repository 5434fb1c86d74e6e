"""What T2I-CompBench's prompts claim, and its rules on objects: by hand, and against the benchmark's own code."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from reward_server.rewards import _compbench_prompts, _compbench_rules
from reward_server.rewards._compbench_prompts import Relation
from reward_server.rewards._compbench_rules import Found, frame, holds_2d, holds_3d, numeracy, spatial_2d, spatial_3d

FIXTURES = Path(__file__).parent / "fixtures" / "t2i_compbench"


def stored(name):
    return json.loads((FIXTURES / name).read_text())


# what prompts claim


def test_noun_phrases_by_rule():
    find = _compbench_prompts.phrases_by_rule
    assert find("a blue bench and a green cake") == ["a blue bench", "a green cake"]
    assert find("Rubber gloves, the cup and a fluffy teddy bear.") == [
        "Rubber gloves",
        "the cup",
        "a fluffy teddy bear",
    ]
    assert find("A green bathroom with a mirror and a pink sink.") is None
    assert find("The round clock was on the left of the frame") is None
    assert find("") is None


def test_noun_phrases_by_spacy_where_it_is_installed(monkeypatch):
    def nlp(text):
        return SimpleNamespace(noun_chunks=[SimpleNamespace(text=t) for t in ("a clock", "the left", text[:7])])

    nlp.meta = {"version": "3.7.1"}
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=lambda name: nlp if name == "en_core_web_sm" else 0))
    find, name = _compbench_prompts.phrase_finder()
    assert find("a table here") == ["a clock", "a table"]
    assert name == "spacy/en_core_web_sm-3.7.1"
    monkeypatch.setitem(sys.modules, "spacy", None)
    assert _compbench_prompts.phrase_finder() == (_compbench_prompts.phrases_by_rule, "rule/1")


def test_relations_are_read():
    two, three = _compbench_rules.RELATIONS_2D, _compbench_rules.RELATIONS_3D
    read = _compbench_prompts.relation
    assert read("a wallet on the left of a giraffe", two) == Relation("wallet", "on the left of", "giraffe")
    assert read("A bee on side of the couch.", two) == Relation("bee", "on side of", "couch")
    assert read("a chair hidden by an airplane", three) == Relation("chair", "hidden", "airplane")
    assert read("a dog in front of a cat", two) is None


def test_numbers_are_read():
    assert _compbench_prompts.counts("two sheep, four knives and a dog slept") == {"sheep": 2, "knife": 4, "dog": 1}
    assert _compbench_prompts.counts("eight strawberries") == {"strawberry": 8}
    assert _compbench_prompts.counts("many dogs") is None


# the rules


def objects_of(entries):
    return [Found(name, score, tuple(box)) for name, score, box in entries]


def test_relations_score_as_the_benchmark():
    cases = stored("relations.json")
    depth = np.random.default_rng(5).random((479, 479), dtype=np.float32)
    assert (len(cases["2d"]), len(cases["3d"])) == (300, 300)
    for entries, first, relation, second, expected in cases["2d"]:
        assert spatial_2d(objects_of(entries), first, second, relation)["raw"] == pytest.approx(expected, abs=1e-9)
    for entries, first, relation, second, expected in cases["3d"]:
        own = spatial_3d(objects_of(entries), first, second, relation, depth)["raw"]
        assert own == pytest.approx(expected, abs=1e-6)


def test_numbers_score_as_the_benchmark():
    cases = stored("numbers.json")
    assert len(cases) == 300
    for entries, wanted, expected in cases:
        assert numeracy(objects_of(entries), wanted)["raw"] == pytest.approx(expected, abs=1e-9)


def test_frame_is_480_at_most():
    assert frame(512, 512) == (479, 479)
    assert frame(480, 640) == (360, 480)
    assert frame(640, 480) == (480, 360)
    assert frame(1, 1000) == (1, 480)


def test_relation_2d_by_hand():
    a, right, over = (0.0, 0.0, 10.0, 10.0), (100.0, 20.0, 110.0, 30.0), (5.0, 0.0, 15.0, 10.0)
    assert holds_2d("on the left of", a, right) == 1.0
    assert holds_2d("on the right of", a, right) == 0.0
    assert holds_2d("on the top of", a, right) == 0.0  # 20 down, but 100 to the side
    assert holds_2d("on the left of", a, over) == pytest.approx(0.1 / (50 / 150))  # overlap 1/3
    far = (300.0, 200.0, 310.0, 210.0)
    assert holds_2d("near", a, far) == pytest.approx(150 / 300)
    assert holds_2d("near", a, (300.0, 0.0, 310.0, 10.0)) == 1.0  # near along one axis is enough


def test_relation_3d_by_hand():
    depth = np.zeros((40, 40), np.float32)
    depth[:10] = 1.0  # the benchmark reads [x, y]: near where x < 10
    a, b = (0.0, 0.0, 10.0, 20.0), (5.0, 0.0, 15.0, 20.0)
    assert holds_3d("in front of", a, b, depth) == pytest.approx((100 / 300) / 0.5)
    assert holds_3d("behind", a, b, depth) == 0.0
    assert holds_3d("hidden", b, a, depth) == pytest.approx((100 / 300) / 0.5)
    assert holds_3d("in front of", a, (20.0, 0.0, 30.0, 20.0), depth) == 0.0  # no overlap
    half = (0.0, 0.0, 5.0, 20.0)  # of a: neither above nor below the benchmark's 0.5
    depth[5:10] = 0.5
    assert holds_3d("behind", a, half, depth) == 0.0
    assert holds_3d("behind", a, (0.0, 0.0, 5.1, 20.0), depth) == 1.0


def test_numeracy_by_hand():
    dog, other = Found("dog", 0.9, (0.0, 0.0, 50.0, 50.0)), Found("dog", 0.8, (60.0, 0.0, 99.0, 50.0))
    inside = Found("dog", 0.7, (10.0, 10.0, 20.0, 20.0))
    assert numeracy([dog, other, inside], {"dog": 2}) == {"count.dog": 2.0, "raw": 1.0}
    assert numeracy([dog, other], {"dog": 1, "cat": 1}) == {"count.dog": 2.0, "count.cat": 0.0, "raw": 0.25}
    assert numeracy([Found("watercraft, boat", 0.9, dog.box)], {"ship": 1})["raw"] == 1.0
