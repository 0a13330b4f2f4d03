"""Acceptance length by real draft-and-verify decoding of prompts, with and without the drafter (`draftsmith evaluate`).

Prompts come from JSON lines {"turns": [...]}; in a dialogue the drafted answers are fed back. Both decoders run the same
prompts in the same batches, so texts and times compare. docs/evaluate.md defines every figure.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from rich.console import Console as RichConsole
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith import models
from draftsmith.console import Advance, Console
from draftsmith.data.template import load_tokenizer
from draftsmith.decode import Cycle, Decoder, Generation, Sampling
from draftsmith.disk import reserved
from draftsmith.drafters.dflash import DFlash
from draftsmith.errors import UserError
from draftsmith.export import DrafterInfo, check_fits, load_drafter, target_of
from draftsmith.job import automatic_device, dtype_of
from draftsmith.loss import Head
from draftsmith.options import EvaluateOptions
from draftsmith.step import Tables
from draftsmith.target_load import load_whole, stops_of
from draftsmith.target_scales import Scales, measure_scales
from draftsmith.target_storage import OTHERWISE
from draftsmith.walk import per_position


@dataclass(frozen=True)
class Prompt:
    """One dialogue's user turns."""

    set: str  # the file's name without its ending
    place: str  # file:line, for messages
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What came of one turn of a prompt."""

    prompt: int
    turn: int
    prompt_tokens: int
    drafted: Generation
    plain: Generation | None
    stopped: bool  # by a stop token, not by the limit


@dataclass
class Seconds:
    """Time spent by each decoder, and the tokens it bought."""

    drafted: float = 0.0
    plain: float = 0.0
    drafted_tokens: int = 0
    plain_tokens: int = 0


@dataclass(frozen=True)
class Session:
    """Everything loaded: the two decoders share one target."""

    prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    info: DrafterInfo
    drafted: Decoder
    plain: Decoder
    stop_tokens: tuple[int, ...]
    options: EvaluateOptions


def evaluate(options: EvaluateOptions, console: Console | None = None) -> dict[str, Any]:
    """Decode all prompts and return figures and texts as JSON-ready values; UserError for the user's mistakes."""
    console = console or Console()
    with console.progress("load drafter and target", None, "models") as bar:
        session = open_session(options)
        bar.advance(2)
    dialogues: list[list[dict[str, str]]] = [[] for _ in session.prompts]
    answers: list[Answer] = []
    seconds = {p.set: Seconds() for p in session.prompts}
    with console.progress("evaluate", sum(len(p.turns) for p in session.prompts), "answers") as bar:
        for turn in range(max(len(p.turns) for p in session.prompts)):
            for name in seconds:
                asked = [i for i, p in enumerate(session.prompts) if p.set == name and turn < len(p.turns)]
                for i in asked:
                    dialogues[i].append({"role": "user", "content": session.prompts[i].turns[turn]})
                answers += _answer(session, turn, asked, dialogues, seconds[name], bar)
    answers.sort(key=lambda a: (a.prompt, a.turn))
    return _result(session, answers, seconds, dialogues)


def main(options: EvaluateOptions) -> None:
    """`draftsmith evaluate`: prints the table and writes the JSON."""
    out = options.out or _default_out(options)
    if out is None:
        RichConsole(highlight=False).print(table(evaluate(options)))
        return
    with reserved(out) as file:
        result = evaluate(options)
        RichConsole(highlight=False).print(table(result))
        file.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(out)


def open_session(options: EvaluateOptions) -> Session:
    """Read prompts, drafter and target; check that they fit before anything is decoded."""
    prompts = read_prompts(options.prompts, options.limit)
    for good, what in (
        (options.max_new_tokens >= 1, "--max-new-tokens must be at least 1"),
        (0 <= options.temperature < math.inf, "--temperature must be a finite number, 0 or more"),
        (options.batch >= 1, "--batch must be at least 1"),
        (options.device != "cuda" or torch.cuda.is_available(), "--device cuda: this torch sees no CUDA device"),
    ):
        if not good:
            raise UserError(what)
    drafter, info = load_drafter(options.drafter)
    if options.block is not None and not 2 <= options.block <= drafter.shape.block_size:
        raise UserError(f"--block {options.block}: this drafter was trained with blocks of {drafter.shape.block_size}")
    directory = models.resolve(*target_of(info, options.drafter, options.target, options.revision))
    check_fits(drafter, directory, info.trusts_remote_code)
    device = torch.device(automatic_device() if options.device == "auto" else options.device)
    dtype = dtype_of(options.dtype, device)
    tokenizer = load_tokenizer(directory, info.trusts_remote_code)
    if tokenizer.chat_template is None and info.chat_template is None:
        raise UserError(f"{directory}: the tokenizer has no chat template, and the drafter's recipe names none")
    model = load_whole(directory, dtype, device, info.trusts_remote_code)
    drafter.to(device, dtype)
    tables = shared_tables(model, measure_scales(directory, model.config, info.trusts_remote_code))
    return Session(
        prompts, tokenizer, info, Decoder(model, drafter, tables, options.block or 0), Decoder(model),
        stops_of(model, tokenizer.eos_token_id), options,
    )  # fmt: skip


def shared_tables(model: PreTrainedModel, scales: Scales) -> Tables:
    """The loaded model's own embedding and head as the drafter needs them; nothing is copied. UserError where a quantizer
    has packed one."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if not {embedding.dtype, head.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        raise UserError(
            f"{model.name_or_path}: its embedding or head is quantised, a drafter needs them plain; {OTHERWISE}"
        )
    return Tables(embedding, scales.embedding, Head(head, scales.logit, scales.softcap))


def read_prompts(files: Sequence[Path], limit: int | None) -> list[Prompt]:
    """Prompts of all files, the first `limit` of each; a bad line is a UserError that names it."""
    if limit is not None and limit < 1:
        raise UserError("--limit must be at least 1")
    prompts: list[Prompt] = []
    stems = [file.stem for file in files]
    for file in files:
        name = file.stem if stems.count(file.stem) == 1 else str(file)
        try:
            lines = file.read_text(encoding="utf-8-sig").split("\n")  # a JSON text may hold U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
        if not numbered:
            raise UserError(f'{file}: holds no prompt; each line is {{"turns": ["question", ...]}}')
        prompts += [Prompt(name, f"{file}:{n}", _turns(line, f"{file}:{n}")) for n, line in numbered][:limit]
    if not prompts:
        raise UserError("no prompts; give files with --prompts")
    return prompts


def _turns(line: str, place: str) -> tuple[str, ...]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: is not JSON: {error}") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise UserError(f'{place}: expected {{"turns": ["question", ...]}} with at least one text')
    return tuple(turns)


def _answer(
    session: Session, turn: int, asked: list[int], dialogues: list[list[dict]], seconds: Seconds, bar: Advance
) -> list[Answer]:
    """One turn of one set, in batches of similar length; the drafted answers join the dialogues."""
    ids = {i: _encode(session, i, dialogues[i]) for i in asked}
    context = session.plain.model.config.get_text_config().max_position_embeddings
    for i in asked:
        if len(ids[i]) >= context:
            place = session.prompts[i].place
            raise UserError(f"{place}: turn {turn + 1} makes {len(ids[i])} tokens, the target's context is {context}")
    order = sorted(asked, key=lambda i: -len(ids[i]))
    answers = []
    for first in range(0, len(order), session.options.batch):
        rows = order[first : first + session.options.batch]
        prompts = [ids[i] for i in rows]
        limits = [min(session.options.max_new_tokens, context - len(p)) for p in prompts]
        streams = [i << 16 | turn for i in rows]
        drafted, spent = _timed(session, session.drafted, prompts, limits, streams)
        seconds.drafted += spent
        seconds.drafted_tokens += sum(len(g.tokens) for g in drafted)
        plain: list[Generation | None] = [None] * len(rows)
        if session.options.plain:
            plain, spent = _timed(session, session.plain, prompts, limits, streams)
            seconds.plain += spent
            seconds.plain_tokens += sum(len(g.tokens) for g in plain)
        for i, generation, alone in zip(rows, drafted, plain, strict=True):
            stopped = generation.tokens[-1] in session.stop_tokens
            answers.append(Answer(i, turn, len(ids[i]), generation, alone, stopped))
            text = session.tokenizer.decode(generation.tokens, skip_special_tokens=True)
            dialogues[i].append({"role": "assistant", "content": text})
        bar.advance(len(rows))
    return answers


def _encode(session: Session, index: int, dialogue: list[dict[str, str]]) -> list[int]:
    try:
        text = session.tokenizer.apply_chat_template(
            dialogue, tokenize=False, add_generation_prompt=True, chat_template=session.info.chat_template,
            **session.info.template_options,
        )  # fmt: skip
    except TemplateError as error:
        raise UserError(f"{session.prompts[index].place}: the chat template refuses it: {error}") from None
    return session.tokenizer.encode(text, add_special_tokens=False)


def _timed(
    session: Session, decoder: Decoder, prompts: list[list[int]], limits: list[int], streams: list[int]
) -> tuple[list[Generation], float]:
    sampling = Sampling(session.options.temperature, session.options.seed)
    _wait(decoder)
    began = time.perf_counter()
    generations = decoder.generate(prompts, limits, session.stop_tokens, sampling, streams)
    _wait(decoder)
    return generations, time.perf_counter() - began


def _wait(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)


def figures(answers: Sequence[Answer], seconds: Sequence[Seconds], block_size: int, greedy: bool) -> dict[str, Any]:
    """The numbers of one set, or of all. None where a figure has no meaning (see docs/evaluate.md)."""
    cycles = [c for a in answers for c in a.drafted.cycles]
    means = [np.mean([c.committed for c in a.drafted.cycles]) for a in answers if a.drafted.cycles]
    accepted = np.array([c.accepted for c in cycles], np.int64)
    tokens = sum(len(a.drafted.tokens) for a in answers)
    drafted_rate, plain_rate = (
        sum(getattr(s, f"{which}_tokens") for s in seconds) / max(1e-9, sum(getattr(s, which) for s in seconds))
        for which in ("drafted", "plain")
    )
    compared = all(a.plain for a in answers)
    same = [a.plain is not None and a.plain.tokens == a.drafted.tokens for a in answers]
    return {
        "answers": len(answers),
        "tokens": tokens,
        "target_passes": len(cycles),
        "acceptance_length": float(np.mean(means)) if means else None,
        "acceptance_length_vllm": 1 + float(accepted.mean()) if len(cycles) else None,
        "acceptance_per_position": per_position(accepted, block_size),
        "target_passes_saved": 1 - len(cycles) / (tokens - len(answers)) if tokens > len(answers) else None,
        "identical_to_plain_greedy": float(np.mean(same)) if compared and greedy else None,
        "tokens_per_second": drafted_rate,
        "tokens_per_second_plain": plain_rate if compared else None,
        "speed_up": drafted_rate / plain_rate if compared else None,
    }


def _result(
    session: Session, answers: list[Answer], seconds: dict[str, Seconds], dialogues: list[list[dict]]
) -> dict[str, Any]:
    decoder, options = session.drafted, session.options
    greedy, block = options.temperature == 0, decoder.block_size
    sets = {
        name: figures([a for a in answers if session.prompts[a.prompt].set == name], [spent], block, greedy)
        for name, spent in seconds.items()
    }
    drafter: DFlash = decoder.drafter
    return {
        "format": 1,
        "drafter": session.info.source,
        "step": session.info.step,
        "target": options.target or session.info.target,
        "block_size": block,
        "trained_block_size": drafter.shape.block_size,
        "device": torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else "cpu",
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "all": figures(answers, list(seconds.values()), block, greedy),
        "sets": sets,
        "samples": [_sample(session, a, dialogues) for a in answers],
    }


def _sample(session: Session, answer: Answer, dialogues: list[list[dict]]) -> dict[str, Any]:
    """One answer for reading: `runs` are [text of accepted drafts, text of the target's own token], pass by pass; the
    first run is the token of the prompt's prefill."""
    prompt, cycles = session.prompts[answer.prompt], answer.drafted.cycles
    own = None if answer.plain is None else answer.plain.tokens == answer.drafted.tokens
    return {
        "set": prompt.set,
        "place": prompt.place,
        "turn": answer.turn,
        "question": prompt.turns[answer.turn],
        "text": dialogues[answer.prompt][2 * answer.turn + 1]["content"],
        "prompt_tokens": answer.prompt_tokens,
        "tokens": list(answer.drafted.tokens),
        "finish": "stop" if answer.stopped else "length",
        "accepted": [c.accepted for c in cycles],
        "committed": [c.committed for c in cycles],
        "runs": runs(session.tokenizer, answer.drafted.tokens, cycles),
        "same_as_plain": own,
    }


def runs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], cycles: Sequence[Cycle]) -> list[list[str]]:
    """Cut an answer's text where passes of the target end; a character made of several tokens goes to the last of them."""
    ends = [0, 1]
    for cycle in cycles:
        at = ends[-1]
        ends += [at + min(cycle.accepted, cycle.committed), at + cycle.committed]
    pieces, said = [], ""
    for end in ends:
        text = tokenizer.decode(tokens[:end])
        whole = text if end == len(tokens) or not text.endswith("\ufffd") else said
        pieces.append(whole[len(said) :])
        said = whole
    return [pieces[i : i + 2] for i in range(0, len(pieces), 2)]


def table(result: dict[str, Any]) -> Table:
    """The figures for a terminal: one column a set."""
    names = list(result["sets"])
    columns = [result["sets"][n] for n in names] + ([result["all"]] if len(names) > 1 else [])
    out = Table(title=f"{result['drafter']}, block {result['block_size']}, {result['dtype']} on {result['device']}")
    out.add_column("")
    for name in names + (["all"] if len(names) > 1 else []):
        out.add_column(name, justify="right")
    rows = [
        ("answers", "answers", "{:d}"),
        ("acceptance length (z-lab, bonus included)", "acceptance_length", "{:.3f}"),
        ("acceptance length (vLLM)", "acceptance_length_vllm", "{:.3f}"),
        ("passes of the target saved", "target_passes_saved", "{:.1%}"),
        ("texts identical to plain greedy", "identical_to_plain_greedy", "{:.1%}"),
        ("speed against plain decoding here", "speed_up", "{:.2f} x"),
    ]
    for label, key, form in rows:
        out.add_row(label, *["–" if c[key] is None else form.format(c[key]) for c in columns])
    for k in range(result["block_size"] - 1):
        shares = [c["acceptance_per_position"][k] for c in columns]
        out.add_row(f"passes that accept >= {k + 1}", *[f"{s:.3f}" for s in shares])
    return out


def _default_out(options: EvaluateOptions) -> Path | None:
    """A new name in the run's evaluations/, if the drafter was given by its run."""
    if not (options.drafter / "checkpoints").is_dir():
        return None
    folder, number = options.drafter / "evaluations", 1
    while (folder / f"evaluation_{number:03d}.json").exists():
        number += 1
    return folder / f"evaluation_{number:03d}.json"
