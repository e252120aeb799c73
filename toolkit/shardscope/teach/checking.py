"""``check``: judge an answer of an exercise, store the attempt, and return the feedback to show."""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
import time
from types import CodeType, FunctionType

from shardscope.core.errors import find_similar
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import list_layout_names
from shardscope.teach.answers import Judgement
from shardscope.teach.attempts import Attempt, list_wrong_answers, read_attempts, store_attempt
from shardscope.teach.exercises import EXERCISES
from shardscope.teach.exercises.exercise import Exercise
from shardscope.teach.feedback import Feedback
from shardscope.teach.two_ranks import list_functions

EMPTY_OPERATORS = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
"""Instructions of a function whose body is ``...`` (Python 3.11 to 3.14)."""


def check(exercise: str, answer: object) -> Feedback:
    """Judge ``answer``, store the attempt in the learner's file, and return the feedback to display.

    Numbers may be text with a unit (``"119.7 GiB"``). ``...`` means that there is no answer yet. Each
    different wrong answer reveals the next hint. An answer of a wrong type or unit gets a hint about that,
    and no answer raises. Code exercises launch two CPU ranks, for some ten seconds.
    """
    if not isinstance(exercise, str) or exercise not in EXERCISES:
        similar = find_similar(exercise, EXERCISES) if isinstance(exercise, str) else None
        meant = f' Did you mean "{similar}"?' if similar else ""
        return Feedback(
            exercise=str(exercise), correct=None, text=f"There is no exercise {exercise!r}.{meant}"
        )
    wanted = EXERCISES[exercise]
    attempts = [attempt for attempt in read_attempts() if attempt.exercise == exercise]
    if is_unanswered(answer):
        return Feedback(exercise=exercise, correct=None, text=_ask_for_answer(wanted, attempts))
    text = describe_answer(answer)
    try:
        judgement = wanted.expected.judge(answer)
    except Exception as error:  # A learner's object may raise anything, in any method.
        judgement = Judgement(False, f"The answer cannot be read: {type(error).__name__}: {error}", False)
    note = store_attempt(
        Attempt(exercise=exercise, answer=text, correct=judgement.correct, valid=judgement.valid)
    )
    wrong = list_wrong_answers(attempts, exercise)
    if judgement.valid and not judgement.correct and text not in wrong:
        wrong.append(text)
    level = wrong.index(text) + 1 if text in wrong else 0
    parts = [_write_feedback(wanted, judgement, level), note]
    return Feedback(
        exercise=exercise,
        correct=judgement.correct,
        text=" ".join(filter(None, parts)),
        num_wrong=len(wrong),
    )


def is_unanswered(answer: object) -> bool:
    """Return whether ``answer`` is what the notebook came with: ``...``, or code without a body."""
    if inspect.isclass(answer):
        methods = [method for method in list_functions(answer) if method.__name__ != "__init__"]
        return bool(methods) and all(map(_is_empty, methods))
    if isinstance(answer, FunctionType):
        return _is_empty(answer)
    return answer is ... or (isinstance(answer, str) and not answer.strip())


def _is_empty(function: FunctionType) -> bool:
    """Return whether a function has no body but a docstring and ``...``: it only returns None."""
    operators = {instruction.opname for instruction in dis.get_instructions(function)}
    return operators <= EMPTY_OPERATORS and set(function.__code__.co_consts) <= {None, function.__doc__}


def describe_answer(answer: object) -> str:
    """Return ``answer`` as text to store, with a hash where the text alone may be that of another answer.

    Two wrong answers with the same text would be one, and reveal one hint.
    """
    if isinstance(answer, FunctionType) or inspect.isclass(answer):
        functions = [answer] if isinstance(answer, FunctionType) else list_functions(answer)
        content = repr([_describe_code(function.__code__) for function in functions])
        return _add_hash(answer.__name__, content)
    if isinstance(answer, Layout):
        return _add_hash(_describe_layout(answer), repr(answer))
    if isinstance(answer, Plan):
        recipe = answer.recipe
        text = (
            f"{_describe_layout(answer.layout)}, micro_batch_size={recipe.micro_batch_size}, "
            f"recompute={recipe.recompute!r}, method={recipe.method!r}"
        )
        return _add_hash(text, answer.to_json())
    try:
        text = repr(answer)
    except Exception:
        return f"an unprintable {type(answer).__name__}"
    # An object at an address is another text in every kernel.
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 200 else _add_hash(text, text)


def _add_hash(text: str, content: str) -> str:
    return f"{text[:190]} {hashlib.sha256(content.encode(errors='replace')).hexdigest()[:8]}"


def _describe_layout(layout: Layout) -> str:
    """Return the call that makes ``layout``: ``Layout.zero(stage=2, overlap_comm=True)``."""
    name = next(name for name, framework in list_layout_names().items() if framework == layout.framework)
    defaults = getattr(Layout, name)().to_dict()
    changed = {
        field: value
        for field, value in layout.to_dict().items()
        # A ZeRO layout is called by its stage, whatever the default is.
        if field == "stage" or value != defaults[field]
    }
    return f"Layout.{name}({', '.join(f'{field}={value!r}' for field, value in changed.items())})"


def _describe_code(code: CodeType) -> tuple[object, ...]:
    """Return what makes two versions of a function differ; inner functions' file names and lines do not."""
    constants = [
        _describe_code(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, constants


def _ask_for_answer(exercise: Exercise, attempts: list[Attempt]) -> str:
    text = f"Write your answer in this cell: replace the `...`, then run the cell again. {exercise.asks}"
    solved = [attempt for attempt in attempts if attempt.correct]
    if solved:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(solved[-1].time))
        text += f"\nYou solved this one on {when}, with {solved[-1].shown_answer}."
    elif attempts:
        text += f"\nYou tried {attempts[-1].shown_answer} before; it was not right yet."
    return text


def _write_feedback(exercise: Exercise, judgement: Judgement, level: int) -> str:
    """Return the text of a feedback; ``level`` counts the different wrong answers up to this one."""
    if judgement.correct:
        return " ".join(filter(None, ("Right.", judgement.text, exercise.why)))
    if not judgement.valid:
        return f"Not yet. {judgement.text}"
    number = min(level, len(exercise.hints))
    hint = exercise.hints[number - 1]
    last = " (the last hint)" if number == len(exercise.hints) else ""
    said = " ".join(filter(None, ("Not yet.", judgement.text)))
    return f"{said}\nHint {number}{last}: {hint}"
