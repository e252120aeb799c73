"""Which variables hold secrets, by their names, and what secrets look like wherever they are from.

The prefixes are those of gitleaks' public rules that a training run may meet, and those of models' hosts.
What has no prefix of its own, as 40 hexadecimal digits, is left alone: it would be every commit's hash too.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

SECRET_NAMES = re.compile(
    r"(?:PASSWORD|PASSWD|PASSPHRASE|SSHPASS|REDISCLI_AUTH|_PWD|(?:^|_)(?:TOKEN|SECRET|PASS|CREDENTIALS?|CREDS"
    r"|API_?KEY|(?<!PUBLIC_)KEY|PAT|JWT))$",
    re.IGNORECASE,
)
"""HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, PGPASSWORD, MYSQL_PWD; but not PWD, which is a folder."""


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret; asked of all of them for each text that is cleaned."""
    return SECRET_NAMES.search(name) is not None


def is_path(value: str) -> bool:
    """Whether ``value`` is the place of a secret and not one: base64 may begin with "/" as well.

    No file is asked for: a network's disk that hangs would hold up who asks.
    """
    if value.startswith("/"):
        return value.split("/", 2)[1] in _top_folders()
    return value.startswith("~/")


@functools.cache
def _top_folders() -> frozenset[str]:
    try:
        return frozenset(path.name for path in Path("/").iterdir())
    except OSError:
        return frozenset({"home", "root", "etc", "run", "tmp", "var", "usr", "opt", "mnt", "data", "Users"})


def _apart(prefix: str) -> str:
    """That ``prefix``, just read, was not in the middle of a word, as in "task-...".

    A newline that is written out, or a colour, is no word. It looks back, since a pattern that begins with
    plain letters is searched for many times faster.
    """
    return rf"(?:(?<![A-Za-z0-9]{prefix})|(?<=\\[nrt]{prefix})|(?<=[0-9\[]m{prefix}))"


def _token(prefix: str, rest: str) -> str:
    return f"({prefix}{_apart(prefix)}{rest})"


def _tokens(*forms: tuple[str, str]) -> str:
    """One pattern for several prefixes that have their first letter, a rare one, in common."""
    others = (f"{prefix[1:]}{_apart(prefix)}{rest}" for prefix, rest in forms)
    return f"({forms[0][0][0]}(?:{'|'.join(others)}))"


_END = r"(?![A-Za-z0-9])"
_BASE64_WITH_COLON = (
    r"(?=(?:[A-Za-z0-9+/]{4})*(?:O[g-v]..|.[DTjz][o-r].|..[AEIMQUYcgkosw048]6))"
    r"(?:[A-Za-z0-9+/]{4})+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![A-Za-z0-9+/=])"
)
"""Base64 of user:password: wherever the colon comes among three bytes, it leaves one of these pairs."""
_WORD = r"""(?![A-Za-z-]+\.?(?:[\s,;:)\]"']|$))"""
"""What follows is not an ordinary word, as in "Bearer authentication"."""

KNOWN_FORMS = {
    # Models and data
    "hf_": _token("hf_", r"(?:[A-Za-z0-9]{20,}|(?:oauth|jwt|app)_[A-Za-z0-9._=-]{20,})"),
    "api_org_": r"(api_org_[A-Za-z0-9]{20,})",
    "sk-": _token("sk-", r"[A-Za-z0-9_-]{20,}"),  # OpenAI, Anthropic, OpenRouter
    "wandb_v1_": r"(wandb_v1_[A-Za-z0-9_]{20,})",
    "nvapi-": r"(nvapi-[A-Za-z0-9_-]{40,})",
    "pplx-": r"(pplx-[A-Za-z0-9]{40,})",
    "gsk_": _token("gsk_", r"[A-Za-z0-9]{40,}"),  # Groq
    "r8_": _token("r8_", r"[A-Za-z0-9]{37,}"),  # Replicate
    "dapi": _token("dapi", rf"[a-f0-9]{{32}}(?:-[0-9])?{_END}"),  # Databricks
    "pnu_": _token("pnu_", r"[A-Za-z0-9]{36}"),  # Prefect
    # Code and packages
    "github_pat_": r"(github_pat_[A-Za-z0-9_]{30,})",
    "gh": _token("gh[opusr]_", r"[A-Za-z0-9._-]{30,}"),
    "gl": (
        r"(gl(?:(?:pat|dt|rt|ptt|cbt|ft|imt|agent|oas|soat|ffct)-[A-Za-z0-9_.-]{20,}"  # GitLab
        r"|(?:c|sa)_[A-Za-z0-9+/_]{32,}={0,2}))"  # Grafana
    ),
    "npm_": _token("npm_", r"[A-Za-z0-9]{30,}"),
    "pypi-AgE": r"(pypi-AgE[A-Za-z0-9_-]{50,})",
    "dckr_": r"(dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,})",
    # Clouds, messages, payments
    "A": _tokens(
        ("AKIA", rf"[0-9A-Z]{{16}}{_END}"),
        ("ASIA", rf"[0-9A-Z]{{16}}{_END}"),
        ("AIza", r"[A-Za-z0-9_-]{35,}"),  # Google
        ("AGE-SECRET-KEY-1", r"[0-9A-Z]{58}"),
        ("AA", r"(?<=[0-9]{8}:AA)[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])"),  # Telegram
    ),
    "G": _tokens(("GOCSPX-", r"[A-Za-z0-9_-]{20,}")),  # Google
    "L": _tokens(("LTAI", rf"[A-Za-z0-9]{{20}}{_END}")),  # Alibaba
    "S": _tokens(
        ("SG[.]", r"[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}"),  # SendGrid
        ("SK", rf"[0-9a-f]{{32}}{_END}"),  # Twilio
    ),
    "X-Amz-S": r"""X-Amz-S(?:ignature|ecurity-Token)=([^&\s"'<>]{16,})""",
    "x": _tokens(
        ("xox[abeoprs]", r"(?:\.xox[bp])?-[A-Za-z0-9-]{10,}"),  # Slack
        ("xapp-", r"[0-9]-[A-Za-z0-9-]{10,}"),
        ("xai-", r"[A-Za-z0-9]{60,}"),
    ),
    "~": r"~(?<=[A-Za-z0-9_~.]{3}[0-9]Q~)([A-Za-z0-9_~.-]{31,34})",  # Azure
    "ya29.": _token(r"ya29\.", r"[A-Za-z0-9_-]{20,}"),  # Google
    "AccountKey=": r"AccountKey=([A-Za-z0-9+/=]{40,})",  # Azure
    "hvs.": _token(r"hvs\.", r"[A-Za-z0-9_-]{24,}"),  # Vault
    "k_live_": rf"k_live_(?<=[rs]k_live_){_apart('[rs]k_live_')}([A-Za-z0-9]{{20,}})",  # Stripe
    "hooks.slack.com/": r"hooks\.slack\.com/(?:services|workflows|triggers)/([A-Za-z0-9+/]{20,})",
    "/api/webhooks/": r"/api/webhooks/([0-9]{10,}/[A-Za-z0-9_-]{40,})",  # Discord
    # Of no one host
    "eyJ": (  # A JSON web token, of three parts or of five
        r"(eyJ(?:(?<![A-Za-z0-9_-]eyJ)|(?<=\\[nrt]eyJ)|(?<=[0-9\[]meyJ))[A-Za-z0-9_-]{10,}"
        r"\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]*)"
    ),
    "-----BEGIN ": (
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----((?:[^-]|-(?!----)){16,12000})-----END"
    ),
    "earer ": rf"earer (?<=[Bb]earer ){_apart('[Bb]earer ')}{_WORD}([A-Za-z0-9._~+/=-]{{12,}})",
    "asic ": rf"asic (?<=[Bb]asic ){_apart('[Bb]asic ')}({_BASE64_WITH_COLON})",
    "uthorization": (
        r"""uthorization[\\"' :=,b]{1,12}(?:[Bb]asic|[Bb]earer|[Tt]oken|ApiKey) +([^\s"',\\]{8,})"""
    ),
    "@": r"://([^\s/:@]{0,256}:[^\s/@]{1,256})@",  # user:password@host
}
"""The secret is a group, under a text that each has and that is looked for first: it is far quicker than a
pattern over a log of gigabytes."""
