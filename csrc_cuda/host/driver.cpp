#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <stdexcept>

#include "format.h"

namespace dg::host {
namespace {

std::string loader_words() {
    const char* words = dlerror();
    return words == nullptr ? "the loader gives no reason" : words;
}

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function*& function) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr)
        throw std::runtime_error(format("{} has no {}: {}", path, name, loader_words()));
    function = reinterpret_cast<Function*>(symbol);
}

Driver load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw std::runtime_error(format("no CUDA driver: {}", loader_words()));
    Driver found{};
    find(library, path, "cuCtxGetCurrent", found.context_current);
    find(library, path, "cuCtxPushCurrent_v2", found.context_push);
    find(library, path, "cuCtxPopCurrent_v2", found.context_pop);
    find(library, path, "cuTensorMapEncodeTiled", found.encode_tiled);
    find(library, path, "cuLaunchKernelEx", found.launch);
    return found;
}

}  // namespace

const Driver& open_driver(const std::string& library) {
    static std::map<std::string, Driver> opened;  // a map's elements keep their addresses
    const auto known = opened.find(library);
    if (known != opened.end())
        return known->second;
    return opened.emplace(library, load(library)).first->second;
}

}  // namespace dg::host
