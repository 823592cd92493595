// A tool library as a profiler brings it: NVTX loads it by NVTX_INJECTION64_PATH and calls
// InitializeInjectionNvtx2.
#include "nvtx_recorder.hpp"

#include <nvtx3/nvToolsExt.h>
#include <pthread.h>

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

std::mutex mutex;
std::vector<NvtxEvent> events;
std::vector<std::string> domains;  // handle = index + 1
std::vector<std::string> strings;

void record(bool push, nvtxDomainHandle_t domain, const char* name) {
  const std::lock_guard lock(mutex);
  NvtxEvent event{};
  event.thread = static_cast<unsigned long>(pthread_self());
  event.push = push;
  const auto index = reinterpret_cast<std::size_t>(domain);
  if (index > 0 && index <= domains.size()) {
    std::strncpy(event.domain, domains[index - 1].c_str(), sizeof(event.domain) - 1);
  }
  if (name != nullptr) std::strncpy(event.name, name, sizeof(event.name) - 1);
  events.push_back(event);
}

nvtxDomainHandle_t create_domain(const char* name) {
  const std::lock_guard lock(mutex);
  domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(domains.size());
}

nvtxStringHandle_t register_string(nvtxDomainHandle_t, const char* name) {
  const std::lock_guard lock(mutex);
  strings.emplace_back(name);
  return reinterpret_cast<nvtxStringHandle_t>(strings.size());
}

int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  std::string name;
  if (attributes->messageType == NVTX_MESSAGE_TYPE_ASCII) {
    name = attributes->message.ascii;
  } else if (attributes->messageType == NVTX_MESSAGE_TYPE_REGISTERED) {
    const std::lock_guard lock(mutex);
    name = strings.at(reinterpret_cast<std::size_t>(attributes->message.registered) - 1);
  }
  record(true, domain, name.c_str());
  return 0;
}

int pop(nvtxDomainHandle_t domain) {
  record(false, domain, nullptr);
  return 0;
}

template <class F>
void set(NvtxFunctionTable table, int id, F function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" {

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0)
    return 0;
  set(table, NVTX_CBID_CORE2_DomainCreateA, create_domain);
  set(table, NVTX_CBID_CORE2_DomainRegisterStringA, register_string);
  set(table, NVTX_CBID_CORE2_DomainRangePushEx, push);
  set(table, NVTX_CBID_CORE2_DomainRangePop, pop);
  return 1;
}

std::size_t nvtx_recorder_events(NvtxEvent* to, std::size_t capacity) {
  const std::lock_guard lock(mutex);
  for (std::size_t i = 0; i < events.size() && i < capacity; ++i) to[i] = events[i];
  return events.size();
}

void nvtx_recorder_clear() {
  const std::lock_guard lock(mutex);
  events.clear();
}
}
