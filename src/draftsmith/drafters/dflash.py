"""DFlash drafter (arXiv 2602.06036): a block-diffusion draft model conditioned on hidden states of its target.

Shape legend: T tokens of a packed row, A anchors, B block size, N = A*B block tokens, H hidden size, K taps, D layers,
h query heads, g key/value heads, d head size. Leading axes are free (`...`), so training calls the layers with packed
rows [N, ...] and decoding with batches [P, B, ...]; only `attend` differs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.fused import fits, norm_rotate
from draftsmith.linear import GatedLinear, Linear


@dataclass(frozen=True)
class DFlashShape:
    """Everything that defines the drafter's arithmetic; written into checkpoints and exports.

    `windows[i]` is layer i's sliding window (causal inside the block, per query position) or None for full attention,
    which is bidirectional inside the block. `rope` holds Hugging Face `rope_parameters` (`rope_theta` included).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float
    rope: dict
    max_positions: int
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} draft layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} kv heads")
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(f"mask token {self.mask_token} is outside the vocabulary of {self.vocab_size}")
        bad = [i for i in self.taps if not 0 <= i < self.num_target_layers]
        if bad or not self.taps:
            raise ValueError(f"taps {bad or '[]'} are not layers of a target with {self.num_target_layers} layers")

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "DFlashShape":
        return cls(**{**values, "taps": tuple(values["taps"]), "windows": tuple(values["windows"])})


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's rule: ids spread from layer 1 to N-3, rounded half to even; 0-based decoder layers, their OUTPUT is tapped."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    if span < num_taps - 1:
        raise ValueError(f"a target of {num_target_layers} layers has no {num_taps} distinct taps between 1 and N-3")
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32, scaled in the input's dtype (as Qwen3 does)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class Rope(nn.Module):
    """Rotary angles, half-rotation style, frequencies by Hugging Face's own rule for `shape.rope`."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        inverse, self.scale = rope_frequencies(shape)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)  # [d/2] float32

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rope":
        """Frequencies follow the module to its device, never to another dtype: rounded to bfloat16 they turn far
        positions by whole radians."""
        exact = self.inverse_frequencies
        super()._apply(fn, recurse)
        if self.inverse_frequencies.dtype != exact.dtype:
            self.inverse_frequencies = exact.to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [...] int -> cos, sin [..., 1, d] in `dtype`; the 1 broadcasts over heads."""
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[..., None, :]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rope_frequencies(shape: DFlashShape) -> tuple[Tensor, float]:
    """Inverse frequencies [d/2] and the scale of cos/sin. Rules whose frequencies depend on the length are refused."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = shape.rope.get("rope_type", "default")
    if kind == "default":
        base = float(shape.rope["rope_theta"])
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / base**exponents, 1.0
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(f"rope type {kind!r} depends on the sequence length and is not supported in a drafter")
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters=shape.rope,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, d] rotated by cos, sin [..., 1, d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


# attend(layer index, q [..., h, d], k and v of the block [..., g, d], k and v of the context [..., g, d]) -> [..., h, d]
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class DFlashLayer(nn.Module):
    """One decoder layer whose keys and values come from the context features and from the block (KV injection).

    Sibling projections share one weight: `qkv_proj` rows are [q | k | v] (the context uses the k and v rows),
    `gate_up_proj` rows are [gate | up]. `to_zlab` and `from_zlab` split and join them.
    """

    def __init__(self, shape: DFlashShape, index: int):
        super().__init__()
        s = shape
        self.index = index
        self.heads, self.kv_heads, self.head_dim = s.num_heads, s.num_kv_heads, s.head_dim
        self.q_size, self.kv_size = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.qkv_proj = Linear(s.hidden_size, self.q_size + 2 * self.kv_size)
        self.q_norm = RMSNorm(s.head_dim, s.rms_norm_eps)
        self.k_norm = RMSNorm(s.head_dim, s.rms_norm_eps)
        self.o_proj = Linear(self.q_size, s.hidden_size)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.gate_up_proj = Linear(s.hidden_size, 2 * s.intermediate_size)
        self.down_proj = GatedLinear(s.intermediate_size, s.hidden_size)

    def context_kv(self, f: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Context features f [..., H] -> rotated keys and values [..., g, d]. f is NOT passed through input_layernorm."""
        kv = self.qkv_proj(f, first_row=self.q_size).unflatten(-1, (2 * self.kv_heads, self.head_dim))
        return self.norm_and_rotate(kv, 0, rope)[1:]

    def norm_and_rotate(self, x: Tensor, queries: int, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., queries + 2g, d] -> (q, k, v): norms and rotation of q and k."""
        if x.ndim == 3 and fits(x, self.head_dim):
            cos, sin = (t.flatten(1) for t in rope)
            eps = self.q_norm.eps
            return norm_rotate(x, self.q_norm.weight, self.k_norm.weight, cos, sin, queries, self.kv_heads, eps)
        q, k, v = x.split((queries, self.kv_heads, self.kv_heads), dim=-2)
        return rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope), v

    def project(self, x: Tensor) -> Tensor:
        """Block stream x [..., H] -> [..., h + 2g, d]: queries, keys and values before their norms."""
        return self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))

    def attention(self, qkv: Tensor, f: Tensor, rope_x: tuple, rope_f: tuple, attend: Attend) -> Tensor:
        """qkv [..., h + 2g, d] of `project`, f [..., H] -> attention's output [..., h*d]."""
        q, k, v = self.norm_and_rotate(qkv, self.heads, rope_x)
        context_k, context_v = self.context_kv(f, rope_f)
        return attend(self.index, q, k, v, context_k, context_v).flatten(-2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention: x [..., H], attended [..., h*d] -> the new block stream [..., H]."""
        x = x + self.o_proj(attended)
        return x + self.down_proj(self.gate_up_proj(self.post_attention_layernorm(x)))

    def forward(self, x: Tensor, f: Tensor, rope_x: tuple, rope_f: tuple, attend: Attend) -> Tensor:
        """x [..., H] block stream, f [..., H] context features -> the new block stream."""
        return self.finish(x, self.attention(self.project(x), f, rope_x, rope_f, attend))


class DFlash(nn.Module):
    """The trained part: fc, hidden_norm, D layers, norm. Embedding and head stay the target's and are not in here."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        self.shape = shape
        self.fc = Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(shape, i) for i in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rope = Rope(shape)

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [..., K*H], in the order of `shape.taps` -> context features f [..., H], the same for every layer."""
        return self.hidden_norm(self.fc(taps))

    def forward(self, x: Tensor, f: Tensor, positions_x: Tensor, positions_f: Tensor, attend: Attend) -> Tensor:
        """Embedded block x [..., H] and features f [..., H] with their positions -> normed states [..., H] for the head."""
        rope_x, rope_f = self.rope(positions_x, x.dtype), self.rope(positions_f, f.dtype)
        for layer in self.layers:
            x = layer(x, f, rope_x, rope_f, attend)
        return self.norm(x)

    def drafts(
        self, anchor: Tensor, mask: Tensor, f: Tensor, positions_x: Tensor, positions_f: Tensor, attend: Attend,
        recompute: bool = False,
    ) -> Tensor:  # fmt: skip
        """States of the drafted slots of whole blocks, [A, B-1, H]: `forward` without the work that nobody reads.

        anchor [A, H] and mask [H] are embeddings, positions_x [A, B], positions_f [T]. In the first layer all mask slots
        have the same queries, keys and values before the rotation, so they are projected once; in the last, slot 0 ends
        after attention. `recompute` recomputes each layer in the backward pass instead of saving what is inside it.
        """
        A, B = positions_x.shape
        rope_x, rope_f = self.rope(positions_x.flatten(), anchor.dtype), self.rope(positions_f, f.dtype)
        x = torch.cat((anchor[:, None], mask.expand(A, B - 1, -1)), dim=1)
        few = torch.cat((anchor, mask[None]))  # [A+1, H], every different row of x

        def run(layer: DFlashLayer, x: Tensor, f: Tensor) -> Tensor:
            if layer.index == 0:
                rows = layer.project(few)
                qkv = torch.cat((rows[:-1, None], rows[-1].expand(A, B - 1, -1, -1)), dim=1)
            else:
                qkv = layer.project(x)
            attended = layer.attention(qkv.flatten(0, 1), f, rope_x, rope_f, attend).unflatten(0, (A, B))
            if layer.index == self.shape.num_layers - 1:
                x, attended = x[:, 1:], attended[:, 1:]
            return layer.finish(x, attended)

        for layer in self.layers:
            x = checkpoint(run, layer, x, f, use_reentrant=False) if recompute else run(layer, x, f)
        return self.norm(x)


def init_random(drafter: DFlash, seed: int, std: float = 0.02) -> None:
    """Fill every matrix with N(0, std) in name order and every norm with 1, the same on any machine and torch thread count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(drafter.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def to_zlab(state: dict[str, Tensor], shape: DFlashShape) -> dict[str, Tensor]:
    """Our parameter names and fused weights -> z-lab's 11 tensors a layer + 3. Also fits optimizer moments."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf == "qkv_proj":
            for part, piece in zip("qkv", tensor.split((q, kv, kv)), strict=True):
                out[f"{prefix}.self_attn.{part}_proj.weight"] = piece
        elif leaf == "gate_up_proj":
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                out[f"{prefix}.mlp.{part}_proj.weight"] = piece
        elif leaf in ("o_proj", "q_norm", "k_norm"):
            out[f"{prefix}.self_attn.{leaf}.weight"] = tensor
        elif leaf == "down_proj":
            out[f"{prefix}.mlp.down_proj.weight"] = tensor
        else:
            out[name] = tensor
    return out


def from_zlab(tensors: dict[str, Tensor], shape: DFlashShape) -> dict[str, Tensor]:
    """The inverse of `to_zlab`; names or shapes that do not fit are one ValueError that lists them."""
    with torch.device("meta"):
        expected = to_zlab(dict(DFlash(shape).named_parameters()), shape)
    wrong = [f"{n}: missing" for n in expected if n not in tensors]
    wrong += [f"{n}: not a DFlash tensor" for n in tensors if n not in expected]
    wrong += [
        f"{n}: {list(tensors[n].shape)} instead of {list(t.shape)}"
        for n, t in expected.items()
        if n in tensors and tensors[n].shape != t.shape
    ]
    if wrong:
        raise ValueError("drafter weights do not fit: " + "; ".join(wrong[:6]) + (" ..." if len(wrong) > 6 else ""))
    out = {n: tensors[n] for n in ("fc.weight", "hidden_norm.weight", "norm.weight")}
    for i in range(shape.num_layers):
        p = f"layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{p}.{norm}.weight"] = tensors[f"{p}.{norm}.weight"]
        for leaf in ("q_norm", "k_norm", "o_proj"):
            out[f"{p}.{leaf}.weight"] = tensors[f"{p}.self_attn.{leaf}.weight"]
        out[f"{p}.down_proj.weight"] = tensors[f"{p}.mlp.down_proj.weight"]
        out[f"{p}.qkv_proj.weight"] = torch.cat([tensors[f"{p}.self_attn.{x}_proj.weight"] for x in "qkv"])
        out[f"{p}.gate_up_proj.weight"] = torch.cat([tensors[f"{p}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    return out


def useful_flops(shape: DFlashShape, tokens: int, anchors: int) -> float:
    """Matmul FLOPs that one forward + backward of a unit cannot avoid, attention apart.

    fc needs no input gradient (4x instead of 6x), the frozen head no weight gradient (4x) and slot 0 is not projected.
    """
    s, n = shape, anchors * shape.block_size
    attention = s.hidden_size * s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads)
    layer = attention + 3 * s.hidden_size * s.intermediate_size
    context = 2 * s.hidden_size * s.num_kv_heads * s.head_dim
    fc = len(s.taps) * s.hidden_size**2
    head = anchors * (s.block_size - 1) * s.vocab_size * s.hidden_size
    return 6.0 * n * s.num_layers * layer + tokens * (6.0 * s.num_layers * context + 4.0 * fc) + 4.0 * head
