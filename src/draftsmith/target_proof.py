"""What a family's attention asks for, seen by running it, and the proof that documents of a packed row stay apart."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.target_attention import PACKED, DocumentLoop, Scores, attach

if TYPE_CHECKING:
    from draftsmith.target import Target

PACKABLE = {"full_attention", "sliding_attention"}
PROBE = 37  # tokens of a document of the proof
FIRST = 3  # tokens at a document's start where a leak shows even if it fades
NEIGHBOUR = 2048  # most tokens of a document between them


@dataclass(frozen=True)
class Survey:
    """What the layers' attention asked for on a probe; `refusal` says why rows of this family cannot be packed."""

    windows: set[int | None] = field(default_factory=set)
    dtype: torch.dtype = torch.float32
    refusal: str | None = None


class _Recorder(DocumentLoop):
    """Notes every call's window."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, torch.dtype]] = []  # window, dtype of the queries

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        self.calls.append((scores.window, q.dtype))
        return super().attend(q, k, v, scores)


@torch.no_grad()
def survey(decoder: nn.Module, forward: Callable[[Tensor, Tensor], Any], layers: int) -> Survey:
    """Run eight tokens through the decoder and read off what its attention needs."""
    values = decoder.config.to_dict()
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    other = sorted({str(k) for k in kinds[:layers]} - PACKABLE)
    if other:
        return Survey(refusal=f"its layers are of kind {', '.join(other)}, which carry state along the row")
    if values.get("attention_chunk_size"):
        return Survey(refusal="its attention works in fixed chunks of positions")
    recorder = _Recorder()
    attach(decoder, recorder)
    device = next(decoder.parameters()).device
    recorder.load(torch.zeros(8, dtype=torch.int64, device=device))
    positions = torch.arange(8, device=device)[None]
    try:
        forward(positions.clone(), positions)
    except TypeError as error:
        return Survey(refusal=str(error))
    except AttributeError as error:
        return Survey(refusal=f"its attention does not do without a mask ({error})")
    if not recorder.calls:
        return Survey(refusal="its attention does not go through transformers' attention interface")
    windows = [window for window, _ in recorder.calls]
    sliding = (
        sum(k == "sliding_attention" for k in kinds[:layers]) if kinds else layers * bool(values.get("sliding_window"))
    )
    if sum(w is not None for w in windows) != sliding:
        return Survey(refusal="its attention is not told of the sliding window that its config speaks of")
    return Survey(windows=set(windows), dtype=recorder.calls[0][1])


@torch.no_grad()
def prove(target: "Target", found: Survey, tokens: int | None) -> Survey:
    """Prefill short documents at a row's first, middle and last place and compare them with themselves alone.

    Alone means transformers' own eager attention, no packing. A second row has other neighbours, which must change
    nothing. `tokens` is the fixed length of rows, None where any length goes. Returns `found`, with a refusal if it fails.
    UserError where the target's own taps are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.decoder.get_input_embeddings().weight.shape[0]
    probes = [torch.randint(0, vocabulary, (PROBE,), generator=generator) for _ in range(3)]
    packed = [_packed(target, probes, tokens, vocabulary, generator) for _ in range(2)]
    target.decoder.set_attn_implementation("eager")
    positions = torch.arange(PROBE, device=target.device)[None]
    alone = [target.forward(p[None].to(target.device), positions) for p in probes]
    target.decoder.set_attn_implementation(PACKED)
    for taps in alone:
        check_finite(taps, target.taps)
    tolerance = min(0.1, 1000 * torch.finfo(found.dtype).eps)
    for place, name in enumerate(("first", "middle", "last")):
        moved = _difference(packed[0][place], packed[1][place])
        wrong = _difference(packed[0][place], alone[place])
        if moved > tolerance / 10:
            return replace(found, refusal=f"neighbours in the row change its taps by {moved:.2g} ({name} place)")
        if wrong > tolerance:
            return replace(found, refusal=f"packed taps differ from those alone by {wrong:.2g} ({name} place)")
    return found


def check_finite(taps: tuple[Tensor, ...], layers: tuple[int, ...]) -> None:
    """UserError for taps that hold NaN or infinity."""
    for layer, tap in zip(layers, taps, strict=True):
        if not tap.isfinite().all():
            raise UserError(
                f"target.model: the output of layer {layer} is not finite in {str(tap.dtype).removeprefix('torch.')}: a weight "
                'or a scale is damaged (fetch the model again), or the dtype is too narrow (set target.dtype = "bfloat16")'
            )


def _packed(
    target: "Target",
    probes: list[Tensor],
    tokens: int | None,
    vocabulary: int,
    generator: torch.Generator,
) -> list[tuple[Tensor, ...]]:
    """Taps of the probes in one row, with random neighbours between them."""
    room = (tokens - 3 * PROBE if tokens else 2 * PROBE) // 2
    gap = [NEIGHBOUR] * (room // NEIGHBOUR) + ([room % NEIGHBOUR] if room % NEIGHBOUR else [])
    spare = [tokens - 3 * PROBE - 2 * room] if tokens and tokens - 3 * PROBE - 2 * room else []
    lengths = [PROBE, *gap, PROBE, *gap, *spare, PROBE]
    places = (0, 1 + len(gap), len(lengths) - 1)
    row = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
    for place, probe in zip(places, probes, strict=True):
        row[place] = probe
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).to(target.device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(target.device)
    width = len(target.taps) * target.decoder.config.hidden_size
    out = torch.empty(len(documents), width, dtype=next(target.decoder.parameters()).dtype, device=target.device)
    target.prefill(torch.cat(row).to(target.device), positions, documents, out)
    starts = [sum(lengths[:place]) for place in places]
    return [out[s : s + PROBE].chunk(len(target.taps), -1) for s in starts]


def _difference(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The median token's relative difference, of the worst tap: over the whole document, and over its first tokens.

    Attention leaks everywhere, a short convolution or a state that fades only into the first tokens. The median leaves out
    the few that a rounding difference sends to another expert, and relative to the token itself no outlier hides the rest.
    """
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = a.float(), b.float()
        if not a.isfinite().all():
            return float("inf")
        relative = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-20)
        worst = max(worst, float(relative.median()), float(relative[:FIRST].median()))
    return worst
