# SPDX-License-Identifier: Apache-2.0
"""The problems that are timed, as data: benchmarks and docs read it.

python shapes.py      prints the list as a Markdown table
"""

from typing import NamedTuple


class Attention(NamedTuple):
  """One problem; `lengths` makes it a packed batch of that many sequences."""

  name: str
  batch: int
  q_heads: int
  kv_heads: int
  seq: int  # of queries and of keys; packed: of all sequences together
  head_dim: int
  causal: bool = False
  window: int = 0  # keys a row sees at most; 0: no window
  lengths: tuple[int, ...] = ()

  def visible(self) -> int:
    """Returns how many (row, key) pairs are not masked, in all of the batch."""
    pairs = 0
    for n in self.lengths or (self.seq,) * self.batch:
      w = min(self.window or n, n)
      # Row i of a causal window sees min(i + 1, w) keys.
      pairs += w * (w + 1) // 2 + (n - w) * w if self.causal else n * n
    return pairs

  def flops(self, backward: bool) -> float:
    """Two matrix products of 2 flops a pair forward, five of them backward."""
    products = 5 if backward else 2
    return 2.0 * products * self.visible() * self.q_heads * self.head_dim


# Lengths as a packed batch of documents has them: few long, many short.
SKEWED = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 64)

_BASE = [
  ("d128", 4, 16, 16, 4096, 128),
  ("d128_long", 1, 16, 16, 16384, 128),
  ("d64", 4, 32, 32, 4096, 64),
  ("d256", 4, 8, 8, 4096, 256),
  ("gqa8", 4, 16, 2, 4096, 128),
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
]

# Small ones that a CPU runs in seconds, one of each kind.
SMOKE = [
  Attention("smoke", 2, 4, 4, 128, 32),
  Attention("smoke_causal", 2, 4, 2, 128, 64, causal=True),
  Attention("smoke_window", 1, 2, 2, 256, 32, causal=True, window=32),
  Attention(
    "smoke_varlen", 1, 2, 2, 112, 32, causal=True, lengths=(64, 32, 16)
  ),
]


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


def markdown() -> str:
  """Returns ATTENTION as a Markdown table."""
  rows = [
    "| name | batch | q heads | kv heads | sequence | head dim | mask |",
    "|---|---|---|---|---|---|---|",
  ]
  for s in ATTENTION:
    mask = "causal" if s.causal else "none"
    if s.window:
      mask += f", window {s.window}"
    seq = f"{s.seq} = {' + '.join(map(str, s.lengths))}" if s.lengths else s.seq
    batch = len(s.lengths) or s.batch
    rows.append(
      f"| {s.name} | {batch} | {s.q_heads} | {s.kv_heads} | {seq} "
      f"| {s.head_dim} | {mask} |"
    )
  return "\n".join(rows)


if __name__ == "__main__":
  print(markdown())


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
