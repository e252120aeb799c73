"""Pushing a model to the Hub: huggingface_hub's own requests to a stand-in of the Hub on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from written_runs import write_run

import shardscope as ss
from shardscope.records.json_files import read_json, write_json

needs("huggingface_hub")

from huggingface_hub import constants  # noqa: E402

TOKEN = "hf_" + "a" * 34


class StandIn(ThreadingHTTPServer):
    """The requests of a push, answered as the Hub does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.summary = ""
        self.tokens: set[str | None] = set()
        self.is_private = True
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if self.path == "/api/agent-harnesses":
            # huggingface_hub asks for this list once a day, whatever it is used for, and sends no token.
            self.send_error(404)
            return
        self._answer({"id": "me/tuned", "private": self.server.is_private, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.url}/me/tuned", "name": "me/tuned"}, self.server.status)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/models/me/tuned/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": modes})
        elif self.path == "/api/models/me/tuned/commit/main":
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "header":
                    self.server.summary = entry["value"]["summary"]
                else:
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            address = f"{self.server.url}/me/tuned/commit/{'0' * 40}"
            answer = {"success": True, "commitOid": "0" * 40, "commitUrl": address}
            self._answer(answer, self.server.status)
        else:
            self._answer({"error": f"unexpected request {self.path}"}, 404)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        # Both are read when huggingface_hub is imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> ss.Run:
    """A run that has exported adapters over a base in a private folder."""
    folder = write_run("my-run", parent=tmp_path, task=ss.Pretrain(num_steps=20, export=True))
    record = read_json(folder / "run.json") | {"base": {"weights": "/secret-place/llama", "sample": "s"}}
    write_json(folder / "run.json", record)
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / "export" / name).parent.mkdir(exist_ok=True)
        (folder / "export" / name).write_text(name)
    (folder / "export" / ".hidden.json").write_text("{}")
    (folder / "export" / "notes.pickle").write_text("not of a model")
    return ss.Run.attach(folder)


def test_the_exported_files_are_uploaded_with_their_card(hub: StandIn, run: ss.Run) -> None:
    address = run.push_to_hub("me/tuned")
    assert address == f"{hub.url}/me/tuned"
    (request,) = hub.created
    # Versions of huggingface_hub send one or the other.
    assert request.get("visibility") == "private" or request.get("private") is True
    assert (request["name"], request.get("organization")) == ("tuned", "me")
    expected = {path.name: path.read_bytes() for path in run.model.iterdir()}
    del expected[".hidden.json"], expected["notes.pickle"]
    assert hub.files == expected and "README.md" in expected
    assert hub.files["README.md"].decode() == run.model_card()
    assert hub.summary == "Upload the model of my-run"
    assert hub.tokens == {f"Bearer {TOKEN}"}
    everything = b"".join(hub.files.values())
    assert TOKEN.encode() not in everything and b"secret-place" not in everything


def test_merged_adapters_are_uploaded_where_asked(hub: StandIn, run: ss.Run) -> None:
    with pytest.raises(ValueError, match=r"push_to_hub run is .*adapters are merged.*ss\.merge\(run\)"):
        run.push_to_hub("me/tuned", merged=True)
    (run.folder / "merged").mkdir()
    (run.folder / "merged" / "model.safetensors").write_text("weights")
    run.push_to_hub("me/tuned", merged=True)
    assert sorted(hub.files) == ["README.md", "model.safetensors"]


def test_nothing_is_pushed_to_a_public_repository_that_should_be_private(hub: StandIn, run: ss.Run) -> None:
    hub.is_private = False
    with pytest.raises(ValueError, match=r"me/tuned.*this one exists, and is public.*private=False"):
        run.push_to_hub("me/tuned")
    assert not hub.files
    run.push_to_hub("me/tuned", private=False)
    assert hub.files


def test_a_link_is_not_followed(hub: StandIn, run: ss.Run, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a secret of this user")
    (run.model / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"vocab\.txt.*regular files, no links"):
        run.push_to_hub("me/tuned")
    assert not hub.created and not hub.files


def test_a_missing_token_and_a_missing_model_are_refused(
    hub: StandIn, run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(ValueError, match=r"push_to_hub token is 'missing'.*hf auth login.*HF_TOKEN"):
        run.push_to_hub("me/tuned")
    bare = ss.Run.attach(write_run("bare", parent=tmp_path))
    with pytest.raises(ValueError, match="launched without export=True"):
        bare.push_to_hub("me/tuned")
    assert not hub.created


@pytest.mark.parametrize("name", ["a/b/c", "", "me/--x", 3])
def test_an_impossible_name_is_refused(name: Any, hub: StandIn, run: ss.Run) -> None:
    with pytest.raises(ValueError, match="push_to_hub repo_id"):
        run.push_to_hub(name)
    assert not hub.created


def test_what_the_hub_answers_is_an_error_message(
    hub: StandIn, run: ss.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.status = 403
    with pytest.raises(RuntimeError, match=r"not pushed to me/tuned on http.*403.*hf auth whoami"):
        run.push_to_hub("me/tuned")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"not pushed to me/tuned.*check the network"):
        run.push_to_hub("me/tuned")


def test_the_command_for_a_gguf_names_the_whole_model(run: ss.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gguf_command run is .*ss\.merge\(run\)"):
        run.gguf_command()
    (run.folder / "merged").mkdir()
    note, command = run.gguf_command().splitlines()
    assert note.startswith("# Not tested")
    assert command == (
        f"python convert_hf_to_gguf.py {run.folder}/merged --outfile {run.folder}/my-run.gguf --outtype auto"
    )
    # A run of full weights exports the whole model. Names are quoted for the shell.
    (run.model / "adapter_config.json").unlink()
    assert "/export --outfile" in run.gguf_command()
    run.folder.rename(tmp_path / "$(reboot)")
    assert f"'{tmp_path}/$(reboot)/export'" in ss.Run.attach(tmp_path / "$(reboot)").gguf_command()
