// Arguments of a kernel: KERNEL(name, parameters) is a function that is called with one array of 64-bit values. They are
// read in the order of its parameters, which is stated at the top of each kernel and matched by the operator's Python file.
#pragma once
#include <bit>
#include <cstdint>
#include <tuple>
#include <type_traits>

struct Arguments {
    const int64_t* next;

    // A type of several values has a `read` of its own. A pointer is passed as an integer, a float as the bits of a double.
    template <class T>
    void read_one(T& value) {
        if constexpr (requires { value.read(*this); }) value.read(*this);
        else if constexpr (std::is_pointer_v<T>) value = reinterpret_cast<T>(*next++);
        else if constexpr (std::is_same_v<T, float>) value = (float)std::bit_cast<double>(*next++);
        else value = (T)*next++;
    }
    template <class... T>
    void read(T&... values) {
        (read_one(values), ...);
    }
};

// An int32 that lives in the batch buffers and changes from step to step.
struct Counted {
    int64_t n;
    operator int64_t() const { return n; }
    void read(Arguments& a) {
        const int32_t* place;
        a.read(place);
        n = *place;
    }
};

template <class... T>
static inline void call(void (*kernel)(T...), const int64_t* arguments) {
    std::tuple<T...> values;
    std::apply([&](T&... each) { Arguments{arguments}.read(each...); }, values);
    std::apply(kernel, values);
}

#define KERNEL(name, ...)                                                                                                       \
    static void name##_with(__VA_ARGS__);                                                                                       \
    extern "C" __attribute__((visibility("default"))) void name(const int64_t* arguments) { call(name##_with, arguments); }     \
    static void name##_with(__VA_ARGS__)
