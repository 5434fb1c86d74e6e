"""GenEval's clauses: by hand, and against the verdicts of the benchmark's code and of the reward server's."""

import json
from pathlib import Path

import pytest

from reward_server.rewards import _geneval_rules
from reward_server.rewards._geneval_rules import judge, parse, relations

FIXTURES = Path(__file__).parent / "fixtures" / "geneval"


def test_verdicts_are_those_of_the_benchmark_and_of_the_reward_server():
    cases = json.loads((FIXTURES / "clauses.json").read_text())
    assert len(cases) == 400
    for metadata, objects, at_least, exactly, dense in cases:
        spec = parse(metadata)
        boxes = {name: [tuple(box) for box, _ in group] for name, group in objects.items()}
        for counting, strict in ((">=", at_least), ("==", exactly)):
            colours = {}
            for index, clause in enumerate(spec.include):
                group = objects.get(clause.name, [])
                number = _geneval_rules.looked_at(clause, len(group), counting)
                if clause.colour and number:
                    colours[index] = [colour for _, colour in group[:number]]
            verdict = judge(spec, boxes, colours, counting)
            assert verdict.strict is strict, metadata
        assert verdict.dense == pytest.approx(dense, abs=1e-12), metadata


def box(x, y, width=10, height=10):
    return (float(x), float(y), float(x + width), float(y + height))


def verdict(include, objects, colours=None, counting=">=", exclude=()):
    return judge(parse({"tag": "", "include": include, "exclude": list(exclude)}), objects, colours or {}, counting)


def test_presence_needs_every_class():
    both = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1}]
    assert verdict(both, {"cat": [box(0, 0)], "dog": [box(50, 0)]}).strict
    missing = verdict(both, {"cat": [box(0, 0)]})
    assert not missing.strict
    assert missing.clauses == {"include.0.count": 1.0, "include.1.count": 0.0}
    assert missing.dense == 0.5


@pytest.mark.parametrize(
    ("found", "counting", "strict", "dense"),
    [
        (2, ">=", False, 2 / 3),
        (3, ">=", True, 1.0),
        (4, ">=", True, 1.0),
        (2, "==", False, 2 / 3),
        (3, "==", True, 1.0),
        (4, "==", False, 2 / 3),
        (7, "==", False, -1 / 3),
    ],
)
def test_counting_at_least_and_exactly(found, counting, strict, dense):
    result = verdict([{"class": "cat", "count": 3}], {"cat": [box(9 * i, 0) for i in range(found)]}, counting=counting)
    assert (result.strict, result.dense) == (strict, pytest.approx(dense))


def test_too_many_are_caught_by_exclude():
    clause = [{"class": "cat", "count": 2}]
    unwanted = [{"class": "cat", "count": 3}]
    three = {"cat": [box(9 * i, 0) for i in range(3)]}
    result = verdict(clause, three, exclude=unwanted)
    assert not result.strict
    assert result.clauses == {"include.0.count": 1.0, "exclude.0": 0.0}
    assert result.dense == 0.5
    assert verdict(clause, {"cat": three["cat"][:2]}, exclude=unwanted).strict
    assert verdict(clause, three, exclude=unwanted, counting="==").dense == 0.5  # 1 - 1/2: implied by the count


def test_exclude_of_another_class_counts_with_exact_counting_too():
    result = verdict(
        [{"class": "cat", "count": 1}],
        {"cat": [box(0, 0)], "dog": [box(9, 9)]},
        exclude=[{"class": "dog", "count": 1}],
        counting="==",
    )
    assert not result.strict
    assert result.dense == 0.5


def test_colour_attribution_needs_the_right_colour_on_the_right_class():
    include = [{"class": "cat", "count": 1, "color": "red"}, {"class": "dog", "count": 1, "color": "blue"}]
    objects = {"cat": [box(0, 0)], "dog": [box(50, 0)]}
    assert verdict(include, objects, {0: ["red"], 1: ["blue"]}).strict
    swapped = verdict(include, objects, {0: ["blue"], 1: ["red"]})
    assert not swapped.strict
    assert swapped.dense == 0.5
    assert swapped.clauses["include.0.color"] == 0.0


def test_wrong_position_is_half_a_fault_in_dense_as_on_the_reward_server():
    include = [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}]
    right = verdict(include, {"cat": [box(0, 0)], "dog": [box(50, 0)]}, counting="==")
    assert (right.strict, right.dense) == (True, 1.0)
    wrong = verdict(include, {"cat": [box(50, 0)], "dog": [box(0, 0)]}, counting="==")
    assert (wrong.strict, wrong.dense) == (False, 0.75)
    assert wrong.clauses["include.1.position"] == 0.0
    without_target = verdict(include, {"cat": [box(50, 0)]}, counting="==")
    assert without_target.dense == pytest.approx(1 / 3)


def test_relations_begin_beyond_a_tenth_of_both_sizes():
    assert relations(box(0, 0), box(2, 0)) == set()  # 2 is 0.1 x (10 + 10)
    assert relations(box(0, 0), box(5, 0)) == {"left of"}
    assert relations(box(5, 0), box(0, 0)) == {"right of"}
    assert relations(box(0, 0), box(0, 30)) == {"above"}
    assert relations(box(0, 30), box(0, 0)) == {"below"}
    assert relations(box(0, 0), box(30, 30)) == {"left of", "above"}
    assert relations(box(0, 0), box(3, 0)) == set()  # beyond by 1, a third of the offset: less than half
    assert relations(box(0, 0), box(30, 10)) == {"left of"}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"include": [{"class": "unicorn", "count": 1}]}, "include[0].class is 'unicorn'"),
        ({"include": [{"class": "cat", "count": 0}]}, "include[0].count is 0"),
        ({"include": [{"class": "cat", "count": True}]}, "include[0].count is True"),
        ({"include": [{"class": "cat", "count": 1, "color": "beige"}]}, "include[0].color is 'beige'"),
        ({"include": [{"class": "cat", "count": 1, "position": ["near", 0]}]}, "include[0].position is"),
        ({"include": [{"class": "cat", "count": 1, "position": ["above", 0]}]}, "does not come before"),
        ({"include": []}, "nothing to score"),
        ({"include": "cat"}, "include is not a list"),
        ({"include": [{"class": "cat", "count": 1}], "exclude": [{"class": "cat"}]}, "exclude[0].count is None"),
    ],
)
def test_wrong_metadata_is_told(metadata, words):
    with pytest.raises(ValueError) as error:
        parse({"tag": "x", **metadata})
    assert words in str(error.value)
