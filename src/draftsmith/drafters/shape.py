"""From a recipe and a target's facts to the drafter's shape: the drafter copies the target's widths, heads and RoPE."""

from pathlib import Path

from draftsmith.config import Config
from draftsmith.drafters.dflash import DFlashShape, default_taps
from draftsmith.errors import UserError
from draftsmith.mask_token import check_mask_token
from draftsmith.target_facts import describe


def drafter_shape(config: Config, directory: Path) -> DFlashShape:
    """The shape a recipe asks for on the target in `directory`; what does not fit is a UserError naming the key."""
    trusted = config.target.trust_remote_code
    facts, wanted = describe(directory, trusted), config.drafter
    mask_token = config.target.mask_token
    if mask_token is None:
        raise UserError("target.mask_token is missing: `draftsmith init` finds an unused vocabulary row and says why")
    check_mask_token(directory, mask_token, trusted)
    windows = tuple(wanted.window if i in wanted.sliding_layers else None for i in range(wanted.layers))
    try:
        return DFlashShape(
            hidden_size=facts.hidden_size,
            intermediate_size=facts.intermediate_size,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            num_layers=wanted.layers,
            vocab_size=facts.vocab_size,
            block_size=wanted.block,
            mask_token=mask_token,
            taps=config.target.taps or default_taps(facts.num_layers, wanted.layers),
            num_target_layers=facts.num_layers,
            rms_norm_eps=facts.rms_norm_eps,
            rope=facts.rope,
            max_positions=facts.max_positions,
            windows=windows,
        )
    except ValueError as error:
        raise UserError(f"target.taps, target.mask_token or drafter.*: {error}") from None
