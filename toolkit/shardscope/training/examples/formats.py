"""Formats of fine-tuning data: what the columns of a data source mean, and a row as messages.

Recognized are plain text, prompt and completion, instruction/input/output (Alpaca), messages (OpenAI and
ShareGPT) and preference pairs. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardscope.core.errors import FieldError, check_choice, find_similar, refuse
from shardscope.training.examples.column_names import (
    COLUMN_NAMES,
    NUMBER_NAME,
    OPTIONAL_ROLES,
    ROLES,
    FormatName,
    find_column,
    find_first_row,
    list_formats,
    quote_name,
    suggest_mapping,
    suggest_role,
)
from shardscope.training.examples.rows import Row

SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns with a system message for the row; messages that begin with one of their own keep it."""
TOOLS = "tools"
"""Column with definitions of tools, which is not read: the system message of the row must have them, too."""
UNREAD_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that are not read. Without them the model would learn another answer than that of the
data, such as to end its turn instead of calling a tool."""

# The "from" of ShareGPT and the "role" of OpenAI, as chat templates spell them.
ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


class ExampleError(ValueError):
    """A row that cannot be trained on, with the fix where it is not in the row itself."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class IndexedRows(Protocol):
    """Rows by index, of which an error needs the first."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, object]: ...


class UnknownColumnsError(FieldError):
    """Data whose columns fit no known format, so that a mapping has to be chosen."""

    def __init__(self, field: str, column_names: Sequence[str], rows: IndexedRows) -> None:
        row = _read_first(rows)
        chats = _find_chat_column(column_names, row)
        fix = f'columns={{"messages": {quote_name(chats)}}}' if chats else suggest_mapping(column_names)
        wrapped = None if chats or len(rows) > 1 else _find_wrapped_rows(row)
        if wrapped is not None:
            fix = f'the rows alone, which are the list in "{wrapped}"'
        self.first_row, self.header = find_first_row(column_names, getattr(rows, "files", ()))
        """The first line of a CSV file if it may be a row instead of column names, and a line with names
        that could be above it; else empty."""
        if self.first_row:
            fix = (
                f"{fix} if the first line of the file, {self.first_row!r}, has the names; if it is a row, "
                f"which is not trained on, a line with names, such as {self.header}, above it"
            )
        super().__init__(
            field,
            f"data with the columns {', '.join(column_names)}",
            f"columns of a known format ({list_formats()}), or a mapping to them",
            fix,
        )
        self.column_names = tuple(column_names)
        self.chat_column = chats
        """The column whose cells are conversations; None: there is none."""


Message: TypeAlias = dict[str, str]
"""A chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The recognized format of a data source."""

    name: FormatName
    columns: Mapping[str, str]
    """Role -> column, such as {"prompt": "question", "completion": "answer"}."""

    @property
    def title(self) -> str:
        """Name and columns, such as "prompt-completion (prompt = question, completion = answer)"."""
        pairs = ", ".join(
            role if role == column else f"{role} = {column}" for role, column in self.columns.items()
        )
        return f"{self.name} ({pairs})"

    @property
    def short_title(self) -> str:
        """Name, and the columns not named as their roles: "prompt-completion (prompt = question)"."""
        pairs = ", ".join(f"{role} = {column}" for role, column in self.columns.items() if role != column)
        return f"{self.name} ({pairs})" if pairs else self.name


@dataclass(frozen=True, kw_only=True)
class Example:
    """One training example, before the chat template."""

    messages: tuple[Message, ...] = ()
    """The conversation, which ends with the assistant's turn; empty for plain text."""
    text: str = ""
    """Plain text, every token of which bears loss; empty for a conversation."""
    rejected: tuple[Message, ...] = ()
    """The conversation with the rejected answer, of a preference pair."""
    rejected_text: str = ""
    """The rejected one of two plain texts, of a preference pair without a prompt column."""
    num_prompt_messages: int = 0
    """Messages before the answers of a preference pair, the same in both conversations."""


def recognize_format(
    field: str,
    column_names: Sequence[str],
    columns: Mapping[str, str] | None = None,
    *,
    rows: IndexedRows = (),
) -> Format:
    """Return the format of a data source with these columns.

    ``columns`` maps roles to columns where names alone do not tell: {"prompt": "q", "completion": "a"}.
    Of ``rows`` the first is read if no format fits, to see which column has conversations.
    Raises ``ValueError`` naming ``field``'s columns, what is known, and the nearest mapping.
    """
    if columns is not None:
        return _map_columns(field, column_names, columns)
    format = next((format for name in ROLES if (format := _match_names(name, column_names))), None)
    if format is None:
        raise UnknownColumnsError(field, column_names, rows)
    return format


def _match_names(name: FormatName, column_names: Sequence[str]) -> Format | None:
    columns = {role: column for role in ROLES[name] if (column := find_column(role, column_names))}
    missing = [role for role in ROLES[name] if role not in columns and (name, role) not in OPTIONAL_ROLES]
    # Alpaca without an input is a prompt and a completion.
    if missing or (name == "instruction" and "input" not in columns):
        return None
    return Format(name=name, columns=columns)


def _read_first(rows: IndexedRows) -> Mapping[str, object]:
    try:
        return rows[0]
    except (ValueError, LookupError):
        # No rows, or a malformed first one: the columns are the error to report.
        return {}


def _find_wrapped_rows(row: Mapping[str, object]) -> str | None:
    """Return the key of the rows in data that are one object, such as {"version": 1, "data": [...]}.

    None unless one cell of the only row is a list of objects that have the columns of a known format.
    """
    for name, value in row.items():
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            continue
        columns = list(dict.fromkeys(str(key) for item in value for key in item))
        if any(_match_names(format, columns) for format in ROLES) and not _is_conversation(value, name):
            return name
    return None


def _is_conversation(value: object, name: str) -> bool:
    """Return whether a cell is a list of messages, with an answer or without."""
    try:
        return bool(_read_list(value, name))
    except ValueError:
        return False


def _find_chat_column(column_names: Sequence[str], row: Mapping[str, object]) -> str | None:
    """Return the column whose cell in that row is a conversation with an answer; None unless there is one.

    Several are preferences more likely than one conversation to train on.
    """
    chats = []
    for name in column_names:
        try:
            _check_turns(_read_list(row.get(name), name))
        except ValueError:
            continue
        chats.append(name)
    return chats[0] if len(chats) == 1 else None


def _map_columns(field: str, column_names: Sequence[str], columns: Mapping[str, str]) -> Format:
    """Return the format whose roles are exactly those of ``columns``."""
    mapping_field = f"{field.partition('.')[0]}.columns"
    for column in columns.values():
        if column not in column_names:
            nearest = find_similar(column, column_names) or column_names[0]
            refuse(mapping_field, column, f"a column of the data: {', '.join(column_names)}", nearest)
    for role in columns:
        # "question" is a usual name of the prompt's column, and nearer to "completion".
        fix = None if role in COLUMN_NAMES else suggest_role(str(role), column_names, columns)
        if fix is not None:
            refuse(f"{mapping_field} role", role, ", ".join(map(repr, COLUMN_NAMES)), fix)
        check_choice(f"{mapping_field} role", role, COLUMN_NAMES)
    twice = next((column for column in columns.values() if list(columns.values()).count(column) > 1), None)
    if twice is not None:
        allowed = "a column of its own for each role: an answer in the question as well teaches to repeat it"
        refuse(mapping_field, dict(columns), allowed, suggest_mapping(column_names, columns))
    format = next((name for name in ROLES if _is_complete(name, columns)), None)
    if format is None:
        allowed = f"the roles of one format ({list_formats()})"
        refuse(mapping_field, dict(columns), allowed, suggest_mapping(column_names, columns))
    return Format(name=format, columns=dict(columns))


def _is_complete(name: FormatName, columns: Mapping[str, str]) -> bool:
    required = {role for role in ROLES[name] if (name, role) not in OPTIONAL_ROLES}
    return required <= set(columns) <= set(ROLES[name])


# ---- A row as an example


def read_example(format: Format, row: Row) -> Example:
    """Return ``row`` as an example. Raises ``ValueError``, without the row's number, for a malformed one."""
    columns = format.columns
    if format.name == "text":
        return Example(text=_read_text(row, columns["text"]))
    system = _read_system(row)
    if format.name == "messages":
        messages = _add_system(system, _read_list(row[columns["messages"]], columns["messages"]))
        if row.get(TOOLS) not in (None, "", "[]", []) and not _defines_tools(messages, row[TOOLS]):
            raise ValueError(
                f"{TOOLS} is not read; write the definitions into the system message, and remove {TOOLS}"
            )
        return Example(messages=_check_turns(messages))
    if format.name == "preference":
        return _read_pair(format, row, system)
    if format.name == "instruction":
        instruction = _read_text(row, columns["instruction"])
        given = row[columns["input"]] if "input" in columns else None
        # An empty input in Alpaca's format means that there is none.
        if isinstance(given, str) and given.strip():
            instruction = f"{instruction}\n\n{given}"
        question: tuple[Message, ...] = ({"role": "user", "content": instruction},)
        answer = _read_turn(row, columns["output"], "assistant")
    else:
        question = _read_turn(row, columns["prompt"], "user")
        answer = _read_turn(row, columns["completion"], "assistant")
    return Example(messages=_check_turns(_add_system(system, question) + answer))


def _read_pair(format: Format, row: Row, system: tuple[Message, ...]) -> Example:
    """Return a preference pair.

    The prompt is a column or, without one, what both conversations have in common (trl calls that an
    implicit prompt). Where the conversations contain the prompt, the column only repeats it, as in
    UltraFeedback's binarized form.
    """
    names = (format.columns["chosen"], format.columns["rejected"])
    chosen, rejected = (_read_turn(row, name, "assistant") for name in names)
    if chosen == rejected:
        raise ValueError(f"{names[0]} and {names[1]} are the same")
    if "prompt" not in format.columns and all(isinstance(row[name], str) for name in names):
        return Example(text=chosen[0]["content"], rejected_text=rejected[0]["content"])
    if "prompt" in format.columns and {chosen[0]["role"], rejected[0]["role"]} == {"assistant"}:
        prompt = _add_system(system, _read_turn(row, format.columns["prompt"], "user"))
        num_prompt = len(prompt)
    else:
        prompt = () if chosen[0]["role"] == "system" else system
        pairs = zip(chosen, rejected, strict=False)
        num_prompt = len(prompt) + next(
            (index for index, (one, other) in enumerate(pairs) if one != other),
            min(len(chosen), len(rejected)),
        )
    conversations = (prompt + chosen, prompt + rejected)
    for name, messages in zip(names, conversations, strict=True):
        answer = messages[num_prompt:]
        if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in answer):
            raise ValueError(f"{name} has no answer after the prompt")
        if answer[0]["role"] != "assistant":
            raise ValueError(f"{names[0]} and {names[1]} have different prompts")
        _check_turns(messages)
    return Example(messages=conversations[0], rejected=conversations[1], num_prompt_messages=num_prompt)


def _read_system(row: Row) -> tuple[Message, ...]:
    for column in _list_system_columns(list(row)):
        text = row[column]
        if isinstance(text, str) and text.strip():
            return ({"role": "system", "content": text},)
    return ()


def _list_system_columns(column_names: Sequence[str]) -> list[str]:
    """Return the columns with system messages, written as those of other roles may be."""
    return [column for name in SYSTEM_COLUMNS for column in column_names if column.strip().lower() == name]


def list_unread_columns(format: Format, column_names: Sequence[str]) -> list[str]:
    """Return the columns that are not read, but for those whose names are of row numbers.

    Such as the passage that a question is about, beside the question and its answer.
    """
    read = {*format.columns.values()}
    if format.name != "text":
        read |= {*_list_system_columns(column_names)}
    if format.name == "messages":
        read.add(TOOLS)
    return [name for name in column_names if name not in read and not NUMBER_NAME.fullmatch(name.strip())]


def _defines_tools(messages: tuple[Message, ...], tools: object) -> bool:
    """Return whether the system message has the names of all ``tools`` and of their parameters.

    Some data sets for function calling have the definitions in both places, such as those of Hermes.
    """
    text = messages[0]["content"] if messages[0]["role"] == "system" else ""
    names = _list_tool_names(tools)
    # In quotes, as in the JSON or Python of a definition: a sentence may have the same words.
    return bool(names) and all(f'"{name}"' in text or f"'{name}'" in text for name in names)


def _list_tool_names(tools: object) -> list[str]:
    """Return the names of tools and of their parameters, in OpenAI's format; none if it is another format."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return []
    if not isinstance(tools, Sequence):
        return []
    names: list[str] = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            return []
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        # In an Arrow table every tool has the parameters of all, those of others as None.
        named = properties if isinstance(properties, Mapping) else {}
        names += [name, *(str(name) for name, value in named.items() if value is not None)]
    return names


def _add_system(system: tuple[Message, ...], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return ``messages`` after ``system``, unless they begin with a system message of their own."""
    return messages if messages[0]["role"] == "system" else system + messages


def _read_text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        kind = "missing" if value is None else f"{type(value).__name__}, not text"
        raise ValueError(f"{column} is {kind}")
    if not value.strip():
        raise ValueError(f"{column} is empty")
    _check_characters(value, column)
    return value


def _check_characters(text: str, where: str) -> None:
    """Raise ``ValueError`` for a text that is not Unicode: no tokenizer reads half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"{where} has {half}, one half of a character, such as an emoji that was cut"
        ) from None


def _read_turn(row: Row, column: str, role: str) -> tuple[Message, ...]:
    """Return the messages of a column that holds text, or messages as in trl's conversational formats."""
    if isinstance(row[column], str) or row[column] is None:
        return ({"role": role, "content": _read_text(row, column)},)
    return _read_list(row[column], column, "neither text nor a list of messages")


def _read_list(value: object, column: str, problem: str = "not a list of messages") -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        kind = "text" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{column} is {kind}, {problem}")
    if not value:
        raise ValueError(f"{column} is empty")
    return tuple(_read_message(message, f"{column}[{index}]") for index, message in enumerate(value))


def _read_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is no object with role and content")
    # ShareGPT says from and value; OpenAI role and content.
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or role.lower() not in ROLE_NAMES:
        known = ", ".join(ROLE_NAMES)
        raise ValueError(f"{where} has the role {role!r}, which is none of {known}")
    for key in UNREAD_KEYS:
        if message.get(key):
            raise ValueError(
                f"{where} has {key}, which is not read; write it into the content as text, and remove it"
            )
    # In OpenAI's format it leaves the answer out of the loss; other turns bear none anyway.
    if message.get("weight") == 0 and ROLE_NAMES[role.lower()] == "assistant":
        raise ValueError(
            f"{where} has the weight 0, which is not read; loss_on='last' leaves out earlier turns"
        )
    if not isinstance(content, str):
        kind = "no text" if content is None else f"{type(content).__name__} as content, not text"
        raise ValueError(f"{where} has {kind}")
    _check_characters(content, where)
    return {"role": ROLE_NAMES[role.lower()], "content": content}


def _check_turns(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Raise ``ValueError`` for a conversation without answers, or with empty ones only."""
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no turn of the assistant, so that no token bears loss")
    if not any(answer.strip() for answer in answers):
        raise ValueError("every turn of the assistant is empty")
    if next(message["role"] for message in messages if message["role"] != "system") == "assistant":
        # Templates cannot render a prompt without messages.
        raise ValueError("it starts with the assistant's turn; a turn of the user must come first")
    return messages
