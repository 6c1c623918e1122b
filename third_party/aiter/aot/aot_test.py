# SPDX-License-Identifier: Apache-2.0
"""Tables, declarations and what is generated from them, without a compiler."""

import dataclasses
import functools
import io
import lzma
import operator
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zlib

ROOT = pathlib.Path(__file__).absolute().parents[3]
if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

# pylint: disable=g-import-not-at-top,wrong-import-position
from third_party.aiter.aot import (
    archs,
    embed,
    families,
    family,
    report,
    table,
    worker,
)

_OP = family.Op("toy.toy", ("rows",))


def _family(**fields):
  fields = {"ops": {"toy_fwd": _OP}, "pointers": {},
            "constants": lambda row: {}} | fields
  return family.Family(**fields)


class TableTest(unittest.TestCase):

  def read(self, text):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "norm.csv"
      path.write_text(text)
      return table.read(path)

  def test_a_row(self):
    rows = self.read(
        "# a comment\nop,grade,arch,dtype,cols,tile_m,tile_n,options\n\n"
        "norm_fwd,fast,gfx942,bf16,4096,2,4096,"
        "features=residual excludes=unaligned+t5 waves_per_eu=2 EVICT=x;y\n")
    (name, (header, line, row)), = rows.items()
    self.assertEqual(
        name, "norm_fwd_fast_bf16_4096_gfx942_residual_no_unaligned_t5")
    self.assertTrue(header.startswith("op,grade,"))
    self.assertTrue(line.startswith("norm_fwd,fast,"))
    self.assertEqual(table.dims(row), [4096])
    self.assertEqual(table.tile(row), [2, 4096, 0])
    self.assertEqual(table.features(row, "excludes"), ["t5", "unaligned"])
    self.assertEqual(table.features(row, "features"), ["residual"])
    self.assertEqual(table.module(row), "norm.fwd")
    self.assertEqual(
        table.options(row),
        ({"features": "residual", "excludes": "unaligned+t5",
          "waves_per_eu": 2}, {"EVICT": "x,y"}))

  def test_a_line_of_several_rows(self):
    rows = self.read(
        "op,grade,arch,dtype,cols,tile_m,options\n"
        "norm_fwd,fast,gfx90a+gfx942,fp16+bf16,64,2,waves_per_eu=2\n")
    self.assertEqual(list(rows), [
        "norm_fwd_fast_fp16_64_gfx90a", "norm_fwd_fast_bf16_64_gfx90a",
        "norm_fwd_fast_fp16_64_gfx942", "norm_fwd_fast_bf16_64_gfx942"])
    _, line, row = rows["norm_fwd_fast_bf16_64_gfx90a"]
    self.assertEqual(line, "norm_fwd,fast,gfx90a,bf16,64,2,waves_per_eu=2")
    self.assertEqual((row["arch"], row["dtype"]), ("gfx90a", "bf16"))
    with self.assertRaisesRegex(ValueError, "stands twice"):
      self.read("op,grade,arch,dtype,cols,tile_m,options\n"
                "norm_fwd,fast,gfx90a,fp16+fp16,64,2,\n")

  def test_a_tile_of_clusters_beside_that_of_a_block(self):
    rows = self.read(
        "op,grade,arch,dtype,cols,tile_m,options\n"
        "norm_fwd,fast,sm_90,bf16,64,2,\n"
        "norm_fwd,fast,sm_90,bf16,64,2,excludes=unaligned cluster=4\n")
    self.assertEqual(list(rows), [
        "norm_fwd_fast_bf16_64_sm_90",
        "norm_fwd_fast_bf16_64_sm_90_cluster4_no_unaligned"])

  def test_up_to_four_sizes(self):
    rows = self.read("op,grade,arch,dtype,a,b,c,d,tile_m\n"
                     "norm_fwd,fast,sm_90,bf16,1,2,3,4,5\n")
    (name, (_, _, row)), = rows.items()
    self.assertEqual(name, "norm_fwd_fast_bf16_1_2_3_4_sm_90")
    self.assertEqual(table.dims(row), [1, 2, 3, 4])
    with self.assertRaisesRegex(
        ValueError, "a row has 5 sizes, but may have 4: a, b, c, d, e"):
      self.read("op,grade,arch,dtype,a,b,c,d,e,tile_m\n"
                "norm_fwd,fast,sm_90,bf16,1,2,3,4,5,6\n")

  def test_errors(self):
    header = "op,grade,arch,dtype,cols,tile_m,options\n"
    row = "norm_fwd,fast,sm_90,bf16,1,2,"
    for text, message in (
        ("op,arch,grade,dtype,tile_m\n", "columns must begin with op,grade,"),
        (header + row + ",\n", "8 cells for 7 columns"),
        (header + row + "\n" + row + "\n", "norm_fwd_fast_.* stands twice"),
        (header + row.replace("sm_90", "sm_95"), "no architecture sm_95"),
        (header + row.replace("norm_fwd", "norm_up"), "norm_up is no operator"),
        (header + row.replace("norm_fwd", "toy_fwd"), "op is toy_fwd, but"),
        (header + row + "excludes=t5+soft_cap",
         "excludes soft_cap, but features are unaligned, layer,"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.read(text)

  def test_sources_are_what_a_module_imports(self):
    folder = "third_party/aiter/kernels/"
    self.assertEqual(
        table.sources("norm.quant", "norm.family"),
        [folder + name for name in (
            "core/casts.py", "core/rounding.py", "norm/family.py",
            "norm/quant.py", "norm/rows.py")])
    self.assertEqual(table.sources("core.rounding"),
                     [folder + "core/rounding.py"])

  def test_every_table_can_be_read(self):
    for name in family.family_names():
      self.assertTrue(
          table.read(ROOT / f"third_party/aiter/configs/{name}.csv"), name)

  def test_no_call_has_two_best_rows(self):
    # Of equal rows the library takes the first, whatever it is for.
    for name in ("activation", "cache", "norm", "quant", "rope"):
      bits = family.family_of(name + "_").features
      served = {}
      for symbol, (_, _, row) in table.read(
          ROOT / f"third_party/aiter/configs/{name}.csv").items():
        needs, leaves = (
            functools.reduce(operator.or_, map(
                bits.get, table.features(row, option)), 0)
            for option in ("features", "excludes"))
        key = (row["op"], row["grade"], row["arch"], row["dtype"],
               *table.dims(row), (needs | leaves).bit_count())
        for other, other_needs, other_leaves in served.setdefault(key, []):
          self.assertTrue(needs & other_leaves or other_needs & leaves,
                          f"{symbol} and {other} may serve one call")
        served[key].append((symbol, needs, leaves))


class FamilyTest(unittest.TestCase):

  def test_names_of_several_words(self):
    names = ["norm", "norm_2d", "norm_2d_x"]
    self.assertEqual(family.family_name("norm_fwd", names), "norm")
    self.assertEqual(family.family_name("norm_2d_fwd", names), "norm_2d")
    self.assertEqual(family.family_name("norm_2d_x_fwd", names), "norm_2d_x")
    self.assertEqual(family.family_name("norm_2dx_fwd", names), "norm")
    with self.assertRaisesRegex(ValueError, "op is norma_fwd, but must begin"):
      family.family_name("norma_fwd", names)

  def test_declarations_hold_together(self):
    for name in family.family_names():
      self.assertIsInstance(family.family(name), family.Family)

  def test_bits(self):
    self.assertEqual(family.flags("a b c"), {"a": 1, "b": 2, "c": 4})
    self.assertEqual(family.selecting("a b"), {"a": 1 << 16, "b": 1 << 17})
    names = " ".join(f"f{i}" for i in range(17))
    for declare in (family.flags, family.selecting):
      self.assertEqual(len(declare(names.rpartition(" ")[0])), 16)
      for bad in (names, "a b a"):
        with self.assertRaisesRegex(ValueError, "at most 16 different names"):
          declare(bad)


class GeneratedTest(unittest.TestCase):

  def test_features(self):
    text = families.features({"toy_box": _family(
        features=family.flags("big soft_lid") | family.selecting("old"),
        general_only=("big", "old"), messages={"old": "age"},
        tensors=("q", "d_q"))})
    for line in (
        "inline constexpr uint32_t kKernelFlags = 0xffff;",
        "inline constexpr uint32_t kToyBoxBig = 0x1;",
        "inline constexpr uint32_t kToyBoxSoftLid = 0x2;",
        "inline constexpr uint32_t kToyBoxOld = 0x10000;",
        "inline constexpr uint32_t kToyBoxGeneralOnly = 0x10001;",
        '    {"soft_lid", "soft lid", 0x2},',
        '    {"old", "age", 0x10000},',
        "inline constexpr uint8_t kToyBoxTensorDQ = 1;",
        '    {"toy_box", kToyBoxFeatures, 3},'):
      self.assertIn(line, text.splitlines())

  def size(self, axis, **fields):
    op = dataclasses.replace(_OP, grid=(axis,))
    text = families.grids({"toy": _family(ops={"toy_fwd": op}, **fields)})
    (line,) = [line for line in text.splitlines() if "sizes[0]" in line]
    return line.strip().removeprefix("sizes[0] = ").removesuffix(";")

  def test_grids(self):
    self.assertEqual(self.size("rows"), "int64_t{p.rows}")
    self.assertEqual(self.size("tiles = ceil(rows / tile_m)"),
                     "CeilDiv(int64_t{p.rows}, int64_t{k.tile_m})")
    self.assertEqual(
        self.size("min(a * 2, max(b // 3, 1)) - c"),
        "(std::min<int64_t>((int64_t{p.a} * int64_t{2}), std::max<int64_t>("
        "(int64_t{p.b} / int64_t{3}), int64_t{1})) - int64_t{p.c})")
    self.assertEqual(
        self.size("1 if flags & BIG else n", features=family.flags("big")),
        "((int64_t{p.flags} & kToyBig) ? int64_t{1} : int64_t{p.n})")

  def test_grids_that_are_none(self):
    for axis in ("rows / tile_m", "round(rows)", "flags & SMALL", "rows ** 2"):
      with self.assertRaisesRegex(ValueError, "is not what family.Op accepts"):
        self.size(axis, features=family.flags("big"))
    for grid in ((), ("a", "b", "c", "d")):
      op = dataclasses.replace(_OP, grid=grid)
      with self.assertRaisesRegex(ValueError, "must have 1 to 3"):
        families.grids({"toy": _family(ops={"toy_fwd": op})})

  def test_names_and_other_grids(self):
    op = dataclasses.replace(
        _OP, grid=("tiles_of_rows = rows", "heads"),
        grid_if={"HEADS_FIRST": ("heads", "rows")})
    text = families.grids({"toy": _family(ops={"toy_fwd": op, "toy_bwd": op})})
    self.assertIn('    {"tiles of rows", "heads"},', text)
    self.assertIn("inline constexpr Grid kToyFwdGridHeadsFirst = {", text)
    self.assertIn(
        "inline constexpr const Grid& kToyBwdGrid = kToyFwdGrid;", text)

  def test_archs(self):
    self.assertIn('    {"sm_80", 80, 89, 101376, 108, 1600, ""},',
                  families.archs())
    self.assertEqual(archs.ARCHS["gfx942"].fp8, "e4m3fnuz")
    self.assertEqual(archs.ARCHS["sm_90"].casts, {"bf16", "e4m3fn"})

  def test_a_fifth_size_is_not_embedded(self):
    kernel = _kernel("s", "gfx942") | {
        "op": "norm_fwd", "family": "norm", "dims": [1, 2, 3, 4],
        "excludes": ["t5"]}
    rows = embed.embed([kernel], [])[3]
    self.assertIn("4, {1, 2, 3, 4}, kNormT5, 0,", rows)
    kernel["dims"].append(5)
    with self.assertRaisesRegex(ValueError, "s has 5 sizes, but may have 4"):
      embed.embed([kernel], [])


_TUNED = "# of a machine\nop,arch,dtype,m,n,k,tile,splits,us\n"


def _kernel(symbol, arch, dtype="bf16", tile_m=16):
  return {
      "symbol": symbol, "op": "gemm_nt", "family": "gemm", "grade": "fast",
      "arch": arch, "dtype": dtype, "dims": [], "tile_m": tile_m, "tile_n": 64,
      "tile_k": 128, "rate": 100, "threads": 128, "shared": 0,
      "resources": {"occupancy": 7.0},
      "grid_if": "", "args": [["a", "*"], ["k", "i32"]], "excludes": [],
      "features": [], "may": [], "maps": {}, "object": symbol.encode()}


class ReportTest(unittest.TestCase):

  def spills(self, arch, spills, **more):
    kernel = {"arch": arch, "num_warps": 4, "dims": [128],
              "no_spills_up_to": 1 << 30,
              "resources": {"spills": spills} | more}
    return report._spills(kernel)  # pylint: disable=protected-access

  def test_spills(self):
    for arch, loops, most in (
        ("sm_90", {}, 16), ("sm_80", {}, 0), ("gfx942", {"loops": []}, 0),
        ("gfx942", {"loops": [{"scratch": 0}, {"scratch": 0}]}, 8),
        ("gfx942", {"loops": [{"scratch": 0}, {"scratch": 1}]}, 0)):
      with self.subTest(arch, loops=loops):
        self.assertFalse(self.spills(arch, most, **loops))
        self.assertTrue(self.spills(arch, most + 1, **loops))


class EmbedTest(unittest.TestCase):

  def test_objects_lie_in_groups(self):
    kernels = [_kernel(name, "sm_90") | {"object": name.encode() * size}
               for name, size in (("a", 100), ("b", 300_000), ("c", 70_001),
                                  ("d", 10), ("e", 200_000))]
    blob, _, _, inc = embed.embed(kernels, [])
    lines = [line for line in inc.splitlines() if "&kernels::PackGemm" in line]
    self.assertEqual(len(lines), len(kernels))
    groups = set()
    for kernel, line in zip(kernels, lines, strict=True):
      numbers = re.search(r"(\d+, ){5}&kernels::Pack", line).group()
      start, size, offset, length, crc = map(int, numbers.split(", ")[:5])
      self.assertEqual((start % 16, offset % 16), (0, 0))
      group = lzma.decompress(blob[start:start + size])
      data = group[offset:offset + length]
      self.assertEqual(zlib.crc32(data), crc)
      self.assertEqual(data.rstrip(b"\0"), kernel["object"])
      groups.add(start)
    # "c" and "d" share one; "b" is longer than a group should be.
    self.assertEqual(len(groups), 4)

  def embed(self, *lines, header=_TUNED, family_name="gemm"):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    tuned = pathlib.Path(folder.name) / f"{family_name}_tuned.csv"
    tuned.write_text(header + "\n".join(lines))
    kernels = [_kernel("d", "sm_90"), _kernel("c", "sm_90", tile_m=32),
               _kernel("b", "sm_90", "any"), _kernel("a", "sm_90")]
    inc = embed.embed(kernels, [tuned])[3]
    rows = inc[inc.index("kTunedChoices[] = {"):].splitlines()
    return [row.strip() for row in rows[1:rows.index("};")]], rows[-1]

  def test_a_row_means_every_kernel_of_its_tile(self):
    rows, count = self.embed("gemm_nt,sm_90,bf16,16,4096,512,16x64x128,3,9.5",
                             "gemm_nt,sm_90,any,1,2,4,16x64x128,1,0.1",
                             "gemm_nt,sm_90,bf16,7,8,9,32x64x128,2,0.1")
    # Kernels stand in the order of their symbols; the last row is no row.
    self.assertEqual(rows, [
        "{0, {16, 4096, 512}, {3}},", "{3, {16, 4096, 512}, {3}},",
        "{1, {1, 2, 4}, {1}},", "{2, {7, 8, 9}, {2}},", "{},"])
    self.assertEqual(count, "constexpr int kNumTunedChoices = 4;")

  def test_rows_of_other_architectures_are_left_out(self):
    rows, count = self.embed("gemm_nt,gfx942,bf16,16,4096,512,1x1x1,3,9.5")
    self.assertEqual(rows, ["{},"])
    self.assertEqual(count, "constexpr int kNumTunedChoices = 0;")

  def test_a_row_without_a_kernel_stops_the_build(self):
    with self.assertRaisesRegex(ValueError, "no kernel gemm_nt sm_90 bf16 64x"):
      self.embed("gemm_nt,sm_90,bf16,16,4096,512,64x64x128,3,9.5")
    with self.assertRaisesRegex(ValueError, "no kernel gemm_tn sm_90"):
      self.embed("gemm_tn,sm_90,bf16,16,4096,512,16x64x128,3,9.5")

  def test_columns_are_those_that_the_family_declares(self):
    with self.assertRaisesRegex(
        ValueError, "but must be op,arch,dtype,m,n,k,tile,splits,us"):
      self.embed(header=_TUNED.replace("m,n,k", "n,m,k"))
    with self.assertRaisesRegex(
        ValueError, "but must be op,arch,dtype,tile,us"):
      self.embed(family_name="norm")


_SERVE = """
import os, sys
sys.path.insert(0, {root!r})
from third_party.aiter.aot import worker
def work(arguments):
  print("got", *arguments, os.environ.setdefault("SEEN", arguments[0]))
  if arguments[0] == "bad":
    raise ValueError("no")
  if arguments[0] == "kill":
    os.abort()
worker.serve(work)
"""


class WorkerTest(unittest.TestCase):

  def request(self, *arguments, number=0):
    body = b"".join(
        b"\x0a" + bytes([len(a)]) + a.encode() for a in arguments)
    body += b"\x12\x04\x0a\x02ab"  # An input, which is passed over.
    if number:
      body += b"\x18" + bytes([number])
    self.assertLess(len(body), 1 << 14)
    if len(body) < 128:
      return bytes([len(body)]) + body
    return bytes([len(body) & 0x7F | 0x80, len(body) >> 7]) + body

  def test_requests(self):
    long = "x" * 100
    stream = io.BytesIO(self.request("--row", "a,b", number=7) +
                        self.request(long, long))
    self.assertEqual(worker.read_request(stream), (["--row", "a,b"], 7))
    self.assertEqual(worker.read_request(stream), ([long, long], 0))
    self.assertIsNone(worker.read_request(stream))

  def test_each_request_has_a_process(self):
    out = subprocess.run(
        [sys.executable, "-c", _SERVE.format(root=str(ROOT))], check=True,
        input=b"".join(map(self.request, ("one", "bad", "kill", "two"))),
        capture_output=True).stdout
    stream = io.BytesIO(out)
    answers = []
    while (length := worker._read_number(stream)) is not None:
      answers.append(dict(worker._read_fields(stream.read(length))))
    self.assertEqual([a[1] == 0 for a in answers], [True, False, False, True])
    self.assertEqual(answers[0][2], b"got one one\n")
    self.assertIn(b"ValueError: no", answers[1][2])
    self.assertEqual(answers[3][2], b"got two two\n")


if __name__ == "__main__":
  unittest.main()
