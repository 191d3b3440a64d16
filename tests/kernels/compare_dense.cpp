// Compares the bits of our kernel for several rows of 16 bits with those of MLX's `gemv` for one
// row. Usage: compare_dense OUTPUTS INPUTS float16|bfloat16. Prints for each number of rows, lanes
// and SIMD groups of a matrix row how many values differ from each of MLX's three kernels.
namespace ours {
#undef threadgroup
#define threadgroup static // one threadgroup runs after another
template <typename T, int ROWS, int LANES, int SPLIT>
Lane multiply(
    const T* x, const T* w, T* y, const int* w_shape, uint3 threadgroup_position_in_grid,
    uint simdgroup_index_in_threadgroup, uint thread_index_in_simdgroup) {
#include "ours.h"
}
#undef threadgroup
#define threadgroup
} // namespace ours

template <int BM, int BN, int SM, int SN>
std::vector<float> alone(
    const std::vector<float>& x, const std::vector<float>& w, int rows, int outputs, int inputs) {
  using Kernel = GEMVKernel<float, BM, BN, SM, SN, 4, 4, false>;
  std::vector<float> y(rows * outputs), shared(std::max<int>(1, Kernel::tgp_mem_size));
  const uint threadgroups = (outputs + BM * SM * 4 - 1) / (BM * SM * 4);
  const float alpha = 1, beta = 0;
  const int stride = 0;
  dispatch(threadgroups, rows, BM * BN, [&](uint3 at, uint group, uint lane) {
    return Kernel::run(
        w.data(), x.data() + at.y * inputs, nullptr, y.data() + at.y * outputs, inputs, outputs,
        inputs, alpha, beta, stride, shared.data(), at, uint3{}, group, lane);
  });
  return y;
}

// Compares the first `ROWS` rows.
template <int ROWS, int LANES, int SPLIT>
void compare(
    const std::vector<float>& x, const std::vector<float>& w,
    const std::vector<std::vector<float>>& expected, int outputs, int inputs) {
  const int shape[] = {outputs, inputs};
  const int of_threadgroup = OUTPUTS * (32 / LANES) * (SIMDGROUPS / SPLIT);
  const uint threadgroups = (outputs + of_threadgroup - 1) / of_threadgroup;
  const std::vector<float> rows(x.begin(), x.begin() + ROWS * inputs);
  std::vector<float> together(ROWS * outputs);
  dispatch(1, threadgroups, SIMDGROUPS, [&](uint3 at, uint group, uint lane) {
    return ours::multiply<float, ROWS, LANES, SPLIT>(
        rows.data(), w.data(), together.data(), shape, at, group, lane);
  });
  std::printf("%d %d %d", ROWS, LANES, SPLIT);
  for (const auto& each : expected) {
    std::printf(" %d", differences(together, each));
  }
  std::puts("");
}

template <int LANES, int SPLIT, int... ROWS>
void compare_rows(int outputs, int inputs, const char* kind) {
  constexpr int most = std::max({ROWS...});
  Dice dice;
  const auto x = random_values(dice, kind, most * inputs, 3);
  const auto w = random_values(dice, kind, outputs * inputs, 0.05);
  // One row of the kernels that MLX does not choose shows that the order matters.
  const std::vector<std::vector<float>> expected = {
      alone<1, 1, 8, 4>(x, w, LANES == 4 ? most : 1, outputs, inputs),
      alone<4, 1, 1, 32>(x, w, LANES == 32 && SPLIT == 1 ? most : 1, outputs, inputs),
      alone<1, 8, 1, 32>(x, w, SPLIT == 8 ? most : 1, outputs, inputs)};
  (compare<ROWS, LANES, SPLIT>(x, w, expected, outputs, inputs), ...);
}

int main(int, char** words) {
  const int outputs = std::atoi(words[1]), inputs = std::atoi(words[2]);
  if (inputs <= 64) {
    compare_rows<4, 1, 3, 7>(outputs, inputs, words[3]);
  } else if (inputs >= 16 * outputs) {
    compare_rows<32, 8, 2, 5>(outputs, inputs, words[3]);
  } else {
    compare_rows<32, 1, 2, 3, 4, 5, 6, 7, 8>(outputs, inputs, words[3]);
  }
}
