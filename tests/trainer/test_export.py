"""The command that writes official checkpoints; what each family writes is tested with the family."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.trainer.policies.families import FAMILIES
from tests.trainer.policies.tiny_mar import MAR
from trainer import export
from trainer.policies import mar_parts
from trainer.policies.mar_parts import MarConfig
from trainer.policies.small import SmallPolicy


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_exported_loads_as_what_was_trained(name, tmp_path, capsys, monkeypatch):
    """From a checkpoint's folder to the official layout and back: equal weights, equal images."""
    monkeypatch.setitem(mar_parts.MAR_SIZES, "tiny", MarConfig(**MAR))  # official files do not tell the heads
    family = FAMILIES[name](tmp_path)
    policy = family.load()
    with torch.no_grad():
        for parameter in policy.backbone_parameters():
            parameter += 0.01
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    policy.save(checkpoint / "policy.safetensors", {"step": "3"})
    settings = {"name": name, "ar_steps": 4, "diffusion_steps": 5, "guidance": 2.5, "options": family.options}
    (checkpoint / "manifest.json").write_text(json.dumps({"settings": {"policy": settings}}))

    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert f"in the official layout of {name}" in capsys.readouterr().out
    found = tmp_path / "out"
    by_the_weights = {"vae": None} if "vae" in family.options else {}
    again = family.load(found if name != "small" else found / "policy.safetensors", **by_the_weights)
    for key, value in policy.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    one, two = (p.rollout(family.prompts, [1, 2, 3, 4]) for p in (policy, again))
    assert torch.equal(one.tokens, two.tokens)
    assert (policy.decode(one.tokens) == again.decode(two.tokens)).all()


def test_a_users_mistake_is_one_line(tmp_path, capsys):
    FAMILIES["small"](tmp_path)
    weights = str(tmp_path / "small.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors", {"format": "pt"})
    (tmp_path / "text.safetensors").write_text("text")
    for source, out, words in (
        (weights, "full", "full is there and not an empty folder"),
        (str(tmp_path / "full"), "out", "holds no trained weights"),
        (str(tmp_path / "nowhere"), "out", "there is no checkpoint at"),
        (str(tmp_path / "other.safetensors"), "out", "was not written by this trainer"),
        (str(tmp_path / "text.safetensors"), "out", "is not a safetensors file"),
    ):
        assert export.main([source, str(tmp_path / out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trainer/export.py: error: ")
        assert words in line
    assert not (tmp_path / "out").exists()
    assert export.main([weights, str(tmp_path / "out"), "--policy.ar-steps", "3"]) == 0
    assert SmallPolicy.load(tmp_path / "out" / "policy.safetensors").tokens == 16
