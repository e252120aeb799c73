"""The command that converts a trained model into a GGUF file, by llama.cpp. Shardscope does not run it."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from shardscope.runs.trained.push import find_folder

if TYPE_CHECKING:
    from shardscope.runs.run import Run

NOT_TESTED = "Not tested by Shardscope: in a checkout of llama.cpp, with its requirements installed"


def build_gguf_command(run: Run) -> str:
    """Return the command line for the whole model of ``run``: its export, or its merged adapters.

    Raises ``ValueError`` if there is no such folder.
    """
    folder = find_folder(run, "run.gguf_command", is_merged=True)
    # convert_hf_to_gguf.py of llama.cpp; --outtype auto keeps 16 bits of the type that the weights have.
    outfile = run.folder / f"{run.name}.gguf"
    return f"python convert_hf_to_gguf.py {quote(str(folder))} --outfile {quote(str(outfile))} --outtype auto"
