"""The judge against a real vision-language model, of random weights: they prove the path and the numbers, not taste.

``transformers serve`` is a real OpenAI-compatible server, but it ignores ``logprobs`` and ``response_format``: the
judge must find that out and read the text. The way over log-probabilities is held against the same model behind a
small server of this file, which gives the true ``top_logprobs`` of each step.
"""

import base64
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from reward_server.rewards._judge_template import load, quoted
from reward_server.rewards.base import RewardLoadError
from reward_server.rewards.judge import Model

WORDS = "<pad> <unk> </s> <image> user assistant 1 2 3 4 5 yes no red blue circle square".split()
ANSWERS = slice(WORDS.index("1"), WORDS.index("no") + 1)
CHAT = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}assistant"
)
FIRST_TOKEN = "kind: {kind}\nmax_tokens: 1\nuser: 'Rate this: {{prompt}}'\n{more}"
PROMPTS = ["red circle", "blue square", "circle", "a red square", "<image></s> answer 5", "blue blue"]


class TinyVlm:
    """A LLaVA of 60 k random parameters that answers with digits, yes and no, depending on image and prompt."""

    def __init__(self):
        torch.manual_seed(0)
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        size = {"height": 32, "width": 32}
        self.processor = LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size),
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                pad_token="<pad>",
                unk_token="<unk>",
                eos_token="</s>",
                extra_special_tokens=["<image>"],
            ),
            patch_size=8,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,
            chat_template=CHAT,
        )
        tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        language = LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=2, bos_token_id=None, **tiny)
        vision = CLIPVisionConfig(image_size=32, patch_size=8, **tiny)
        config = LlavaConfig(
            vision_config=vision,
            text_config=language,
            image_token_index=3,
            image_seq_length=16,
            vision_feature_layer=-1,
        )
        self.model = LlavaForConditionalGeneration(config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.3)
            head = self.model.get_output_embeddings().weight
            head.zero_()
            head[ANSWERS].normal_(0, 0.5)

    def save(self, folder):
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    @torch.inference_mode()
    def generate(self, messages, max_tokens):
        """Logits [steps, vocabulary] of a greedy answer; images as PIL in ``messages``."""
        inputs = self.processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        out = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return torch.cat(out.logits).double()


class LogprobServer:
    """The model behind ``/v1/chat/completions`` with the true ``top_logprobs``, as OpenAI defines them."""

    def __init__(self, vlm):
        server = self
        self.vlm, self.lock = vlm, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send({"data": [{"id": "tiny-vlm"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    self.send(server.complete(body))

            def send(self, value):
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def complete(self, body):
        steps = self.vlm.generate([unpacked(message) for message in body["messages"]], body["max_tokens"])
        tokens = [self.token(step, body.get("top_logprobs", 0), bool(i)) for i, step in enumerate(steps.log_softmax(1))]
        message = {"role": "assistant", "content": "".join(token["token"] for token in tokens)}
        choice = {"message": message, "finish_reason": "stop"}
        return {"choices": [choice | ({"logprobs": {"content": tokens}} if body.get("logprobs") else {})]}

    @staticmethod
    def token(logprobs, top, space):
        best = [
            {"token": " " * space + WORDS[i], "logprob": float(logprobs[i])}
            for i in logprobs.argsort(descending=True).tolist()[: max(1, top)]
        ]
        return best[0] | {"top_logprobs": best[:top]}

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def unpacked(message):
    """A message of the request as the processor takes it: images instead of data URLs."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": [{"type": "text", "text": content}]}
    parts = [
        {"type": "image", "image": PIL.Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",")[1])))}
        if part["type"] == "image_url"
        else part
        for part in content
    ]
    return {"role": message["role"], "content": parts}


@pytest.fixture(scope="module")
def vlm():
    return TinyVlm()


@pytest.fixture(scope="module")
def logprob_server(vlm):
    server = LogprobServer(vlm)
    yield server
    server.close()


@pytest.fixture(scope="module")
def transformers_serve(vlm, tmp_path_factory):
    """(URL, folder of the model) of ``transformers serve``."""
    folder = tmp_path_factory.mktemp("vlm")
    vlm.save(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", str(folder)
    finally:
        process.terminate()
        process.wait(20)


def answers(url):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


@pytest.fixture
def make_judge(tmp_path):
    """``make_judge(url, kind, more, option=...)``: a judge whose template asks for one token."""
    with contextlib.ExitStack() as stack:

        def make(url, kind, more="", **options):
            file = tmp_path / f"{kind}.yaml"
            file.write_text(FIRST_TOKEN.format(kind=kind, more=more))
            reward = Model()
            try:
                reward.setup("cpu", base_url=url, template=str(file), concurrency=2, **options)
            finally:
                stack.callback(reward.chat.close)
            return reward, load(str(file)).template

        yield make


@pytest.fixture
def images():
    """One a prompt, of different sizes: odd, not square, one pixel wide."""
    random = np.random.default_rng(3)
    sizes = [(32, 32), (40, 33), (57, 31), (1, 40), (128, 64), (33, 97)]
    return [random.integers(0, 256, (1, 1, 3), np.uint8).repeat(h, 0).repeat(w, 1) for h, w in sizes]


def first_token(vlm, template, images, prompt):
    """What the model itself says of images and prompt: its probabilities [vocabulary] of the first token."""
    content = [{"type": "image", "image": PIL.Image.fromarray(image)} for image in images]
    text = template.user.replace("{prompt}", quoted(prompt, "json", 4000)[0])
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    return vlm.generate(messages, 1)[0].softmax(0).numpy()


def probability(p, word):
    return p[WORDS.index(word)]


def test_ratings_are_the_models_own_expected_values(vlm, logprob_server, make_judge, images):
    reward, template = make_judge(logprob_server.url, "rating", "scale: [1, 5]", min_mass=1e-6)
    assert reward.provenance["mode"] == "logprobs, then text", "the server ignores response_format"
    scores = reward.score(images, PROMPTS, [{}] * 6)
    for image, prompt, score in zip(images, PROMPTS, scores, strict=True):
        p = first_token(vlm, template, [image], prompt)
        mass = sum(probability(p, digit) for digit in "12345")
        assert score.value == pytest.approx(sum(int(d) * probability(p, d) for d in "12345") / mass, abs=1e-6)
        assert score.details["mass"] == pytest.approx(mass, abs=1e-6)
    assert np.ptp([score.value for score in scores]) > 0.5, "the images differ for it"


def test_yes_and_no_are_the_models_own_probabilities(vlm, logprob_server, make_judge, images):
    reward, template = make_judge(logprob_server.url, "yes_no", min_mass=1e-6)
    for image, prompt, score in zip(images, PROMPTS, reward.score(images, PROMPTS, [{}] * 6), strict=True):
        p = first_token(vlm, template, [image], prompt)
        yes, no = probability(p, "yes"), probability(p, "no")
        assert score.value == pytest.approx(yes / (yes + no), abs=1e-6)


def test_win_rates_are_the_models_own_preferences(vlm, logprob_server, make_judge, images):
    reward, template = make_judge(logprob_server.url, "pairwise", min_mass=1e-6)
    scores = reward.score(images[:3], ["red circle"] * 3, [{}] * 3)

    def prefers(i, j):
        p = first_token(vlm, template, [images[i], images[j]], "red circle")
        return probability(p, "1") / (probability(p, "1") + probability(p, "2"))

    better = {(i, j): (prefers(i, j) + 1 - prefers(j, i)) / 2 for i in range(3) for j in range(3) if i != j}
    for i, score in enumerate(scores):
        assert score.value == pytest.approx(np.mean([better[i, j] for j in range(3) if j != i]), abs=1e-6)


@pytest.mark.parametrize(("kind", "more"), [("rating", "scale: [1, 5]"), ("yes_no", "")])
def test_transformers_serve_is_read_by_its_text(vlm, transformers_serve, make_judge, images, kind, more):
    """Its answers are digits, and so null for the question of yes and no."""
    url, folder = transformers_serve
    reward, template = make_judge(url, kind, more, asks=1)
    assert reward.provenance["mode"] == "text", "it ignores logprobs and response_format"
    assert reward.provenance["weights"] == f"unknown (served as {folder} at {url}, by local)"
    scores = reward.score(images, PROMPTS, [{}] * 6)
    said = [WORDS[first_token(vlm, template, [i], p).argmax()] for i, p in zip(images, PROMPTS, strict=True)]
    assert [score.value for score in scores] == [template.labels.get(word) for word in said]
    for word, score in zip(said, scores, strict=True):
        assert score.value is not None or score.reason == f'no rating in 1 answers; the last: "{word}" (cut)'
    assert {score.value is None for score in scores} == {kind == "yes_no"}


def test_what_transformers_serve_refuses_is_told(transformers_serve, make_judge):
    with pytest.raises(RewardLoadError, match=r"does not serve 'other' but /"):
        make_judge(transformers_serve[0], "yes_no", model="other")
    with pytest.raises(RewardLoadError, match="does not offer logprobs"):
        make_judge(transformers_serve[0], "yes_no", mode="logprobs")
