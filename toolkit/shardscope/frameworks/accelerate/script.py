"""``Script``: a user's unchanged Accelerate training script, run as planned."""

from __future__ import annotations

import ast
import inspect
import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shardscope.core.errors import refuse
from shardscope.core.fixes import refuse_unknown_keywords
from shardscope.frameworks.accelerate import plugins
from shardscope.machine.user_folders import expand_home
from shardscope.training.tasks.lazy_functions import check_was_run, refuse_lazy_function

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.accelerate.watch import ScriptContext


@refuse_unknown_keywords
@dataclass(frozen=True)
class Script:
    """A user's Accelerate training script: ``shardscope.launch(plan, Script("train.py"))``.

    The script creates ``Accelerator()`` and passes model and optimizer to ``prepare``, as usual. The plan
    sets the number of ranks, the precision and the framework through Accelerate's environment variables.
    Model, data and optimizer stay the script's own; the run reports where they differ from the plan. The run
    records what the prepared model is, and fails if framework, degrees or precision contradict the plan.

    Each optimizer step logs the mean ``loss`` passed to ``accelerator.backward``, ``seconds_per_step`` and
    memory. Values passed to ``accelerator.log`` are logged as well. ``run.stop()`` ends the script without
    saving. Raises ``ValueError`` for a missing or invalid Python file, and at launch for a plan that
    Accelerate cannot reproduce (on CPU ranks, everything except DDP).
    """

    source: str | os.PathLike[str] | Callable[..., object]
    """The script's file, or a function that does the same (``main``)."""
    arguments: Sequence[object] = field(default=(), kw_only=True)
    """Command-line arguments of a file, or positional arguments of a function."""

    preload: ClassVar[tuple[str, ...]] = ("accelerate", "shardscope.training.accounting.tensors")
    """Modules that a launcher imports once before it forks ranks; none of them initializes CUDA."""
    saves_when_asked: ClassVar[bool] = False
    """A user's loop cannot be asked to save and stop: ``run.stop(checkpoint=True)`` raises."""

    def __post_init__(self) -> None:
        # A string is a sequence too, of characters.
        if isinstance(self.arguments, str | bytes) or not isinstance(self.arguments, Sequence):
            shown = shlex.split(self.arguments) if isinstance(self.arguments, str) else []
            refuse("Script.arguments", self.arguments, "a sequence of arguments", {"arguments": shown})
        object.__setattr__(self, "arguments", tuple(self.arguments))
        if isinstance(self.source, str | os.PathLike):
            object.__setattr__(self, "source", _find_file(self.source))
            for argument in self.arguments:
                if not isinstance(argument, str | int | float | os.PathLike):
                    refuse(
                        "Script.arguments", argument, "command-line arguments: text, numbers, paths", "text"
                    )
            object.__setattr__(self, "arguments", tuple(map(str, self.arguments)))
            return
        if inspect.isclass(self.source) or not callable(self.source):
            refuse("Script.source", self.source, "a script's path, or a function", 'Script("train.py")')
        # Calling a coroutine or generator function would return at once, without running its body.
        refuse_lazy_function("Script.source", self.source)
        self._check_call(self.source)

    def _check_call(self, function: Callable[..., object]) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # A function in C has no signature.
        try:
            signature.bind(*self.arguments)
        except TypeError as error:
            refuse(
                "Script.arguments",
                self.arguments,
                f"arguments of {self.name}{signature} ({error})",
                "arguments=(...), in order",
            )

    @property
    def name(self) -> str:
        """The file's name, or the function's."""
        if isinstance(self.source, Path):
            return self.source.name
        return str(getattr(self.source, "__name__", type(self.source).__name__))

    def check(self, plan: Plan) -> None:
        """Raise ``ValueError`` if Accelerate cannot reproduce ``plan``, or if the file is invalid Python."""
        plugins.check_plan(plan)
        if isinstance(self.source, Path):
            self._check_syntax(self.source)

    def _check_syntax(self, file: Path) -> None:
        try:
            ast.parse(file.read_bytes(), str(file))
        except OSError as error:
            refuse("Script.source", str(file), f"a file that can be read ({error.strerror})", "another path")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            refuse("Script.source", str(file), f"Python ({where}{error.args[0]})", "fix that line")

    def source_text(self) -> str | None:
        """Return the script's source text, or None if it cannot be found."""
        try:
            if isinstance(self.source, Path):
                return self.source.read_text(encoding="utf-8")
            return inspect.getsource(self.source)  # type: ignore[arg-type]
        except (OSError, TypeError, UnicodeDecodeError):
            return None

    def __call__(self, ctx: ScriptContext) -> None:
        """Run the script on this rank; called by the launcher with the process group up."""
        self.check(ctx.plan)
        # Imported on a rank only: the module imports torch and accelerate.
        from shardscope.frameworks.accelerate.watch import Watch

        environment = plugins.build_environment(ctx.plan, ctx.folder, os.environ)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        watch = Watch(ctx, self.name)
        with watch.wrap_accelerate():
            try:
                self._run_source()
            # ``sys.exit()`` at the end of ``main`` is no error.
            except SystemExit as ending:
                if ending.code not in (None, 0):
                    raise
            except Exception as error:
                _add_script_line(error, self._get_code_file())
                raise
            watch.finish()

    def _run_source(self) -> None:
        if isinstance(self.source, Path):
            with _as_main(self.source, [str(self.source), *map(str, self.arguments)]):
                runpy.run_path(str(self.source), run_name="__main__")
        else:
            assert callable(self.source)
            check_was_run(self.source(*self.arguments))

    def _get_code_file(self) -> str:
        if isinstance(self.source, Path):
            return str(self.source)
        function = inspect.unwrap(self.source)  # type: ignore[arg-type]
        return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


def _find_file(source: str | os.PathLike[str]) -> Path:
    path = expand_home(source).absolute()
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        scripts = sorted(path.parent.glob("*.py"))[:1] if path.parent.is_dir() else []
        fix = f"Script({str(scripts[0])!r})" if scripts else "the path of a file"
        refuse("Script.source", str(source), f"the path of a script; {path} {problem}", fix)
    return path


@contextmanager
def _as_main(file: Path, command: list[str]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as ``python`` with this command line does."""
    arguments, path = sys.argv, list(sys.path)
    sys.argv = command
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path


def _add_script_line(error: Exception, file: str) -> None:
    """Add a note to ``error`` with the script's line that raised it, without the callers' frames."""
    # The last frame in the script: deeper ones are those of libraries.
    frames = traceback.extract_tb(error.__traceback__)
    script_frames = [number for number, frame in enumerate(frames) if frame.filename == file]
    if not script_frames:
        return
    last = frames[script_frames[-1]]
    text = f": {last.line}" if last.line else ""
    error.add_note(f"{Path(file).name}, line {last.lineno}{text}")
    # Drop the frames above the script's first one: the launcher's and runpy's.
    traceback_from = error.__traceback__
    for _ in range(script_frames[0]):
        assert traceback_from is not None
        traceback_from = traceback_from.tb_next
    error.__traceback__ = traceback_from
