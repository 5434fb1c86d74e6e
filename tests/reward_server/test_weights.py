import pickle
from types import SimpleNamespace

import httpx
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from reward_server import weights
from reward_server.rewards.base import RewardLoadError
from reward_server.weights import Source


def test_files_of_a_folder_are_found_by_name_pattern_and_alternative(tmp_path):
    for name in ("b.bin", "model-2.safetensors", "model-1.safetensors"):
        (tmp_path / name).touch()
    source = Source(str(tmp_path), ("a.safetensors|b.bin", "model-*.safetensors"))
    assert weights.locate(source, reward="r") == tmp_path
    assert weights.find(tmp_path, "a.safetensors|b.bin").name == "b.bin"
    assert weights.find(tmp_path, "model-*.safetensors").name == "model-1.safetensors"
    with pytest.raises(RewardLoadError, match=r"lacks x\.pt or y\.pt$"):
        weights.locate(Source(str(tmp_path), ("b.bin", "x.pt|y.pt")), reward="r")
    with pytest.raises(RewardLoadError, match="is not a folder"):
        weights.locate(Source("/no/such/folder", ("a",)), reward="r")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub's client; ``hub(files)`` puts a snapshot of org/repo there, as a download does."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def put(files):
        commit = "0123456789abcdef0123456789abcdef01234567"
        repo = tmp_path / "models--org--repo"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(commit)
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, data in files.items():
            (snapshot / name).write_bytes(data)
        return snapshot

    return put


def test_what_is_in_the_hubs_cache_is_found_and_what_is_not_says_how_to_get_it(hub):
    source = Source("org/repo", ("w.pt", "config.json"), licence="MIT")
    with pytest.raises(RewardLoadError, match=r"w\.pt, config\.json of org/repo \(licence: MIT\).*prefetch red"):
        weights.locate(source, reward="red")
    snapshot = hub({"w.pt": b"1"})
    with pytest.raises(RewardLoadError, match=r"not on this machine: config\.json of org/repo"):
        weights.locate(source, reward="red")
    (snapshot / "config.json").write_bytes(b"{}")
    assert weights.locate(source, reward="red") == snapshot


def test_a_failed_download_is_one_line(hub, monkeypatch):
    def refuse(*arguments, **keywords):
        raise httpx.ConnectError("no\nroute")

    monkeypatch.setattr("huggingface_hub.model_info", refuse)
    with pytest.raises(RewardLoadError, match="org/repo cannot be downloaded: ConnectError: no route"):
        weights.download(Source("org/repo", ("w.pt",)))


def test_the_first_alternative_that_the_hub_has_is_downloaded_once(hub, monkeypatch):
    asked = []

    def fetch(repo, revision, **options):
        if options.pop("local_files_only", False):
            raise LocalEntryNotFoundError("not here")
        asked.append((repo, revision, options["allow_patterns"]))
        return str(hub({}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    there = [SimpleNamespace(rfilename=name) for name in ("b.pt", "c.pt", "m-1.bin", "m-2.bin")]
    monkeypatch.setattr("huggingface_hub.model_info", lambda repo, revision: SimpleNamespace(siblings=there))
    with pytest.raises(RewardLoadError, match=r"org/repo at v2 has no b\.pt or c\.pt, m-\*\.bin"):
        weights.download(Source("org/repo", ("b.pt|c.pt", "m-*.bin"), revision="v2"))
    assert asked == [("org/repo", "v2", ["b.pt", "m-*.bin"])]


def test_shards_that_an_interrupted_download_left_out_are_fetched(hub, monkeypatch):
    snapshot = hub({"m-1.bin": b"1"})
    there = [SimpleNamespace(rfilename=name) for name in ("m-1.bin", "m-2.bin")]
    monkeypatch.setattr("huggingface_hub.model_info", lambda repo, revision: SimpleNamespace(siblings=there))
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, **options: asked.append(options["allow_patterns"]) or snapshot
    )
    assert weights.download(Source("org/repo", ("m-*.bin",))) == snapshot
    assert asked == [["m-*.bin"]]


def test_what_is_there_is_not_downloaded_again(hub, monkeypatch, tmp_path):
    def refuse(*arguments, **keywords):
        raise AssertionError("the network is not needed")

    monkeypatch.setattr("huggingface_hub.model_info", refuse)
    snapshot = hub({"b.pt": b"1"})
    assert weights.download(Source("org/repo", ("a.pt|b.pt",))) == snapshot
    assert weights.download(Source(str(snapshot), ("b.pt",))) == snapshot  # a local one is only looked at


STATE = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "wrapped.pt", "old.pt"])
def test_state_dicts_of_every_format(tmp_path, name):
    path = tmp_path / name
    if name == "w.safetensors":
        save_file(STATE, path)
    elif name == "wrapped.pt":
        torch.save({"epoch": 3, "state_dict": STATE}, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=name != "old.pt")
    state = weights.read_state_dict(path)
    assert state.keys() == STATE.keys()
    assert all(torch.equal(state[key], STATE[key]) for key in STATE)


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


def test_files_that_are_not_plain_weights_are_refused(tmp_path, capsys):
    path = tmp_path / "w.pt"
    path.write_bytes(pickle.dumps({"a": Hostile()}))
    with pytest.raises(RewardLoadError, match="is not a plain file of weights, and is not run: it"):
        weights.read_state_dict(path)
    torch.save({"a": Hostile()}, path)
    with pytest.raises(RewardLoadError, match=r"is not run: it refers to the code \S*print$"):
        weights.read_state_dict(path)
    assert capsys.readouterr().out == ""
    torch.save({"a": 1}, path)
    with pytest.raises(RewardLoadError, match="does not hold a state dict"):
        weights.read_state_dict(path)
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RewardLoadError, match=r"w\.pt cannot be read"):
        weights.read_state_dict(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(RewardLoadError, match=r"w\.pt is a pointer of git LFS, not the weights: run `git lfs pull`"):
        weights.read_state_dict(path)
    (tmp_path / "w.safetensors").write_bytes(b"no header")
    with pytest.raises(RewardLoadError, match=r"w\.safetensors cannot be read"):
        weights.read_state_dict(tmp_path / "w.safetensors")
    with pytest.raises(RewardLoadError, match="cannot be read"):
        weights.read_state_dict(tmp_path / "none.pt")


def test_loading_is_strict_and_names_the_keys(tmp_path):
    module = torch.nn.Linear(2, 3)
    state = {"weight": torch.ones(3, 2), "bias": torch.full((3,), 2.0)}
    weights.load_strictly(module, state, "file")
    assert module(torch.ones(1, 2)).tolist() == [[4.0, 4.0, 4.0]]
    wrong = {"weight": torch.ones(2, 2), "scale": torch.ones(1)}
    with pytest.raises(RewardLoadError, match="1 missing: bias; 1 unexpected: scale; 1 of another shape: weight"):
        weights.load_strictly(module, wrong, "file")
    many = state | {f"x{i}": torch.ones(1) for i in range(7)}
    with pytest.raises(RewardLoadError, match=r"7 unexpected: x0, x1, x2, x3, x4, \.\.\."):
        weights.load_strictly(module, many, "file")


def test_keys_are_renamed_or_left_out():
    names = {"a": "c", "b": None}
    assert weights.rename(STATE, names.get).keys() == {"c"}


def test_two_files_of_one_name_both_count_in_the_digest(tmp_path):
    files = [tmp_path / folder / "model.safetensors" for folder in ("clip", "head")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"same")
    digests = [weights.sha256(*files)]
    for file in files:
        file.write_bytes(file.parent.name.encode())
        digests.append(weights.sha256(*files))
    assert len(set(digests)) == 3
    assert weights.sha256(*files[::-1]) == digests[-1]


def test_the_digest_is_that_of_sha256sum(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert weights.sha256(tmp_path / "a") == digest
    both = weights.sha256(tmp_path / "b", tmp_path / "a")
    assert both == weights.sha256(tmp_path / "a", tmp_path / "b")
    (tmp_path / "sums").write_text(
        f"{digest}  a\ne3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  b\n"
    )
    assert both == weights.sha256(tmp_path / "sums")
