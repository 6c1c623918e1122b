// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/msgpack.h"

namespace amdgpu_sim {
namespace {

constexpr int kMaxDepth = 32;

class Reader {
 public:
  Reader(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

  bool Read(Msgpack* value, int depth) {
    uint64_t tag;
    if (depth > kMaxDepth || !Take(1, &tag)) return false;
    if (tag < 0x80) return Number(value, tag);
    if (tag < 0x90) return Map(value, tag & 0xf, depth);
    if (tag < 0xa0) return Array(value, tag & 0xf, depth);
    if (tag < 0xc0) return String(value, tag & 0x1f);
    if (tag >= 0xe0) return Signed(value, tag, 1);
    uint64_t n;
    switch (tag) {
      case 0xc0:
        return true;
      case 0xc2:
      case 0xc3:
        return Number(value, tag & 1);
      case 0xc4:  // Bytes, then strings, with lengths of 1, 2 and 4 bytes.
      case 0xc5:
      case 0xc6:
        return Take(1 << (tag - 0xc4), &n) && String(value, n);
      case 0xd9:
      case 0xda:
      case 0xdb:
        return Take(1 << (tag - 0xd9), &n) && String(value, n);
      case 0xca:
        return Take(4, &n) && Number(value, n);
      case 0xcb:
        return Take(8, &n) && Number(value, n);
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return Take(1 << (tag - 0xcc), &n) && Number(value, n);
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3:
        return Take(1 << (tag - 0xd0), &n) &&
               Signed(value, n, 1 << (tag - 0xd0));
      case 0xdc:
      case 0xdd:
        return Take(2 << (tag - 0xdc), &n) && Array(value, n, depth);
      case 0xde:
      case 0xdf:
        return Take(2 << (tag - 0xde), &n) && Map(value, n, depth);
      default:
        return false;
    }
  }

 private:
  bool Take(int bytes, uint64_t* value) {
    if (end_ - at_ < bytes) return false;
    *value = 0;
    while (bytes-- > 0) *value = *value << 8 | *at_++;
    return true;
  }

  static bool Number(Msgpack* value, uint64_t number) {
    value->kind = Msgpack::Kind::kNumber;
    value->number = number;
    return true;
  }

  static bool Signed(Msgpack* value, uint64_t number, int bytes) {
    const int shift = 64 - 8 * bytes;
    return Number(value, static_cast<uint64_t>(
                             static_cast<int64_t>(number << shift) >> shift));
  }

  bool String(Msgpack* value, uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) return false;
    value->kind = Msgpack::Kind::kString;
    value->string.assign(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return true;
  }

  bool Array(Msgpack* value, uint64_t size, int depth) {
    value->kind = Msgpack::Kind::kArray;
    while (size-- > 0) {
      value->array.emplace_back();
      if (!Read(&value->array.back(), depth + 1)) return false;
    }
    return true;
  }

  bool Map(Msgpack* value, uint64_t size, int depth) {
    value->kind = Msgpack::Kind::kMap;
    while (size-- > 0) {
      value->map.emplace_back();
      if (!Read(&value->map.back().first, depth + 1)) return false;
      if (!Read(&value->map.back().second, depth + 1)) return false;
    }
    return true;
  }

  const uint8_t* at_;
  const uint8_t* const end_;
};

}  // namespace

bool Msgpack::Parse(const uint8_t* begin, const uint8_t* end, Msgpack* value) {
  return Reader(begin, end).Read(value, 0);
}

const Msgpack* Msgpack::Find(const char* key) const {
  for (const auto& entry : map) {
    if (entry.first.string == key) return &entry.second;
  }
  return nullptr;
}

uint64_t Msgpack::Number(const char* key, uint64_t otherwise) const {
  const Msgpack* value = Find(key);
  return value == nullptr ? otherwise : value->number;
}

std::string Msgpack::String(const char* key) const {
  const Msgpack* value = Find(key);
  return value == nullptr ? "" : value->string;
}

}  // namespace amdgpu_sim
