"""How a server's process ends: when it is told to stop, and for an option that it does not know."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kbit
import warm_processes
from kbit.bench import random_models
from kbit.bench import serve as bench
from serve_processes import BATCHED, own_process
from tiny_models import ARCHITECTURES, write_config

if sys.platform == "win32":
    pytest.skip("signals of Unix", allow_module_level=True)

WAYS = pytest.mark.parametrize("options", [[], BATCHED], ids=["one by one", "batched"])
LAST = {signal.SIGINT: "Interrupted."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model that may answer for minutes."""
    root = tmp_path_factory.mktemp("served")
    config = ARCHITECTURES["llama"]()
    config.max_position_embeddings = 100_000
    name = str(write_config(config, root / "tiny.json"))
    policy = kbit.QuantizationPolicy(bits=4)
    return random_models.write_pair(name, None, root, policy, torch.device("cpu"))[1]


@WAYS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_server_exits_as_other_commands_do(number, options, folder):
    with own_process(folder, options) as (process, _):
        process.send_signal(number)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 128 + number, log
    assert "Traceback" not in log
    assert number not in LAST or log.splitlines()[-1] == LAST[number]


@WAYS
def test_a_closed_terminal_lets_an_answer_end(options, folder):
    with own_process(folder, options) as (process, port), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bench.chat, port, str(folder), "1", 400)
        time.sleep(0.5)
        process.send_signal(signal.SIGHUP)
        assert answer.result()["usage"]["completion_tokens"] == 400
        _, log = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP, log
    assert "Traceback" not in log


def test_nohup_keeps_a_server(folder):
    with own_process(folder, [], signal.SIG_IGN) as (process, port):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert bench.chat(port, str(folder), "1", 3)["usage"]["completion_tokens"] == 3


def test_a_second_signal_does_not_wait_for_an_answer(folder):
    with own_process(folder, []) as (process, port), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bench.chat, port, str(folder), "1", 50_000)
        time.sleep(1)
        for number in (signal.SIGINT, signal.SIGINT):
            process.send_signal(number)
            time.sleep(1)
        _, log = process.communicate(timeout=60)
        assert answer.exception() is not None
    assert process.returncode == 128 + signal.SIGINT, log
    assert log.splitlines()[-1] == "Interrupted."


FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_a_stuck_event_loop(number, folder, tmp_path):
    """The model's template does not end: nothing else runs in the server's main thread any more."""
    stuck = shutil.copytree(folder, tmp_path / "stuck")
    template = f"{{% for m in messages %}}{{% if m.content == '1' %}}{FOREVER}{{% endif %}}w1{{% endfor %}}"
    (stuck / "chat_template.jinja").write_text(template)
    with own_process(stuck, []) as (process, port), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bench.chat, port, str(stuck), "1", 2, timeout=30.0)
        time.sleep(1)
        for _ in range(2):
            assert process.poll() is None
            process.send_signal(number)
            time.sleep(1)
        _, log = process.communicate(timeout=20)
        assert answer.exception() is not None
    assert process.returncode == 128 + number, log
    assert number not in LAST or log.splitlines()[-1] == LAST[number]


def test_a_signal_that_arrives_twice_is_one(folder):
    """As `timeout` sends it: to the command, and to the command's group."""
    with own_process(folder, []) as (process, port), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bench.chat, port, str(folder), "1", 400)
        time.sleep(0.5)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert answer.result()["usage"]["completion_tokens"] == 400
        _, log = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, log


def test_usage_errors_name_the_command(folder):
    command = warm_processes.command("-m", "kbit", "serve", folder, "--port", "0", "--bogus")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "Usage: python -m kbit serve" in ran.stderr
    assert "`transformers serve --help` lists all options." in ran.stderr
    assert "--cb-block-size" not in ran.stderr
