// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdio>
#include <string>

#include "tests/amdgpu_sim/clock/clock.h"

namespace amdgpu_sim {
namespace {

// Of the image, in its units: one for a clock. The first clocks of a launch are
// not what most of it looks like.
constexpr double kWidth = 2400, kRow = 22, kLeft = 90, kTop = 60;

struct Colour {
  const char* name;
  const char* fill;
};

Colour ColourOf(const UnitReport::Span& span) {
  if (span.stall != Stall::kNone) return {"waits", "#e8e8e8"};
  switch (span.inst->inst_class) {
    case InstClass::kMfma:
      return {"matrix", "#c0392b"};
    case InstClass::kValu:
      return {"vector", "#2e6fb7"};
    case InstClass::kTrans:
      return {"transcendental", "#7d4fb2"};
    case InstClass::kLds:
      return {"LDS", "#2f9e5b"};
    case InstClass::kGlobal:
    case InstClass::kScratch:
      return {"memory", "#e08e1b"};
    default:
      return {"scalar and others", "#8c8c8c"};
  }
}

std::string Escaped(const std::string& text) {
  std::string escaped;
  for (char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\t':
      case '\n':
        escaped += ' ';
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string Rect(double x, double y, double width, const char* fill,
                 const std::string& title) {
  char text[128];
  std::snprintf(text, sizeof(text),
                "<rect x=\"%.6g\" y=\"%.6g\" width=\"%.6g\" height=\"%.6g\" ",
                x, y, width, kRow - 4);
  return std::string(text) + "fill=\"" + fill + "\"><title>" + title +
         "</title></rect>\n";
}

std::string Text(double x, double y, const std::string& text) {
  char head[64];
  std::snprintf(head, sizeof(head), "<text x=\"%.6g\" y=\"%.6g\">", x, y);
  return head + Escaped(text) + "</text>\n";
}

}  // namespace

std::string ClockSvg(const Device& device, const ClockLaunch& launch,
                     const ClockReport& report) {
  const UnitReport& unit = report.unit;
  const double first = std::max(0.0, (unit.clocks - kWidth) / 2);
  const double last = std::min(unit.clocks, first + kWidth);
  int waves = 0;
  for (const UnitReport::Span& span : unit.timeline) {
    waves = std::max(waves, span.wave + 1);
  }
  char text[256];
  std::snprintf(text, sizeof(text),
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.6g\" "
                "height=\"%.6g\" font-family=\"sans-serif\" "
                "font-size=\"12\">\n",
                kLeft + kWidth + 10, kTop + kRow * waves + 10);
  std::string svg = text;
  std::snprintf(text, sizeof(text),
                ": clocks %.0f to %.0f of %.0f of one compute unit, predicted",
                first, last, unit.clocks);
  svg += Text(kLeft, 18, launch.kernel + " on " + device.name + text);
  double legend = kLeft;
  std::string named;
  std::string rects;
  for (const UnitReport::Span& span : unit.timeline) {
    const double begin = std::max(span.begin, first);
    const double end = std::min(span.end, last);
    if (begin >= end) continue;
    const Colour colour = ColourOf(span);
    std::string title = Escaped(std::string(span.inst->text));
    if (span.stall != Stall::kNone) {
      title = std::string(StallName(span.stall)) + ", before " + title;
    }
    rects += Rect(kLeft + begin - first, kTop + kRow * span.wave, end - begin,
                  colour.fill, title);
    if (named.find(std::string(colour.name) + ";") == std::string::npos) {
      named += std::string(colour.name) + ";";
      svg += Rect(legend, 28, 14, colour.fill, colour.name);
      svg += Text(legend + 20, 42, colour.name);
      legend += 150;
    }
  }
  const int simds = static_cast<int>(device.simds);
  for (int wave = 0; wave < waves; ++wave) {
    const int own = wave % launch.waves;
    std::snprintf(text, sizeof(text), "%d.%d, SIMD %d", wave / launch.waves,
                  own, own % simds);
    svg += Text(4, kTop + kRow * wave + 13, text);
  }
  return svg + rects + "</svg>\n";
}

}  // namespace amdgpu_sim
