# SPDX-License-Identifier: Apache-2.0
"""Draws docs/attention.svg, README's figure, from the tables in docs/data.

  python docs/figure.py

docs/data/loss.csv is the demo's (`build/build.py demo`), and
docs/data/attention.csv the benchmark's (`build/build.py bench`). The right half
shows the second one if it is there, else the difference of the two losses.
"""

import csv
import math
import pathlib

DOCS = pathlib.Path(__file__).absolute().parent
WIDTH, HEIGHT = 860, 320
BLUE, BLACK, GREY = "#4c72b0", "#222222", "#888888"


def text(x, y, words, size=12, anchor="middle", color=BLACK) -> str:
  return (
    f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" '
    f'text-anchor="{anchor}" fill="{color}">{words}</text>'
  )


def line(x0, y0, x1, y1, color=GREY, width=0.5) -> str:
  return (
    f'<line x1="{x0:.0f}" y1="{y0:.0f}" x2="{x1:.0f}" y2="{y1:.0f}" '
    f'stroke="{color}" stroke-width="{width}"/>'
  )


class Panel:
  """A set of axes: a rectangle and the values at its edges."""

  def __init__(self, left, width, x_range, y_range, title, x_label, log=False):
    self.x0, self.x1 = left, left + width
    self.y0, self.y1 = HEIGHT - 50, 40
    self.x_range, self.log = x_range, log
    self.y_range = [math.log10(y) for y in y_range] if log else y_range
    self.parts = [
      text((self.x0 + self.x1) / 2, 24, title, 14),
      text((self.x0 + self.x1) / 2, HEIGHT - 12, x_label),
      line(self.x0, self.y0, self.x1, self.y0, BLACK, 1),
    ]

  def x(self, value) -> float:
    low, high = self.x_range
    return self.x0 + (value - low) / (high - low) * (self.x1 - self.x0)

  def y(self, value) -> float:
    low, high = self.y_range
    value = math.log10(max(value, 1e-12)) if self.log else value
    return self.y0 + (value - low) / (high - low) * (self.y1 - self.y0)

  def ticks(self, xs, ys) -> None:
    for value, label in ys:
      y = self.y(value)
      self.parts += [
        line(self.x0, y, self.x1, y),
        text(self.x0 - 6, y + 4, label, 11, "end"),
      ]
    for value, label in xs:
      self.parts.append(text(self.x(value), self.y0 + 18, label, 11))

  def curve(self, values, color, width, opacity=1.0) -> None:
    points = " ".join(
      f"{self.x(i):.1f},{self.y(v):.1f}" for i, v in enumerate(values, 1)
    )
    self.parts.append(
      f'<polyline points="{points}" fill="none" stroke="{color}" '
      f'stroke-width="{width}" stroke-opacity="{opacity}" '
      'stroke-linejoin="round"/>'
    )


def legend(x, y, entries) -> list[str]:
  parts = []
  for i, (label, color, width) in enumerate(entries):
    at = y + 20 * i
    parts += [
      line(x, at, x + 24, at, color, width),
      text(x + 32, at + 4, label, 12, "start"),
    ]
  return parts


def loss_panels(rows: list[dict], with_difference: bool) -> list[str]:
  ours = [float(r["aiter"]) for r in rows]
  theirs = [float(r["jax"]) for r in rows]
  steps = len(rows)
  marks = [(s, str(s)) for s in range(steps // 5, steps + 1, steps // 5)]
  top = math.ceil(max(ours))
  panel = Panel(
    50, 350, (1, steps), (1, top), "A GPT trained twice: loss", "step"
  )
  panel.ticks(marks, [(y, str(y)) for y in range(1, top + 1)])
  panel.curve(ours, BLUE, 6, 0.5)
  panel.curve(theirs, BLACK, 1.2)
  parts = panel.parts + legend(
    150,
    60,
    [
      ("jax.experimental.aiter", BLUE, 6),
      ("jax.nn, jax.numpy", BLACK, 1.2),
    ],
  )
  if with_difference:
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    panel = Panel(
      490,
      350,
      (1, steps),
      (1e-8, 10.0),
      "Difference of the two losses",
      "step",
      log=True,
    )
    panel.ticks(marks, [(10.0**p, f"1e{p}") for p in range(-8, 2, 2)])
    panel.curve([max(g, 1e-8) for g in gaps], BLUE, 1.2)
    panel.curve(theirs, BLACK, 1.2)
    label = text(panel.x1 - 4, panel.y(5.0), "the loss itself", 12, "end")
    parts += [*panel.parts, label]
  return parts


def speed_panel(rows: list[dict]) -> list[str]:
  """Bars of TFLOP/s: a problem and pass in turn, ours beside cuDNN's."""
  bars = [("aiter", BLUE), ("cudnn", GREY)]
  wanted = ("d128", "d128_causal", "d64", "d64_causal", "gqa8_causal")
  speed = {
    (r["shape"], r["pass"], r["implementation"]): float(r["tflops"])
    for r in rows
  }
  groups = [
    (s, p)
    for p in ("forward", "backward")
    for s in wanted
    if (s, p, "aiter") in speed
  ]
  top = math.ceil(max(speed[*g, "aiter"] for g in groups) / 200 + 0.3) * 200
  panel = Panel(
    490, 350, (0, len(groups)), (0, top), "Attention on an H100, TFLOP/s", ""
  )
  panel.ticks([], [(y, str(y)) for y in range(0, top + 1, 200)])
  for i, (shape, which) in enumerate(groups):
    for j, (name, color) in enumerate(bars):
      value = speed.get((shape, which, name), 0.0)
      x, y = panel.x(i + 0.12 + 0.38 * j), panel.y(value)
      panel.parts.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" '
        f'width="{panel.x(0.36) - panel.x(0):.1f}" '
        f'height="{panel.y0 - y:.1f}" fill="{color}"/>'
      )
    for k, word in enumerate(
      (
        shape.split("_")[0],
        "causal" if "causal" in shape else "",
        {"forward": "fwd", "backward": "bwd"}[which],
      )
    ):
      panel.parts.append(
        text(panel.x(i + 0.5), panel.y0 + 13 + 12 * k, word, 9)
      )
  return panel.parts + legend(700, 56, [(n, c, 8) for n, c in bars])


def read(name: str) -> list[dict]:
  path = DOCS / "data" / name
  if not path.exists():
    return []
  with open(path, newline="") as f:
    return list(csv.DictReader(f))


def main() -> None:
  speed = read("attention.csv")
  parts = loss_panels(read("loss.csv"), with_difference=not speed)
  if speed:
    parts += speed_panel(speed)
  svg = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    'font-family="sans-serif">',
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    *parts,
    "</svg>",
    "",
  ]
  (DOCS / "attention.svg").write_text("\n".join(svg))


if __name__ == "__main__":
  main()
