# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding's kernel without a GPU, in Triton's interpreter.

Tiles are small, so that the tokens, the heads and the pairs of each case fill
some tiles, cut others and leave none of the rest.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic
from rope import oracle

# isort: split
from third_party.aiter.kernels.rope import family, part, whole
from third_party.aiter.kernels.rope import rotate as rope_rotate

_ALL = sum(family.FLAGS.values())
_ROWS = 7  # of the tables; some positions lie beyond


def _new(*shape, dtype):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 77, dtype))


def _ints(values):
  return Tensor(np.asarray(values, np.int32))


class RopeKernelTest(parameterized.TestCase):

  def run_kernel(self, features=(), dtype=ml_dtypes.bfloat16, heads=(3, 2),
                 d=22, d_rot=12, first=0, tokens=6, seqlen=3, inner=1,
                 positions=None, offsets=None, cu_seqlens=None, grid=(1, 1),
                 sections=None, splits=None, pairs_tile=4, flags=_ALL,
                 is_whole=False, run=0):
    """Runs it on two tensors and compares both with the oracle.

    is_whole: by the kernel of whole heads, whose pairs are d / 2.
    run: by the kernel of heads turned in part, with runs of so many pairs.
    """
    rng = np.random.default_rng(3)
    pairs, full = d_rot // 2, "full" in features
    wide = np.float32 if "f32_tables" in features else dtype
    rows = tokens if "per_token" in features else _ROWS
    x, y = (rng.standard_normal((tokens, h, d)).astype(dtype) for h in heads)
    cos, sin = (rng.standard_normal((rows, pairs * (1 + full))).astype(wide)
                for _ in range(2))
    out = [_new(tokens, h, d, dtype=dtype) for h in heads]
    features = [*features,
                *(["positions"] if positions is not None else []),
                *(["offsets"] if offsets is not None else []),
                *(["cu_seqlens"] if cu_seqlens is not None else []),
                *(["sections"] if sections is not None else [])]
    ends = np.cumsum(sections or (pairs,))
    split_ends = np.cumsum(splits or (pairs,))
    tables = Tensor(cos), Tensor(sin)
    tile_m, tile_n = 4, 2
    blocks = sum(-(-h // tile_n) for h in heads)
    parts = -(-pairs // pairs_tile) + -(-(d - d_rot) // (2 * pairs_tile))
    flags_on = sum(family.FLAGS[f] for f in features)
    positions_in = _ints([0] if positions is None else positions)
    with gpu_arithmetic():
      if is_whole:
        tile_m = 16
        blocks = sum(-(-tokens * h * pairs // tile_m) for h in heads)
        whole.rope_rotate[(blocks,)](
            Tensor(x), Tensor(y), *tables, *tables, positions_in, *out, tokens,
            seqlen, inner, *heads, rows, flags_on, TILE_M=tile_m, PAIRS=pairs,
            FLAGS=flags)
      elif run:
        tile_m, twos = 16, -(-d // (2 * run)) * run
        blocks = sum(-(-tokens * h * twos // tile_m) for h in heads)
        part.rope_rotate[(blocks,)](
            Tensor(x), Tensor(y), *tables, *tables, positions_in, *out, tokens,
            seqlen, inner, *heads, d, pairs, first, rows, flags_on,
            TILE_M=tile_m, RUN=run, FLAGS=flags)
      else:
        rope_rotate.rope_rotate[(-(-tokens // tile_m) * blocks * parts,)](
            Tensor(x), Tensor(y), *tables, *tables, positions_in,
            _ints([0] if offsets is None else offsets),
            _ints([0, 0] if cu_seqlens is None else cu_seqlens), *out, tokens,
            seqlen, inner, *heads, d, pairs, first, rows,
            0 if cu_seqlens is None else len(cu_seqlens) - 1, *grid,
            int(ends[0]), int(ends[min(1, len(ends) - 1)]), int(split_ends[0]),
            int(split_ends[min(1, len(split_ends) - 1)]), flags_on,
            TILE_M=tile_m, TILE_N=tile_n, PAIRS=pairs_tile, ALIGN=1, WHOLE=1,
            FLAGS=flags)

    t = np.arange(tokens)
    place = t // inner % seqlen
    if cu_seqlens is not None:
      place = place - place + oracle.positions_of(cu_seqlens, tokens)[place]
    if positions is not None:
      place = np.asarray(positions)
    if offsets is not None:
      place = place + np.asarray(offsets)
    if "grid" in features:
      place = np.stack([place // (grid[0] * grid[1]),
                        place // grid[1] % grid[0], place % grid[1]])
    if "per_token" in features:
      place = t
    place = np.broadcast_to(oracle.rows_of(place, rows),
                            (len(ends), tokens) if sections else (1, tokens))
    style = "gptj" if "gptj" in features else "neox"
    section = np.searchsorted(ends, np.arange(pairs), "right")
    columns = oracle.table_columns(pairs, full, style, splits)
    section_of = np.zeros(pairs * (1 + full), int)
    for c in columns:
      section_of[c] = section
    own = lambda table: np.stack([table[place[s], c] for c, s in enumerate(
        section_of)], -1).astype(np.float64)
    for h, (src, got) in enumerate(zip((x, y), out)):
      expected = oracle.rotate(
          src.astype(np.float64), own(cos), own(sin), d_rot, full=full,
          style=style, nope_first=first > 0, sections=splits,
          transposed="transposed" in features)
      np.testing.assert_allclose(
          got.array.astype(np.float64), expected, atol=2e-6,
          rtol=float(ml_dtypes.finfo(dtype).eps), err_msg=f"{h} {features}")

  @parameterized.product(
      style=((), ("gptj",)), full=((), ("full",)),
      transposed=((), ("transposed",)),
      dtype=(ml_dtypes.bfloat16, np.float32), first=(0, 10))
  def test_pairs(self, style, full, transposed, dtype, first):
    self.run_kernel((*style, *full, *transposed), dtype, first=first)

  @parameterized.product(
      transposed=((), ("transposed",)), wide=((), ("f32_tables",)),
      positions=(None, [5, 0, 99, -3, 1, 2]), inner=(1, 2), d=(16, 48))
  def test_whole_heads(self, transposed, wide, positions, inner, d):
    self.run_kernel((*transposed, *wide), d=d, d_rot=d, positions=positions,
                    inner=inner, flags=_ALL & ~family.FLAGS["full"],
                    is_whole=True)

  @parameterized.product(
      transposed=((), ("transposed",)), wide=((), ("f32_tables",)),
      rows=("", "per_token", "positions"), d=(16, 48))
  def test_whole_heads_of_full_tables(self, transposed, wide, rows, d):
    places = dict(positions=[5, 0, 99, -3, 1, 2]) if rows == "positions" else {}
    per_token = ("per_token",) if rows == "per_token" else ()
    self.run_kernel(("full", *transposed, *wide, *per_token), d=d, d_rot=d,
                    is_whole=True, **places)

  @parameterized.product(
      transposed=((), ("transposed",)), wide=((), ("f32_tables",)),
      positions=(None, [5, 0, 99, -3, 1, 2]),
      sizes=((8, 48, 16, 0), (8, 40, 16, 24), (4, 40, 24, 0), (4, 24, 8, 16),
             (4, 40, 40, 0)))
  def test_heads_turned_in_part(self, transposed, wide, positions, sizes):
    run, d, d_rot, first = sizes
    self.run_kernel((*transposed, *wide), d=d, d_rot=d_rot, first=first,
                    positions=positions, run=run)

  def test_copied_channels_keep_their_bits(self):
    """Whatever the tables, and the numbers, are."""
    x = np.full((1, 1, 32), np.inf, np.float32)
    x[..., :8] = 1
    out, none = _new(1, 1, 32, dtype=np.float32), _new(1, 0, 32,
                                                       dtype=np.float32)
    table = Tensor(np.full((1, 4), np.nan, np.float32))
    with gpu_arithmetic():
      part.rope_rotate[(1,)](
          Tensor(x), none, *[table] * 4, _ints([0]), out, none, 1, 1, 1, 1, 0,
          32, 4, 0, 1, 0, TILE_M=16, RUN=4, FLAGS=0)
    np.testing.assert_array_equal(out.array[..., 8:], x[..., 8:])
    self.assertTrue(np.isnan(out.array[..., :8]).all())

  @parameterized.parameters(("f32_tables",), ("per_token",),
                            ("gptj", "f32_tables"), ("full", "f32_tables"))
  def test_tables(self, *features):
    self.run_kernel(features)

  @parameterized.parameters(
      dict(inner=2), dict(offsets=[0, -1, 2, 3, 9, -9]),
      dict(positions=[4, 0, 99, -1, 6, 2]),
      dict(positions=[4, 0, 99, -1, 6, 2], offsets=[1, 0, -95, 3, 2, 0]),
      dict(cu_seqlens=[0, 1, 1, 4, 6], seqlen=6),
      dict(cu_seqlens=[0, 4], seqlen=6),
      dict(cu_seqlens=[0, 2, 3], seqlen=3))
  def test_positions(self, **options):
    self.run_kernel(**options)

  @parameterized.product(style=((), ("gptj",)), full=((), ("full",)))
  def test_sections(self, style, full):
    places = [0, 3, 1, 9, 2, 5, 1, 0, 4, 2, 2, 6, 5, 1, 0, 0, 3, 8]
    self.run_kernel((*style, *full), positions=np.reshape(places, (3, 6)),
                    sections=(1, 3, 2))
    self.run_kernel((*style, *full, "grid"), seqlen=6, grid=(2, 3),
                    sections=(0, 3, 3), splits=None if style else (0, 3, 3))
    self.run_kernel((*style, *full, "grid"), tokens=12, seqlen=12, grid=(2, 2),
                    sections=(2, 1, 3), splits=None if style else (2, 1, 3))

  @parameterized.parameters(
      dict(heads=(1, 0)), dict(heads=(5, 1)), dict(d=12), dict(d=2, d_rot=2),
      dict(tokens=1, seqlen=1), dict(d=40, d_rot=4, pairs_tile=2))
  def test_sizes(self, **options):
    self.run_kernel(**options)
    self.run_kernel(("gptj",), **options)

  def test_a_row_for_few_features(self):
    self.run_kernel(flags=0)
    self.run_kernel(("gptj",), flags=family.FLAGS["gptj"])


if __name__ == "__main__":
  absltest.main()
