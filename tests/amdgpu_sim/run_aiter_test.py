# SPDX-License-Identifier: Apache-2.0
"""run_aiter.py without AITER: its oracle, its layouts, what it says."""

import os
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import run_aiter  # pylint: disable=g-import-not-at-top,g-bad-import-order


class RunAiterTest(absltest.TestCase):

  def experts(self, tokens, dtype, quantised, smooth):
    return run_aiter.Experts(np.random.default_rng(0), tokens, 256, 128, 1,
                             dtype, dtype, quantised, smooth)

  def test_without_a_checkout(self):
    with tempfile.TemporaryDirectory() as folder:
      done = subprocess.run(
          [sys.executable, run_aiter.__file__, folder], capture_output=True,
          text=True, check=False)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertIn("is no checkout of AITER", done.stdout)
    self.assertIn("Nothing was run", done.stdout)

  def test_arguments_take_16_bytes(self):
    array = np.zeros(4, np.float32)
    words = run_aiter.segment([array, 1.5, -3, None], {
        id(array): type("Buffer", (), {"address": 0x123456789A})})
    self.assertEqual(words.tolist(), [
        0x3456789A, 0x12, 0, 0, 0x3FC00000, 0, 0, 0, 0xFFFFFFFD, 0, 0, 0,
        0, 0, 0, 0])

  def test_shuffle(self):
    for dtype, group in ((np.int8, 16), (np.float16, 8)):
      weights = np.arange(32 * 64).reshape(32, 64).astype(dtype)
      flat = run_aiter.shuffle(weights).reshape(-1)
      # The first 16 bytes of rows 0 to 15 come first, then their second ones.
      np.testing.assert_array_equal(flat[:group], weights[0, :group])
      np.testing.assert_array_equal(flat[group : 2 * group], weights[1, :group])
      np.testing.assert_array_equal(flat[16 * group : 17 * group],
                                    weights[0, group : 2 * group])
      # Rows 16 to 31 come after all of rows 0 to 15.
      np.testing.assert_array_equal(flat[16 * 64 : 16 * 64 + group],
                                    weights[16, :group])

  def test_gradients_of_the_oracle(self):
    random = np.random.default_rng(0)
    problem = run_aiter.Attention([3, 4], [5, 6], 2, 1, 4, 3, True, left=3,
                                  right=1)
    inputs = problem.draw(random, np.float64)
    o, lse, delta, *gradients = problem.solve(*inputs)
    np.testing.assert_allclose(delta, (o * inputs[3]).sum(-1).T, rtol=1e-12)
    self.assertEqual(lse.shape, (2, 7))
    loss = lambda *qkv: (problem.solve(*qkv, inputs[3])[0] * inputs[3]).sum()
    for i, gradient in enumerate(gradients):
      step = random.standard_normal(inputs[i].shape)
      ends = []
      for sign in (1, -1):
        moved = list(inputs[:3])
        moved[i] = moved[i] + sign * 1e-6 * step
        ends.append(loss(*moved))
      self.assertAlmostEqual((ends[0] - ends[1]) / 2e-6,
                             float((gradient * step).sum()), places=6)

  def test_masks_of_the_oracle(self):
    def shown(**window):
      problem = run_aiter.Attention([3], [5], 1, 1, 4, 4, False, **window)
      return (~problem.hidden(3, 5)).astype(int).tolist()
    self.assertEqual(shown(right=0), [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0],
                                      [1, 1, 1, 1, 1]])
    self.assertEqual(shown(right=0, bottom=False), [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    self.assertEqual(shown(left=0, right=1, bottom=False), [
        [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0]])

  def test_sorted_tokens(self):
    a = self.experts(12, np.dtype(np.int8), "pertoken", 0)
    places, weights, experts, used = a.sort(4)
    self.assertEqual(used.tolist(), [len(places) - 4, 12])
    self.assertLen(places, 4 * len(experts))
    self.assertLen(weights, 4 * len(experts))
    seen = set()
    for i, place in enumerate(places.tolist()):
      token, slot = place & 0xFFFFFF, place >> 24
      if (token, slot) == (12, 2):
        self.assertEqual(weights[i], 0)
        continue
      self.assertLess(i, used[0])
      self.assertEqual(a.chosen[token, slot], experts[i // 4])
      self.assertEqual(a.weights[token, slot], weights[i])
      seen.add((token, slot))
    self.assertLen(seen, 24)

  def test_scales_of_experts(self):
    int8, fp8 = np.dtype(np.int8), run_aiter.fp8("gfx950")
    for dtype, quantised, slot in ((int8, "pertoken", 1),
                                   (fp8, "blockscale", 0)):
      a = self.experts(3, dtype, quantised, 2 * slot)
      # One element of each, as a kernel would find its scale.
      if quantised == "pertoken":
        scales = (a.x_scale[slot, 0, 2], a.up_gate_scale[1, 140, 0],
                  a.down_scale[1, 140, 0])
      else:
        scales = (a.x_scale[slot, 1, 2], a.up_gate_scale[1, 1, 1],
                  a.down_scale[1, 1, 0])
      x, up_gate, down = a.exact
      for exact, value, scale in zip(
          (x[slot, 2, 130], up_gate[1, 140, 130], down[1, 140, 100]),
          (a.x[slot, 2, 130], a.up_gate[1, 140, 130], a.down[1, 140, 100]),
          scales, strict=True):
        self.assertAlmostEqual(exact, float(value) * float(scale), places=12)

  def test_sum_over_experts(self):
    a = self.experts(3, np.dtype(np.int8), "pertoken", 2)
    x, up_gate, down = a.exact
    for first in (False, True):
      right = np.zeros((3, 256))
      for token in range(3):
        for slot in range(2):
          expert, weight = a.chosen[token, slot], a.weights[token, slot]
          gate, up = np.split(up_gate[expert] @ x[slot, token], 2)
          if first:
            gate, up, weight = gate * weight, up * weight, 1
          hidden = gate / (1 + np.exp(-gate)) * up * a.smooth[expert]
          right[token] += weight * (down[expert] @ hidden)
      np.testing.assert_allclose(a.solve("silu", first), right, rtol=1e-5,
                                 atol=1e-5)


if __name__ == "__main__":
  absltest.main()
