"""`regenerate` without a server: the target is loaded here and replies in batches, window by window, turn by turn."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from draftsmith.data.encode import Encoder
from draftsmith.data.journal import Journal
from draftsmith.data.mask import Masker
from draftsmith.data.options import RegenerateOptions
from draftsmith.data.template import TemplateRefusal, load_text_side, load_tokenizer
from draftsmith.data.tools import Rejection
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.data.regenerate import Dialogue, Row

_WINDOW = 8  # batches whose prompts are sorted by length together


def reply_in_process(
    options: RegenerateOptions, rows: "Iterator[Row]", journal: Journal, done: Callable[[], None]
) -> None:
    """Fill the journal. `done` is called once a row."""
    from draftsmith import models
    from draftsmith.data.regenerate import Dialogue
    from draftsmith.generate import Generator, Sampler

    assert options.model is not None
    directory = models.resolve(options.model, options.revision)
    side = load_text_side(directory, options.chat_template, options.template_options)
    if side.template is None:
        raise UserError(f"{options.model}: the model has no chat template; give one with --chat-template FILE")
    speaker = _Speaker(
        options, Masker(side), Encoder(side), load_tokenizer(directory), Generator.load(directory), journal
    )
    sampler = Sampler(options.temperature, options.top_p, seed=options.seed)
    while window := list(itertools.islice(rows, _WINDOW * options.concurrency)):
        talks = {
            row.number: Dialogue(row.parsed, journal.read(row.number))
            for row in window
            if not isinstance(row.parsed, Rejection)
        }
        while waiting := {n: d for n, d in talks.items() if d.waiting and n not in journal.failed}:
            speaker.turn(waiting, sampler)
        for _ in window:
            done()


class _Speaker:
    """One turn for many conversations."""

    def __init__(
        self,
        options: RegenerateOptions,
        masker: Masker,
        encoder: Encoder,
        tokenizer: Any,
        generator: Any,
        journal: Journal,
    ):
        self._options, self._masker, self._encoder, self._tokenizer = options, masker, encoder, tokenizer
        self._generator, self._journal = generator, journal
        self._room = generator.model.config.get_text_config().max_position_embeddings

    def turn(self, waiting: "dict[int, Dialogue]", sampler: Any) -> None:
        """One reply for each conversation, or the reason why there is none."""
        prompts: dict[int, list[int]] = {}
        for number, dialogue in waiting.items():
            try:
                prompts[number] = self._prompt(dialogue)
            except (Rejection, TemplateRefusal) as no:
                self._journal.fail(number, str(no))
        numbers = list(prompts)

        def keep(index: int, reply: Any) -> None:
            self._keep(numbers[index], waiting[numbers[index]], reply)

        if numbers:
            o = self._options
            self._generator.generate([prompts[n] for n in numbers], o.max_new_tokens, sampler, o.concurrency, keep)

    def _prompt(self, dialogue: "Dialogue") -> list[int]:
        (document,) = self._encoder.encode([self._masker.prompt(dialogue.messages, dialogue.tools)])
        if isinstance(document, Rejection):
            raise document
        if len(document.tokens) >= self._room:
            raise Rejection(
                "over-long", f"a prompt of {len(document.tokens)} tokens, the model's context has {self._room}"
            )
        return document.tokens.tolist()

    def _keep(self, number: int, dialogue: "Dialogue", reply: Any) -> None:
        text = self._tokenizer.decode(reply.tokens, skip_special_tokens=True)
        head, end, answer = text.partition("</think>")
        message: dict[str, Any] = {"role": "assistant", "content": answer.lstrip("\n") if end else text}
        thought = head.strip().removeprefix("<think>").strip("\n") if end else ""
        if not message["content"].strip() and not thought:
            self._journal.fail(number, "the reply is empty")
            return
        message |= {"reasoning_content": thought} if thought else {}
        message |= {"finish_reason": "length"} if reply.finish == "length" else {}
        self._journal.add(number, message, len(reply.tokens))
        dialogue.add(message)
