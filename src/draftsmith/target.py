"""The frozen target: prefill of packed rows, stopped after the last tap, its hidden states written into a unit's slot.

Tap L is the OUTPUT of decoder layer L (0-based), before any final norm (z-lab's rule; transformers' hidden_states[L + 1]
for every layer but the last). Each document of a packed row attends to itself alone. No logits are ever computed.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.mask_token import check_mask_token, find_mask_token, unused_rows
from draftsmith.target_attention import PACKED, Packing, attach, register
from draftsmith.target_facts import TargetFacts, describe, read_config
from draftsmith.weights import last_layers, load_tables

__all__ = [
    "Target", "TargetFacts", "check_mask_token", "describe", "find_mask_token", "last_layers", "load_tables", "unused_rows",
]  # fmt: skip

log = logging.getLogger(__name__)


class Target:
    """Embedding and decoder layers 0..last tap of one model on one device."""

    def __init__(self, decoder: nn.Module, taps: tuple[int, ...], packing: Packing, notes: list[str]):
        self.decoder, self.taps, self.packing, self.notes = decoder, taps, packing, notes
        self._outputs: dict[int, Tensor] = {}
        for index in set(taps):
            decoder.layers[index].register_forward_hook(self._keep(index))

    @classmethod
    def load(
        cls, directory: Path, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device | str,
        trust_remote_code: bool = False,
    ) -> "Target":  # fmt: skip
        """Read what the taps need of the model in `directory`; UserError when a tensor is missing or does not fit."""
        from transformers import MODEL_MAPPING

        config = read_config(directory, trust_remote_code)
        text = config.get_text_config(decoder=True)
        bad = [i for i in taps if not 0 <= i < text.num_hidden_layers]
        if bad or not taps:
            raise UserError(f"target.taps {bad or '()'}: the target has layers 0..{text.num_hidden_layers - 1}")
        if type(text) not in MODEL_MAPPING:
            raise UserError(f"{directory / 'config.json'}: transformers has no decoder for {text.model_type!r}")
        register()
        count = max(taps) + 1
        family = _cut(MODEL_MAPPING[type(text)], count)
        model, info = family.from_pretrained(
            directory, config=text, dtype=dtype, attn_implementation=PACKED, output_loading_info=True,
        )  # fmt: skip
        if info["missing_keys"]:
            names = sorted(info["missing_keys"])
            raise UserError(f"{directory}: {len(names)} tensors are missing, {names[0]} among them")
        model.eval().requires_grad_(False).to(device)
        packing = Packing()
        attach(model, packing)
        notes = [
            f"target {config.model_type}: layers 0..{count - 1} of {text.num_hidden_layers}, taps {list(taps)}, {dtype}"
        ]
        return cls(model, taps, packing, notes)

    @torch.no_grad()
    def prefill(self, ids: Tensor, positions: Tensor, documents: Tensor, out: Tensor) -> None:
        """Hidden states of the taps, concatenated in listed order, into `out` [T, K*H].

        ids [T] int64; positions [T] int64 restart at 0 in every document; documents [T] int64, equal inside a document
        and ascending.
        """
        self.packing.load(documents)
        self.decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        width = out.shape[1] // len(self.taps)
        for i, index in enumerate(self.taps):
            out[:, i * width : (i + 1) * width].copy_(self._outputs[index])
        self._outputs.clear()

    def report(self) -> list[str]:
        """What was loaded and how it runs, one sentence a line."""
        return self.notes

    def _keep(self, index: int):
        def hook(module: nn.Module, args: tuple, output) -> None:
            self._outputs[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook


def _cut(family: type, count: int) -> type:
    """The same model class that builds only its first layers; the config, which some layers read, stays whole."""

    def build(self, config, *args, **kwargs) -> None:
        family.__init__(self, config, *args, **kwargs)
        self.layers = self.layers[:count]

    return type(family.__name__, (family,), {"__init__": build, "__module__": family.__module__})
