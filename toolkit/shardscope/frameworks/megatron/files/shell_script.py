"""Megatron-LM's arguments in a shell script: arrays and variables are replaced by their values.

Nothing is executed. What a condition, a loop or a function sets is not followed, only listed. A variable
that the script does not set, and the output of a command, stays ``${NAME}``, so that an error names it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from shardscope.core.errors import refuse

SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of shell scripts."""
MAX_CHARACTERS = 100_000
"""Maximum length of a value and of the arguments; real ones have a few thousand characters."""
UNSET = re.compile(r"\$\{.*", re.DOTALL)
"""A text that is only a variable which the script does not set, or the output of a command."""
COMMENT = re.compile(r"(^|\s)#[^\n]*")
OUTPUT = re.compile(r"\$\(\(.*?\)\)|\$\([^()]*\)|`[^`]*`")
"""A calculation, or the output of a command."""
REDIRECTION = re.compile(r"(?<=\s)(?:\d|&)?[<>]+&?[ \t]*[^\s\"']*")
VARIABLE = re.compile(r"\$(?:(\w+|[@*#?])|\{(\w+|[@*])(?:\[[@*]\])?(?::?-([^{}]*))?\})")
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
MEGATRON_FLAGS = {
    *("--num-layers", "--hidden-size", "--micro-batch-size", "--global-batch-size", "--seq-length"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
}
"""Flags that distinguish the training from other programs of the same script."""
PUNCTUATION = "();|&\n"
DECLARING = ("export", "declare", "local", "readonly", "typeset")
OPENING = ("if", "for", "while", "until", "case", "{")
CLOSING = ("fi", "done", "esac", "}")
BEFORE_COMMAND = ("then", "else", "do")


class ScriptArguments(NamedTuple):
    """Arguments of the training in a script."""

    arguments: list[str]
    conditional_flags: frozenset[str]
    """Flags that conditions, loops and functions set, without ``--``."""


class _Statement(NamedTuple):
    """Words of a statement; an array is ``NAME=`` and its items."""

    words: list[str]
    is_conditional: bool
    """Whether it is in a condition, a loop or a function, or follows another command's result."""


def read_script_arguments(name: str, text: str, alone: frozenset[str] = frozenset()) -> ScriptArguments:
    """Return the arguments of the first command in ``text`` that starts a .py file with Megatron-LM's flags.

    ``alone`` are the flags without a value. Raises ``ValueError`` if there is no such command, or if the
    script's quotes are not balanced.
    """
    values: dict[str, str] = {}
    conditional_flags: set[str] = set()
    commands: list[list[str]] = []
    for words, is_conditional in _split_statements(name, text):
        assigned = list(takewhile(ASSIGNMENT.fullmatch, words))
        if is_conditional and assigned:
            flags = (word for value in words for word in value.split() if "--" in word)
            conditional_flags |= {flag.partition("--")[2].partition("=")[0] for flag in flags}
        elif assigned:
            *before, last = assigned
            for assignment in before:
                _assign(name, values, assignment)
            _assign(name, values, " ".join([last, *words[len(assigned) :]]))
        command = _replace_variables(name, values, " ".join(words)).split()
        if words[0] not in ("echo", "printf") and any(
            word.endswith(".py") for word in command[len(assigned) :]
        ):
            commands.append(list(_list_arguments(command, alone)))
    with_flags = [words for words in commands if any(word.startswith("--") for word in words)]
    trainings = [words for words in with_flags if not MEGATRON_FLAGS.isdisjoint(words)]
    if not with_flags:
        allowed = "a script that calls pretrain_gpt.py, or another .py file, with Megatron-LM's arguments"
        fix = "a file that has only the arguments"
        refuse(name, "a shell script", allowed, fix, "It has no such arguments")
    return ScriptArguments((trainings or with_flags)[0], frozenset(conditional_flags))


def _split_statements(name: str, text: str) -> Iterator[_Statement]:
    """Yield the statements of a script, without quotes, redirections and comments."""
    # A backslash and the line break after it are one space to a shell.
    text = COMMENT.sub(" ", text.replace("\r\n", "\n").replace("\\\n", " "))
    text = REDIRECTION.sub(" ", OUTPUT.sub(_name_output, text))
    lexer = shlex.shlex(text + "\n", posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    depth, in_array, separator = 0, False, "\n"
    try:
        for token in lexer:
            is_word = not token or not set(PUNCTUATION).issuperset(token)  # an empty text is a word
            if is_word:
                words.append(token)
            elif (token[0] == "(" and words and ASSIGNMENT.fullmatch(words[-1])) or in_array:
                in_array = ")" not in token
            if is_word or in_array or (token[0] == "(" and ")" not in token):
                continue
            while words and words[0] in (*OPENING, *CLOSING, *BEFORE_COMMAND):
                depth = max(0, depth + (words[0] in OPENING) - (words[0] in CLOSING))
                words = words[1:]
            if words and words[0] in DECLARING:
                words = [word for word in words[1:] if not word.startswith("-")]
            if words:
                yield _Statement(words, depth > 0 or separator in ("&&", "||", "|"))
            words, separator = [], token
    except ValueError as error:
        refuse(name, "a shell script", "balanced quotes", f"a script that a shell can read ({error})")


def _name_output(match: re.Match[str]) -> str:
    """Return what only a shell knows as a variable that is not set."""
    return "${" + re.sub(r"[^\w./*+-]", "", match[0]) + "}"


def _assign(name: str, values: dict[str, str], assignment: str) -> None:
    variable, adds, value = ASSIGNMENT.fullmatch(assignment).groups()  # type: ignore[union-attr]
    value = _replace_variables(name, values, value)
    values[variable] = f"{values.get(variable, '')} {value}" if adds else value


def _replace_variables(name: str, values: dict[str, str], text: str) -> str:
    """Return ``text`` with the values of its variables. Raises ``ValueError`` if it becomes too long."""
    length = len(text)

    def replace(match: re.Match[str]) -> str:
        nonlocal length
        plain, braced, default = match.groups()
        value = values.get(plain or braced, default)
        length += len(value or "")
        if length > MAX_CHARACTERS:
            allowed = f"values of at most {MAX_CHARACTERS:,} characters"
            refuse(name, f"{text[:60]}...", allowed, "shorter ones")
        return f"${{{plain or braced}}}" if value is None else value

    return VARIABLE.sub(replace, text)


def _list_arguments(command: list[str], alone: frozenset[str]) -> Iterator[str]:
    """Yield the arguments after the program, without unset variables that are not the value of a flag."""
    script = next(index for index, word in enumerate(command) if word.endswith(".py"))
    takes_value = False
    for word in command[script + 1 :]:
        if takes_value or not UNSET.fullmatch(word):
            yield word
        takes_value = word.startswith("--") and "=" not in word and word[2:] not in alone
