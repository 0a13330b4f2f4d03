"""Draft-and-verify decoding of a batch, lossless: greedy text equals the target's own, samples follow its distribution.

A row's anchor is its last committed token, which the target has not processed yet. One cycle: the drafter proposes a
token for each slot after the anchor, the target runs once over anchor and drafts, the leading drafts it agrees with are
committed together with its own next token (the bonus). Without a drafter the same code is plain decoding, one token a
cycle. Every row has its own length: in all caches the index is the token's position in its row, so nothing is padded,
shifted or cropped; a rejected token's entry lies beyond the row's anchor, is masked, and is overwritten in time.

Shapes: P rows, B block size, S = B - 1 drafts, L cache length in use, H hidden size, K taps, V vocabulary,
h query heads, g key/value heads, d head size.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from draftsmith.caches import DraftCache, TargetCache, attention_kinds, causal_masks
from draftsmith.drafters.dflash import DFlash
from draftsmith.step import Tables
from draftsmith.target_load import find_layers
from draftsmith.unit import hash64

PREFILL_TOKENS = 8192  # padded prompt tokens of one forward pass
_DRAWS = 0x6472617773 << 24  # stream of the counter hash: "draws"


class Sampling(NamedTuple):
    """Temperature 0 is greedy. With the same seed a prompt's draws do not depend on the rows decoded beside it."""

    temperature: float = 0.0
    seed: int = 0


GREEDY = Sampling()


class Cycle(NamedTuple):
    """One pass of the target after the prompt's."""

    drafted: int  # drafts proposed
    accepted: int  # leading drafts that the target agreed with, even past a stop token
    committed: int  # tokens kept: accepted + bonus, cut at a stop token or at the limit


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt: new tokens (a stop token included) and the cycles that made all but the first."""

    tokens: tuple[int, ...]
    cycles: tuple[Cycle, ...]


class Decoder:
    """A target with a drafter, or alone. `block_size` may be smaller than the trained one; `tables` are the target's."""

    def __init__(
        self, model: PreTrainedModel, drafter: DFlash | None = None, tables: Tables | None = None, block_size: int = 0
    ):
        self.model, self.drafter, self.tables = model, drafter, tables
        self.block_size = (block_size or drafter.shape.block_size) if drafter else 1
        if drafter and not 2 <= self.block_size <= drafter.shape.block_size:
            raise ValueError(f"block size {block_size} is not in 2..{drafter.shape.block_size}, as trained")
        attention_kinds(model.config)  # refuses targets that cannot take tokens back
        name = find_layers(model, model.config.get_text_config(decoder=True).num_hidden_layers)
        self._layers = model.get_submodule(name)
        self.device, self.dtype = model.device, model.dtype
        self.slots = torch.arange(self.block_size, device=self.device)
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_tokens: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        numbers: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Decode one batch; `max_new_tokens` is one limit or one a prompt, `numbers` name the prompts' streams of random
        draws (default: their places)."""
        new = np.broadcast_to(np.asarray(max_new_tokens, np.int64), (len(prompts),))
        if not all(len(p) for p in prompts) or (new < 1).any():
            raise ValueError("every prompt needs a token and max_new_tokens must be at least 1")
        batch = _Batch(self, prompts, new, numbers)
        self._prefill(batch, prompts, sampling)
        stops = np.array(sorted(set(stop_tokens)), np.int64)
        batch.retire(stops)
        while batch.rows:
            self._cycle(batch, stops, sampling)
        return batch.results

    def _prefill(self, batch: "_Batch", prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Run the prompts through the target, some rows at a time, and commit each row's first token."""
        for first, last in _prefill_groups([len(p) for p in prompts]):
            ends = batch.start[first:last] - 1  # position of the last prompt token
            positions = torch.arange(int(ends.max()) + 1, device=self.device).expand(last - first, -1)
            keep, picked = np.unique(ends, return_inverse=True)
            logits, taps = self._target_pass(
                batch, slice(first, last), batch.ids[first:last, : positions.shape[1]], positions,
                logits_to_keep=torch.from_numpy(keep).to(self.device),
            )  # fmt: skip
            logits = logits[torch.arange(last - first), torch.from_numpy(picked).to(self.device)]  # [p, V]
            if sampling.temperature > 0:
                draws = batch.draws(sampling.seed, 1, ends, slice(first, last))[:, 2, 0]
                token = _pick(_probabilities(logits, sampling.temperature), draws)
            else:
                token = logits.argmax(-1)
            at = torch.arange(first, last, device=self.device), batch.start_on_device[first:last]
            batch.ids[at] = token
            if self.drafter:
                batch.draft.absorb(slice(first, last), self.drafter, self.drafter.fuse(taps), positions)

    def _cycle(self, batch: "_Batch", stops: np.ndarray, sampling: Sampling) -> None:
        """Draft, verify, commit, for every row of the batch."""
        positions = batch.start_on_device[:, None] + self.slots  # [P, B]
        sizes = np.minimum(self.block_size, batch.limit - batch.start)  # tokens to verify: near the limit less than B
        verify = torch.from_numpy(sizes).to(self.device)
        draws = batch.draws(sampling.seed, self.block_size, batch.start) if sampling.temperature > 0 else None
        block = batch.ids.gather(1, positions)  # slots after the anchor hold leftovers until drafted
        draft_probabilities = None
        if self.drafter:
            logits = self._draft_logits(batch, block[:, :1], positions, verify)  # [P, S, V]
            if draws is None:
                block[:, 1:] = logits.argmax(-1)
            else:
                draft_probabilities = _probabilities(logits, sampling.temperature)
                block[:, 1:] = _pick(draft_probabilities, draws[:, 0, 1:])
        logits, taps = self._target_pass(batch, slice(None), block, positions)
        if draws is None:
            accepted, bonus = _judge_greedy(block, logits, verify)
        else:
            target_probabilities = _probabilities(logits, sampling.temperature)
            accepted, bonus = _judge_sampled(block, target_probabilities, draft_probabilities, verify, draws)
        new = torch.cat((block[:, 1:], bonus[:, None]), 1).where(self.slots < accepted[:, None], bonus[:, None])
        batch.ids.scatter_(1, positions + 1, new)
        if self.drafter:
            batch.draft.absorb(slice(None), self.drafter, self.drafter.fuse(taps), positions)
        batch.commit(new.cpu().numpy(), accepted.cpu().numpy(), sizes, stops)
        batch.retire(stops)

    def _draft_logits(self, batch: "_Batch", anchors: Tensor, positions: Tensor, verify: Tensor) -> Tensor:
        """Logits of slots 1.. for blocks of [anchor, mask, mask ...]; slots from `verify` on are hidden from the rest."""
        drafter, tables = self.drafter, self.tables
        ids = torch.where(self.slots == 0, anchors, drafter.shape.mask_token)
        x = F.embedding(ids, tables.embedding) * tables.embed_scale
        attend = batch.draft.attention(positions, verify, batch.used)
        states = drafter(x, x[:, :0], positions, positions[:, :0], attend)
        logits = F.linear(states[:, 1:], tables.head.weight) * tables.head.scale
        cap = tables.head.softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _target_pass(
        self, batch: "_Batch", rows: slice, ids: Tensor, positions: Tensor, logits_to_keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of the target over ids [p, n] at positions [p, n] -> logits [p, kept, V], taps [p, n, K*H].

        Prompts begin at position 0 and take the model's own causal mask; blocks get masks by their rows' positions.
        """
        prefill = logits_to_keep is not None
        length = positions.shape[1] if prefill else batch.used
        batch.target.place(rows, positions, length)
        masks = None if prefill else causal_masks(self.model.config, positions, length, self.dtype)
        with self._tapped() as taps:
            output = self.model(
                input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=True,
                logits_to_keep=logits_to_keep if prefill else 0, **{self._cache_name: batch.target},
            )  # fmt: skip
        return output.logits, torch.cat(taps, -1) if taps else None

    @contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        """Collects the outputs of the tapped decoder layers, in the drafter's order (hidden_states[L + 1] in transformers'
        terms, but for the last layer, whose entry there is already normed)."""
        taps: list[Tensor] = [torch.empty(0)] * len(self.drafter.shape.taps) if self.drafter else []
        handles = []
        for i, layer in enumerate(self.drafter.shape.taps if self.drafter else ()):

            def keep(module: torch.nn.Module, args: tuple, output: Tensor | tuple, i: int = i) -> None:
                taps[i] = output[0] if isinstance(output, tuple) else output

            handles.append(self._layers[layer].register_forward_hook(keep))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


class _Batch:
    """Rows in flight: tokens, positions, caches; finished rows leave with their Generation."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], new: np.ndarray, numbers: Sequence[int] | None
    ):
        device, self.block_size = decoder.device, decoder.block_size
        self.rows = list(range(len(prompts)))  # index into results
        self.numbers = list(numbers) if numbers is not None else list(self.rows)
        self.prompt = np.array([len(p) for p in prompts], np.int64)
        self.start = self.prompt.copy()  # [P] position of the anchor
        self.limit = self.prompt + new
        capacity = int(self.limit.max()) + self.block_size + 1
        self.ids = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self.start_on_device = torch.from_numpy(self.start.copy()).to(device)
        self.cycles: list[list[Cycle]] = [[] for _ in prompts]
        self.target = TargetCache(len(prompts), capacity)
        self.draft = (
            DraftCache(decoder.drafter.shape, len(prompts), capacity, decoder.dtype, device)
            if decoder.drafter
            else None
        )
        self.results: list[Generation] = [Generation((), ())] * len(prompts)

    @property
    def used(self) -> int:
        """Cache length that this cycle's blocks reach."""
        return int(self.start.max()) + self.block_size

    def draws(self, seed: int, width: int, anchors: np.ndarray, rows: slice = slice(None)) -> Tensor:
        """Uniform numbers in [0, 1), [p, 3, width] float64: to draw drafts, to accept them, to draw the bonus (column 0).

        A pure function of seed, the prompt's number, the anchor's position [p], never used twice, and the slot.
        """
        counters = np.arange(3 * width, dtype=np.uint64)
        places = anchors.astype(np.uint64) << np.uint64(16)
        hashed = [hash64(seed, _DRAWS ^ n, a | counters) for n, a in zip(self.numbers[rows], places, strict=True)]
        values = (np.stack(hashed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(values.reshape(-1, 3, width)).to(self.ids.device)

    def commit(self, new: np.ndarray, accepted: np.ndarray, sizes: np.ndarray, stops: np.ndarray) -> None:
        """Count and keep this cycle's tokens new [P, B]: accepted + bonus, cut at the limit and after a stop token."""
        for row, (n, size) in enumerate(zip(accepted.tolist(), sizes.tolist(), strict=True)):
            count = min(n + 1, int(self.limit[row] - self.start[row]) - 1)
            stop = np.flatnonzero(np.isin(new[row, :count], stops))
            count = int(stop[0]) + 1 if len(stop) else count
            self.cycles[row].append(Cycle(size - 1, n, count))
            self.start[row] += count
        self.start_on_device = torch.from_numpy(self.start.copy()).to(self.ids.device)

    def retire(self, stops: np.ndarray) -> None:
        """Take out rows whose last token is a stop token or the last one allowed."""
        last = self.ids.gather(1, self.start_on_device[:, None])[:, 0].cpu().numpy()
        done = np.isin(last, stops) | (self.start + 1 >= self.limit)
        if not done.any():
            return
        for row in np.flatnonzero(done).tolist():
            tokens = self.ids[row, self.prompt[row] : self.start[row] + 1].tolist()
            self.results[self.rows[row]] = Generation(tuple(tokens), tuple(self.cycles[row]))
        kept = np.flatnonzero(~done)
        keep = torch.from_numpy(kept).to(self.ids.device)
        self.rows, self.numbers, self.cycles = ([x[i] for i in kept] for x in (self.rows, self.numbers, self.cycles))
        self.prompt, self.start, self.limit = self.prompt[kept], self.start[kept], self.limit[kept]
        self.ids, self.start_on_device = self.ids[keep], self.start_on_device[keep]
        self.target.select(keep)
        if self.draft:
            self.draft.select(keep)


def _prefill_groups(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring rows [first, last) whose padded prompts make at most PREFILL_TOKENS, at least one row each."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > first and longest * (row + 1 - first) > PREFILL_TOKENS:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.float() / temperature, dim=-1)


def _pick(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Inverse-CDF sampling: probabilities [..., V] (need not sum to 1), draws [...] in [0, 1) -> tokens [...]."""
    if draws.ndim > 1:  # one slot at a time: float64 sums over V are large
        return torch.stack([_pick(probabilities[:, k], draws[:, k]) for k in range(draws.shape[1])], 1)
    cumulative = probabilities.double().cumsum(-1)
    token = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    return token.clamp(max=probabilities.shape[-1] - 1)


def _judge_greedy(block: Tensor, logits: Tensor, verify: Tensor) -> tuple[Tensor, Tensor]:
    """Leading drafts equal to the target's most likely tokens [P], and its token after them [P]."""
    own = logits.argmax(-1)  # [P, B]
    slot = torch.arange(1, block.shape[1], device=block.device)
    right = (block[:, 1:] == own[:, :-1]) & (slot < verify[:, None])
    accepted = right.long().cumprod(-1).sum(-1)
    return accepted, own.gather(1, accepted[:, None])[:, 0]


def _judge_sampled(
    block: Tensor, target: Tensor, draft: Tensor | None, verify: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling (Leviathan et al. 2023): draft x passes with probability min(1, p(x) / q(x)); the token after the
    last one that passed comes from max(0, p - q) normalised, or from p where every draft passed.

    target p [P, B, V], draft q [P, S, V], draws [P, 3, B] -> accepted [P], bonus [P].
    """
    rows = torch.arange(len(block), device=block.device)
    accepted = torch.zeros_like(verify)
    if draft is not None:
        x = block[:, 1:, None]
        p, q = target[:, :-1].gather(-1, x)[..., 0], draft.gather(-1, x)[..., 0]  # [P, S]
        slot = torch.arange(1, block.shape[1], device=block.device)
        passed = (draws[:, 1, 1:] * q < p) & (slot < verify[:, None])
        accepted = passed.long().cumprod(-1).sum(-1)
    after = target[rows, accepted]  # [P, V]
    if draft is not None:
        rejected = accepted < verify - 1
        residual = (after - draft[rows, accepted.clamp(max=draft.shape[1] - 1)]).clamp(min=0)
        usable = rejected & (residual.sum(-1) > 0)  # p = q up to rounding leaves no residual; then p itself is right
        after = torch.where(usable[:, None], residual, after)
    return accepted, _pick(after, draws[:, 2, 0])
