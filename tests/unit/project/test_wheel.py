"""Tests of the wheel: its files and metadata, and planning without torch and the other extras."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.requirements import needs, sample

needs("build")
needs("hatchling")

REPOSITORY = Path(__file__).parents[3]
PACKAGES = {"shardscope": REPOSITORY / "toolkit", "shardscope_widgets": REPOSITORY / "widgets"}

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

# As if not installed: find_spec() of a missing package is None, and only its import raises.
class WithoutExtras(PathFinder):
    absent = {"torch", "transformers", "accelerate", "deepspeed", "megatron", "tokenizers", "safetensors"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.absent else PathFinder.find_spec(name, path, target)

sys.meta_path = [WithoutExtras if finder is PathFinder else finder for finder in sys.meta_path]
"""

PLANNER = """
import shardscope as ss
assert UNPACKED in ss.__file__, ss.__file__
plan = ss.Plan(
    ss.models["llama-3.1-70b"],
    ss.Cluster.parse("4x8xh100-sxm-80gb"),
    ss.Recipe(seq_len=8192, global_batch_size=64),
    ss.Layout.megatron(tp=8),
)
report = plan.memory()
assert sum(report.components.values()) == report.peak_bytes > 2**30
assert ss.Plan.from_json(plan.to_json()) == plan
report.to_frame()
"""

STUDIO = """
import shardscope_widgets
from shardscope_widgets import MemoryView, RunView, Studio, TraceView
assert UNPACKED in shardscope_widgets.__file__, shardscope_widgets.__file__
studio = Studio()
assert studio.plan.memory().peak_bytes
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY],
        capture_output=True,
        text=True,
        check=False,
        # No proxy or package index of the machine is used: nothing is downloaded.
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def unpacked_wheel(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    wheel.extractall(folder)
    return folder


def source_files(package: str) -> set[str]:
    """Return the files of a package in the working tree, without Python's caches."""
    root = PACKAGES[package]
    return {
        file.relative_to(root).as_posix()
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    }


@pytest.mark.parametrize("package", ["shardscope", "shardscope_widgets"])
def test_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile, package: str) -> None:
    missing = source_files(package) - set(wheel.namelist())
    assert not missing, missing


@pytest.mark.parametrize(
    "name",
    [
        "shardscope/catalog/gpus.toml",
        "shardscope/catalog/links.toml",
        "shardscope/catalog/models.toml",
        "shardscope/py.typed",
        "shardscope/training/data/corpus/README.md",
        "shardscope/training/data/corpus/moby_dick.txt",
        "shardscope/training/data/corpus/tokenizer.json",
        "shardscope_widgets/py.typed",
        "shardscope_widgets/trace/front_end/style.css",
        "shardscope_widgets/trace/front_end/view.js",
    ],
)
def test_wheel_has_the_data_files_read_at_run_time(wheel: zipfile.ZipFile, name: str) -> None:
    assert wheel.getinfo(name).file_size or name.endswith("py.typed")


def test_wheel_has_no_other_files(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA")).partition("/")[0]
    unexpected = [name for name in names if name.split("/")[0] not in {*PACKAGES, metadata}]
    assert not unexpected, unexpected
    leftovers = [
        name
        for name in names
        if any(part in name for part in ("__pycache__", ".ipynb", "node_modules"))
        or name.split("/")[-1].startswith(("test_", "conftest"))
        or "tests" in name.split("/")
    ]
    assert not leftovers, leftovers
    assert sum(info.file_size for info in wheel.infolist()) < 8 * 2**20, "the wheel stays small"


def test_wheel_metadata_has_license_extras_and_no_torch(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("train", "deepspeed", "megatron", "lab", "test"):
        assert f"Provides-Extra: {extra}" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    bare = " ".join(line for line in required if "extra ==" not in line)
    assert "torch" not in bare, "the bare install is the planner: no torch"
    assert any(entry.endswith("licenses/LICENSE") for entry in wheel.namelist())


def run_without_extras(unpacked: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the unpacked wheel first on the path and without the extras' packages."""
    return subprocess.run(
        [sys.executable, "-P", "-c", f"{WITHOUT_EXTRAS}\nUNPACKED = {str(unpacked)!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
    )


@sample(1)
@pytest.mark.parametrize("code", [PLANNER, STUDIO], ids=["planner", "studio"])
def test_fault_21_wheel_works_without_the_extras(unpacked_wheel: Path, code: str) -> None:
    done = run_without_extras(unpacked_wheel, code)
    assert done.returncode == 0, done.stderr


def test_fault_21_launch_from_the_wheel_raises_with_the_missing_extra(
    unpacked_wheel: Path, tmp_path: Path
) -> None:
    done = run_without_extras(
        unpacked_wheel,
        f"""
import shardscope as ss
plan = ss.Plan(
    ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
)
try:
    ss.launch(plan, ss.Pretrain(num_steps=1), folder={str(tmp_path)!r})
except ImportError as error:
    print(error)
""",
    )
    assert 'pip install "shardscope[train]"' in done.stdout, done.stdout + done.stderr
