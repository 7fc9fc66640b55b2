"""Turns of a chat, one by one: the server keeps what it computed of the turn before."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kbit.bench import random_models
from kbit.bench import serve as bench
from kbit.cli import app, serve_gone, serve_loading, serve_requests, serve_signals
from tiny_models import ARCHITECTURES, build, write_config

TURNS, NEW = ("1 2 3 " * 8, "4 5", "6 7 8 9"), 6


@pytest.fixture
def folder(tmp_path):
    config = write_config(ARCHITECTURES["llama"](), tmp_path / "tiny.json")
    random_models.write(str(config), None, tmp_path / "model", torch.device("cpu"))
    return tmp_path / "model"


def asked(port, folder, messages):
    body = {"model": str(folder), "messages": messages, "max_tokens": NEW, "temperature": 0}
    status, answer = bench._request(port, "POST", "/v1/chat/completions", body, 60.0)
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["message"]["content"]


def answered(model, tokenizer, messages):
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    new = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_turns_of_a_chat_get_the_models_answers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = []
    with bench.server(folder, ["--device", "cpu"], start_timeout=120) as (port, _):
        for said in TURNS:
            messages.append({"role": "user", "content": said})
            answer = asked(port, folder, messages)
            assert answer == answered(model, tokenizer, messages)
            messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize(
    ("options", "kept"), [([], 2), (["--prefix-caches", "3"], 3), (["--prefix-caches=0"], 0)]
)
def test_the_server_keeps_as_many_as_it_was_asked_for(options, kept, folder, monkeypatch):
    import transformers.cli.transformers as command
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import CBGenerateManager

    loaded = []
    monkeypatch.setattr(ModelManager, "_load_model", lambda self: build("llama", torch.float32))
    monkeypatch.setattr(command, "main", lambda: loaded.append(ModelManager._load_model(None)))
    # What the command changes in this process.
    for module, name in (
        (serve_requests, "refuse_malformed"),
        (serve_loading, "load_as_other_commands"),
        (serve_signals, "end_by_signals"),
        (serve_gone, "stop_for_clients_that_have_gone"),
        (sys.modules["kbit.cli.serve"], "bars_on_terminals_only"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    lists = [(ModelManager, name) for name in ("list_models", "get_gen_models")]  # a release has one
    for owner, name in (*lists, (CBGenerateManager, "init_cb"), (sys, "argv")):
        monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)
    result = CliRunner().invoke(app, ["serve", str(folder), "--port", "0", *options])
    assert result.exit_code == 0, result.output
    (model,) = loaded
    if kept:
        for seed in range(kept + 1):
            ids = torch.randint(1, 72, (1, 20), generator=torch.Generator().manual_seed(seed))
            model.generate(ids, max_new_tokens=2)
    assert len(model.generate.__func__.of(model) if kept else ()) == kept
    assert ("generate" in vars(model)) == bool(kept)
