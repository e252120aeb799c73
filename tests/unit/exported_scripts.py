"""The frameworks' ``files/train.py``, imported as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from tests.requirements import needs

import shardscope as ss


def import_script(framework: str) -> ModuleType:
    """Import the program that exports copy as ``train.py``. Skips the test without its framework."""
    needs("torch")
    if framework in ("deepspeed", "megatron"):
        needs(framework)
    # A script imports the files beside it, from the folder in which it is started.
    frameworks = Path(ss.__file__).parent / "frameworks"
    folders = [str(frameworks / framework / "files"), str(frameworks / "formats")]
    sys.path += folders
    sys.modules.pop("checkpoints", None)  # another framework's
    try:
        return importlib.import_module(f"shardscope.frameworks.{framework}.files.train")
    finally:
        for folder in folders:
            sys.path.remove(folder)
