// SPDX-License-Identifier: Apache-2.0

// MessagePack, in which code objects have their metadata.
#ifndef AMDGPU_SIM_HIP_MSGPACK_H_
#define AMDGPU_SIM_HIP_MSGPACK_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace amdgpu_sim {

// A value: nil, a number (booleans and the bits of floats too), a string, an
// array or a map.
struct Msgpack {
  enum class Kind { kNil, kNumber, kString, kArray, kMap };

  // False if the bytes are not one whole value.
  static bool Parse(const uint8_t* begin, const uint8_t* end, Msgpack* value);

  // The value of a key of a map; null if there is none.
  const Msgpack* Find(const char* key) const;
  uint64_t Number(const char* key, uint64_t otherwise) const;
  std::string String(const char* key) const;

  Kind kind = Kind::kNil;
  uint64_t number = 0;
  std::string string;
  std::vector<Msgpack> array;
  std::vector<std::pair<Msgpack, Msgpack>> map;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_MSGPACK_H_
