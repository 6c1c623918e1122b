// SPDX-License-Identifier: Apache-2.0

// Plans by context and problem.
#ifndef AITER_SRC_CORE_PLAN_CACHE_H_
#define AITER_SRC_CORE_PLAN_CACHE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/code_objects.h"

namespace aiter {

// Plans only ever come, a handful per program; so finding one takes no lock. A
// plan has a member `key`, the problem that it is for.
template <typename Plan>
class PlanCache {
 public:
  using Key = decltype(Plan::key);

  // Sets `*plan` to the current context's plan for `key`, which `make` makes if
  // there is none yet. It lives as long as the cache.
  Status FindOrMake(const Key& key, Status (*make)(const Key&, Plan*),
                    const Plan** plan) {
    Context* context;
    AITER_RETURN_IF_ERROR(Context::Current(&context));
    std::atomic<Node*>& bucket = buckets_[Hash(context->id(), key)];
    if ((*plan = Find(bucket, context->id(), key)) != nullptr) return Status();

    std::lock_guard<std::mutex> lock(mutex_);
    if ((*plan = Find(bucket, context->id(), key)) != nullptr) return Status();
    Plan made;
    AITER_RETURN_IF_ERROR(make(key, &made));
    Node* node = new (std::nothrow)
        Node{context->id(), made, bucket.load(std::memory_order_relaxed)};
    if (node == nullptr) {
      return Status(StatusCode::kResourceExhausted, "Out of host memory");
    }
    bucket.store(node, std::memory_order_release);
    *plan = &node->plan;
    return Status();
  }

 private:
  struct Node {
    uint64_t context;
    Plan plan;
    Node* next;
  };

  static constexpr size_t kBuckets = 64;

  static size_t Hash(uint64_t context, const Key& key) {
    uint64_t h = (context ^ key.Hash()) * 0x9e3779b97f4a7c15;
    return h >> 58;
  }

  static const Plan* Find(const std::atomic<Node*>& bucket, uint64_t context,
                          const Key& key) {
    const Node* node = bucket.load(std::memory_order_acquire);
    while (node != nullptr &&
           (node->context != context || node->plan.key != key)) {
      node = node->next;
    }
    return node == nullptr ? nullptr : &node->plan;
  }

  std::atomic<Node*> buckets_[kBuckets] = {};
  std::mutex mutex_;
};

}  // namespace aiter

#endif  // AITER_SRC_CORE_PLAN_CACHE_H_
