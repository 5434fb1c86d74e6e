"""Which family, which weights, which options: what ``policy`` in the settings means."""

import re
from typing import Literal

import pytest
import torch

from trainer import families
from trainer.config import Config, PolicyConfig, UserError
from trainer.policies.small import SmallPolicy


class OptionsPolicy:
    """A family that notes what it was asked for."""

    @classmethod
    def load(
        cls,
        source,
        *,
        ar_steps: int = 4,
        diffusion_steps: int = 5,
        guidance: float = 1.0,
        frozen_dtype: Literal["bfloat16", "float32"] = "bfloat16",
        prompt_tokens: int = 128,
        checkpointing: bool = False,
    ):
        raise NotImplementedError


@pytest.fixture
def with_options(monkeypatch):
    monkeypatch.setattr(families, "family_of", lambda name: OptionsPolicy)


def test_options_are_those_of_the_familys_load(with_options):
    given = {"frozen_dtype": "float32", "checkpointing": "true", "prompt_tokens": "64"}  # as a command line gives them
    chosen = families.load_arguments(PolicyConfig(name="x", guidance=2.0, options=given))
    assert chosen == {"frozen_dtype": "float32", "checkpointing": True, "prompt_tokens": 64, "guidance": 2.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float32"}, r"x has no dtype; its options: frozen_dtype \(default 'bfloat16'\), prompt_tokens"),
        ({"guidance": 3.0}, "x has no guidance"),  # a setting of its own
        ({"frozen_dtype": "int8"}, r"policy.options.frozen_dtype: Input should be 'bfloat16' or 'float32', not 'int8'"),
        ({"prompt_tokens": "many"}, "policy.options.prompt_tokens: .* not 'many'"),
    ],
)
def test_wrong_options_are_told_with_what_there_is(with_options, options, words):
    with pytest.raises(UserError, match=words):
        families.load_arguments(PolicyConfig(name="x", options=options))


def test_a_family_without_options_says_so():
    with pytest.raises(UserError, match="small has no size; its options: none at all"):
        families.load_arguments(PolicyConfig(options={"size": "base"}))


def test_every_family_is_listed_and_no_helper_is():
    with pytest.raises(UserError) as error:
        families.family_of("masked")
    listed = str(error.value).split("there are: ")[1].split(", ")
    assert "small" in listed
    assert not {"base", "masked"} & set(listed)
    assert families.family_of("small") is SmallPolicy


def test_what_a_source_means(tmp_path):
    assert families.policy_source(None, "small").endswith("small.safetensors")
    with pytest.raises(UserError, match=r"policy\.checkpoint is not set, and nova comes without weights"):
        families.policy_source(None, "nova")
    for step in (2, 10):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "policy.safetensors").touch()
    assert families.policy_source(tmp_path / "run", "nova") == str(folder / "policy.safetensors")
    older = folder.with_name("step-00000002")
    assert families.policy_source(older, "nova") == str(older / "policy.safetensors")
    (tmp_path / "official").mkdir()
    assert families.policy_source(tmp_path / "official", "nova") == str(tmp_path / "official")
    assert families.policy_source("owner/name", "nova") == "owner/name"
    for missing in ("a/b/c", "owner/name.safetensors", "name"):
        with pytest.raises(UserError, match=f"there is no checkpoint at {re.escape(missing)}: name a file"):
            families.policy_source(missing, "nova")


def test_weights_that_are_not_here_are_told_with_the_command_and_the_licence():
    for name, source, words in (
        ("nova", "BAAI/nova-d48w1024-sd512", "Apache-2.0.*hf download BAAI/nova-d48w1024-sd512"),
        ("harmon", "wusize/Harmon-0_5B", "S-Lab.*hf download wusize/Harmon-0_5B"),
        ("mar", "jadechoghari/mar", "hf download jadechoghari/mar"),
    ):
        with pytest.raises(UserError, match=words):
            families.load_policy(Config(policy={"name": name, "checkpoint": source}))


def test_a_fingerprint_tells_weights_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "SAMPLE", 4)
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "model.safetensors"
    file.write_bytes(b"0123456789")
    first = families.fingerprint(str(tmp_path))
    assert re.fullmatch("folder-sha256:[0-9a-f]{64}", first)
    assert families.fingerprint(str(tmp_path)) == first
    for content in (b"0123456789+", b"x123456789", b"012345678x", b"0123"):
        file.write_bytes(content)
        assert families.fingerprint(str(tmp_path)) != first
    # of one file, the checksum that sha256sum gives
    file.write_bytes(b"abc")
    assert families.fingerprint(str(file)).startswith("sha256:ba7816bf8f01cfea")


def test_prompts_are_prepared_where_a_family_can():
    policy = torch.nn.Module()
    families.prepare_prompts(policy, ["a"])
    seen = []
    policy.prepare_prompts = seen.extend
    families.prepare_prompts(policy, ["a", "b"])
    assert seen == ["a", "b"]


def test_the_reference_shares_what_is_not_trained_and_keeps_the_rest():
    policy, _ = families.load_policy(Config())
    trained = families.freeze(policy, "frozen")
    reference = families.reference_of(policy)
    assert not any(p.requires_grad for p in reference.parameters())
    one, two = (dict(p.state_dict(keep_vars=True)) for p in (policy, reference))
    assert one.keys() == two.keys()
    shared = {name for name in one if one[name] is two[name]}
    assert shared == {name for name in one if not name.startswith("backbone.")}  # the frozen head and the codec
    before = two["backbone.mask_token"].clone()
    with torch.no_grad():
        for parameter in trained:
            parameter += 1
    assert torch.equal(two["backbone.mask_token"], before)
    assert all(p.requires_grad for p in trained)
