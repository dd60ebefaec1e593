#include "moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "elementwise.h"
#include "pool.h"

namespace tp {
namespace {

struct Choice {
    int row;
    float weight;
};

// The top_k largest of softmax(logits), the lower index first among equals: (expert, weight) in ascending order of expert.
std::vector<std::pair<int, float>> choose(const float* logits, int n, int top_k, bool normalise) {
    std::vector<float> p(size_t(n + 15) / 16 * 16);
    float top = *std::max_element(logits, logits + n);
    v16 sums = splat(0);
    for (int i = 0; i < n; i += 16) {
        v16 e = exp(load_some(logits + i, n - i) - splat(top));
        store(p.data() + i, e);
        sums = sums + load_some(p.data() + i, n - i);
    }
    float total = sum(sums);
    for (float& weight : p) weight = weight == weight ? weight : 0.0f;  // a row of NaN keeps its NaN in `total`
    std::vector<int> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                      [&](int a, int b) { return p[size_t(a)] != p[size_t(b)] ? p[size_t(a)] > p[size_t(b)] : a < b; });
    std::vector<std::pair<int, float>> chosen;
    float kept = 0;
    for (int i = 0; i < top_k; ++i) {
        float weight = p[size_t(order[size_t(i)])] / total;
        kept += weight;
        chosen.emplace_back(order[size_t(i)], weight);
    }
    if (normalise)
        for (auto& c : chosen) c.second /= kept;
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

template <class T>
std::vector<std::vector<Choice>> route(const Moe& layer, const T* x, int rows) {
    int n = layer.router->n(), k = layer.router->k();
    std::vector<T> logits(size_t(rows) * size_t(n));
    layer.router->run(x, k, rows, logits.data(), n, nullptr, false);
    std::vector<std::vector<Choice>> by_expert(static_cast<size_t>(n));
    std::vector<float> wide(static_cast<size_t>(n));
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < n; ++i) wide[size_t(i)] = to_float(logits[size_t(r) * size_t(n) + size_t(i)]);
        for (auto [expert, weight] : choose(wide.data(), n, layer.top_k, layer.normalise))
            by_expert[size_t(expert)].push_back({r, rounded<T>(weight)});
    }
    return by_expert;
}

// out [rows, hidden] = down(silu(gate) * up); the caller's buffers are sized by it.
template <class T>
void expert(const Linear& gate_up, const Linear& down, const T* x, int rows, std::vector<T>& work, T* out) {
    int width = down.k();
    work.resize(size_t(rows) * size_t(width) * 3);
    T* product = work.data() + size_t(rows) * size_t(width) * 2;
    gate_up.run(x, gate_up.k(), rows, work.data(), 2 * width, nullptr, false);
    silu_mul(work.data(), 2 * width, product, width, rows, width, gate_up.dtype());
    down.run(product, width, rows, out, down.n(), nullptr, false);
}

template <class T>
void run(const Moe& layer, const T* x, int rows, T* y, const T* residual) {
    int hidden = layer.router->k();
    auto by_expert = route(layer, x, rows);
    std::vector<T> work, in, out(size_t(rows) * size_t(hidden)), total(size_t(rows) * size_t(hidden), T{});
    for (size_t e = 0; e < by_expert.size(); ++e) {
        const auto& chosen = by_expert[e];
        if (chosen.empty()) continue;
        in.resize(chosen.size() * size_t(hidden));
        for (size_t i = 0; i < chosen.size(); ++i) std::copy_n(x + int64_t(chosen[i].row) * hidden, hidden, in.data() + i * size_t(hidden));
        expert(*layer.gate_up[e], *layer.down[e], in.data(), int(chosen.size()), work, out.data());
        for (size_t i = 0; i < chosen.size(); ++i) {
            T* sum_row = total.data() + int64_t(chosen[i].row) * hidden;
            const T* row = out.data() + i * size_t(hidden);
            for (int c = 0; c < hidden; c += 16) {
                v16 scaled = rounded<T>(load_some(row + c, hidden - c) * splat(chosen[i].weight));
                store_some(sum_row + c, load_some(sum_row + c, hidden - c) + scaled, hidden - c);
            }
        }
    }
    std::vector<T> gate(static_cast<size_t>(rows));
    if (layer.shared_down) {
        expert(*layer.shared_gate_up, *layer.shared_down, x, rows, work, out.data());
        layer.shared_gate->run(x, hidden, rows, gate.data(), 1, nullptr, false);
    }
    for (int r = 0; r < rows; ++r) {
        v16 open = layer.shared_down ? rounded<T>(sigmoid(splat(to_float(gate[size_t(r)])))) : splat(0);
        for (int c = 0; c < hidden; c += 16) {
            int64_t at = int64_t(r) * hidden + c;
            int n = hidden - c;
            v16 v = load_some(total.data() + at, n);
            if (layer.shared_down) v = rounded<T>(v + rounded<T>(open * load_some(out.data() + at, n)));
            store_some(y + at, load_some(residual + at, n) + v, n);
        }
    }
}

}  // namespace

void moe(const Moe& layer, const void* x, int rows, void* y, const void* residual) {
    with_type(layer.router->dtype(), [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        run(layer, static_cast<const T*>(x), rows, static_cast<T*>(y), static_cast<const T*>(residual));
    });
}

}  // namespace tp
