"""Writes a recipe for a target and a prepared corpus, with the reason beside each choice (`draftsmith init`)."""

import json
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftsmith.config import from_dict
from draftsmith.errors import UserError
from draftsmith.options import InitOptions
from draftsmith.target_facts import describe, gguf_file, read_config
from draftsmith.unit import Documents, UnitShape, fitting_anchor_rate, longest_document

MAX_BLOCK_TOKENS = 16384  # A*B of one unit: enough to fill a large GPU, small enough for its memory


@dataclass(frozen=True)
class UnitProposal:
    """A shape with the sentences that explain it."""

    shape: UnitShape
    reasons: tuple[str, ...]


def propose_unit(corpus: Documents, held_out: Documents, block_size: int, device: str) -> UnitProposal:
    """Choose T and A from the lengths and valid anchors of a training split.

    T holds the longest document, of `held_out` too, and, for little waste at row ends, several mean ones. A is about
    half of a row's valid anchors (the paper draws up to 512 of a response each epoch), within what a device does in
    good time.
    """
    longest = longest_document(corpus, held_out)
    mean = float(corpus.lengths.mean())
    floor, several, most = (512, 8, 1024) if device == "cpu" else (4096, 12, MAX_BLOCK_TOKENS)
    tokens = max(longest, floor, int(several * mean))
    tokens = min(-(-tokens // 128) * 128, (1 << 24) - 1)
    supervised = tokens * float(corpus.anchor_counts.sum()) / float(corpus.lengths.sum())  # valid anchors of a full row
    anchors = max(8, int(min(0.5 * supervised, most / block_size)) // 8 * 8)
    return UnitProposal(
        UnitShape(tokens, anchors, block_size, fitting_anchor_rate(corpus, tokens, anchors)),
        (
            f"T = {tokens}: the longest document has {longest} tokens, the mean one {mean:.0f}",
            f"A = {anchors}: a full row has about {supervised:.0f} valid anchors; {anchors} blocks of {block_size} "
            f"make {anchors * block_size} block tokens",
        ),
    )


def main(options: InitOptions) -> None:
    """`draftsmith init`."""
    write_recipe(options)
    print(options.out.read_text(encoding="utf-8"))
    print(f"wrote {options.out}; next: draftsmith train {options.out}")


def write_recipe(options: InitOptions) -> None:
    """Choose every key that depends on the target, the corpus and the device, and write it with its reason."""
    from draftsmith import models
    from draftsmith.data.shards import Corpus
    from draftsmith.data.template import check_matches
    from draftsmith.drafters.dflash import default_taps
    from draftsmith.job import automatic_device
    from draftsmith.mask_token import find_mask_token

    if options.out.exists():
        raise UserError(f"{options.out}: exists already; name another with --out, or delete it yourself")
    directory = models.resolve(options.target, options.revision)
    facts, corpus = describe(directory, options.trust_remote_code), Corpus.open(options.corpus, "train")
    if not len(corpus):
        raise UserError(f"{options.corpus}: there are no documents to train on; prepare with a smaller --held-out")
    made_with = corpus.manifest.chat_template, corpus.manifest.template_options
    check_matches(corpus.manifest, directory, *made_with, options.trust_remote_code)
    device = automatic_device()
    small = device == "cpu"
    layers = (2 if small else 5) if options.layers is None else options.layers
    block = (8 if small else 16) if options.block is None else options.block
    held_out = Corpus.open(options.corpus, "held_out")
    mask_token, mask_reason = find_mask_token(directory, options.trust_remote_code, (corpus, held_out))
    gamma, gamma_reason = _gamma(block)
    taps = default_taps(facts.num_layers, max(1, min(max(layers, 3), facts.num_layers - 3)))  # small targets have few
    unit = propose_unit(corpus, held_out, block, device)
    lines = [
        f"# Written by `draftsmith init {options.target} {options.corpus}`. Any key may be changed, here or as a flag.",
        "[target]",
        f"model = {_toml(_beside(directory if directory.exists() else options.target, options))}",
        *([f"revision = {_toml(options.revision)}"] if options.revision else []),
        f"taps = {list(taps)}  # of {facts.num_layers} layers, spread from the second to the third from last",
        f"mask_token = {mask_token}  # {mask_reason}",
        *(["trust_remote_code = true  # the model's own Python code is run"] if options.trust_remote_code else []),
        *_template_lines(corpus.manifest),
        "",
        "[data]",
        f"corpus = {_toml(_beside(options.corpus, options))}",
        "",
        "[drafter]",
        f"layers = {layers}  # " + ("enough to learn something on a CPU" if layers < 5 else "as published"),
        f"block = {block}  # "
        + ("as published" if block == 16 else "smaller blocks train faster")
        + "; servers draft B-1 tokens",
        _first_weights(directory, options.trust_remote_code),
        "",
        "[unit]",
        f"tokens = {unit.shape.tokens}  # {unit.reasons[0]}",
        f"anchors = {unit.shape.anchors}  # {unit.reasons[1]}",
        f"per_step = {1 if small else 4}  # units per optimizer step over all trainers",
        "",
        "[loss]",
        f"gamma = {gamma}  # {gamma_reason}",
        "",
        "[optim]",
        f"lr = {1e-3 if small else 6e-4}  # " + ("short runs bear a higher rate" if small else "as published"),
        "epochs = 6.0  # as published",
        "",
    ]
    _write(options.out, "\n".join(lines))


def _write(out: Path, text: str) -> None:
    """A recipe that `train` would refuse is not written."""
    from_dict(tomllib.loads(text), f"what --layers and --block ask for in {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        with suppress(OSError):
            out.unlink(missing_ok=True)  # half a recipe
        raise UserError(f"{out}: cannot be written: {error}") from None


def _first_weights(directory: Path, trust_remote_code: bool) -> str:
    from draftsmith.target_storage import check_method, is_widened, quantization

    config = read_config(directory, trust_remote_code)
    check_method(directory, config)
    if gguf_file(directory) or (quantization(config) is not None and not is_widened(config)):
        return 'init = "random"  # layers that are stored quantised cannot be copied'
    return 'init = "target"  # copies of the target\'s last layers learn faster than random weights'


def _gamma(block: int) -> tuple[float, str]:
    """The paper's gamma for a block size (its appendix: 7, 5, 4 for 16, 10, 8)."""
    known = {16: 7.0, 10: 5.0, 8: 4.0}
    if block in known:
        return known[block], f"as published for blocks of {block}"
    return round(max(1.0, 1 + 0.375 * block), 1), f"between the published values (7, 5, 4 for 16, 10, 8), for {block}"


def _toml(value: str | bool | int) -> str:
    """A TOML value. JSON's escapes of characters beyond 16 bits are none of TOML's, so characters stand as they are."""
    return json.dumps(value, ensure_ascii=False)


def _beside(path: Path | str, options: InitOptions) -> str:
    """An existing path as an absolute one; a recipe must not change its meaning when it is moved."""
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def _template_lines(manifest) -> list[str]:
    """The template choices the corpus was prepared with; training refuses others."""
    lines = []
    if manifest.chat_template:
        lines.append(f"chat_template = {_toml(str(Path(manifest.chat_template).resolve()))}  # as in prepare")
    if manifest.template_options:
        body = ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in manifest.template_options.items())
        lines.append(f"template_options = {{ {body} }}  # as in prepare")
    return lines
