// How a kernel reads its argument array. The order of the arguments is stated at the top of each kernel and matched by
// the operator's Python file; a pointer is passed as an integer, a float as the bits of a double.
#pragma once
#include <cstdint>
#include <cstring>

struct Arguments {
    const int64_t* next;
    template <class T>
    T* pointer() {
        return reinterpret_cast<T*>(*next++);
    }
    int64_t integer() { return *next++; }
    // An int32 that lives in the batch buffers and changes from step to step.
    int64_t count() { return *reinterpret_cast<const int32_t*>(*next++); }
    float number() {
        double value;
        memcpy(&value, next++, 8);
        return (float)value;
    }
};

#define KERNEL(name) extern "C" __attribute__((visibility("default"))) void name(const int64_t* arguments)
