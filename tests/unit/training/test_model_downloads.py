"""Tests of downloads of models: in processes that end with their progress, and from the Hub's cache."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

from shardscope.training.weights.example_models import find_example, run_process
from shardscope.training.weights.hub_folder import (
    FILES,
    NOT_READ,
    download,
    find_in_cache,
    find_weights_problem,
    is_hub_name,
)

NAME = "acme/small-llama"


def test_a_process_is_killed_when_its_progress_is_cancelled(tmp_path: Path) -> None:
    started = time.monotonic()

    def report() -> None:
        if time.monotonic() - started > 0.5:
            raise KeyboardInterrupt

    code = f"import time; time.sleep(60); open({str(tmp_path / 'left')!r}, 'w')"
    with pytest.raises(KeyboardInterrupt):
        run_process([sys.executable, "-c", code], report)
    assert time.monotonic() - started < 30, "not waited for"


def test_a_process_returns_its_output_or_raises_with_its_end() -> None:
    assert run_process([sys.executable, "-c", "print('done')"], lambda: None) == "done\n"
    with pytest.raises(RuntimeError, match="exit code 3:\nno such thing"):
        run_process(
            [sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"],
            lambda: None,
        )


def test_an_example_that_was_not_fetched_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_example("smollm2-135m-instruct") is None
    folder = tmp_path / "shardscope" / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    assert find_example("smollm2-135m-instruct") == folder
    with pytest.raises(ValueError, match="example_model name"):
        find_example("smollm")


def test_a_model_in_the_cache_of_the_hub_is_found_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("huggingface_hub")
    from huggingface_hub import constants, file_download

    for module in (constants, file_download.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    assert find_in_cache(NAME) is None
    home = tmp_path / "models--acme--small-llama"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    folder = write_folder(home / "snapshots" / "abc")
    assert find_in_cache(NAME) == folder
    (folder / "model.safetensors").unlink()
    assert find_in_cache(NAME) is None, "only the configuration was downloaded"


def test_the_copy_of_the_weights_for_mistrals_own_library_is_not_downloaded() -> None:
    needs("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = ["config.json", "model.safetensors.index.json", *shards, "tokenizer.json"]
    copies = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    read = filter_repo_objects([*files, *copies], allow_patterns=FILES, ignore_patterns=NOT_READ)
    assert list(read) == files
    assert not find_weights_problem([*files, *copies])
    assert "no model.safetensors" in find_weights_problem(["config.json", *copies])


def test_a_hub_that_cannot_be_reached_is_named_after_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{filename}")
    with pytest.raises(RuntimeError, match=f"{NAME} cannot be downloaded"):
        download(NAME, lambda message, fraction: None)


class _Hub(BaseHTTPRequestHandler):
    """A Hub with a model of pickles, and one whose list of files fails."""

    def do_HEAD(self) -> None:
        headers, body = dict[str, str](), b""
        if "/resolve/" in self.path:
            code, headers = 200, {"ETag": '"abc"', "X-Repo-Commit": "a" * 40}
        elif self.path.startswith("/api/models/org/pickle"):
            names = ["config.json", "pytorch_model.bin", "tokenizer.json"]
            siblings = [{"rfilename": name} for name in names]
            tree = [{"type": "file", "path": name, "size": 1, "oid": "1" * 40} for name in names]
            info = {"id": "org/pickle", "sha": "a" * 40, "siblings": siblings, "tags": [], "private": False}
            code, body = 200, json.dumps(tree if "/tree/" in self.path else info).encode()
        else:
            code = 418
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "words"), [("org/pickle", "only safetensors are read"), ("org/broken", "I'm a Teapot")]
)
def test_a_failed_download_begins_with_its_reason(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("huggingface_hub")
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/main/{filename}")
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    try:
        with pytest.raises(RuntimeError) as caught:
            download(name, lambda message, fraction: None)
    finally:
        server.shutdown()
        server.server_close()
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith(f"{name} cannot be downloaded: ") and words in first_line
    assert len(first_line) <= 300, "as much as the view shows"


def test_names_of_the_hub_differ_from_paths() -> None:
    assert is_hub_name(NAME)
    assert not any(
        map(is_hub_name, ("llama", "./acme/llama", "/acme/llama", "~/llama", "a/b/c", "a b/c", ""))
    )
