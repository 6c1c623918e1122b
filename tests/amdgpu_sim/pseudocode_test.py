# SPDX-License-Identifier: Apache-2.0
"""Instructions against the pseudo-code of AMD's instruction set documents.

tinygrad's package has the pseudo-code of each opcode of CDNA3 and CDNA4 as
data. Here it is parsed and executed, lane by lane and with exact arithmetic,
and the simulator has to agree. SKIPPED says what is left out and why.
"""

import collections
import fractions
import math
import os
import re
import sys

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm
import instruction_test
import reference
from tinygrad.runtime.autogen.amd.cdna import operands, str_pcode

# Forms of encoding, the shortest first: a mnemonic is tested in one.
FORMS = ("SOP1Op", "SOP2Op", "SOPCOp", "VOP1Op", "VOP2Op", "VOPCOp", "VOP3Op",
         "VOP3SDOp", "VOP3POp")
SKIPPED = {
    r"v_div_(scale|fmas)": "the document's division does not divide: it "
                           "scales after rounding and by other powers",
    r"v_div_fixup_f(32|64)": "the document tests an exponent of the "
                             "denominator for overflow, not the quotient's",
    r"v_div_fixup": "16'F of a bit pattern, and a quotient as operand",
    r"s_.*(pc|_b64_fork|join|movrel|gpr_idx|setvskip|rfe)|s_cbranch|s_call":
        "control flow and register indices",
    r"v_(read|write)(first)?lane|permlane|v_swap": "other lanes' registers",
    r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32|64)$":
        "an approximation whose error the document states in words",
    r"v_trig_preop": "1201 bits of 2/pi that the document does not spell out",
    r"v_cvt_off": "a table that the document does not spell out",
    r"v_(mad|mac).*f16|v_mad[am]k_f16": "flushes denormals, which the "
                                        "pseudo-code does not say",
    r"v_bitop3": "the table is in bits of other fields of the encoding",
    r"_sr_|prng": "randomness: conversion_test pins it",
    r"v_rndne": "floor(x + 0.5) is rounded, and loses the sign of zero",
    r"v_cvt_rpi": "x + 0.5 is rounded; the instruction's is exact",
    r"v_cvt_(scalef32_)?pk_(fp8|bf8|fp4)_": "what is too great for the format "
                                            "is not written down",
    r"v_fma[am]k": "a literal: instruction_test",
    r"v_fract": "x - floor(x) is one for small negative numbers; hardware "
                "stays below it",
    r"v_pk_(minimum|maximum)3|v_m(in|ax)imum3": "v_minimum_* is not an "
                                                "opcode of these targets",
    r"v_dot2c?_f32_(f|bf)16": "the document's order of roundings is not the "
                              "instruction's: conversion_test has exact sums",
    r"v_cmpx": "as v_cmp, whose masks instruction_test compares with EXEC",
    r"norm": "f32_to_snorm's rounding is not written down",
    r"v_cvt_pk(accum)?_u8": "f32_to_u8's rounding is not written down",
    r"v_med3_f16|v_m(in|ax)3_f16|v_med3_f32|v_m(in|ax)3_f32":
        "nested min and max, compared by instruction_test",
    r"pk32|2xpk16": "wider than the registers of this harness",
    r"v_nop|s_nop": "nothing to compare",
    r"v_frexp": "mantissa() of a denormal is not written down",
}
ROUNDINGS = {"ROUND_NEAREST_EVEN": reference.EVEN,
             "ROUND_TOWARD_ZERO": reference.ZERO}
NAMED = {
    "f16": reference.F16, "f32": reference.F32, "f64": reference.F64,
    "bf16": reference.BF16, "fp4": reference.FP4, "fp6": reference.FP6,
    "bf6": reference.BF6,
    "fp8": reference.FP8 if asm.ARCH == "gfx950" else reference.FP8_FNUZ,
    "bf8": reference.BF8 if asm.ARCH == "gfx950" else reference.BF8_FNUZ,
}


class Unknown(Exception):
  """What the interpreter does not know."""


def is_finite(number):
  # float() of a great Fraction would overflow.
  return isinstance(number, fractions.Fraction) or math.isfinite(number)


class Value:
  """Bits of a size, read as kind: u, i, b, f (with format) or x (exact)."""

  __slots__ = ("bits", "size", "kind", "form")

  def __init__(self, bits, size, kind, form=None):
    self.bits = bits & ((1 << size) - 1) if kind != "x" else bits
    self.size, self.kind, self.form = size, kind, form

  @property
  def number(self):
    if self.kind == "x":
      return self.bits
    if self.kind == "f":
      return reference.decode(self.bits, self.form)
    if self.kind == "i" and self.bits >> (self.size - 1):
      return self.bits - (1 << self.size)
    return self.bits

  def as_type(self, name):
    """`.u32` and the like: the bits, or fewer or more of them."""
    if name in NAMED:
      form = NAMED[name]
      if self.kind == "f" and self.form is not form and self.size >= form.size:
        return from_number(self.number, form)
      return Value(self.bits, form.size, "f", form)
    found = re.fullmatch(r"([uib])(\d+)", name)
    if not found:
      raise Unknown(f"type {name}")
    return Value(self.bits, int(found[2]), found[1])


def integer(number, size=32, kind="i"):
  return Value(int(number), size, kind)


def truth(flag):
  return Value(int(bool(flag)), 1, "u")


def from_number(number, form, rounding=reference.EVEN):
  return Value(reference.encode(number, form, rounding), form.size, "f", form)


TOKEN = re.compile(r"""
    (?P<space>\s+|//[^\n]*)
  | (?P<cast>\d+'(?:BF|[UIFB])(?=\s*\())
  | (?P<sized>\d+'-?(?:0x[0-9a-fA-F]+|\d+\.\d+|\d+)U?)
  | (?P<number>0x[0-9a-fA-F]+(?:ULL|LL|U|L)?|\d+\.\d+F?|\d+(?:ULL|LL|U|L)?)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op>\+:|\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||[-+*/|&^]=|.)
""", re.X)


def tokens_of(text):
  out = []
  for match in TOKEN.finditer(text):
    if match.lastgroup != "space":
      out.append((match.lastgroup, match[0]))
  return out


BINARY = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!=", "<>"],
          ["<", "<=", ">", ">="], ["<<", ">>"], ["+", "-"], ["*", "/"],
          ["**"]]


class Parser:
  """Pseudo-code to nested tuples."""

  def __init__(self, text):
    self.tokens = tokens_of(text)
    self.at = 0

  def peek(self, ahead=0):
    index = self.at + ahead
    return self.tokens[index][1] if index < len(self.tokens) else None

  def take(self, expected=None):
    token = self.peek()
    if token is None or (expected is not None and token != expected):
      raise Unknown(f"syntax: {token}, not {expected}")
    self.at += 1
    return token

  def block(self, *ends):
    out = []
    while self.peek() is not None and self.peek() not in ends:
      out.append(self.statement())
      while self.peek() == ";":
        self.take()
    return out

  def statement(self):
    token = self.peek()
    if token == "if":
      self.take()
      branches, otherwise = [], []
      condition = self.expression()
      self.take("then")
      branches.append((condition, self.block("elsif", "else", "endif")))
      while self.peek() == "elsif":
        self.take()
        condition = self.expression()
        self.take("then")
        branches.append((condition, self.block("elsif", "else", "endif")))
      if self.peek() == "else":
        self.take()
        otherwise = self.block("endif")
      self.take("endif")
      return "if", branches, otherwise
    if token == "for":
      self.take()
      name = self.take()
      self.take("in")
      first = self.expression()
      self.take(":")
      last = self.expression()
      self.take("do")
      body = self.block("endfor")
      self.take("endfor")
      return "for", name, first, last, body
    if token == "declare":
      self.take()
      name = self.take()
      self.take(":")
      kind = self.take()
      size = int(kind.split("'")[0]) if "'" in kind else 32
      while self.peek() not in (";", None):
        self.take()
      return "declare", name, size
    if token == "break":
      self.take()
      return ("break",)
    if token == "return":
      self.take()
      return "return", self.expression()
    if self.peek(1) == "=" and self.peek(2) == "lambda":
      name = self.take()
      self.take(), self.take(), self.take("(")
      names = []
      while self.peek() != ")":
        names.append(self.take())
        if self.peek() == ",":
          self.take()
      self.take(")")
      self.take("(")
      if self.peek() in ("if", "declare"):
        body = self.block(")")
      else:
        body = [("return", self.expression())]
      self.take(")")
      return "lambda", name, names, body
    target = self.unary()
    operator = self.take()
    if operator == "=":
      value = self.expression()
      if self.peek() == "=":  # a = b = c
        self.take()
        return "both", target, value, self.expression()
      return "set", target, value
    if len(operator) == 2 and operator[1] == "=":
      return "set", target, ("binary", operator[0], target, self.expression())
    raise Unknown(f"statement with {operator}")

  def expression(self):
    condition = self.binary(0)
    if self.peek() == "?":
      self.take()
      yes = self.expression()
      self.take(":")
      return "choose", condition, yes, self.expression()
    return condition

  def binary(self, level):
    if level == len(BINARY):
      return self.unary()
    left = self.binary(level + 1)
    while self.peek() in BINARY[level]:
      operator = self.take()
      left = ("binary", operator, left, self.binary(level + 1))
    return left

  def unary(self):
    if self.peek() in ("-", "~", "!", "+"):
      return "unary", self.take(), self.unary()
    return self.postfix()

  def postfix(self):
    kind = self.tokens[self.at][0] if self.peek() is not None else None
    token = self.take()
    if token == "(":
      node = self.expression()
      self.take(")")
    elif token == "{":
      parts = [self.expression()]
      while self.peek() == ",":
        self.take()
        parts.append(self.expression())
      self.take("}")
      node = ("join", parts)
    elif kind == "cast":
      size, to = token.split("'")
      self.take("(")
      node = ("cast", int(size), to, self.expression())
      self.take(")")
    elif kind == "sized":
      size, digits = token.split("'")
      size = int(size)
      if "." in digits:
        form = NAMED[f"f{size}"]
        node = ("value", from_number(fractions.Fraction(digits), form)
                if float(digits) else Value(0, size, "f", form))
      else:
        node = ("value", Value(int(digits.rstrip("U"), 0), size,
                               "u" if digits[-1] == "U" else "i"))
    elif kind == "number":
      node = ("value", self.literal(token))
    elif kind == "name":
      if self.peek() == "(":
        self.take()
        arguments = []
        while self.peek() != ")":
          arguments.append(self.expression())
          if self.peek() == ",":
            self.take()
        self.take(")")
        node = ("call", token, arguments)
      else:
        node = ("name", token)
    else:
      raise Unknown(f"token {token}")
    while self.peek() in (".", "["):
      if self.take() == ".":
        node = ("type", node, self.take())
        continue
      first = self.expression()
      if self.peek() == ":":
        self.take()
        node = ("range", node, first, self.expression())
      elif self.peek() == "+:":
        self.take()
        node = ("part", node, first, self.expression())
      else:
        node = ("index", node, first)
      self.take("]")
    return node

  def literal(self, token):
    if re.fullmatch(r"\d+\.\d+F?", token):
      form = reference.F32 if token[-1] == "F" else reference.F64
      number = fractions.Fraction(token.rstrip("F"))
      return from_number(number, form) if number else Value(
          0, form.size, "f", form)
    digits = re.match(r"0x[0-9a-fA-F]+|\d+", token)[0]
    suffix = token[len(digits):]
    number = int(digits, 0)
    size = 64 if "LL" in suffix else 32
    return Value(number, size, "u" if "U" in suffix else "i")


def own_register(lane, register):
  """Of VGPR[laneId][SRC0.u32] and VGPR[laneId][VDST.u32]."""
  if lane != ("name", "laneId"):
    raise Unknown("another lane's register")
  return {"SRC0": "S0", "VDST": "D0"}[register[1][1]]


class Return(Exception):
  pass


class Break(Exception):
  pass


class Machine:
  """Executes one lane."""

  def __init__(self, variables, depth=0):
    self.variables = variables
    self.functions = {}
    self.rounding = reference.EVEN
    self.depth = depth

  def run(self, block):
    for statement in block:
      getattr(self, "do_" + statement[0])(*statement[1:])

  def do_if(self, branches, otherwise):
    for condition, body in branches:
      if self.eval(condition).number:
        return self.run(body)
    return self.run(otherwise)

  def do_for(self, name, first, last, body):
    try:
      for i in range(self.eval(first).number, self.eval(last).number + 1):
        self.variables[name] = integer(i)
        self.run(body)
    except Break:
      pass

  def do_break(self):
    raise Break

  def do_return(self, value):
    raise Return(self.eval(value))

  def do_declare(self, name, size):
    if name not in ("S",):
      self.variables.setdefault(name, Value(0, size, "b"))

  def do_lambda(self, name, names, body):
    self.functions[name] = (names, body)

  def do_both(self, first, second, value):
    result = self.eval(value)
    self.assign(second, result)
    self.assign(first, result)

  def do_set(self, target, value):
    if target == ("name", "ROUND_MODE"):
      self.rounding = ROUNDINGS.get(value[1], reference.EVEN)
      return
    if target == ("name", "prev_mode"):
      return
    self.assign(target, self.eval(value))

  def assign(self, target, value):
    kind = target[0]
    if kind == "name":
      if target[1] in ("VCC", "EXEC"):
        raise Unknown("whole mask")
      old = self.variables.get(target[1])
      if target[1] == "D0":
        self.store("D0", 0, old.size, value)
      elif target[1] == "SCC":
        self.variables["SCC"] = truth(value.number)
      else:
        self.variables[target[1]] = value
      return
    if kind == "join":
      bits = value.bits
      for part in reversed(target[1]):
        assert part[0] == "type", part
        size = int(re.search(r"\d+", part[2])[0])
        self.assign(part, Value(bits, size, "b"))
        bits >>= size
      return
    name, low, size, form, reverse = self.place(target)
    if form is not None and value.kind in "fx" and (
        value.form is not form):
      value = from_number(value.number, form, self.rounding)
    if reverse:
      value = Value(int(f"{value.bits:0{size}b}"[::-1], 2), size, "b")
    self.store(name, low, size, value)

  def place(self, target):
    """(variable, lowest bit, size, float format) of an lvalue."""
    kind = target[0]
    if kind == "name":
      old = self.variables.get(target[1])
      return target[1], 0, old.size if old else None, None, False
    if kind == "type":
      name, low, size, _, reverse = self.place(target[1])
      form = NAMED.get(target[2])
      number = int(re.search(r"\d+", target[2])[0])
      if size is not None and target[1][0] != "name" and number != size:
        number = min(number, size)
      return name, low, number, form, reverse
    if kind == "index":
      inner = target[1]
      if inner[0] == "index" and inner[1] == ("name", "VGPR"):
        name = own_register(inner[2], target[2])
        return name, 0, self.variables[name].size, None, False
      if inner == ("name", "in"):
        name = f"in{self.eval(target[2]).number}"
        self.variables.setdefault(name, Value(0, 32, "b"))
        return name, 0, 32, None, False
      name, low, _, _, _ = self.place(inner)
      return name, low + self.eval(target[2]).number, 1, None, False
    if kind == "range":
      name, low, _, _, _ = self.place(target[1])
      high, begin = self.eval(target[2]).number, self.eval(target[3]).number
      reverse = high < begin
      high, begin = max(high, begin), min(high, begin)
      return name, low + begin, high - begin + 1, None, reverse
    raise Unknown(f"assignment to {kind}")

  def store(self, name, low, size, value):
    old = self.variables.get(name, Value(0, 64, "b"))
    if value.kind == "x":
      raise Unknown("an exact number to a register")
    mask = ((1 << size) - 1) << low
    bits = value.number if value.kind == "i" else value.bits
    bits = old.bits & ~mask | bits << low & mask
    total = max(old.size, low + size)
    self.variables[name] = Value(bits, total, old.kind if name not in (
        "D0",) else "b", old.form)
    if name in ("D0", "D1", "VCC"):
      self.variables["written " + name] = self.variables.get(
          "written " + name, 0) | mask

  # Expressions.

  def eval(self, node):
    return getattr(self, "of_" + node[0])(*node[1:])

  def of_value(self, value):
    return value

  def of_name(self, name):
    if name == "INF":
      return from_number(math.inf, reference.F64)
    if name == "NAN":
      return from_number(math.nan, reference.F64)
    if name not in self.variables:
      raise Unknown(f"name {name}")
    return self.variables[name]

  def of_type(self, node, name):
    if node == ("name", "WAVE_MODE"):
      if name != "IEEE":
        raise Unknown(f"mode {name}")
      return truth(asm.MODE >> 9 & 1)
    return self.eval(node).as_type(name)

  def of_index(self, node, at):
    if node == ("name", "S"):
      return self.eval(("name", f"S{self.eval(at).number}"))
    if node == ("name", "in"):
      return self.variables[f"in{self.eval(at).number}"]
    if node[0] == "index" and node[1] == ("name", "VGPR"):
      return self.variables[own_register(node[2], at)]
    return Value(self.eval(node).bits >> self.eval(at).number & 1, 1, "u")

  def of_range(self, node, high, low):
    value, high, low = (self.eval(x) for x in (node, high, low))
    high, low = high.number, low.number
    if high < low:
      bits = value.bits >> high & ((1 << (low - high + 1)) - 1)
      size = low - high + 1
      return Value(int(f"{bits:0{size}b}"[::-1], 2), size, "u")
    return Value(value.bits >> low, high - low + 1, "u")

  def of_part(self, node, low, size):
    low, size = self.eval(low).number, self.eval(size).number
    return Value(self.eval(node).bits >> low, size, "u")

  def of_join(self, parts):
    bits, size = 0, 0
    for part in parts:
      value = self.eval(part)
      bits = bits << value.size | value.bits
      size += value.size
    return Value(bits, size, "b")

  def of_cast(self, size, to, node):
    value = self.eval(node)
    if to in ("F", "BF"):
      form = NAMED[f"{to.lower()}{size}"]
      if value.kind == "x":
        return value
      if value.kind != "f":
        return Value(value.bits, size, "f", form)  # Bits.
      if value.form is form:
        return value
      number = value.number
      if isinstance(number, float) and math.isnan(number):
        # Keeps whether it is quiet.
        quiet = value.bits >> (value.form.mantissa - 1) & 1
        bits = form.nan if quiet else form.nan ^ 3 << (form.mantissa - 2)
        return Value(bits, size, "f", form)
      return from_number(number, form, self.rounding)
    if value.kind == "f" and to != "B":
      raise Unknown("a float as an integer")
    bits = value.bits if value.kind in "fb" else value.number
    return Value(bits, size, {"U": "u", "I": "i", "B": "b"}[to])

  def of_choose(self, condition, yes, no):
    return self.eval(yes if self.eval(condition).number else no)

  def of_unary(self, operator, node):
    value = self.eval(node)
    if operator == "+":
      return value
    if operator == "!":
      return truth(not value.number)
    if operator == "~":
      return Value(~value.bits, value.size, value.kind)
    if value.kind == "f":
      return Value(value.bits ^ 1 << (value.size - 1), value.size, "f",
                   value.form)
    return Value(-value.number, max(32, value.size), "i")

  def of_binary(self, operator, left, right):
    a = self.eval(left)
    if operator == "==" and right[0] == "unary" and right[1] in "+-":
      # As +0.0 and -0.0: zeros that differ.
      zero = self.eval(right)
      if zero.kind == "f" and zero.number == 0:
        return truth(a.number == 0 and a.bits >> (a.size - 1) == (
            zero.bits >> (zero.size - 1)))
    if operator == "&&":
      return truth(a.number and self.eval(right).number)
    if operator == "||":
      return truth(a.number or self.eval(right).number)
    b = self.eval(right)
    if operator in ("==", "!=", "<>", "<", "<=", ">", ">="):
      x, y = a.number, b.number
      nan = any(isinstance(v, float) and math.isnan(v) for v in (x, y))
      return truth({"==": x == y, "!=": x != y or nan,
                    "<>": not nan and x != y, "<": x < y, "<=": x <= y,
                    ">": x > y, ">=": x >= y}[operator])
    if operator == "**":
      power = max(-5000, min(5000, b.number))
      return Value(fractions.Fraction(a.number) ** power, 0, "x")
    if a.kind in "fx" or b.kind in "fx":
      function = {"+": lambda x, y: x + y, "-": lambda x, y: x - y,
                  "*": lambda x, y: x * y, "/": lambda x, y: x / y}[operator]
      return self.float_result(function, a, b)
    size = max(32, a.size, b.size)
    kind = "u" if "u" in (a.kind, b.kind) else "i"
    x, y = a.number, b.number
    if operator in ("<<", ">>"):
      size, kind = max(32, a.size), a.kind
      return Value(x << y if operator == "<<" else x >> y, size, kind)
    result = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y,
              "&": lambda: x & y, "|": lambda: x | y, "^": lambda: x ^ y,
              "/": lambda: x // y}[operator]()
    return Value(result, size, kind)

  def float_result(self, function, *values):
    formats = [v.form for v in values if v.kind == "f"]
    form = max(formats, key=lambda f: f.size)
    numbers = [v.number for v in values]
    finite = all(map(is_finite, numbers))
    exact = function(*map(fractions.Fraction, numbers)) if finite else 0
    if exact == 0:
      # Exact results are zero or there is an infinity or NaN: magnitudes do
      # not matter.
      tame = [float(n) if n == 0 or not is_finite(n) else 1.0 if n > 0 else
              -1.0 for n in numbers]
      if finite and 0 not in numbers:
        tame = [float(n) for n in numbers]
      with np.errstate(all="ignore"):
        exact = float(function(*map(np.float64, tame)))
      if finite and exact != 0 and not math.isinf(exact):
        exact = 0.0
    return from_number(exact, form, self.rounding)

  def of_call(self, name, arguments):
    if name in self.functions:
      names, body = self.functions[name]
      inner = Machine(dict(self.variables), self.depth)
      inner.functions = self.functions
      inner.variables.update(
          zip(names, [self.eval(a) for a in arguments], strict=True))
      try:
        inner.run(body)
      except Return as result:
        return result.args[0]
      raise Unknown(f"{name} returned nothing")
    values = [self.eval(a) for a in arguments]
    if method := getattr(self, "call_" + name, None):
      return method(*values)
    if re.fullmatch(r"[a-z]+\d+_to_[a-z]+\d+", name):
      return self.convert(*name.split("_to_"), values[0])
    if found := re.fullmatch(r"([a-z]+\d+)_to_([a-z]+\d+)_scale", name):
      value, scale = values
      number = value.as_type(found[1]).number
      if scale.bits == 255:  # E8M0's NaN
        number = math.nan
      power = fractions.Fraction(2) ** (scale.bits - 127)
      narrow = NAMED[found[2]].size < NAMED[found[1]].size
      if math.isfinite(number) and number != 0:
        number = number / power if narrow else number * power
      return from_number(number, NAMED[found[2]])
    if name.startswith("v_") and self.depth < 4:
      code = pseudocode().get(name)
      if code:
        machine = Machine({"D0": Value(0, 64, "b"), "SCC": truth(False)} | {
            f"S{i}": v for i, v in enumerate(values)}, self.depth + 1)
        machine.run(parsed(code[1]))
        kind = re.search(r"[fiu](16|32|64)$", name)
        return machine.variables["D0"].as_type(kind[0] if kind else "u32")
    raise Unknown(f"function {name}")

  def convert(self, source, target, value):
    value = value.as_type(source)
    if target in NAMED:
      number = value.number
      if source not in NAMED and number:
        number = fractions.Fraction(number)
      return from_number(number, NAMED[target], self.rounding) if (
          number or source in NAMED) else Value(
              0, NAMED[target].size, "f", NAMED[target])
    size, is_signed = int(target[1:]), target[0] == "i"
    low = -(1 << (size - 1)) if is_signed else 0
    high = (1 << (size - is_signed)) - 1
    number = value.number
    if isinstance(number, float):
      if math.isnan(number):
        number = 0
      elif math.isinf(number):
        number = high if number > 0 else low
    return integer(min(max(math.trunc(number), low), high), size, target[0])

  def call_fma(self, a, b, c):
    return self.float_result(lambda x, y, z: x * y + z, a, b, c)

  def call_abs(self, a):
    return Value(a.bits & ~(1 << (a.size - 1)), a.size, "f", a.form)

  def call_sign(self, a):
    return truth(a.bits >> (a.size - 1))

  def call_exponent(self, a):
    return integer(a.bits >> a.form.mantissa & ((1 << a.form.exponent) - 1))

  def call_isNAN(self, a):  # pylint: disable=invalid-name
    return truth(isinstance(a.number, float) and math.isnan(a.number))

  def call_isQuietNAN(self, a):  # pylint: disable=invalid-name
    quiet = a.bits >> (a.form.mantissa - 1) & 1
    return truth(self.call_isNAN(a).bits and quiet)

  def call_isSignalNAN(self, a):  # pylint: disable=invalid-name
    quiet = a.bits >> (a.form.mantissa - 1) & 1
    return truth(self.call_isNAN(a).bits and not quiet)

  def call_cvtToQuietNAN(self, a):  # pylint: disable=invalid-name
    return Value(a.bits | 1 << (a.form.mantissa - 1), a.size, "f", a.form)

  def call_trunc(self, a):
    number = a.number
    if not math.isfinite(number) or number == 0:
      return a
    whole = math.trunc(number)
    if whole == 0:
      return Value(a.bits & 1 << (a.size - 1), a.size, "f", a.form)
    return from_number(fractions.Fraction(whole), a.form)

  def call_floor(self, a):
    number = a.number
    if not math.isfinite(number) or number == 0:
      return a
    whole = math.floor(number)
    return from_number(fractions.Fraction(whole), a.form) if whole else Value(
        0, a.size, "f", a.form)

  def call_signext(self, a):
    if a.kind == "f":
      raise Unknown("signext of a float")
    value = Value(a.bits, a.size, "i").number
    return integer(value, 64)

  def call_signext_from_bit(self, a, size):
    n = size.number
    if n == 0:
      return integer(0, a.size)
    bits = a.bits & ((1 << n) - 1)
    if bits >> (n - 1) & 1:
      bits -= 1 << n
    return integer(bits, max(32, a.size))

  def call_ldexp(self, a, power):
    n = max(-5000, min(5000, power.number))
    return self.float_result(
        lambda x, y: x * y, a, Value(fractions.Fraction(2) ** n, 0, "x"))


_PARSED = {}


def parsed(text):
  if text not in _PARSED:
    parser = Parser(text)
    _PARSED[text] = parser.block()
  return _PARSED[text]


_PSEUDOCODE = {}


def pseudocode():
  """{mnemonic: (operands by field, pseudo-code)} in its shortest form."""
  if not _PSEUDOCODE:
    shapes = {}
    for op, fields in operands.OPERANDS.items():
      shapes[type(op).__name__, re.sub(r"_E(32|64)$", "", op.name)] = fields
    for form in FORMS:
      for op, text in str_pcode.PCODE.items():
        name = re.sub(r"_E(32|64)$", "", op.name)
        if type(op).__name__ == form and name.lower() not in _PSEUDOCODE:
          fields = shapes.get((form, name))
          if fields is not None:
            _PSEUDOCODE[name.lower()] = (form, text, fields)
  return _PSEUDOCODE


def type_of(field):
  """The type of samples for an operand."""
  form, size, _ = field
  name = form.name.removeprefix("FMT_NUM_").removeprefix("FMT_")
  if (found := re.fullmatch(r"PK(\d)_([FUIB]+)(\d+)", name)) and (
      int(found[3]) >= 8):
    kind = {"F": "f", "U": "u", "I": "i", "BF": "u", "B": "u"}[found[2]]
    return f"{found[1]}{kind}{found[3]}"
  if found := re.fullmatch(r"([FUI])(16|32|64)", name):
    return found[0].lower()
  if size in (16, 32, 64):
    return f"u{size}"
  if size < 32:
    return "u32"
  raise Unknown(f"operand {name} of {size} bits")


def skip_reason(mnemonic):
  for pattern, reason in SKIPPED.items():
    if re.search(pattern, mnemonic):
      return reason
  return None


class Case:
  """One mnemonic, prepared."""

  def __init__(self, mnemonic, form, text, fields, generator):
    self.mnemonic, self.form = mnemonic, form
    self.code = parsed(text)
    scalar = form.startswith("S")
    self.scalar = scalar
    names = ("ssrc0", "ssrc1") if scalar else (
        "src0", "vsrc1" if "vsrc1" in fields else "src1", "src2")
    self.sources = [fields[n] for n in names if n in fields]
    self.mask_source = (not scalar and len(self.sources) == 3
                        and self.sources[2][0].name == "FMT_NUM_M64")
    if self.mask_source:
      self.sources.pop()
    self.types = [type_of(f) for f in self.sources]
    dst = fields.get("sdst" if scalar else "vdst")
    self.dst = type_of(dst) if dst else None
    self.bfloat = bool(dst) and "BF16" in dst[0].name
    if form == "VOPCOp" or (dst and dst[0].name == "FMT_NUM_M64"):
      self.dst = None
    carry = "sdst" in fields and not scalar or "_co_" in mnemonic
    words = []
    if self.form == "VOPCOp":
      words.append("vcc")
    elif self.dst:
      words.append(self.register(128 if not scalar else 20, self.dst))
    if carry:
      words.append("vcc")
    for i, kind in enumerate(self.types):
      first = (32, 36)[i] if scalar else (32, 64, 96)[i]
      words.append(self.register(first, kind))
    if self.mask_source or mnemonic in ("v_cndmask_b32", "v_addc_co_u32",
                                        "v_subb_co_u32", "v_subbrev_co_u32"):
      words.append("vcc")
    self.body = f"{mnemonic} {', '.join(words)}"
    rows = 1 if not scalar else 64
    self.before = []
    for _ in range(rows if scalar else 3):
      state = asm.State(
          vcc=int(generator.integers(0, 2**63)), scc=int(generator.integers(2)))
      for i, kind in enumerate(self.types):
        lanes = instruction_test.samples(kind, generator, 3)
        lanes = lanes[generator.integers(3)]
        if scalar:
          value = lanes[generator.integers(64)]
          state.s[(32, 36)[i]] = np.array([int(
              np.atleast_1d(value).view(f"u{value.nbytes}")[0])], np.uint64)
        else:
          state.v[(32, 64, 96)[i]] = instruction_test.widen(lanes, generator)
      if scalar:
        state.s[20] = generator.integers(0, 2**63, 1, np.uint64)
      else:
        state.v[128] = generator.integers(0, 2**32, (64, 2), np.uint32)
      self.before.append(state)

  def register(self, first, kind):
    words = instruction_test.words_of(kind)
    return instruction_test.register("s" if self.scalar else "v", first, words)

  def snippet(self):
    if self.scalar:
      return asm.Snippet(self.body, self.before, s=[20, 21])
    return asm.Snippet(self.body, self.before, v=[128, 129])

  def size(self, kind):
    count, name = instruction_test.split(kind)
    return max(count * instruction_test.DTYPES[name]().itemsize * 8, 32)

  def variables(self, before, lane):
    out = {"SCC": truth(before.scc), "OPSEL": integer(0, 4, "u"),
           "OPSEL_HI": integer(0, 3, "u"), "laneId": integer(lane),
           "VCC": Value(before.vcc, 64, "b"),
           "EXEC": Value(before.exec, 64, "b"),
           "SDWA_SRC0_SEL": integer(6, 3, "u")}
    for i, name in enumerate(("BYTE0", "BYTE1", "BYTE2", "BYTE3", "WORD0",
                              "WORD1")):
      out[name] = integer(i, 3, "u")
    for i, kind in enumerate(self.types):
      size = self.size(kind)
      if self.scalar:
        bits = int(before.s[(32, 36)[i]][0])
      else:
        words = [instruction_test.vector_word(
            before, (32, 64, 96)[i] + w)[lane] for w in range(size // 32)]
        bits = sum(int(w) << 32 * j for j, w in enumerate(words))
      out[f"S{i}"] = Value(bits, size, "b")
    if self.mask_source:
      out[f"S{len(self.types)}"] = Value(before.vcc, 64, "b")
    if self.dst:
      if self.scalar:
        bits = int(before.s[20][0])
      else:
        low, high = before.v[128][lane]
        bits = int(low) | int(high) << 32
      out["D0"] = Value(bits, self.size(self.dst), "b")
    else:
      out["D0"] = Value(0, 64, "b")
    return out

  def check(self, after_states):
    """Yields what differs."""
    for before, after in zip(self.before, after_states, strict=True):
      for lane in range(1 if self.scalar else 64):
        machine = Machine(self.variables(before, lane))
        machine.run(self.code)
        told = " ".join(f"S{i}={machine.variables[f'S{i}'].bits:#x}"
                        for i in range(len(self.types)))
        written = machine.variables.get("written D0", 0)
        expected = machine.variables["D0"].bits
        if self.form == "VOPCOp":
          if (expected >> lane & 1) != (after.vcc >> lane & 1):
            yield f"lane {lane} {told}: {after.vcc >> lane & 1}"
          continue
        if self.dst:
          if self.scalar:
            actual = after.s[20] | after.s[21] << 32
          else:
            actual = int(after.v[128][lane]) | int(after.v[129][lane]) << 32
          if not self.equal(actual & written, expected & written):
            yield (f"{told}: {actual & written:#x}, not "
                   f"{expected & written:#x}")
            continue
        if self.scalar and after.scc != machine.variables["SCC"].bits:
          yield f"{told}: scc {after.scc}"
        for name in ("VCC", "D1"):
          if machine.variables.get("written " + name):
            bit = machine.variables[name].bits >> (
                lane if name == "VCC" else 0) & 1
            if (after.vcc >> lane & 1) != bit:
              yield f"{told}: carry {after.vcc >> lane & 1}"

  def equal(self, actual, expected):
    if actual == expected:
      return True
    count, name = instruction_test.split(self.dst)
    if name[0] != "f" and not self.bfloat:
      return False
    form = NAMED["bf16" if self.bfloat else name]
    for i in range(count):
      x, y = (v >> form.size * i & ((1 << form.size) - 1)
              for v in (actual, expected))
      both = [reference.decode(v, form) for v in (x, y)]
      if x != y and not all(isinstance(v, float) and math.isnan(v)
                            for v in both):
        return False
    return True


class PseudocodeTest(absltest.TestCase):

  def test_agrees(self):
    generator = np.random.default_rng(7)
    known = set(asm.mnemonics())
    reasons = collections.defaultdict(list)
    cases = []
    for mnemonic, (form, text, fields) in sorted(pseudocode().items()):
      if mnemonic not in known or "mfma" in mnemonic or "smfmac" in mnemonic:
        continue
      if reason := skip_reason(mnemonic):
        reasons[reason].append(mnemonic)
        continue
      try:
        cases.append(Case(mnemonic, form, text, fields, generator))
      except (Unknown, KeyError) as unknown:
        reasons[f"not parsed: {unknown}"].append(mnemonic)
    compared = 0
    results = asm.run([case.snippet() for case in cases])
    for case, result in zip(cases, results, strict=True):
      with self.subTest(case.mnemonic):
        if isinstance(result, asm.AssemblyError):
          self.fail(str(result))
        self.assertNotIsInstance(result, Exception, result)
        try:
          wrong = list(case.check(result))
        except Unknown as unknown:
          reasons[f"not executable: {unknown}"].append(case.mnemonic)
          continue
        compared += 1
        self.assertFalse(wrong, f"{case.body}: {len(wrong)} of "
                         f"{64 * len(case.before)}: {'; '.join(wrong[:3])}")
    print(f"{compared} opcodes agree or fail above; not compared:")
    for reason, names in sorted(reasons.items()):
      print(f"  {reason} ({len(names)}): {' '.join(names)}")
    self.assertGreater(compared, 300)


if __name__ == "__main__":
  absltest.main()
