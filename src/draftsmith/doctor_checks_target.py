"""Checks on a target worker's prefill: the right layers, documents apart, and what the drafter is conditioned on in words."""

import torch
from torch import Tensor

from draftsmith.data.shards import Corpus
from draftsmith.doctor_verdict import Verdict, failed, judge, not_checked, passed
from draftsmith.errors import UserError
from draftsmith.job import Job, dtype_of
from draftsmith.target import Target, own_attention
from draftsmith.target_facts import read_config
from draftsmith.target_load import load_decoder
from draftsmith.unit import Unit

REFERENCE_TOKENS = 256  # of a document that are compared: taps are causal
TAPS_LIMIT = {4: 1e-4, 2: 6e-2}  # median relative difference of a token, by bytes of the dtype
NOISE_FACTOR = 3.0  # times what transformers' own attention functions differ by: rounding grows with depth
LEAK_LIMIT = {4: 1e-6, 2: 1e-2}


def check_words(job: Job) -> list[Verdict]:
    """What the recipe means for this target, for a person to read."""
    shape = job.drafter
    taps = f"outputs of layers {', '.join(map(str, shape.taps))} of 0..{shape.num_target_layers - 1}, before any final norm"
    return [passed("layer ids", taps), check_mask(job), passed("chat template", job.template_report())]


def check_mask(job: Job) -> Verdict:
    """That the mask token is none of the tokens that the target uses, nor one that the corpus holds."""
    name, token, remedy = "mask token", job.drafter.mask_token, "set target.mask_token; `draftsmith init` finds one"
    try:
        report = job.mask_token_report()
    except UserError as error:
        return failed(name, str(token), str(error), remedy)
    count = sum(occurrences(corpus, token) for corpus in (job.corpus, job.held_out))
    total = sum(int(corpus.offsets[-1]) for corpus in (job.corpus, job.held_out))
    return judge(
        name, not count, f"{report}; {count} of the corpus's {total} tokens", "texts of the corpus hold it", remedy
    )


def occurrences(corpus: Corpus, token: int) -> int:
    """How often a corpus holds a token."""
    return sum(int((ids == token).sum()) for ids in corpus.pieces())


def prefilled(target: Target, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    """Taps [T, K*H] of a row, copied."""
    parameter = next(target.decoder.parameters())
    width = len(target.taps) * target.decoder.config.hidden_size
    dtype = parameter.dtype if parameter.is_floating_point() else torch.bfloat16
    out = torch.empty(len(ids), width, dtype=dtype, device=target.device)
    target.prefill(ids, positions, documents, out)
    return out


def row_of(unit: Unit, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions and documents [T] of a unit on a device."""
    return tuple(torch.from_numpy(x).to(device) for x in (unit.ids, unit.positions, unit.documents))


def middle_document(unit: Unit) -> slice:
    """The rows of a document that has neighbours before it, where the unit holds several."""
    number = (unit.documents[: unit.tokens_used].max() + 1) // 2
    rows = (unit.documents[: unit.tokens_used] == number).nonzero()[0]
    return slice(int(rows[0]), int(rows[-1]) + 1)


def apart(a: Tensor, b: Tensor) -> float:
    """Median over tokens of |a - b| / |b|, [n, H]: leaks show on every token, and a few may go to other experts."""
    a, b = a.float(), b.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-20)).median())


@torch.no_grad()
def check_taps(target: Target, job: Job, unit: Unit) -> list[Verdict]:
    """A document of a packed row against the model's own `output_hidden_states` of the same tokens alone."""
    name, layers = "taps", job.drafter.num_target_layers
    # hidden_states holds the last layer's output after the final norm
    taps = [i for i in target.taps if i < layers - 1]
    if not taps:
        return [not_checked(name, "the only tap is the last layer, whose output transformers reports after its norm")]
    row = row_of(unit, target.device)
    where = middle_document(unit)
    where = slice(where.start, min(where.stop, where.start + REFERENCE_TOKENS))
    got = prefilled(target, *row)[where].chunk(len(target.taps), -1)
    states, noise = own_hidden_states(job, row[0][where], max(taps) + 2, target.device)
    worst, noisiest, cause = 0.0, 0.0, ""
    for index, mine in zip(target.taps, got, strict=True):
        if index not in taps:
            continue
        difference, limit = apart(mine, states[index + 1]), max(TAPS_LIMIT[mine.element_size()], noise[index + 1])
        worst, noisiest = max(worst, difference), max(noisiest, noise[index + 1] / NOISE_FACTOR)
        best = min(range(len(states)), key=lambda i: apart(mine, states[i]))
        if (difference > limit or best != index + 1) and not cause:
            equals = f"layer {best - 1}'s output" if best else "the embedding"
            near = best != index + 1 and apart(mine, states[best]) <= limit
            cause = f"tap {index} is {equals}" if near else f"tap {index} is no layer's output; {equals} is nearest"
    skipped = "" if len(taps) == len(target.taps) else f"; layer {layers - 1} not compared, it is the last"
    return [
        judge(
            name,
            not cause,
            f"{len(taps)} taps differ from the model's own hidden states by {worst:.1e} (these by {noisiest:.1e} between two "
            f"attention functions){skipped}",
            cause,
            "tap L is the output of decoder layer L, counted from 0, before any norm",
        )
    ]


def own_hidden_states(
    job: Job, ids: Tensor, count: int, device: torch.device
) -> tuple[tuple[Tensor, ...], list[float]]:
    """(embedding, layer 0's output, ...) [n, H] of transformers' own model with its first `count` layers, and for each how
    far rounding may move it: NOISE_FACTOR times the difference between SDPA and eager attention, where there are both."""
    config = read_config(job.directory, job.config.target.trust_remote_code)
    dtype = dtype_of(job.config.target.dtype, device)
    decoder = load_decoder(job.directory, config, range(count), dtype, "eager", job.config.target.trust_remote_code)
    place = device if _fits(decoder, device) else torch.device("cpu")
    decoder.to(place)

    def states() -> tuple[Tensor, ...]:
        out = decoder(input_ids=ids[None].to(place), use_cache=False, output_hidden_states=True)
        return tuple(state[0].to(device) for state in out.hidden_states)

    eager = states()
    if own_attention(decoder) != "sdpa":  # the family has no other
        return eager, [0.0] * len(eager)
    return eager, [NOISE_FACTOR * apart(other, own) for other, own in zip(states(), eager, strict=True)]


def _fits(decoder: torch.nn.Module, device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    need = sum(p.numel() * p.element_size() for p in decoder.parameters())
    return need * 1.1 + 2**30 < torch.cuda.mem_get_info(device)[0]


def check_packed(target: Target, unit: Unit) -> list[Verdict]:
    """A document in a packed row against itself alone, and with other neighbours."""
    ids, positions, documents = row_of(unit, target.device)
    where = middle_document(unit)
    packed = prefilled(target, ids, positions, documents)[where]
    others = ids.clone()
    others[: where.start], others[where.stop :] = ids[: where.start].flip(0), ids[where.stop :].flip(0)
    moved = apart(prefilled(target, others, positions, documents)[where], packed)
    length, rest = where.stop - where.start, torch.arange(len(ids), device=ids.device)
    lone = torch.cat((ids[where], ids[: where.start], ids[where.stop :]))
    lone_documents = (rest >= length).long()
    lone_positions = torch.where(rest < length, rest, rest - length)
    alone = apart(prefilled(target, lone, lone_positions, lone_documents)[:length], packed)
    item = packed.element_size()
    return [
        judge(
            "packed document, taps",
            moved <= LEAK_LIMIT[item] and alone <= TAPS_LIMIT[item],
            f"other neighbours move its taps by {moved:.1e}, first in the row against packed {alone:.1e}",
            "a neighbour leaks into the document"
            if moved > LEAK_LIMIT[item]
            else "its place in the row changes its taps",
            "the target's attention must keep to each document and its positions restart: report this family",
        )
    ]
