// Products of two values of 16 bits are exact in float32, so only the order of additions decides the
// bits: in a lane, then over LANES, then over the SPLIT SIMD groups that share a matrix row.
const int outputs = w_shape[0], inputs = w_shape[1];
const int lane = thread_index_in_simdgroup % LANES;
const int part = simdgroup_index_in_threadgroup % SPLIT;
const int group = threadgroup_position_in_grid.y * (SIMDGROUPS / SPLIT) +
    simdgroup_index_in_threadgroup / SPLIT;
const int first = (group * (32 / LANES) + thread_index_in_simdgroup / LANES) * OUTPUTS;
float result[OUTPUTS][ROWS] = {};
for (int k = (part * LANES + lane) * 4; k < inputs; k += SPLIT * LANES * 4) {
  vec<T, 4> v[ROWS];
  UNROLL for (int row = 0; row < ROWS; row++) {
    v[row] = *(const device vec<T, 4>*)(x + row * inputs + k);
  }
  UNROLL for (int out = 0; out < OUTPUTS; out++) {
    const long at = static_cast<long>(min(first + out, outputs - 1)) * inputs + k;
    const vec<T, 4> weights = *(const device vec<T, 4>*)(w + at);
    UNROLL for (int i = 0; i < 4; i++) {
      UNROLL for (int row = 0; row < ROWS; row++) {
        result[out][row] += static_cast<float>(weights[i]) * static_cast<float>(v[row][i]);
      }
    }
  }
}
threadgroup float shared[SIMDGROUPS][OUTPUTS][ROWS];
UNROLL for (int out = 0; out < OUTPUTS; out++) {
  UNROLL for (int row = 0; row < ROWS; row++) {
    thread float& sum = result[out][row];
    UNROLL for (int below = LANES / 2; below > 0; below /= 2) {
      sum += simd_shuffle_down(sum, below);
    }
    if (SPLIT > 1 && lane == 0) shared[simdgroup_index_in_threadgroup][out][row] = sum;
  }
}
if (SPLIT > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
if (lane != 0 || part != 0) return;
UNROLL for (int out = 0; out < OUTPUTS; out++) {
  UNROLL for (int row = 0; row < ROWS; row++) {
    float total = result[out][row];
    for (int other = 1; other < SPLIT; other++) {
      total += shared[simdgroup_index_in_threadgroup + other][out][row];
    }
    if (first + out < outputs) y[row * outputs + first + out] = static_cast<T>(total);
  }
}
