// SPDX-License-Identifier: Apache-2.0

// Graphs of work, and their executable copies.
#ifndef AMDGPU_SIM_HIP_GRAPH_H_
#define AMDGPU_SIM_HIP_GRAPH_H_

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tests/amdgpu_sim/hip/stream.h"
#include "tests/amdgpu_sim/hip/types.h"

namespace amdgpu_sim {

struct GraphNode {
  Graph* graph = nullptr;
  std::shared_ptr<const Work> work;
  std::vector<GraphNode*> after;  // Each once, all of the same graph.
};

// A graph's work in an order that its dependencies allow.
using Plan = std::vector<std::shared_ptr<const Work>>;

// Not safe from several threads, as HIP's are not.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Null if a dependency is not one of this graph's nodes.
  GraphNode* Add(std::shared_ptr<const Work> work,
                 const std::vector<GraphNode*>& after);
  void Remove(GraphNode* node);

  const std::vector<std::shared_ptr<GraphNode>>& nodes() const {
    return nodes_;
  }
  bool Owns(const GraphNode* node) const;

  std::shared_ptr<Graph> Clone() const;

  // The nodes in an order that the dependencies allow. Of those that are free
  // to run it takes the last added first: a graph that lacks a dependency
  // seldom runs in the order of its making, so that the lack shows. Empty, for
  // a graph with nodes, if they depend in a cycle.
  std::vector<const GraphNode*> Order() const;

 private:
  std::vector<std::shared_ptr<GraphNode>> nodes_;
};

// The work that runs a whole graph.
std::shared_ptr<const Work> GraphWork(std::shared_ptr<const Plan> plan);

// An instantiated graph. Launches keep the plan that they began with; updates
// concern later ones.
class GraphExec {
 public:
  // Null if the graph's dependencies have a cycle.
  static std::shared_ptr<GraphExec> Create(const Graph& graph);

  // Replaces a node's work by one of the same type.
  Error Update(const GraphNode* node, std::shared_ptr<const Work> work);

  // Takes over the works of a graph of the same structure; else sets
  // `mismatch` to the node in question, if there is one.
  Error UpdateAll(const Graph& graph, const GraphNode** mismatch);

  // The work of a launch.
  std::shared_ptr<const Work> Launch();

 private:
  std::mutex mutex_;
  std::shared_ptr<Plan> plan_;
  bool launched_ = false;  // A launch has the plan: an update copies it.
  // Where a node of the graph that was instantiated is in the plan, and which
  // places it depends on.
  std::unordered_map<const GraphNode*, size_t> place_;
  std::vector<std::vector<size_t>> after_;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_GRAPH_H_
