"""Patterns of secrets: names of environment variables that hold them, and formats of known tokens.

The prefixes are those of gitleaks' public rules that may occur in training, and those of model hosts. Tokens
without a prefix, such as 40 hexadecimal digits, are not matched, because commit hashes have the same format.
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
"""Matches HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, PGPASSWORD, MYSQL_PWD, but not PWD, a folder."""


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret. Cached: every text checks all variables."""
    return SECRET_NAMES.search(name) is not None


def is_secret_field(name: str) -> bool:
    """Return whether a file's field of this name holds a secret, such as ``secretKey`` or ``auth-token``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return is_secret_name(re.sub(r"[^A-Za-z0-9]", "_", words))


def is_path(value: str) -> bool:
    """Return whether ``value`` is a path to a secret instead of a secret; base64 may start with "/" too.

    It does not access the path, because a stalled network file system would block the caller.
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


def _reject_inside_word(prefix: str) -> str:
    """Return a lookbehind that rejects ``prefix`` in the middle of a word, as "sk-" in "task-...".

    A literal ``\\n`` and the end of a color sequence before the prefix are accepted. It is a lookbehind after
    the prefix because ``re`` searches patterns that start with literals many times faster.
    """
    return rf"(?:(?<![A-Za-z0-9]{prefix})|(?<=\\[nrt]{prefix})|(?<=[0-9\[]m{prefix}))"


def _build_token(prefix: str, rest: str) -> str:
    return f"({prefix}{_reject_inside_word(prefix)}{rest})"


def _join_tokens(*forms: tuple[str, str]) -> str:
    """Return one pattern for several prefixes with the same, rare first letter."""
    patterns = (f"{prefix[1:]}{_reject_inside_word(prefix)}{rest}" for prefix, rest in forms)
    return f"({forms[0][0][0]}(?:{'|'.join(patterns)}))"


_END = r"(?![A-Za-z0-9])"
_BASE64_WITH_COLON = (
    r"(?=(?:[A-Za-z0-9+/]{4})*(?:O[g-v]..|.[DTjz][o-r].|..[AEIMQUYcgkosw048]6))"
    r"(?:[A-Za-z0-9+/]{4})+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![A-Za-z0-9+/=])"
)
"""Base64 of user:password. The colon encodes to one of these pairs at each of three byte positions."""
_WORD = r"""(?![A-Za-z-]+\.?(?:[\s,;:)\]"']|$))"""
"""Negative lookahead for an ordinary word, as in "Bearer authentication"."""

KNOWN_FORMS = {
    # Models and data
    "hf_": _build_token("hf_", r"(?:[A-Za-z0-9]{20,}|(?:oauth|jwt|app)_[A-Za-z0-9._=-]{20,})"),
    "api_org_": r"(api_org_[A-Za-z0-9]{20,})",
    "sk-": _build_token("sk-", r"[A-Za-z0-9_-]{20,}"),  # OpenAI, Anthropic, OpenRouter
    "wandb_v1_": r"(wandb_v1_[A-Za-z0-9_]{20,})",
    "nvapi-": r"(nvapi-[A-Za-z0-9_-]{40,})",
    "pplx-": r"(pplx-[A-Za-z0-9]{40,})",
    "gsk_": _build_token("gsk_", r"[A-Za-z0-9]{40,}"),  # Groq
    "r8_": _build_token("r8_", r"[A-Za-z0-9]{37,}"),  # Replicate
    "dapi": _build_token("dapi", rf"[a-f0-9]{{32}}(?:-[0-9])?{_END}"),  # Databricks
    "pnu_": _build_token("pnu_", r"[A-Za-z0-9]{36}"),  # Prefect
    # Code and packages
    "github_pat_": r"(github_pat_[A-Za-z0-9_]{30,})",
    "gh": _build_token("gh[opusr]_", r"[A-Za-z0-9._-]{30,}"),
    "gl": (
        r"(gl(?:(?:pat|dt|rt|ptt|cbt|ft|imt|agent|oas|soat|ffct)-[A-Za-z0-9_.-]{20,}"  # GitLab
        r"|(?:c|sa)_[A-Za-z0-9+/_]{32,}={0,2}))"  # Grafana
    ),
    "npm_": _build_token("npm_", r"[A-Za-z0-9]{30,}"),
    "pypi-AgE": r"(pypi-AgE[A-Za-z0-9_-]{50,})",
    "dckr_": r"(dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,})",
    # Clouds, messages, payments
    "A": _join_tokens(
        ("AKIA", rf"[0-9A-Z]{{16}}{_END}"),
        ("ASIA", rf"[0-9A-Z]{{16}}{_END}"),
        ("AIza", r"[A-Za-z0-9_-]{35,}"),  # Google
        ("AGE-SECRET-KEY-1", r"[0-9A-Z]{58}"),
        ("AA", r"(?<=[0-9]{8}:AA)[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])"),  # Telegram
    ),
    "G": _join_tokens(("GOCSPX-", r"[A-Za-z0-9_-]{20,}")),  # Google
    "L": _join_tokens(("LTAI", rf"[A-Za-z0-9]{{20}}{_END}")),  # Alibaba
    "S": _join_tokens(
        ("SG[.]", r"[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}"),  # SendGrid
        ("SK", rf"[0-9a-f]{{32}}{_END}"),  # Twilio
    ),
    "X-Amz-S": r"""X-Amz-S(?:ignature|ecurity-Token)=([^&\s"'<>]{16,})""",
    "x": _join_tokens(
        ("xox[abeoprs]", r"(?:\.xox[bp])?-[A-Za-z0-9-]{10,}"),  # Slack
        ("xapp-", r"[0-9]-[A-Za-z0-9-]{10,}"),
        ("xai-", r"[A-Za-z0-9]{60,}"),
    ),
    "~": r"~(?<=[A-Za-z0-9_~.]{3}[0-9]Q~)([A-Za-z0-9_~.-]{31,34})",  # Azure
    "ya29.": _build_token(r"ya29\.", r"[A-Za-z0-9_-]{20,}"),  # Google
    "AccountKey=": r"AccountKey=([A-Za-z0-9+/=]{40,})",  # Azure
    "hvs.": _build_token(r"hvs\.", r"[A-Za-z0-9_-]{24,}"),  # Vault
    "k_live_": rf"k_live_(?<=[rs]k_live_){_reject_inside_word('[rs]k_live_')}([A-Za-z0-9]{{20,}})",  # Stripe
    "hooks.slack.com/": r"hooks\.slack\.com/(?:services|workflows|triggers)/([A-Za-z0-9+/]{20,})",
    "/api/webhooks/": r"/api/webhooks/([0-9]{10,}/[A-Za-z0-9_-]{40,})",  # Discord
    # Not of a single host
    "eyJ": (  # JSON web token, of three or five parts
        r"(eyJ(?:(?<![A-Za-z0-9_-]eyJ)|(?<=\\[nrt]eyJ)|(?<=[0-9\[]meyJ))[A-Za-z0-9_-]{10,}"
        r"\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]*)"
    ),
    "-----BEGIN ": (
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----((?:[^-]|-(?!----)){16,12000})-----END"
    ),
    "earer ": rf"earer (?<=[Bb]earer ){_reject_inside_word('[Bb]earer ')}{_WORD}([A-Za-z0-9._~+/=-]{{12,}})",
    "asic ": rf"asic (?<=[Bb]asic ){_reject_inside_word('[Bb]asic ')}({_BASE64_WITH_COLON})",
    "uthorization": (
        r"""uthorization[\\"' :=,b]{1,12}(?:[Bb]asic|[Bb]earer|[Tt]oken|ApiKey) +([^\s"',\\]{8,})"""
    ),
    "@": r"://([^\s/:@]{0,256}:[^\s/@]{1,256})@",  # user:password@host
}
"""Literal that each secret of this form contains -> pattern whose group 1 is the secret. The literal is
searched first, which is much faster than the pattern on logs of gigabytes."""
