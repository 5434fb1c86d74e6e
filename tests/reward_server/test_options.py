"""The settings' loader: which source wins, what text means, and what a mistake says."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from reward_server.options import dump, load
from reward_server.options_tree import Heading


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(default=1, gt=0, description="size, metres")


class Group(BaseModel):
    """A group."""

    model_config = ConfigDict(extra="forbid")
    rate: float = Field(default=0.5, description="learning rate, 100% of it")
    flag: bool = False
    steps: Literal["all"] | int | list[int] = "all"
    names: list[str] = ["a"]
    weights: dict[str, float | None] = {"a": 1.0}
    text: str = "x"

    @field_validator("weights", mode="before")
    @classmethod
    def _names(cls, value):
        return dict.fromkeys(value.split(","), 9.0) if isinstance(value, str) else value


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: Path | None = Field(default=None, description="where, a path")
    token: SecretStr | None = None
    files: list[Path] = []
    group: Group = Field(default_factory=lambda: Group(rate=0.25), description="the group")
    items: dict[str, Item] = {}

    @model_validator(mode="after")
    def _rule(self):
        if self.group.rate > 1:
            raise ValueError("group.rate must not exceed 1")
        return self


class Sibling(BaseModel):
    other: int = 0


@pytest.fixture
def parse(monkeypatch):
    def run(*argv, env=None, model=Config, **extra):
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        return load(model, list(argv), prog="prog", description="Does it.", env_prefix="ZZ_", **extra)

    return run


@pytest.fixture
def mistake(parse, capsys):
    def run(*argv, **extra):
        with pytest.raises(SystemExit) as stop:
            parse(*argv, **extra)
        assert stop.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.removesuffix("\n")

    return run


def test_later_sources_win_and_groups_are_merged(parse, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("group: {rate: 1e-1, text: from file, names: [p, q]}\npath: file\n")
    config = parse(
        "--config", str(file), "--group.text", "flag", env={"ZZ_GROUP__RATE": "0.2", "ZZ_GROUP__TEXT": "env"}
    )
    assert (config.group.rate, config.group.text, config.group.names) == (0.2, "flag", ["p", "q"])
    assert config.path == Path("file")


def test_defaults_when_nothing_is_given(parse):
    assert parse() == Config()
    assert parse().group.rate == 0.25


def test_several_files_and_the_one_of_the_environment(parse, tmp_path):
    (tmp_path / "a.yaml").write_text("group: {rate: 0.1, text: a}")
    (tmp_path / "b.yaml").write_text("group: {rate: 0.2}")
    config = parse("--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert (config.group.rate, config.group.text) == (0.2, "a")
    assert parse(env={"ZZ_CONFIG": str(tmp_path / "a.yaml")}).group.rate == 0.1


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--group.rate", "1e-4"], "rate", 1e-4),
        (["--group.rate=-2"], "rate", -2.0),
        (["--group.flag"], "flag", True),
        (["--group.flag", "false"], "flag", False),
        (["--group.steps", "all"], "steps", "all"),
        (["--group.steps", "3"], "steps", 3),
        (["--group.steps", "3,4"], "steps", [3, 4]),
        (["--group.steps", "[3]"], "steps", [3]),
        (["--group.names", "b"], "names", ["b"]),
        (["--group.names", "[b, 'c,d']"], "names", ["b", "c,d"]),
        (["--group.weights", "b=2, c=null"], "weights", {"b": 2.0, "c": None}),
        (["--group.weights", "p,q"], "weights", {"p": 9.0, "q": 9.0}),
        (["--group.weights", "p,q", "--group.weights.q", "2"], "weights", {"p": None, "q": 2.0}),
        (["--group.weights", "{b: 2}"], "weights", {"b": 2.0}),
        (["--group.weights.b", "2"], "weights", {"b": 2.0}),
        (["--group.weights", "b=2", "--group.weights.c=3"], "weights", {"b": 2.0, "c": 3.0}),
        (["--group.text", "[a, b]"], "text", "[a, b]"),
        (["--group.text", "null"], "text", "null"),
        (["--short", "s"], "text", "s"),
    ],
)
def test_text_on_the_command_line(parse, argv, key, value):
    assert getattr(parse(*argv, aliases={"short": "group.text"}).group, key) == value


def test_text_in_the_environment(parse):
    config = parse(env={"ZZ_GROUP__NAMES": "u,v", "ZZ_PATH": "none", "ZZ_ITEMS__A__SIZE": "4", "ZZ_GROUP__TEXT": ""})
    assert config.group.names == ["u", "v"]
    assert config.path is None
    assert config.items == {"a": Item(size=4)}
    assert config.group.text == "x", "an empty variable counts as not set"


def test_a_flag_inside_a_mapping_joins_what_the_file_gives(parse, tmp_path):
    (tmp_path / "a.yaml").write_text("items: {a: {size: 2}, b: {size: 3}}")
    config = parse("--config", str(tmp_path / "a.yaml"), "--items.b.size", "5")
    assert config.items == {"a": Item(size=2), "b": Item(size=5)}


def test_positionals_and_dashes_or_underscores(parse):
    assert parse("a,b.png", "c.png", positionals=["files"]).files == [Path("a,b.png"), Path("c.png")]
    assert parse("a", "--group.text", "t", "b", positionals=["files"]).files == [Path("a"), Path("b")]
    assert parse("--files", "x,y", positionals=["files"]).files == [Path("x"), Path("y")]


def test_variables_of_a_sibling_program_are_passed_over(parse, mistake):
    env = {"ZZ_OTHER": "1"}
    assert parse(env=env, env_siblings=[Sibling]) == Config()
    assert mistake(env=env) == "prog: error: environment ZZ_OTHER: unknown setting 'other'; see --help for all settings"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--group.rte", "1"], "--group.rte: unknown setting 'group.rte'; did you mean 'group.rate'?"),
        (["--rate", "1"], "--rate: unknown setting 'rate'; did you mean 'group.rate'?"),
        (
            ["--group", "1"],
            "--group: unknown setting 'group'; that is a group of settings: "
            "group.flag, group.names, group.rate, group.steps, group.text, group.weights",
        ),
        (["--items.a.sizes=1"], "--items.a.sizes: unknown setting 'items.a.sizes'; did you mean 'items.a.size'?"),
        (["--group.rate"], "--group.rate: expected one argument"),
        (["--items.a.size"], "--items.a.size: expected a value"),
        (["word"], "unexpected argument 'word'; a setting is given as --name value"),
        (
            ["--group.steps", "most"],
            "--group.steps: group.steps is 'most': does not fit; expected: all|integer|list of integer",
        ),
        (["--group.weights", "{a"], "--group.weights: group.weights is '{a', which is not YAML; expected: mapping"),
        (
            ["--group.rate", "fast"],
            "--group.rate: group.rate is 'fast': should be a valid number, unable to parse string as a number; "
            "expected: number",
        ),
        (["--items.a.size", "0"], "--items.a.size: items.a.size is '0': should be greater than 0; expected: integer"),
        (["--group.rate", "3"], "group.rate must not exceed 1"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(mistake, argv, message):
    assert mistake(*argv) == f"prog: error: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group: {rte: 1}", "{file}: unknown setting 'group.rte'; did you mean 'group.rate'?"),
        ("grup: {rate: 1}", "{file}: unknown setting 'grup'; did you mean 'group'?"),
        ("group: {names: [a, 3]}", "{file}: group.names is 3: should be a valid string; expected: list of text"),
        ("group: 3", "{file}: group is 3; expected: a mapping of settings"),
        ("a: [", "{file} line 1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("- a", "{file}: expected a mapping of settings, one 'name: value' a line"),
        (
            "items: {a: {size: x}}",
            "{file}: items.a.size is 'x': should be a valid integer, unable to parse string as an integer; "
            "expected: integer",
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_file(mistake, tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert mistake("--config", str(file)) == f"prog: error: {message.format(file=file)}"


def test_a_mistake_in_the_environment_names_the_variable(mistake):
    line = mistake(env={"ZZ_GROUP__RATEE": "1"})
    assert line == "prog: error: environment ZZ_GROUP__RATEE: unknown setting 'group.ratee'; did you mean 'group.rate'?"


def test_every_mistake_is_reported_and_a_required_setting_is_named(mistake):
    class Needed(BaseModel):
        where: str
        count: int = 1

    lines = mistake("--count", "x", model=Needed).splitlines()
    assert lines[0] == "prog: error: where is required: give it in --config, in the environment or as --where"
    assert lines[1].startswith("prog: error: --count: count is 'x'")


def test_a_secret_is_never_printed(mistake, tmp_path):
    (tmp_path / "a.yaml").write_text("token: [hunter2]")
    assert "hunter2" not in mistake("--config", str(tmp_path / "a.yaml"))


def test_help_is_grouped_and_complete(parse, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        parse("--help", aliases={"short": "group.text"})
    assert stop.value.code == 0
    text = capsys.readouterr().out
    head, group = text.split("\ngroup:\n  the group\n")
    assert "where, a path (default: none) [ZZ_PATH]" in head
    assert "learning rate, 100% of it (default: 0.25) [ZZ_GROUP__RATE]" in group
    assert "--short TEXT, --group.text TEXT" in group
    for name in ("path", "token", "files", "items", "group.flag", "group.steps", "group.names", "group.weights"):
        assert f"--{name} " in text


def test_help_puts_settings_under_their_headings(parse, capsys):
    class Inner(BaseModel):
        width: Annotated[int, Heading("size")] = 1
        name: str = "x"

    class Outer(BaseModel):
        port: Annotated[int | None, Heading("address")] = Field(default=None, gt=0)
        inner: Inner = Field(default=Inner(), description="inside")
        many: dict[str, Inner] = {}
        host: Annotated[str, Heading("address")] = ""

    with pytest.raises(SystemExit):
        parse("--help", model=Outer)
    lines = [line for line in capsys.readouterr().out.splitlines() if line and line[:3] != "   "]
    words = [line if line.endswith(":") else line.split()[0] for line in lines]
    assert words[words.index("--config") + 1 : words.index("Every")] == [
        *("settings:", "--many", "address:", "--port", "--host"),
        *("inner:", "inside", "--inner.name", "inner: size:", "--inner.width"),
        *("many.NAME:", "of", "--many.NAME.name", "many.NAME: size:", "--many.NAME.width"),
    ]
    assert parse("--many.a.width", "3", "--port", "4", model=Outer).many["a"].width == 3


def test_dump_hides_secrets_and_can_be_loaded_again(parse, tmp_path):
    config = parse("--token", "hunter2", "--group.text", "redis://me:hunter2@host:1/0", "--group.steps", "1,2")
    text = dump(config)
    assert "hunter2" not in text
    assert yaml.safe_load(text)["group"]["text"] == "redis://me:**********@host:1/0"
    (tmp_path / "a.yaml").write_text(text)
    assert parse("--config", str(tmp_path / "a.yaml")).group.steps == [1, 2]
