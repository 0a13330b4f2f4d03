"""The target's tokenizer and chat template: loading, hashes, rendering, and the check that a corpus fits a target.

Rendering follows transformers' rules for chat templates (sandboxed Jinja, trimmed blocks, `tojson` without HTML
escapes, loop controls, generation tags), so that a prepared document is the text that servers build. Workers need
`TextSide` alone, a picklable value: they import neither torch nor transformers.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftsmith.data.shards import Manifest
from draftsmith.errors import UserError, first_line
from draftsmith.target_facts import gguf_file

Message = dict[str, Any]
TemplateOptions = dict[str, bool | int | str]

# What template code may raise on a row it was not written for. Rendering turns these into TemplateRefusal.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)

# A text every tokenizer difference that matters shows on: case, digits, spaces, scripts, combining marks, bytes.
_PROBE = (
    "Hello world 2024 3.14159, it's   spaced\tout.\n\n  def f(x):\n\treturn x**2  # naïve café\r\n"
    "Ünïcödé ﬁ Å é 你好，世界 こんにちは مرحبا שלום नमस्ते 🙂👩‍👩‍👧 \x00\x7f \u200b|<tag> [INST] </s> ##x ▁y Ġz"
)


class TemplateRefusal(Exception):
    """The template cannot render this conversation; the message is the template's own."""


@dataclass(frozen=True)
class TextSide:
    """Everything of a target that turns conversations into tokens. Plain values: it is sent to worker processes."""

    tokenizer_json: str
    tokenizer_hash: str
    special_tokens: tuple[str, ...]
    """Contents of the special (control) tokens."""
    stop_tokens: tuple[str, ...]
    """Those of them that end a reply, by the tokenizer and generation_config.json."""
    names: dict[str, str]
    """bos_token, eos_token ... as templates see them."""
    template: str | None
    tool_template: str | None
    """A second template for rows with tools, where the model has one."""
    template_options: TemplateOptions = field(default_factory=dict)
    vocab_size: int = 0
    """Rows of the target's embedding."""
    now: str = ""
    """ISO time that `strftime_now` shows: one moment for a whole preparation, so that it can be repeated."""


class ChatTemplate:
    """Compiled templates. `render` is deterministic; errors of the template become TemplateRefusal."""

    def __init__(self, side: TextSide, tagged: bool = False):
        """`tagged`: what the template's generation tags enclose stands between GENERATION_OPEN and _CLOSE."""
        if side.template is None:
            raise ValueError("there is no chat template")
        environment = _environment(side.now, tagged)
        try:
            self._plain = environment.from_string(side.template)
            self._tools = environment.from_string(side.tool_template) if side.tool_template else self._plain
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template cannot be compiled: {error}") from None
        for compiled in (self._plain, self._tools):
            compiled.globals = dict(compiled.globals)  # jinja's chain of mappings costs a third of a short rendering
        self._fixed = {**side.names, "documents": None, **side.template_options}

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds the generation prompt."""
        template = self._tools if tools else self._plain
        try:
            return template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._fixed)
        except _TEMPLATE_ERRORS as error:
            raise TemplateRefusal(f"{error}" or type(error).__name__) from None


# Marks that cannot stand in the text of a row (mask.py refuses rows that hold them): private use, plane 16.
GENERATION_OPEN, GENERATION_CLOSE = "\U0010fff0", "\U0010fff1"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: the author's own marking of what the model writes."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Any) -> str:
        return caller()


class _TaggedGeneration(_Generation):
    def _enclose(self, caller: Any) -> str:
        return f"{GENERATION_OPEN}{caller()}{GENERATION_CLOSE}"


def _environment(now: str, tagged: bool) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_TaggedGeneration if tagged else _Generation, loopcontrols],
    )
    moment = datetime.fromisoformat(now) if now else datetime.now()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = moment.strftime
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer (transformers, with a Rust backend). UserError where there is none to load."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if not Path(directory).is_dir():
        raise UserError(f"{directory}: no such model directory")
    transformers_logging.get_logger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    try:
        file = {"gguf_file": gguf.name} if (gguf := gguf_file(Path(directory))) else {}
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, **file)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"{directory}: the tokenizer cannot be loaded: {first_line(error)}") from None
    if not tokenizer.is_fast:
        raise UserError(
            f"{directory}: the tokenizer has no tokenizer.json form, which is needed to place the loss mask"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_template(tokenizer: Any, chat_template: str | Path | None) -> tuple[str | None, str | None]:
    """(template, template for rows with tools or None): from the file where one is given, else the tokenizer's own."""
    if chat_template is not None:
        try:
            return Path(chat_template).read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{chat_template}: the chat template cannot be read: {error}") from None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        default = own.get("default") or next(iter(own.values()))
        return default, own.get("tool_use")
    return own, None


def load_text_side(
    directory: Path,
    chat_template: str | Path | None = None,
    template_options: TemplateOptions | None = None,
    trust_remote_code: bool = False,
    now: str = "",
) -> TextSide:
    """Load a target's tokenizer and template once; the result needs no transformers any more."""
    tokenizer = load_tokenizer(directory, trust_remote_code)
    template, tool_template = read_template(tokenizer, chat_template)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    special = {i: token.content for i, token in added.items() if token.special}
    return TextSide(
        tokenizer.backend_tokenizer.to_str(),
        tokenizer_hash(tokenizer),
        tuple(sorted(special.values())),
        tuple(special[i] for i in sorted(stop_ids(directory, tokenizer)) if i in special),
        {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)},
        template,
        tool_template,
        dict(template_options or {}),
        vocab_size(directory, tokenizer),
        now,
    )


def vocab_size(directory: Path, tokenizer: Any) -> int:
    """Rows of the target's embedding by config.json, else the tokenizer's size."""
    config = _read_json(Path(directory) / "config.json")
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("vocab_size"), int):
            return part["vocab_size"]
    return len(tokenizer)


def stop_ids(directory: Path, tokenizer: Any) -> set[int]:
    """Ids that end a reply: the tokenizer's end of sequence and those of generation_config.json and config.json."""
    return {*named_stops(directory), tokenizer.eos_token_id} - {None}


def named_stops(directory: Path) -> Iterator[int]:
    """End-of-text ids that generation_config.json and config.json name."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        eos = _read_json(path).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(i, int) for i in ids):
            raise UserError(f"{path}: eos_token_id is {eos!r}, not a token id or several")
        yield from ids


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; fetch it again")
    return values


def tokenizer_hash(tokenizer: Any) -> str:
    """Identifies a tokenizer by what it does, not by how its files are spelt: vocabulary, special tokens and the ids of
    a probe text (sha256, 16 hex digits)."""
    backend = tokenizer.backend_tokenizer
    added = sorted((i, t.content, t.special) for i, t in backend.get_added_tokens_decoder().items())
    vocabulary = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    digest = hashlib.sha256()
    digest.update("\n".join(f"{i} {token}" for token, i in vocabulary).encode("utf-8", "surrogatepass"))
    digest.update(json.dumps(added).encode())
    digest.update(json.dumps(backend.encode(_PROBE, add_special_tokens=False).ids).encode())
    return digest.hexdigest()[:16]


def template_hash(template: str | None, options: TemplateOptions, tool_template: str | None = None) -> str | None:
    """Identifies a chat template with its options (sha256, 16 hex digits); None without a template."""
    if template is None:
        return None
    content = json.dumps([template, tool_template, options], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_matches(
    manifest: Manifest, target_dir: Path, chat_template: str | None, template_options: TemplateOptions,
    trust_remote_code: bool = False,
) -> None:  # fmt: skip
    """UserError, naming both sides, unless the corpus was made with this target's tokenizer, vocabulary and template."""
    tokenizer = load_tokenizer(target_dir, trust_remote_code)
    ours = tokenizer_hash(tokenizer)
    if manifest.tokenizer_hash != ours:
        raise UserError(
            f"the corpus was prepared with the tokenizer of {manifest.model} (hash {manifest.tokenizer_hash}), the target "
            f"{target_dir} has another one (hash {ours}): prepare the corpus for this target"
        )
    size = vocab_size(target_dir, tokenizer)
    if manifest.vocab_size != size:
        raise UserError(
            f"the corpus was prepared for {manifest.model} with a vocabulary of {manifest.vocab_size}, the target "
            f"{target_dir} has {size}: prepare the corpus for this target"
        )
    if manifest.template_hash is None:
        return
    template, tool_template = read_template(tokenizer, chat_template)
    ours = template_hash(template, template_options, tool_template)
    if manifest.template_hash != ours:
        raise UserError(
            f"the corpus was prepared with the chat template {manifest.chat_template or f'of {manifest.model}'} and options "
            f"{manifest.template_options} (hash {manifest.template_hash}), the recipe has "
            f"{chat_template or f'the template of {target_dir}'} and options {template_options} (hash {ours}): set "
            "target.chat_template and target.template_options as in prepare, or prepare again"
        )
