// Shared memory that stays mapped as long as the mapping is referenced. Unlike Python's `mmap`, this class keeps no
// duplicate of the file descriptor open.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace nb = nanobind;

namespace {

class Mapping {
  public:
    Mapping(int fd, size_t nbytes) : nbytes_(nbytes) {
        struct stat file;
        // If the file were too short, or if its creator could still shorten it, an access would cause a bus fault
        // instead of an error.
        const int seals = fcntl(fd, F_GET_SEALS);
        if (seals < 0 || fstat(fd, &file) < 0) fail();
        if (!(seals & F_SEAL_SHRINK) || size_t(file.st_size) < nbytes) {
            errno = EINVAL;
            fail();
        }
        {
            nb::gil_scoped_release unlocked;  // populating a large mapping takes long
            base_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
        }
        if (base_ == MAP_FAILED) fail();
    }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    ~Mapping() { munmap(base_, nbytes_); }

    uintptr_t address() const { return reinterpret_cast<uintptr_t>(base_); }
    size_t nbytes() const { return nbytes_; }

  private:
    [[noreturn]] static void fail() {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }

    void *base_ = nullptr;
    size_t nbytes_;
};

// Asks for huge pages in memory that has not been touched, so that random reads of a large table miss the TLB less
// often. Systems without huge pages ignore the request.
void prefer_huge_pages(uintptr_t address, size_t nbytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), first = (address + page - 1) / page * page;
    const uintptr_t end = (address + nbytes) / page * page;
    if (end > first) madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

void register_mapping(nb::module_ &m) {
    nb::class_<Mapping>(m, "Mapping",
                        "A shared mapping of a sealed memfd, with all pages allocated. It ends with the last reference. "
                        "The caller keeps, and closes, the file descriptor. Raises OSError.")
        .def(nb::init<int, size_t>(), nb::arg("fd"), nb::arg("nbytes"))
        .def_prop_ro("address", &Mapping::address)
        .def_prop_ro("nbytes", &Mapping::nbytes);
    m.def("prefer_huge_pages", prefer_huge_pages, nb::arg("address"), nb::arg("nbytes"),
          "Ask the kernel for huge pages in memory that has not been touched yet.");
}
