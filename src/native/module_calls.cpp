// The kernels one by one: the layers' own objects (module.cpp) fuse them and fix the layout of what lies between; these take
// addresses, strides (elements, unless named bytes) and sizes, and nothing is implied. The arithmetic is the same code.
#include <pybind11/pybind11.h>

#include <cmath>
#include <memory>

#include "attention.h"
#include "binding.h"
#include "elementwise.h"
#include "gdn.h"
#include "linear.h"

namespace py = pybind11;
using namespace tp;

namespace {

class PackedLinear : public Linear {
  public:
    PackedLinear(Address weight, int dtype, int n, int k) : Linear(at(weight), k, nullptr, n, k, dtype_of(dtype)) {}
};

// A checkpoint offset of -1 means none; kernels say 0.
StepRows view_rows(int count, Address offsets, Address prefixes, Address slots, Address checkpoint_offsets,
                   Address checkpoint_slots, Address page_tables) {
    StepRows s;
    Rows& r = s.rows;
    r.count = count;
    r.offsets = at<int32_t>(offsets);
    r.starts = at<int32_t>(prefixes);
    r.slots = at<int32_t>(slots);
    r.checkpoint_slots = at<int32_t>(checkpoint_slots);
    r.tokens = count ? r.offsets[count] : 0;
    for (int i = 0; i < count; ++i) {
        int length = r.length(i), mark = at<int32_t>(checkpoint_offsets)[i];
        if (length < 0 || mark > length) throw py::value_error("a row's offsets must not fall, nor its checkpoint lie behind it");
        for (int t = 0; t < length; ++t) s.own_positions.push_back(r.starts[i] + t);
        s.own_ends.push_back(r.starts[i] + length);
        s.own_checkpoints.push_back(mark > 0 ? mark : 0);
        r.pages.push_back(at<const int32_t>(Address(at<int64_t>(page_tables)[i])));
    }
    r.positions = s.own_positions.data();
    r.ends = s.own_ends.data();
    r.checkpoint_offsets = s.own_checkpoints.data();
    return s;
}

void bind_rows(py::module_& m) {
    auto rows = py::reinterpret_borrow<py::class_<StepRows>>(m.attr("Rows"));
    rows.def(py::init(&view_rows), py::arg("n_rows"), py::arg("offsets_addr"), py::arg("prefix_lens_addr"),
             py::arg("slots_addr"), py::arg("ckpt_offsets_addr"), py::arg("ckpt_slots_addr"), py::arg("page_tables_addr"));
}

void bind_packed(py::module_& m) {
    py::class_<PackedLinear>(m, "PackedLinear")
        .def(py::init([](Address weight, int dtype, int n, int k) {
                 return std::make_unique<PackedLinear>(weight, dtype, n, k);
             }),
             py::arg("weight_addr"), py::arg("dtype"), py::arg("n"), py::arg("k"))
        .def_property_readonly("n", &Linear::n)
        .def_property_readonly("k", &Linear::k)
        .def_property_readonly("dtype", [](const PackedLinear& self) { return int(self.dtype()); })
        .def_property_readonly("nbytes", &Linear::bytes)
        .def(
            "run",
            [](const PackedLinear& self, Address x, int64_t ldx, Address y, int64_t ldy, int rows, Address bias) {
                py::gil_scoped_release release;
                self.run(at(x), ldx, rows, at(y), ldy, nullptr, false, at(bias));
            },
            py::arg("x_addr"), py::arg("x_stride"), py::arg("y_addr"), py::arg("y_stride"), py::arg("m"), py::arg("bias_addr") = 0)
        .def(
            "run_f32",
            [](const PackedLinear& self, Address x, int64_t ldx, Address y, int64_t ldy, int rows) {
                py::gil_scoped_release release;
                self.run(at(x), ldx, rows, at(y), ldy, nullptr, true);
            },
            py::arg("x_addr"), py::arg("x_stride"), py::arg("y_addr"), py::arg("y_stride"), py::arg("m"));
}

void bind_rowwise(py::module_& m) {
    m.def("rms_norm", [](Address x, int64_t ldx, Address y, int64_t ldy, int rows, int dim, Address weight, float eps,
                         bool zero_centered, int dtype) {
        py::gil_scoped_release release;
        rms_norm(at(x), ldx, at(y), ldy, rows, dim, at<float>(weight), eps, dtype_of(dtype),
                 zero_centered ? Norm::ZERO_CENTRED : Norm::ROUNDED);
    });
    m.def("rms_norm_gated", [](Address x, Address gate, Address y, int rows, int dim, Address weight, float eps, int dtype) {
        py::gil_scoped_release release;
        gated_rms_norm(at(x), dim, at(gate), dim, at(y), dim, rows, 1, dim, at<float>(weight), eps, dtype_of(dtype));
    });
    m.def("silu_mul", [](Address gate, int64_t ldg, Address up, int64_t ldu, Address out, int64_t ldo, int rows, int dim, int dtype) {
        py::gil_scoped_release release;
        silu_mul(at(gate), ldg, at(up), ldu, at(out), ldo, rows, dim, dtype_of(dtype));
    });
    m.def("sigmoid_mul", [](Address x, Address gate, int64_t ldg, Address out, int rows, int dim, int dtype) {
        py::gil_scoped_release release;
        sigmoid_mul(at(x), at(gate), ldg, at(out), rows, dim, dtype_of(dtype));
    });
}

void bind_recurrent(py::module_& m) {
    m.def("conv1d_silu", [](const StepRows& rows, Address x, int64_t ldx, Address y, int64_t ldy, Address weight, Address bias,
                            int channels, int kernel, Address base, int64_t slot_stride, int64_t offset, int conv_dtype, int dtype) {
        py::gil_scoped_release release;
        Conv layer{channels, kernel, at<float>(weight), at<float>(bias), kernel, 1, false, dtype_of(dtype)};
        causal_conv(layer, rows.rows, {at<char>(base) + offset, slot_stride, dtype_of(conv_dtype)}, at(x), ldx, at(y), ldy);
    });
    m.def("gated_delta_rule", [](const StepRows& rows, Address qkv, int64_t ldm, Address a, int64_t lda, Address b, int64_t ldb,
                                 Address a_log, Address dt_bias, Address out, int hk, int hv, int dk, int dv, Address base,
                                 int64_t slot_stride, int64_t offset, int ssm_dtype, int dtype) {
        if (hk < 1 || hv % hk) throw py::value_error("value heads must be a multiple of key heads");
        py::gil_scoped_release release;
        std::vector<float> rate(static_cast<size_t>(hv));
        for (int h = 0; h < hv; ++h) rate[size_t(h)] = -std::exp(at<float>(a_log)[h]);
        Gdn layer{hk, hv, dk, dv, 0, 0.0f, dtype_of(dtype), nullptr, rate.data(), at<float>(dt_bias), nullptr};
        SlotView ssm{at<char>(base) + offset, slot_stride, dtype_of(ssm_dtype)};
        delta_rule(layer, rows.rows, ssm, {at(qkv), at(b), at(a), ldm, ldb, lda}, at(out));
    });
}

KvView view_kv(Address base, int64_t page_stride, int64_t k_offset, int64_t v_offset, int64_t token_stride, int page_size,
               int heads, int dim, int dtype) {
    char* p = at<char>(base);
    return {p + k_offset, p + v_offset, page_stride, token_stride, page_size, heads, dim, dtype_of(dtype)};
}

void bind_attention(py::module_& m) {
    m.def("rope", [](Address x, int64_t token_stride, int64_t head_stride, int heads, int head_dim, int rotary_dim,
                     Address positions, int tokens, Address cosines, Address sines, int dtype) {
        if (rotary_dim % 2 || rotary_dim > head_dim) throw py::value_error("rotary_dim must be even and at most head_dim");
        py::gil_scoped_release release;
        rotate({heads, rotary_dim, token_stride, head_stride, at<float>(cosines), at<float>(sines)}, at(x), at<int64_t>(positions),
               tokens, dtype_of(dtype));
    });
    m.def("write_kv", [](const StepRows& rows, Address k, Address v, int64_t ldk, int64_t ldv, int kv_heads, int head_dim,
                         int page_size, Address base, int64_t page_stride, int64_t k_offset, int64_t v_offset,
                         int64_t token_stride, int dtype, int kv_dtype) {
        py::gil_scoped_release release;
        KvView kv = view_kv(base, page_stride, k_offset, v_offset, token_stride, page_size, kv_heads, head_dim, kv_dtype);
        write_kv(rows.rows, kv, at(k), ldk, at(v), ldv, dtype_of(dtype));
    });
    m.def("paged_attention", [](const StepRows& rows, Address q, int64_t q_token, int64_t q_head, Address out, int heads,
                                int kv_heads, int head_dim, float scale, int page_size, Address base, int64_t page_stride,
                                int64_t k_offset, int64_t v_offset, int64_t token_stride, int dtype, int kv_dtype) {
        if (kv_heads < 1 || heads % kv_heads) throw py::value_error("heads must be a multiple of kv_heads");
        py::gil_scoped_release release;
        KvView kv = view_kv(base, page_stride, k_offset, v_offset, token_stride, page_size, kv_heads, head_dim, kv_dtype);
        Attention layer{heads, kv_heads, head_dim, 0, scale, 0.0f, dtype_of(dtype), nullptr, nullptr, nullptr};
        attend(layer, rows.rows, kv, {at(q), nullptr, q_token, q_head, 0}, at(out));
    });
}

}  // namespace

void bind_calls(py::module_& m) {
    bind_rows(m);
    bind_packed(m);
    bind_rowwise(m);
    bind_recurrent(m);
    bind_attention(m);
}
