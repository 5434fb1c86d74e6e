"""Prompt files in every format, their mistakes, and the order of training."""

import json
import sys
from collections import Counter

import pytest

from trainer.prompts import Prompt, PromptError, PromptSampler, load_prompts

GENEVAL = (
    '{"tag": "counting", "include": [{"class": "bus", "count": 3}], "exclude": [{"class": "bus", "count": 4}], '
    '"t2v_prompt": "x", "prompt": "a photo of three buses"}\n'
    '{"tag": "color_attr", "include": [{"class": "bus", "count": 1, "color": "yellow"}], "prompt": "a yellow bus"}\n'
)
T2I_R1 = (
    '{"prompt": "a car below a zebra", "nouns": ["car", "zebra"], '
    '"spatial_info": {"obj1": "car", "obj2": "zebra", "locality": "below"}, "task_type": "spatial"}\n'
    '{"prompt": "a red book", "nouns": ["book"], "attr_nouns": ["a red book"], "task_type": "color"}\n'
)


@pytest.fixture
def write(tmp_path):
    def make(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def test_txt_takes_every_line_that_is_not_blank(write):
    path = write("p.txt", "\ufeffa cat, \u2028sleeping\r\n\n # not a comment\n")
    assert load_prompts(path) == [Prompt("a cat, \u2028sleeping"), Prompt("# not a comment")]


def test_jsonl_of_flow_grpo_as_it_is(write):
    first, second = load_prompts(write("metadata.jsonl", GENEVAL))
    assert first.text == "a photo of three buses"
    assert first.metadata == {
        "tag": "counting",
        "include": [{"class": "bus", "count": 3}],
        "exclude": [{"class": "bus", "count": 4}],
        "t2v_prompt": "x",
    }
    assert second.metadata["include"][0]["color"] == "yellow"


@pytest.mark.parametrize("lines", [1, 2])
def test_json_of_t2i_r1_holds_one_object_a_line(write, lines):
    prompts = load_prompts(write("geneval_and_t2i_data_final.json", "".join(T2I_R1.splitlines(True)[:lines])))
    assert len(prompts) == lines
    assert prompts[0].text == "a car below a zebra"
    assert prompts[0].metadata["spatial_info"] == {"obj1": "car", "obj2": "zebra", "locality": "below"}
    assert prompts[0].metadata["task_type"] == "spatial"


def test_json_list_of_texts_and_objects_with_any_known_key(write):
    path = write("p.json", '["a", {"text": "b", "n": 1}, {"caption": "c"}, {"prompt": "d", "text": "meta"}]')
    assert load_prompts(path) == [Prompt("a"), Prompt("b", {"n": 1}), Prompt("c"), Prompt("d", {"text": "meta"})]


def test_the_text_key_can_be_chosen(write):
    path = write("p.jsonl", '{"prompt": "x", "long": "y"}')
    assert load_prompts(path, text_key="long") == [Prompt("y", {"prompt": "x"})]


def test_csv_with_commas_line_breaks_and_empty_cells(write):
    path = write("p.csv", 'tag,prompt,note\ncolor,"a red, round\ncup",\n,blue,n\n')
    assert load_prompts(path) == [Prompt("a red, round\ncup", {"tag": "color"}), Prompt("blue", {"note": "n"})]


def test_parquet_leaves_out_what_a_row_lacks(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"prompt": "a", "nouns": ["x"], "spatial_info": {"obj1": "x", "obj2": None}},
        {"prompt": "b", "nouns": None, "spatial_info": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.parquet") == [
        Prompt("a", {"nouns": ["x"], "spatial_info": {"obj1": "x"}}),
        Prompt("b"),
    ]


def test_parquet_without_pyarrow_names_the_extra(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PromptError, match=r"pip install 'mar-grpo\[parquet\]'"):
        load_prompts(write("p.parquet", ""))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": }\n', "{path} line 2: not JSON: Expecting value at column 12"),
        (
            "p.jsonl",
            '\n{"promt": "a"}\n',
            "{path} line 2: no key 'prompt' or 'text' or 'caption' for the prompt; there are promt",
        ),
        ("p.jsonl", '{"prompt": 3}', "{path} line 1: key 'prompt' is 3, expected a text that is not empty"),
        ("p.jsonl", '{"prompt": " "}', "{path} line 1: key 'prompt' is ' ', expected a text that is not empty"),
        ("p.jsonl", '{"prompt": "a", "w": NaN}', "{path} line 1: key 'w' is not a JSON value"),
        ("p.jsonl", "3", "{path} line 1: expected a text or an object, got int"),
        ("p.json", '[\n"a",\n', "{path} line 3: not JSON: Expecting value at column 1"),
        ("p.json", '["a", [1]]', "{path} entry 1: expected a text or an object, got list"),
        ("p.json", '{"a": 1}', "{path}: expected a list of texts or objects, got dict"),
        ("p.csv", "prompt,n\na,1\nb\n", "{path} line 3: the header names 2 columns, this row has another number"),
        ("p.csv", 'prompt\n"a\n', "{path} after line 1: not CSV: unexpected end of data"),
        ("p.parquet", "x", "{path}: not Parquet: "),
        ("p.txt", "\n\n", "{path}: holds no prompts"),
        ("p.xml", "", "{path}: unknown format '.xml'; known are .txt, .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_mistake_names_file_line_and_key(write, name, text, message):
    path = write(name, text)
    with pytest.raises(PromptError) as error:
        load_prompts(path)
    assert str(error.value).startswith(message.format(path=path))


def test_missing_file_and_wrong_encoding(tmp_path):
    with pytest.raises(PromptError, match=r"none\.txt: no such file"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "p.txt").write_bytes(b"caf\xe9")
    with pytest.raises(PromptError, match=r"p\.txt: not UTF-8 text"):
        load_prompts(tmp_path / "p.txt")


def test_sampler_takes_every_prompt_once_an_epoch_in_new_orders():
    prompts = [Prompt(str(i)) for i in range(10)]
    sampler = PromptSampler(prompts, per_step=4, seed=1)
    stream = [index for step in range(5) for index in sampler.indices(step)]  # 20 places: two epochs
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] != stream[10:]
    assert [p.text for p in sampler.batch(2)] == [str(i) for i in stream[8:12]]


def test_sampler_is_a_function_of_step_and_seed():
    prompts = [Prompt(str(i)) for i in range(7)]
    once = [PromptSampler(prompts, 3, seed=5).indices(step) for step in range(6)]
    again = PromptSampler(prompts, 3, seed=5)
    assert [again.indices(step) for step in reversed(range(6))] == once[::-1]
    assert PromptSampler(prompts, 3, seed=6).indices(0) != once[0]


def test_sampler_may_take_more_than_all_prompts_a_step():
    assert Counter(PromptSampler([Prompt("a"), Prompt("b")], 5, seed=0).indices(0)).total() == 5
    with pytest.raises(ValueError, match="at least one of each"):
        PromptSampler([], 1, seed=0)


def test_metadata_survives_as_json(write):
    prompt = load_prompts(write("p.jsonl", GENEVAL))[0]
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata
