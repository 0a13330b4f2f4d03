"""Built-in tables for planning without a device: cards by their datasheets, rates by measurement, well-known targets.

Only the H200's rates were measured (torch 2.11, bfloat16, Qwen3-8B shapes). Another card's are the H200's times the
ratio of the datasheets, tensor-core rate for arithmetic and memory bandwidth for traffic, and are called estimates.
"""

from dataclasses import dataclass, replace

from draftsmith.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One accelerator by its datasheet."""

    name: str
    memory: float
    """GiB that torch can use."""
    tensor: float
    """Dense bfloat16 TFLOP/s with float32 accumulation, no sparsity."""
    bandwidth: float
    """GB/s of device memory."""
    link: float
    """GB/s in one direction to another card of the host (NVLink, else PCIe)."""


CARDS = {
    card.name: card
    for card in (
        Card("rtx3090", 23.5, 71, 936, 22),
        Card("rtx4090", 23.5, 165, 1008, 22),
        Card("rtx5090", 31.3, 209, 1792, 45),
        Card("l4", 22.0, 121, 300, 22),
        Card("a10", 22.0, 125, 600, 22),
        Card("l40s", 44.4, 362, 864, 22),
        Card("rtx6000ada", 47.4, 364, 960, 22),
        Card("rtxpro6000", 94.9, 503, 1792, 45),
        Card("a100-40gb", 39.4, 312, 1555, 300),
        Card("a100-80gb", 79.1, 312, 2039, 300),
        Card("h100", 79.1, 989, 3350, 450),
        Card("h200", 139.7, 989, 4800, 450),
        Card("b200", 178.0, 2250, 8000, 900),
    )
}


@dataclass(frozen=True)
class Rates:
    """What one device reaches in each part of the work, and how that is known."""

    source: str
    estimate: bool
    step: float
    """Useful TFLOP/s of forward, loss and backward, without attention and without the passes over all parameters."""
    attention: float
    """TFLOP/s of the draft blocks' attention, forward and backward."""
    prefill: float
    """TFLOP/s of the target's forward, attention included."""
    traffic: float
    """GB/s of passes over parameters, gradients and moments."""
    pull: float
    """GB/s of a trainer's copy from a target's slot on another device."""
    reduce: float
    """GB/s of bus bandwidth of an all-reduce inside a host."""


# A step of 16,384 tokens and 1,024 blocks of 16 took 247.2 ms, 16.4 of them in attention, and the update moved 4,060 GB/s.
# Prefill of 8 x 2,048 tokens through 34 layers: 43,145 tokens/s. Pull over NVLink 365 GiB/s. All-reduce of 2 GiB in
# bfloat16 between two devices: 6.45 ms. A run at T = 4,096 and A = 1,904 then took 1.935 s a step of 4 units; these rates
# say 1.96.
H200 = Rates("measured on an H200, torch 2.11, bfloat16", False, 655, 298, 591, 4060, 392, 333)


def card(name: str) -> Card:
    """Look a card up by its name in the table; UserError lists the names."""
    found = CARDS.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        raise UserError(f"--device {name}: not in the table of cards; known are {', '.join(CARDS)}")
    return found


def card_of(device_name: str, gib: float) -> Card | None:
    """The card that a driver's device name means, e.g. "NVIDIA H200" or "NVIDIA A100-SXM4-80GB"; None if unknown."""
    flat = device_name.lower().replace(" ", "").replace("geforce", "").replace("generation", "")
    found = [c for c in CARDS.values() if c.name.split("-")[0] in flat]
    near = [c for c in found if abs(c.memory - gib) < 0.15 * c.memory]
    return min(near, key=lambda c: (abs(c.memory - gib), -len(c.name)), default=None)


def rates_of(card: Card) -> Rates:
    """Rates of a card: measured for the H200, else the H200's by datasheet ratio."""
    base = CARDS["h200"]
    if card == base:
        return H200
    compute, memory, link = card.tensor / base.tensor, card.bandwidth / base.bandwidth, card.link / base.link
    return replace(
        H200,
        source=f"estimate: the H200's measured rates times the ratio of the datasheets ({card.name})",
        estimate=True,
        step=H200.step * compute,
        attention=H200.attention * compute,
        prefill=H200.prefill * compute,
        traffic=H200.traffic * memory,
        pull=H200.pull * link,
        reduce=H200.reduce * link,
    )


@dataclass(frozen=True)
class KnownTarget:
    """Sizes of a published dense target, from its config.json."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool


KNOWN_TARGETS = (
    KnownTarget("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, True),
    KnownTarget("Qwen3-1.7B", 2048, 6144, 28, 16, 8, 128, 151936, True),
    KnownTarget("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936, True),
    KnownTarget("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936, False),
    KnownTarget("Qwen3-14B", 5120, 17408, 40, 40, 8, 128, 151936, False),
    KnownTarget("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936, False),
    KnownTarget("Llama-3.3-70B", 8192, 28672, 80, 64, 8, 128, 128256, False),
)
