// A lane multiplies WORDS packed words at a time, and a SIMD group 32 times that. Activations times
// codes are exact in float32, so only the order of additions and FUSED decide the bits.
constexpr int PACK = 32 / BITS;      // values in a packed word
constexpr int VALUES = WORDS * PACK; // consecutive values of a lane
const int outputs = w_shape[0], words = w_shape[1];
const int inputs = words * PACK, groups = inputs / GROUP;
const int lane = thread_index_in_simdgroup;
const int first =
    (threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup) * OUTPUTS;
if (first >= outputs) return;
float result[OUTPUTS][ROWS] = {};
for (int k = lane * VALUES; k < inputs; k += 32 * VALUES) {
  uint packed[OUTPUTS][WORDS];
  UNROLL for (int out = 0; out < OUTPUTS; out++) {
    const int at = min(first + out, outputs - 1) * words + k / PACK;
    UNROLL for (int word = 0; word < WORDS; word++) packed[out][word] = w[at + word];
  }
  float dot[OUTPUTS][ROWS] = {};
  float sum[ROWS] = {};
  UNROLL for (int unit = 0; unit < VALUES; unit += 4) {
    float v[ROWS][4];
    UNROLL for (int row = 0; row < ROWS; row++) {
      const vec<T, 4> values = *(const device vec<T, 4>*)(x + row * inputs + k + unit);
      UNROLL for (int i = 0; i < 4; i++) v[row][i] = static_cast<float>(values[i]);
      sum[row] = plus<BITS>(sum[row], v[row][0], v[row][1], v[row][2], v[row][3]);
    }
    UNROLL for (int out = 0; out < OUTPUTS; out++) {
      const uint word = packed[out][unit / PACK] >> (unit % PACK * BITS);
      float code[4];
      UNROLL for (int i = 0; i < 4; i++) {
        code[i] = static_cast<float>((word >> (i * BITS)) & ((1 << BITS) - 1));
      }
      UNROLL for (int row = 0; row < ROWS; row++) {
        dot[out][row] = plus<BITS>(dot[out][row], v[row][0] * code[0], v[row][1] * code[1],
                                   v[row][2] * code[2], v[row][3] * code[3]);
      }
    }
  }
  UNROLL for (int out = 0; out < OUTPUTS; out++) {
    const int at = min(first + out, outputs - 1) * groups + k / GROUP;
    const float scale = static_cast<float>(scales[at]), bias = static_cast<float>(biases[at]);
    UNROLL for (int row = 0; row < ROWS; row++) {
      result[out][row] += FUSED ? fma(scale, dot[out][row], sum[row] * bias)
                                : scale * dot[out][row] + sum[row] * bias;
    }
  }
}
UNROLL for (int out = 0; out < OUTPUTS; out++) {
  UNROLL for (int row = 0; row < ROWS; row++) {
    const float total = simd_sum(result[out][row]);
    if (lane == 0 && first + out < outputs) y[row * outputs + first + out] = static_cast<T>(total);
  }
}
