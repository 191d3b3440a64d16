// Compares the bits of our kernel for several rows with those of MLX's kernels for one row.
// Usage: compare OUTPUTS INPUTS float16|bfloat16. Prints for each group size, number of rows and
// words of a lane how many values differ from `qmv_fast` (-1: not possible) and from `qmv`.
namespace ours {
template <typename T, int BITS, int GROUP, int ROWS, int WORDS, bool FUSED>
Lane multiply(
    const T* x, const uint32_t* w, const T* scales, const T* biases, T* y, const int* w_shape,
    uint3 threadgroup_position_in_grid, uint simdgroup_index_in_threadgroup,
    uint thread_index_in_simdgroup) {
#include "ours.h"
}
} // namespace ours

template <int GROUP, int ROWS, int WORDS>
void compare(int outputs, int inputs, const char* kind) {
  Dice dice;
  auto random = [&](int count, float scale) { return random_values(dice, kind, count, scale); };
  const auto x = random(ROWS * inputs, 3), scales = random(outputs * inputs / GROUP, 0.05);
  const auto biases = random(scales.size(), 0.5);
  std::vector<uint32_t> w(outputs * inputs * CODE_BITS / 32);
  for (auto& each : w) {
    each = dice();
  }
  const int shape[] = {outputs, inputs * CODE_BITS / 32};
  const uint blocks = (outputs + 7) / 8;
  std::vector<float> together(ROWS * outputs), fast(together), plain(together);
  dispatch(1, blocks, 2, [&](uint3 at, uint group, uint lane) {
    return ours::multiply<float, CODE_BITS, GROUP, ROWS, WORDS, FUSED_SUM>(
        x.data(), w.data(), scales.data(), biases.data(), together.data(), shape, at, group, lane);
  });
  int from_fast = -1;
  if (inputs % (2 * 32 * 32 / CODE_BITS) == 0) {
    dispatch(ROWS, blocks, 2, [&](uint3 at, uint group, uint lane) {
      return qmv_fast_impl<float, GROUP, CODE_BITS, true>(
          w.data(), scales.data(), biases.data(), x.data(), fast.data(), inputs, outputs, at, group,
          lane);
    });
    from_fast = differences(together, fast);
  }
  dispatch(ROWS, blocks, 2, [&](uint3 at, uint group, uint lane) {
    return qmv_impl<float, GROUP, CODE_BITS>(
        w.data(), scales.data(), biases.data(), x.data(), plain.data(), inputs, outputs, at, group,
        lane);
  });
  std::printf("%d %d %d %d %d\n", GROUP, ROWS, WORDS, from_fast, differences(together, plain));
}

template <int GROUP, int WORDS, int... ROWS>
void compare_rows(int outputs, int inputs, const char* kind) {
  const bool whole_blocks = inputs % (WORDS * 32 * 32 / CODE_BITS) == 0;
  if (inputs % GROUP == 0 && (WORDS == 1 || whole_blocks)) {
    (compare<GROUP, ROWS, WORDS>(outputs, inputs, kind), ...);
  }
}

int main(int, char** words) {
  const int outputs = std::atoi(words[1]), inputs = std::atoi(words[2]);
  compare_rows<32, 2, 4>(outputs, inputs, words[3]);
  compare_rows<64, 2, 2, 5, 8>(outputs, inputs, words[3]);
  compare_rows<64, 1, 3, 7>(outputs, inputs, words[3]);
  compare_rows<128, 1, 6>(outputs, inputs, words[3]);
}
