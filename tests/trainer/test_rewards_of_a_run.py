"""What a run makes of its rewards: which model scored, what is told when it is exchanged, and whole groups."""

import pytest

from trainer.config import UserError
from trainer.loop import exchanged, train


def test_an_exchanged_reward_model_is_reported(make_run, server, caplog):
    def score(image, prompt):
        server.revision = "2" if len(server.requests) > 1 else "1"
        return float(image.mean())

    server.score = score
    run = make_run()
    train(run)
    messages = [record.message for record in caplog.records]
    assert messages == ["step 1: reward shapes is now revision 2 (was 1)"]
    assert run.manifest["rewards"] == {"shapes": "2"}


def test_a_reward_that_moves_to_another_device_is_reported(make_run, server, caplog):
    def score(image, prompt):
        server.provenance = {"device": "cuda" if len(server.requests) > 1 else "cpu"}  # of the dtype it says nothing
        return float(image.mean())

    server.score = score
    run = make_run()
    train(run)
    messages = [record.message for record in caplog.records]
    assert messages == ["step 1: reward shapes is now device cuda (was cpu)"]
    assert run.manifest["provenance"] == {"shapes": {"device": "cuda", "dtype": "float32"}}


def test_resuming_tells_of_rewards_that_were_exchanged(make_run, server, capsys):
    asked = iter([False, True])
    run = make_run(stop=lambda: next(asked))
    train(run)
    server.provenance = {"device": "cpu", "dtype": "bfloat16", "new": "x"}
    make_run(checkpoint={"resume": "auto"})
    told = capsys.readouterr().err.splitlines()
    assert "since the checkpoint, reward shapes is now dtype bfloat16 (was float32)" in told
    server.revision = "2"
    resumed = make_run(checkpoint={"resume": "auto"})
    line = "since the checkpoint, reward shapes is now revision 2 (was 1), dtype bfloat16 (was float32)"
    assert line in capsys.readouterr().err.splitlines()
    assert resumed.manifest["rewards"] == {"shapes": "2"}


def test_manifests_from_before_provenance_and_other_rewards_are_no_exchange():
    old = {"rewards": {"a": "1", "gone": "1"}}
    assert exchanged(old, {"rewards": {"a": "1", "new": "1"}, "provenance": {"a": {"device": "cpu"}}}) == []


def test_a_request_holds_whole_groups_whatever_the_batch(make_run, server):
    run = make_run(train={"steps": 1, "rollout_batch": 3})
    train(run)
    (request,) = server.requests
    texts = request.prompts[::4]
    assert request.prompts == [text for text in texts for _ in range(4)]
    assert len(texts) == 3


def test_a_reward_that_compares_needs_several_held_out_images_of_a_prompt(make_run, server, caplog):
    server.relative = True
    with pytest.raises(UserError, match=r"evaluate\.seeds is 1, but shapes compares the images of a prompt"):
        make_run(evaluate={"prompts": 2, "seeds": 1})
    make_run(evaluate={"prompts": 0, "seeds": 1})
    assert caplog.records == []
    make_run(evaluate={"prompts": 2, "seeds": 2})
    (record,) = caplog.records
    assert "shapes compares the images of a prompt with one another: held-out, its mean says nothing" in record.message
