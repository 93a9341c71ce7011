// Lists the versions of the pooling loops that this machine can run.
#include "pooling.hpp"

#include <stdexcept>
#include <string>

namespace weft {

Isa isa_portable();
#ifdef WEFT_X86
Isa isa_avx2();
Isa isa_avx512();
#endif

const std::vector<Isa> &isas() {
    static const std::vector<Isa> found = [] {
        std::vector<Isa> list;
#ifdef WEFT_X86
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            list.push_back(isa_avx512());
        if (avx2) list.push_back(isa_avx2());
#endif
        list.push_back(isa_portable());
        return list;
    }();
    return found;
}

const Isa &isa_named(std::string_view name) {
    std::string names;
    for (const Isa &isa : isas()) {
        if (name.empty() || name == isa.name) return isa;
        names += (names.empty() ? "" : ", ") + std::string(isa.name);
    }
    throw std::invalid_argument("isa='" + std::string(name) + "' cannot run on this machine: choose one of " + names);
}

}  // namespace weft
