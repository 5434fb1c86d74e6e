import torch


def test_trajectories_split_and_join_by_image(toy):
    whole = toy().rollout()
    assert len(whole) == 4
    joined = type(whole).cat([whole.select(slice(0, 1)), whole.select(torch.tensor([1, 2])), whole.select([3])])
    for name, value in whole.tensors().items():
        assert torch.equal(joined.tensors()[name], value), name


def test_trajectories_survive_flattening(toy):
    whole = toy().rollout()
    flat = whole.tensors()
    assert {"tokens", "full_chains.2", "full_latents.3", "extra_chains"} <= set(flat)
    back = type(whole).from_tensors(flat)
    assert back.full_chains.keys() == {0, 1, 2, 3}
    assert torch.equal(back.full_chains[2], whole.full_chains[2])


def test_trajectories_without_extras_flatten_too(toy):
    assert type(toy().rollout()).from_tensors(toy(extra=0).rollout().tensors()).extra_chains is None
