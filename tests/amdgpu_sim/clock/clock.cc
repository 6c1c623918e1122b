// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/clock/clock.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <queue>
#include <utility>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/gpu/stats.h"

namespace amdgpu_sim {
namespace {

constexpr int kStalls = static_cast<int>(Stall::kCount);
// Of a report: places with the most stalls.
constexpr size_t kPlaces = 12;
// A unit that is busy for less of the time does not bound a launch.
constexpr double kBusy = 0.6;

const char* Path() {
  static const char* const path = std::getenv("AMDGPU_SIM_CLOCK");
  return path != nullptr && path[0] != '\0' ? path : nullptr;
}

// The latest launch.
struct Latest {
  std::mutex mutex;
  std::map<std::string, double> parameters;  // Changed ones.
  Device device = {};
  ClockLaunch launch;
  std::vector<GroupTrace> groups;
  std::string json;
  double longest = 0;  // Microseconds of the longest launch with an image.
};

Latest& GetLatest() {
  static Latest* const latest = new Latest;
  return *latest;
}

void WriteFile(const char* path, const char* mode, const std::string& text) {
  std::FILE* file = std::fopen(path, mode);
  if (file == nullptr) {
    std::fprintf(stderr, "amdgpu_sim: cannot write %s\n", path);
    return;
  }
  std::fputs(text.c_str(), file);
  std::fclose(file);
}

std::string Format(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

struct Use {
  const char* name;
  double share;  // Of the time.
};

// Work of all workgroups: those that end early have theirs, each other as much
// as the sampled one of those next to it.
std::vector<double> Works(const ClockLaunch& launch) {
  std::map<uint64_t, double> long_ones = launch.work;
  for (const auto& entry : launch.early) long_ones.erase(entry.first);
  const std::map<uint64_t, double>& samples =
      long_ones.empty() ? launch.work : long_ones;
  std::vector<double> works;
  works.reserve(launch.workgroups);
  auto after = samples.begin();
  for (uint64_t number = 0; number < launch.workgroups; ++number) {
    const auto early = launch.early.find(number);
    if (early != launch.early.end()) {
      works.push_back(early->second);
      continue;
    }
    while (after != samples.end() && after->first < number) ++after;
    auto nearest = after;
    if (after == samples.end() ||
        (after != samples.begin() &&
         number - std::prev(after)->first < after->first - number)) {
      --nearest;
    }
    works.push_back(nearest->second);
  }
  return works;
}

// The work of a workgroup, in the mean; 1 if they are even.
double Mean(const ClockLaunch& launch) {
  if (!Uneven(launch.work)) return 1;
  double sum = 0;
  for (double work : Works(launch)) sum += work;
  return sum / static_cast<double>(launch.workgroups);
}

// The most work of a traced one; 1 if they are even.
double Longest(const ClockLaunch& launch) {
  double most = 1;
  if (!Uneven(launch.work)) return most;
  for (uint64_t number : launch.traced) {
    most = std::max(most, launch.work.at(number));
  }
  return most;
}

// Workgroups that have more than next to nothing to do.
double Busy(const ClockLaunch& launch) {
  const double longest = Longest(launch);
  return static_cast<double>(launch.workgroups) -
         std::count_if(launch.early.begin(), launch.early.end(),
                       [&](const std::pair<const uint64_t, double>& one) {
                         return kMuch * one.second < longest;
                       });
}

// When the last one ends of workgroups that begin in order, each at the first
// of so many places that gets free.
double Makespan(const std::vector<double>& works, double places) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> free;
  double last = 0;
  for (double work : works) {
    double begin = 0;
    if (free.size() >= places) {
      begin = free.top();
      free.pop();
    }
    free.push(begin + work);
    last = std::max(last, begin + work);
  }
  return last;
}

// How workgroups use allocations.
std::vector<ClockLaunch::Traffic> TrafficOf(
    const Device& device, const ClockLaunch& launch,
    const std::vector<GroupTrace>& groups) {
  using Traffic = ClockLaunch::Traffic;
  constexpr double kPiece = 64;
  std::map<uint64_t, Traffic> found;  // By address.
  // Pieces in order; each allocation is looked up once.
  auto count = [&](std::vector<uint64_t>* pieces, double Traffic::* field) {
    std::sort(pieces->begin(), pieces->end());
    pieces->erase(std::unique(pieces->begin(), pieces->end()), pieces->end());
    Allocation allocation;
    for (uint64_t piece : *pieces) {
      const uint64_t address = piece * 64;
      if (address < allocation.base ||
          address >= allocation.base + allocation.size) {
        // It may have been freed since.
        if (!Memory::Get().Find(address, &allocation)) {
          allocation = Allocation();
          continue;
        }
      }
      Traffic& traffic = found[allocation.base];
      traffic.base = allocation.base;
      traffic.size = static_cast<double>(allocation.size);
      traffic.*field += kPiece;
    }
  };
  auto add = [](std::vector<uint64_t>* all, const std::vector<uint64_t>& some) {
    all->insert(all->end(), some.begin(), some.end());
  };
  std::vector<uint64_t> all;
  for (const GroupTrace& group : groups) {
    std::vector<uint64_t> pieces;
    for (const WaveTrace& wave : group.waves) add(&pieces, wave.lines);
    count(&pieces, &Traffic::asked);
    add(&all, pieces);
  }
  count(&all, &Traffic::touched);
  all.clear();
  std::vector<std::vector<uint64_t>> dies(static_cast<size_t>(device.dies));
  for (const auto& [number, first] : launch.first) {
    std::vector<uint64_t> pieces = first;
    count(&pieces, &Traffic::first);
    add(&dies[number % dies.size()], pieces);
  }
  for (std::vector<uint64_t>& pieces : dies) {
    count(&pieces, &Traffic::first_dies);
    add(&all, pieces);
  }
  count(&all, &Traffic::first_all);
  std::vector<Traffic> traffic;
  for (const auto& entry : found) traffic.push_back(entry.second);
  return traffic;
}

std::vector<Use> Uses(const Device& device, const ClockReport& report) {
  const UnitReport& unit = report.unit;
  const double all = unit.clocks > 0 ? unit.clocks : 1;
  return {
      {"matrix", unit.matrix / (device.simds * all)},
      {"vector", unit.vector / (device.simds * all)},
      {"scalar", unit.scalar / (device.simds * all)},
      {"lds", unit.lds / all},
      {"l1", unit.memory / all},
      {"memory", unit.behind / all},
  };
}

// Places by the clocks that waves stalled there.
std::vector<const UnitReport::Place*> Worst(const UnitReport& unit) {
  auto stalled = [](const UnitReport::Place* place) {
    double sum = 0;
    for (int i = 1; i < kStalls; ++i) sum += place->stalls[i];
    return sum;
  };
  std::vector<const UnitReport::Place*> places;
  for (const auto& entry : unit.places) places.push_back(&entry.second);
  std::stable_sort(places.begin(), places.end(),
                   [&](const UnitReport::Place* a, const UnitReport::Place* b) {
                     return stalled(a) > stalled(b);
                   });
  if (places.size() > kPlaces) places.resize(kPlaces);
  return places;
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c == '\t' || c == '\n' ? ' ' : c;
  }
  return quoted + "\"";
}

}  // namespace

bool ClockEnabled() { return Path() != nullptr; }

bool ClockOnly() {
  static const bool only = std::getenv("AMDGPU_SIM_CLOCK_ONLY") != nullptr;
  return only && ClockEnabled();
}

void Tracer::Add(const Wave& wave, const Inst& inst, const Lds::Record* lds) {
  WaveTrace& trace = trace_.waves[wave.index];
  if (!trace.events.empty()) {
    Event& before = trace.events.back();
    before.jumped = before.inst->inst_class == InstClass::kBranch &&
                    before.inst->pc + before.inst->bytes != inst.pc;
  }
  Event event;
  event.inst = &inst;
  if (lds != nullptr) {
    const LdsCost cost = CostOf(*lds, wave.arch);
    event.lds_clocks = static_cast<uint16_t>(cost.cycles);
    event.lds_conflicts = static_cast<uint16_t>(cost.conflicts);
    event.lds_write = lds->write;
  }
  if (!log_.empty()) {
    std::sort(log_.begin(), log_.end());
    log_.erase(std::unique(log_.begin(), log_.end()), log_.end());
    event.first_line = static_cast<uint32_t>(trace.lines.size());
    event.lines = static_cast<uint16_t>(log_.size());
    event.atomic = std::strstr(inst.mnemonic, "_atomic_") != nullptr;
    event.write =
        event.atomic || (inst.dst[0].kind == Operand::Kind::kNone && !inst.lds);
    trace.lines.insert(trace.lines.end(), log_.begin(), log_.end());
    log_.clear();
  }
  trace.events.push_back(event);
}

int Occupancy(const Device& device, const ClockLaunch& launch) {
  const double registers = std::ceil(launch.vector_registers / 8.0) * 8;
  const double waves = std::min(
      device.waves_per_simd, std::floor(device.vector_registers / registers));
  double groups = std::floor(waves * device.simds / launch.waves);
  if (launch.lds_bytes > 0) {
    groups = std::min(groups, std::floor(device.lds_bytes / launch.lds_bytes));
  }
  return std::max(1, static_cast<int>(groups));
}

uint64_t FirstRound(const Device& device, const ClockLaunch& launch) {
  const double most = device.compute_units * Occupancy(device, launch);
  return std::min(launch.workgroups, static_cast<uint64_t>(most));
}

Behind BehindL1(const Device& device, const ClockLaunch& launch, double units) {
  // As much work as the traced ones have, in the whole launch.
  const double times = static_cast<double>(launch.workgroups) /
                       std::max<double>(1, launch.traced.size()) *
                       Mean(launch) / Longest(launch);
  const double dies = std::min<double>(device.dies, launch.workgroups);
  struct Flow {
    uint64_t base;
    double asked, once;  // Bytes: by all workgroups, and as if one had a cache.
    double die, all;     // Of `asked`, what no other asks for at that time: no
                         // other of the die, and of all.
  };
  std::vector<Flow> flows;
  double footprint = 0, footprint_of_die = 0;
  double asked = 0, asked_of_die = 0, asked_of_all = 0;  // As in a flow.
  for (const ClockLaunch::Traffic& t : launch.traffic) {
    Flow f = {t.base, std::max(1.0, t.asked * times), 0, 0, 0};
    f.once = std::min({t.size, t.touched * times, f.asked});
    if (t.first > 0) {
      f.die = t.first_dies / t.first;
      f.all = t.first_all / t.first;
    } else {
      f.die = std::min(1.0, dies * f.once / f.asked);
      f.all = f.once / f.asked;
    }
    footprint += f.once;
    footprint_of_die += std::min(f.once, f.die * f.asked / dies);
    asked += f.asked;
    asked_of_die += f.die * f.asked;
    asked_of_all += f.all * f.asked;
    flows.push_back(f);
  }
  // A cache keeps what it has room for until it is asked for again.
  auto lost = [](double footprint, double bytes) {
    return 1 - std::min(1.0, bytes / std::max(1.0, footprint));
  };
  const double l2_lost = lost(footprint_of_die, device.l2_bytes);
  const double mall_lost = lost(footprint, device.mall_bytes);
  auto misses = [](double least, double most, double lost) {
    least = std::min(least, most);
    return least + (most - least) * lost;
  };

  // Clocks of a byte that a unit gets of a rate that all share.
  auto shared = [&](double gigabytes) {
    return std::max(1 / device.l2_rate,
                    units * device.gigahertz * device.sustained / gigabytes);
  };
  // Others that are busy, by those that load the device.
  const double load = std::min(
      1.0, (units - 1) / (device.loaded_share * (device.compute_units - 1)));
  auto latency = [&](double idle, double loaded) {
    return idle + (loaded - idle) * load;
  };
  const double l2_latency = latency(device.l2_idle, device.l2_latency);
  const double mall_latency = latency(device.mall_idle, device.mall_latency);
  const double hbm_latency = latency(device.hbm_idle, device.hbm_latency);
  auto source = [&](double die, double all) {
    const double l2 = 1 - die, mall = die - all;
    return Source{
        l2 * l2_latency + mall * mall_latency + all * hbm_latency,
        l2 / device.l2_rate + mall * shared(device.mall_gigabytes) +
            all * shared(device.hbm_gigabytes * device.hbm_efficiency),
        all};
  };
  Behind behind;
  behind.l2 = source(0, 0);
  behind.mall = source(1, 0);
  behind.hbm = source(1, 1);
  // Of each byte that units ask for, so much is new to a cache.
  auto kept = [&](double bytes, double units, double news) {
    return bytes / std::max(1.0, units * news / std::max(1.0, asked));
  };
  behind.l2_bytes =
      kept(device.l2_bytes, units / std::min(units, device.dies), asked_of_die);
  behind.mall_bytes = kept(device.mall_bytes, units, asked_of_all);
  behind.sources[0] = behind.hbm;  // What was freed since.
  for (const Flow& f : flows) {
    const double die = misses(dies * f.once / f.asked, f.die, l2_lost);
    const double all = misses(f.once / f.asked, f.all, mall_lost);
    behind.sources[f.base / 64] = source(die, std::min(die, all));
  }
  behind.atomic_clocks =
      std::max(1 / device.l1_rate,
               units / std::min(units, device.dies) / device.atomic_rate);
  return behind;
}

std::vector<uint64_t> Traced(const Device& device, const ClockLaunch& launch) {
  std::vector<uint64_t> numbers;
  const uint64_t units = static_cast<uint64_t>(device.compute_units);
  for (int i = 0; i < Occupancy(device, launch); ++i) {
    if (i * units < launch.workgroups) numbers.push_back(i * units);
  }
  return numbers;
}

std::vector<uint64_t> Sampled(uint64_t workgroups, int count) {
  // Steps of the golden ratio spread any number of them evenly. The step is
  // odd, so that 32 samples also meet all positions of rows of 32, 16 and so
  // on.
  const uint64_t step =
      static_cast<uint64_t>(static_cast<double>(workgroups) * 0.6180339887) | 1;
  std::vector<uint64_t> numbers;
  for (int i = 0; i < count && i < static_cast<double>(workgroups); ++i) {
    numbers.push_back(i * step % workgroups);
  }
  return numbers;
}

bool Uneven(const std::map<uint64_t, double>& work) {
  constexpr double kEven = 1.05;
  double least = HUGE_VAL, most = 0;
  for (const auto& [number, count] : work) {
    least = std::min(least, count);
    most = std::max(most, count);
  }
  return most > kEven * least;
}

ClockReport Estimate(const Device& device, const ClockLaunch& launch,
                     const std::vector<const GroupTrace*>& groups,
                     bool timeline) {
  ClockReport report;
  report.occupancy = Occupancy(device, launch);
  const double round = device.compute_units * report.occupancy;
  const double full = std::floor(launch.workgroups / round);
  const double rest = launch.workgroups - full * round;
  size_t reported = 0;  // Workgroups in the report's unit.
  auto run = [&](double count, double units) {
    const size_t some =
        std::min<size_t>(groups.size(), static_cast<size_t>(count));
    if (reported == 0) reported = some;
    const Behind behind = BehindL1(device, launch, units);
    return RunUnit(device, behind, {groups.begin(), groups.begin() + some},
                   timeline && report.unit.clocks == 0);
  };
  double clocks = 0, matrix = 0;
  auto add = [&](UnitReport unit, double times, double units) {
    clocks += times * unit.clocks;
    matrix += times * unit.matrix * units / device.compute_units;
    // The fuller one comes first.
    if (report.unit.clocks == 0) report.unit = std::move(unit);
  };
  if (Uneven(launch.work)) {
    const double units =
        std::min<double>(launch.workgroups, device.compute_units);
    const double held = std::min<double>(
        report.occupancy, std::ceil(launch.workgroups / device.compute_units));
    report.rounds = Makespan(Works(launch), units * held) / Longest(launch);
    // Those with nothing to do leave their places, and memory, to others.
    const double busy = std::clamp(std::ceil(Busy(launch) / held), 1.0, units);
    add(run(held, busy), report.rounds, busy);
  } else {
    const double all = device.compute_units, some = std::min(rest, all);
    if (full > 0) add(run(report.occupancy, all), full, all);
    if (rest > 0) add(run(std::ceil(rest / all), some), 1, some);
    report.rounds = full + (rest > 0 ? 1 : 0);
  }
  report.clocks = clocks;
  const double share = clocks > 0 ? matrix / (device.simds * clocks) : 0;
  report.matrix_share = share;
  report.gigahertz =
      device.gigahertz * (device.sustained - device.throttle * share * share);
  report.microseconds =
      device.launch_microseconds + clocks / (1000 * report.gigahertz);
  // All workgroups for those of the report's unit, by what there is to do.
  const double times = static_cast<double>(launch.workgroups) /
                       std::max<size_t>(1, reported) * Mean(launch) /
                       Longest(launch);
  report.teraflops = times * report.unit.operations / report.microseconds / 1e6;
  report.hbm_gigabytes =
      times * report.unit.hbm_bytes / report.microseconds / 1e3;

  Use most = {"", 0};
  for (const Use& use : Uses(device, report)) {
    if (use.share > most.share) most = use;
  }
  if (most.share >= kBusy) {
    report.bound = most.name;
  } else {
    int worst = 1;
    for (int i = 1; i < kStalls; ++i) {
      if (report.unit.stalls[i] > report.unit.stalls[worst]) worst = i;
    }
    report.bound =
        std::string("latency: ") + StallName(static_cast<Stall>(worst));
  }
  return report;
}

std::string ClockText(const Device& device, const ClockLaunch& launch,
                      const ClockReport& report) {
  const UnitReport& unit = report.unit;
  std::string text = "amdgpu_sim clock: " + launch.kernel + " on " +
                     device.name + ": " +
                     Format("%.1f us predicted", report.microseconds) +
                     ", bound by " + report.bound + "\n";
  text += Format("  %.0f workgroups", launch.workgroups) +
          Format(", %.0f a compute unit", report.occupancy) +
          Format(", %.3g rounds", report.rounds) +
          Format(", %.0f clocks", report.clocks) +
          Format(" at %.2f GHz\n", report.gigahertz) +
          Format("  %.4g TFLOP/s of matrix instructions", report.teraflops) +
          Format(", %.4g GB/s of HBM\n", report.hbm_gigabytes) + "  busy:";
  for (const Use& use : Uses(device, report)) {
    text += std::string(" ") + use.name + Format(" %.1f%%", 100 * use.share);
  }
  text += Format("; bank conflicts %.0f clocks\n", unit.lds_conflicts);
  double all = 0;
  for (double stall : unit.stalls) all += stall;
  text += "  waves:";
  for (int i = 0; i < kStalls; ++i) {
    if (unit.stalls[i] == 0) continue;
    text += std::string(" ") + StallName(static_cast<Stall>(i)) +
            Format(" %.1f%%", 100 * unit.stalls[i] / all);
  }
  text += "\n";
  for (const UnitReport::Place* place : Worst(unit)) {
    std::string stalls;
    for (int i = 1; i < kStalls; ++i) {
      if (place->stalls[i] == 0) continue;
      stalls += std::string(" ") + StallName(static_cast<Stall>(i)) +
                Format(" %.0f", place->stalls[i]);
    }
    if (stalls.empty()) break;
    text += "    " + std::string(place->inst->text) +
            Format(" x%.0f:", place->count) + stalls + "\n";
  }
  return text;
}

std::string ClockJson(const Device& device, const ClockLaunch& launch,
                      const ClockReport& report) {
  const UnitReport& unit = report.unit;
  std::string json = "{\"kernel\": " + Quoted(launch.kernel) +
                     ", \"device\": " + Quoted(device.name) +
                     ", \"bound\": " + Quoted(report.bound);
  auto number = [&](const char* name, double value) {
    json += std::string(", \"") + name + "\": " + Format("%.17g", value);
  };
  auto stalls = [](const double* clocks) {
    std::string list = "{";
    for (int i = 0; i < kStalls; ++i) {
      if (clocks[i] == 0) continue;
      if (list.size() > 1) list += ", ";
      list += Quoted(StallName(static_cast<Stall>(i))) +
              Format(": %.17g", clocks[i]);
    }
    return list + "}";
  };
  number("microseconds", report.microseconds);
  number("teraflops", report.teraflops);
  number("hbm_gigabytes", report.hbm_gigabytes);
  number("gigahertz", report.gigahertz);
  number("clocks", report.clocks);
  number("matrix_share", report.matrix_share);
  number("workgroups", launch.workgroups);
  number("occupancy", report.occupancy);
  number("rounds", report.rounds);
  number("unit_clocks", unit.clocks);
  number("lds_conflicts", unit.lds_conflicts);
  number("l1_bytes", unit.l1_bytes);
  number("memory_bytes", unit.memory_bytes);
  json += ", \"busy\": {";
  for (const Use& use : Uses(device, report)) {
    if (json.back() != '{') json += ", ";
    json += Quoted(use.name) + Format(": %.17g", use.share);
  }
  json += "}, \"stalls\": " + stalls(unit.stalls) + ", \"places\": [";
  for (const UnitReport::Place* place : Worst(unit)) {
    if (json.back() != '[') json += ", ";
    json += "{\"text\": " + Quoted(place->inst->text) +
            Format(", \"count\": %.17g", place->count) +
            ", \"stalls\": " + stalls(place->stalls) + "}";
  }
  return json + "]}";
}

void AddClock(const Device& device, const ClockLaunch& launch,
              std::vector<GroupTrace> groups) {
  Latest& latest = GetLatest();
  std::lock_guard<std::mutex> lock(latest.mutex);
  latest.device = device;
  for (const auto& [name, value] : latest.parameters) {
    *Parameter(&latest.device, name) = value;
  }
  latest.launch = launch;
  latest.launch.traffic = TrafficOf(latest.device, latest.launch, groups);
  latest.launch.first.clear();
  latest.groups = std::move(groups);
  std::vector<const GroupTrace*> all;
  for (const GroupTrace& group : latest.groups) all.push_back(&group);
  const char* const svg = std::getenv("AMDGPU_SIM_CLOCK_SVG");
  const ClockReport report =
      Estimate(latest.device, latest.launch, all, svg != nullptr);
  latest.json = ClockJson(latest.device, latest.launch, report);
  if (svg != nullptr && report.microseconds > latest.longest) {
    latest.longest = report.microseconds;
    WriteFile(svg, "w", ClockSvg(latest.device, latest.launch, report));
  }
  if (std::string(Path()) == "-") {
    std::fputs(ClockText(latest.device, launch, report).c_str(), stderr);
    return;
  }
  WriteFile(Path(), "a", latest.json + "\n");
}

}  // namespace amdgpu_sim

#define AMDGPU_SIM_PUBLIC extern "C" __attribute__((visibility("default")))

AMDGPU_SIM_PUBLIC const char* amdgpu_sim_clock() {
  return amdgpu_sim::GetLatest().json.c_str();
}

AMDGPU_SIM_PUBLIC int amdgpu_sim_clock_set(const char* parameter,
                                           double value) {
  amdgpu_sim::Latest& latest = amdgpu_sim::GetLatest();
  std::lock_guard<std::mutex> lock(latest.mutex);
  double* number = amdgpu_sim::Parameter(&latest.device, parameter);
  if (number == nullptr) return 0;
  *number = value;
  latest.parameters[parameter] = value;
  return 1;
}

AMDGPU_SIM_PUBLIC const char* amdgpu_sim_clock_again() {
  amdgpu_sim::Latest& latest = amdgpu_sim::GetLatest();
  std::lock_guard<std::mutex> lock(latest.mutex);
  std::vector<const amdgpu_sim::GroupTrace*> all;
  for (const auto& group : latest.groups) all.push_back(&group);
  const auto report = amdgpu_sim::Estimate(latest.device, latest.launch, all);
  latest.json = amdgpu_sim::ClockJson(latest.device, latest.launch, report);
  return latest.json.c_str();
}
