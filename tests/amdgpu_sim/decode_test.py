# SPDX-License-Identifier: Apache-2.0
"""What the decoder binds by more than a mnemonic, and what it refuses."""

import os
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import asm  # pylint: disable=g-import-not-at-top,g-bad-import-order

U32 = np.uint32
LANES = np.arange(64, dtype=U32)


def values(count, seed=0):
  return list(np.random.default_rng(seed).integers(0, 2**32, (count, 64), U32))


def run(body, vectors, outputs, **state):
  """The registers `outputs` after the body, from `vectors` by number."""
  before = asm.State(v=dict(vectors), **state)
  snippet = asm.Snippet(body, [before], list(outputs))
  after = asm.run([snippet])[0][0]
  return [after.vector(reg) for reg in outputs]


def permute(high, low, select):
  """v_perm_b32 of one lane."""
  data = int(high) << 32 | int(low)
  result = 0
  for k in range(4):
    at = int(select) >> 8 * k & 0xFF
    if at < 8:
      byte = data >> 8 * at & 0xFF
    elif at < 12:  # the sign of a 16-bit element
      byte = 0xFF * (data >> (16 * (at - 8) + 15) & 1)
    else:
      byte = 0 if at == 12 else 0xFF
    result |= byte << 8 * k
  return result


class PermTest(parameterized.TestCase):
  """v_perm_b32 has a way of its own for one selector in all lanes."""

  @parameterized.parameters(0x07060302, 0x05040100, 0x0C010C00, 0x00010203,
                            0x04050607, 0x0D0C0BFF, 0x0B0A0908, 0x03030C0C)
  def test_selector(self, select):
    high, low = values(2)
    expected = [permute(h, l, select) for h, l in zip(high, low)]
    body = f"""
      s_mov_b32 s40, {select:#x}
      v_mov_b32 v8, s40
      v_perm_b32 v3, v4, v5, s40
      v_perm_b32 v6, v4, v5, v8"""
    for actual in run(body, {4: high, 5: low}, [3, 6]):
      np.testing.assert_array_equal(actual, expected)

  def test_selector_is_an_inline_constant(self):
    high, low = values(2)
    expected = [permute(h, l, 7) for h, l in zip(high, low)]
    (actual,) = run("v_perm_b32 v3, v4, v5, 7", {4: high, 5: low}, [3])
    np.testing.assert_array_equal(actual, expected)

  def test_inactive_lanes_and_one_register(self):
    (data,) = values(1)
    mask = 0x00FF00FF12345678
    active = np.array([mask >> lane & 1 for lane in range(64)], bool)
    swapped = [permute(d, d, 0x00010203) for d in data]
    (actual,) = run("""
      s_mov_b32 s40, 0x00010203
      v_perm_b32 v4, v4, v4, s40""", {4: data}, [4], exec=mask)
    np.testing.assert_array_equal(actual, np.where(active, swapped, data))


class AccumulationTest(absltest.TestCase):
  """v registers beyond accum_offset and a registers are the same."""

  def launch(self, body, **attributes):
    with asm.Buffer(4 * 64) as out:
      asm.launch(f"""
        s_load_dwordx2 s[8:9], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        {body}
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[8:9]""", out, **attributes)
      return out.read()

  def test_aliases(self):
    for body in ("v_add_u32 v70, 5, v0\nv_accvgpr_read_b32 v2, a6",
                 "v_add_u32 v3, 5, v0\nv_accvgpr_write_b32 a6, v3\n"
                 "v_mov_b32 v2, v70"):
      np.testing.assert_array_equal(
          self.launch(body, vgprs=128, accum_offset=64), LANES + 5)

  def test_ranges_across_the_offset(self):
    actual = self.launch("""
      s_waitcnt lgkmcnt(0)
      global_store_dword v1, v0, s[8:9]
      s_waitcnt vmcnt(0)
      v_and_b32 v3, 0xf0, v1
      global_load_dwordx4 v[62:65], v3, s[8:9]
      s_waitcnt vmcnt(0)
      v_accvgpr_read_b32 v2, a1""", vgprs=128, accum_offset=64)
    np.testing.assert_array_equal(actual, LANES // 4 * 4 + 3)

  def test_kernels_of_one_file(self):
    body = """
      s_load_dwordx2 s[8:9], s[0:1], 0x0
      v_lshlrev_b32 v1, 2, v0
      v_mov_b32 v70, 1
      v_mov_b32 v3, 2
      v_accvgpr_write_b32 a6, v3
      v_mov_b32 v2, v70
      s_waitcnt lgkmcnt(0)
      global_store_dword v1, v2, s[8:9]"""
    kernels = [asm.Kernel(body, f"kernel{offset}", vgprs=256,
                          accum_offset=offset) for offset in (64, 128)]
    with (asm.Module(asm.assemble(asm.kernel_file(kernels))) as module,
          asm.Buffer(4 * 64) as out):
      for kernel, expected in zip(kernels, (2, 1), strict=True):
        module.launch(kernel.name, out)
        np.testing.assert_array_equal(out.read(), expected)

  def test_beyond_both(self):
    with self.assertRaisesRegex(asm.HipError, "v128 or a64 is used"):
      self.launch("v_mov_b32 v128, 0\nv_mov_b32 v2, 0", vgprs=128,
                  accum_offset=64)


class IndexTest(absltest.TestCase):
  """Instructions between s_set_gpr_idx_on and s_set_gpr_idx_off."""

  def test_source(self):
    data = values(4)
    (actual,) = run("""
      s_mov_b32 s40, 2
      s_set_gpr_idx_on s40, gpr_idx(SRC0)
      v_mov_b32 v3, v4
      s_set_gpr_idx_off""", {4 + i: d for i, d in enumerate(data)}, [3])
    np.testing.assert_array_equal(actual, data[2])

  def test_destination_keeps_inactive_lanes(self):
    data = values(5)
    outputs = run("""
      s_mov_b32 s40, 3
      s_set_gpr_idx_on s40, gpr_idx(DST)
      v_mov_b32 v4, v8
      s_set_gpr_idx_off
      v_mov_b32 v8, 5""", {4 + i: d for i, d in enumerate(data)},
                  [4, 5, 6, 7, 8], exec=0xFFFFFFFF)
    low = LANES < 32
    for k in range(3):
      np.testing.assert_array_equal(outputs[k], data[k])
    np.testing.assert_array_equal(outputs[3], np.where(low, data[4], data[3]))
    # After "off" nothing is indexed.
    np.testing.assert_array_equal(outputs[4], np.where(low, 5, data[4]))

  def test_loop_over_indices(self):
    data = values(4)
    actual = run("""
      s_mov_b32 s40, 0
      again:
      s_set_gpr_idx_on s40, gpr_idx(SRC0,DST)
      v_mov_b32 v8, v4
      s_set_gpr_idx_off
      s_add_u32 s40, s40, 1
      s_cmp_lt_u32 s40, 4
      s_cbranch_scc1 again""", {4 + i: d for i, d in enumerate(data)},
                 [8, 9, 10, 11])
    for k in range(4):
      np.testing.assert_array_equal(actual[k], data[k])

  def test_another_index(self):
    data = values(4)
    actual = run("""
      s_mov_b32 s40, 1
      s_set_gpr_idx_on s40, gpr_idx(SRC0)
      v_mov_b32 v3, v4
      s_mov_b32 s40, 3
      s_set_gpr_idx_idx s40
      v_mov_b32 v2, v4
      s_set_gpr_idx_off""", {4 + i: d for i, d in enumerate(data)}, [3, 2])
    np.testing.assert_array_equal(actual, [data[1], data[3]])


  def test_each_operand(self):
    data = values(6)
    v = {4 + i: d for i, d in enumerate(data)} | {12: LANES, 14: LANES}
    sources = [[data[2], data[1]], [data[0], data[3]], [data[0], data[1]]]
    for which, out, (a, b) in zip(("SRC0", "SRC1", "DST"), (12, 12, 14),
                                  sources, strict=True):
      (actual,) = run(f"""
        s_mov_b32 s40, 2
        s_set_gpr_idx_on s40, gpr_idx({which})
        v_sub_u32 v12, v4, v5
        s_set_gpr_idx_off""", v, [out])
      np.testing.assert_array_equal(actual, a - b)
    (actual,) = run("""
        s_mov_b32 s40, 2
        s_set_gpr_idx_on s40, gpr_idx(SRC2)
        v_add3_u32 v12, v4, v5, v6
        s_set_gpr_idx_off""", v, [12])
    np.testing.assert_array_equal(actual, data[0] + data[1] + data[4])

  def test_accumulation_registers_and_pairs(self):
    data = values(4)
    (actual,) = run("""
      s_mov_b32 s40, 3
      s_set_gpr_idx_on s40, gpr_idx(SRC0)
      v_accvgpr_read_b32 v3, a4
      s_set_gpr_idx_off""", {260 + i: d for i, d in enumerate(data)}, [3])
    np.testing.assert_array_equal(actual, data[3])
    ones = [np.full(64, k, np.float32).view(U32) for k in (1, 2, 3, 4)]
    actual = run("""
      s_mov_b32 s40, 2
      s_set_gpr_idx_on s40, gpr_idx(SRC0)
      v_pk_mul_f32 v[12:13], v[4:5], v[6:7]
      s_set_gpr_idx_off""", {4 + i: d for i, d in enumerate(ones)}, [12, 13])
    np.testing.assert_array_equal(np.array(actual).view(np.float32)[:, 0],
                                  [9, 16])

  def test_lane(self):
    (actual,) = run("""
      s_mov_b32 s40, 2
      s_movk_i32 s41, 77
      s_set_gpr_idx_on s40, gpr_idx(DST)
      v_writelane_b32 v4, s41, 5
      s_set_gpr_idx_off""", {6: LANES}, [6])
    np.testing.assert_array_equal(actual, np.where(LANES == 5, 77, LANES))


class RefusalTest(parameterized.TestCase):
  """What is not modelled stops the launch, with text and place."""

  def report(self, body):
    with self.assertRaises(asm.HipError) as raised:
      asm.launch(body)
    asm.clear_fault()
    return str(raised.exception)

  @parameterized.parameters(
      ("s_sendmsg sendmsg(MSG_INTERRUPT)", "unknown instruction"),
      ("v_mad_u32_u24 v3, v4, v5, v6 clamp", "modifier clamp"),
      ("v_cmp_lt_f32_e64 s[10:11], v4, v5 clamp", "modifier clamp"),
      ("s_mov_b32 s10, src_shared_base", "32 bits of an aperture"),
      ("s_getreg_b32 s10, hwreg(HW_REG_TRAPSTS)", "hardware register 3"),
      ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 12, 1), 1", "MODE register"),
      ("s_trap 2", "s_trap 2"),
      (".long 0xffffffff", "no instruction"),
  )
  def test_refusal(self, body, report):
    told = self.report(
        "v_mov_b32 v4, 0\nv_mov_b32 v5, 0\nv_mov_b32 v6, 0\n" + body)
    self.assertIn("unsupported", told)
    self.assertIn(report, told)
    self.assertIn("at +0xc", told)

  def test_index_beyond_the_registers(self):
    told = self.report("""
      v_mov_b32 v4, 0
      s_movk_i32 s40, 0xfd
      s_set_gpr_idx_on s40, gpr_idx(SRC0)
      v_mov_b32 v3, v4
      s_set_gpr_idx_off""")
    self.assertIn("beyond the vector registers", told)

  def test_what_is_not_indexed(self):
    told = self.report("""
      s_mov_b32 s40, 0
      s_set_gpr_idx_on s40, gpr_idx(SRC0)
      v_fmac_f32 v3, v4, v4
      s_set_gpr_idx_off""")
    self.assertIn("v_fmac_f32", told)


if __name__ == "__main__":
  absltest.main()
