// Enough of the Metal Shading Language to compile kernels as C++ and run them on a CPU: SIMD groups
// of 32 threads in lockstep, one threadgroup after another. Buffers are plain vectors, so the
// address sanitizer finds accesses beyond their ends.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

using std::fma, std::max, std::min;
using uint = unsigned int;
using Worker = std::thread;

struct short2 {
  short x, y;
};
struct uint2 {
  uint x, y;
};
struct uint3 {
  uint x, y, z;
};
template <typename T, int size>
struct vec {
  T values[size];
  T operator[](int at) const {
    return values[at];
  }
};

struct Simdgroup {
  std::barrier<> gate{32};
  float values[32];
};

inline thread_local Simdgroup* simdgroup;
inline thread_local uint lane_of_simdgroup;

inline float simd_sum(float value) {
  float values[32];
  simdgroup->values[lane_of_simdgroup] = value;
  simdgroup->gate.arrive_and_wait();
  std::copy(simdgroup->values, simdgroup->values + 32, values);
  simdgroup->gate.arrive_and_wait();
  for (int width = 16; width > 0; width /= 2) {
    for (int at = 0; at < width; at++) {
      values[at] += values[at + width];
    }
  }
  return values[0];
}

// Runs `kernel(threadgroup, SIMD group, lane)` on all threadgroups, each of two SIMD groups.
template <typename Kernel>
void dispatch(uint columns, uint rows, Kernel kernel) {
  Simdgroup groups[2];
  std::vector<Worker> workers;
  for (uint number = 0; number < 64; number++) {
    workers.emplace_back([&, number] {
      simdgroup = &groups[number / 32];
      lane_of_simdgroup = number % 32;
      for (uint y = 0; y < rows; y++) {
        for (uint x = 0; x < columns; x++) {
          kernel(uint3{x, y, 0}, number / 32, number % 32);
        }
      }
    });
  }
  for (auto& each : workers) {
    each.join();
  }
}

template <typename T>
T clamp(T value, T low, T high) {
  return std::clamp(value, low, high);
}
template <typename T>
T select(T no, T yes, bool which) {
  return which ? yes : no;
}
inline float quad_sum(float value) {
  return value; // only declared: kernels of quads are not run
}

#define METAL_FUNC inline
#define MLX_MTL_CONST static constexpr
#define constant
#define device
#define thread
#define threadgroup
