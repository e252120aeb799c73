"""Check a wheel and an sdist as users of a release get them: `make dist` runs this after the build.

Both have every tracked file of the packages and no other; no text in them names this machine or looks like a
secret; and the wheel alone, in a new environment without torch, plans, draws and has its command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import venv
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"toolkit": "shardscope", "widgets": "shardscope_widgets"}
SINGLE_FILES = ("CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")
WRITTEN_BY_HATCHLING = (".gitignore", "PKG-INFO")

SECRETS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile(r"\b(hf|ghp|gho|github_pat|glpat|xox[abp])[_-]\w{20,}"),
    re.compile(r"\bpypi-\w{40,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"https?://[^/\s:@\"']+:[^/\s@\"'{}]+@"),
)
"""Private keys, tokens of Hugging Face, GitHub, GitLab, Slack, PyPI and AWS, and passwords in addresses."""


def list_tracked_files() -> set[str]:
    """Return the files that git tracks and the sdist must have."""
    folders = (f"{folder}/{package}" for folder, package in PACKAGES.items())
    command = ["git", "-C", REPOSITORY, "ls-files", "-z", "--", *folders, *SINGLE_FILES]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(filter(None, listed.split("\0")))


def read_sdist(path: Path) -> dict[str, bytes]:
    """Return the files of an sdist by their path below its folder. Raises ``ValueError`` for links."""
    files = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member) if member.isfile() else None
            if content is None and not member.isdir():
                raise ValueError(f"{member.name} is neither a file nor a folder")
            if content is not None:
                files[member.name.partition("/")[2]] = content.read()
    return files


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel by their path."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def compare_with_tracked(sdist: Iterable[str], wheel: Iterable[str], tracked: set[str]) -> list[str]:
    """Return what is wrong about the lists of files, one line for each file."""
    expected = tracked | set(WRITTEN_BY_HATCHLING)
    installed = {
        path.partition("/")[2] for path in tracked if path.partition("/")[0] in PACKAGES and "/" in path
    }
    packaged = {path for path in wheel if not path.partition("/")[0].endswith(".dist-info")}
    return [
        *(f"the sdist lacks {path}" for path in sorted(expected - set(sdist))),
        *(f"the sdist has {path}, which git does not track" for path in sorted(set(sdist) - expected)),
        *(f"the wheel lacks {path}" for path in sorted(installed - packaged)),
        *(f"the wheel has {path}, which git does not track" for path in sorted(packaged - installed)),
    ]


def find_private_texts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what names this machine: its folders, its host, and the hosts of its package indexes."""
    texts = [str(REPOSITORY)]
    if len(Path.home().parts) > 2:  # "/root" is no one's in particular.
        texts.append(str(Path.home()))
    if len(os.uname().nodename) > 5 and os.uname().nodename != "localhost":
        texts.append(os.uname().nodename)
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True
    ).stdout
    addresses = re.findall(r"https?://[^\s'\"]+", " ".join([settings, *environment.values()]))
    public = ("pypi.org", "pytorch.org", "github.com", "huggingface.co", "localhost", "127.0.0.1", "")
    hosts = {urllib.parse.urlsplit(address).hostname or "" for address in addresses}
    return texts + sorted(host for host in hosts if not host.endswith(public[:4]) and host not in public)


def find_leaks(files: Mapping[str, bytes], private: Iterable[str]) -> list[str]:
    """Return where a private text or a secret stands, one line for each."""
    leaks = []
    for path, content in files.items():
        text = content.decode("utf-8", errors="replace")
        leaks += [f"{path} names {word!r}" for word in private if word in text]
        leaks += [f"{path} has what looks like a secret" for secret in SECRETS if secret.search(text)]
    return leaks


def check_metadata(sdist: Mapping[str, bytes], wheel: Mapping[str, bytes]) -> list[str]:
    """Return what is wrong about versions, license and dependencies."""
    version = re.search(r'^__version__ = "(.+)"$', sdist["toolkit/shardscope/core/version.py"].decode(), re.M)
    (name,) = (path for path in wheel if path.endswith(".dist-info/METADATA"))
    wrong = []
    for path, content in (("PKG-INFO", sdist["PKG-INFO"]), ("METADATA", wheel[name])):
        fields = HeaderParser().parsestr(content.decode())
        if version is None or fields["Version"] != version[1]:
            wrong.append(f"{path} has version {fields['Version']}, core/version.py another")
        if fields["License-Expression"] != "Apache-2.0":
            wrong.append(f"{path} names no license")
        required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
        if any(re.match(r"(torch|transformers|deepspeed)\b", line) for line in required):
            wrong.append(f"{path} needs torch without an extra")
    return wrong


def use_in_new_environment(wheel: Path) -> None:
    """Install the wheel alone, and use it there. Raises ``CalledProcessError``."""
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder, "environment"), Path(folder, "work")
        work.mkdir()
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        # Nothing of the caller's environment may be importable: neither its packages nor this repository.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, env=variables)
        use = Path(__file__).with_name("use_planner.py")
        subprocess.run([python, "-I", use, environment], check=True, cwd=work, env=variables)


def main(folder: Path) -> int:
    """Check the only wheel and the only sdist in ``folder``, and return the exit code."""
    (wheel_path,), (sdist_path,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    sdist, wheel = read_sdist(sdist_path), read_wheel(wheel_path)
    private = find_private_texts()
    wrong = [
        *compare_with_tracked(sdist, wheel, list_tracked_files()),
        *check_metadata(sdist, wheel),
        *find_leaks(sdist, private),
        *find_leaks(wheel, private),
    ]
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    print(
        f"{sdist_path.name}: {len(sdist)} files; {wheel_path.name}: {len(wheel)} files. No other, no secret."
    )
    use_in_new_environment(wheel_path.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
