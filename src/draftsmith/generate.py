"""Replies of the target itself, in process and in batches: greedy or sampled, with stop tokens.

A reply is a pure function of (model, prompt, options, seed): sampled tokens come from numbers hashed from the seed, the
prompt and the place in the reply, so the prompts decoded beside it do not matter, but for rounding (in bfloat16 another
batch shape can turn a near-tie). Batching is continuous: rows that finish make room for the next prompts, the longest
prompts first. Where a target's layers keep anything but plain keys and values (sliding windows, states), rows at
different places cannot be joined, and a batch is finished before the next begins.
"""

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.unit import hash64

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

DTypeName = Literal["auto", "float32", "bfloat16"]
_REPLY = 0x7265706C79  # stream of the counter hash: "reply"


class Reply(NamedTuple):
    """New tokens without the stop token, and why they end: a stop token ("stop") or the limit ("length")."""

    tokens: list[int]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Sampler:
    """temperature 0 is greedy; top_p 1 and top_k 0 leave the distribution whole."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"{self}: temperature and top_k must not be negative, top_p must be in (0, 1]")

    def pick(self, logits: Tensor, keys: np.ndarray, places: Sequence[int]) -> Tensor:
        """logits [P, V], keys [P] uint64 of the rows' prompts, places in their replies -> tokens [P]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scores = self._warpers()(torch.empty(0), logits.float())
        cumulative = scores.softmax(-1).double().cumsum(-1)
        pairs = zip(keys.tolist(), places, strict=True)
        hashed = np.array([hash64(self.seed, _REPLY ^ key, place) for key, place in pairs], np.uint64)
        uniform = torch.from_numpy((hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(logits.device)
        token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        return token.clamp(max=logits.shape[-1] - 1)

    def _warpers(self) -> "LogitsProcessorList":
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


@dataclass(frozen=True)
class Generator:
    """A loaded target that writes replies."""

    model: "PreTrainedModel"
    stop_tokens: frozenset[int]

    @classmethod
    def load(cls, model_dir: Path, dtype: DTypeName = "auto") -> "Generator":
        """On CUDA where there is a device. dtype auto: bfloat16 on CUDA and on CPUs that multiply it natively, else
        float32. Stop tokens are the directory's own (generation_config.json, else config.json)."""
        from draftsmith.target_load import load_whole, stops_of

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        fast = torch.bfloat16 if device.type == "cuda" or native_bfloat16() else torch.float32
        chosen = {"auto": fast, "float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        model = load_whole(model_dir, chosen, device)
        return cls(model, frozenset(stops_of(model, model.config.get_text_config().eos_token_id)))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampler: Sampler | None = None,
        batch: int = 64,
        progress: Callable[[int, Reply], None] | None = None,
    ) -> list[Reply]:
        """Replies in the prompts' order. `progress(index, reply)` is called once for each prompt, as its reply ends.

        A prompt with no token, or one that leaves no room in the model's context, is a ValueError; a reply that reaches
        the context's end ends with "length".
        """
        limits = [self._limit(i, len(prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
        replies: list[Reply | None] = [None] * len(prompts)

        def finish(index: int, reply: Reply) -> None:
            replies[index] = reply
            if progress is not None:
                progress(index, reply)

        # The longest first: memory peaks at once.
        queue = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
        sampler, rows = sampler or Sampler(), None
        while queue or rows is not None:
            free = batch - (0 if rows is None else len(rows.indices))
            if queue and free and (rows is None or rows.can_join):
                take = [queue.popleft() for _ in range(min(free, len(queue)))]
                new = _Rows(self, take, [prompts[i] for i in take], [limits[i] for i in take])
                new.step(sampler, finish)
                rows = new if rows is None else rows.join(new)
            else:
                rows.step(sampler, finish)
            rows = rows.without_finished()
        return [reply for reply in replies if reply is not None]

    def _limit(self, index: int, length: int, max_new_tokens: int) -> int:
        room = self.model.config.get_text_config().max_position_embeddings - length
        if length == 0 or room < 1 or max_new_tokens < 1:
            raise ValueError(f"prompt {index} has {length} tokens and room for {room}; {max_new_tokens} are asked for")
        return min(max_new_tokens, room)


class _Rows:
    """Replies decoded together, left-padded. A finished row rides along until an eighth of the rows can leave with it."""

    def __init__(
        self, generator: Generator, indices: list[int], prompts: Sequence[Sequence[int]], limits: Sequence[int]
    ):
        from transformers import DynamicCache

        self.model, self.stop_tokens = generator.model, generator.stop_tokens
        self.indices, self.limits = list(indices), list(limits)
        self.keys = np.array([_key(prompt) for prompt in prompts], np.uint64)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.running = [True] * len(prompts)
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        self.mask = torch.zeros_like(ids)  # [P, tokens in the cache and those that come next]
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            self.mask[row, longest - len(prompt) :] = 1
        self.ids, self.mask = ids.to(self.model.device), self.mask.to(self.model.device)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.model.config)
        self.cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def step(self, sampler: Sampler, finish: Callable[[int, Reply], None]) -> None:
        """One more token for every row."""
        output = self.model(
            input_ids=self.ids, attention_mask=self.mask, position_ids=self.positions, use_cache=True, logits_to_keep=1,
            **{self.cache_name: self.cache},
        )  # fmt: skip
        chosen = sampler.pick(output.logits[:, -1], self.keys, [len(tokens) for tokens in self.tokens])
        for row, token in enumerate(chosen.tolist()):
            if self.running[row]:
                self._commit(row, token, finish)
        self.ids, self.positions = chosen[:, None], self.positions[:, -1:] + 1
        self.mask = torch.cat((self.mask, self.mask.new_ones(len(chosen), 1)), dim=1)

    def _commit(self, row: int, token: int, finish: Callable[[int, Reply], None]) -> None:
        if token in self.stop_tokens:
            self.running[row] = False
            finish(self.indices[row], Reply(self.tokens[row], "stop"))
            return
        self.tokens[row].append(token)
        if len(self.tokens[row]) == self.limits[row]:
            self.running[row] = False
            finish(self.indices[row], Reply(self.tokens[row], "length"))

    @property
    def can_join(self) -> bool:
        """Every layer keeps plain keys and values, [P, g, tokens, d]."""
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    def join(self, new: "_Rows") -> "_Rows":
        """These rows and `new`, whose ends stand in one column."""
        longest = max(self.mask.shape[1], new.mask.shape[1])
        for one in (self, new):
            one._pad(longest - one.mask.shape[1])
        for mine, theirs in zip(self.cache.layers, new.cache.layers, strict=True):
            mine.keys = torch.cat((mine.keys, theirs.keys))
            mine.values = torch.cat((mine.values, theirs.values))
        self.indices, self.limits = self.indices + new.indices, self.limits + new.limits
        self.tokens, self.running = self.tokens + new.tokens, self.running + new.running
        self.keys = np.concatenate((self.keys, new.keys))
        self.ids, self.mask = torch.cat((self.ids, new.ids)), torch.cat((self.mask, new.mask))
        self.positions = torch.cat((self.positions, new.positions))
        return self

    def without_finished(self) -> "_Rows | None":
        """The rows that run on, with the padding that nobody needs cut off; None when no row is left."""
        if self.running.count(False) * 8 < len(self.running):
            return self
        kept = [row for row, running in enumerate(self.running) if running]
        if not kept:
            return None
        self.indices, self.limits, self.tokens = (
            [x[i] for i in kept] for x in (self.indices, self.limits, self.tokens)
        )
        self.keys, self.running = self.keys[kept], [True] * len(kept)
        keep = torch.tensor(kept, device=self.model.device)
        self.ids, self.mask, self.positions = self.ids[keep], self.mask[keep], self.positions[keep]
        self.cache.reorder_cache(keep)
        if self.can_join:
            self._pad(-int(self.mask.argmax(1).min()))
        return self

    def _pad(self, count: int) -> None:
        """Put `count` empty columns before all rows, or take them away."""
        if count:
            self.mask = nn.functional.pad(self.mask, (count, 0))
            for layer in self.cache.layers:
                layer.keys, layer.values = (nn.functional.pad(x, (0, 0, count, 0)) for x in (layer.keys, layer.values))


def _key(prompt: Sequence[int]) -> int:
    """Names a prompt's stream of random numbers."""
    digest = hashlib.sha256(np.asarray(prompt, dtype="<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def native_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
