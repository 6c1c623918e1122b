// SPDX-License-Identifier: Apache-2.0

// The model of time: what a launch would take. Off unless AMDGPU_SIM_CLOCK is
// set; it never changes what a launch computes.
#ifndef AMDGPU_SIM_CLOCK_CLOCK_H_
#define AMDGPU_SIM_CLOCK_CLOCK_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/clock/device.h"
#include "tests/amdgpu_sim/clock/trace.h"
#include "tests/amdgpu_sim/clock/unit.h"
#include "tests/amdgpu_sim/gpu/lds.h"

namespace amdgpu_sim {

// Whether AMDGPU_SIM_CLOCK is set. It is "-", for a report on stderr, or a file
// that gets one line of JSON a launch.
bool ClockEnabled();
// AMDGPU_SIM_CLOCK_ONLY: workgroups that the model does not look at are not
// executed, and their results not computed.
bool ClockOnly();

// Makes a trace of workgroups as they are executed.
class Tracer {
 public:
  explicit Tracer(int waves) { trace_.waves.resize(waves); }

  // An instruction after it was executed. `lds` is its access to LDS, or null.
  void Add(const Wave& wave, const Inst& inst, const Lds::Record* lds);
  // Where the memory's view writes pieces of 64 bytes that are accessed.
  std::vector<uint64_t>* log() { return &log_; }
  const GroupTrace& trace() const { return trace_; }

 private:
  GroupTrace trace_;
  std::vector<uint64_t> log_;
};

// What the model needs to know of a launch beside its traces.
struct ClockLaunch {
  std::string kernel, arch;
  uint64_t workgroups = 0;
  int waves = 0;             // Of a workgroup.
  int vector_registers = 0;  // Of a lane, v and a.
  uint32_t lds_bytes = 0;    // Of a workgroup.

  // Of an allocation.
  struct Traffic {
    uint64_t base = 0;
    double size = 0;     // Bytes.
    double touched = 0;  // Of them, by one or more of the traced workgroups,
    double asked = 0;    // and by each of them, added.
    // What the first round's workgroups ask for at first: all of them, added,
    // by those of each die, added, and by one or more of all.
    double first = 0, first_dies = 0, first_all = 0;
  };
  std::vector<Traffic> traffic;
  std::vector<uint64_t> traced;  // Workgroups.
  // Instructions of some workgroups, by their numbers, and of all that end
  // before kEarly of them.
  std::map<uint64_t, double> work, early;
  // Pieces of 64 bytes that each workgroup of the first round accesses before
  // kFirst of its instructions.
  std::map<uint64_t, std::vector<uint64_t>> first;
};

// What is behind the L1 while so many compute units are busy. Workgroups are
// given to the dies one after another. Those of the first round tell by what
// they ask for at first how much of an allocation others of their die ask for
// at the same time, and others of all dies: that comes once. From round to
// round an L2, and the last-level cache, keep as much as they have room for.
// What a workgroup asks for again they still have if the unit's share of them
// has room for all that it asked for since. Latencies grow from those of an
// idle device with the other units that are busy, until so many load it.
Behind BehindL1(const Device& device, const ClockLaunch& launch, double units);

// How many workgroups a compute unit holds; at least one.
int Occupancy(const Device& device, const ClockLaunch& launch);
// How many workgroups all compute units hold at once.
uint64_t FirstRound(const Device& device, const ClockLaunch& launch);
// The workgroups to trace: those that the first compute unit holds at once. Of
// one that has hardly anything to do the next one takes the place.
std::vector<uint64_t> Traced(const Device& device, const ClockLaunch& launch);
// Workgroups all over the launch, whose instructions are counted: `count` of
// them or, if there are fewer, all.
std::vector<uint64_t> Sampled(uint64_t workgroups, int count);
// How many are: more if the first few differ.
constexpr int kProbes = 4, kSamples = 32;
// A workgroup that finds nothing to do ends before so many instructions.
constexpr uint64_t kEarly = 1024;
// So many times less than the longest one's are next to nothing.
constexpr double kMuch = 8;
// One has told by so many what it shares with others.
constexpr uint64_t kFirst = 4096;
// Whether `work` differs so much that workgroups are no rounds.
bool Uneven(const std::map<uint64_t, double>& work);

struct ClockReport {
  double microseconds = 0;
  // A second: of matrix instructions as executed, and of HBM.
  double teraflops = 0, hbm_gigabytes = 0;
  double gigahertz = 0;  // Of the compute units, under this load.
  double clocks = 0;     // Of the launch, without what the host sees before it.
  double matrix_share =
      0;  // Of them, those in which the matrix units are busy.
  int occupancy = 0;
  double rounds = 0;  // Of workgroups, one after another.
  std::string bound;  // What it is bound by.
  UnitReport unit;    // Of a compute unit that holds as many as it can.
};
// `groups` are traces of Traced(). The largest part of the workgroups comes in
// rounds that fill all compute units, what is left in one of its own. Uneven
// ones come one by one, in order, wherever the first place gets free; each that
// did not end early is as long as the sampled one of these whose number is next
// to its own. No unit is kept busy by those that have next to nothing to do.
ClockReport Estimate(const Device& device, const ClockLaunch& launch,
                     const std::vector<const GroupTrace*>& groups,
                     bool timeline = false);

std::string ClockText(const Device& device, const ClockLaunch& launch,
                      const ClockReport& report);
std::string ClockJson(const Device& device, const ClockLaunch& launch,
                      const ClockReport& report);
// The waves of the compute unit side by side, for some clocks in the middle of
// the launch: an SVG image. Of a report with a timeline.
std::string ClockSvg(const Device& device, const ClockLaunch& launch,
                     const ClockReport& report);

// Estimates a launch that has ended, and reports. AMDGPU_SIM_CLOCK_SVG names
// the file of the image, which is that of the longest launch.
void AddClock(const Device& device, const ClockLaunch& launch,
              std::vector<GroupTrace> groups);

}  // namespace amdgpu_sim

// The latest launch's JSON, or "".
extern "C" const char* amdgpu_sim_clock();
// Changes a number of the device, from now on; 0 if there is none of the name.
extern "C" int amdgpu_sim_clock_set(const char* parameter, double value);
// Estimates the latest launch again, whose module is still loaded.
extern "C" const char* amdgpu_sim_clock_again();

#endif  // AMDGPU_SIM_CLOCK_CLOCK_H_
