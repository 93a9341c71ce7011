#include "plain_steps.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <cstring>

namespace nb = nanobind;

namespace weft {

namespace {

constexpr uint64_t ALIGNMENT = 16;       // bytes: cuBLAS reads row scales only from addresses with this alignment

nb::object call_with(nb::handle function, std::initializer_list<nb::handle> arguments, nb::handle keywords) {
    PyObject *given[12] = {};
    size_t count = 0;
    for (nb::handle one : arguments) given[++count] = one.ptr();
    const size_t positional = count - nb::len(keywords);
    return checked(
        PyObject_Vectorcall(function.ptr(), given + 1, positional | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords.ptr()));
}

// Returns the dtype of a sum from DLPack's code of the dtype.
SumDtype sum_dtype(int code, int bits) {
    if (code == 4 && bits == 16) return SumDtype::bf16;
    if (code == 2 && bits == 16) return SumDtype::fp16;
    if (code == 2 && bits == 32) return SumDtype::fp32;
    if (code == 2 && bits == 64) return SumDtype::fp64;
    throw std::invalid_argument("elements of " + std::to_string(bits) + " bits cannot be summed: use fp32, bf16, fp16 or fp64");
}

}  // namespace

nb::object scaled_mm(nb::handle function, nb::handle a, nb::handle b, nb::handle scale_a, nb::handle scale_b, nb::handle bias,
                     nb::handle dtype, bool fast, nb::handle out) {
    static const nb::handle data_ptr = interned("data_ptr").release(), clone = interned("clone").release();  // never freed
    static const nb::handle keywords = nb::make_tuple("out_dtype", "use_fast_accum").release(),
                            with_out = nb::make_tuple("out_dtype", "use_fast_accum", "out").release();
    nb::object scale = nb::borrow(scale_a), added = nb::none();
    if (nb::cast<uint64_t>(call_method(scale_a, data_ptr)) % ALIGNMENT) scale = call_method(scale_a, clone);
    if (!bias.is_none()) added = checked(PyObject_GetItem(bias.ptr(), number(0).ptr()));
    const nb::handle is_fast = fast ? Py_True : Py_False;
    if (out.is_none()) return call_with(function, {a, b, scale, scale_b, added, dtype, is_fast}, keywords);
    return call_with(function, {a, b, scale, scale_b, added, dtype, is_fast, out}, with_out);
}

CpuTurns::CpuTurns(nb::object of, const CallCounts &counts, const Health &health)
    : of_(of), meeting_(of.attr("meeting")), lock_(meeting_.attr("publishing")), exchange_object_(of.attr("exchange")), counts_(counts),
      health_(health), exchange_(nb::cast<PayloadExchange *>(exchange_object_)), any_rows_(nb::cast<bool>(of.attr("any_rows"))),
      patience_s_(nb::cast<double>(of.attr("patience_s"))) {
    for (nb::handle one : of.attr("published")) {
        const nb::bytes bytes = nb::cast<nb::bytes>(one);
        published_.emplace_back(bytes.c_str(), bytes.size());
    }
}

// Holds the lock of the rendezvous, and counts a call.
class CpuTurns::Publishing {
  public:
    explicit Publishing(const CpuTurns &of) : of_(of) {
        call_method(of.lock_, of.acquire_);
        try {
            const nb::object one = number(1), count = checked(PyNumber_Add(of.published().ptr(), one.ptr()));
            if (PyObject_SetAttr(of.meeting_.ptr(), of.calls_.ptr(), count.ptr())) throw nb::python_error();
        } catch (...) {
            release();
            throw;
        }
    }
    Publishing(const Publishing &) = delete;
    ~Publishing() { release(); }

  private:
    void release() {
        PyObject *const given[] = {of_.lock_.ptr()};
        PyObject *const done = PyObject_VectorcallMethod(of_.release_.ptr(), given, 1, nullptr);
        if (!done) PyErr_WriteUnraisable(of_.lock_.ptr());
        Py_XDECREF(done);
    }
    const CpuTurns &of_;
};

bool CpuTurns::is_usual() const {
    return !counts_.has_layers && !is_true(checked(PyObject_GetAttr(meeting_.ptr(), forward_.ptr()))) && health_.is_well();
}

void CpuTurns::run(size_t number_of_collective, SharedCollective collective, uint64_t fingerprint, const Given &given) const {
    const auto which = [&] { return number(int64_t(number_of_collective)); };
    const auto of_call = [&] { return checked(PyLong_FromUnsignedLongLong(fingerprint)); };
    if (!is_usual()) {
        call_method(of_, meet_, which(), of_call(), given.positional, given.named, nb::cast(std::move(collective)));
        return;
    }
    std::string payload = published_.at(number_of_collective);
    if (any_rows_) payload.append(reinterpret_cast<const char *>(&fingerprint), sizeof fingerprint);
    const Publishing publishing(*this);
    const int64_t rendezvous = exchange_->epoch() + 1;
    for (bool is_met = false, is_begun = false;; is_met = true, is_begun = true) {
        SharedCollective::Progress progress;
        {
            nb::gil_scoped_release unlocked;
            if (!is_begun) {
                collective.load();
                exchange_->publish(payload);
            }
            progress = collective.run(patience_s_, &health_.failed, is_met);
        }
        if (progress == SharedCollective::complete) return;
        const nb::bool_ is_complete(progress == SharedCollective::differs);
        if (exchange_->epoch() == rendezvous)
            call_method(of_, settle_, which(), of_call(), given.positional, given.named, nb::bytes(payload.data(), payload.size()), is_complete);
        else
            call_method(of_, go_on_, which(), is_complete);
    }
}

void CpuTurns::run_if_balanced(SharedCollective collective, uint64_t excess, const Given &given) const {
    const size_t begin = 1, end = begin + 2 * sizeof(uint64_t);  // the bytes that may differ between ranks (`Meeting.meet`)
    const nb::object which = number(0);
    std::string payload = published_.at(0);
    std::memcpy(payload.data() + begin, &excess, sizeof excess);
    const Publishing publishing(*this);
    bool is_complete, is_equal = false;
    {
        nb::gil_scoped_release unlocked;
        collective.load();
        exchange_->publish(payload);
        is_complete = exchange_->wait(patience_s_, &health_.failed);
        if (is_complete) is_equal = exchange_->is_equal(begin, end);
    }
    if (!is_equal)
        call_method(of_, settle_, which, which, given.positional, given.named, nb::bytes(payload.data(), payload.size()), nb::bool_(is_complete));
    uint64_t total = 0, one = 0;
    for (size_t rank = 0; rank < exchange_->ranks(); ++rank) {
        std::memcpy(&one, exchange_->payload(rank).data() + begin, sizeof one);
        total += one;
    }
    if (total != 0) {
        call_method(of_, refuse_tables_, given.positional, given.named);
        throw std::logic_error("`refuse_tables` returned");
    }
    for (;;) {
        SharedCollective::Progress progress;
        {
            nb::gil_scoped_release unlocked;
            progress = collective.run(patience_s_, &health_.failed, true);
        }
        if (progress == SharedCollective::complete) return;
        call_method(of_, go_on_, which, nb::bool_(progress == SharedCollective::differs));
    }
}

PlainSteps::PlainSteps(nb::object torch, nb::list buffers, nb::list steps, int64_t world)
    : torch_(torch), calls_(*nb::cast<const TorchCalls *>(torch)), world_(world) {
    for (nb::handle name : buffers) names_.push_back(nb::borrow(name));
    static const char *const kinds[] = {"matmul",     "all_gather",    "reduce_scatter",
                                        "all_reduce", "scaled_matmul", "scaled_matmul_fast", "called", "exchange_counts", "exchange_there", "exchange_back"};
    for (nb::handle one : steps) {
        const nb::tuple written = nb::cast<nb::tuple>(one);
        const std::string name = nb::cast<std::string>(written[0]);
        size_t kind = 0;
        while (kind < std::size(kinds) && name != kinds[kind]) ++kind;
        const nb::tuple read = nb::cast<nb::tuple>(written[2]);
        const size_t wanted = kind == mm ? 2 : kind == scaled || kind == scaled_fast ? 4 : kind == exchange_back ? 3 : kind == exchange_there ? 2 : 1;
        if (kind == std::size(kinds) || nb::len(read) < wanted)
            throw std::invalid_argument("not a plain step: " + std::string(nb::repr(one).c_str()));
        Step &step = steps_.emplace_back(Step{Kind(kind), place(nb::object(written[1])), {}, nb::object(written[3])});
        for (nb::handle buffer : read) step.in.push_back(place(buffer));
        calls_functions_ |= step.kind == called || (step.kind == exchange_there && !step.dtype.is_none());
    }
}

size_t PlainSteps::place(nb::handle name) const {
    for (size_t i = 0; i < names_.size(); ++i)
        if (names_[i].equal(name)) return i;
    throw std::invalid_argument("no buffer has the name " + std::string(nb::repr(name).c_str()));
}

nb::object PlainSteps::new_matrix(nb::handle like, int64_t rows, int64_t cols) const {
    return call_method(like, new_empty_, number(rows), number(cols));
}

// Calls the step's function with the buffers that the step reads, from the buffer with number `first` on.
nb::object PlainSteps::call_with_buffers(const Step &step, const std::vector<nb::object> &buffers, size_t first) const {
    std::vector<PyObject *> given(1);
    for (size_t i = first; i < step.in.size(); ++i) given.push_back(buffers[step.in[i]].ptr());
    return checked(PyObject_Vectorcall(step.dtype.ptr(), given.data() + 1, (given.size() - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

nb::object PlainSteps::exchanged(const Step &step, const std::vector<nb::object> &buffers, nb::handle group, nb::object &work) const {
    const nb::object &x = buffers[step.in[0]];
    if (step.kind == exchange_counts) {
        const int64_t experts = calls_.reader->view(x).shape[0] / world_;
        nb::object received = new_matrix(x, world_, experts);
        const nb::list even;
        work = call(calls_.exchange, group, received, call_method(x, view_, number(world_), number(experts)), even, even, calls_.exchange_options);
        return received;
    }
    const nb::object host = checked(PyObject_GetAttr(buffers[step.in[1]].ptr(), host_.ptr()));
    const nb::object sent = host[0], came = host[1], cols = number(calls_.reader->view(x).shape[1]);
    if (step.kind == exchange_back) {
        nb::object back = call_method(x, new_empty_, buffers[step.in[2]], cols);
        work = call(calls_.exchange, group, back, x, sent, came, calls_.exchange_options);
        return back;
    }
    int64_t rows = 0;
    for (nb::handle one : nb::cast<nb::list>(came)) rows += nb::cast<int64_t>(one);
    nb::object arrived = call_method(x, new_empty_, number(rows), cols);
    work = call(calls_.exchange, group, arrived, x, came, sent, calls_.async_options);
    if (!step.dtype.is_none()) call_with_buffers(step, buffers, 2);
    return arrived;
}

nb::object PlainSteps::scaled_product(const Step &step, const std::vector<nb::object> &buffers) const {
    const nb::object &a = buffers[step.in[0]], &b = buffers[step.in[1]];
    const nb::object bias = step.in.size() > 4 ? buffers[step.in[4]] : nb::none();
    const TensorView left = calls_.reader->view(a), right = calls_.reader->view(b);
    const int64_t rows = left.shape[0], cols = right.shape[1];
    const bool fast = step.kind == scaled_fast, on_gpu = is_on_gpu(left);
    if (on_gpu && rows * cols > 0)
        return scaled_mm(calls_.scaled_mm, a, b, buffers[step.in[2]], buffers[step.in[3]], bias, step.dtype, fast, nb::none());
    const nb::object shape[] = {number(rows), number(cols)};
    PyObject *given[] = {nullptr, a.ptr(), shape[0].ptr(), shape[1].ptr(), step.dtype.ptr()};
    const nb::object out = checked(
        PyObject_VectorcallMethod(new_empty_.ptr(), given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, dtype_keyword_.ptr()));
    if (rows * cols > 0)
        call_with(calls_.scaled_elsewhere,
                  {a, b, buffers[step.in[2]], buffers[step.in[3]], bias, fast ? Py_True : Py_False, out}, elsewhere_keywords_);
    return out;
}

void PlainSteps::run(std::vector<nb::object> &buffers, nb::handle group, const CpuCall *on_cpu) const {
    size_t collective = 0;
    for (const Step &step : steps_) {
        for (size_t read : step.in)
            if (!buffers[read].is_valid()) throw std::invalid_argument("a step reads a buffer that no step has written: correct the order of steps");
        const nb::object x = buffers[step.in[0]];
        nb::object work;
        if (on_cpu && (step.kind == gather || step.kind == scatter || step.kind == reduce)) {
            run_on_cpu(step, collective++, buffers, *on_cpu);
            continue;
        }
        switch (step.kind) {
        case mm:
            buffers[step.out] = call(calls_.mm, x, buffers[step.in[1]]);
            break;
        case gather: {
            const TensorView shard = calls_.reader->view(x);
            nb::object whole = new_matrix(x, world_ * shard.shape[0], shard.shape[1]);
            if (shard.dtype_bits == 8)  // gloo and older NCCL versions do not know fp8
                work = call(calls_.gather, group, call_method(whole, view_, calls_.byte), call_method(x, view_, calls_.byte),
                            calls_.gather_options);
            else
                work = call(calls_.gather, group, whole, x, calls_.gather_options);
            buffers[step.out] = std::move(whole);
            break;
        }
        case scatter: {
            const TensorView all = calls_.reader->view(x);
            nb::object part = new_matrix(x, all.shape[0] / world_, all.shape[1]);
            work = call(calls_.scatter, group, part, x, calls_.scatter_options);
            buffers[step.out] = std::move(part);
            break;
        }
        case reduce: {
            nb::list all;
            all.append(x);
            work = call(calls_.reduce, group, all, calls_.reduce_options);
            buffers[step.out] = x;
            break;
        }
        case scaled:
        case scaled_fast:
            buffers[step.out] = scaled_product(step, buffers);
            break;
        case exchange_counts:
        case exchange_there:
        case exchange_back:
            buffers[step.out] = exchanged(step, buffers, group, work);
            break;
        case called: {
            buffers[step.out] = call_with_buffers(step, buffers, 0);
            break;
        }
        }
        // If the backend returns a work handle, make the stream wait for the collective. Other backends have done so already.
        if (work.is_valid() && !work.is_none()) call_method(work, wait_);
    }
}

void PlainSteps::run_on_cpu(const Step &step, size_t number, std::vector<nb::object> &buffers, const CpuCall &call) const {
    const nb::object x = call_method(buffers[step.in[0]], contiguous_);
    const TensorView given = calls_.reader->view(x);
    const auto address = [](const TensorView &tensor) { return static_cast<char *>(tensor.data) + tensor.byte_offset; };
    const size_t nbytes = size_t(given.shape[0] * given.shape[1]) * given.dtype_bits / 8;
    PayloadExchange &exchange = call.turns.exchange();
    nb::object made;
    const auto run = [&](SharedCollective collective) { call.turns.run(number, collective, call.fingerprint, call.given); };
    if (step.kind == gather) {
        made = new_matrix(x, world_ * given.shape[0], given.shape[1]);
        run(SharedCollective::all_gather(exchange, address(given), address(calls_.reader->view(made)), nbytes));
    } else if (step.kind == scatter) {
        made = new_matrix(x, given.shape[0] / world_, given.shape[1]);
        run(SharedCollective::reduce_scatter(exchange, address(given), address(calls_.reader->view(made)), nbytes / size_t(world_),
                                             sum_dtype(given.dtype_code, given.dtype_bits)));
    } else {
        made = x;  // a product of this call, which is contiguous
        run(SharedCollective::all_reduce(exchange, address(given), nbytes, sum_dtype(given.dtype_code, given.dtype_bits)));
    }
    buffers[step.out] = std::move(made);
}

nb::dict PlainSteps::run_by_name(nb::dict inputs, nb::object group) const {
    std::vector<nb::object> buffers(names_.size());
    for (auto [name, tensor] : inputs) buffers[place(name)] = nb::borrow(tensor);
    run(buffers, group);
    nb::dict found;
    for (size_t i = 0; i < buffers.size(); ++i)
        if (buffers[i].is_valid() && PyDict_SetItem(found.ptr(), names_[i].ptr(), buffers[i].ptr())) throw nb::python_error();
    return found;
}

}  // namespace weft

using namespace weft;

void register_plain_steps(nb::module_ &m) {
    m.def("scaled_mm", &scaled_mm, nb::arg("function"), nb::arg("a"), nb::arg("b"), nb::arg("scale_a"), nb::arg("scale_b"),
          nb::arg("bias").none(), nb::arg("dtype"), nb::arg("fast"), nb::arg("out").none());
    nb::class_<TorchCalls>(m, "TorchCalls", "The functions of torch that steps call.")
        .def(nb::init<std::shared_ptr<LayoutReader>, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object>(),
             nb::kw_only(), nb::arg("reader"), nb::arg("mm"), nb::arg("scaled_mm"), nb::arg("scaled_elsewhere"), nb::arg("byte"),
             nb::arg("gather"), nb::arg("gather_options"), nb::arg("scatter"), nb::arg("scatter_options"), nb::arg("reduce"),
             nb::arg("reduce_options"), nb::arg("exchange"), nb::arg("exchange_options"), nb::arg("async_options"));
    nb::class_<PlainSteps>(m, "PlainSteps", "GEMMs and collectives of equal parts over whole matrices, one after the other.")
        .def(nb::init<nb::object, nb::list, nb::list, int64_t>(), nb::arg("torch"), nb::arg("buffers"), nb::arg("steps"),
             nb::arg("world"))
        .def("run", &PlainSteps::run_by_name, nb::arg("inputs"), nb::arg("group"));
}
