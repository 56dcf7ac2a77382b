// Memory of a model.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace forerun {

// Vectors that begin with a cache line: a register of 64 bytes that straddles two takes two reads.
template <class T>
struct OnLines {
    using value_type = T;
    OnLines() = default;
    template <class Other>
    OnLines(const OnLines<Other>&) {}
    T* allocate(size_t count) {
        return (T*)::operator new(count * sizeof(T), std::align_val_t(64));
    }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
    bool operator==(const OnLines&) const { return true; }
    bool operator!=(const OnLines&) const { return false; }
};
using Floats = std::vector<float, OnLines<float>>;

// Memory from the system: zero and untouched until used.
class Region {
public:
    explicit Region(size_t bytes, bool huge = false);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace forerun
