"""The frozen target: prefill of packed rows, stopped after the last tap, its hidden states written into a unit's slot.

Tap L is the OUTPUT of decoder layer L (0-based), before any final norm (z-lab's rule; transformers' hidden_states[L + 1]
for every layer but the last). Each document of a packed row attends to itself alone. No logits are ever computed.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.console import ShowProgress, no_progress
from draftsmith.errors import UserError
from draftsmith.target_attention import PACKED, DocumentLoop, Kernel, attach, register
from draftsmith.target_experts import experts_of
from draftsmith.target_facts import read_config
from draftsmith.target_fuse import fuse_siblings
from draftsmith.target_kernels import FlexBlocks
from draftsmith.target_load import find_layers, load_decoder, quiet
from draftsmith.target_proof import Survey, check_finite, prove, survey
from draftsmith.target_run import FixedShape
from draftsmith.target_storage import QUANTIZERS_RAISE, cannot_run, quantization, storage_report

BUCKETS = (256, 1024, 4096)  # lengths, besides the row's own, of families that run document by document
POSITION_LEAVES = ("wpe", "embed_positions", "position_embeddings")  # tables of learned positions


@dataclass(frozen=True)
class RowPlan:
    """The fixed shape of the rows to come."""

    tokens: int
    longest: int
    """Longest document; what is left unused of a row may be longer."""


class Target:
    """Embedding and decoder layers 0..last tap of one model on one device."""

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, taps: tuple[int, ...], device: torch.device):
        self.decoder, self.taps, self.device = decoder, taps, device
        self.notes: list[str] = []
        self.packed = True
        self.kernel: Kernel = DocumentLoop()
        self.position_rows = learned_positions(decoder)
        self._outputs: dict[int, Tensor] = {}
        self._runs: dict[int, FixedShape] = {}
        self.hooks = [layers[index].register_forward_hook(self._keep(index)) for index in sorted(set(taps))]

    @classmethod
    def load(
        cls, directory: Path, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, *,
        mode: str = "eager", rows: RowPlan | None = None, trust_remote_code: bool = False,
        progress: ShowProgress = no_progress,
    ) -> "Target":  # fmt: skip
        """Read what the taps need of the model in `directory`, and prove that documents of a packed row stay apart.

        mode: eager, compile, reduce-overhead or graph; auto: graph on CUDA, eager on CPU. All but eager need `rows`.
        UserError when a tensor is missing or does not fit, or when taps are not finite.
        """
        device = torch.device(device)
        mode = ("graph" if device.type == "cuda" else "eager") if mode == "auto" else mode
        config = read_config(directory, trust_remote_code)
        text = config.get_text_config(decoder=True)
        bad = [i for i in taps if not 0 <= i < text.num_hidden_layers]
        if bad or not taps:
            raise UserError(f"target.taps {bad or '()'}: the target has layers 0..{text.num_hidden_layers - 1}")
        register()
        count = max(taps) + 1
        decoder = load_decoder(directory, config, range(count), dtype, PACKED, trust_remote_code, progress)
        try:
            target = cls.over(decoder.to(device), taps, device, mode=mode, rows=rows)
            if not target.packed:  # nothing has run it yet
                check_finite(target.alone(torch.zeros(8, dtype=torch.int64, device=device)), taps)
        except QUANTIZERS_RAISE as error:
            if quantization(config) is None or isinstance(error, torch.OutOfMemoryError | UserError):
                raise
            raise cannot_run(directory, config, dtype, device, error) from None
        tower = "" if text is config else ", the text tower alone"
        layers = f"layers 0..{count - 1} of {text.num_hidden_layers}"
        stored = str(dtype).removeprefix("torch.") + storage_report(directory, config)
        target.notes.insert(0, f"target {config.model_type}: {layers}{tower}, taps {list(taps)}, {stored}")
        return target

    @classmethod
    def over(
        cls, decoder: nn.Module, taps: tuple[int, ...], device: torch.device, *, mode: str = "eager",
        rows: RowPlan | None = None,
    ) -> "Target":  # fmt: skip
        """A target around a decoder that is loaded, cut after the last tap, and uses the attention PACKED."""
        name = find_layers(decoder, max(taps) + 1)
        target = cls(decoder, decoder.get_submodule(name), taps, device)
        if target.position_rows and rows and rows.longest > target.position_rows:
            raise UserError(
                f"the target has learned positions for {target.position_rows} tokens, the corpus has a document of "
                f"{rows.longest}: prepare it with --max-tokens {target.position_rows}"
            )
        found = survey(decoder, target.forward, max(taps) + 1)
        attach(decoder, target.kernel)
        if device.type == "cpu" and mode != "eager":
            target.notes.append(f"mode {mode} asks for a GPU; on the CPU the prefill runs eagerly")
            mode = "eager"
        if mode != "eager" and rows is None:
            raise ValueError(f"mode {mode} needs the shape of the rows")
        if experts := experts_of(decoder):
            mode, note = experts.describe(mode)
            target.notes.append(note)
        if found.refusal is None:
            target._set_up_packed(found, mode, rows)
            found = prove(target, found, rows.tokens if rows and mode != "eager" else None)
        if found.refusal is None:
            why = "exact, for mode eager" if mode == "eager" else f"of one shape, for mode {mode}"
            target.notes.append(
                f"documents packed, attention: {target.kernel.name}, {why}; proved against documents alone"
            )
        else:
            target._set_up_alone(found.refusal, mode, rows)
        return target

    @torch.no_grad()
    def prefill(self, ids: Tensor, positions: Tensor, documents: Tensor, out: Tensor) -> None:
        """Hidden states of the taps, concatenated in listed order, into `out` [T, K*H].

        ids [T] int64; positions [T] int64 restart at 0 in every document; documents [T] int64, equal inside a document
        and ascending.
        """
        if self.packed:
            self.kernel.load(documents)
            self._write(self._run(ids, positions), out)
            return
        starts = (torch.diff(documents).nonzero()[:, 0] + 1).tolist()
        for start, end in pairwise([0, *starts, documents.numel()]):
            self._write(self.alone(ids[start:end]), out[start:end])

    @torch.no_grad()
    def alone(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Taps [n, H] of one document, without packing; padded behind its end to the next bucket where shapes are fixed."""
        length = ids.numel()
        size = min((n for n in self._runs if n >= length), default=length)
        padded = nn.functional.pad(ids, (0, size - length))
        taps = self._run(padded, torch.arange(size, device=ids.device))
        return tuple(tap[:length] for tap in taps)

    def forward(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """ids, positions [1, T] -> the taps [T, H] in listed order."""
        if self.position_rows:  # documents keep to the table; what is unused of a row need not
            positions = positions.clamp(max=self.position_rows - 1)
        self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        taps = tuple(self._outputs[index] for index in self.taps)
        self._outputs.clear()
        return taps

    @property
    def may_compile(self) -> bool:
        """The prefill can meet a part that is not compiled yet."""
        return any(run.in_parts for run in self._runs.values())

    def report(self) -> list[str]:
        """What was loaded and how it runs, one sentence a line."""
        return list(self.notes)

    def _run(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        run = self._runs.get(ids.numel())
        if run is None and self._runs:
            raise ValueError(f"a row of {ids.numel()} tokens; the prefill is set up for {sorted(self._runs)}")
        return run(ids, positions) if run else self.forward(ids[None], positions[None])

    def _write(self, taps: Sequence[Tensor], out: Tensor) -> None:
        width = out.shape[1] // len(taps)
        for i, tap in enumerate(taps):
            out[:, i * width : (i + 1) * width].copy_(tap)

    def _set_up_packed(self, found: Survey, mode: str, rows: RowPlan | None) -> None:
        """Fused projections, a fixed-shape kernel and the compiled forward, where the mode asks for them."""
        if mode == "eager" or rows is None:
            return
        groups = fuse_siblings(self.decoder)
        self.kernel = FlexBlocks(rows.tokens, found.windows, self.device)
        attach(self.decoder, self.kernel)
        self.kernel.load(torch.zeros(rows.tokens, dtype=torch.int64, device=self.device))
        self.notes.append(f"{groups} groups of sibling projections fused")
        self._fix(rows.tokens, mode)

    def _set_up_alone(self, reason: str, mode: str, rows: RowPlan | None) -> None:
        """transformers' own attention, one document at a time."""
        self.packed = False
        self._runs.clear()
        self.notes.append(f"documents run one by one, slower than packed: {reason}")
        self.notes.append(f"attention: transformers' {own_attention(self.decoder)}")
        if mode != "eager" and rows is not None:
            lengths = [n for n in BUCKETS if n < rows.tokens] + [rows.tokens]
            for length in lengths:
                self._fix(length, mode)
            self.notes.append(f"documents are padded to {', '.join(map(str, lengths))} tokens")

    def _fix(self, length: int, mode: str) -> None:
        with torch.no_grad():
            run = FixedShape(self.forward, length, mode, self.device)
        self._runs[length] = run
        self.notes += [f"rows of {length}: {note}" for note in run.notes]
        self.notes.append(f"rows of {length} tokens run in mode {run.mode}")

    def _keep(self, index: int) -> Callable[[nn.Module, tuple, Any], None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            self._outputs[index] = states[0]

        return hook


def own_attention(decoder: nn.Module) -> str:
    """Switch the decoder to transformers' SDPA, or to its eager attention where SDPA does not do; returns the name."""
    for name in ("sdpa", "eager"):
        with contextlib.suppress(ValueError), quiet():
            decoder.set_attn_implementation(name)
        if decoder.config._attn_implementation == name:
            return name
    decoder.config._attn_implementation = "eager"  # a class that cannot be switched: it needs the masks of its own
    return "own for this family"


def learned_positions(decoder: nn.Module) -> int | None:
    """How many positions the decoder has learned an embedding for; None where positions are rotations."""
    if not any(
        n.rpartition(".")[2] in POSITION_LEAVES and isinstance(m, nn.Embedding) for n, m in decoder.named_modules()
    ):
        return None
    return decoder.config.max_position_embeddings
