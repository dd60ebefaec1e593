#include "linear.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "dot.h"
#include "pool.h"

namespace tp {
namespace {

constexpr int WIDE_ROWS = 8;    // up to here the weights come from memory: one pass over them for all rows
constexpr int ROW_BLOCK = 252;  // rows of x that stay in the second-level cache while the strips pass by

int step_of(Dtype t) { return t == Dtype::bf16 ? DotBf16::STEP : 1; }

// [n, k] -> strips of [steps][16][step], zeros where n or k end.
template <class T>
void pack(T* out, const T* w, int64_t ldw, int n, int k, int step, int steps) {
    int strips = (n + 15) / 16;
    for_each(strips, [&](int s) {
        T* strip = out + int64_t(s) * steps * 16 * step;
        for (int c = 0; c < std::min(16, n - s * 16); ++c) {
            const T* row = w + int64_t(s * 16 + c) * ldw;
            for (int i = 0; i < k; ++i) strip[(int64_t(i / step) * 16 + c) * step + i % step] = row[i];
        }
    });
}

template <class T>
struct Job {
    const typename T::A* x;
    int64_t ldx;
    const typename T::B* w;
    int64_t strip;
    int steps, n;
    const float* bias;
    void* y;
    int64_t ldy;
    const void* residual;
};

// Writes acc (rows first .. first + MR, columns of NR strips from column c): round, add the residual, round.
template <class Out, int MR, int NR, class T>
inline void finish(const Job<T>& job, v16 (&acc)[MR][NR], int first, int c) {
    for (int i = 0; i < MR; ++i) {
        int64_t at = int64_t(first + i) * job.ldy + c;
        for (int j = 0; j < NR; ++j) {
            int left = job.n - c - j * 16;
            if (left <= 0) break;
            v16 v = acc[i][j];
            if (job.bias) v = v + load(job.bias + c + j * 16);
            if (job.residual)
                v = rounded<Out>(v) + load_some(static_cast<const Out*>(job.residual) + at + j * 16, left);
            store_some(static_cast<Out*>(job.y) + at + j * 16, v, left);
        }
    }
}

// Rows [row0, row1), strips [s0, s1) in groups of NR.
template <class Out, class T, int MAX, int NR, int AHEAD>
void block(const Job<T>& job, int row0, int row1, int s0, int s1) {
    auto group = [&]<int N>(int s) {
        const typename T::B* w = job.w + s * job.strip;
        for_row_blocks<MAX>(row1 - row0, [&]<int MR>(int r) {
            v16 acc[MR][N];
            for (auto& row : acc)
                for (v16& v : row) v = splat(0);
            multiply<T, MR, N, AHEAD>(job.x + int64_t(row0 + r) * job.ldx, job.ldx, w, job.strip, job.steps, acc);
            finish<Out>(job, acc, row0 + r, s * 16);
        });
    };
    int s = s0;
    for (; s + NR <= s1; s += NR) group.template operator()<NR>(s);
    for (; s < s1; ++s) group.template operator()<1>(s);
}

template <class Out, class T>
void all(const Job<T>& job, int rows) {
    int strips = (job.n + 15) / 16;
    if (rows <= WIDE_ROWS) {
        // Tasks of about 64 KiB: fine enough to share out evenly, long enough to stream.
        int each = rows > 4 ? 6 : 4;
        int64_t strip_bytes = job.strip * int64_t(sizeof(typename T::B));
        each *= int(std::max<int64_t>(1, 65536 / (strip_bytes * each)));
        for_each((strips + each - 1) / each, [&](int t) {
            int s0 = t * each, s1 = std::min(strips, s0 + each);
            if (rows > 6) block<Out, T, 8, 3, 2048>(job, 0, rows, s0, s1);
            else if (rows > 4) block<Out, T, 6, 3, 2048>(job, 0, rows, s0, s1);
            else block<Out, T, 4, 4, 2048>(job, 0, rows, s0, s1);
        });
        return;
    }
    int columns = (strips + 3) / 4, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    for_each(columns * blocks, [&](int t) {
        int row0 = t / columns * ROW_BLOCK, s0 = t % columns * 4;
        block<Out, T, 6, 4, 0>(job, row0, std::min(rows, row0 + ROW_BLOCK), s0, std::min(strips, s0 + 4));
    });
}

template <class Out>
const float* widened(const Out* x, int64_t ldx, int rows, int k, float* to) {
    for_each(rows, [&](int r) {
        for (int i = 0; i < k; i += 16)
            store_some(to + int64_t(r) * k + i, load_some(x + r * ldx + i, k - i), k - i);
    });
    return to;
}

}  // namespace

Linear::Linear(const void* weight, int64_t ldw, const void* bias, int n, int k, Dtype dtype)
    : n_(n), k_(k), dtype_(dtype), bias_(nullptr) {
    if (n < 1 || k < 1) throw std::invalid_argument("a linear layer needs at least one row and one column");
    int step = step_of(dtype);
    steps_ = (k + step - 1) / step;
    strips_ = (n + 15) / 16;
    bytes_ = int64_t(strips_) * steps_ * 16 * step * item_bytes(dtype);
    packed_ = static_cast<char*>(alloc_pages(bytes_));
    with_type(dtype, [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        pack(reinterpret_cast<T*>(packed_), static_cast<const T*>(weight), ldw, n, k, step, steps_);
        if (!bias) return;
        bias_ = static_cast<float*>(alloc_pages(int64_t(strips_) * 64));
        for (int i = 0; i < n; ++i) bias_[i] = to_float(static_cast<const T*>(bias)[i]);
    });
}

Linear::~Linear() {
    free_pages(packed_, bytes_);
    if (bias_) free_pages(bias_, int64_t(strips_) * 64);
}

void Linear::run(const void* x, int64_t ldx, int rows, void* y, int64_t ldy, const void* residual, bool wide) const {
    if (rows < 1) return;
    if (dtype_ == Dtype::bf16) {
        // A step reads two values of x: an odd k needs a zero behind each row.
        std::vector<bf16> padded;
        const bf16* rows_of_x = static_cast<const bf16*>(x);
        if (k_ % 2) {
            padded.resize(size_t(rows) * (k_ + 1), bf16{0});
            for (int r = 0; r < rows; ++r) std::copy_n(rows_of_x + r * ldx, k_, padded.data() + int64_t(r) * (k_ + 1));
            rows_of_x = padded.data();
            ldx = k_ + 1;
        }
        Job<DotBf16> job{rows_of_x, ldx, reinterpret_cast<const bf16*>(packed_), int64_t(steps_) * 32, steps_, n_, bias_, y,
                         ldy, residual};
        wide ? all<float>(job, rows) : all<bf16>(job, rows);
    } else if (dtype_ == Dtype::f32) {
        Job<DotF32> job{static_cast<const float*>(x), ldx, reinterpret_cast<const float*>(packed_), int64_t(steps_) * 16,
                        steps_, n_, bias_, y, ldy, residual};
        all<float>(job, rows);
    } else {
        float* copy = static_cast<float*>(scratch(7, int64_t(rows) * k_ * 4));
        widened(static_cast<const f16*>(x), ldx, rows, k_, copy);
        Job<DotF16> job{copy, k_, reinterpret_cast<const f16*>(packed_), int64_t(steps_) * 16, steps_, n_, bias_, y, ldy,
                        residual};
        wide ? all<float>(job, rows) : all<f16>(job, rows);
    }
}

}  // namespace tp
