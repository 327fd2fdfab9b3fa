// format(pattern, values...) for messages: fmt where its headers are, else the standard library's, else the few
// lines below, which know "{}" alone. The patterns of this folder use nothing else.
//
// DG_FORMATTER = 1, 2 or 3 asks for one of them; a test compares what they write.
#pragma once

#if !defined(DG_FORMATTER)
#if __has_include(<fmt/format.h>)
#define DG_FORMATTER 1
#else
#include <version>
#if defined(__cpp_lib_format)
#define DG_FORMATTER 2
#else
#define DG_FORMATTER 3
#endif
#endif
#endif

#if DG_FORMATTER == 1
#define FMT_HEADER_ONLY  // nothing to link: the module needs no library of fmt where it runs
#include <fmt/format.h>
#elif DG_FORMATTER == 2
#include <format>
#else
#include <sstream>
#include <string_view>
#endif

#include <string>

namespace dg::host {

#if DG_FORMATTER == 1
using fmt::format;
inline std::string formatter() {
    return format("fmt {}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
}
#elif DG_FORMATTER == 2
using std::format;
inline std::string formatter() {
    return "std::format";
}
#else
inline void put(std::ostringstream& out, std::string_view pattern) {
    out << pattern;
}

template <typename First, typename... Rest>
void put(std::ostringstream& out, std::string_view pattern, const First& first, const Rest&... rest) {
    const auto at = pattern.find("{}");
    out << pattern.substr(0, at);
    if (at == std::string_view::npos)
        return;  // more values than places: the rest is left out, as fmt does
    out << first;
    put(out, pattern.substr(at + 2), rest...);
}

template <typename... Values>
std::string format(std::string_view pattern, const Values&... values) {
    std::ostringstream out;
    put(out, pattern, values...);
    return out.str();
}
inline std::string formatter() {
    return "a replacement of fmt (neither fmt nor std::format is here)";
}
#endif

}  // namespace dg::host
