"""A TensorRT-LLM checkpoint as a decoder in PyTorch, one layer in memory at a time: what calibration and quality run on.

Sequences lie one after another in a flat (tokens, hidden) tensor with their lengths beside it: there is no padding anywhere.
Arithmetic is float32; a quantized layer multiplies with its own integers and scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional as F

from specbuild.artifacts import TllmCheckpoint
from specbuild.families import splits_of
from specbuild.quant import Levels, QuantScheme, scheme_of_algo
from specbuild.quant.scheme import includes_lm_head
from specbuild.ranks import join_tensor
from specbuild.rotary import make_rotary
from specbuild.shape import ModelShape
from specbuild.tensorfile import row_blocks

CHUNK = 2048  # tokens that run through a layer at once, or one sequence that is longer
LINEARS = {"q": "attention.qkv", "k": "attention.qkv", "v": "attention.qkv", "dense": "attention.dense", "fc": "mlp.fc",
           "gate": "mlp.gate", "proj": "mlp.proj"}  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """Some sequences: the hidden state of every token, (tokens, hidden), and how many tokens each sequence has."""

    hidden: torch.Tensor
    lengths: tuple[int, ...]


class QuantizedLinear(torch.nn.Module):
    """A linear layer by its integers and scales: y = (x * prequant) @ (q * scale).T, x rounded too where the scheme does."""

    def __init__(
        self, weight: torch.Tensor, prequant: torch.Tensor | None, activation: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.weight, self.prequant, self.activation, self.bias = weight, prequant, activation, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.prequant is not None:
            x = x * self.prequant
        if self.activation is not None:
            x = (x / self.activation).round_().clamp_(-128, 127) * self.activation
        return F.linear(x, self.weight, self.bias)

    def rows(self, start: int, stop: int) -> QuantizedLinear:
        bias = None if self.bias is None else self.bias[start:stop]
        return QuantizedLinear(self.weight[start:stop], self.prequant, self.activation, bias)


class PlainLinear(torch.nn.Linear):
    """A linear layer around a weight that is there already."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = torch.nn.Parameter(bias, requires_grad=False)

    def rows(self, start: int, stop: int) -> PlainLinear:
        return PlainLinear(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


class DecoderLayer(torch.nn.Module):
    """One layer; its linear modules are the keys of LINEARS."""

    def __init__(
        self, shape: ModelShape, index: int, linears: dict[str, PlainLinear | QuantizedLinear], norms: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.shape, self.index, self.norms = shape, index, norms
        qkv = linears["attention.qkv"]
        ends = (shape.q_rows, shape.q_rows + shape.kv_rows, shape.q_rows + 2 * shape.kv_rows)
        self.q, self.k, self.v = qkv.rows(0, ends[0]), qkv.rows(ends[0], ends[1]), qkv.rows(ends[1], ends[2])
        self.dense, self.fc, self.proj = linears["attention.dense"], linears["mlp.fc"], linears["mlp.proj"]
        self.gate = linears.get("mlp.gate")

    def linears(self) -> dict[str, torch.nn.Module]:
        """Return the linear modules by their key in LINEARS."""
        return {name: module for name in LINEARS if (module := getattr(self, name)) is not None}

    def forward(self, chunk: Chunk) -> Chunk:
        x = chunk.hidden
        attended = self._attend(self._norm("input_layernorm", x), chunk.lengths)
        if self.shape.inter_norms:
            x = x + self._norm("post_layernorm", attended)
            out = self._norm("post_feedforward_layernorm", self._mlp(self._norm("pre_feedforward_layernorm", x)))
        else:
            x = x + attended
            out = self._mlp(self._norm("post_layernorm", x))
        return Chunk(x + out, chunk.lengths)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norms[name], self.shape.norm_eps)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:  # fc holds the up rows and then the gate rows
            up, gate = self.fc(x).chunk(2, dim=-1)
        else:
            gate, up = self.fc(x), self.gate(x)
        active = F.gelu(gate, approximate="tanh") if self.shape.hidden_act == "gelu" else F.silu(gate)
        out: torch.Tensor = self.proj(active * up)
        return out

    def _attend(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        shape = self.shape
        query, key, value = (module(x).unflatten(-1, (-1, shape.head_dim)) for module in (self.q, self.k, self.v))
        if shape.qk_norm:
            query, key = self._norm("attention.q_layernorm", query), self._norm("attention.k_layernorm", key)
        parts = [part.split(list(lengths)) for part in (query, key, value)]
        attended = torch.cat([self._attend_one(q, k, v) for q, k, v in zip(*parts, strict=True)])
        out: torch.Tensor = self.dense(attended)
        return out

    def _attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend within one sequence: (length, heads, head_dim) to (length, q_rows)."""
        shape, length = self.shape, len(query)
        window = shape.window if shape.windowed(self.index) else None
        turn = _make_waves(shape, window is not None, length)
        query, key = (_rotate(part, *(wave.to(part) for wave in turn)).transpose(0, 1) for part in (query, key))
        value = value.transpose(0, 1)
        places = torch.arange(length, device=query.device)
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (window or length))
        if shape.attn_softcap is not None:
            out = self._attend_capped(query, key, value, seen, shape.attn_softcap)
        else:
            out = F.scaled_dot_product_attention(query[None], key[None], value[None], seen, scale=shape.attention_scale, enable_gqa=True)[0]
        return out.transpose(0, 1).flatten(1)

    def _attend_capped(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, cap: float) -> torch.Tensor:
        grouped = query.reshape(self.shape.kv_heads, -1, query.shape[1], self.shape.head_dim)  # query heads that share a key-value head
        scores = cap * torch.tanh(grouped @ key.transpose(1, 2)[:, None] * self.shape.attention_scale / cap)
        out: torch.Tensor = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, None]).flatten(0, 1)
        return out


@lru_cache(maxsize=64)
def _make_waves(shape: ModelShape, windowed: bool, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of every position and pair of columns, (length, 1, pairs)."""
    frequencies, factor = make_rotary(shape, windowed, length)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.from_numpy(frequencies)
    return (angles.cos() * factor).float()[:, None], (angles.sin() * factor).float()[:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first columns of each head, halves against each other."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Decoder:
    """A checkpoint's whole layers, joined from its ranks. `scheme` and `group_size` quantize a plain one on the way, by rounding."""

    def __init__(self, checkpoint: TllmCheckpoint, scheme: QuantScheme | None = None, group_size: int = 0) -> None:
        self.shape, self._mapping = checkpoint.shape, checkpoint.config["mapping"]
        self._stored = scheme_of_algo(checkpoint.config["quantization"]["quant_algo"])
        self._scheme, self._group_size = scheme, group_size
        self._entries = [checkpoint.entries(rank) for rank in range(self._mapping["world_size"])]
        self._splits = splits_of(self.shape.architecture)
        self._lm_head = includes_lm_head(checkpoint.config["quantization"])
        self._head: PlainLinear | QuantizedLinear | None = None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def layer(self, index: int) -> DecoderLayer:
        """Load one layer."""
        per_rank = self.shape.layers // self._mapping["pp_size"]
        pp_rank, local = divmod(index, per_rank)
        prefix = f"transformer.layers.{local}."
        ranks = self._ranks(pp_rank)
        names = {name.removeprefix(prefix) for name in self._entries[ranks[0]] if name.startswith(prefix)}
        pieces = {name: [self._entries[rank][prefix + name].load() for rank in ranks] for name in names}
        linears = {part: self._linear(part, pieces) for part in self.shape.linears()}
        norms = {name.removesuffix(".weight"): pieces[name][0].float().to(self.device) for name in names if "norm" in name}
        return DecoderLayer(self.shape, index, linears, norms)

    def _ranks(self, pp_rank: int) -> range:
        tp = self._mapping["tp_size"]
        return range(pp_rank * tp, (pp_rank + 1) * tp)

    def _linear(self, part: str, pieces: dict[str, list[torch.Tensor]]) -> PlainLinear | QuantizedLinear:
        """Join a linear layer from its ranks."""
        split = self._splits[f"{part}.weight"]
        bias = None
        if f"{part}.bias" in pieces:
            bias = join_tensor(pieces[f"{part}.bias"], self._splits[f"{part}.bias"], self.shape).float().to(self.device)
        tensors = {name.removeprefix(f"{part}."): values for name, values in pieces.items() if name.startswith(f"{part}.")}
        ranks = [{suffix: values[rank] for suffix, values in tensors.items()} for rank in range(len(tensors["weight"]))]
        levels = [found for each in ranks if (found := self._stored.levels(each)) is not None]
        if not levels:
            weight = join_tensor(tensors["weight"], split, self.shape)
            quantized = None if self._scheme is None else quantize_levels(self._scheme, weight, self._group_size)
            if quantized is None:
                return PlainLinear(weight.float().to(self.device), bias)
            return QuantizedLinear(quantized.weight().to(self.device), None, None, bias)
        weight = join_tensor([each.weight() for each in levels], split, self.shape).to(self.device)
        prequant = None
        if any(each.prequant is not None for each in levels):
            given = [each.q.new_ones(each.q.shape[1]).float() if each.prequant is None else each.prequant for each in levels]
            prequant = join_tensor(given, "columns" if split == "columns" else "none", self.shape).to(self.device)
        activation = None if levels[0].activation is None else levels[0].activation.to(self.device)
        return QuantizedLinear(weight, prequant, activation, bias)

    def embed(self, sequences: Sequence[Sequence[int]]) -> list[Chunk]:
        """Return the hidden states before the first layer, in chunks."""
        chunks = []
        for group in group_sequences(sequences):
            ids = torch.tensor([token for sequence in group for token in sequence])
            hidden = torch.zeros(len(ids), self.shape.hidden)
            first = 0
            for rank in self._ranks(0):  # a vocabulary that ranks share lies in order of rank; else every rank has all of it
                table = self._entries[rank]["transformer.vocab_embedding.weight"].load()
                here = (ids >= first) & (ids < first + len(table))
                hidden[here] = table[ids[here] - first].float()
                first += len(table)
            chunks.append(Chunk((hidden * self.shape.embedding_scale).to(self.device), tuple(map(len, group))))
        return chunks

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (tokens, vocab) of hidden states after the last layer."""
        ranks = self._ranks(self._mapping["pp_size"] - 1)
        scale = self._entries[ranks[0]]["transformer.ln_f.weight"].load().float().to(self.device)
        normed = F.rms_norm(hidden, (hidden.shape[-1],), scale, self.shape.norm_eps)
        if self._lm_head:
            return self._cap(self._load_head()(normed))
        name = "lm_head.weight" if "lm_head.weight" in self._entries[ranks[0]] else "transformer.vocab_embedding.weight"
        out = torch.empty(len(hidden), 0, device=self.device)
        for rank in ranks:
            table = self._entries[rank][name].load()
            blocks = [normed @ table[rows].float().to(self.device).T for rows in row_blocks(tuple(table.shape))]
            out = torch.cat([out, *blocks], dim=1)
        return self._cap(out[:, : self.shape.vocab])

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.shape.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _load_head(self) -> PlainLinear | QuantizedLinear:
        """Load a quantized lm_head, once."""
        if self._head is None:
            ranks = self._ranks(self._mapping["pp_size"] - 1)
            names = [name for name in self._entries[ranks[0]] if name.startswith("lm_head.")]
            self._head = self._linear("lm_head", {name: [self._entries[rank][name].load() for rank in ranks] for name in names})
        return self._head


def quantize_levels(scheme: QuantScheme, weight: torch.Tensor, group_size: int) -> Levels | None:
    """Return what a scheme makes of a weight by rounding alone, as an engine would multiply with it."""
    return scheme.levels(scheme.quantize(weight, group_size, None))


def group_sequences(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield sequences in order, as many together as fit in CHUNK tokens."""
    group: list[Sequence[int]] = []
    for sequence in sequences:
        if group and sum(map(len, group)) + len(sequence) > CHUNK:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group
