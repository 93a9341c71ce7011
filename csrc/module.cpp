// weft._core: the native code. Each file registers its own functions.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void register_signal(nb::module_ &m);
void register_exchange(nb::module_ &m);
void register_lease(nb::module_ &m);
void register_layouts(nb::module_ &m);
void register_group_calls(nb::module_ &m);
void register_plain_steps(nb::module_ &m);
void register_combine_steps(nb::module_ &m);
void register_expert_steps(nb::module_ &m);
void register_known_run(nb::module_ &m);
void register_replay(nb::module_ &m);
void register_pooled_call(nb::module_ &m);
void register_embedding_all_to_all(nb::module_ &m);
void register_embedding_backward(nb::module_ &m);
void register_mapping(nb::module_ &m);
void register_copy(nb::module_ &m);
void register_copy_columns(nb::module_ &m);
void register_accumulate(nb::module_ &m);
void register_sort_pairs(nb::module_ &m);
void register_stream_program(nb::module_ &m);
void register_fluid(nb::module_ &m);
void register_memory_controller(nb::module_ &m);
void register_rail(nb::module_ &m);
void register_rail_rows(nb::module_ &m);

NB_MODULE(_core, m) {
    // Tensors in leased memory may live as long as the interpreter. nanobind would report them as leaks.
    nb::set_leak_warnings(false);
    m.doc() = "Native part of weft: signals in shared memory, leased tensors, CPU kernels. No torch ABI.";
    register_signal(m);
    register_exchange(m);
    register_lease(m);
    register_layouts(m);
    register_group_calls(m);
    register_plain_steps(m);
    register_combine_steps(m);
    register_expert_steps(m);
    register_known_run(m);
    register_replay(m);
    register_pooled_call(m);
    register_embedding_all_to_all(m);
    register_embedding_backward(m);
    register_mapping(m);
    register_copy(m);
    register_copy_columns(m);
    register_accumulate(m);
    register_sort_pairs(m);
    register_stream_program(m);
    register_fluid(m);
    register_memory_controller(m);
    register_rail(m);
    register_rail_rows(m);
}
