"""Megatron-LM's arguments in a shell script. Nothing is executed: the script's own assignments are followed.

Known are quotes, arrays, ``+=``, ``${NAME:-default}``, whole-number arithmetic, and conditions that compare
texts or numbers. A variable that the script does not set stays ``${NAME}``, so that an error names it.
Other conditions, ``case``, loops and functions are followed in two ways, of which the caller compares the
arguments.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import dropwhile, groupby, takewhile

from shardscope.core.errors import refuse

SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of shell scripts."""
MAX_CHARACTERS = 500_000
"""Maximum length of all values together; those of real scripts have up to 40,000."""
MEGATRON_FLAGS = {
    *("--num-layers", "--hidden-size", "--micro-batch-size", "--global-batch-size", "--seq-length"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
}
"""Flags that distinguish the training from other programs of the same script."""
CLOSING = {"(": ")", "{": "}"}
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
BRACED = re.compile(r"(\w+|@|\*)(\[[@*]\])?(?:(:?)([-+])(.*))?", re.DOTALL)
PLAIN = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]")
WITHOUT_SPECIAL = re.compile(r"[^\\'\"`$]+")
UNSET = re.compile(r"\$[{(].*|`.*", re.DOTALL)
"""A text that is only a variable which the script does not set, or the output of a command."""
UNSET_NAME = re.compile(r"\$\{[A-Za-z_]\w*\}")
UNKNOWN = re.compile(r"\$[{(]|`")
LIST = re.compile(r"(?<=[=$])\(")
FUNCTION = re.compile(r"\(\)\s*")
SEPARATOR = re.compile(r"(?P<end>[\n;()])|(?:[ \t]|\\\n)+|(?P<joint>\|[|&]?|(?<![<>])&&?(?!>))")
REDIRECTION = re.compile(r"(?:\d*|&)[<>]+&?(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
CHANGING = ("let", "read", "unset", "mapfile", "readarray")
"""Commands that change the variables that they name; they are not followed."""
CONDITIONS = ("[", "[[", "test", "!")
LEADING = ("then", "do", "time", "exec")
"""Words before a command that change nothing here."""
NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_script_arguments(
    name: str, text: str, alone: frozenset[str] = frozenset(), *, guess: bool = False
) -> list[str]:
    """Return the arguments of the command with most of Megatron-LM's flags in ``text``, the first on ties.

    ``alone`` are the flags without a value. ``guess`` is the result of conditions that only a shell knows:
    if the arguments depend on it, so they do on the run. Raises ``ValueError`` if there is no such command.
    """
    script = _Script(name, guess)
    try:
        script.run(text.replace("\r\n", "\n"))
    except RecursionError:
        refuse(name, text[:60], "brackets and eval in each other to a depth of some 100", "less nesting")
    commands = [list(_list_arguments(words, alone)) for words in script.commands]
    with_flags = [words for words in commands if any(word.startswith("--") for word in words)]
    if not with_flags:
        allowed = "a script that calls pretrain_gpt.py, or another .py file, with Megatron-LM's arguments"
        fix = "a file that has only the arguments"
        refuse(name, "a shell script", allowed, fix, "It has no such arguments")
    return max(with_flags, key=lambda words: len(MEGATRON_FLAGS & {word.partition("=")[0] for word in words}))


def _list_arguments(words: list[str], alone: frozenset[str]) -> Iterator[str]:
    """Yield the arguments after the program, without unset variables that are not the value of a flag."""
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    takes_value = False
    for word in words[script + 1 :]:
        if takes_value or not UNSET.fullmatch(word):
            yield word
        takes_value = word.startswith("--") and "=" not in word and word[2:] not in alone


class _Script:
    """State of the script while its lines are followed."""

    def __init__(self, name: str, guess: bool) -> None:
        self.name, self.guess = name, guess
        self.values: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        """Words of each command that starts a .py file."""
        self.blocks: list[tuple[bool, bool]] = []
        """For each open ``if``, loop or brace: whether this branch runs, as those around it, and whether one
        has."""
        self.num_characters = 0

    def run(self, text: str) -> None:
        """Follow all statements of ``text``."""
        for words in self._split_statements(text):
            self._follow(words)

    # ---- Statements

    def _split_statements(self, text: str) -> Iterator[list[str]]:
        """Yield the words of each statement, with their quotes."""
        words: list[str] = []
        start = position = 0  # of the current word, and in the text
        text += "\n"
        while position < len(text):
            is_start = start == position
            if is_start and text[position] == "#":
                position = start = text.index("\n", position)
            elif text.startswith("((", position) if is_start else LIST.match(text, position):
                position = self._find_end(text, position)
            elif header := FUNCTION.match(text, position):
                words, start = ["function"], header.end()
                position = start
            elif separator := SEPARATOR.match(text, position):
                if not is_start:
                    words.append(text[start:position])
                if separator["joint"]:
                    words.append(separator["joint"])
                start = position = separator.end()
                if separator["end"] and words:
                    yield words
                    words = []
            else:
                position = self._skip(text, position)

    def _skip(self, text: str, position: int, around: str = "(") -> int:
        """Return the position after the quotes or brackets at ``position``, or after one character.

        ``around`` are the quotes or brackets that these are in.
        """
        character = text[position]
        if around == "'":
            return position + 1
        if character == "\\":
            return position + 2
        if text.startswith(("$(", "${"), position):
            return self._find_end(text, position + 1)
        if around in "({" and character in "'\"`(":
            return self._find_end(text, position)
        if around == "(" and character == "#" and text[position - 1].isspace():
            return max(text.find("\n", position), position + 1)
        return position + 1

    def _find_end(self, text: str, start: int) -> int:
        """Return the position after the quotes or brackets that open at ``start``."""
        opening, position = text[start], start + 1
        closing = CLOSING.get(opening, opening)
        while text[position : position + 1] != closing:
            if position >= len(text):
                excerpt = text[start : start + 60]
                refuse(self.name, excerpt, "shell syntax", f"a closing {closing}", f"{opening} is not closed")
            position = self._skip(text, position, opening)
        return position + 1

    def _follow(self, words: list[str]) -> None:
        """Follow one statement: a condition, assignments, or commands."""
        words = list(dropwhile(LEADING.__contains__, words))
        if not words:
            return
        first, *rest = words
        is_running = not self.blocks or self.blocks[-1][0]
        if first in ("if", "while", "until"):
            runs = is_running and self._decide(rest) != (first == "until")
            # A brace in the condition is closed before the block is.
            self.blocks += [(runs, runs)] * (1 + rest.count("{"))
        elif first == "for":
            if is_running and len(rest) > 2 and rest[1] == "in":
                items = self._expand_all(rest[2:])
                self.values[rest[0]] = items[-1:] if self.guess else items[:1]
            self.blocks.append((is_running, True))
        elif first == "case":
            self.blocks.append((is_running and self.guess, True))
        elif first == "function" and "{" in rest:
            self.blocks.append((is_running and not self.guess, True))
            self._follow(rest[rest.index("{") + 1 :])
        elif first in ("fi", "done", "esac", "}"):
            if self.blocks:
                self.blocks.pop()
        elif first in ("else", "elif"):
            if self.blocks:
                _, has_run = self.blocks.pop()
                is_open = not has_run and (not self.blocks or self.blocks[-1][0])
                runs = is_open and (first == "else" or self._decide(rest))
                self.blocks.append((runs, has_run or runs))
            if first == "else":
                self._follow(rest)
        else:
            self._follow_commands(words, is_running)

    def _follow_commands(self, words: list[str], is_running: bool) -> None:
        """Follow the commands that ``&&`` and ``||`` join. One that is no condition succeeds."""
        holds = True
        for joint, command in _split_list(words):
            runs = is_running and holds == (joint == "&&")
            if command[:1] == ["{"]:
                self.blocks.append((runs, True))
                del command[0]
            if runs and command:
                is_condition = command[0] in CONDITIONS
                holds = self._decide(command) if is_condition else self._follow_command(command)

    def _follow_command(self, words: list[str]) -> bool:
        if words[0] in DECLARING:
            words = [word for word in words if ASSIGNMENT.fullmatch(word)]
        elif words[0] in CHANGING or words[0].startswith("(("):
            for name in re.findall(r"[A-Za-z_]\w*", " ".join(words)):
                self.values.pop(name, None)
            return True
        assignments = list(takewhile(bool, map(ASSIGNMENT.fullmatch, words)))
        words = list(_drop_redirections(words[len(assignments) :]))
        # Before a command they are its environment, and end with it.
        for match in assignments if not words else ():
            self._assign(*match.groups())  # type: ignore[union-attr]
        expanded = self._expand_all(words) if words[:1] not in (["echo"], ["printf"]) else []
        if expanded[:1] == ["eval"]:
            self.run(" ".join(expanded[1:]))
        elif any(word.endswith(".py") for word in expanded):
            self.commands.append(expanded)
        else:
            # bash -c "...", srun bash -c "$COMMAND"
            for word in expanded:
                if ".py" in word and len(word.split()) > 1:
                    self.run(word.removeprefix("--wrap="))
        return True

    def _assign(self, name: str, adds: str, value: str) -> None:
        previous = self.values.get(name, []) if adds else []
        itself = f"${{{name}}}"  # empty if not set before; it would be the new value in an eval
        if value.startswith("("):
            items = [word for words in self._split_statements(value[1:-1]) for word in words]
            self.values[name] = previous + [item for item in self._expand_all(items) if item != itself]
        else:
            self.values[name] = ["".join(previous[:1]) + self._expand_text(value).replace(itself, "")]

    def _decide(self, words: list[str]) -> bool:
        """Return whether conditions that ``&&`` and ``||`` join hold; the guess if only a shell knows."""
        holds: bool | None = True
        for joint, command in _split_list(words):
            if holds == (joint == "||"):
                continue
            other = self._test(command)
            holds = other if holds is not None or other == (joint == "||") else None
        return self.guess if holds is None else holds

    def _test(self, words: list[str]) -> bool | None:
        """Return whether the condition between brackets holds; None if only a shell knows."""
        words = [{"-o": "||", "-a": "&&"}.get(word, word) for word in words]
        alternatives: list[bool | None] = []
        for sides in _split(words, "||"):
            results = [self._test_one(side) for side in _split(sides, "&&")]
            alternatives.append(False if False in results else None if None in results else True)
        return True if True in alternatives else None if None in alternatives else False

    def _test_one(self, words: list[str]) -> bool | None:
        words = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        if words[:1] == ["!"]:
            holds = self._test_one(words[1:]) if words[1:2] != ["!"] else None
            return None if holds is None else not holds
        expanded = [self._expand_text(word) for word in words]
        # A variable that is nowhere set is empty, but other unknown texts may be anything.
        texts = [UNSET_NAME.sub("", text) for text in expanded]
        if any(UNKNOWN.search(text) for text in texts):
            return None
        match texts:
            case ["-n" | "-z" as test, text]:
                return bool(text) == (test == "-n")
            case [text] if text not in ("true", "false"):
                return bool(text) if UNSET.match(words[0]) or words[0][0] in "\"'$" else None
            case [text]:
                return text == "true"
            case [left, "=" | "==" | "!=" as test, right]:
                return fnmatchcase(left, right) == (test != "!=")
            case [left, test, right] if test in NUMBER_TESTS:
                numbers = [_calculate(text) for text in (left, right)]
                return None if None in numbers else NUMBER_TESTS[test](*numbers)  # type: ignore[arg-type]
        return None

    # ---- Values

    def _expand_all(self, words: Iterable[str]) -> list[str]:
        """Return the fields of all words."""
        return [field for word in words for field in self._expand(word)]

    def _expand_text(self, word: str) -> str:
        """Return the value of ``word`` as one text."""
        return " ".join(self._expand(word, splits=False))

    def _expand(self, word: str, splits: bool = True, is_quoted: bool = False) -> list[str]:
        """Return the fields that ``word`` becomes; with ``splits`` spaces of an unquoted value separate."""
        fields: list[str] = []
        current: str | None = None  # None: nothing yet, which is not an empty text
        position = 0
        while position < len(word):
            character, end = word[position], position + 1
            new: list[str] = [character]
            if text_match := WITHOUT_SPECIAL.match(word, position):
                new, end = [text_match[0]], text_match.end()
            elif word.startswith("\\\n", position):
                new, end = [" "], end + 1
            elif character == "\\" and (not is_quoted or word[end : end + 1] in ('"', "$", "\\", "`")):
                new, end = [word[end : end + 1]], end + 1
            elif character == "'" and not is_quoted:
                end = self._find_end(word, position)
                new = [word[position + 1 : end - 1]]
            elif character == '"' and not is_quoted:
                end = self._find_end(word, position)
                new = self._expand(word[position + 1 : end - 1], splits=False, is_quoted=True)
                new = new or ([] if "[@]" in word[position:end] else [""])
            elif character == "`":
                end = self._find_end(word, position)
                new = ["".join(word[position:end].split())]
            elif character == "$":
                new, end = self._expand_variable(word, position)
                if splits:
                    text = " ".join(new)
                    # A space at the value's end separates it from what follows.
                    if current is not None and text[:1].isspace():
                        fields.append(current)
                        current = None
                    new = text.split() + ([""] if text.strip() and text[-1].isspace() else [])
            self.num_characters += sum(map(len, new))
            if self.num_characters > MAX_CHARACTERS:
                allowed = f"values of at most {MAX_CHARACTERS:,} characters together"
                refuse(self.name, word[:60], allowed, "shorter ones")
            for index, field in enumerate(new):
                if index:
                    fields.append(current or "")
                    current = ""
                current = current or ""
                current += field
            position = end
        # A space at the end of the last value separates nothing.
        if current is not None and (current or not splits or not fields):
            fields.append(current)
        return fields

    def _expand_variable(self, word: str, start: int) -> tuple[list[str], int]:
        """Return the value of the ``$...`` at ``start``, and the position after it."""
        opening = word[start + 1 : start + 2]
        if opening and opening in "({":
            end = self._find_end(word, start + 1)
            # An unknown value, such as a command's output, is one word.
            inner, unknown = word[start + 2 : end - 1], "".join(word[start:end].split())
            if opening == "{":
                match = BRACED.fullmatch(inner)
                return (self._get(*match.groups()) if match else [unknown]), end
            if inner.startswith("(") and inner.endswith(")"):
                # Variables need no $ here.
                text = self._expand_text(inner[1:-1])
                text = re.sub(r"[A-Za-z_]\w*", lambda found: "".join(self._get(found[0])), text)
                number = _calculate(text)
                return [unknown if number is None else str(number)], end
            return [unknown], end
        match = PLAIN.match(word, start + 1)
        if match is None:
            return ["$"], start + 1
        return self._get(match[0]), match.end()

    def _get(
        self, name: str, index: str | None = None, colon: str = "", kind: str = "", other: str = ""
    ) -> list[str]:
        """Return the value of ``${name}``, ``${name[@]}`` or ``${name:-other}``."""
        if name in "@*#":
            return []  # Arguments of the script, of which it has none here.
        value = self.values.get(name)
        is_set = value is not None and not (value[:1] and UNSET.fullmatch(value[0]))
        has_value = is_set and bool(not colon or any(value or ()))
        if kind == "+":
            return [self._expand_text(other)] if has_value else []
        if kind and not has_value:
            return [self._expand_text(other)]
        if value is None:
            return [f"${{{name}}}"]
        return value if index else value[:1]


def _split_list(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return each command with the ``&&`` or ``||`` before it; those in brackets join no commands."""
    commands: list[tuple[str, list[str]]] = [("&&", [])]
    for word in words:
        command = commands[-1][1]
        in_brackets = not {"[", "[["}.isdisjoint(command[:2]) and command[-1] not in ("]", "]]")
        if word in ("&&", "||") and not in_brackets:
            commands.append((word, []))
        else:
            command.append(word)
    return commands


def _split(words: list[str], separator: str) -> list[list[str]]:
    """Return the words between separators."""
    return [list(side) for is_separator, side in groupby(words, separator.__eq__) if not is_separator]


def _drop_redirections(words: list[str]) -> Iterator[str]:
    """Yield the words of a command's program, without files and without the next command of a pipe."""
    is_file = False
    for word in words:
        if word in ("|", "|&", "&"):
            return
        redirection = REDIRECTION.fullmatch(word)
        if not is_file and redirection is None:
            yield word
        is_file = redirection is not None and not redirection[1]


def _calculate(text: str) -> int | None:
    """Return the value of a calculation with whole numbers; None if it is something else."""
    try:
        return _calculate_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _calculate_node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _calculate_node(node.left), _calculate_node(node.right)
        if max(abs(left), abs(right)) < 2**62:
            return ARITHMETIC[type(node.op)](left, right)
    raise ValueError("not a calculation with whole numbers")
