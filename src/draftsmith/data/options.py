"""Options of `draftsmith prepare` and `draftsmith regenerate`, as tyro parses them. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Format = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
Shape = Literal["auto", "messages", "conversations", "prompt", "alpaca", "text", "rendered", "tokens"]


@dataclass(frozen=True)
class PrepareOptions:
    """Conversations -> token shards for one target, with a report of every row that was kept or rejected."""

    sources: Positional[tuple[str, ...]]
    """Files, folders, globs, - for standard input, or hub ids; SOURCE::WEIGHT takes a share or several copies."""
    model: Annotated[str, arg(aliases=["--target"])]
    """The target: directory in Hugging Face layout, or a hub id."""
    out: Path
    """Corpus directory to write; complete or absent."""
    revision: str | None = None
    """Hub revision of the target."""
    max_tokens: int = 4096
    """Longest document in tokens."""
    over_long: Literal["reject", "truncate"] = "reject"
    """What happens to longer ones."""
    held_out: float = 0.02
    """Share of the rows kept for evaluation, drawn by a hash of their prompts."""
    chat_template: Path | None = None
    """File with a chat template that replaces the model's own."""
    template_options: dict[str, bool | int | str] = field(default_factory=dict)
    """Options given to the chat template, e.g. --template-options enable_thinking False."""
    last_turn_only: bool = False
    """Supervise the last assistant turn alone."""
    skip_leading_assistant: bool = False
    """Drop assistant turns that stand before the first user turn."""
    reasoning: Literal["supervise", "mask", "drop"] = "supervise"
    """Reasoning of assistant turns: trained on, rendered without training on it, or removed before rendering."""
    deduplicate: bool = False
    """Reject rows whose conversation was seen before."""
    shuffle: bool = False
    """Store documents in an order drawn from --seed (training shuffles in any case)."""
    seed: int = 0
    """For --shuffle and for the rows that a fractional weight draws."""
    format: Format = "auto"
    """File format, if it should not be detected."""
    shape: Shape = "auto"
    """Row shape, if it should not be detected; `rendered`: text that already went through the template."""
    workers: int = 0
    """Processes; 0: one a CPU for large inputs, else none."""
    deadline: float = 600.0
    """Seconds that one chunk of rows may take before the run is given up."""
    show: int = 0
    """Print this many kept rows with their supervised tokens coloured."""
    parquet: bool = False
    """Also write train.parquet and held_out.parquet beside the shards, for other tools."""
    overwrite: bool = False
    """Replace an existing corpus (nothing else), once the new one is complete."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model's tokenizer."""


@dataclass(frozen=True)
class RegenerateOptions:
    """Replaces assistant turns by the target's own replies, turn by turn; goes on where it was interrupted."""

    sources: Positional[tuple[str, ...]]
    """As in `prepare`; rows may also be prompts without replies."""
    out: Path
    """JSONL file to write, in the rows' order; complete or absent."""
    endpoint: str | None = None
    """OpenAI-compatible server, e.g. http://localhost:8000/v1."""
    model: str | None = None
    """Without --endpoint: the target, a directory or hub id, which then replies in this process. With it: the name the
    server knows the model by (default: the first it lists)."""
    revision: str | None = None
    """Hub revision of the target, in process."""
    api_key_file: Path | None = None
    """File whose first line is the server's API key."""
    concurrency: int = 64
    """Requests at a time, or prompts decoded together in process."""
    retries: int = 6
    """Further attempts at a request that failed for a reason that may pass; the waits between them double, from 1 s."""
    timeout: float = 600.0
    """Seconds that one request may take."""
    max_new_tokens: int = 1024
    """Longest reply in tokens."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    template_options: dict[str, bool | int | str] = field(default_factory=dict)
    """Options for the chat template, e.g. enable_thinking False; give `prepare` the same."""
    chat_template: Path | None = None
    """Chat template file, in process."""
    format: Format = "auto"
    """As in `prepare`."""
    shape: Shape = "auto"
    """As in `prepare`."""
    overwrite: bool = False
    """Replace an existing file, once the new one is complete."""
