# SPDX-License-Identifier: Apache-2.0
"""The problems that are timed, as data: benchmarks and docs read it.

python shapes.py      prints the list as a Markdown table
"""

import random
from typing import NamedTuple


class Attention(NamedTuple):
  """One problem: who attends to whom, and what is added or hidden.

  `lengths` are those of a batch's sequences, packed one behind the other or,
  with `padded`, at the starts of the rows of [batch, seq].
  """

  name: str
  batch: int
  q_heads: int
  kv_heads: int
  seq: int  # of queries; packed: of all sequences together
  head_dim: int
  causal: bool = False
  window: int = 0  # keys a row sees at most; 0: no window
  lengths: tuple[int, ...] = ()
  padded: bool = False
  kv_seq: int = 0  # of keys; 0: as many as queries
  v_dim: int = 0  # the values' head dimension; 0: that of queries and keys
  soft_cap: float = 0.0
  bias: bool = False  # learned, one of [q_heads, seq, seq]
  alibi: bool = False
  dropout: float = 0.0
  sink: bool = False  # a learned logit a head that has no value
  leading: int = 0  # first keys that stay visible beside the window

  @property
  def packed(self) -> bool:
    return bool(self.lengths) and not self.padded

  @property
  def keys(self) -> int:
    return self.kv_seq or self.seq

  @property
  def values(self) -> int:
    return self.v_dim or self.head_dim

  @property
  def sides(self) -> tuple[int, int]:
    """Keys a row sees before and behind its own; -1: all of them."""
    if not self.window:
      return -1, 0 if self.causal else -1
    return (self.window - 1, 0) if self.causal else (self.window // 2,) * 2

  def visible(self) -> int:
    """Returns how many (row, key) pairs are not masked, in all of the batch."""
    left, right = self.sides

    def pairs(rows: int, keys: int) -> int:
      if left < 0 and right < 0:
        return rows * keys
      total = 0
      for row in range(rows):
        first = max(0, row - left) if left >= 0 else 0
        last = min(keys - 1, row + right) if right >= 0 else keys - 1
        total += last + 1 - first + min(first, self.leading)
      return total

    if self.lengths:
      return sum(pairs(n, n) for n in self.lengths)
    return self.batch * pairs(self.seq, self.keys)

  def flops(self, which: str) -> float:
    """Two matrix products of 2 flops a pair and channel forward, five back."""
    forward = self.head_dim + self.values
    backward = 3 * self.head_dim + 2 * self.values
    channels = {"forward": forward, "backward": backward}
    return (
      2.0
      * self.visible()
      * self.q_heads
      * channels.get(which, forward + backward)
    )

  def mask(self) -> str:
    """Returns what is hidden and added, in words."""
    words = [
      (self.causal, "causal"),
      (self.window, f"window {self.window}"),
      (self.leading, f"{self.leading} leading keys"),
      (self.padded, "padding"),
      (self.soft_cap, f"soft cap {self.soft_cap:g}"),
      (self.bias, "bias"),
      (self.alibi, "ALiBi"),
      (self.sink, "sinks"),
      (self.dropout, f"dropout {self.dropout:g}"),
    ]
    return ", ".join(word for there, word in words if there) or "none"


# Lengths as a packed batch of documents has them: few long, many short.
SKEWED = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 64)
# Sentences padded to 512, half of them full: BERT's second phase of training.
SENTENCES = (512,) * 32 + tuple(range(16, 512, 16)) + (500,)

_BASE = [
  ("d128", 4, 16, 16, 4096, 128),
  ("d128_long", 1, 16, 16, 16384, 128),
  ("d64", 4, 32, 32, 4096, 64),
  ("d256", 4, 8, 8, 4096, 256),
  ("gqa8", 4, 16, 2, 4096, 128),
]

# Every head dimension that has kernels, with about 2048 channels.
_DIMS = [
  *(
    (f"dim{d}", 2, max(8, 2048 // d // 4 * 4), d, 0)
    for d in (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
  ),
  ("dim192_128", 2, 16, 192, 128),
]

# One feature at a time, and the pairs that models have.
_FEATURES = {
  "plain": {},
  "causal": dict(causal=True),
  "soft_cap": dict(soft_cap=50.0),
  "bias": dict(bias=True),
  "alibi": dict(alibi=True),
  "dropout": dict(dropout=0.1),
  "sink": dict(sink=True),
  "window": dict(causal=True, window=512),
  "window_two_sided": dict(window=512),
  "window_leading": dict(causal=True, window=512, leading=64),
  "soft_cap_causal": dict(causal=True, soft_cap=50.0),
  "soft_cap_window": dict(causal=True, window=1024, soft_cap=50.0),
  "bias_causal": dict(causal=True, bias=True),
  "bias_dropout": dict(bias=True, dropout=0.1),
  "alibi_causal": dict(causal=True, alibi=True),
  "dropout_causal": dict(causal=True, dropout=0.1),
  "sink_causal": dict(causal=True, sink=True),
  "sink_window": dict(causal=True, window=128, sink=True),
}
_PADDED = (4096, 3000, 2048, 1000)
_PADDED_FEATURES = {
  "padding": {},
  "padding_causal": dict(causal=True),
  "padding_dropout": dict(dropout=0.1),
}

_MODELS = [
  Attention("llama3_8b", 2, 32, 8, 8192, 128, causal=True),
  # A device's share of eight.
  Attention("llama3_70b", 4, 8, 1, 8192, 128, causal=True),
  Attention(
    "gemma2_9b", 1, 16, 8, 8192, 256, causal=True, window=4096, soft_cap=50.0
  ),
  Attention(
    "gemma2_9b_global", 1, 16, 8, 8192, 256, causal=True, soft_cap=50.0
  ),
  Attention("gemma3_12b", 1, 16, 8, 8192, 256, causal=True, window=1024),
  Attention("gemma3_27b", 1, 32, 16, 8192, 128, causal=True, window=1024),
  Attention("gpt_oss", 1, 64, 8, 4096, 64, causal=True, window=128, sink=True),
  Attention("gpt_oss_global", 1, 64, 8, 4096, 64, causal=True, sink=True),
  Attention("deepseek_v3", 1, 128, 128, 4096, 192, causal=True, v_dim=128),
  Attention("mistral_7b", 1, 32, 8, 8192, 128, causal=True, window=4096),
  Attention("qwen2_0.5b", 4, 14, 2, 4096, 64, causal=True),
  Attention("phi2", 4, 32, 32, 2048, 80, causal=True),
  Attention("gptj_6b", 4, 16, 16, 2048, 256, causal=True),
  Attention("bloom_7b", 4, 32, 32, 2048, 128, causal=True, alibi=True),
  Attention("gpt2", 16, 12, 12, 1024, 64, causal=True, dropout=0.1),
  Attention(
    "bert_base",
    64,
    12,
    12,
    512,
    64,
    lengths=SENTENCES,
    padded=True,
    dropout=0.1,
  ),
  Attention("bert_large", 64, 16, 16, 512, 64, lengths=SENTENCES, padded=True),
  Attention("t5_large", 32, 16, 16, 512, 64, bias=True),
  Attention("modernbert", 4, 12, 12, 8192, 64, window=128),
  Attention("whisper_encoder", 8, 20, 20, 1500, 64),
  Attention("whisper_decoder", 8, 20, 20, 448, 64, causal=True),
  Attention("whisper_cross", 8, 20, 20, 448, 64, kv_seq=1500),
  Attention("vit_l14", 64, 16, 16, 257, 64),
  Attention("vit_l16_384", 32, 16, 16, 577, 64),
  Attention("sd15", 8, 8, 8, 4096, 40),
  Attention("sdxl", 8, 10, 10, 4096, 64),
]

ATTENTION = [
  *(Attention(name, *size) for name, *size in _BASE),
  *(Attention(f"{name}_causal", *size, causal=True) for name, *size in _BASE),
  *(
    Attention(f"window{w}", 1, 16, 16, 16384, 128, causal=True, window=w)
    for w in (1024, 4096)
  ),
  Attention("varlen", 1, 16, 16, sum(SKEWED), 128, lengths=SKEWED),
  Attention(
    "varlen_causal", 1, 16, 16, sum(SKEWED), 128, causal=True, lengths=SKEWED
  ),
  *(
    Attention(f"{n}{'_causal' * c}", b, h, h, 4096, d, causal=c, v_dim=v)
    for n, b, h, d, v in _DIMS
    for c in (False, True)
  ),
  *(
    Attention(f"feature_{n}", 2, 16, 16, 4096, 128)._replace(**feature)
    for n, feature in _FEATURES.items()
  ),
  *(
    Attention(f"feature_{n}", 4, 16, 16, 4096, 128)._replace(
      lengths=_PADDED, padded=True, **feature
    )
    for n, feature in _PADDED_FEATURES.items()
  ),
  # 16384 or more tokens each, cut into ever shorter sequences.
  *(
    Attention(f"short{s}_d{d}{'_causal' * c}", b, h, h, s, d, causal=c)
    for b, h, s, d in (
      (256, 12, 128, 64),
      (64, 16, 256, 128),
      (64, 12, 512, 64),
      (32, 16, 512, 128),
      (16, 16, 1024, 128),
      (8, 16, 2048, 128),
    )
    for c in (False, True)
  ),
  *(m._replace(name=f"model_{m.name}") for m in _MODELS),
]

# Small ones that a CPU runs in seconds, one of each kind.
SMOKE = [
  Attention("smoke", 2, 4, 4, 128, 32),
  Attention("smoke_causal", 2, 4, 2, 128, 64, causal=True),
  Attention("smoke_window", 1, 2, 2, 256, 32, causal=True, window=32),
  Attention(
    "smoke_varlen", 1, 2, 2, 112, 32, causal=True, lengths=(64, 32, 16)
  ),
  Attention(
    "smoke_padding",
    2,
    2,
    1,
    64,
    40,
    lengths=(64, 30),
    padded=True,
    soft_cap=9.0,
    alibi=True,
  ),
  Attention(
    "smoke_sink", 1, 4, 2, 64, 32, causal=True, window=16, leading=4, sink=True
  ),
  Attention("smoke_bias", 1, 2, 2, 48, 24, kv_seq=64, v_dim=16, bias=True),
  Attention("smoke_dropout", 1, 2, 2, 64, 32, causal=True, dropout=0.1),
]


def random_attention(count: int, seed: int, tokens: int = 16384):
  """Returns problems nobody chose: every argument drawn, of about that size.

  Half have no feature, as most calls; the others one, or two that go together.
  """
  rng = random.Random(seed)
  drawn = []
  for i in range(count):
    d = rng.randrange(16, 257, 8)
    q_heads = rng.choice((4, 8, 12, 16, 24, 32))
    kv_heads = q_heads // rng.choice((1, 1, 2, 4))
    # As likely in every octave, and half of them no multiple of a tile.
    seq = int(128 * (tokens / 2 / 128) ** rng.random())
    if rng.random() < 0.5:
      seq = -(-seq // 64) * 64
    # As many bytes whatever the heads.
    batch = max(1, min(64, round(tokens / seq * 2048 / (q_heads * d))))
    problem = Attention(
      f"random{i}",
      batch,
      q_heads,
      kv_heads,
      seq,
      d,
      causal=rng.random() < 0.5,
    )
    form = rng.choice(("dense", "dense", "padded", "packed"))
    if form != "dense":
      lengths = tuple(rng.randint(1, seq) for _ in range(batch + 1))
      problem = problem._replace(lengths=lengths, padded=form == "padded")
      problem = (
        problem._replace(batch=1, seq=sum(lengths))
        if form == "packed"
        else problem._replace(batch=len(lengths), seq=max(lengths))
      )
    features = [
      dict(soft_cap=rng.choice((20.0, 30.0, 50.0))),
      dict(alibi=True),
      dict(dropout=0.1),
      dict(sink=True),
      dict(window=rng.choice((32, 128, 512, 1024))),
      dict(causal=True, window=rng.choice((32, 128, 512)), leading=4),
      dict(causal=True, window=128, sink=True),
      dict(causal=True, window=512, soft_cap=50.0),
    ]
    # A table of the scores' size, which has no packed form.
    if form == "dense" and q_heads * seq * seq <= 1 << 29:
      features += [dict(bias=True), dict(bias=True, dropout=0.1)]
    if rng.random() < 0.5:
      problem = problem._replace(**rng.choice(features))
    drawn.append(problem)
  return drawn


class Norm(NamedTuple):
  """Rows to normalise: one tensor of `rows` by `cols`."""

  rows: int
  cols: int

  def bytes(self, kind: str, backward: bool, itemsize: int) -> int:
    """What must pass through memory: whole tensors, each once.

    Forward reads x and writes y; backward reads it and the gradient of y and
    writes that of x. An addition in front reads and writes one more tensor
    forward and reads the sum's gradient backward.
    """
    tensors = 3 if backward else 2
    if kind.endswith("_add"):
      tensors += 1 if backward else 2
    return tensors * self.rows * self.cols * itemsize


# A quarter of a GiB of bfloat16 each, so that no cache holds it.
NORM = [
  Norm((1 << 27) // cols, cols)
  for cols in (2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
]
NORM_SMOKE = [Norm(64, 256), Norm(8, 1000)]


class Gemm(NamedTuple):
  """A product a [m, k] b [n, k]^T; kind: bf16, int8, fp8 or fp8_block.

  Rows of int8 and fp8 have a scale each; of fp8_block, each 128 columns of a
  row of a have one, and 128 x 128 of b.
  """

  kind: str
  m: int
  n: int
  k: int

  def flops(self, backward: bool) -> float:
    """Backward is two products: the gradients of a and of b."""
    return 2.0 * (2 if backward else 1) * self.m * self.n * self.k


def random_gemms(kind: str, count: int, seed: int) -> list[Gemm]:
  """Products of decoding, prefill and training, drawn evenly in the logarithm.

  m is from 1 to 16384, n and k from 360 to 19000 are multiples of 64 or, one in
  four, of 8 (of 8 bits: 16); one in twelve of bf16 is odd.
  """
  rng = random.Random(seed)

  def size() -> int:
    wanted = 2 ** rng.uniform(8.5, 14.2)
    step = rng.choice((64, 64, 64, 8 if kind == "bf16" else 16))
    if kind == "bf16" and rng.randrange(12) == 0:
      return int(wanted) | 1
    return round(wanted / step) * step

  return [
    Gemm(kind, round(2 ** rng.uniform(0, 14)), size(), size())
    for _ in range(count)
  ]


# n and k of the fp8 products that DeepGEMM publishes figures of.
DEEPGEMM = (
  (2112, 7168),
  (4096, 7168),
  (7168, 2048),
  (7168, 16384),
  (24576, 1536),
  (32768, 512),
)

GEMM = [
  *(Gemm("bf16", s, s, s) for s in (4096, 8192)),
  *(Gemm("bf16", m, 4096, 4096) for m in (128, 256, 512, 1024)),
  *(
    Gemm("bf16", m, n, k)
    for n, k in ((4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336))
    for m in (1, 16, 64)
  ),
  *(
    Gemm(kind, *size)
    for kind in ("int8", "fp8")
    for size in (
      (4096, 4096, 4096),
      (8192, 8192, 8192),
      (64, 4096, 4096),
      (64, 8192, 8192),
    )
  ),
  Gemm("fp8_block", 4096, 4096, 4096),
  Gemm("fp8_block", 8192, 8192, 8192),
  *(Gemm("fp8_block", m, n, k) for n, k in DEEPGEMM for m in (64, 128, 4096)),
]
GEMM_SMOKE = [
  Gemm(kind, 16, 128, 256) for kind in ("bf16", "int8", "fp8", "fp8_block")
]


class Rope(NamedTuple):
  """Queries and keys to turn.

  Without `positions` a token's row of the tables is its place; d_rot of
  head_dim channels are turned.
  """

  name: str
  batch: int
  seq: int
  q_heads: int
  kv_heads: int
  head_dim: int
  d_rot: int
  style: str = "neox"
  positions: bool = False
  table: str = "float32"

  def bytes(self, kind: str, itemsize: int) -> int:
    """What must pass through memory: vectors in and out; tables stay near."""
    heads = self.q_heads + (self.kv_heads if kind == "2c" else 0)
    return 2 * self.batch * self.seq * heads * self.head_dim * itemsize


ROPE = [
  Rope("llama_8b", 2, 8192, 32, 8, 128, 128),
  Rope("llama_8b_bf16_tables", 2, 8192, 32, 8, 128, 128, table="bfloat16"),
  Rope("llama_70b", 1, 8192, 64, 8, 128, 128, positions=True),
  Rope("qwen_0.5b", 4, 8192, 14, 2, 64, 64),
  Rope("gemma_9b", 1, 8192, 16, 8, 256, 256),
  Rope("phi_partial", 4, 4096, 32, 32, 80, 32),
  Rope("glm_gptj_partial", 2, 8192, 32, 2, 128, 64, style="gptj"),
  Rope("gptj", 2, 8192, 32, 32, 128, 128, style="gptj"),
  Rope("deepseek_rope_part", 2, 8192, 128, 1, 64, 64, style="gptj"),
  Rope("decode_64", 64, 1, 32, 8, 128, 128, positions=True),
]
ROPE_SMOKE = [
  Rope("smoke", 2, 16, 4, 2, 32, 32),
  Rope("smoke_gptj", 1, 9, 3, 1, 20, 12, style="gptj", positions=True),
]


class Activation(NamedTuple):
  """A gated activation: gate and up of [rows, 2 * cols] become [rows, cols]."""

  function: str
  rows: int
  cols: int

  def bytes(self, which: str, itemsize: int) -> int:
    """What a call must move; quantised results are one byte a number."""
    read = {"backward": 3}.get(which, 2) * itemsize
    written = {"forward": itemsize, "backward": 2 * itemsize}.get(which, 1)
    return self.rows * self.cols * (read + written)


ACTIVATION = [
  Activation("silu", 8192, 14336),  # Llama 3 8B
  Activation("silu", 16384, 3072),
  Activation("silu", 64, 14336),
  Activation("gelu_tanh", 8192, 14336),  # Gemma 2 9B
  Activation("gelu", 16384, 4096),
  Activation("silu", 16384, 2048),  # an expert of DeepSeek V3
]
ACTIVATION_SMOKE = [Activation("silu", 9, 128), Activation("gelu", 5, 40)]


class Quant(NamedTuple):
  """Rows to quantise."""

  kind: str
  rows: int
  cols: int

  def bytes(self, m: int, n: int, itemsize: int) -> int:
    """What a call must move, with a scale for m rows of n columns (0: all)."""
    groups = -(-self.rows // m) * -(-self.cols // (n or self.cols))
    scales = groups * (1 if self.kind.startswith("mx") else 4)
    halves = 1 if self.kind == "mxfp4" else 2
    return self.rows * self.cols * (2 * itemsize + halves) // 2 + scales


QUANT = [(8192, 8192), (4096, 5120), (64, 8192)]
QUANT_SMOKE = [(9, 96), (130, 256)]


class Sampling(NamedTuple):
  """Rows of logits: a token drawn of each, or the largest columns."""

  function: str
  rows: int
  cols: int
  top_k: int = 0
  top_p: float = 1.0


SAMPLING = [
  *(
    Sampling(*function, *limits)
    for rows in (1, 8, 128)
    for function, limits in (
      (("sample", rows, 128256), ()),
      (("sample", rows, 128256), (50, 0.9)),
      (("sample", rows, 128256), (0, 0.9)),
      (("greedy", rows, 128256), ()),
      (("top_k", rows, 128256), (50,)),
    )
  ),
  Sampling("sample", 64, 151936, 20, 0.95),  # Qwen 3
  Sampling("sample", 256, 32000, 50, 0.9),
  Sampling("top_k", 128, 128256, 8),
  Sampling("top_k", 128, 128256, 1000),
  Sampling("select", 16, 65536, 2048),  # DeepSeek V3.2's indexer, decoding
  Sampling("select", 1024, 65536, 2048),  # and a chunk of a prompt
]
SAMPLING_SMOKE = [
  Sampling("sample", 3, 111),
  Sampling("sample", 2, 1000, 9, 0.8),
  Sampling("greedy", 2, 300),
  Sampling("top_k", 2, 300, 7),
  Sampling("select", 2, 300, 20),
]


class Paged(NamedTuple):
  """Queries against pages; `lengths` are of the contexts, if not all equal.

  `queries` are the last ones of a context, or all of one that has fewer.
  `room` is how many keys a table has entries for, if more than the longest.
  """

  name: str
  batch: int
  context: int
  q_heads: int
  kv_heads: int
  head_dim: int
  queries: int = 1
  page: int = 16
  cache: str = "bfloat16"
  lengths: tuple[int, ...] = ()
  room: int = 0

  @property
  def contexts(self) -> tuple[int, ...]:
    return self.lengths or (self.context,) * self.batch

  @property
  def new(self) -> tuple[int, ...]:
    """Queries of each sequence."""
    return tuple(min(self.queries, n) for n in self.contexts)

  def bytes(self, itemsize: int) -> int:
    """What must be read of the caches."""
    return 2 * sum(self.contexts) * self.kv_heads * self.head_dim * itemsize


PAGED = [
  Paged("llama_8b", 128, 4096, 32, 8, 128),
  Paged("llama_8b", 16, 8192, 32, 8, 128),
  *(Paged("llama_8b", batch, 32768, 32, 8, 128) for batch in (1, 8, 16, 32)),
  Paged("llama_8b", 1, 131072, 32, 8, 128),
  *(Paged("llama_8b", 64, 8192, 32, 8, 128, page=n) for n in (1, 64, 256)),
  Paged("llama_8b_fp8", 128, 8192, 32, 8, 128, cache="float8_e4m3fn"),
  Paged("llama_8b_fnuz", 128, 8192, 32, 8, 128, cache="float8_e4m3fnuz"),
  Paged("llama_8b_int8", 128, 8192, 32, 8, 128, cache="int8"),
  Paged("llama_70b_tp8", 256, 8192, 8, 1, 128),
  Paged("gpt_oss", 64, 8192, 64, 8, 64),
  Paged("gemma_9b", 64, 4096, 16, 8, 256),
  Paged("multi_head", 32, 4096, 32, 32, 128),
  Paged("llama_8b_chunk", 8, 8192, 32, 8, 128, queries=512),
  Paged("llama_8b_chunk", 1, 32768, 32, 8, 128, queries=1024),
  *(Paged("llama_8b_prefill", batch, n, 32, 8, 128, queries=n, page=page)
    for batch, n in ((4, 4096), (1, 2048), (16, 1024), (32, 500), (2, 300),
                     (64, 250)) for page in (16, 64)),
  *(Paged("llama_8b_wide", batch, n, 32, 8, 128, queries=n, page=page,
          room=8192)
    for batch, n in ((16, 1024), (32, 500), (64, 250)) for page in (16, 64)),
]
# Prefill in float8: (name, batch, query heads, KV heads, tokens, head dim,
# causal).
MHA_FP8 = [
  ("bert", 16, 16, 16, 1024, 64, False),
  ("llama_8b", 16, 32, 8, 1024, 128, True),
  ("llama_8b", 4, 32, 8, 4096, 128, True),
  ("llama_8b", 2, 32, 8, 8192, 128, True),
  ("llama_8b", 1, 32, 8, 32768, 128, True),
  ("diffusion", 2, 24, 24, 4096, 128, False),
  ("diffusion", 1, 24, 24, 16384, 128, False),
]
MHA_FP8_SMOKE = [("smoke", 2, 4, 2, 150, 64, True)]
PAGED_SMOKE = [
  Paged("smoke", 2, 40, 4, 2, 64),
  Paged("smoke_int8", 3, 17, 4, 1, 128, page=8, cache="int8"),
  Paged("smoke_chunk", 2, 30, 4, 2, 64, queries=9),
]


class Experts(NamedTuple):
  """A grouped product, routing, or a layer of experts.

  Attributes:
    what: "nn" and "nt", rows times matrices [g, k, n] and [g, n, k], "tn", the
      gradient of such matrices; "i8", "fp8" and "fp8_block", "nt" of bytes with
      scales a row, or of blocks; "mx" and "i4", "nt" with matrices of MXFP4 and
      int4; "route", choice and order of experts; "layer".
    experts: groups.
    m: rows; of "route" and "layer" tokens.
    n: columns; of a layer the width between its products.
    k: what is summed; of a layer the width of tokens.
    topk: experts of a token.
    sizes: of groups: "even", "skewed" (half of the rows are one group's, and a
      quarter of the groups have none) or "random".
  """
  what: str
  experts: int
  m: int
  n: int
  k: int
  topk: int = 1
  sizes: str = "even"


MOE = [
  *(Experts(what, g, m, n, k, sizes=sizes)
    for g, m, n, k in ((8, 32768, 4096, 4096), (64, 32768, 2048, 7168),
                       (64, 32768, 7168, 2048))
    for what, sizes in (("nn", "even"), ("nn", "skewed"), ("nt", "even"),
                        ("tn", "even"), ("tn", "skewed"))),
  Experts("nt", 128, 512, 1536, 4096, sizes="random"),
  Experts("nn", 128, 512, 1536, 4096, sizes="random"),
  Experts("nt", 8, 64, 14336, 4096),
  *(Experts(what, g, m, n, k, sizes=sizes)
    for what in ("i8", "fp8", "fp8_block")
    for g, m, n, k, sizes in ((64, 32768, 2048, 7168, "even"),
                              (128, 512, 1536, 4096, "random"))),
  *(Experts(what, 128, m, 5760, 2880, sizes=sizes)
    for what in ("mx", "i4")
    for m, sizes in ((512, "random"), (32768, "even"))),
  Experts("route", 256, 8192, 0, 0, 8),
  Experts("route", 128, 64, 0, 0, 8),
  Experts("layer", 64, 4096, 1408, 2048, 6, "random"),
  Experts("layer", 128, 64, 768, 2048, 8, "random"),
]
MOE_SMOKE = [
  Experts("nn", 3, 40, 16, 24, sizes="skewed"),
  Experts("nt", 3, 40, 16, 24),
  Experts("tn", 3, 40, 16, 24, sizes="random"),
  Experts("i8", 3, 40, 16, 32, sizes="skewed"),
  Experts("fp8_block", 3, 40, 160, 144, sizes="skewed"),
  Experts("mx", 3, 40, 32, 64, sizes="skewed"),
  Experts("i4", 3, 40, 32, 64, sizes="skewed"),
  Experts("route", 16, 20, 0, 0, 2),
  Experts("layer", 4, 20, 16, 24, 2, "random"),
]
class Mla(NamedTuple):
  """Queries against latent vectors; `lengths` as of Paged.

  `topk`: keys that each query attends to, if not to all.
  """

  name: str
  batch: int
  context: int
  heads: int
  queries: int = 1
  page: int = 64
  cache: str = "bfloat16"
  topk: int = 0
  lengths: tuple[int, ...] = ()
  lora: int = 512
  rope: int = 64

  @property
  def contexts(self) -> tuple[int, ...]:
    return self.lengths or (self.context,) * self.batch

  @property
  def keys(self) -> int:
    """Rows of the cache that must be read."""
    if self.topk:
      return self.batch * self.queries * self.topk
    return sum(self.contexts)

  def bytes(self, itemsize: int) -> int:
    return self.keys * (self.lora + self.rope) * itemsize

  @property
  def flops(self) -> float:
    pairs = self.keys
    if not self.topk:
      pairs = self.queries * (pairs - self.batch * (self.queries - 1) / 2)
    return 2.0 * pairs * self.heads * (2 * self.lora + self.rope)


MLA = [
  Mla("tp8", 64, 8192, 16),
  Mla("tp8", 16, 8192, 16),
  Mla("tp8", 1, 131072, 16),
  *(Mla("tp8", 64, 8192, 16, page=n) for n in (1, 16)),
  Mla("tp8_mtp2", 64, 8192, 16, queries=2),
  Mla("tp8_mtp4", 64, 8192, 16, queries=4),
  Mla("tp8_fp8", 64, 8192, 16, cache="float8_e4m3fn"),
  Mla("heads_12", 64, 8192, 12),
  Mla("heads_20", 64, 8192, 20),
  Mla("heads_32", 64, 8192, 32),
  Mla("heads_64", 64, 8192, 64),
  Mla("dp", 64, 8192, 128),
  Mla("dp", 128, 4096, 128),
  Mla("dp_mtp2", 64, 8192, 128, queries=2),
  Mla("dp_fp8", 64, 8192, 128, cache="float8_e4m3fn"),
  Mla("chunk", 4, 8192, 16, queries=512),
  Mla("sparse", 64, 65536, 128, topk=2048),
  Mla("sparse_tp8", 64, 65536, 16, topk=2048),
  Mla("sparse_prefill", 1, 65536, 128, queries=1024, topk=2048),
]
MLA_SMOKE = [
  Mla("smoke", 2, 40, 4),
  Mla("smoke_fp8", 3, 17, 4, queries=2, page=8, cache="float8_e4m3fn"),
  Mla("smoke_sparse", 2, 50, 4, topk=20),
]


class FusedQk(NamedTuple):
  """Tokens whose latent queries and rows of the cache are made."""

  tokens: int
  heads: int
  cache: str = "bfloat16"
  lora: int = 512
  rope: int = 64

  def bytes(self, itemsize: int) -> int:
    """Of queries and rows, which are read, and of them where they go."""
    cols = self.lora + self.rope
    return self.tokens * cols * (4 * self.heads + 2 + itemsize)


FUSED_QK = [
  *(FusedQk(t, 16) for t in (1, 16, 64, 256, 8192)),
  *(FusedQk(t, 128) for t in (1, 64, 256, 8192)),
  FusedQk(256, 128, "float8_e4m3fn"),
  FusedQk(8192, 128, "float8_e4m3fn"),
]
FUSED_QK_SMOKE = [FusedQk(3, 4), FusedQk(5, 2, "float8_e4m3fn")]


class FusedHeads(NamedTuple):
  """Tokens whose queries, keys and values are made and stored."""

  tokens: int
  heads: int
  k_heads: int
  cache: str = "bfloat16"
  layout: str = "NHD"
  dim: int = 128

  def bytes(self, itemsize: int) -> int:
    """Of the projection, of queries and of what is stored."""
    read = 2 * (self.heads + 2 * self.k_heads)
    written = 2 * self.heads + 2 * self.k_heads * itemsize
    return self.tokens * self.dim * (read + written)


# Qwen3 32B and 235B, 8B, and one device's part of eight.
FUSED_HEADS = [
  *(FusedHeads(t, 64, 8) for t in (1, 64, 256, 8192)),
  *(FusedHeads(t, 32, 8) for t in (1, 16, 256, 2048, 8192, 32768)),
  *(FusedHeads(t, 8, 1) for t in (64, 256, 8192)),
  *(FusedHeads(t, 32, 8, "float8_e4m3fn") for t in (256, 8192)),
  *(FusedHeads(t, 32, 8, layout="asm") for t in (256, 8192)),
  *(FusedHeads(t, 32, 8, "float8_e4m3fn", "asm") for t in (256, 8192)),
]
FUSED_HEADS_SMOKE = [
  FusedHeads(3, 4, 2),
  FusedHeads(5, 2, 1, "float8_e4m3fn", "asm"),
]


def random_fused_heads(count: int, seed: int) -> list[FusedHeads]:
  """Returns so many shapes, drawn by a seed."""
  rng = random.Random(seed)
  return [
    FusedHeads(
      int(2 ** rng.uniform(0, 15)),
      k * rng.choice((1, 2, 4, 8, 16)),
      k,
      rng.choice(("bfloat16", "float8_e4m3fn")),
      rng.choice(("NHD", "HND", "x", "asm")),
      rng.choice((64, 128)),
    )
    for k in (rng.choice((1, 2, 4, 8)) for _ in range(count))
  ]


class FusedRows(NamedTuple):
  """Tokens whose rows a norm around attention makes.

  "qk": queries and keys of 1536 and 512 columns; "qk_quant" with a residual,
  and by groups of 128. "gated_quant": 32 heads of 128. "inverse": 64 heads of
  512, of which 64 are turned back.
  """

  kind: str
  tokens: int

  def bytes(self, itemsize: int) -> int:
    """Of operands and results, without scales; itemsize is always that."""
    del itemsize
    return self.tokens * {
      "qk": 4 * 2048,
      "qk_quant": 7 * 1536 + 4 * 512,
      "gated_quant": 5 * 4096,
      "inverse": 3 * 32768,
    }[self.kind]


FUSED_ROWS = [
  FusedRows(kind, t)
  for kind in ("qk", "qk_quant", "gated_quant", "inverse")
  for t in (64, 256, 8192)
]
FUSED_ROWS_SMOKE = [FusedRows("qk_quant", 2), FusedRows("gated_quant", 2)]


class Indexer(NamedTuple):
  """An indexer's logits; of `sequences` in pages, or of shared keys if 0."""

  rows: int
  keys: int
  sequences: int = 0
  heads: int = 64
  dim: int = 128

  def flops(self) -> int:
    return 2 * self.rows * self.keys * self.heads * self.dim


INDEXER = [
  Indexer(1024, 8192),
  Indexer(4096, 8192),
  Indexer(4096, 32768),
  Indexer(2048, 65536),
  Indexer(4, 65536, 4),
  Indexer(64, 8192, 64),
  Indexer(128, 8192, 64),
  Indexer(128, 32768, 128),
]
INDEXER_SMOKE = [Indexer(8, 200), Indexer(4, 100, 2)]


def random_indexer(count: int, seed: int) -> list[Indexer]:
  """Returns so many shapes, drawn by a seed."""
  rng = random.Random(seed)
  drawn = []
  for _ in range(count):
    keys = int(2 ** rng.uniform(9, 16))
    heads = rng.choice((32, 64))
    if rng.random() < 0.5:
      sequences = int(2 ** rng.uniform(0, 7))
      drawn.append(
        Indexer(sequences * rng.choice((1, 2)), keys, sequences, heads))
    else:
      rows = min(keys, int(2 ** rng.uniform(4, 12)))
      drawn.append(Indexer(rows, keys, heads=heads))
  return drawn


def markdown() -> str:
  """Returns ATTENTION as a Markdown table."""
  rows = [
    "| name | batch | q heads | kv heads | sequence | head dim | mask |",
    "|---|---|---|---|---|---|---|",
  ]
  for s in ATTENTION:
    seq = f"{s.seq}, {s.kv_seq} keys" if s.kv_seq else str(s.seq)
    if s.packed:
      seq += f" = {' + '.join(map(str, s.lengths))}"
    dim = f"{s.head_dim}, {s.v_dim} of values" if s.v_dim else s.head_dim
    batch = len(s.lengths) or s.batch
    rows.append(
      f"| {s.name} | {batch} | {s.q_heads} | {s.kv_heads} | {seq} "
      f"| {dim} | {s.mask()} |"
    )
  return "\n".join(rows)


if __name__ == "__main__":
  print(markdown())
