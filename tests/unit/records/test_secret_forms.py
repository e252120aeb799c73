"""Tests of secrets recognized by variable name or token format, and of text that only resembles one."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from shardscope.records.redaction import LogCleaner, read_masked_size, redact, secret_values

KEY = "aB3dE5gH7jK9mN1p"
HEX = "0f1e2d3c4b5a6978"
JWT = f"{'eyJ'}hbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSIsImV4cCI6MX0.{KEY}-_{KEY}"
FORMS = [
    "hf_" + "oauth_" + JWT,
    "hf_" + "jwt_" + JWT,
    *(f"gh{kind}_{KEY * 2}abcd" for kind in "opusr"),
    "github" + f"_pat_{KEY}_{KEY * 2}",
    "gl" + f"dt-{KEY}abcd",
    "gl" + f"pat-{KEY * 2}.01.{KEY[:9]}",
    "gl" + f"sa_{KEY * 2}_{HEX[:8]}",
    "npm" + f"_{KEY * 2}abcd",
    "pypi" + f"-AgEIcHlwaS5vcmc{KEY * 4}",
    "dckr" + f"_pat_{KEY}abcdefghijk",
    "AI" + f"za{KEY * 2}abc",
    "GOC" + f"SPX-{KEY}_{KEY[:11]}",
    "ya29" + f".{KEY}-{KEY}",
    "AB"[:1] + "SIA" + "ABCD2345" * 2,
    "LT" + f"AI{KEY}abcd",
    "hvs" + f".{KEY * 2}",
    "dap" + f"i{HEX * 2}",
    "nv" + f"api-{KEY * 4}",
    "gs" + f"k_{KEY * 3}",
    "r8" + f"_{KEY * 2}abcde",
    "xa" + f"i-{KEY * 5}",
    "xo" + f"xp-1234567890-1234567890-{KEY}",
    "xa" + f"pp-1-A012-345-{HEX}",
    "S" + f"G.{KEY}abcdef.{KEY * 2}abcdefghijk",
    "S" + f"K{HEX * 2}",
    "pn" + f"u_{KEY * 2}abcd",
    "AGE-SECRET" + f"-KEY-1{'Q2' * 29}",
    JWT,
    f"{JWT}.{KEY}.{KEY}",  # Encrypted: five parts
]
AROUND = [
    ("sk" + "_live_", f"{KEY}abcdefgh", " paid"),
    ("12345678:", "A" + f"A{KEY * 2}a", " bot"),
    ("https://hooks.slack" + ".com/services/", f"T0123/B0123/{KEY}abcdefgh", " posted"),
    ("https://discord.com/api" + "/webhooks/", f"123456789012/{KEY * 4}", " posted"),
    ("AccountName=me;Account" + "Key=", f"{KEY * 5}abcdef==", ";"),
    ("abc8Q" + "~", f"{KEY * 2}", " set"),
    ("https://b.s3.amazonaws.com/x?X-Amz" + "-Signature=", HEX * 4, "&x=1"),
    ("redis://", ":hunter2hunter2", "@host:6379/0"),
    ("Authorization: Basic ", base64.b64encode(b"me:s3cret!").decode(), "\r"),
    ("basic ", base64.b64encode(b"somebody:pw").decode(), " was sent"),
    ("{'authorization': 'Basic ", base64.b64encode(b"a:b-c-d-e").decode(), "'}"),
    ('"Authorization\\": \\"Bearer ', "onlyletters", '\\"'),
    ("Authorization: token ", HEX * 2, ","),
    (
        "-----BEGIN RSA PRIVATE" + " KEY-----",
        f"\n{KEY * 4}\n{KEY}+/==\n",
        "-----END RSA PRIVATE" + " KEY-----",
    ),
    ("-----BEGIN PRIVATE" + " KEY-----", f"\\n{KEY * 4}\\n", "-----END PRIVATE" + " KEY-----"),
]


@pytest.mark.parametrize(
    ("before", "secret", "after"), [*((" got ", secret, " from the host") for secret in FORMS), *AROUND]
)
def test_known_token_formats_are_masked(before: str, secret: str, after: str, tmp_path: Path) -> None:
    clean = f"{before}{'*' * len(secret)}{after}"
    assert redact(f"{before}{secret}{after}") == clean
    log = tmp_path / "log"
    log.write_bytes(f"step 1\n{before}{secret}{after}\n".encode())
    LogCleaner(log).clean()
    assert log.read_bytes() == f"step 1\n{clean}\n".encode()


@pytest.mark.parametrize(
    "plain",
    [
        "commit 9f8e7d6c5b4a39281706f5e4d3c2b1a098765432 sha256:" + HEX * 4,
        "550e8400-e29b-41d4-a716-446655440000 run 20261122_055719 2026-11-22T05:57:19.123456Z 3.0e-04",
        "Basic authentication, Basic understanding of BasicTokenizer, Basic LlamaForCausalLM, basic training",
        "the bearer authentication failed; Bearer token-authentication. Authorization: required for this",
        "/home/me/ghosts_of_the_machine_and_other_words_in_a_path weighs_about_two_hundred_kilograms_in_all",
        "npm_config_registry=https://registry.npmjs.org/ npm_package_json glossary-of-all-the-words-there",
        "ASIATICELEPHANTSANDMORE MKVAKIAGLVLLPPTTEEDDKKWWYY ACCAGTACGTACGTACGTACGTACGT",
        "eyJ eyJson.gz eyJust-a-name-of-a-file.json SG.vector SKIPPED SKU12345 disk_live_bytes_of_the_host_x",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE----- -----BEGIN PRIVATE KEY----- is missing",
        "https://user@host/x tcp://:29500/ http://[::1]:8888/lab 12:30:AA x@y.z mask_test_index xoxo xapp",
        "LTAIR A Google API: AIza... hf_hub_download hf_transfer hf_xet_high_performance_mode r8_ gsk_ dapi",
        "~/.cache/huggingface/token ~0.5 s model-00001-of-00004.safetensors hvs.txt pypi-attestations ya29.x",
    ],
)
def test_text_that_resembles_a_secret_is_not_masked(plain: str) -> None:
    assert redact(plain) == plain


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "MYSQL_PWD",
        "DB_PASS",
        "SSHPASS",
        "REDISCLI_AUTH",
        "ES_PASSPHRASE",
        "my_apikey",
        "ID_JWT",
    ],
)
def test_variables_with_secrets_are_recognized_by_name(name: str) -> None:
    assert secret_values({name: "correct horse"}) == ["correct horse"]


def test_a_secret_that_starts_like_a_path_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = f"/x{KEY}+{KEY}/abcd="
    for value in (secret, f"/{secret}", "~tilde-first"):
        assert secret_values({"AWS_SECRET_ACCESS_KEY": value}) == [value]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert redact(f"key {secret}, ok") == f"key {'*' * len(secret)}, ok"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "work-in-progress"),
        ("OLDPWD", "work-in-progress"),
        ("OLD_PWD", str(Path.cwd())),
        ("SSH_KEY", sys.executable),
        ("TLS_KEY", "~/certificates/key.pem"),
        ("CONDA_PREFIX", "environment"),
        ("HF_TOKEN_PATH", "somewhere/token"),
        ("PGPASSFILE", "pgpass.conf"),
        ("SSH_ASKPASS", "ksshaskpass"),
        ("BYPASS", "everything"),
        ("COMPASS", "north-north-east"),
        ("MAX_TOKENS", "100000000"),
        ("SSH_PUBLIC_KEY", "ssh-ed25519 AAAAC3"),
        ("DB_PASS", "secret"),  # A common word, which logs contain legitimately.
    ],
)
def test_other_variables_are_not_secrets(name: str, value: str) -> None:
    assert secret_values({name: value}) == []


def test_long_key_or_jwt_written_in_pieces_is_masked(tmp_path: Path) -> None:
    body = f"{KEY * 4}\n" * 100
    whole = f"-----BEGIN PRIVATE KEY-----\n{body}-----END PRIVATE KEY-----\ntoken {JWT}{KEY * 100} end\n"
    log = tmp_path / "log"
    cleaner = LogCleaner(log)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100_000 + b"\n")
        for start in range(0, len(whole), 97):
            writer.write(whole[start : start + 97].encode())
            cleaner.clean()
    assert KEY not in log.read_text() and log.read_text().endswith("* end\n")


CREDENTIAL = json.dumps({"type": "service", "client": "q7x9-of-mine", "word": "zzTop 1234 abcd"}, indent=2)


@pytest.mark.parametrize("num_idle_checks", [0, 1])
@pytest.mark.parametrize(
    ("secret", "part"),
    [
        ("-----BEGIN RSA PRIVATE KEY-----\n" + f"{KEY}\n" * 5 + "-----END RSA PRIVATE KEY-----", KEY),
        (CREDENTIAL, "zzTop"),
    ],
    ids=["private key", "credential in JSON"],
)
def test_a_secret_of_several_lines_is_masked_before_it_is_read(
    secret: str, part: str, num_idle_checks: int, tmp_path: Path
) -> None:
    """However long the pauses between its lines are."""
    log, received = tmp_path / "log", b""
    log.touch()
    cleaner = LogCleaner(log, lambda: secret_values({"CLIENT_CREDENTIALS": CREDENTIAL}))
    read_masked_size(log)
    with log.open("ab", buffering=0) as writer:
        for line in f"start\n{secret}\nend\n".splitlines(keepends=True):
            writer.write(line.encode())
            for _ in range(1 + num_idle_checks):
                cleaner.clean()
            received += log.read_bytes()[len(received) : read_masked_size(log)]
    assert part not in log.read_text() and part.encode() not in received
    assert received.startswith(b"start\n")
    list(cleaner.finish())
    assert read_masked_size(log) == log.stat().st_size and log.read_text().endswith("\nend\n")


def test_a_credential_of_several_lines_is_masked_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_CREDENTIALS", CREDENTIAL)
    environment = dict(os.environ)
    indented = "\n".join(f"[rank 0]  {line}" for line in CREDENTIAL.splitlines())
    for text in (CREDENTIAL, indented, repr(environment), json.dumps(environment)):
        assert "zzTop" in text and "zzTop" not in redact(text)


def test_of_a_credential_in_an_ini_file_only_the_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "[default]",
        "region = us-east-1",
        "output=json-stream",
        f"aws_secret_access_key = {KEY}/{KEY}==",
        f"export sessionToken='{HEX}'",
    ]
    monkeypatch.setenv("AWS_CREDENTIALS", "\n".join(lines))
    for plain in (
        "the profile [default] is used",
        "region = us-east-1",
        "in us-east-1",
        "output=json-stream",
    ):
        assert redact(plain) == plain
    for line in (*lines[3:], f"got {KEY}/{KEY}==, ok", f"got {HEX}, ok"):
        assert KEY not in redact(line) and HEX not in redact(line)
    assert redact("\n".join(lines)) == "*" * len("\n".join(lines))


def test_a_secret_in_json_is_masked_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"{KEY}ab/\n{KEY}cd=="
    fields = {"type": "service", "client_secret": f'{HEX}"x', "private_key": body, "port": 54321678}
    monkeypatch.setenv("CLIENT_CREDENTIALS", json.dumps(fields, indent=2))
    text = f'port: 54321678, secret {HEX}"x, key {KEY}cd==, {body!r}'
    assert redact(text).startswith("port: 54321678, secret *")
    assert HEX not in redact(text) and KEY not in redact(text)


@pytest.mark.parametrize("line", ["expected -----BEGIN PRIVATE KEY-----, not x\n", "-----BEGIN EPOCH-----\n"])
def test_a_line_that_begins_no_key_is_not_held_back(line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(line)
    cleaner = LogCleaner(log)
    read_masked_size(log)
    cleaner.clean()
    assert read_masked_size(log) == len(line)


def test_many_secrets_in_one_text_are_masked() -> None:
    """Overlapping secrets are masked too. Regression: the whole text was copied for each secret."""
    line = f"https://me:{JWT}@host Bearer {JWT}\n"
    expected = f"https://{'*' * (3 + len(JWT))}@host Bearer {'*' * len(JWT)}\n"
    assert redact(line * 5000) == expected * 5000
