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

// softmax(logits), padded with zeros; the second value is what each is still to be divided by.
std::pair<std::vector<float>, float> softmax(const float* logits, int n) {
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
    return {std::move(p), total};
}

std::vector<float> sigmoids(const float* logits, int n) {
    std::vector<float> p(size_t(n + 15) / 16 * 16);
    for (int i = 0; i < n; i += 16) store(p.data() + i, sigmoid(load_some(logits + i, n - i)));
    return p;
}

// What comes first in the choice: larger keys, the lower index among equals. NaN counts as 0, so that the order is one.
struct Larger {
    const float* keys;
    bool operator()(int a, int b) const {
        float x = keys[a] == keys[a] ? keys[a] : 0.0f, y = keys[b] == keys[b] ? keys[b] : 0.0f;
        return x != y ? x > y : a < b;
    }
};

// The `count` first of 0 .. n - 1 by their keys.
std::vector<int> first_of(const float* keys, int n, int count) {
    std::vector<int> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), Larger{keys});
    order.resize(size_t(count));
    return order;
}

// Puts the experts outside the top_groups last (-inf): an open one may have a key below zero, for its bias.
void leave_groups(const Routing& routing, std::vector<float>& keys, int n) {
    int each = n / routing.groups;
    std::vector<float> best(size_t(routing.groups));
    for (int g = 0; g < routing.groups; ++g) {
        const float* group = keys.data() + g * each;
        std::vector<int> two = first_of(group, each, std::min(2, each));
        for (int i : two) best[size_t(g)] += group[i];
    }
    std::vector<bool> kept(size_t(routing.groups));
    for (int g : first_of(best.data(), routing.groups, routing.top_groups)) kept[size_t(g)] = true;
    for (int i = 0; i < n; ++i)
        if (!kept[size_t(i / each)]) keys[size_t(i)] = -INFINITY;
}

// (expert, weight) of the chosen ones, in ascending order of expert.
std::vector<std::pair<int, float>> choose(const float* logits, int n, const Routing& routing) {
    auto [scores, total] = routing.sigmoid ? std::pair(sigmoids(logits, n), 1.0f) : softmax(logits, n);
    std::vector<float> changed;
    if (routing.bias || routing.groups > 1) changed = scores;
    if (routing.bias)
        for (int i = 0; i < n; ++i) changed[size_t(i)] = scores[size_t(i)] / total + routing.bias[i];
    if (routing.groups > 1) leave_groups(routing, changed, n);
    const std::vector<float>& keys = changed.empty() ? scores : changed;
    std::vector<std::pair<int, float>> chosen;
    float kept = 0;
    for (int i : first_of(keys.data(), n, routing.top_k)) {
        float weight = scores[size_t(i)] / total;
        kept += weight;
        chosen.emplace_back(i, weight);
    }
    if (routing.normalise)
        for (auto& c : chosen) c.second /= kept + routing.epsilon;
    if (routing.scale != 1.0f)
        for (auto& c : chosen) c.second *= routing.scale;
    std::sort(chosen.begin(), chosen.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    return chosen;
}

// y [rows, n] of x [rows, k].
template <class T>
std::vector<T> through(const Linear& linear, const T* x, int rows) {
    std::vector<T> y(size_t(rows) * size_t(linear.n()));
    linear.run(x, linear.k(), rows, y.data(), linear.n(), nullptr, false);
    return y;
}

// The logits of a float32 router, of x as float32.
template <class T>
std::vector<float> wide_logits_of(const Linear& router, const T* x, int rows) {
    std::vector<float> wide(size_t(rows) * size_t(router.k()));
    std::transform(x, x + wide.size(), wide.begin(), [](T value) { return to_float(value); });
    return through(router, wide.data(), rows);
}

template <class T, class L>
std::vector<std::vector<Choice>> route(const Moe& layer, const std::vector<L>& logits, int rows) {
    int n = layer.router->n();
    std::vector<std::vector<Choice>> by_expert(static_cast<size_t>(n));
    std::vector<float> wide(static_cast<size_t>(n));
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < n; ++i) wide[size_t(i)] = to_float(logits[size_t(r) * size_t(n) + size_t(i)]);
        for (auto [expert, weight] : choose(wide.data(), n, layer.routing))
            by_expert[size_t(expert)].push_back({r, rounded<T>(weight)});
    }
    return by_expert;
}

// out [rows, down.n()] = down(silu(gate) * up) or down(relu(up)^2); `work` is sized by it.
template <class T>
void expert(const Moe& layer, const Linear& gate_up, const Linear& down, const T* x, int rows, std::vector<T>& work, T* out) {
    int width = down.k(), in = gate_up.n();
    work.resize(size_t(rows) * size_t(width + in));
    T* product = work.data() + size_t(rows) * size_t(in);
    gate_up.run(x, gate_up.k(), rows, work.data(), in, nullptr, false);
    if (layer.squared_relu) squared_relu(work.data(), in, product, width, rows, width, gate_up.dtype());
    else silu_mul(work.data(), in, product, width, rows, width, layer.limit, gate_up.dtype());
    down.run(product, width, rows, out, down.n(), nullptr, false);
}

// The chosen experts of x [rows, width], weighted and added in ascending order.
template <class T>
std::vector<T> chosen_sum(const Moe& layer, const std::vector<std::vector<Choice>>& by_expert, const T* x, int rows,
                          std::vector<T>& work) {
    int width = layer.down.front()->n();
    std::vector<T> in, out(size_t(rows) * size_t(width)), total(size_t(rows) * size_t(width), T{});
    for (size_t e = 0; e < by_expert.size(); ++e) {
        const auto& chosen = by_expert[e];
        if (chosen.empty()) continue;
        in.resize(chosen.size() * size_t(width));
        for (size_t i = 0; i < chosen.size(); ++i) std::copy_n(x + int64_t(chosen[i].row) * width, width, in.data() + i * size_t(width));
        expert(layer, *layer.gate_up[e], *layer.down[e], in.data(), int(chosen.size()), work, out.data());
        for (size_t i = 0; i < chosen.size(); ++i) {
            T* sum_row = total.data() + int64_t(chosen[i].row) * width;
            const T* row = out.data() + i * size_t(width);
            for (int c = 0; c < width; c += 16) {
                v16 scaled = rounded<T>(load_some(row + c, width - c) * splat(chosen[i].weight));
                store_some(sum_row + c, load_some(sum_row + c, width - c) + scaled, width - c);
            }
        }
    }
    return total;
}

template <class T>
void run(const Moe& layer, const T* x, int rows, T* y, const T* residual) {
    int hidden = layer.router->k();
    const Linear& router = *layer.router;
    auto by_expert = router.dtype() == Dtype::f32 ? route<T>(layer, wide_logits_of(router, x, rows), rows)
                                                  : route<T>(layer, through(router, x, rows), rows);
    std::vector<T> work, narrow = layer.narrow ? through(*layer.narrow, x, rows) : std::vector<T>();
    std::vector<T> total = chosen_sum(layer, by_expert, layer.narrow ? narrow.data() : x, rows, work);
    if (layer.widen) total = through(*layer.widen, total.data(), rows);
    std::vector<T> shared, gate(static_cast<size_t>(rows));
    if (layer.shared_down) {
        shared.resize(size_t(rows) * size_t(hidden));
        expert(layer, *layer.shared_gate_up, *layer.shared_down, x, rows, work, shared.data());
        if (layer.shared_gate) gate = through(*layer.shared_gate, x, rows);
    }
    for (int r = 0; r < rows; ++r) {
        v16 open = layer.shared_gate ? rounded<T>(sigmoid(splat(to_float(gate[size_t(r)])))) : splat(1);
        for (int c = 0; c < hidden; c += 16) {
            int64_t at = int64_t(r) * hidden + c;
            int n = hidden - c;
            v16 v = load_some(total.data() + at, n);
            if (layer.shared_down) v = rounded<T>(v + rounded<T>(open * load_some(shared.data() + at, n)));
            store_some(y + at, load_some(residual + at, n) + v, n);
        }
    }
}

}  // namespace

void moe(const Moe& layer, const void* x, int rows, void* y, const void* residual) {
    with_type(layer.down.front()->dtype(), [&](auto* t) {
        using T = std::remove_pointer_t<decltype(t)>;
        run(layer, static_cast<const T*>(x), rows, static_cast<T*>(y), static_cast<const T*>(residual));
    });
}

}  // namespace tp
