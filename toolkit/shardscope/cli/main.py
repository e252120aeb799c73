"""The program ``shardscope``: its parser, error messages and exit codes."""

from __future__ import annotations

import argparse
import io
import sys
import warnings

from shardscope.cli import planning, running
from shardscope.cli.output import discard_output, print_error
from shardscope.core.errors import find_similar, refuse
from shardscope.core.version import __version__

DESCRIPTION = "Plan, launch and look inside multi-GPU training runs."
EPILOG = """\
examples:
  shardscope plan --model llama-3.1-8b --cluster 8xh100-sxm-80gb --layout fsdp2
  shardscope search --model llama-3.1-70b --cluster 4x8xh100-sxm-80gb --out plan.json
  shardscope export plan.json --folder exported
  shardscope launch plan.json --task pretrain num_steps=100 --on slurm --partition a100
  shardscope runs
  shardscope attach my-run --wait

Every command has --help and --json. Exit codes: 0 done, 1 a run did not finish,
2 a value is wrong or something is missing. Errors go to standard error.
"""
INTERRUPTED = 130
"""Exit code of shells for a process that Ctrl-C ended."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It imports nothing that takes time."""
    parser = argparse.ArgumentParser(
        prog="shardscope",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardscope {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    planning.add_commands(commands)
    running.add_commands(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: the process's) and return the exit code."""
    _prepare_streams()
    options, unknown = build_parser().parse_known_args(arguments)
    # A warning's file and line are those of our code, of no use here.
    warnings.showwarning = lambda message, *_, **__: print_error(f"warning: {message}")
    code: int = 0
    try:
        _check_unknown(options.parser, unknown)
        code = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has enough. A failed run remains one.
        discard_output()
        return code
    except (ValueError, ImportError, OSError) as error:
        print_error(f"shardscope: {error}")
        return 2
    return code


def _prepare_streams() -> None:
    """Make standard output and error writable: all characters in any locale, and closed streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Daemons close them (``>&-``), and ``print(file=None)`` of an error would be standard output.
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # A path or a model's name may have characters that an ASCII locale lacks.
            stream.reconfigure(errors="backslashreplace")


def _check_unknown(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Raise ``ValueError`` for ``words`` of the command line that ``parser`` did not accept."""
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            # argparse has no public list of a parser's options.
            names = sorted(name[2:] for name in parser._option_string_actions if name.startswith("--"))
            similar = find_similar(option.lstrip("-"), names)
            fix = f"--{similar}" if similar else f"{parser.prog} --help"
            refuse("option", option, ", ".join(f"--{name}" for name in names), fix)
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")


if __name__ == "__main__":
    sys.exit(main())
