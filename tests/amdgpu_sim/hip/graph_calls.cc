// SPDX-License-Identifier: Apache-2.0

// Exported calls that build, instantiate, update and launch graphs.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/copy.h"
#include "tests/amdgpu_sim/hip/graph.h"
#include "tests/amdgpu_sim/hip/handles.h"
#include "tests/amdgpu_sim/hip/module.h"

namespace amdgpu_sim {
namespace {

std::shared_ptr<Graph> FindGraph(Graph* handle) {
  return Handles<Graph>::Get().Find(handle);
}

// Adds a node; `added` gets it.
Error AddNode(Graph* handle, std::shared_ptr<const Work> work,
              GraphNode* const* after, size_t count, GraphNode** added) {
  std::shared_ptr<Graph> graph = FindGraph(handle);
  if (graph == nullptr || added == nullptr ||
      (after == nullptr && count != 0)) {
    return kInvalidValue;
  }
  GraphNode* node =
      graph->Add(std::move(work),
                 std::vector<GraphNode*>(after, after + (after ? count : 0)));
  if (node == nullptr) return kInvalidValue;
  *added = node;
  return kSuccess;
}

Error MakeKernel(const KernelNodeParams* params,
                 std::shared_ptr<const Work>* work) {
  if (params == nullptr || params->function == nullptr) return kInvalidValue;
  std::shared_ptr<Function> function;
  Error error = FindFunction(params->function, Device::Current(), &function);
  if (error != kSuccess) return error;
  return MakeLaunch(function, params->grid, params->block, params->shared_bytes,
                    params->kernel_params, params->extra, work);
}

std::shared_ptr<const Work> MakeHost(const HostNodeParams& params) {
  auto work = std::make_shared<Work>();
  work->type = kHostNode;
  work->label = "host function";
  work->always = true;
  work->run = [params](Device&) { params.function(params.user_data); };
  return work;
}

CopyShape Line(size_t size) {
  CopyShape shape;
  shape.width = size;
  return shape;
}

// The work of a graph inside another. It keeps the state that the graph has
// now, as HIP documents.
Error MakeChild(Graph* handle, std::shared_ptr<const Work>* work) {
  std::shared_ptr<Graph> graph = FindGraph(handle);
  if (graph == nullptr) return kInvalidValue;
  std::shared_ptr<GraphExec> exec = GraphExec::Create(*graph);
  if (exec == nullptr) return kInvalidValue;
  *work = exec->Launch();
  return kSuccess;
}

Error Instantiate(GraphExec** handle, Graph* graph_handle) {
  if (handle == nullptr) return kInvalidValue;
  *handle = nullptr;
  std::shared_ptr<Graph> graph = FindGraph(graph_handle);
  if (graph == nullptr) return kInvalidValue;
  std::shared_ptr<GraphExec> exec = GraphExec::Create(*graph);
  if (exec == nullptr) return kInvalidValue;
  *handle = Handles<GraphExec>::Get().Add(std::move(exec));
  return kSuccess;
}

// Replaces a node's work in an executable graph.
Error UpdateNode(GraphExec* handle, const GraphNode* node,
                 const std::shared_ptr<const Work>& work) {
  std::shared_ptr<GraphExec> exec = Handles<GraphExec>::Get().Find(handle);
  return exec == nullptr ? kInvalidHandle : exec->Update(node, work);
}

Error Launch(GraphExec* handle, Stream* stream_handle) {
  std::shared_ptr<GraphExec> exec = Handles<GraphExec>::Get().Find(handle);
  std::shared_ptr<Stream> stream = Stream::Find(stream_handle);
  if (exec == nullptr || stream == nullptr) return kInvalidHandle;
  return stream->Submit(exec->Launch());
}

// Stores up to *count nodes and how many there are; or only that.
Error ListNodes(const std::vector<GraphNode*>& nodes, GraphNode** out,
                size_t* count) {
  if (count == nullptr) return kInvalidValue;
  if (out != nullptr) {
    for (size_t i = 0; i < *count; ++i) {
      out[i] = i < nodes.size() ? nodes[i] : nullptr;
    }
  }
  *count = out == nullptr ? nodes.size() : std::min(*count, nodes.size());
  return kSuccess;
}

Error WriteDot(Graph* handle, const char* path) {
  std::shared_ptr<Graph> graph = FindGraph(handle);
  if (graph == nullptr || path == nullptr) return kInvalidValue;
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "w"),
                                             std::fclose);
  if (file == nullptr) return kFileNotFound;
  std::fprintf(file.get(), "digraph {\n");
  const auto& nodes = graph->nodes();
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::string& label = nodes[i]->work->label;
    std::fprintf(file.get(), "  n%zu [label=\"%s\"];\n", i,
                 label.empty() ? "empty" : label.c_str());
    for (const GraphNode* other : nodes[i]->after) {
      const auto place =
          std::find_if(nodes.begin(), nodes.end(),
                       [&](const auto& node) { return node.get() == other; });
      std::fprintf(file.get(), "  n%zu -> n%zu;\n",
                   static_cast<size_t>(place - nodes.begin()), i);
    }
  }
  std::fprintf(file.get(), "}\n");
  return kSuccess;
}

}  // namespace

HIP_EXPORT Error hipGraphCreate(Graph** graph, unsigned flags) {
  return Api(__func__, [&] {
    if (graph == nullptr || flags != 0) return kInvalidValue;
    *graph = Handles<Graph>::Get().Add(std::make_shared<Graph>());
    return kSuccess;
  });
}

HIP_EXPORT Error hipGraphDestroy(Graph* graph) {
  return Api(__func__, [&] {
    return Handles<Graph>::Get().Remove(graph) == nullptr ? kInvalidValue
                                                          : kSuccess;
  });
}

HIP_EXPORT Error hipGraphClone(Graph** clone, Graph* original) {
  return Api(__func__, [&] {
    std::shared_ptr<Graph> graph = FindGraph(original);
    if (clone == nullptr || graph == nullptr) return kInvalidValue;
    *clone = Handles<Graph>::Get().Add(graph->Clone());
    return kSuccess;
  });
}

HIP_EXPORT Error hipGraphAddEmptyNode(GraphNode** node, Graph* graph,
                                      GraphNode* const* after, size_t count) {
  return Api(__func__, [&] {
    return AddNode(graph, std::make_shared<Work>(), after, count, node);
  });
}

HIP_EXPORT Error hipGraphAddKernelNode(GraphNode** node, Graph* graph,
                                       GraphNode* const* after, size_t count,
                                       const KernelNodeParams* params) {
  return Api(__func__, [&] {
    std::shared_ptr<const Work> work;
    Error error = MakeKernel(params, &work);
    if (error != kSuccess) return error;
    return AddNode(graph, std::move(work), after, count, node);
  });
}

HIP_EXPORT Error hipGraphAddMemcpyNode1D(GraphNode** node, Graph* graph,
                                         GraphNode* const* after, size_t count,
                                         void* to, const void* from,
                                         size_t size, int kind) {
  return Api(__func__, [&] {
    std::shared_ptr<const Work> work;
    Error error = MakeCopy(to, from, Line(size), kind, &work);
    if (error != kSuccess) return error;
    return AddNode(graph, std::move(work), after, count, node);
  });
}

HIP_EXPORT Error hipGraphAddMemsetNode(GraphNode** node, Graph* graph,
                                       GraphNode* const* after, size_t count,
                                       const MemsetParams* params) {
  return Api(__func__, [&] {
    if (params == nullptr) return kInvalidValue;
    std::shared_ptr<const Work> work;
    Error error = MakeFill(*params, &work);
    if (error != kSuccess) return error;
    return AddNode(graph, std::move(work), after, count, node);
  });
}

HIP_EXPORT Error hipGraphAddHostNode(GraphNode** node, Graph* graph,
                                     GraphNode* const* after, size_t count,
                                     const HostNodeParams* params) {
  return Api(__func__, [&] {
    if (params == nullptr || params->function == nullptr) {
      return kInvalidValue;
    }
    return AddNode(graph, MakeHost(*params), after, count, node);
  });
}

HIP_EXPORT Error hipGraphAddChildGraphNode(GraphNode** node, Graph* graph,
                                           GraphNode* const* after,
                                           size_t count, Graph* child) {
  return Api(__func__, [&] {
    std::shared_ptr<const Work> work;
    Error error = MakeChild(child, &work);
    if (error != kSuccess) return error;
    return AddNode(graph, std::move(work), after, count, node);
  });
}

HIP_EXPORT Error hipGraphAddDependencies(Graph* handle,
                                         GraphNode* const* before,
                                         GraphNode* const* after,
                                         size_t count) {
  return Api(__func__, [&] {
    std::shared_ptr<Graph> graph = FindGraph(handle);
    if (graph == nullptr) return kInvalidValue;
    for (size_t i = 0; i < count; ++i) {
      if (!graph->Owns(before[i]) || !graph->Owns(after[i]) ||
          before[i] == after[i]) {
        return kInvalidValue;
      }
      std::vector<GraphNode*>& list = after[i]->after;
      if (std::find(list.begin(), list.end(), before[i]) != list.end()) {
        return kInvalidValue;
      }
      list.push_back(before[i]);
    }
    return kSuccess;
  });
}

HIP_EXPORT Error hipGraphDestroyNode(GraphNode* handle) {
  return Api(__func__, [&] {
    std::shared_ptr<GraphNode> node = Handles<GraphNode>::Get().Find(handle);
    if (node == nullptr) return kInvalidValue;
    node->graph->Remove(handle);
    return kSuccess;
  });
}

HIP_EXPORT Error hipGraphNodeGetType(GraphNode* handle, NodeType* type) {
  return Api(__func__, [&] {
    std::shared_ptr<GraphNode> node = Handles<GraphNode>::Get().Find(handle);
    if (node == nullptr || type == nullptr) return kInvalidValue;
    *type = node->work->type;
    return kSuccess;
  });
}

HIP_EXPORT Error hipGraphNodeGetDependencies(GraphNode* handle,
                                             GraphNode** before,
                                             size_t* count) {
  return Api(__func__, [&] {
    std::shared_ptr<GraphNode> node = Handles<GraphNode>::Get().Find(handle);
    if (node == nullptr) return kInvalidValue;
    return ListNodes(node->after, before, count);
  });
}

HIP_EXPORT Error hipGraphGetNodes(Graph* handle, GraphNode** nodes,
                                  size_t* count) {
  return Api(__func__, [&] {
    std::shared_ptr<Graph> graph = FindGraph(handle);
    if (graph == nullptr) return kInvalidValue;
    std::vector<GraphNode*> all;
    for (const auto& node : graph->nodes()) all.push_back(node.get());
    return ListNodes(all, nodes, count);
  });
}

HIP_EXPORT Error hipGraphGetRootNodes(Graph* handle, GraphNode** nodes,
                                      size_t* count) {
  return Api(__func__, [&] {
    std::shared_ptr<Graph> graph = FindGraph(handle);
    if (graph == nullptr) return kInvalidValue;
    std::vector<GraphNode*> roots;
    for (const auto& node : graph->nodes()) {
      if (node->after.empty()) roots.push_back(node.get());
    }
    return ListNodes(roots, nodes, count);
  });
}

HIP_EXPORT Error hipGraphGetEdges(Graph* handle, GraphNode** before,
                                  GraphNode** after, size_t* count) {
  return Api(__func__, [&] {
    std::shared_ptr<Graph> graph = FindGraph(handle);
    if (graph == nullptr || count == nullptr ||
        (before == nullptr) != (after == nullptr)) {
      return kInvalidValue;
    }
    size_t found = 0;
    for (const auto& node : graph->nodes()) {
      for (GraphNode* other : node->after) {
        if (before != nullptr) {
          if (found == *count) return kSuccess;
          before[found] = other;
          after[found] = node.get();
        }
        ++found;
      }
    }
    *count = found;
    return kSuccess;
  });
}

HIP_EXPORT Error hipGraphDebugDotPrint(Graph* graph, const char* path,
                                       unsigned) {
  return Api(__func__, [&] { return WriteDot(graph, path); });
}

HIP_EXPORT Error hipGraphInstantiate(GraphExec** exec, Graph* graph,
                                     GraphNode** error_node, char* log,
                                     size_t log_size) {
  return Api(__func__, [&] {
    if (error_node != nullptr) *error_node = nullptr;
    if (log != nullptr && log_size != 0) *log = '\0';
    return Instantiate(exec, graph);
  });
}

HIP_EXPORT Error hipGraphInstantiateWithFlags(GraphExec** exec, Graph* graph,
                                              unsigned long long) {
  return Api(__func__, [&] { return Instantiate(exec, graph); });
}

HIP_EXPORT Error hipGraphExecDestroy(GraphExec* exec) {
  return Api(__func__, [&] {
    // Launches under way keep what they run.
    return Handles<GraphExec>::Get().Remove(exec) == nullptr ? kInvalidHandle
                                                             : kSuccess;
  });
}

HIP_EXPORT Error hipGraphUpload(GraphExec* exec, Stream* stream) {
  return Api(__func__, [&] {
    return Handles<GraphExec>::Get().Find(exec) == nullptr ||
                   Stream::Find(stream) == nullptr
               ? kInvalidHandle
               : kSuccess;
  });
}

HIP_EXPORT Error hipGraphLaunch(GraphExec* exec, Stream* stream) {
  return Api(__func__, [&] { return Launch(exec, stream); });
}

HIP_EXPORT Error hipGraphExecKernelNodeSetParams(
    GraphExec* exec, GraphNode* node, const KernelNodeParams* params) {
  return Api(__func__, [&] {
    std::shared_ptr<const Work> work;
    Error error = MakeKernel(params, &work);
    return error != kSuccess ? error : UpdateNode(exec, node, work);
  });
}

HIP_EXPORT Error hipGraphExecMemcpyNodeSetParams1D(GraphExec* exec,
                                                   GraphNode* node, void* to,
                                                   const void* from,
                                                   size_t size, int kind) {
  return Api(__func__, [&] {
    std::shared_ptr<const Work> work;
    Error error = MakeCopy(to, from, Line(size), kind, &work);
    return error != kSuccess ? error : UpdateNode(exec, node, work);
  });
}

HIP_EXPORT Error hipGraphExecMemsetNodeSetParams(GraphExec* exec,
                                                 GraphNode* node,
                                                 const MemsetParams* params) {
  return Api(__func__, [&] {
    if (params == nullptr) return kInvalidValue;
    std::shared_ptr<const Work> work;
    Error error = MakeFill(*params, &work);
    return error != kSuccess ? error : UpdateNode(exec, node, work);
  });
}

HIP_EXPORT Error hipGraphExecHostNodeSetParams(GraphExec* exec, GraphNode* node,
                                               const HostNodeParams* params) {
  return Api(__func__, [&] {
    if (params == nullptr || params->function == nullptr) {
      return kInvalidValue;
    }
    return UpdateNode(exec, node, MakeHost(*params));
  });
}

HIP_EXPORT Error hipGraphExecChildGraphNodeSetParams(GraphExec* exec,
                                                     GraphNode* node,
                                                     Graph* child) {
  return Api(__func__, [&] {
    std::shared_ptr<const Work> work;
    Error error = MakeChild(child, &work);
    return error != kSuccess ? error : UpdateNode(exec, node, work);
  });
}

HIP_EXPORT Error hipGraphExecUpdate(GraphExec* handle, Graph* graph_handle,
                                    GraphNode** error_node, int* result) {
  return Api(__func__, [&] {
    constexpr int kTopologyChanged = 2;
    std::shared_ptr<GraphExec> exec = Handles<GraphExec>::Get().Find(handle);
    std::shared_ptr<Graph> graph = FindGraph(graph_handle);
    if (exec == nullptr || graph == nullptr || result == nullptr) {
      return kInvalidValue;
    }
    const GraphNode* mismatch = nullptr;
    Error error = exec->UpdateAll(*graph, &mismatch);
    *result = error == kSuccess ? 0 : kTopologyChanged;
    if (error_node != nullptr) {
      *error_node = const_cast<GraphNode*>(mismatch);
    }
    return error;
  });
}

}  // namespace amdgpu_sim
