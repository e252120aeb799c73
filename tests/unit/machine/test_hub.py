"""The Hub: one request for a name that it does not have, and a message that names the cause."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, thorough

needs("huggingface_hub")

NAMES = ("org/typo", "org/gated", "org/there")
CODE = f"""
import json, time
import shardscope as ss
from shardscope.training.examples.rows import open_rows
for name in {NAMES}:
    for read in (ss.Architecture.from_hf, lambda name: open_rows("Finetune.data", name)):
        began = time.monotonic()
        try:
            answer = str(read(name))
        except ValueError as error:
            answer = str(error)
        print(json.dumps([answer, time.monotonic() - began]), flush=True)
"""
CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": 1000,
    }
).encode()


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with one model, ``org/there``, and a gated one; others are answered with 401, as by the Hub."""

    def do_HEAD(self) -> None:
        found, is_gated = "/org/there/resolve" in self.path, "org/gated" in self.path
        self.send_response(200 if found else 403 if is_gated else 401)
        if is_gated:
            self.send_header("X-Error-Code", "GatedRepo")
        if found:
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(CONFIG) if found else 0))
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(CONFIG)

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def read_names(endpoint: str, home: Path) -> list[tuple[str, float]]:
    """Return the answers for a model and a data set of each name, with their seconds."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True, env=environment, timeout=150
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_mistyped_name_is_refused_after_one_request(endpoint: str, tmp_path: Path) -> None:
    needs("datasets")
    answers, seconds = zip(*read_names(endpoint, tmp_path), strict=True)
    model, data, gated_model, gated_data, read, _ = answers
    assert (
        f"the Hub ({endpoint}) has no model 'org/typo' that this login may read. Nearest fix: check" in model
    )
    assert "has no data set 'org/typo' that this login may read" in data and data.startswith(
        "Finetune.data is"
    )
    assert f"is gated. Nearest fix: accept its terms on {endpoint}/org/gated, then" in gated_model
    assert f"accept its terms on {endpoint}/datasets/org/gated" in gated_data
    assert "num_hidden_layers=3" in read
    assert max(seconds) < 15


@thorough()
def test_a_hub_that_cannot_be_reached_is_reported_at_once(tmp_path: Path) -> None:
    needs("datasets")
    # The discard port: nothing listens on it.
    for answer, seconds in read_names("http://127.0.0.1:9", tmp_path):
        assert "the Hub (http://127.0.0.1:9) cannot be reached: " in answer and seconds < 15
