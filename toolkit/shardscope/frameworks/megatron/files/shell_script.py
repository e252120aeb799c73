"""Megatron-LM's arguments in a shell script. Nothing is executed: the script's own assignments are followed.

Known are quotes, arrays, ``+=``, ``${NAME:-default}``, whole-number arithmetic, and conditions that compare
texts or numbers. A variable that the script does not set stays ``${NAME}``, so that an error names it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile, takewhile

from shardscope.core.errors import refuse

SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of shell scripts."""
MAX_CHARACTERS = 100_000
"""Maximum length of a value and of the arguments; real ones have a few thousand characters."""
MAX_DEPTH = 40
"""Maximum nesting of quotes and brackets."""
MAX_TEXTS = 50
"""Maximum number of texts with commands, such as those of ``eval``, which may contain themselves."""
MEGATRON_FLAGS = {
    *("--num-layers", "--hidden-size", "--micro-batch-size", "--global-batch-size", "--seq-length"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
}
"""Flags that distinguish the training from other programs of the same script."""
CLOSING = {'"': '"', "'": "'", "(": ")", "{": "}", "`": "`"}
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
BRACED = re.compile(r"(\w+|@|\*)(\[[@*]\])?(?:(:?)([-=+])(.*))?", re.DOTALL)
PLAIN = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]")
WITHOUT_SPECIAL = re.compile(r"[^\\'\"`$]+")
UNSET = re.compile(r"\$[{(].*|`.*", re.DOTALL)
"""A text that is only a variable which the script does not set, or the output of a command."""
FROM_OUTSIDE = re.compile(r"\$\{\d+\}|\$\(|`")
"""What only the caller of the script or another program knows; other variables may just be empty."""
REDIRECTION = re.compile(r"(?:\d*|&)[<>]+&?(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
LEADING = ("then", "do", "{", "}", "time", "exec", "!")
"""Words before a command that change nothing here."""
TESTS: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_script_arguments(name: str, text: str, alone: frozenset[str] = frozenset()) -> list[str]:
    """Return the arguments of the first command with Megatron-LM's flags in the script ``text``.

    ``alone`` are the flags without a value. Raises ``ValueError`` if there is no such command.
    """
    script = _Script(name)
    script.run(text.replace("\r\n", "\n"))
    commands = [list(_list_arguments(words, alone)) for words in script.commands]
    with_flags = [words for words in commands if any(word.startswith("--") for word in words)]
    known = (words for words in with_flags if not MEGATRON_FLAGS.isdisjoint(map(_get_flag, words)))
    arguments = next(known, with_flags[0] if with_flags else None)
    if arguments is None:
        allowed = "a script that calls pretrain_gpt.py, or another .py file, with Megatron-LM's arguments"
        refuse(
            name, "a shell script", allowed, "a file that has only the arguments", "It has no such arguments"
        )
    return arguments


def _get_flag(word: str) -> str:
    return word.partition("=")[0]


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

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        """Words of each command that starts a .py file."""
        self.branches: list[tuple[bool, bool]] = []
        """For each open ``if``: whether this branch runs, as those around it, and whether one has."""
        self.num_texts = 0

    def run(self, text: str) -> None:
        """Follow all statements of ``text``."""
        self.num_texts += 1
        if self.num_texts <= MAX_TEXTS:
            for words in self._split_statements(text):
                self._follow(words)

    # ---- Statements

    def _split_statements(self, text: str) -> Iterator[list[str]]:
        """Yield the words of each statement, with their quotes."""
        words: list[str] = []
        start = position = 0  # of the current word, and in the text
        text += "\n"
        while position < len(text):
            character = text[position]
            is_start = start == position
            # A backslash at the end of a line is a space, except after a comment.
            is_continued = text.startswith("\\\n", position)
            if character == "\\" and not is_continued:
                position += 2
                continue
            if character in "'\"`" or (character == "(" and text[position - 1] in "=$" and not is_start):
                position = self._find_end(text, position)
                continue
            if text.startswith("${", position):
                position = self._find_end(text, position + 1)
                continue
            if character == "#" and is_start:
                position = start = text.index("\n", position)
                continue
            near = text[position - 1 : position + 2]
            is_separator = character in " \t\n;()|" or (
                character == "&" and "<" not in near and ">" not in near
            )
            position += 1
            if not is_separator and not is_continued:
                continue
            if not is_start:
                words.append(text[start : position - 1])
            position += is_continued
            if character in "|&":
                operator_end = position + (text[position : position + 1] == character)
                words.append(text[position - 1 : operator_end])
                position = operator_end
            elif character not in " \t\\":
                if character == "\n":
                    position = _skip_document(text, words, position)
                if words:
                    yield words
                words = []
            start = position

    def _find_end(self, text: str, start: int, depth: int = 0) -> int:
        """Return the position after the quotes or brackets that open at ``start``."""
        opening, position, end = text[start], start + 1, 0
        closing = CLOSING[opening]
        while position < len(text) and depth < MAX_DEPTH and not end:
            character = text[position]
            nests = text[position - 1] == "$" and character in "({"
            nests = nests or (opening in "({" and character in "'\"`(")
            if character == closing:
                end = position + 1
            elif opening == "'":
                position += 1
            elif character == "\\":
                position += 2
            elif nests:
                position = self._find_end(text, position, depth + 1)
            elif opening == "(" and character == "#" and text[position - 1].isspace():
                position = max(text.find("\n", position), position + 1)
            else:
                position += 1
        if not end:
            excerpt = text[start : start + 60]
            refuse(self.name, excerpt, "shell syntax", f"a closing {closing}", f"{opening} is not closed")
        return end

    def _follow(self, words: list[str]) -> None:
        """Follow one statement: a condition, assignments, or a command."""
        words = list(dropwhile(LEADING.__contains__, words))
        if not words:
            return
        first, *rest = words
        is_running = not self.branches or self.branches[-1][0]
        if first in ("if", "while", "until"):
            holds = is_running and first != "until" and self._test(rest) is True
            self.branches.append((holds, holds))
        elif first == "for":
            if is_running and len(rest) > 2 and rest[1] == "in":
                self.values[rest[0]] = self._expand(rest[2])[:1]
            self.branches.append((is_running, True))
        elif first == "case":
            self.branches.append((False, True))
        elif first in ("fi", "done", "esac"):
            if self.branches:
                self.branches.pop()
        elif first in ("else", "elif"):
            if self.branches:
                _, has_run = self.branches.pop()
                is_open = not has_run and (not self.branches or self.branches[-1][0])
                runs = is_open and (first == "else" or self._test(rest) is True)
                self.branches.append((runs, has_run or runs))
            if first == "else":
                self._follow(rest)
        elif is_running and first in ("[", "[["):
            self._follow_guarded(words)
        elif is_running:
            self._follow_command(words)

    def _follow_guarded(self, words: list[str]) -> None:
        """Follow ``[ condition ] && command``, or the same with ``||``."""
        end = next((index for index, word in enumerate(words) if word in ("]", "]]")), len(words))
        holds = self._test(words[:end])
        if len(words) > end + 2 and words[end + 1] == ("&&" if holds else "||") and holds is not None:
            self._follow(words[end + 2 :])

    def _follow_command(self, words: list[str]) -> None:
        if words[0] in DECLARING:
            words = [word for word in words[1:] if not word.startswith("-")]
        num_assigned = 0
        for match in takewhile(bool, map(ASSIGNMENT.fullmatch, words)):
            self._assign(*match.groups())  # type: ignore[union-attr]
            num_assigned += 1
        expanded = self._expand_all(_drop_redirections(words[num_assigned:]))
        if not expanded or expanded[0] in ("echo", "printf"):
            return
        if expanded[0] == "eval":
            self.run(" ".join(expanded[1:]))
        elif any(word.endswith(".py") for word in expanded):
            self.commands.append(expanded)
        else:
            # bash -c "...", srun bash -c "$COMMAND"
            for word in expanded:
                if ".py" in word and len(word.split()) > 1:
                    self.run(word.removeprefix("--wrap="))

    def _assign(self, name: str, adds: str, value: str) -> None:
        previous = self.values.get(name, []) if adds else []
        if value.startswith("("):
            items = [word for words in self._split_statements(value[1:-1]) for word in words]
            fields = previous + self._expand_all(items)
        else:
            fields = ["".join(previous[:1]) + self._expand_text(value)]
        self._check_size(f"{name}=...", sum(map(len, fields)))
        self.values[name] = fields

    def _test(self, words: list[str]) -> bool | None:
        """Return whether a condition holds; None if only a shell knows."""
        alternatives: list[bool | None] = []
        for sides in _split(words, "||"):
            results = [self._test_one(side) for side in _split(sides, "&&")]
            alternatives.append(False if False in results else None if None in results else True)
        return True if True in alternatives else None if None in alternatives else False

    def _test_one(self, words: list[str]) -> bool | None:
        words = [word for word in words if word not in ("[", "]", "[[", "]]")]
        if words[:1] == ["!"]:
            holds = self._test_one(words[1:]) if words[1:2] != ["!"] else None
            return None if holds is None else not holds
        expanded = [self._expand_text(word) for word in words]
        if any(FROM_OUTSIDE.search(text) for text in expanded):
            return None
        texts = [UNSET.sub("", text) for text in expanded]
        match texts:
            case ["-n" | "-z" as test, text]:
                return bool(text) == (test == "-n")
            case [text] if text not in ("true", "false"):
                return bool(text) if UNSET.match(words[0]) or words[0][0] in "\"'$" else None
            case [text]:
                return text == "true"
            case [left, test, right] if test in TESTS:
                return TESTS[test](left, right)
            case [left, test, right] if test in NUMBER_TESTS:
                numbers = [_calculate(text) for text in (left, right)]
                return None if None in numbers else NUMBER_TESTS[test](*numbers)  # type: ignore[arg-type]
        return None

    # ---- Values

    def _check_size(self, excerpt: str, num_characters: int) -> None:
        """Raise ``ValueError`` for values that variables have made too long."""
        if num_characters > MAX_CHARACTERS:
            refuse(
                self.name, excerpt[:60], f"values of at most {MAX_CHARACTERS:,} characters", "shorter ones"
            )

    def _expand_all(self, words: Iterable[str]) -> list[str]:
        """Return the fields of all words."""
        fields: list[str] = []
        num_characters = 0
        for word in words:
            new = self._expand(word)
            fields += new
            num_characters += sum(map(len, new))
            self._check_size(word, num_characters)
        return fields

    def _expand_text(self, word: str) -> str:
        """Return the value of ``word`` as one text."""
        return " ".join(self._expand(word, splits=False))

    def _expand(self, word: str, splits: bool = True, is_quoted: bool = False) -> list[str]:
        """Return the fields that ``word`` becomes; with ``splits`` spaces of an unquoted value separate."""
        fields: list[str | None] = [None]  # None: nothing yet, which is not an empty text
        position = num_characters = 0
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
                new = [_remove_spaces(word[position:end])]
            elif character == "$":
                new, end = self._expand_variable(word, position)
                if splits:
                    text = " ".join(new)
                    # A space at the value's end separates it from what follows.
                    if fields[-1] is not None and text[:1].isspace():
                        fields.append(None)
                    new = text.split() + ([""] if text.strip() and text[-1].isspace() else [])
            num_characters += sum(map(len, new))
            self._check_size(word, num_characters)
            for index, field in enumerate(new):
                if index:
                    fields.append(None)
                fields[-1] = (fields[-1] or "") + field
            position = end
        known = [field for field in fields if field is not None]
        if splits and len(known) > 1 and not known[-1]:
            known.pop()
        return known

    def _expand_variable(self, word: str, start: int) -> tuple[list[str], int]:
        """Return the value of the ``$...`` at ``start``, and the position after it."""
        opening = word[start + 1 : start + 2]
        if opening and opening in "({":
            end = self._find_end(word, start + 1)
            inner, unknown = word[start + 2 : end - 1], _remove_spaces(word[start:end])
            if opening == "{":
                match = BRACED.fullmatch(inner)
                return (self._get(*match.groups()) if match else [unknown]), end
            if inner.startswith("(") and inner.endswith(")"):
                number = _calculate(self._name_variables(inner[1:-1]))
                return [unknown if number is None else str(number)], end
            return [unknown], end
        match = PLAIN.match(word, start + 1)
        if match is None:
            return ["$"], start + 1
        return self._get(match[0]), match.end()

    def _name_variables(self, expression: str) -> str:
        """Return an arithmetic expression with the values of its variables, which need no ``$`` there."""
        text = self._expand_text(expression)
        return re.sub(r"[A-Za-z_]\w*", lambda found: "".join(self._get(found[0])), text)

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


def _split(words: list[str], separator: str) -> Iterator[list[str]]:
    """Yield the words between separators."""
    side: list[str] = []
    for word in words:
        if word == separator:
            yield side
            side = []
        else:
            side.append(word)
    yield side


def _remove_spaces(text: str) -> str:
    """Return the text of an unknown value, such as a command's output, as one word."""
    return "".join(text.split())


def _drop_redirections(words: list[str]) -> Iterator[str]:
    """Yield the words of a command's program, without files and without the next command of a pipe."""
    is_file = False
    for word in words:
        if word in ("|", "|&", "||", "&", "&&"):
            return
        redirection = REDIRECTION.fullmatch(word)
        if not is_file and redirection is None:
            yield word
        is_file = redirection is not None and not redirection[1]


def _skip_document(text: str, words: list[str], position: int) -> int:
    """Return the position after the here-document of a statement that writes it into a file or a program."""
    openings = [index for index, word in enumerate(words) if word.startswith("<<") and word[:3] != "<<<"]
    if not openings or words[0] not in ("cat", "tee", "python", "python3"):
        return position
    delimiter = (words[openings[0]][2:].lstrip("-") or "".join(words[openings[0] + 1 :][:1])).strip("'\"")
    match = re.compile(rf"^\s*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(text, position)
    return match.end() if match and delimiter else position


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
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate_node(node.operand)
    raise ValueError("not a calculation with whole numbers")
