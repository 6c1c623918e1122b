// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/graph.h"

#include <algorithm>
#include <queue>
#include <unordered_map>
#include <utility>

#include "tests/amdgpu_sim/hip/handles.h"

namespace amdgpu_sim {
namespace {

// The dependencies of the nodes of an order, as places in it.
std::vector<std::vector<size_t>> Dependencies(
    const std::vector<const GraphNode*>& order,
    const std::unordered_map<const GraphNode*, size_t>& place) {
  std::vector<std::vector<size_t>> all;
  for (const GraphNode* node : order) {
    std::vector<size_t> after;
    for (const GraphNode* other : node->after) after.push_back(place.at(other));
    std::sort(after.begin(), after.end());
    all.push_back(std::move(after));
  }
  return all;
}

std::unordered_map<const GraphNode*, size_t> Places(
    const std::vector<const GraphNode*>& order) {
  std::unordered_map<const GraphNode*, size_t> place;
  for (size_t i = 0; i < order.size(); ++i) place[order[i]] = i;
  return place;
}

std::shared_ptr<Plan> PlanOf(const std::vector<const GraphNode*>& order) {
  auto plan = std::make_shared<Plan>();
  for (const GraphNode* node : order) plan->push_back(node->work);
  return plan;
}

}  // namespace

Graph::~Graph() {
  for (const auto& node : nodes_) {
    Handles<GraphNode>::Get().Remove(node.get());
  }
}

GraphNode* Graph::Add(std::shared_ptr<const Work> work,
                      const std::vector<GraphNode*>& after) {
  for (const GraphNode* other : after) {
    if (!Owns(other)) return nullptr;
  }
  auto node = std::make_shared<GraphNode>();
  node->graph = this;
  node->work = std::move(work);
  for (GraphNode* other : after) {
    if (std::find(node->after.begin(), node->after.end(), other) ==
        node->after.end()) {
      node->after.push_back(other);
    }
  }
  nodes_.push_back(node);
  return Handles<GraphNode>::Get().Add(std::move(node));
}

void Graph::Remove(GraphNode* node) {
  for (const auto& other : nodes_) {
    auto& after = other->after;
    after.erase(std::remove(after.begin(), after.end(), node), after.end());
  }
  Handles<GraphNode>::Get().Remove(node);
  nodes_.erase(std::remove_if(nodes_.begin(), nodes_.end(),
                              [&](const auto& n) { return n.get() == node; }),
               nodes_.end());
}

bool Graph::Owns(const GraphNode* node) const {
  std::shared_ptr<GraphNode> found = Handles<GraphNode>::Get().Find(node);
  return found != nullptr && found->graph == this;
}

std::shared_ptr<Graph> Graph::Clone() const {
  auto clone = std::make_shared<Graph>();
  std::unordered_map<const GraphNode*, GraphNode*> copies;
  for (const auto& node : nodes_) {
    GraphNode* copy = clone->Add(node->work, {});
    copies[node.get()] = copy;
  }
  for (const auto& node : nodes_) {
    for (GraphNode* other : node->after) {
      copies[node.get()]->after.push_back(copies[other]);
    }
  }
  return clone;
}

std::vector<const GraphNode*> Graph::Order() const {
  std::unordered_map<const GraphNode*, size_t> index, waits;
  std::unordered_map<const GraphNode*, std::vector<const GraphNode*>> before;
  std::priority_queue<size_t> ready;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const GraphNode* node = nodes_[i].get();
    index[node] = i;
    waits[node] = node->after.size();
    if (node->after.empty()) ready.push(i);
    for (const GraphNode* other : node->after) before[other].push_back(node);
  }
  std::vector<const GraphNode*> order;
  while (!ready.empty()) {
    const GraphNode* node = nodes_[ready.top()].get();
    ready.pop();
    order.push_back(node);
    for (const GraphNode* next : before[node]) {
      if (--waits[next] == 0) ready.push(index[next]);
    }
  }
  if (order.size() != nodes_.size()) order.clear();
  return order;
}

std::shared_ptr<const Work> GraphWork(std::shared_ptr<const Plan> plan) {
  auto work = std::make_shared<Work>();
  work->type = kGraphNode;
  work->label = "graph";
  work->always = true;  // Each of its nodes decides for itself.
  work->run = [plan = std::move(plan)](Device& device) {
    for (const auto& step : *plan) DoWork(*step, device);
  };
  return work;
}

std::shared_ptr<GraphExec> GraphExec::Create(const Graph& graph) {
  const std::vector<const GraphNode*> order = graph.Order();
  if (order.size() != graph.nodes().size()) return nullptr;
  auto exec = std::make_shared<GraphExec>();
  exec->plan_ = PlanOf(order);
  exec->place_ = Places(order);
  exec->after_ = Dependencies(order, exec->place_);
  return exec;
}

Error GraphExec::Update(const GraphNode* node,
                        std::shared_ptr<const Work> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = place_.find(node);
  if (found == place_.end()) return kInvalidValue;
  if ((*plan_)[found->second]->type != work->type) return kInvalidValue;
  if (launched_) plan_ = std::make_shared<Plan>(*plan_);
  launched_ = false;
  (*plan_)[found->second] = std::move(work);
  return kSuccess;
}

Error GraphExec::UpdateAll(const Graph& graph, const GraphNode** mismatch) {
  *mismatch = nullptr;
  const std::vector<const GraphNode*> order = graph.Order();
  std::unordered_map<const GraphNode*, size_t> place = Places(order);
  std::lock_guard<std::mutex> lock(mutex_);
  if (order.size() != plan_->size()) return kGraphExecUpdateFailure;
  const auto after = Dependencies(order, place);
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i]->work->type != (*plan_)[i]->type || after[i] != after_[i]) {
      *mismatch = order[i];
      return kGraphExecUpdateFailure;
    }
  }
  // The nodes of the first graph remain the keys of later updates.
  plan_ = PlanOf(order);
  launched_ = false;
  return kSuccess;
}

std::shared_ptr<const Work> GraphExec::Launch() {
  std::lock_guard<std::mutex> lock(mutex_);
  launched_ = true;
  return GraphWork(plan_);
}

}  // namespace amdgpu_sim
