// Runs a recorded program, as recording.py writes it, with one library of kernels: on the machine it was compiled for, or
// under an emulator of one.
//
//     replay RECORDING LIBRARY N_THREADS OUT
//
// RECORDING is int64 numbers and bytes, little-endian: the buffers; the program, in which each word is a number, a place in a
// buffer or a kernel's name; the regions that are written to OUT after each step; and for each step the buffers that change
// before it.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int64_t NUMBER = -1, KERNEL = -2;  // in the place of a buffer's index

[[noreturn]] void fail(const std::string& why) {
    fprintf(stderr, "replay: %s\n", why.c_str());
    exit(1);
}

struct Reader {
    FILE* file;
    void bytes(void* to, int64_t n) {
        if (fread(to, 1, n, file) != (size_t)n) fail("the recording ends too early");
    }
    int64_t number() {
        int64_t n;
        bytes(&n, sizeof n);
        return n;
    }
};

struct Buffer {
    uint8_t* data;
    int64_t n_bytes;
};

struct Region {
    int64_t buffer, offset, n_bytes;
};

struct Library {
    void* handle;
    explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW)) {
        if (!handle) fail(dlerror());
    }
    template <class Function>
    Function* function(const char* name) const {
        void* found = dlsym(handle, name);
        if (!found) fail(std::string("no kernel ") + name);
        return reinterpret_cast<Function*>(found);
    }
};

std::vector<int64_t> read_program(Reader& in, const std::vector<Buffer>& buffers, const Library& library) {
    std::vector<int64_t> program(in.number());
    for (int64_t& word : program) {
        int64_t buffer = in.number(), value = in.number();
        if (buffer == NUMBER) {
            word = value;
        } else if (buffer == KERNEL) {
            std::string name(value, '\0');
            in.bytes(name.data(), value);
            word = (int64_t)library.function<void(const int64_t*)>(name.c_str());
        } else {
            word = (int64_t)(buffers.at(buffer).data + value);
        }
    }
    return program;
}

}  // namespace

int main(int n_arguments, char** arguments) {
    if (n_arguments != 5) fail("usage: replay RECORDING LIBRARY N_THREADS OUT");
    Reader in{fopen(arguments[1], "rb")};
    FILE* out = fopen(arguments[4], "wb");
    if (!in.file || !out) fail("cannot open the recording or the output");
    Library library(arguments[2]);
    if (library.function<int64_t(int64_t, const int32_t*)>("deltic_start_threads")(atoi(arguments[3]), nullptr)) fail("no threads");

    std::vector<Buffer> buffers(in.number());
    for (Buffer& b : buffers) {
        b.n_bytes = in.number();
        b.data = (uint8_t*)aligned_alloc(64, (b.n_bytes + 63) / 64 * 64);
        if (!b.data) fail("out of memory");
        in.bytes(b.data, b.n_bytes);
    }
    const std::vector<int64_t> program = read_program(in, buffers, library);
    std::vector<Region> regions(in.number());
    for (Region& r : regions) r = {in.number(), in.number(), in.number()};

    auto run = library.function<void(const int64_t*, int64_t)>("deltic_run");
    for (int64_t n_steps = in.number(); n_steps > 0; n_steps--) {
        for (int64_t n_fills = in.number(); n_fills > 0; n_fills--) {
            Buffer& b = buffers.at(in.number());
            in.bytes(b.data, b.n_bytes);
        }
        run(program.data(), (int64_t)program.size());
        for (const Region& r : regions)
            if (fwrite(buffers.at(r.buffer).data + r.offset, 1, r.n_bytes, out) != (size_t)r.n_bytes) fail("cannot write the output");
    }
    if (fclose(out)) fail("cannot write the output");
}
