// Enough of the Metal Shading Language to compile kernels as C++ and run them on a CPU: SIMD groups
// of 32 lanes in lockstep, one threadgroup after another. Buffers are plain vectors, so the
// address sanitizer finds accesses beyond their ends.
#include <algorithm>
#include <bit>
#include <cmath>
#include <coroutine>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

using std::fma, std::max, std::min;
using uint = unsigned int;

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

// A lane is a coroutine: it runs until it needs the values of other lanes.
struct Lane {
  struct promise_type {
    Lane get_return_object() {
      return {std::coroutine_handle<promise_type>::from_promise(*this)};
    }
    std::suspend_always initial_suspend() {
      return {};
    }
    std::suspend_always final_suspend() noexcept {
      return {};
    }
    void return_void() {}
    void unhandled_exception() {
      std::terminate();
    }
  };
  std::coroutine_handle<promise_type> handle;
};

inline std::vector<float> given, received; // of each lane: in this step and in the previous one
inline uint lane_of_threadgroup; // the lane that runs

// Combines the values of all lanes of the SIMD group in the next step.
template <typename Combine>
struct Collective {
  float value;
  Combine combine;

  Collective(float value, Combine combine) : value(value), combine(combine) {}
  bool await_ready() {
    return false;
  }
  void await_suspend(std::coroutine_handle<>) {
    given[lane_of_threadgroup] = value;
  }
  float await_resume() {
    const uint lane = lane_of_threadgroup % 32;
    return combine(&received[lane_of_threadgroup - lane], lane);
  }
};

inline auto simd_sum(float value) {
  return Collective{value, [](const float* lanes, uint) {
    float values[32];
    std::copy_n(lanes, 32, values);
    for (int width = 16; width > 0; width /= 2) {
      for (int at = 0; at < width; at++) {
        values[at] += values[at + width];
      }
    }
    return values[0];
  }};
}

// Metal does not define the values beyond the last lane.
inline auto simd_shuffle_down(float value, uint below) {
  return Collective{value, [below](const float* lanes, uint lane) {
    return lane + below < 32 ? lanes[lane + below] : NAN;
  }};
}

enum class mem_flags { mem_none, mem_threadgroup };
inline std::suspend_always threadgroup_barrier(mem_flags) {
  return {};
}

// Runs `kernel(threadgroup, SIMD group, lane)` on all threadgroups.
template <typename Kernel>
void dispatch(uint columns, uint rows, uint simdgroups, Kernel kernel) {
  for (uint place = 0; place < columns * rows; place++) {
    const uint3 threadgroup{place % columns, place / columns, 0};
    std::vector<Lane> lanes;
    for (uint number = 0; number < 32 * simdgroups; number++) {
      lanes.push_back(kernel(threadgroup, number / 32, number % 32));
    }
    for (bool running = true; running;) {
      running = false;
      given.assign(lanes.size(), NAN); // a lane that has ended gives no value
      for (lane_of_threadgroup = 0; lane_of_threadgroup < lanes.size(); lane_of_threadgroup++) {
        auto& handle = lanes[lane_of_threadgroup].handle;
        if (!handle.done()) {
          handle.resume();
          running = true;
        }
      }
      received = given;
    }
    for (auto& each : lanes) {
      each.handle.destroy();
    }
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
#define MLX_MTL_PRAGMA_UNROLL

template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T value) {
  return value;
}

inline float round_to(const char* kind, float value) {
  if (std::strcmp(kind, "float16") == 0) {
    return float(_Float16(value));
  }
  const uint32_t bits = std::bit_cast<uint32_t>(value); // to nearest, ties to even
  return std::bit_cast<float>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

struct Dice {
  uint64_t state = 7;

  uint32_t operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 32;
  }
};

// Values of many magnitudes. They are rounded to 16 bits, but computed and stored in float32, so that
// comparisons see every bit of a sum.
inline std::vector<float> random_values(Dice& dice, const char* kind, int count, float scale) {
  std::vector<float> values(count);
  for (auto& each : values) {
    const float even = std::ldexp(float(dice()), -31) - 1;
    each = round_to(kind, 3 * scale * even * even * even);
  }
  return values;
}

// Counts the values with other bits, up to the end of the shorter list.
inline int differences(const std::vector<float>& one, const std::vector<float>& other) {
  int count = 0;
  for (size_t at = 0; at < min(one.size(), other.size()); at++) {
    count += std::memcmp(&one[at], &other[at], sizeof(float)) != 0;
  }
  return count;
}
