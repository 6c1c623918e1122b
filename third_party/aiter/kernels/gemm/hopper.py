# SPDX-License-Identifier: Apache-2.0
"""Matrix products for Hopper (sm_90) in Gluon: TMA, mbarriers, wgmma.

The same functions as gemm.py's, for operands that TMA maps can describe; where
they are scaled n is a multiple of 8. A block stays on its multiprocessor and
takes item after item: tiles and, behind them, parts of k of the tiles that
would fill a last turn of blocks badly, which gemm_sum_tiles adds. A producer
warp copies slabs of a and b into a ring, also those of the next item while this
one is written. Consumer warpgroups, one to three, multiply: each owns 64 rows
of one operand, and they share what a tile has of the other one:

  rows of a, by columns of b;
  SKINNY  columns of b, by rows of a: the tile's transpose, for few rows of a.
          wgmma takes any multiple of 8 there, but 64 of what is owned.

No tensor is so wide but powers of two: what is shared may be the sum of up to
three of them, as 208 is, which have a sum each, but one product.

A program is a block or, with num_ctas=2, a pair of them on neighbouring
multiprocessors. A pair has half of each warpgroup's rows in either block, and
one copy brings what is shared to both: they ask the L2 cache for a third less.

With PINGPONG=1 there are two warpgroups, but a tile is one's alone, and the
next one the other's: while one ends a tile the other's products keep the tensor
cores busy. It pays where k is short.

With cluster=N a tile is that of N blocks, a program each, CLUSTER_M of them
below each other and the others beside. Blocks that need the same rows of an
operand copy a share of them each, to all. It pays where rows do not begin at
lines of the L2 cache, of which each 128 bytes then need two.

The tensor cores keep 14 bits of a sum of float8 products: the kernels for
float8 let them add one slab (128 of k) only, and add slabs in float32, as
DeepGEMM does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
  fence_async_shared,
  mbarrier,
  tma,
  warpgroup_mma,
  warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.gemm import gemm

# How sums are made and scaled.
PLAIN = gl.constexpr(0)
ROWS = gl.constexpr(1)  # A scale a row of a and of b, at the end.
PROMOTED_ROWS = gl.constexpr(2)  # The same of slabs added in float32.
BLOCKS = gl.constexpr(3)  # Slabs are scaled before they are added.


def tensor_maps(function, constants):
  """TMA maps of a kernel, of [batch, row, column].

  rest_desc is of the tensor that a tile's warpgroups share, where that is in
  parts: its box is the smallest, and brings all but the largest.
  """
  m, n, k = (constants["TILE_" + size] for size in "MNK")
  skinny = constants["SKINNY"]
  pingpong = constants.get("PINGPONG", 0)
  if constants.get("CLUSTER", 1) > 1:
    return _shares(function, constants)
  if skinny:
    m, rest, n = parts(m)[0], rest_of(m), n // warpgroups(n, pingpong)
  else:
    m, n, rest = m // warpgroups(m, pingpong), parts(n)[0], rest_of(n)
  a = lambda rows: (1, k, rows) if function == "gemm_tn" else (1, rows, k)
  b = lambda rows: ((1, k, rows) if function in ("gemm_nn", "gemm_tn")
                    else (1, rows, k))
  shared, block = ("a", a) if skinny else ("b", b)
  # Of 128 rows of a warpgroup a block of a pair copies half.
  rows = m if skinny or pingpong else min(m, 64)
  return {"a_desc": TensorMap("a", a(m), box=a(rows)),
          "b_desc": TensorMap("b", b(n)),
          "rest_desc": TensorMap(shared, block(rest)) if rest else None,
          "out_desc": None if skinny else TensorMap(
              "out", (1, m, 64), "bf16", box=(1, rows, 64))}


def _shares(function, constants):
  """tensor_maps of a cluster's blocks, which copy shares by assembly."""
  m, n, k = (constants["TILE_" + size] for size in "MNK")
  assert k == 64 and constants["SKINNY"]
  a_t, b_t = function == "gemm_tn", function in ("gemm_nn", "gemm_tn")
  rows = constants["CLUSTER_M"]
  cols = constants["CLUSTER"] // rows
  m, n = m // rows, n // cols
  share = lambda size, blocks, t: ((1, k // blocks, 64) if t
                                   else (1, size // blocks, k))
  box = lambda name, shape: TensorMap(
      name, tuple(1 << (x - 1).bit_length() for x in shape), box=shape)
  return {"a_desc": box("a", share(m, cols, a_t)),
          "b_desc": box("b", share(n, rows, b_t)), "rest_desc": None,
          "out_desc": None}


@gluon.constexpr_function
def parts(n):
  """Returns the powers of two whose sum is n, the largest first."""
  return tuple(1 << bit for bit in reversed(range(n.bit_length()))
               if n >> bit & 1)


@gluon.constexpr_function
def rest_of(n):
  """Returns the smallest of several parts, or 0 if there is one."""
  return parts(n)[-1] if len(parts(n)) > 1 else 0


@gluon.constexpr_function
def before(n, p):
  """Returns how much of n lies before part p."""
  return sum(parts(n)[:p])


@gluon.constexpr_function
def warpgroups(rows, pingpong=0):
  """Returns how many warpgroups share a tile's rows: of 64 each, or of 128."""
  if pingpong:
    return 1
  if rows % 192 == 0:
    return 3
  return 2 if rows >= 128 else 1


@gluon.constexpr_function
def out_buffers(warpgroups_, pingpong=0):
  """Returns through how many buffers the results of each leave."""
  return 1 if warpgroups_ == 3 or pingpong else 2


@gluon.constexpr_function
def accumulator(n, element, blocks=1):
  """Returns the layout of a warpgroup's accumulator of n columns."""
  widest = 128 if element == gl.int8 else 256  # of Triton's wgmma
  return gl.NVMMADistributedLayout(
      version=[3, 0], warps_per_cta=[4, 1],
      instr_shape=[16, min(n, widest), 256 // element.primitive_bitwidth],
      cga_layout=[[1, 0]] if blocks == 2 else [])


@gluon.constexpr_function
def _columns(blocks):
  """Returns the layout of a vector of columns: of all, in either block."""
  return gl.BlockedLayout([1], [32], [4], [0],
                          cga_layout=[[0]] if blocks == 2 else [])


@gluon.constexpr_function
def _transposed(rows):
  """Returns the layout of what is stored so many rows a thread."""
  lanes = min(64 // rows, 32)
  return gl.BlockedLayout([rows, 1], [lanes, 32 // lanes], [1, 4], [0, 1])


@gluon.constexpr_function
def _single(blocks):
  """Returns the layout of what is stored a column a thread."""
  return gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0],
                          cga_layout=[[1, 0]] if blocks == 2 else [])


@gluon.constexpr_function
def _slab(desc, blocks, split):
  """Returns the layout of a map's box in memory, split along an axis or not."""
  bits = desc.dtype.primitive_bitwidth
  basis = [int(axis == split) for axis in range(3)]
  return gl.NVMMASharedLayout(128, bits, rank=3,
                              cga_layout=[basis] if blocks == 2 else [])


# ---- the ring


@gluon.jit
def _allocate(desc, COUNT: gl.constexpr, SPLIT: gl.constexpr):
  """Allocates so many boxes of an operand's map."""
  return gl.allocate_shared_memory(
      desc.dtype, hopper.stack(COUNT, desc.block_type.shape),
      _slab(desc, gl.num_ctas(), SPLIT))


@gluon.jit
def _allocate_rows(element: gl.constexpr, ROWS_: gl.constexpr,
                   STAGES: gl.constexpr, T: gl.constexpr):
  """Allocates slabs of so many rows, which no map describes."""
  BOX: gl.constexpr = rest_of(ROWS_) if rest_of(ROWS_) else ROWS_
  SHAPE: gl.constexpr = [1, 64, BOX] if T else [1, BOX, 64]
  return gl.allocate_shared_memory(
      element, hopper.stack(ROWS_ // BOX * STAGES, SHAPE),
      gl.NVMMASharedLayout(128, 16, rank=3))


@gluon.jit
def tile_at(t, tiles_m, tiles_n, GROUP_M: gl.constexpr):
  """Returns row and column of tile t: bands of GROUP_M rows, for the L2."""
  band = t // (GROUP_M * tiles_n)
  rows = gl.minimum(tiles_m - band * GROUP_M, GROUP_M)
  rest = t - band * GROUP_M * tiles_n
  return band * GROUP_M + rest % rows, rest // rows


@gluon.jit
def _items(walk):
  """Returns how many items there are: whole tiles and parts of the others."""
  batch, tiles_m, tiles_n, whole_tiles, splits, k, k_per_split = walk
  return whole_tiles + (batch * tiles_m * tiles_n - whole_tiles) * splits


@gluon.jit
def _item(t, walk, GROUP_M: gl.constexpr):
  """Returns item t: (batch, row of tiles, column, part, k's first, k's end).

  The part is that of the workspace, -1 of a whole tile. Parts of different
  tiles follow each other: neighbours share a and b.
  """
  batch, tiles_m, tiles_n, whole_tiles, splits, k, k_per_split = walk
  tiles = tiles_m * tiles_n
  divided = batch * tiles - whole_tiles
  part = t - whole_tiles
  split = part // gl.maximum(divided, 1)
  is_part = part >= 0
  tile = gl.where(is_part, whole_tiles + part - split * divided, t)
  k_first = gl.where(is_part, split * k_per_split, 0)
  k_end = gl.where(is_part, gl.minimum(k, k_first + k_per_split), k)
  index = tile // tiles
  row, col = tile_at(tile - index * tiles, tiles_m, tiles_n, GROUP_M)
  return index, row, col, gl.where(is_part, part, -1), k_first, k_end


@gluon.jit
def next_slab(i, phase, STAGES: gl.constexpr):
  """Returns the ring's next slab and its phase."""
  i += 1
  phase = gl.where(i == STAGES, phase ^ 1, phase)
  return gl.where(i == STAGES, 0, i), phase


@gluon.jit
def _behind(t, walk, i, phase, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr):
  """Returns the slab behind item t's, whose first is i, and its phase."""
  _, _, _, _, k_first, k_end = _item(t, walk, GROUP_M)
  i += (k_end - k_first + TILE_K - 1) // TILE_K
  return i % STAGES, phase ^ (i // STAGES & 1)


@gluon.jit
def _copy_slab(desc, z, row, k, full, smem, T: gl.constexpr,
               PAIR: gl.constexpr):
  """Copies a slab of an operand, or of a part, to both blocks of a PAIR."""
  if T:
    tma.async_load(desc, [z, k, row], full, smem, multicast=PAIR)
  else:
    tma.async_load(desc, [z, row, k], full, smem, multicast=PAIR)


@gluon.jit
def _copy_shared(desc, rest_desc, z, row, k, full, smem, i,
                 SHARED: gl.constexpr, T: gl.constexpr, PAIR: gl.constexpr):
  """Copies what warpgroups share, all parts behind each other."""
  if rest_desc is None:
    _copy_slab(desc, z, row, k, full, smem.index(i), T, PAIR)
  else:
    REST: gl.constexpr = rest_of(SHARED)
    BOXES: gl.constexpr = SHARED // REST
    FIRST: gl.constexpr = before(SHARED, 1) // REST
    # Where a view of several boxes begins must be known.
    for slab in gl.static_range(smem.shape[0] // BOXES):
      if i == slab:
        first = smem.slice(BOXES * slab, FIRST).reinterpret(
            shape=desc.block_type.shape,
            layout=_slab(desc, gl.num_ctas(), None))
        _copy_slab(desc, z, row, k, full, first, T, PAIR)
    for box in gl.static_range(FIRST, BOXES):
      _copy_slab(rest_desc, z, row + box * REST, k, full,
                 smem.index(BOXES * i + box), T, PAIR)


@gluon.jit
def _copy_share(MAP: gl.constexpr, z, row, k, full, smem, share, mask,
                ROWS_: gl.constexpr, SHARES: gl.constexpr, T: gl.constexpr):
  """Copies a share of a slab of so many rows to the blocks that have one."""
  if T:
    LINES: gl.constexpr = 64 // SHARES
    for col in gl.static_range(ROWS_ // 64):
      hopper.copy_box(MAP, z, k + share * LINES, row + col * 64, smem,
                      (col * 64 + share * LINES) * 128, full, mask, SHARES)
  else:
    first = share * (ROWS_ // SHARES)
    hopper.copy_box(MAP, z, row + first, k, smem, first * 128, full, mask,
                    SHARES)


@gluon.jit
def _produce_shares(ring, walk, maps, A_T: gl.constexpr, B_T: gl.constexpr,
                    TILE_M: gl.constexpr, TILE_N: gl.constexpr,
                    TILE_K: gl.constexpr, STAGES: gl.constexpr,
                    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
                    CLUSTER_M: gl.constexpr):
  """_produce_slabs of a cluster's block: a share of each, for all blocks."""
  a_smem, b_smem, full, empty = ring[:4]
  a_batches, b_batches = maps[3:]
  CLUSTER_N: gl.constexpr = CLUSTER // CLUSTER_M
  BLOCK_M: gl.constexpr = TILE_M // CLUSTER_M
  BLOCK_N: gl.constexpr = TILE_N // CLUSTER_N
  A_BOXES: gl.constexpr = a_smem.shape[0] // STAGES
  B_BOXES: gl.constexpr = b_smem.shape[0] // STAGES
  block = gl.program_id(0) % CLUSTER
  block_m = block % CLUSTER_M
  block_n = block // CLUSTER_M
  # Blocks are counted down a column first.
  a_mask = sum_of_powers(CLUSTER_N, CLUSTER_M) << block_m
  b_mask = sum_of_powers(CLUSTER_M, 1) << (block_n * CLUSTER_M)
  i = 0
  phase = 1
  hopper.enter_cluster()
  hopper.wait_for_cluster()
  gdc_wait()
  for t in range(gl.program_id(0) // CLUSTER, _items(walk),
                 gl.num_programs(0) // CLUSTER):
    index, tile_m, tile_n, _, k_first, k_end = _item(t, walk, GROUP_M)
    row = tile_m * TILE_M + block_m * BLOCK_M
    col = tile_n * TILE_N + block_n * BLOCK_N
    for k in range(k_first, k_end, TILE_K):
      mbarrier.wait(empty.index(i), phase)
      ready = full.index(i)
      mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * TILE_K * 2)
      _copy_share(0, index * a_batches, row, k, ready,
                  a_smem.index(A_BOXES * i), block_n, a_mask, BLOCK_M,
                  CLUSTER_N, A_T)
      _copy_share(1, index * b_batches, col, k, ready,
                  b_smem.index(B_BOXES * i), block_m, b_mask, BLOCK_N,
                  CLUSTER_M, B_T)
      i, phase = next_slab(i, phase, STAGES)
  # A block stays until the others have given back what they got from it: they
  # arrive at its barriers.
  for _ in range(STAGES):
    mbarrier.wait(empty.index(i), phase)
    i, phase = next_slab(i, phase, STAGES)
  mbarrier.arrive(ring[5])


@gluon.constexpr_function
def sum_of_powers(count, step):
  """Returns bits 0, step, 2 step, ..."""
  return sum(1 << (step * i) for i in range(count))


@gluon.jit
def _produce_slabs(ring, walk, maps, skew, A_T: gl.constexpr,
                   B_T: gl.constexpr, SKINNY: gl.constexpr,
                   TILE_M: gl.constexpr, TILE_N: gl.constexpr,
                   TILE_K: gl.constexpr, STAGES: gl.constexpr,
                   GROUP_M: gl.constexpr, PINGPONG: gl.constexpr):
  """Copies the slabs of a and b of one item after the other.

  With a skew of 1 each column of tiles begins one slab further along k than the
  one before, and ends with those that it left out: blocks that read the same
  rows of a then read different slabs of them at a time.
  """
  a_smem, b_smem, full, empty, both = ring[:5]
  a_desc, b_desc, rest_desc, a_batches, b_batches = maps
  PAIR: gl.constexpr = gl.num_ctas() == 2
  OWN: gl.constexpr = TILE_N if SKINNY else TILE_M
  SHARED: gl.constexpr = TILE_M if SKINNY else TILE_N
  PARTS: gl.constexpr = warpgroups(OWN, PINGPONG)
  BYTES: gl.constexpr = (((OWN // 2 if PAIR else OWN) + SHARED) * TILE_K
                         * a_desc.dtype.primitive_bitwidth // 8)
  i = 0
  phase = 1
  gdc_wait()  # Until here nothing of the kernel before this one was read.
  for t in range(gl.program_id(0), _items(walk), gl.num_programs(0)):
    index, tile_m, tile_n, _, k_first, k_end = _item(t, walk, GROUP_M)
    z_a = index * a_batches
    z_b = index * b_batches
    row = tile_m * TILE_M
    col = tile_n * TILE_N
    steps = (k_end - k_first + TILE_K - 1) // TILE_K
    at = tile_n * skew % steps
    for _ in range(steps):
      k = k_first + at * TILE_K
      at = gl.where(at == steps - 1, 0, at + 1)
      mbarrier.wait(empty.index(i), phase)
      if PAIR:
        mbarrier.wait(both.index(i), phase)
      ready = full.index(i)
      mbarrier.expect(ready, BYTES)
      if SKINNY:
        _copy_shared(a_desc, rest_desc, z_a, row, k, ready, a_smem, i, SHARED,
                     A_T, False)
        for p in gl.static_range(PARTS):
          _copy_slab(b_desc, z_b, col + p * (OWN // PARTS), k, ready,
                     b_smem.index(PARTS * i + p), B_T, False)
      else:
        _copy_shared(b_desc, rest_desc, z_b, col, k, ready, b_smem, i, SHARED,
                     B_T, PAIR)
        for p in gl.static_range(PARTS):
          _copy_slab(a_desc, z_a, row + p * (OWN // PARTS), k, ready,
                     a_smem.index(PARTS * i + p), A_T, False)
      i, phase = next_slab(i, phase, STAGES)


@gluon.jit
def _produce(ring, walk, maps, skew, A_T: gl.constexpr, B_T: gl.constexpr,
             SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
             CLUSTER: gl.constexpr, CLUSTER_M: gl.constexpr,
             PINGPONG: gl.constexpr):
  """Copies slabs, or of a cluster's this block's shares."""
  if CLUSTER > 1:
    _produce_shares(ring, walk, maps, A_T, B_T, TILE_M, TILE_N, TILE_K, STAGES,
                    GROUP_M, CLUSTER, CLUSTER_M)
  else:
    _produce_slabs(ring, walk, maps, skew, A_T, B_T, SKINNY, TILE_M, TILE_N,
                   TILE_K, STAGES, GROUP_M, PINGPONG)


@gluon.jit
def _release(ring, i, pred, CLUSTER: gl.constexpr = 1,
             CLUSTER_M: gl.constexpr = 1):
  """Gives slab i back: to its own block, which copies a there.

  The last barrier counts both blocks of a pair; the one that copies b to both
  waits for it. In a cluster all that copied to the slab get it back.
  """
  if CLUSTER > 1:
    block = gl.program_id(0) % CLUSTER
    hopper.arrive_at_cluster(ring[3].index(i), block % CLUSTER_M,
                             block // CLUSTER_M, pred, CLUSTER_M,
                             CLUSTER // CLUSTER_M)
  else:
    mbarrier.arrive(ring[3].index(i), pred=pred)
  if gl.num_ctas() == 2:
    mbarrier.arrive(ring[4].index(i), pred=pred)


@gluon.jit
def multiply(acc, use_acc, ring, i, phase, p: gl.constexpr, A_T: gl.constexpr,
             B_T: gl.constexpr, SKINNY: gl.constexpr):
  """Waits for slab i and starts a warpgroup's product of it: a promise.

  It is that of the p-th part of what warpgroups own by what they share.
  """
  a_smem, b_smem, full = ring[:3]
  STAGES: gl.constexpr = full.shape[0]
  mbarrier.wait(full.index(i), phase)
  if SKINNY:
    b = b_smem.index(b_smem.shape[0] // STAGES * i + p)
    a = a_smem.index(i)
  else:
    a = a_smem.index(a_smem.shape[0] // STAGES * i + p)
    b = b_smem.index(i)
  a = a.reshape([a.shape[1], a.shape[2]])
  b = b.reshape([b.shape[1], b.shape[2]])
  if SKINNY:
    if B_T:
      b = b.permute([1, 0])
    if not A_T:
      a = a.permute([1, 0])
    return warpgroup_mma(b, a, acc, use_acc=use_acc, is_async=True)
  else:
    if A_T:
      a = a.permute([1, 0])
    if not B_T:
      b = b.permute([1, 0])
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.constexpr_function
def _ties(registers):
  """Returns the constraints of a sum in so many registers that is added to."""
  return ",".join(["=f"] * registers + [str(r) for r in range(registers)] +
                  ["r", "r", "r"])


@gluon.constexpr_function
def _slab_product(n, own_t, shared_t, element):
  """Returns instructions that multiply a slab of 64 rows by one of n columns.

  Operands: the sum, which is 0 if the number behind it is, and where both slabs
  begin. _t: k is not what is contiguous in a slab.
  """
  registers = n // 2
  sums = ", ".join(f"${r}" for r in range(registers))
  name = "bf16" if element == gl.bfloat16 else "f16"
  # Lines of 128 bytes in groups of 8. If k counts them, 64 of the others lie in
  # one, and 64 lines further on the next 64.
  lines, groups = 0x4000004000010000, 0x4000004002000000
  slabs = (("own", own_t), ("shared", shared_t))
  asm = [".reg .pred add;", ".reg .b32 at;", ".reg .b64 low, own, shared;",
         f"setp.ne.b32 add, ${2 * registers}, 0;"]
  for p, (slab, t) in enumerate(slabs):
    asm += [f"bfe.u32 at, ${2 * registers + 1 + p}, 4, 14;",
            "cvt.u64.u32 low, at;",
            f"or.b64 {slab}, low, {groups if t else lines:#x};"]
  asm.append("wgmma.fence.sync.aligned;")
  for step in range(4):
    if step > 0:
      asm += [f"add.u64 {slab}, {slab}, {128 if t else 2};"
              for slab, t in slabs]
    asm += [f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name}"
            f" {{{sums}}}, own, shared, add, 1, 1, {int(own_t)},"
            f" {int(shared_t)};", "setp.eq.b32 add, 0, 0;"]
  return "\n".join(["{", *asm, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def _sums(n, rows, element, blocks):
  """Returns the types of a warpgroup's sums of the parts of n columns."""
  return tuple(
      gl.distributed_type(gl.float32, [rows, p],
                          accumulator(p, element, blocks)) for p in parts(n))


@gluon.jit
def _multiply_parts(accs, use_acc, ring, i, phase, p: gl.constexpr,
                    A_T: gl.constexpr, B_T: gl.constexpr,
                    SKINNY: gl.constexpr):
  """multiply() by both parts of what is shared, at once.

  Gluon's products have powers of two columns, and each of two would read what
  the warpgroup owns: shared memory, not the tensor cores, bounds them.
  """
  a_smem, b_smem, full = ring[:3]
  STAGES: gl.constexpr = full.shape[0]
  N: gl.constexpr = accs[0].shape[1] + accs[1].shape[1] + (
      accs[2].shape[1] if len(accs) == 3 else 0)
  gl.static_assert(accs[0].shape[0] == 64 * gl.num_ctas())
  OWN_T: gl.constexpr = B_T if SKINNY else A_T
  SHARED_T: gl.constexpr = A_T if SKINNY else B_T
  mbarrier.wait(full.index(i), phase)
  a = a_smem.index(a_smem.shape[0] // STAGES * i + (0 if SKINNY else p))
  b = b_smem.index(b_smem.shape[0] // STAGES * i + (p if SKINNY else 0))
  own = b if SKINNY else a
  shared = a if SKINNY else b
  return gl.inline_asm(
      _slab_product(N, OWN_T, SHARED_T, a_smem.dtype), _ties(N // 2),
      accs + (use_acc.to(gl.int32), own, shared),
      _sums(N, accs[0].shape[0], a_smem.dtype, gl.num_ctas()))


@gluon.jit
def _wait(accs, OUTSTANDING: gl.constexpr):
  """warpgroup_mma_wait of a tuple, with so many promises of each left."""
  if len(accs) == 1:
    return (warpgroup_mma_wait(OUTSTANDING, deps=accs),)
  else:
    return warpgroup_mma_wait(OUTSTANDING, deps=accs)


@gluon.jit
def _sum_parts(accs, ring, steps, i, phase, w: gl.constexpr, A_T: gl.constexpr,
               B_T: gl.constexpr, SKINNY: gl.constexpr, STAGES: gl.constexpr,
               CLUSTER: gl.constexpr = 1, CLUSTER_M: gl.constexpr = 1,
               following=None):
  """sum_slabs of a tuple: of the first part of what is shared, and the rest.

  following: a barrier of the warpgroup whose slabs come behind these.
  """
  last = 0
  for step in range(steps):
    if len(accs) == 1:
      new = (multiply(accs[0], step > 0, ring, i, phase, w, A_T, B_T, SKINNY),)
    else:
      new = _multiply_parts(accs, step > 0, ring, i, phase, w, A_T, B_T, SKINNY)
    accs = _wait(new, 1)
    _release(ring, last, step > 0, CLUSTER, CLUSTER_M)
    last = i
    i, phase = next_slab(i, phase, STAGES)
  if following is not None:
    mbarrier.arrive(following)
  accs = _wait(accs, 0)
  _release(ring, last, steps > 0, CLUSTER, CLUSTER_M)
  return accs, i, phase


@gluon.jit
def _stand_by(done):
  """What a warp does that is there since warps come in fours.

  It may not end before the others: it would ask for registers again that they
  are to get.
  """
  hopper.enter_cluster()
  mbarrier.wait(done, 0)


@gluon.jit
def sum_slabs(acc, ring, steps, i, phase, w: gl.constexpr, A_T: gl.constexpr,
              B_T: gl.constexpr, SKINNY: gl.constexpr, STAGES: gl.constexpr):
  """Returns a tile's sum, added by the tensor cores, and the ring's state."""
  accs, i, phase = _sum_parts((acc,), ring, steps, i, phase, w, A_T, B_T,
                              SKINNY, STAGES)
  return accs[0], i, phase


@gluon.jit
def scales_at(scales, m, row0, col0, slab, ROWS_: gl.constexpr,
               LAYOUT: gl.constexpr):
  """Returns where a tile's scales of the first slab are."""
  (a_scale, b_scale, stride_a_scale_m, stride_a_scale_k, stride_b_scale_n,
   stride_b_scale_k) = scales
  rows = row0 + gl.arange(0, ROWS_, LAYOUT)
  at_a = gl.minimum(rows, m - 1) * stride_a_scale_m + slab * stride_a_scale_k
  # b's scale is the same for all rows (0 is added), but each thread shall hold
  # its own: a uniform register's value is waited for at once.
  at_b = col0 // gemm.SCALE_BLOCK * stride_b_scale_n + (rows >> 31)
  at_b += slab * stride_b_scale_k
  return a_scale, b_scale, at_a, at_b, stride_a_scale_k, stride_b_scale_k


@gluon.jit
def _load_scales(at, slab, slabs, KIND: gl.constexpr):
  """Returns a slab's scales, of rows of a and of b; past the last, its."""
  a_scale, b_scale, at_a, at_b, stride_a_scale_k, stride_b_scale_k = at
  if KIND == BLOCKS:
    slab = gl.maximum(gl.minimum(slab, slabs - 1), 0)
    return (gl.load(a_scale + (at_a + slab * stride_a_scale_k)),
            gl.load(b_scale + (at_b + slab * stride_b_scale_k)))
  else:
    return at_a, at_b


@gluon.jit
def _add(acc, part, scale_a, scale_b, KIND: gl.constexpr,
         SKINNY: gl.constexpr):
  """Adds a slab's sum in float32."""
  if KIND == BLOCKS:
    scale = scale_a * scale_b
    if SKINNY:
      return acc + part * scale[None, :]
    else:
      return acc + part * scale[:, None]
  else:
    return acc + part


@gluon.jit
def promoted_sum(acc, at, ring, steps, i, phase, w: gl.constexpr,
                  KIND: gl.constexpr, SKINNY: gl.constexpr,
                  STAGES: gl.constexpr):
  """sum_slabs in float32, of nt. Two slabs take turns: one is multiplied while
  the other is added."""
  if steps > 0:
    s, t = _load_scales(at, 0, steps, KIND)
    s1, t1 = _load_scales(at, 1, steps, KIND)
    part = multiply(acc, False, ring, i, phase, w, False, False, SKINNY)
    for pair in range((steps - 1) // 2):
      j, phase = next_slab(i, phase, STAGES)
      part1 = multiply(acc, False, ring, j, phase, w, False, False, SKINNY)
      x = warpgroup_mma_wait(1, deps=[part])
      _release(ring, i, True)
      acc = _add(acc, x, s, t, KIND, SKINNY)
      s, t = _load_scales(at, 2 * pair + 2, steps, KIND)
      i, phase = next_slab(j, phase, STAGES)
      part = multiply(acc, False, ring, i, phase, w, False, False, SKINNY)
      x = warpgroup_mma_wait(1, deps=[part1])
      _release(ring, j, True)
      acc = _add(acc, x, s1, t1, KIND, SKINNY)
      s1, t1 = _load_scales(at, 2 * pair + 3, steps, KIND)
    if steps % 2 == 0:
      j, phase = next_slab(i, phase, STAGES)
      part1 = multiply(acc, False, ring, j, phase, w, False, False, SKINNY)
      x = warpgroup_mma_wait(1, deps=[part])
      _release(ring, i, True)
      acc = _add(acc, x, s, t, KIND, SKINNY)
      x = warpgroup_mma_wait(0, deps=[part1])
      _release(ring, j, True)
      acc = _add(acc, x, s1, t1, KIND, SKINNY)
      i, phase = next_slab(j, phase, STAGES)
    else:
      x = warpgroup_mma_wait(0, deps=[part])
      _release(ring, i, True)
      acc = _add(acc, x, s, t, KIND, SKINNY)
      i, phase = next_slab(i, phase, STAGES)
  return acc, i, phase


# ---- the end of a tile


@gluon.jit
def _halves(x, ELEMENT: gl.constexpr):
  """Splits accumulators in the middle of the columns: each thread its own."""
  ROWS_: gl.constexpr = x.shape[0]
  N: gl.constexpr = x.shape[1] // 2
  LAYOUT: gl.constexpr = accumulator(N, ELEMENT, gl.num_ctas())
  low, high = x.reshape([ROWS_, 2, N]).permute(0, 2, 1).split()
  return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def _join(low, high, ELEMENT: gl.constexpr):
  """Undoes _halves."""
  N: gl.constexpr = 2 * low.shape[1]
  x = gl.join(low, high).permute(0, 2, 1).reshape([low.shape[0], N])
  return gl.convert_layout(x, accumulator(N, ELEMENT, gl.num_ctas()))


@gluon.jit
def _load_bias(out, cols):
  """Returns columns' bias: as 16 bits and as float32, one of them 0."""
  (bias, bias_f32, _, _, _, _, n, _, flags) = out
  mask = (cols < n) & ((flags & gemm.HAS_BIAS) != 0)
  wide = (flags & gemm.BIAS_F32) != 0
  return (gl.load(bias + cols, mask=mask & (wide == 0), other=0),
          gl.load(bias_f32 + cols, mask=mask & wide, other=0.0))


@gluon.jit
def _widen_bias(bias, flags):
  """Returns what _load_bias has loaded as float32."""
  bits, y = bias
  return y + gl.where((flags & gemm.OUT_FP16) != 0,
                      bits.to(gl.float16, bitcast=True).to(gl.float32),
                      bits.to(gl.bfloat16, bitcast=True).to(gl.float32))


@gluon.jit
def _load_ends(scales, out, row0, col0, whole, KIND: gl.constexpr,
               SKINNY: gl.constexpr, LAYOUT: gl.constexpr, OWN: gl.constexpr,
               N: gl.constexpr):
  """Returns scales of an accumulator's rows, of each 64 columns, and the bias.

  They are loaded before a tile's sum is made, which hides how long that takes.
  """
  a_scale, b_scale, stride_a_scale_m, _, stride_b_scale_n, _ = scales
  SCALED: gl.constexpr = KIND == ROWS or KIND == PROMOTED_ROWS
  WIDTH: gl.constexpr = min(N, 64)
  own = gl.arange(0, OWN, gl.SliceLayout(1, LAYOUT))
  shared = gl.arange(0, WIDTH, _columns(gl.num_ctas()))
  own_scale = own
  shared_scale = ()
  bias = ()
  if SKINNY:
    own += col0
    bias += (_load_bias(out, own),)
    if SCALED:
      own_scale = gl.load(b_scale + own * stride_b_scale_n,
                          mask=(own < out[6]) & whole, other=1.0)
  elif SCALED:
    own += row0
    own_scale = gl.load(a_scale + own * stride_a_scale_m,
                        mask=(own < out[5]) & whole, other=1.0)
  for p in gl.static_range(N // WIDTH):
    if SKINNY:
      at = row0 + p * WIDTH + shared
      if SCALED:
        shared_scale += (gl.load(a_scale + at * stride_a_scale_m,
                                 mask=(at < out[5]) & whole, other=1.0),)
    else:
      at = col0 + p * WIDTH + shared
      bias += (_load_bias(out, at),)
      if SCALED:
        shared_scale += (gl.load(b_scale + at * stride_b_scale_n,
                                 mask=(at < out[6]) & whole, other=1.0),)
  return own_scale, shared_scale, bias


@gluon.jit
def _to_bf16(x, flags):
  """Rounds to bfloat16, or to the bits of float16."""
  if (flags & gemm.OUT_FP16) != 0:
    y = x.to(gl.float16).to(gl.bfloat16, bitcast=True)
  else:
    y = x.to(gl.bfloat16)
  return y


@gluon.jit
def scale_rows(acc, scale_a, scale_b, ELEMENT: gl.constexpr):
  """Returns sums as float32, times a scale a row and one a column."""
  N: gl.constexpr = acc.shape[1]
  if N > 64:
    low, high = _halves(acc, ELEMENT)
    low = scale_rows(low, scale_a, scale_b[:N // 128], ELEMENT)
    high = scale_rows(high, scale_a, scale_b[N // 128:], ELEMENT)
    return _join(low, high, ELEMENT)
  else:
    LAYOUT: gl.constexpr = acc.type.layout
    s = gl.convert_layout(scale_a, gl.SliceLayout(1, LAYOUT))
    t = gl.convert_layout(scale_b[0], gl.SliceLayout(0, LAYOUT))
    return acc.to(gl.float32) * s[:, None] * t[None, :]


@gluon.jit
def _activate(x, bias, activation, flags, SKINNY: gl.constexpr,
              ELEMENT: gl.constexpr):
  """Adds the bias and activates, in a loop over the columns.

  The loop moves all columns through the registers of the first 64: the code of
  the activations is long.
  """
  N: gl.constexpr = x.shape[1]
  if N > 64:
    HALF: gl.constexpr = 0 if SKINNY else N // 128
    for _ in range(2):
      low, high = _halves(x, ELEMENT)
      low = _activate(low, bias if SKINNY else bias[:HALF], activation, flags,
                      SKINNY, ELEMENT)
      x = _join(high, low, ELEMENT)
      bias = bias[HALF:] + bias[:HALF]
    return x
  else:
    y = _widen_bias(bias[0], flags)
    if SKINNY:
      y = gl.convert_layout(y, gl.SliceLayout(1, x.type.layout))[:, None]
    else:
      y = gl.convert_layout(y, gl.SliceLayout(0, x.type.layout))[None, :]
    return gemm.activate(x + y, activation)


@gluon.jit
def _store_rows(ptr, pitch, x, row0, col0, m, n):
  """Stores from where the numbers are; rows are `pitch` apart."""
  LAYOUT: gl.constexpr = x.type.layout
  rows = row0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
  cols = col0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
  at = rows[:, None].to(gl.int64) * pitch + cols[None, :]
  gl.store(ptr + at, x, mask=(rows < m)[:, None] & (cols < n)[None, :])


@gluon.jit
def store(ptr, x, row0, col0, m, n, ELEMENT: gl.constexpr):
  """Stores a part of the result, 8 values a thread."""
  N: gl.constexpr = x.shape[1]
  if N > 64:
    low, high = _halves(x, ELEMENT)
    store(ptr, low, row0, col0, m, n, ELEMENT)
    store(ptr, high, row0, col0 + N // 2, m, n, ELEMENT)
  else:
    x = gl.convert_layout(x, hopper.rows_layout(N))
    _store_rows(ptr, n, x, row0, col0, m, n)


@gluon.jit
def _copy_out(x, desc, smem, z, row0, col0, p: gl.constexpr,
              ELEMENT: gl.constexpr):
  """Stores 16 bits by way of two buffers, from which TMA copies 64 columns.

  Nobody waits for the copies but who needs their buffer next: the following
  tile's products begin beside them.
  """
  N: gl.constexpr = x.shape[1]
  if N > 64:
    low, high = _halves(x, ELEMENT)
    _copy_out(low, desc, smem, z, row0, col0, p, ELEMENT)
    _copy_out(high, desc, smem, z, row0, col0 + N // 2, p + N // 128, ELEMENT)
  else:
    buffer = smem.index(p % smem.shape[0])
    tma.store_wait(smem.shape[0] - 1)
    gl.barrier()
    buffer.reshape([x.shape[0], N]).store(x)
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [z, row0, col0], buffer)


@gluon.jit
def _store_odd(ptr, x, smem, row0, col0, m, n, p: gl.constexpr,
               ELEMENT: gl.constexpr):
  """Stores 16 bits of rows that no map describes, by way of the buffers."""
  N: gl.constexpr = x.shape[1]
  if N > 64:
    low, high = _halves(x, ELEMENT)
    _store_odd(ptr, low, smem, row0, col0, m, n, p, ELEMENT)
    _store_odd(ptr, high, smem, row0, col0 + N // 2, m, n, p + N // 128,
               ELEMENT)
  else:
    # A warp writes what of a row is next to each other. Offsets in a tile have
    # 32 bits: registers are few here.
    LAYOUT: gl.constexpr = _single(gl.num_ctas())
    buffer = smem.index(p % smem.shape[0]).reshape([x.shape[0], N])
    gl.barrier()
    buffer.store(x)
    gl.barrier()
    # 0 is added, but of this tile: they shall take no registers before.
    rows = (row0 >> 31) + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    ptr += row0.to(gl.int64) * n + col0
    gl.store(ptr + (rows[:, None] * n + cols[None, :]), buffer.load(LAYOUT),
             mask=(rows < m - row0)[:, None] & (cols < n - col0)[None, :])


@gluon.jit
def _store_transposed(ptr, pitch, x, row0, col0, m, n, WIDTH: gl.constexpr,
                      ELEMENT: gl.constexpr):
  """Stores what has columns of the result in its rows, WIDTH a thread."""
  N: gl.constexpr = x.shape[1]
  # Numbers are moved through memory, few at a time.
  if N * x.dtype.primitive_bitwidth > 1024:
    low, high = _halves(x, ELEMENT)
    _store_transposed(ptr, pitch, low, row0, col0, m, n, WIDTH, ELEMENT)
    _store_transposed(ptr, pitch, high, row0 + N // 2, col0, m, n, WIDTH,
                      ELEMENT)
  else:
    LAYOUT: gl.constexpr = _transposed(WIDTH)
    x = gl.convert_layout(x, LAYOUT)
    rows = row0 + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    cols = col0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    at = cols[:, None] + rows[None, :].to(gl.int64) * pitch
    gl.store(ptr + at, x, mask=(cols < n)[:, None] & (rows < m)[None, :])


@gluon.jit
def _finish(acc, ends, out, buffers, row0, col0, whole, p: gl.constexpr,
            KIND: gl.constexpr, SKINNY: gl.constexpr, ELEMENT: gl.constexpr):
  """Scales, adds the bias, activates, rounds and stores sums."""
  scale_own, scale_shared, bias = ends
  out_desc, smem, z = buffers
  (_, _, out_bf16, out_f32, pitch, m, n, activation, flags) = out
  x = acc.to(gl.float32)
  if KIND == ROWS or KIND == PROMOTED_ROWS:
    if whole:
      x = scale_rows(acc, scale_own, scale_shared, ELEMENT)
    elif acc.dtype == gl.int32:
      x = acc.to(gl.float32, bitcast=True)
  if ((flags & gemm.HAS_BIAS) != 0) | (activation != 0):
    x = _activate(x, bias, activation, flags, SKINNY, ELEMENT)
  if KIND == PLAIN and whole & (n % 8 != 0):
    # Rows of the result do not begin at multiples of 16 bytes.
    skipped = z * ((m % 8) * (n % 8) % 8)
    # The same n (0 is added), but of this tile: what is made of it shall not
    # take registers while sums are made.
    n += z >> 31
    if (flags & gemm.OUT_F32) != 0:
      if SKINNY:
        _store_transposed(out_f32 + skipped, n, x, row0, col0, m, n, 1, ELEMENT)
      else:
        _store_rows(out_f32 + skipped, n, x, row0, col0, m, n)
    else:
      y = _to_bf16(x, flags)
      if SKINNY:
        _store_transposed(out_bf16 + skipped, n, y, row0, col0, m, n, 1,
                          ELEMENT)
      else:
        _store_odd(out_bf16 + skipped, y, smem, row0, col0, m, n, p, ELEMENT)
  else:
    # So written, the compiler knows what divides them.
    edge = (n + 7) // 8 * 8
    if (flags & gemm.OUT_F32) != 0:
      if SKINNY:
        _store_transposed(out_f32, pitch, x, row0, col0, m, edge, 8, ELEMENT)
      else:
        _store_rows(out_f32, pitch, x, row0, col0, m, edge)
    else:
      y = _to_bf16(x, flags)
      if SKINNY:
        _store_transposed(out_bf16, pitch, y, row0, col0, m, edge, 8, ELEMENT)
      else:
        _copy_out(y, out_desc, smem, z, row0, col0, p, ELEMENT)


@gluon.jit
def _consume(w: gl.constexpr, ring, walk, scales, out, buffers,
             KIND: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
             SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             TILE_K: gl.constexpr, STAGES: gl.constexpr,
             GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
             CLUSTER_M: gl.constexpr, PINGPONG: gl.constexpr):
  """Computes a warpgroup's part of one item after the other.

  With PINGPONG all of every other item.
  """
  (bias, bias_f32, out_bf16, out_f32, workspace, m, n, batch_stride_out,
   activation, flags) = out
  ELEMENT: gl.constexpr = ring[0].dtype
  SUM: gl.constexpr = gl.int32 if ELEMENT == gl.int8 else gl.float32
  BLOCK_M: gl.constexpr = TILE_M // CLUSTER_M
  BLOCK_N: gl.constexpr = TILE_N // (CLUSTER // CLUSTER_M)
  # The accumulator's rows, and its columns: those that warpgroups share.
  TILE: gl.constexpr = BLOCK_N if SKINNY else BLOCK_M
  OWN: gl.constexpr = TILE // warpgroups(TILE, PINGPONG)
  N: gl.constexpr = BLOCK_M if SKINNY else BLOCK_N
  PARTS: gl.constexpr = len(parts(N))
  # Which of a tile's parts is its own, and which of the items that follow.
  PART: gl.constexpr = 0 if PINGPONG else w
  TURN: gl.constexpr = w if PINGPONG else 0
  i = 0
  phase = 0
  if CLUSTER > 1:
    hopper.enter_cluster()
  gdc_wait()
  gdc_launch_dependents()
  block = gl.program_id(0) % CLUSTER
  first = gl.program_id(0) // CLUSTER
  step = gl.num_programs(0) // CLUSTER
  if TURN == 1:
    i, phase = _behind(first, walk, i, phase, TILE_K, STAGES, GROUP_M)
    first += step
  turn_phase = TURN ^ 1
  if PINGPONG:
    step *= 2
  for t in range(first, _items(walk), step):
    index, tile_m, tile_n, in_parts, k_first, k_end = _item(t, walk, GROUP_M)
    steps = (k_end - k_first + TILE_K - 1) // TILE_K
    whole = in_parts < 0
    # So written, the compiler knows what divides it; _finish adds the rest.
    offset = index.to(gl.int64) * (batch_stride_out // 8 * 8)
    # A part's sum goes as it is into a tile of the workspace.
    to_part = workspace + (in_parts.to(gl.int64) * TILE_M - tile_m * TILE_M - (
        tile_n)) * TILE_N
    own_out = (bias, bias_f32, out_bf16 + offset,
               gl.where(whole, out_f32 + offset, to_part),
               gl.where(whole, n, TILE_N) // 8 * 8, m, n,
               gl.where(whole, activation, 0),
               gl.where(whole, flags, gemm.OUT_F32))
    own_scales = scales[:6]
    if KIND != PLAIN:
      own_scales = (scales[0] + index * scales[6],
                    scales[1] + index * scales[7], scales[2], scales[3],
                    scales[4], scales[5])
    row0 = tile_m * TILE_M + (0 if SKINNY else PART * OWN)
    col0 = tile_n * TILE_N + (PART * OWN if SKINNY else 0)
    if CLUSTER > 1:
      row0 += block % CLUSTER_M * BLOCK_M
      col0 += block // CLUSTER_M * BLOCK_N
    ends = ()
    accs = ()
    for p in gl.static_range(PARTS):
      accs += (gl.zeros([OWN, parts(N)[p]], SUM,
                        accumulator(parts(N)[p], ELEMENT, gl.num_ctas())),)
      ends += (_load_ends(own_scales, own_out,
                          row0 + (before(N, p) if SKINNY else 0),
                          col0 + (0 if SKINNY else before(N, p)), whole, KIND,
                          SKINNY,
                          accumulator(parts(N)[p], ELEMENT, gl.num_ctas()), OWN,
                          parts(N)[p]),)
    if KIND == PROMOTED_ROWS or KIND == BLOCKS:
      gl.static_assert(PARTS == 1)
      at = scales_at(own_scales, m, row0, col0, k_first // TILE_K,
                     N if SKINNY else OWN,
                     gl.SliceLayout(0 if SKINNY else 1, accs[0].type.layout))
      acc, i, phase = promoted_sum(accs[0], at, ring, steps, i, phase, PART,
                                   KIND, SKINNY, STAGES)
      accs = (acc,)
    elif PINGPONG:
      # Phases of slabs are known by one bit: nobody waits for one that is not
      # the next.
      turns = ring[6]
      mbarrier.wait(turns.index(TURN), turn_phase)
      turn_phase ^= 1
      accs, i, phase = _sum_parts(accs, ring, steps, i, phase, PART, A_T, B_T,
                                  SKINNY, STAGES,
                                  following=turns.index(1 - TURN))
      i, phase = _behind(t + step // 2, walk, i, phase, TILE_K, STAGES, GROUP_M)
    else:
      accs, i, phase = _sum_parts(accs, ring, steps, i, phase, PART, A_T, B_T,
                                  SKINNY, STAGES, CLUSTER, CLUSTER_M)
    out_desc, smem = buffers
    if not SKINNY:
      BUFFERS: gl.constexpr = out_buffers(warpgroups(TILE, PINGPONG), PINGPONG)
      smem = smem.slice(BUFFERS * w, BUFFERS)
    for p in gl.static_range(PARTS):
      _finish(accs[p], ends[p], own_out, (out_desc, smem, index),
              row0 + (before(N, p) if SKINNY else 0),
              col0 + (0 if SKINNY else before(N, p)), whole,
              before(N, p) // 64, KIND, SKINNY, ELEMENT)
  if not SKINNY:
    tma.store_wait(0)


# ---- the kernels


@gluon.jit
def _gemm(a_desc, b_desc, rest_desc, out_desc, a_scale, b_scale, bias, bias_f32,
          out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
          batch_stride_b, batch_stride_out, batch_stride_a_scale,
          batch_stride_b_scale, stride_a_scale_m, stride_a_scale_k,
          stride_b_scale_n, stride_b_scale_k, whole_tiles, splits, k_per_split,
          skew, activation, flags, A_T: gl.constexpr, B_T: gl.constexpr,
          KIND: gl.constexpr, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
          TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
          GROUP_M: gl.constexpr, CLUSTER: gl.constexpr = 1,
          CLUSTER_M: gl.constexpr = 1, PINGPONG: gl.constexpr = 0):
  """A program's items."""
  BLOCK_M: gl.constexpr = TILE_M // CLUSTER_M
  BLOCK_N: gl.constexpr = TILE_N // (CLUSTER // CLUSTER_M)
  OWN: gl.constexpr = BLOCK_N if SKINNY else BLOCK_M
  PARTS: gl.constexpr = warpgroups(OWN, PINGPONG)
  CONSUMERS: gl.constexpr = 2 if PINGPONG else PARTS
  BLOCKS_: gl.constexpr = gl.num_ctas()
  # Pairs of blocks divide rows of what warpgroups own. Of a tile's transpose
  # they were slower than a block by itself.
  gl.static_assert(BLOCKS_ == 1 or not SKINNY)
  A_SPLIT: gl.constexpr = 2 if A_T else 1
  SHARED: gl.constexpr = BLOCK_M if SKINNY else BLOCK_N
  if CLUSTER > 1:
    # A copy lies in lines of 128 bytes, and no slab of a warpgroup in two.
    gl.static_assert(SKINNY and TILE_K == 64 and OWN == 64 * PARTS)
    shared = _allocate_rows(a_desc.dtype, SHARED, STAGES, A_T)
  elif rest_desc is not None:
    # Products take all rows of a slab for boxes of 64 of k.
    gl.static_assert(TILE_K == 64)
    shared = _allocate(rest_desc, SHARED // rest_of(SHARED) * STAGES, None)
  elif SKINNY:
    shared = _allocate(a_desc, STAGES, A_SPLIT)
  else:
    shared = _allocate(b_desc, STAGES, None)
  if CLUSTER > 1:
    own = _allocate_rows(a_desc.dtype, 64, PARTS * STAGES, False)
  elif SKINNY:
    own = _allocate(b_desc, PARTS * STAGES, None)
  else:
    own = _allocate(a_desc, PARTS * STAGES, A_SPLIT)
  if SKINNY:
    a_smem = shared
    b_smem = own
  else:
    a_smem = own
    b_smem = shared
  buffers = (out_desc, None)
  if not SKINNY:
    buffers = (out_desc, gl.allocate_shared_memory(
        out_desc.dtype,
        hopper.stack(CONSUMERS * out_buffers(PARTS, PINGPONG),
                     out_desc.block_type.shape),
        _slab(out_desc, BLOCKS_, 1)))
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i), count=1)
    mbarrier.init(empty.index(i),
                  count=PARTS * (CLUSTER_M + CLUSTER // CLUSTER_M - 1))
  both = empty
  done = empty.index(0)
  if CLUSTER > 1:
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
  if BLOCKS_ == 2:
    both = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
      mbarrier.init(both.index(i), count=PARTS)
  turns = empty
  if PINGPONG:
    turns = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
      mbarrier.init(turns.index(i), count=1)
  ring = (a_smem, b_smem, full, empty, both, done, turns)
  walk = (batch, (m + TILE_M - 1) // TILE_M, (n + TILE_N - 1) // TILE_N,
          whole_tiles, splits, k, k_per_split)
  # What all of a batch share is the map's only matrix.
  maps = (a_desc, b_desc, rest_desc, gl.where(batch_stride_a != 0, 1, 0),
          gl.where(batch_stride_b != 0, 1, 0))
  scales = (a_scale, b_scale, stride_a_scale_m, stride_a_scale_k,
            stride_b_scale_n, stride_b_scale_k, batch_stride_a_scale,
            batch_stride_b_scale)
  out = (bias, bias_f32, out_bf16, out_f32, workspace, m, n, batch_stride_out,
         activation, flags)
  if CLUSTER > 1 and PARTS == 1:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_produce, (ring, walk, maps, skew, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)),
        (_stand_by, (done,)), (_stand_by, (done,)),
    ], [1, 1, 2])
  elif CLUSTER > 1:
    gl.static_assert(PARTS == 2)
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_consume, (1, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_produce, (ring, walk, maps, skew, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)),
        (_stand_by, (done,)), (_stand_by, (done,)),
    ], [4, 1, 1, 2], [224, 24, 24, 24])
  elif CONSUMERS == 1:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_produce, (ring, walk, maps, skew, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)),
    ], [1])
  elif CONSUMERS == 2:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_consume, (1, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_produce, (ring, walk, maps, skew, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)),
    ], [4, 1], [224, 24])
  else:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_consume, (1, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_consume, (2, ring, walk, scales, out, buffers, KIND, A_T, B_T, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER,
                    CLUSTER_M, PINGPONG)),
        (_produce, (ring, walk, maps, skew, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)),
    ], [4, 4, 1], [160, 160, 24])


@gluon.jit
def gemm_nt(a_desc, b_desc, rest_desc, out_desc, bias, bias_f32, out_bf16,
            out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
            batch_stride_out, whole_tiles, splits, k_per_split, skew,
            activation, flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
            CLUSTER_M: gl.constexpr, PINGPONG: gl.constexpr):
  """gemm.gemm_nt. Grid: (blocks at once, or items if fewer)."""
  _gemm(a_desc, b_desc, rest_desc, out_desc, bias_f32, bias_f32, bias, bias_f32,
        out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
        batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0, whole_tiles, splits,
        k_per_split, skew, activation, flags, False, False, PLAIN, SKINNY,
        TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)


@gluon.jit
def gemm_nn(a_desc, b_desc, rest_desc, out_desc, bias, bias_f32, out_bf16,
            out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
            batch_stride_out, whole_tiles, splits, k_per_split, skew,
            activation, flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
            CLUSTER_M: gl.constexpr, PINGPONG: gl.constexpr):
  """gemm.gemm_nn."""
  _gemm(a_desc, b_desc, rest_desc, out_desc, bias_f32, bias_f32, bias, bias_f32,
        out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
        batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0, whole_tiles, splits,
        k_per_split, skew, activation, flags, False, True, PLAIN, SKINNY,
        TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)


@gluon.jit
def gemm_tn(a_desc, b_desc, rest_desc, out_desc, bias, bias_f32, out_bf16,
            out_f32, workspace, batch, m, n, k_rows, batch_stride_a,
            batch_stride_b, batch_stride_out, whole_tiles, splits, k_per_split,
            skew, activation, flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
            CLUSTER_M: gl.constexpr, PINGPONG: gl.constexpr):
  """gemm.gemm_tn."""
  _gemm(a_desc, b_desc, rest_desc, out_desc, bias_f32, bias_f32, bias, bias_f32,
        out_bf16, out_f32, workspace, batch, m, n, k_rows, batch_stride_a,
        batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0, whole_tiles, splits,
        k_per_split, skew, activation, flags, True, True, PLAIN, SKINNY, TILE_M,
        TILE_N, TILE_K, STAGES, GROUP_M, CLUSTER, CLUSTER_M, PINGPONG)


@gluon.jit
def gemm_row(a_desc, b_desc, rest_desc, out_desc, a_scale, b_scale, bias,
             bias_f32, out_bf16, out_f32, workspace, batch, m, n, k,
             batch_stride_a, batch_stride_b, batch_stride_out,
             batch_stride_a_scale, batch_stride_b_scale, a_scale_step,
             b_scale_step, whole_tiles, splits, k_per_split, skew, activation,
             flags, PROMOTE: gl.constexpr, SKINNY: gl.constexpr,
             TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
             STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """gemm.gemm_row."""
  _gemm(a_desc, b_desc, rest_desc, out_desc, a_scale, b_scale, bias, bias_f32,
        out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
        batch_stride_b, batch_stride_out, batch_stride_a_scale,
        batch_stride_b_scale, a_scale_step, 0, b_scale_step, 0, whole_tiles,
        splits, k_per_split, skew, activation, flags, False, False,
        PROMOTED_ROWS if PROMOTE else ROWS, SKINNY, TILE_M, TILE_N, TILE_K,
        STAGES, GROUP_M)


@gluon.jit
def gemm_block(a_desc, b_desc, rest_desc, out_desc, a_scale, b_scale, bias,
               bias_f32, out_bf16, out_f32, workspace, batch, m, n, k,
               batch_stride_a, batch_stride_b, batch_stride_out,
               batch_stride_a_scale, batch_stride_b_scale, stride_a_scale_m,
               stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
               whole_tiles, splits, k_per_split, activation, flags,
               SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
               TILE_K: gl.constexpr, STAGES: gl.constexpr,
               GROUP_M: gl.constexpr):
  """gemm.gemm_block. A tile has one block's columns."""
  gl.static_assert(TILE_N <= gemm.SCALE_BLOCK)
  gl.static_assert(TILE_K == gemm.SCALE_BLOCK)
  _gemm(a_desc, b_desc, rest_desc, out_desc, a_scale, b_scale, bias, bias_f32,
        out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
        batch_stride_b, batch_stride_out, batch_stride_a_scale,
        batch_stride_b_scale, stride_a_scale_m, stride_a_scale_k,
        stride_b_scale_n, stride_b_scale_k, whole_tiles, splits, k_per_split, 0,
        activation, flags, False, False, BLOCKS, SKINNY, TILE_M, TILE_N, TILE_K,
        STAGES, GROUP_M)
