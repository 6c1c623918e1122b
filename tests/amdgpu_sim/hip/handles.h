// SPDX-License-Identifier: Apache-2.0

// The objects that callers hold by a raw pointer.
#ifndef AMDGPU_SIM_HIP_HANDLES_H_
#define AMDGPU_SIM_HIP_HANDLES_H_

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace amdgpu_sim {

// Owns the live objects of one type. A handle is looked up before it is used,
// so a destroyed one is an error and no crash, and an object that one thread
// destroys stays whole until the others are done with it.
template <typename T>
class Handles {
 public:
  // Never destroyed: calls come in while the process exits.
  static Handles& Get() {
    static Handles* const handles = new Handles;
    return *handles;
  }

  T* Add(std::shared_ptr<T> object) {
    T* handle = object.get();
    std::lock_guard<std::mutex> lock(mutex_);
    objects_[handle] = std::move(object);
    return handle;
  }

  // Null if there is no such object.
  std::shared_ptr<T> Find(const void* handle) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  // Ends the handle's life and returns its object, null if there is none.
  std::shared_ptr<T> Remove(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  std::vector<std::shared_ptr<T>> All() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> all;
    all.reserve(objects_.size());
    for (const auto& object : objects_) all.push_back(object.second);
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<T>> objects_;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_HANDLES_H_
