"""Process in which the model of a chat lives: ``python -m ...chat_process files-as-json parent-pid``.

Requests come as JSON lines on standard input, and answers go as JSON lines to standard output:

- ``{"id": 1, "messages": [...], "max_new_tokens": 256, "temperature": 0.0}`` is answered by any number of
  ``{"id": 1, "text": "..."}`` and one ``{"id": 1, "done": true}`` or ``{"id": 1, "error": "..."}``;
- ``{"stop": 1}`` ends the answer 1 early.

The process ends with its standard input, and with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from shardscope.machine.processes import end_after_parent
from shardscope.runs.trained.loading import add_trained_adapters, load_weights
from shardscope.runs.trained.model_files import ModelFiles
from shardscope.training.data.weights_tokenizer import WeightsTokenizer
from shardscope.training.examples.conversation import decode_answer, encode_conversation, find_end_ids
from shardscope.training.examples.formats import Message

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

GPU_MEMORY_FACTOR = 1.5
"""A GPU is used if its free memory is this many times the weights: the rest is for the key-value cache."""
INCOMPLETE = "\ufffd"
"""Character that stands for the first bytes of one whose other bytes are in later tokens."""


class Request(TypedDict):
    """A conversation that ends with the user's turn."""

    id: int
    messages: list[Message]
    max_new_tokens: int
    temperature: float


class TextStream(BaseStreamer):
    """Streamer that sends the new text of each token, whole characters only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, send: Callable[[str], None]) -> None:
        self._tokenizer, self._send = tokenizer, send
        self._ids: list[int] | None = None
        self._sent = ""

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt first, then each token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._decode_text()
        # Text of a later token may change the end of the text before it: it is sent once it is stable.
        if text.startswith(self._sent) and not text.endswith(INCOMPLETE):
            self._send_new(text)

    def end(self) -> None:
        """Send the rest."""
        text = self._decode_text()
        if text.startswith(self._sent):
            self._send_new(text)

    def _send_new(self, text: str) -> None:
        if text != self._sent:
            self._send(text[len(self._sent) :])
            self._sent = text

    def _decode_text(self) -> str:
        return decode_answer(self._tokenizer, self._ids or [])


class StopRequests(StoppingCriteria):
    """Ids of the answers that are to end early."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.current = 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.current in self.ids, device=input_ids.device)


class Generator:
    """A model and its tokenizer, which answer one request after another."""

    def __init__(self, files: ModelFiles, stops: StopRequests) -> None:
        self.stops = stops
        self.tokenizer = WeightsTokenizer(files.weights_folder).load()
        device = _choose_device(files)
        # Half precision is several times slower than fp32 on most CPUs.
        weights = load_weights(files, torch.float32 if device == "cpu" else "auto")
        torch.nn.Module.to(weights, device)
        # The folder's own generation_config.json may ask for other ways to generate, some of which are code
        # on the Hub: only its token ids are used.
        self._special_ids = _find_special_ids(weights.generation_config, self.tokenizer)
        weights.generation_config = GenerationConfig(**self._special_ids)
        self._max_length = getattr(weights.config, "max_position_embeddings", None)
        self.model = weights
        if files.adapters is not None:
            # peft's wrapper generates as the model in it does.
            self.model = cast("PreTrainedModel", add_trained_adapters(weights, files.adapters))

    def answer(self, request: Request, send: Callable[[str], None]) -> None:
        """Send the answer piece by piece. Raises ``ValueError`` for a conversation that is too long."""
        ids = encode_conversation(self.tokenizer, request["messages"])
        max_new_tokens = request["max_new_tokens"]
        if self._max_length is not None:
            max_new_tokens = min(max_new_tokens, self._max_length - len(ids))
        if max_new_tokens < 1:
            raise ValueError(
                f"the conversation has {len(ids):,} tokens; the model reads {self._max_length:,}. "
                "Nearest fix: chat.reset()"
            )
        self.stops.current = request["id"]
        sampling: dict[str, bool | float] = {"do_sample": False}
        if request["temperature"] > 0:
            sampling = {"do_sample": True, "temperature": request["temperature"]}
        config = GenerationConfig(max_new_tokens=max_new_tokens, **sampling, **self._special_ids)
        inputs = torch.tensor([ids], device=self.model.device)
        with torch.inference_mode():
            # Models inherit generate() from this class beside their base class.
            cast("GenerationMixin", self.model).generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                streamer=TextStream(self.tokenizer, send),
                stopping_criteria=StoppingCriteriaList([self.stops]),
            )


def _choose_device(files: ModelFiles) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    free, _ = torch.cuda.mem_get_info()
    return "cuda" if free > GPU_MEMORY_FACTOR * files.num_bytes else "cpu"


def _find_special_ids(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, int | list[int]]:
    """Return the ids that end an answer, and the one that pads."""
    end_ids = find_end_ids(tokenizer, getattr(config, "eos_token_id", None))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids, default=0)
    ids: dict[str, int | list[int]] = {"pad_token_id": padding}
    if end_ids:
        ids["eos_token_id"] = end_ids
    return ids


def main() -> None:
    """Load the model, then answer requests until standard input ends."""
    end_after_parent(int(sys.argv[2]))
    # Libraries print to standard output too: from here on, that is standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(record: dict[str, object]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    requests: queue.Queue[Request] = queue.Queue()
    stops = StopRequests()
    # In a thread, because a stop request comes while the main thread generates.
    threading.Thread(target=_read_requests, args=(requests, stops), daemon=True).start()
    generator = Generator(ModelFiles.from_json(sys.argv[1]), stops)
    while True:
        _answer_request(generator, requests.get(), write)


def _answer_request(
    generator: Generator, request: Request, write: Callable[[dict[str, object]], None]
) -> None:
    identifier = request["id"]
    try:
        # It may have been stopped while the model was loaded.
        if identifier not in generator.stops.ids:
            generator.answer(request, lambda text: write({"id": identifier, "text": text}))
        write({"id": identifier, "done": True})
    except Exception as error:  # Out of memory, a template that rejects the conversation.
        write({"id": identifier, "error": f"{type(error).__name__}: {error}"})


def _read_requests(requests: queue.Queue[Request], stops: StopRequests) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "stop" in message:
            stops.ids.add(message["stop"])
        else:
            requests.put(message)
    # The user has closed the chat, or the kernel is gone. The main thread may be generating: end at once.
    os._exit(0)


if __name__ == "__main__":
    main()
